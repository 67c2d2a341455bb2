"""Millisecond-sized GGUFs for tests: pairs whose text is known, and pairs whose text depends on all of it.

`cycle_pair` follows one fixed cycle over the vocabulary whatever came before, so that the answer is known in
advance. `contextual_pair` has random weights at full strength, so that one wrong, missing or stale cell of
the KV cache changes the answer: tests of rollback, reuse and sharing need that.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.synthetic import (
    TINY_DRAFT,
    TINY_TARGET,
    Cycle,
    Shape,
    draft_cycle,
    follow,
    target_cycle,
    write_model,
)
from localspec.protocol.frames import PairFiles

N_VOCAB = 512
BOS, EOS, END = N_VOCAB - 5, N_VOCAB - 4, N_VOCAB - 1
# Heads of 32, so that their cache can be kept in eight bits.
CONTEXT_SHAPE = Shape(n_layer=2, n_embd=64, n_ff=128, n_head=2, n_vocab=N_VOCAB, n_ctx=2048)


def ending_cycle(length: int, seed: int = 0) -> Cycle:
    """Return a cycle on which token 0's text ends with EOS after `length` tokens."""
    cycle = target_cycle(N_VOCAB, seed)
    token = 0
    for _ in range(length):
        token = int(cycle[token])
    cycle[token] = EOS
    return cycle


def cycle_pair(
    folder: Path,
    acceptance: float | tuple[float, float] = 0.8,
    *,
    cycle: Cycle | None = None,
    n_ctx: int = 2048,
) -> PairFiles:
    """Return a pair that follows a cycle; greedy text is `expected(first, count)` unless `cycle` is set."""
    folder.mkdir(parents=True, exist_ok=True)
    cycle = target_cycle(N_VOCAB) if cycle is None else cycle
    files = folder / "target.gguf", folder / "draft.gguf"
    if not files[1].exists():
        write_model(files[0], _with_context(TINY_TARGET, n_ctx), cycle)
        wrong = draft_cycle(cycle, acceptance)
        write_model(files[1], _with_context(TINY_DRAFT, n_ctx), wrong, seed=2)
    return PairFiles(folder.name, str(files[0]), str(files[1]))


def looping_pair(folder: Path, period: int = 10) -> PairFiles:
    """Write a pair whose text runs into a loop of `period` tokens from everywhere."""
    cycle: Cycle = target_cycle(N_VOCAB).copy()
    ring = follow(cycle, 100, period)
    cycle[~np.isin(np.arange(N_VOCAB), ring[:-1])] = ring[0]
    return cycle_pair(folder, 0.8, cycle=cycle, n_ctx=4096)


def expected(first: int, count: int) -> list[int]:
    """Return the greedy continuation of `first` by every default `cycle_pair`, whatever its draft."""
    return follow(target_cycle(N_VOCAB), first, count)


def contextual_pair(
    folder: Path, noise: float = 0.1, seed: int = 0, tokens: Sequence[str] = ()
) -> PairFiles:
    """Return a pair whose next token depends on all earlier tokens.

    `noise` is the error of the draft; `tokens` is its vocabulary, if not the usual one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not draft.exists():
        cycle = target_cycle(N_VOCAB, seed)
        write_model(target, CONTEXT_SHAPE, cycle, seed=seed, tokens=tokens)
        rng = np.random.default_rng(seed + 1)
        rescale(target, {"attn_output": 1e5, "ffn_down": 1e5})
        # The output row of every special token is zero or a copy, which would cause ties.
        _replace(target, "output.weight", rng, 0.08)
        shutil.copy(target, draft)
        disturb(draft, rng, noise)
    return PairFiles(folder.name, str(target), str(draft))


def target_alone(files: PairFiles) -> PairFiles:
    """Return the same target without its draft."""
    return PairFiles(files.name, files.target, None)


def _with_context(shape: Shape, n_ctx: int) -> Shape:
    return Shape(shape.n_layer, shape.n_embd, shape.n_ff, shape.n_head, shape.n_vocab, n_ctx=n_ctx)


def rescale(path: Path, factors: dict[str, float]) -> None:
    """Multiply, in the file, every float32 tensor whose name contains a key."""
    import gguf

    for tensor in gguf.GGUFReader(path, "r+").tensors:
        for part, factor in factors.items():
            if part in tensor.name:
                tensor.data[:] *= np.float32(factor)


def _replace(path: Path, name: str, rng: np.random.Generator, std: float) -> None:
    import gguf

    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == name:
            tensor.data[:] = rng.standard_normal(tensor.data.shape, dtype=np.float32) * std


def disturb(path: Path, rng: np.random.Generator, noise: float) -> None:
    """Add to every matrix random values `noise` times as large as its own."""
    import gguf

    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if "norm" not in tensor.name:
            size = float(tensor.data.std()) * noise
            tensor.data[:] += rng.standard_normal(tensor.data.shape, dtype=np.float32) * size
