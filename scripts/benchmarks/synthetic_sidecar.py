"""Synthetic pairs whose draft is a sidecar: MTP heads in a file of their own, which read the target's cache.

As the other synthetic models (benchmarks.synthetic): blocks cost time and decide nothing, so the
target (gemma4) follows one cycle. The sidecar (gemma4-assistant) sees the next token's embedding E[i] of
the target and the target's hidden state. Its first projection brings the one to its own width, the same
for all (and of the other as much as `listens` says), where its output matrix follows the draft's cycle.
So each of its drafts is accepted with the rate that was chosen, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import (
    NOTHING,
    Shape,
    Tensor,
    draft_cycle,
    drawn_matrix,
    finish,
    output_rows,
    raw_type,
    target_cycle,
    write_sizes,
    write_vocabulary,
)

TINY_GEMMA = Shape(n_layer=2, n_embd=64, n_ff=128, n_head=2, n_vocab=512, n_ctx=2048)
TINY_SIDECAR = Shape(n_layer=2, n_embd=32, n_ff=64, n_head=2, n_vocab=512, n_ctx=2048)
WINDOW = 512

Put = Callable[[str, Tensor], None]


def write_with_sidecar(
    folder: Path,
    target: Shape = TINY_GEMMA,
    sidecar: Shape = TINY_SIDECAR,
    acceptance: float | tuple[float, float] = 0.8,
    *,
    seed: int = 0,
    listens: float = 0.0,
    window: int = WINDOW,
) -> tuple[Path, Path]:
    """Write a pair into `folder`: (target.gguf, mtp-target.gguf).

    acceptance: the rate with which its drafts are accepted.

    sidecar: its width is not the target's; its heads of attention are as wide as the target's. listens:
    how much it takes from the target's hidden state, by a random matrix: where that is much, its drafts
    are no longer the chosen ones. window: tokens that every layer but the last sees, in both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    cycle = target_cycle(target.n_vocab, seed)
    embedding = drawn_matrix(rng, target.n_vocab, target.n_embd, target.quant, 1.0)
    files = folder / "target.gguf", folder / "mtp-target.gguf"
    with _Writing(files[0], "gemma4", target, target, window) as file:
        file.put("token_embd.weight", embedding)
        file.put("output.weight", output_rows(embedding, target, cycle))
        file.blocks(rng)
    with _Writing(files[1], "gemma4-assistant", sidecar, target, window) as file:
        first = rng.standard_normal((sidecar.n_embd, target.n_embd)) / target.n_embd
        heard = rng.standard_normal(first.shape) * target.n_embd**-0.5 * listens
        file.whole("nextn.pre_projection.weight", np.concatenate([first, heard], axis=1))
        last = rng.standard_normal((target.n_embd, sidecar.n_embd)) * sidecar.n_embd**-0.5
        file.whole("nextn.post_projection.weight", last)
        projected = _values(embedding, target) @ first.T
        projected /= np.sqrt(np.mean(projected**2, axis=1, keepdims=True))
        guess = draft_cycle(cycle, acceptance, seed + 1)
        file.whole(
            "token_embd.weight", output_rows(projected, replace(sidecar, quant="f32"), guess)
        )
        file.blocks(rng)
    return files


def _values(matrix: Tensor, shape: Shape) -> Tensor:
    import gguf

    kind = raw_type(shape.quant)
    return matrix if kind is None else np.asarray(gguf.quants.dequantize(matrix, kind))


class _Writing:
    """One GGUF, being written. target: whose cache it reads, which may be its own."""

    def __init__(
        self, path: Path, architecture: str, shape: Shape, target: Shape, window: int
    ) -> None:
        import gguf

        self._writer: Any = gguf.GGUFWriter(path, architecture)
        self._kind = raw_type(shape.quant)
        self._shape, self._own = shape, architecture == "gemma4"
        self._head = target.n_embd // target.n_head
        self._kv = target.n_head_kv or target.n_head
        self._numbers(target, window)

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_error: object) -> None:
        finish(self._writer)

    def _numbers(self, target: Shape, window: int) -> None:
        writer, shape, head = self._writer, self._shape, self._head
        sizes = replace(shape, n_ctx=target.n_ctx, n_head_kv=self._kv)
        name = "synthetic-gemma" if self._own else "synthetic-sidecar"
        write_sizes(writer, sizes, name, head)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_key_length_swa(head)
        writer.add_value_length_swa(head)
        writer.add_rope_dimension_count_swa(head)
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([at < shape.n_layer - 1 for at in range(shape.n_layer)])
        writer.add_shared_kv_layers(0)
        if self._own:
            writer.add_embedding_length_per_layer_input(0)
        else:
            writer.add_embedding_length_out(target.n_embd)
            writer.add_nextn_predict_layers(shape.n_layer)
        write_vocabulary(writer, shape.n_vocab)

    def put(self, name: str, data: Tensor) -> None:
        self._writer.add_tensor(name, data, raw_dtype=self._kind)

    def whole(self, name: str, data: Tensor) -> None:
        """Never quantized."""
        small = self._shape.quant == "f32" or data.ndim == 1
        self._writer.add_tensor(name, data.astype(np.float32 if small else np.float16))

    def blocks(self, rng: np.random.Generator) -> None:
        """All of them, and what stands behind them; what they add is next to nothing."""
        shape, head = self._shape, self._head
        width, ff, std = shape.n_embd, shape.n_ff, shape.n_embd**-0.5
        matrices = {
            "attn_q": (head * shape.n_head, width, std),
            "attn_output": (width, head * shape.n_head, std),
            "ffn_gate": (ff, width, std),
            "ffn_up": (ff, width, std),
            "ffn_down": (width, ff, ff**-0.5),
        }
        norms = {"attn_norm": width, "attn_q_norm": head, "ffn_norm": width}
        if self._own:
            matrices |= dict.fromkeys(("attn_k", "attn_v"), (self._kv * head, width, std))
            norms["attn_k_norm"] = head
        for layer in range(shape.n_layer):
            for part, (rows, columns, deviation) in matrices.items():
                data = drawn_matrix(rng, rows, columns, shape.quant, deviation)
                self.put(f"blk.{layer}.{part}.weight", data)
            for part, size in norms.items():
                self.whole(f"blk.{layer}.{part}.weight", np.ones(size))
            for part in ("post_attention_norm", "post_ffw_norm"):
                self.whole(f"blk.{layer}.{part}.weight", np.full(width, NOTHING))
            self.whole(f"blk.{layer}.layer_output_scale.weight", np.ones(1))
        self.whole("rope_freqs.weight", np.ones(head // 2))
        self.whole("output_norm.weight", np.ones(width))
