"""The llama architecture, exactly as llama.cpp computes it, small enough to read at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOOK_BACK = ((1, 2, 3), (1,))
"""Of the first blocks: how far back their first heads look."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; the names are those of GGUF's llama keys."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    tied: bool = False
    """Whether the output matrix is the embeddings; it spares a small draft most of its parameters."""
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        attention = 2 * self.width * (self.width + self.kv_heads * self.head_width)
        layer = attention + 3 * self.width * self.feed_forward + 2 * self.width
        biases = self.width + self.kv_heads * self.head_width
        tables = (1 if self.tied else 2) * self.vocabulary * self.width
        return tables + self.layers * (layer + biases) + self.width


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rope_frequencies(head_width: int, base: float) -> Tensor:
    """Radians per position of each pair, [head_width / 2]."""
    return base ** (-torch.arange(0, head_width, 2).float() / head_width)


def rope_tables(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head_width / 2]."""
    frequencies = rope_frequencies(head_width, base)
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
        self.attn_q = nn.Linear(shape.width, shape.width)
        self.attn_k = nn.Linear(shape.width, kv_width)
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


@torch.no_grad()
def look_back(block: Block, offsets: tuple[int, ...]) -> None:
    """Let the first heads of `block` attend `offsets` tokens back, whatever the tokens are.

    Copying a name from the context needs a head that tells every token what stood before it (Olsson et al.
    2022, "In-context learning and induction heads").  From random
    weights ours had not found it after 4.6 M tokens; here it is given, and training refines it.  The biases are chosen so
    that RoPE turns query and key into each other exactly `offset` positions apart.
    """
    shape = block.shape
    width = shape.head_width
    pairs = width // 2
    strength = 8.0 * (1 - torch.arange(pairs).float() / (pairs * 0.4)).clamp(min=0)
    shared = shape.heads // shape.kv_heads
    for head, offset in enumerate(offsets):
        query = slice(head * width, (head + 1) * width)
        first = head // shared * width
        key = slice(first, first + width)
        block.attn_q.weight[query] = 0.0
        block.attn_k.weight[key] = 0.0
        angles = offset * rope_frequencies(width, shape.rope_base)
        turned = torch.stack((strength * angles.cos(), -strength * angles.sin()), -1)
        block.attn_q.bias[query] = turned.flatten()
        block.attn_k.bias[key] = torch.stack((strength, torch.zeros(pairs)), -1).flatten()


OUTPUT_SCALE = 0.05
"""How much smaller than embeddings of unit size the output matrix begins."""


class Llama(nn.Module):
    """Decoder with embeddings of unit size, so that no block's output drowns them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = RMSNorm(shape.width, shape.epsilon)
        self.output = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        # Blocks that begin by adding nothing, beside embeddings as large as what the blocks will add: small
        # embeddings drown in the first block's output, and nothing can be copied from them.
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(parameter)
            elif name.startswith("blk") and parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
        nn.init.normal_(self.token_embd.weight)
        if self.output is None:
            nn.init.constant_(self.output_norm.weight, OUTPUT_SCALE)
        else:
            self.output.weight.data.copy_(OUTPUT_SCALE * self.token_embd.weight.data)
        for block, offsets in zip(self.blk, LOOK_BACK, strict=False):
            look_back(block, offsets)

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
        table = self.token_embd if self.output is None else self.output
        return F.linear(hidden, table.weight)
