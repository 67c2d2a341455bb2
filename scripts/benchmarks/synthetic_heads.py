"""Synthetic models that carry their draft with them: MTP heads in the target's file.

As the other synthetic models (benchmarks.synthetic): blocks cost time and decide nothing, so the
target follows one cycle. The head is a block of its own behind the trunk's: it sees the next token's
embedding E[i] and the target's hidden state, of which `eh_proj` lets the first through (and of the
second as much as `listens` says), and its own output matrix follows the draft's cycle. So each of its
drafts is accepted with the rate that was chosen, whatever the depth.

"glm4moe" has attention everywhere, "qwen35" (hybrid) a recurrent state in every other layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.synthetic import (
    NOTHING,
    Cycle,
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

Architecture = Literal["glm4moe", "qwen35"]
TINY_HEADS = Shape(n_layer=2, n_embd=64, n_ff=128, n_head=2, n_vocab=512, n_ctx=2048)
_EXPERTS = 2
_STATE, _KERNEL, _RANK, _GROUPS = 128, 4, 2, 2  # of the recurrent layers

Matrix = tuple[
    str, tuple[int, ...], float
]  # name, dimensions with the rows' length last, deviation


def write_heads(
    path: Path,
    shape: Shape = TINY_HEADS,
    acceptance: float | tuple[float, float] = 0.8,
    architecture: Architecture = "glm4moe",
    *,
    seed: int = 0,
    listens: float = 0.0,
    hollow: bool = False,
) -> Path:
    """Write one GGUF whose head's drafts are accepted with the rate `acceptance`.

    listens: how much the head's state takes from the target's hidden state, by a random matrix: where
    that is much, its drafts are no longer the chosen ones. hollow: it names a head and holds none.
    """
    heads = None if hollow else path
    cycle = target_cycle(shape.n_vocab, seed)
    _write_files(heads, path, shape, cycle, acceptance, architecture, seed, listens, named=True)
    return path


def write_trunk(
    path: Path, shape: Shape, cycle: Cycle, architecture: Architecture, *, seed: int = 0
) -> Path:
    """Write a target that follows `cycle` and has no heads."""
    _write_files(None, path, shape, cycle, 0.0, architecture, seed, 0.0, named=False)
    return path


def write_heads_apart(
    target: Path,
    heads: Path,
    shape: Shape = TINY_HEADS,
    acceptance: float | tuple[float, float] = 0.8,
    architecture: Architecture = "glm4moe",
    *,
    seed: int = 0,
    listens: float = 0.0,
) -> None:
    """Write the model of `write_heads` as two files, `target` without its head and `heads` without a trunk.

    llama.cpp's converter makes such files with --no-mtp and --mtp.
    """
    cycle = target_cycle(shape.n_vocab, seed)
    _write_files(heads, target, shape, cycle, acceptance, architecture, seed, listens, named=False)


def _write_files(
    heads: Path | None,
    target: Path,
    shape: Shape,
    cycle: Cycle,
    acceptance: float | tuple[float, float],
    architecture: Architecture,
    seed: int,
    listens: float,
    *,
    named: bool,
) -> None:
    """Write the target, and its head into the same file or another, or nowhere if `heads` is None.

    named: whether the target's metadata name a head.
    """
    kind = raw_type(shape.quant)
    rng = np.random.default_rng(seed)
    apart = heads is not None and heads != target
    trunk = _begin(target, shape, architecture, n_heads=int(named))
    head = _begin(heads, shape, architecture, n_heads=1) if apart and heads else trunk
    both = [trunk, head] if apart else [trunk]
    writers = both  # of the tensors that come next

    def put(name: str, data: Tensor) -> None:
        for writer in writers:
            writer.add_tensor(name, data, raw_dtype=kind)

    def whole(name: str, data: Tensor) -> None:
        for writer in writers:
            writer.add_tensor(name, data if data.dtype == np.float16 else data.astype(np.float32))

    embedding = drawn_matrix(rng, shape.n_vocab, shape.n_embd, shape.quant, 1.0)
    put("token_embd.weight", embedding)
    for layer in range(shape.n_layer + (heads is not None)):
        writers = [trunk if layer < shape.n_layer else head]
        for name, size, std in _matrices(shape, architecture, layer):
            rows = int(np.prod(size[:-1]))
            data = drawn_matrix(rng, rows, size[-1], shape.quant, std)
            put(f"blk.{layer}.{name}", data.reshape(*size[:-1], -1))
        _write_small(whole, rng, shape, architecture, layer)
    writers = both
    whole("output_norm.weight", np.ones(shape.n_embd))
    put("output.weight", output_rows(embedding, shape, cycle))
    if heads is not None:
        writers = [head]
        guess = draft_cycle(cycle, acceptance, seed + 1)
        _write_head(put, whole, rng, shape, embedding, guess, listens)
    for writer in both:
        finish(writer)


def _begin(path: Path, shape: Shape, architecture: Architecture, n_heads: int) -> Any:
    """Return a writer that has the metadata of a model with so many heads."""
    import gguf

    writer: Any = gguf.GGUFWriter(path, architecture)
    head = shape.n_embd // shape.n_head
    write_sizes(writer, replace(shape, n_layer=shape.n_layer + n_heads), "synthetic-heads")
    if n_heads:
        writer.add_nextn_predict_layers(n_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    write_vocabulary(writer, shape.n_vocab, code=shape.code)
    if architecture == "glm4moe":
        writer.add_leading_dense_block_count(shape.n_layer)  # the head alone has experts
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(_EXPERTS)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(shape.n_ff // 4)
        return writer
    writer.add_rope_dimension_sections([head // 4] * 4)
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(_KERNEL)
    writer.add_ssm_inner_size(_STATE * _RANK)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)
    writer.add_ssm_group_count(_GROUPS)
    return writer


def _matrices(shape: Shape, architecture: Architecture, layer: int) -> Iterator[Matrix]:
    """Return the quantized matrices of a block; products that are added to the token are close to nothing."""
    width, ff, std = shape.n_embd, shape.n_ff, shape.n_embd**-0.5
    kv = width // shape.n_head * (shape.n_head_kv or shape.n_head)
    is_head, gated = layer == shape.n_layer, architecture == "qwen35"
    if gated and not is_head and layer % 2 == 0:
        inner, key = _STATE * _RANK, _STATE * _GROUPS
        yield "attn_qkv.weight", (2 * key + inner, width), std
        yield "attn_gate.weight", (inner, width), std
        yield "ssm_out.weight", (width, inner), std * NOTHING
    else:
        yield "attn_q.weight", ((1 + gated) * width, width), std
        yield "attn_k.weight", (kv, width), std
        yield "attn_v.weight", (kv, width), std
        yield "attn_output.weight", (width, width), std * NOTHING
    if is_head and not gated:
        few = ff // 4
        for part, first, last in (("exps", (_EXPERTS,), few), ("shexp", (), few)):
            yield f"ffn_gate_{part}.weight", (*first, last, width), std
            yield f"ffn_up_{part}.weight", (*first, last, width), std
            yield f"ffn_down_{part}.weight", (*first, width, last), std * NOTHING
    else:
        yield "ffn_gate.weight", (ff, width), std
        yield "ffn_up.weight", (ff, width), std
        yield "ffn_down.weight", (width, ff), std * NOTHING


def _write_small(
    add_tensor: Callable[[str, Tensor], None],
    rng: np.random.Generator,
    shape: Shape,
    architecture: Architecture,
    layer: int,
) -> None:
    """Write what is never quantized."""
    width, name = shape.n_embd, f"blk.{layer}"
    add_tensor(f"{name}.attn_norm.weight", np.ones(width))
    add_tensor(f"{name}.post_attention_norm.weight", np.ones(width))
    is_head = layer == shape.n_layer
    if architecture == "glm4moe":
        if is_head:
            add_tensor(f"{name}.ffn_gate_inp.weight", rng.standard_normal((_EXPERTS, width)))
            add_tensor(f"{name}.exp_probs_b.bias", np.zeros(_EXPERTS))
        return
    if layer % 2 or is_head:
        for part in ("q", "k"):
            add_tensor(f"{name}.attn_{part}_norm.weight", np.ones(width // shape.n_head))
        return
    channels = 2 * _STATE * _GROUPS + _STATE * _RANK
    add_tensor(f"{name}.ssm_conv1d.weight", rng.standard_normal((channels, _KERNEL)) / 2)
    add_tensor(f"{name}.ssm_dt.bias", np.zeros(_RANK))
    # Rates of decay are negative: a state that grows would swamp everything.
    add_tensor(f"{name}.ssm_a", -np.abs(rng.standard_normal(_RANK)) - 0.1)
    for part in ("beta", "alpha"):
        add_tensor(f"{name}.ssm_{part}.weight", rng.standard_normal((_RANK, width)) * width**-0.5)
    add_tensor(f"{name}.ssm_norm.weight", np.ones(_STATE))


def _write_head(
    put: Callable[[str, Tensor], None],
    add_tensor: Callable[[str, Tensor], None],
    rng: np.random.Generator,
    shape: Shape,
    embedding: Tensor,
    cycle: Cycle,
    listens: float,
) -> None:
    width, name = shape.n_embd, f"blk.{shape.n_layer}.nextn"
    heard = rng.standard_normal((width, width)) * width**-0.5 * listens
    halves = np.concatenate([np.eye(width), heard], axis=1)
    add_tensor(
        f"{name}.eh_proj.weight", halves.astype(np.float32 if shape.quant == "f32" else np.float16)
    )
    add_tensor(f"{name}.enorm.weight", np.ones(width))
    add_tensor(f"{name}.hnorm.weight", np.ones(width))
    put(f"{name}.shared_head_head.weight", output_rows(embedding, shape, cycle))
