"""Synthetic targets of the architectures that makers of models publish sidecars for, and those sidecars.

As the other synthetic models (benchmarks.synthetic): blocks cost time and decide nothing, so each follows a
cycle, and a sidecar that reads its layers drafts for each alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.synthetic import (
    NOTHING,
    Cycle,
    Shape,
    drawn_matrix,
    finish,
    output_rows,
    raw_type,
    write_model,
    write_sizes,
    write_vocabulary,
)
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import write_trunk

# With attention everywhere; the same, but llama.cpp does not show its layers; with a recurrent state in every
# other layer; and with experts, attention sinks, and a sliding window in every other layer.
TargetArchitecture = Literal["llama", "qwen3", "qwen2", "qwen35", "gpt-oss"]
LayerReader = Literal["eagle3", "dflash", "dflash2", "dspark"]
_EXPERTS, _USED = 4, 2
_WINDOW = 128


def write_target(
    path: Path,
    shape: Shape,
    cycle: Cycle,
    architecture: TargetArchitecture = "llama",
    *,
    seed: int = 0,
) -> Path:
    """Write one GGUF that follows `cycle` greedily."""
    if architecture == "llama":
        return write_model(path, shape, cycle, seed=seed)
    if architecture == "qwen35":
        return write_trunk(path, shape, cycle, architecture, seed=seed)
    import gguf

    rng, kind = np.random.default_rng(seed), raw_type(shape.quant)
    writer: Any = gguf.GGUFWriter(path, architecture)
    head = shape.n_embd // shape.n_head
    write_sizes(writer, shape, f"synthetic-{architecture}")
    writer.add_key_length(head)
    writer.add_value_length(head)
    write_vocabulary(writer, shape.n_vocab, code=shape.code)
    if architecture == "gpt-oss":
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(_USED)
        writer.add_expert_feed_forward_length(shape.n_ff // _USED)
        writer.add_sliding_window(_WINDOW)
    embedding = drawn_matrix(rng, shape.n_vocab, shape.n_embd, shape.quant, 1.0)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    for layer in range(shape.n_layer):
        for name, size, deviation in _matrices(shape, architecture):
            data = drawn_matrix(rng, int(np.prod(size[:-1])), size[-1], shape.quant, deviation)
            shaped = data.reshape(*size[:-1], -1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", shaped, raw_dtype=kind)
        for name, values in _small_tensors(shape, architecture, rng):
            writer.add_tensor(f"blk.{layer}.{name}", values.astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.n_embd, np.float32))
    writer.add_tensor("output.weight", output_rows(embedding, shape, cycle), raw_dtype=kind)
    finish(writer)
    return path


def write_layer_reader(
    path: Path,
    kind: LayerReader,
    target: Shape,
    cycle: Cycle,
    acceptance: float | tuple[float, float],
    architecture: TargetArchitecture = "llama",
    **options: Any,
) -> Path:
    """Write a sidecar that reads layers of a target of `write_target`. options: those of its kind."""
    if kind == "eagle3":
        if architecture == "qwen2":
            options["layers"] = (target.n_layer,) * 3
        return write_eagle(path, target, cycle, acceptance, **options)
    if architecture == "qwen35":  # it reads pictures, so that its positions have parts
        options["sections"] = True
    return write_block(path, target, cycle, acceptance, kind=kind, **options)


def _matrices(
    shape: Shape, architecture: TargetArchitecture
) -> list[tuple[str, tuple[int, ...], float]]:
    """Return the quantized matrices of a block: name, shape with the rows' length last, deviation."""
    width, std = shape.n_embd, shape.n_embd**-0.5
    kv = width // shape.n_head * (shape.n_head_kv or shape.n_head)
    moe = architecture == "gpt-oss"
    ff, experts, end = (shape.n_ff // _USED, (_EXPERTS,), "_exps") if moe else (shape.n_ff, (), "")
    return [
        ("attn_q", (width, width), std),
        ("attn_k", (kv, width), std),
        ("attn_v", (kv, width), std),
        ("attn_output", (width, width), std * NOTHING),
        (f"ffn_gate{end}", (*experts, ff, width), std),
        (f"ffn_up{end}", (*experts, ff, width), std),
        (f"ffn_down{end}", (*experts, width, ff), std * NOTHING),
    ]


def _small_tensors(
    shape: Shape, architecture: TargetArchitecture, rng: np.random.Generator
) -> list[tuple[str, Any]]:
    """Return what is never quantized in a block."""
    width, head = shape.n_embd, shape.n_embd // shape.n_head
    attention_norm = ("attn_norm.weight", np.ones(width))
    if architecture == "qwen3":
        norms = [(f"attn_{part}_norm.weight", np.ones(head)) for part in ("q", "k")]
        return [attention_norm, ("ffn_norm.weight", np.ones(width)), *norms]
    kv = head * (shape.n_head_kv or shape.n_head)
    if architecture == "qwen2":
        widths = {"attn_q": width, "attn_k": kv, "attn_v": kv}
        named = [(f"{name}.bias", np.zeros(size)) for name, size in widths.items()]
        return [attention_norm, ("ffn_norm.weight", np.ones(width)), *named]
    biases = {
        "attn_q": (width,),
        "attn_k": (kv,),
        "attn_v": (kv,),
        "attn_output": (width,),
        "ffn_gate_inp": (_EXPERTS,),
        "ffn_gate_exps": (_EXPERTS, shape.n_ff // _USED),
        "ffn_up_exps": (_EXPERTS, shape.n_ff // _USED),
        "ffn_down_exps": (_EXPERTS, width),
    }
    return [
        attention_norm,
        ("post_attention_norm.weight", np.ones(width)),
        ("attn_sinks.weight", rng.standard_normal(shape.n_head)),
        ("ffn_gate_inp.weight", rng.standard_normal((_EXPERTS, width)) * width**-0.5),
        *((f"{name}.bias", np.zeros(size)) for name, size in biases.items()),
    ]
