"""Small models with MTP heads: one whose text and drafts are known, one whose text depends on all of it.

The heads of gemma4 are a sidecar.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import draft_cycle, target_cycle
from benchmarks.synthetic_heads import Architecture, write_heads
from benchmarks.synthetic_sidecar import write_with_sidecar
from localspec.protocol.frames import PairFiles
from tests.support.pairs import N_VOCAB, rescale

Target = Architecture | Literal["gemma4"]


def _with_sidecar(folder: Path, acceptance: float, **more: Any) -> PairFiles:
    made = (folder / "target.gguf").exists()
    files = folder / "target.gguf", folder / "mtp-target.gguf"
    if not made:
        write_with_sidecar(folder, acceptance=acceptance, **more)
        if more:
            for file, factor in zip(files, (7e5, 6e4), strict=True):
                rescale(file, {"post_attention_norm": factor, "post_ffw_norm": factor})
    return PairFiles(folder.name, str(files[0]), str(files[1]))


def cycle_heads(folder: Path, acceptance: float, architecture: Target) -> PairFiles:
    """A target that follows `expected` of tests.support.pairs; so many of its drafts are right."""
    if architecture == "gemma4":
        return _with_sidecar(folder / f"gemma4-{acceptance}", acceptance)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{architecture}-{acceptance}.gguf"
    if not file.exists():
        write_heads(file, acceptance=acceptance, architecture=architecture)
    return PairFiles(file.stem, str(file), None)


def contextual_heads(folder: Path, architecture: Target = "glm4moe") -> PairFiles:
    """One whose next token, and whose heads' draft, depend on every token before."""
    if architecture == "gemma4":
        return _with_sidecar(folder / "gemma4-contextual", 0.9, listens=0.8, window=32)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{architecture}-contextual.gguf"
    if not file.exists():
        write_heads(file, acceptance=0.9, architecture=architecture, listens=2.5)
        rescale(file, {"attn_output": 6e4, "ffn_down": 6e4, "ssm_out": 6e4})
    return PairFiles(file.stem, str(file), None)


Numbers = npt.NDArray[np.float32]


def tensors(path: Path) -> dict[str, Numbers]:
    """Return the float32 tensors of a file by name."""
    import gguf

    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def sidecar_logits(
    files: PairFiles, rounding: Callable[[Numbers], Numbers] = lambda numbers: numbers
) -> Numbers:
    """Return what the sidecar of `cycle_heads` gives after each token, (n_vocab, n_vocab), from its files.

    Its blocks add nothing and it does not listen to the target's states, so that this is the target's
    embedding of the token alone, projected and compared with the sidecar's own. rounding: of both sides of
    each product.
    """
    assert files.draft is not None
    embedding = tensors(Path(files.target))["token_embd.weight"]
    sidecar = tensors(Path(files.draft))
    width = embedding.shape[1]
    projection = sidecar["nextn.pre_projection.weight"][:, :width]
    states = rounding(embedding * np.float32(width**0.5)) @ rounding(projection).T
    states /= np.sqrt(np.mean(states**2, axis=1, keepdims=True) + 1e-5)
    logits: Numbers = rounding(states) @ rounding(sidecar["token_embd.weight"]).T
    return logits


def right_drafts(first: int, count: int, depth: int, acceptance: float) -> tuple[int, int]:
    """(drafted, accepted) where `count` tokens follow a prompt of `first` and each round drafts `depth`, or
    as many as may still be needed.
    """
    cycle = target_cycle(N_VOCAB)
    guess = draft_cycle(cycle, acceptance)
    token, written = first, 0
    drafted = accepted = 0
    while written < count:
        asked = min(depth, count - written - 1)
        kept = 0
        while kept < asked and guess[token] == cycle[token]:
            token, kept = int(cycle[token]), kept + 1
        drafted, accepted = drafted + asked, accepted + kept
        token, written = int(cycle[token]), written + kept + 1
    return drafted, accepted
