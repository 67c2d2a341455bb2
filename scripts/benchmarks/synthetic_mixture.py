"""Synthetic mixtures of experts whose router follows the text, or nothing at all.

As the other synthetic models (benchmarks.synthetic): blocks cost time and decide nothing, so each follows a
cycle. A token's embedding is partly that of its group, which are the next tokens on the cycle, and the router
reads nothing else. So the rows of a pass over a text of the cycle choose the same experts as far as `sticky`
says, and rows of tokens from anywhere choose independently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import (
    NOTHING,
    Cycle,
    Shape,
    drawn_matrix,
    finish,
    follow,
    output_rows,
    write_sizes,
    write_vocabulary,
)

_ARCHITECTURE = "hy_v3"  # its experts may be fused, and beside a shared one
_GROUP = (
    16  # tokens that follow each other on the cycle and have a part of their embedding in common
)
_MXFP4_BLOCK, _Q4_K_BLOCK = 32, 256
_SOFTMAX = 1  # llama.cpp's number of the gating function


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of each layer beside `Shape`, whose n_ff is that of one expert.

    sticky: the share of a token's embedding that is its group's. fused: gate and up are one matrix.
    """

    experts: int = 64
    used: int = 4
    shared: bool = True
    fused: bool = False
    quant: Literal["mxfp4", "q4_k"] = "q4_k"
    sticky: float = 0.0


def write_mixture(
    path: Path, shape: Shape, mixture: Mixture, cycle: Cycle, *, seed: int = 0
) -> Path:
    """Write one GGUF that follows `cycle` greedily. The type of `shape` is that of all but the experts."""
    import gguf

    rng = np.random.default_rng(seed)
    writer: Any = gguf.GGUFWriter(path, _ARCHITECTURE)
    head = shape.n_embd // shape.n_head
    write_sizes(writer, shape, "synthetic-mixture")
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_expert_count(mixture.experts)
    writer.add_expert_used_count(mixture.used)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_uint32(f"{_ARCHITECTURE}.expert_gating_func", _SOFTMAX)
    if mixture.shared:
        writer.add_expert_shared_feed_forward_length(shape.n_ff)
    write_vocabulary(writer, shape.n_vocab, code=shape.code)
    kind = gguf.GGMLQuantizationType[shape.quant.upper()]
    experts_kind = gguf.GGMLQuantizationType[mixture.quant.upper()]
    embedding = _draw_embedding(rng, shape, mixture.sticky, cycle)
    stored = gguf.quants.quantize(embedding, kind)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    for layer in range(shape.n_layer):
        for name, rows, columns, deviation in _list_matrices(shape, mixture):
            data = drawn_matrix(rng, rows, columns, shape.quant, deviation)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
        for name, rows, columns, deviation in _list_experts(shape, mixture):
            data = _draw_experts(rng, mixture, rows, columns, deviation)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=experts_kind)
        router = rng.standard_normal((mixture.experts, shape.n_embd)) * shape.n_embd**-0.5
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router.astype(np.float32))
        for name, size in (
            ("attn", shape.n_embd),
            ("ffn", shape.n_embd),
            ("attn_q", head),
            ("attn_k", head),
        ):
            writer.add_tensor(f"blk.{layer}.{name}_norm.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.n_embd, np.float32))
    writer.add_tensor("output.weight", output_rows(stored, shape, cycle), raw_dtype=kind)
    finish(writer)
    return path


def _draw_embedding(
    rng: np.random.Generator, shape: Shape, sticky: float, cycle: Cycle
) -> npt.NDArray[np.float32]:
    """Return the embedding (n_vocab, n_embd) of variance one."""
    order = np.array(follow(cycle, 0, len(np.unique(cycle))))
    group = np.zeros(shape.n_vocab, dtype=np.int64)
    group[order] = np.arange(len(order)) // _GROUP
    own, common = (
        rng.standard_normal((count, shape.n_embd), dtype=np.float32)
        for count in (shape.n_vocab, group.max() + 1)
    )
    return np.asarray((1 - sticky) ** 0.5 * own + sticky**0.5 * common[group], dtype=np.float32)


def _list_matrices(shape: Shape, mixture: Mixture) -> Iterator[tuple[str, int, int, float]]:
    """Yield the matrices of a block that every row reads: name, rows, columns, deviation."""
    width, ff, std = shape.n_embd, shape.n_ff, shape.n_embd**-0.5
    kv = width // shape.n_head * (shape.n_head_kv or shape.n_head)
    yield "attn_q", width, width, std
    yield "attn_k", kv, width, std
    yield "attn_v", kv, width, std
    yield "attn_output", width, width, std * NOTHING
    if mixture.shared:
        yield "ffn_gate_shexp", ff, width, std
        yield "ffn_up_shexp", ff, width, std
        yield "ffn_down_shexp", width, ff, std * NOTHING


def _list_experts(shape: Shape, mixture: Mixture) -> Iterator[tuple[str, int, int, float]]:
    width, ff, std = shape.n_embd, shape.n_ff, shape.n_embd**-0.5
    if mixture.fused:
        yield "ffn_gate_up_exps", 2 * ff, width, std
    else:
        yield "ffn_gate_exps", ff, width, std
        yield "ffn_up_exps", ff, width, std
    yield "ffn_down_exps", width, ff, std * NOTHING


def _draw_experts(
    rng: np.random.Generator, mixture: Mixture, rows: int, columns: int, deviation: float
) -> npt.NDArray[np.uint8]:
    """Return matrices (experts, rows, bytes of a row) of about this deviation, drawn as they are stored."""
    numbers = mixture.experts * rows * columns
    if mixture.quant == "mxfp4":  # a block is an exponent of two and 32 nibbles
        blocks = rng.integers(0, 256, (numbers // _MXFP4_BLOCK, 17), dtype=np.uint8)
        blocks[:, 0] = 127 + round(np.log2(deviation)) - 2
    else:  # scales of 16 and of the minima, 12 bytes of scales of 32 each, and 256 nibbles
        blocks = rng.integers(0, 256, (numbers // _Q4_K_BLOCK, 144), dtype=np.uint8)
        scale = np.array([deviation / 150, deviation / 20], dtype=np.float16)
        blocks[:, :4] = scale.view(np.uint8)
    return blocks.reshape(mixture.experts, rows, -1)
