"""Synthetic pairs whose draft is a block sidecar: DFlash, DFlash 2, or DSpark.

As the other synthetic models (benchmarks.synthetic): the target's blocks cost time and decide nothing, so it
follows one cycle.

DFlash: the embeddings of the sidecar are points on a torus, and the next token's is the same point turned by
one step. The head h of its one layer attends to the place h + 1 before, by the positions alone, and turns
what it finds there h + 1 times. Only the text's last token has a point; masks and the text before it have
none. So each mask ends as the token at its place, and the output matrix follows the draft's cycle.

DFlash 2: the same, but one token that never follows anything scores best in every place. Only the scores of
pairs choose the other candidate, and only behind the token chosen before. The convolutions change nothing.

DSpark: the layer brings nothing. The Markov head alone knows which token follows which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import (
    Cycle,
    Shape,
    Tensor,
    add_sidecar_tensor,
    draft_cycle,
    finish,
    write_sizes,
    write_vocabulary,
)

_PLANES = 8  # of the torus
_HEAD = 2 * _PLANES  # numbers of an attention head
_CONSTANT = _HEAD  # the number that is one in every embedding
_SHARPNESS = 12.0  # of the attention
_GAIN = 20.0  # what the residual gets of the attention's output
_ROPE_BASE = 10_000.0
_MAX_DRAFTS = 15
_RANK = 64  # of the scores of pairs
_CANDIDATES = 4  # of each place, for the selector
_CONVOLUTION, _GROUP = 2, 16  # tokens that a convolution reads, and numbers that share its factors
# By how much of a full turn a step turns a point in each plane: no two of some hundred points are near.
_TURNS = np.random.default_rng(6).uniform(0.05, 0.95, _PLANES)


Kind = Literal["dflash", "dflash2", "dspark"]


def write_block(
    path: Path,
    target: Shape,
    cycle: Cycle,
    acceptance: float | tuple[float, float] = 0.8,
    *,
    kind: Kind = "dflash",
    layers: tuple[int, ...] | None = None,
    seed: int = 0,
    listens: float = 0.0,
    sections: bool = False,
) -> Path:
    """Write the sidecar of a target that follows `cycle`. It drafts one token per 16 numbers of width, or 15.

    layers: those of the target that it reads. listens: how much it takes from the target's layers: where that
    is much, its drafts are no longer the chosen ones. sections: it is for a target that reads pictures, whose
    positions have several parts (M-RoPE). The sidecar of a quantized target is Q8_0.
    """
    import gguf

    width, n_vocab, rng = target.n_embd, target.n_vocab, np.random.default_rng(seed)
    n_head = width // _HEAD
    layers = layers or (0, target.n_layer - 1)
    guess = draft_cycle(cycle, acceptance, seed + 1)
    writer: Any = gguf.GGUFWriter(path, "dflash")
    shape = Shape(1, width, target.n_ff, n_head, n_vocab, n_ctx=target.n_ctx)
    write_sizes(writer, shape, f"synthetic-{kind}")
    write_vocabulary(writer, n_vocab)
    writer.add_uint32("tokenizer.ggml.mask_token_id", n_vocab - 2)
    writer.add_array("dflash.target_layers", [*layers])
    writer.add_uint32("dflash.block_size", min(n_head, _MAX_DRAFTS) + (kind != "dspark"))
    writer.add_rope_freq_base(_ROPE_BASE)
    if sections:
        writer.add_rope_dimension_sections([_PLANES, 0, 0, 0])

    def add(name: str, data: Tensor) -> None:
        add_sidecar_tensor(writer, name, data, target)

    n_points = len(set(cycle.tolist()))
    angles = (
        2 * np.pi * np.round(_TURNS * n_points) / n_points
    )  # the last step leads back to the first
    points = _points(cycle, n_vocab, angles)
    embedding = np.zeros((n_vocab, width))
    embedding[:, :_HEAD] = points
    embedding[n_vocab - 2] = 0  # the mask
    embedding[:, _CONSTANT] = 1
    add("token_embd.weight", embedding)
    fusion = np.zeros((width, len(layers) * width))
    if listens:
        fusion[:_HEAD] = rng.standard_normal((_HEAD, fusion.shape[1])) * listens
        fusion[_CONSTANT] = rng.standard_normal(fusion.shape[1])
    else:  # a number that nothing reads, because a norm of zeros is taken of the rest
        fusion[-1] = rng.standard_normal(fusion.shape[1])
    add("fc.weight", fusion)
    query, key, value = (np.zeros((width, width)) for _ in range(3))
    frequencies = _ROPE_BASE ** (-np.arange(_PLANES) / _PLANES)
    for head in range(n_head):
        rows = slice(head * _HEAD, (head + 1) * _HEAD)
        back = (head + 1) * frequencies
        query[rows, _CONSTANT] = [*np.ones(_PLANES), *np.zeros(_PLANES)]
        key[rows, _CONSTANT] = [*np.cos(back), *np.sin(back)]
        value[rows, :_HEAD] = _turn(angles, head + 1)
    out = np.zeros((width, width))
    out[:_HEAD] = np.tile(np.eye(_HEAD), n_head) * _GAIN * (kind != "dspark")
    add("blk.0.attn_q.weight", query)
    add("blk.0.attn_k.weight", key)
    add("blk.0.attn_v.weight", value)
    add("blk.0.attn_output.weight", out)
    for part, size in (("gate", (target.n_ff, width)), ("up", (target.n_ff, width))):
        add(f"blk.0.ffn_{part}.weight", rng.standard_normal(size) * width**-0.5)
    add("blk.0.ffn_down.weight", np.zeros((width, target.n_ff)))
    # More than any other place scores, and less than the right one: without that, a head brings nothing.
    exact = 2 * _SHARPNESS**2 * _PLANES / _HEAD**0.5
    add("blk.0.attn_sinks.weight", np.full(n_head, 0.97 * exact))
    add("blk.0.attn_q_norm.weight", np.full(_HEAD, _SHARPNESS))
    add("blk.0.attn_k_norm.weight", np.full(_HEAD, _SHARPNESS))
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "enc.output_norm", "output_norm"):
        add(f"{norm}.weight", np.ones(width))
    before = np.zeros(n_vocab, dtype=np.int64)
    before[cycle[::-1]] = np.arange(n_vocab)[::-1]
    output = np.zeros((n_vocab, width))
    for token in set(cycle.tolist()):
        output[guess[before[token]], :_HEAD] = points[token] * 5
    rank = rng.standard_normal((n_vocab, _RANK))
    follows = np.zeros((n_vocab, _RANK))
    for token in set(before[cycle].tolist()):
        follows[guess[token]] = rank[token]
    if kind == "dspark":
        # It must not come last: a file that ends in zeros is taken for one that was cut off.
        add("output.weight", np.zeros((n_vocab, width)))
        add("markov_w1.weight", rank)
        add("markov_w2.weight", follows)
    elif kind == "dflash2":
        # The right token scores about 5 * _PLANES * _GAIN: less than this one, until its pair is scored too.
        output[n_vocab - 1, _CONSTANT] = 7.5 * _PLANES * _GAIN
        add("selector_predecessor.weight", rank)
        add("selector_successor.weight", follows)
        _write_selector(writer, target)
    if kind != "dspark":
        add("output.weight", output)
    finish(writer)
    return path


def _write_selector(writer: Any, target: Shape) -> None:
    """Write what does not depend on tokens: equal weights for all of a pair's numbers, and convolutions."""
    width, n_groups = target.n_embd, target.n_embd // _GROUP
    for key, value in (
        ("selector_rank", _RANK),
        ("selector_top_k", _CANDIDATES),
        ("conv_kernel_size", _CONVOLUTION),
        ("conv_group_size", _GROUP),
    ):
        writer.add_uint32(f"dflash.{key}", value)
    gate = np.zeros((_RANK, width))
    gate[:, _CONSTANT] = 50  # so that a pair weighs several times what a candidate scores alone
    add_sidecar_tensor(writer, "selector_hidden.weight", gate, target)
    unchanged = np.zeros((2, _CONVOLUTION, width), np.float32)
    unchanged[:, 0] = 1  # before the layer and behind it, each token counts alone
    for part in ("attn", "ffn"):
        writer.add_tensor(f"blk.0.{part}_conv_base", unchanged)
        factors = np.zeros((2 * _CONVOLUTION * n_groups, width))
        add_sidecar_tensor(writer, f"blk.0.{part}_conv_proj.weight", factors, target)


def _turn(angles: npt.NDArray[np.float64], times: int) -> npt.NDArray[np.float64]:
    """Return the matrix that turns a point so many steps."""
    matrix = np.zeros((_HEAD, _HEAD))
    for plane, angle in enumerate(angles * times):
        x, y = 2 * plane, 2 * plane + 1
        matrix[x, x] = matrix[y, y] = np.cos(angle)
        matrix[x, y], matrix[y, x] = -np.sin(angle), np.sin(angle)
    return matrix


def _points(cycle: Cycle, n_vocab: int, angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the point of each token; those that nothing leads to have none."""
    points = np.zeros((n_vocab, _HEAD))
    turn, point = _turn(angles, 1), np.tile([1.0, 0.0], _PLANES)
    token = 0
    for _ in range(len(set(cycle.tolist()))):
        points[token] = point
        token, point = int(cycle[token]), turn @ point
    return points
