"""The llama architecture, exactly as llama.cpp computes it, small enough to read at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; the names are those of GGUF's llama keys."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        attention = 2 * self.width * (self.width + self.kv_heads * self.head_width)
        layer = attention + 3 * self.width * self.feed_forward + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rope_tables(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head_width / 2]."""
    frequencies = base ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.arange(length).float()[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs, as llama.cpp does for the llama architecture: x [..., T, head_width]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kv_width = shape.kv_heads * shape.head_width
        self.shape = shape
        self.attn_norm = RMSNorm(shape.width, shape.epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = RMSNorm(shape.width, shape.epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self._attention(self.attn_norm(x), cos, sin, mask)
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        width = self.shape.head_width

        def split(y: Tensor) -> Tensor:  # [B, T, heads * width] -> [B, heads, T, width]
            return y.view(rows, length, -1, width).transpose(1, 2)

        q = rotate(split(self.attn_q(x)), cos, sin)
        k = rotate(split(self.attn_k(x)), cos, sin)
        v = split(self.attn_v(x))
        shared = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.attn_output(y.transpose(1, 2).reshape(rows, length, -1))


class Llama(nn.Module):
    """Decoder with tied input and output embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = RMSNorm(shape.width, shape.epsilon)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                scale = (2 * shape.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def hidden(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised last hidden states [B, T, width] of `tokens` [B, T]; `mask` [B, 1, T, T]."""
        cos, sin = rope_tables(tokens.shape[1], self.shape.head_width, self.shape.rope_base)
        cos, sin = cos.to(tokens.device), sin.to(tokens.device)
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, cos, sin, mask)
        normed: Tensor = self.output_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)
