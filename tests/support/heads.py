"""Small models with MTP heads: one whose text and drafts are known, one whose text depends on all of it.

The heads of gemma4 are a sidecar; so are those "apart", which hold the same heads as the model of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import draft_cycle, target_cycle
from benchmarks.synthetic_heads import Architecture, write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import write_with_sidecar
from localspec.protocol.frames import PairFiles
from tests.support.pairs import N_VOCAB, rescale

Target = Architecture | Literal["gemma4", "glm4moe apart", "qwen35 apart"]


def _with_sidecar(folder: Path, acceptance: float, **options: Any) -> PairFiles:
    exists = (folder / "target.gguf").exists()
    files = folder / "target.gguf", folder / "mtp-target.gguf"
    if not exists:
        write_with_sidecar(folder, acceptance=acceptance, **options)
        if options:
            for file, factor in zip(files, (7e5, 6e4), strict=True):
                rescale(file, {"post_attention_norm": factor, "post_ffw_norm": factor})
    return PairFiles(folder.name, str(files[0]), str(files[1]))


def _with_heads(folder: Path, name: str, target: Target, **options: Any) -> PairFiles:
    """Return a target with heads in its file, or in one of their own if `target` says so."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = cast(Architecture, target.removesuffix(" apart"))
    whole, trunk = (folder / f"{architecture}-{name}{end}.gguf" for end in ("", "-trunk"))
    heads = folder / f"mtp-{architecture}-{name}.gguf"
    is_apart = architecture != target
    files = [trunk, heads] if is_apart else [whole]
    if not files[-1].exists():
        if is_apart:
            write_heads_apart(trunk, heads, architecture=architecture, **options)
        else:
            write_heads(whole, architecture=architecture, **options)
        if "listens" in options:
            for file in files:
                rescale(file, {"attn_output": 6e4, "ffn_down": 6e4, "ssm_out": 6e4})
    return PairFiles(files[0].stem, str(files[0]), str(heads) if is_apart else None)


def cycle_heads(folder: Path, acceptance: float, architecture: Target) -> PairFiles:
    """Return a target that follows `expected` of tests.support.pairs, and whose drafts are partly right."""
    if architecture == "gemma4":
        return _with_sidecar(folder / f"gemma4-{acceptance}", acceptance)
    return _with_heads(folder, str(acceptance), architecture, acceptance=acceptance)


def contextual_heads(folder: Path, architecture: Target = "glm4moe") -> PairFiles:
    """Return a target whose next token, and whose heads' draft, depend on all earlier tokens."""
    if architecture == "gemma4":
        return _with_sidecar(folder / "gemma4-contextual", 0.9, listens=0.8, window=32)
    return _with_heads(folder, "contextual", architecture, acceptance=0.9, listens=2.5)


Numbers = npt.NDArray[np.float32]


def tensors(path: Path) -> dict[str, Numbers]:
    """Return the float32 tensors of a file by name."""
    import gguf

    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def sidecar_logits(
    files: PairFiles, rounding: Callable[[Numbers], Numbers] = lambda numbers: numbers
) -> Numbers:
    """Return the logits of the sidecar of `cycle_heads` after each token, (n_vocab, n_vocab).

    Its blocks add nothing and it does not listen to the target's states, so that this is the target's
    embedding of the token alone, projected and compared with the sidecar's own. rounding: is applied to
    both sides of each product.
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
    """Return (drafted, accepted) for `count` tokens after a prompt of `first`.

    Each round drafts `depth` tokens, or as many as may still be needed.
    """
    cycle = target_cycle(N_VOCAB)
    guess = draft_cycle(cycle, acceptance)
    token, generated = first, 0
    drafted = accepted = 0
    while generated < count:
        draft_count = min(depth, count - generated - 1)
        matched = 0
        while matched < draft_count and guess[token] == cycle[token]:
            token, matched = int(cycle[token]), matched + 1
        drafted, accepted = drafted + draft_count, accepted + matched
        token, generated = int(cycle[token]), generated + matched + 1
    return drafted, accepted
