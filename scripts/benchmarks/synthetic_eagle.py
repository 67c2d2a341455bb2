"""Synthetic pairs whose draft is an EAGLE-3 sidecar: a layer that reads three layers of the target.

As the other synthetic models (benchmarks.synthetic): the target's blocks cost time and decide nothing, so it
follows one cycle. The sidecar sees the next token's embedding E[i] in its attention alone. Keys and queries
are embeddings, and so large that a token attends to itself (and to its equals). The attention's output is
then E[i], of which the residual gets `_GAIN` times as much as of the target's layers, and the output matrix
follows the draft's cycle. So each of its drafts is accepted with the rate that was chosen, whatever the
depth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import (
    NOTHING,
    Cycle,
    Shape,
    Tensor,
    add_sidecar_tensor,
    draft_cycle,
    drawn_matrix,
    finish,
    output_rows,
    write_sizes,
    write_vocabulary,
)

_SHARPNESS = 6.0  # of the attention: a token's score with itself is some 16 times its square
_GAIN = 30.0  # what the residual gets of the token's embedding
N_READ = 3  # layers of the target that llama.cpp's graph expects


def write_eagle(
    path: Path,
    target: Shape,
    cycle: Cycle,
    acceptance: float | tuple[float, float] = 0.8,
    *,
    layers: tuple[int, int, int] | None = None,
    n_known: int = 0,
    seed: int = 0,
    listens: float = 0.0,
    recalls: bool = False,
) -> Path:
    """Write the sidecar of a target that follows `cycle`.

    layers: those of the target that it reads; by default the first, the middle and the last. n_known: it
    proposes only the first tokens of the vocabulary (d2t), 0: all. listens: how much it takes from the
    target's layers: where that is much, its drafts are no longer the chosen ones. recalls: it knows no cycle,
    and drafts what stood behind the last token where it sees that token before; the target must not be
    quantized. The sidecar of a quantized target is Q8_0.
    """
    import gguf

    shape = replace(target, n_layer=1, quant="f32", n_head_kv=0)
    rng = np.random.default_rng(seed)
    width = shape.n_embd
    writer: Any = gguf.GGUFWriter(path, "eagle3")
    # Where it recalls, how far away a key is must not matter.
    write_sizes(writer, shape, "synthetic-eagle", head=2 if recalls else 0)
    write_vocabulary(writer, shape.n_vocab, code=shape.code)
    last = target.n_layer - 1
    writer.add_array("eagle3.target_layers", list(layers or (0, last // 2, last)))
    writer.add_uint32("eagle3.target_hidden_size", target.n_embd)
    writer.add_bool("eagle3.norm_before_residual", True)

    def add(name: str, data: Tensor) -> None:
        add_sidecar_tensor(writer, name, data, target)

    embedding = drawn_matrix(rng, shape.n_vocab, width, "f32", 1.0)
    token_half = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
    std = width**-0.5
    add("token_embd.weight", embedding)
    fuse, attention_keys = rng.standard_normal((width, N_READ * target.n_embd)) * std, token_half
    turn = np.eye(width)
    if recalls:
        # A state is the embedding of the token before, and the key. That of a draft is turned, so that it is
        # no key.
        fuse = np.concatenate([np.eye(width), np.zeros((width, 2 * width))], axis=1)
        attention_keys = np.roll(token_half, width, axis=1)
        turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
    add("fc.weight", fuse)
    add("blk.0.attn_q.weight", token_half * _SHARPNESS)
    add("blk.0.attn_k.weight", attention_keys * _SHARPNESS)
    add("blk.0.attn_v.weight", token_half)
    add("blk.0.attn_output.weight", turn * (1 / listens if listens else _GAIN))
    add("blk.0.ffn_gate.weight", rng.standard_normal((shape.n_ff, width)) * std)
    add("blk.0.ffn_up.weight", rng.standard_normal((shape.n_ff, width)) * std)
    add("blk.0.ffn_down.weight", rng.standard_normal((width, shape.n_ff)) * std * NOTHING)
    for norm in ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm"):
        add(f"{norm}.weight", np.ones(width))
    drafted = np.arange(shape.n_vocab) if recalls else draft_cycle(cycle, acceptance, seed + 1)
    rows = output_rows(embedding, shape, drafted) @ turn.T.astype(np.float32)
    add("output.weight", rows[:n_known] if n_known else rows)
    if n_known:
        writer.add_tensor("d2t", np.arange(n_known, dtype=np.int64))
    finish(writer)
    return path
