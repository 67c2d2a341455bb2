"""What the engine's benchmark decodes: one synthetic target, and a draft per acceptance rate.

The files are kept between runs, in a folder named for their sizes, and written whole or not at all.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from benchmarks import synthetic
from benchmarks.synthetic import Cycle, Quant, Shape
from benchmarks.synthetic_heads import Architecture, write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import write_with_sidecar
from benchmarks.synthetic_targets import (
    LayerReader,
    TargetArchitecture,
    write_layer_reader,
    write_target,
)

SEED = 0  # of the files; the texts have their own
# Targets with attention everywhere, and with a recurrent state, whose file holds heads; the same in a file of
# their own; Gemma 4's, which read the target's cache; and sidecars that read the target's layers.
Heads = Literal[
    "glm4moe",
    "qwen35",
    "glm4moe-apart",
    "qwen35-apart",
    "sidecar",
    "eagle3",
    "dflash",
    "dflash2",
    "dspark",
]
HEADS: tuple[Heads, ...] = get_args(Heads)
LAYER_READERS: tuple[LayerReader, ...] = get_args(LayerReader)
TARGETS: tuple[TargetArchitecture, ...] = get_args(TargetArchitecture)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """`acceptance`: the chance that a draft is right; a pair alternates in bursts."""

    name: str
    acceptance: float | tuple[float, float]

    @property
    def mean(self) -> float:
        """Average acceptance rate over a long text."""
        if isinstance(self.acceptance, tuple):
            return sum(self.acceptance) / 2
        return self.acceptance


BURSTY = Workload("bursty", (0.95, 0.1))
WORKLOADS = (*(Workload(f"{a:g}", a) for a in (0.95, 0.9, 0.7, 0.4, 0.2, 0.0)), BURSTY)


def workload(text: str) -> Workload:
    """Return a workload by name: `0.7`, `bursty`, or `0.9/0.2` for bursts of these two rates.

    Raises:
        ValueError: not a name, or a rate outside [0, 1].
    """
    if text == BURSTY.name:
        return BURSTY
    rates = [float(part) for part in text.split("/")]
    if len(rates) > 2 or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"an acceptance rate lies between 0 and 1, not {text}")
    return Workload(text, rates[0] if len(rates) == 1 else (rates[0], rates[1]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of a pair, under a name for people.

    heads: it drafts with MTP heads or a sidecar, of one of HEADS. architecture: of a target whose sidecar
    reads its layers.
    """

    name: str
    target: Shape
    draft: Shape
    heads: Heads | None = None
    architecture: TargetArchitecture = "llama"

    def with_heads(self, heads: Heads, architecture: TargetArchitecture = "llama") -> Sizes:
        """Return the same with MTP heads, and the vocabulary of models that have some."""
        target = replace(self.target, code=False)
        return replace(self, target=target, heads=heads, architecture=architecture)

    @property
    def folder(self) -> str:
        """The folder its files lie in: the name, and a hash of the shapes."""
        key = hashlib.sha256(repr((SEED, self.target, self.draft)).encode()).hexdigest()
        architecture = [] if self.architecture == "llama" else [self.architecture]
        return "-".join([self.name, *architecture, *([self.heads] if self.heads else []), key[:8]])


BIG = Sizes("big", synthetic.BIG_TARGET, synthetic.BIG_DRAFT)
HALF = Sizes("half", synthetic.HALF_TARGET, synthetic.HALF_DRAFT)
QUICK = Sizes("quick", synthetic.QUICK_TARGET, synthetic.QUICK_DRAFT)
GPU = Sizes("gpu", synthetic.GPU_TARGET, synthetic.GPU_DRAFT)
TINY = Sizes("tiny", synthetic.TINY_TARGET, synthetic.TINY_DRAFT)
# Passes of well under a millisecond, and a vocabulary so large that kept logits would show at once.
SOAK = Sizes(
    "soak",
    replace(synthetic.TINY_TARGET, n_vocab=32_000),
    replace(synthetic.TINY_DRAFT, n_vocab=32_000),
)
SIZES = {sizes.name: sizes for sizes in (BIG, GPU, HALF, QUICK, TINY)}

_FIELDS = {
    "layers": "n_layer",
    "width": "n_embd",
    "ff": "n_ff",
    "heads": "n_head",
    "kv-heads": "n_head_kv",
    "vocab": "n_vocab",
    "context": "n_ctx",
}


def shape(text: str, base: Shape) -> Shape:
    """Return `base` with what `text` says: `layers=32,width=4096,ff=14336,heads=32,kv-heads=8,quant=q4_0`.

    Raises:
        ValueError: an unknown name, or a value that is no number.
    """
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "quant" and value in get_args(Quant):
            changes["quant"] = value
        elif name in _FIELDS and value.isdigit():
            changes[_FIELDS[name]] = int(value)
        else:
            known = ", ".join(_FIELDS)
            kinds = ", ".join(get_args(Quant))
            raise ValueError(f"{part!r} is neither NAME=NUMBER ({known}) nor quant=KIND ({kinds})")
    return replace(base, **changes)


@dataclass(frozen=True, slots=True)
class Files:
    """One workload's pair on disk, and the cycles that the two models follow.

    draft: None if it is in the target's file.
    """

    target: Path
    draft: Path | None
    cycle: Cycle
    drafted: Cycle


def build(work: Path, sizes: Sizes, chosen_workload: Workload, say: Say) -> Files:
    """Write the pair of a workload where it is not there yet, and return it.

    Raises:
        ImportError: the `gguf` package is missing (it is in the `test` extra).
        OSError: no room for the files.
    """
    folder = work / sizes.folder
    folder.mkdir(parents=True, exist_ok=True)
    cycle = synthetic.target_cycle(sizes.target.n_vocab, SEED, len(sizes.target.specials))
    drafted = synthetic.draft_cycle(cycle, chosen_workload.acceptance, SEED + 1)
    rates = (
        chosen_workload.acceptance
        if isinstance(chosen_workload.acceptance, tuple)
        else (chosen_workload.acceptance,)
    )
    label = "-".join(f"{rate:g}" for rate in rates)
    if sizes.heads:
        two = _with_heads(folder / label, sizes, chosen_workload, cycle, say)
        return Files(*two, cycle, drafted)
    target = _written(folder / "target.gguf", sizes.target, cycle, SEED, say)
    draft = _written(folder / f"draft-{label}.gguf", sizes.draft, drafted, SEED + 2, say)
    return Files(target, draft, cycle, drafted)


def _with_heads(
    folder: Path, sizes: Sizes, chosen_workload: Workload, cycle: Cycle, say: Say
) -> tuple[Path, Path | None]:
    """Write the target, and its heads where they have a file of their own."""
    if not folder.exists():
        say(f"writing {folder}")
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        if sizes.heads == "sidecar":
            target = sizes.target
            small = replace(target, n_layer=2, n_embd=target.n_embd // 4, n_ff=target.n_ff // 4)
            write_with_sidecar(part, target, small, chosen_workload.acceptance, seed=SEED)
        elif sizes.heads in LAYER_READERS:
            write_target(part / "target.gguf", sizes.target, cycle, sizes.architecture, seed=SEED)
            write_layer_reader(
                part / f"{sizes.heads}-target.gguf",
                sizes.heads,
                sizes.target,
                cycle,
                chosen_workload.acceptance,
                sizes.architecture,
                seed=SEED,
            )
        elif sizes.heads:
            files = part / "target.gguf", part / "mtp-target.gguf"
            rates = chosen_workload.acceptance
            if sizes.heads == "glm4moe" or sizes.heads == "qwen35":
                write_heads(files[0], sizes.target, rates, sizes.heads, seed=SEED)
            else:
                architecture = cast(Architecture, sizes.heads.removesuffix("-apart"))
                write_heads_apart(*files, sizes.target, rates, architecture, seed=SEED)
        part.replace(folder)
    sidecars = [path for path in folder.iterdir() if path.name != "target.gguf"]
    return folder / "target.gguf", sidecars[0] if sidecars else None


def _written(path: Path, shape: Shape, cycle: Cycle, seed: int, say: Say) -> Path:
    if not path.exists():
        say(f"writing {path}")
        part = path.with_suffix(".part")
        synthetic.write_model(part, shape, cycle, seed=seed, name=f"synthetic-{path.stem}")
        part.replace(path)
    return path


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt on the cycle and the only right continuation of it.

    acceptance: the share of `expected` that this workload's draft predicts.
    """

    prompt: list[int]
    expected: list[int]
    acceptance: float


def text(files: Files, prompt: int, tokens: int, rng: random.Random) -> Text:
    """Return a text from anywhere on the cycle: `prompt` tokens to read and `tokens` to generate."""
    start = rng.randrange(len(files.cycle))
    read = synthetic.follow(files.cycle, start, prompt)
    expected = synthetic.follow(files.cycle, read[-1], tokens)
    before: Sequence[int] = [read[-1], *expected[:-1]]
    hits = sum(int(files.drafted[a]) == b for a, b in zip(before, expected, strict=True))
    return Text(read, expected, hits / tokens)
