"""What the parts are given and give back, and the arithmetic that they share."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from benchmarks.command import say
from benchmarks.measuring.report import Verdict
from benchmarks.measuring.runs import Setting
from benchmarks.measuring.workloads import Files, Sizes, build, workload
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running, Server

REPOSITORY = Path(__file__).resolve().parents[3]
SHIPPED = REPOSITORY / "localspec" / "builtin"
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Models:
    """What is loaded: a target, perhaps a draft; `files` where it is a synthetic pair."""

    target: Path
    draft: Path | None = None
    files: Files | None = None

    @property
    def pair(self) -> str:
        """As the setting `pair` names it."""
        return ",".join(str(path) for path in (self.target, self.draft) if path is not None)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part needs: the options, and servers of the benchmark's own."""

    options: argparse.Namespace
    sizes: Sizes
    threads: int
    work: Path

    def rng(self, *what: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.options.seed, *what))))

    def synthetic(self, acceptance: str) -> Models:
        """Return the pair of --size with a draft that is accepted so often."""
        files = build(self.work, self.sizes, workload(acceptance), say)
        return Models(files.target, files.draft, files)

    def models(self, acceptance: str) -> Models:
        """--model and --draft, or else a synthetic pair."""
        if self.options.model is not None:
            return Models(self.options.model.absolute(), _absolute(self.options.draft))
        return self.synthetic(acceptance)

    def target(self) -> Models:
        """--model, or else the target of the synthetic pairs; nothing drafts."""
        return Models(self.models(self.options.acceptance[0]).target)

    def shipped(self) -> Models:
        """Return the pair that comes with localspec."""
        return Models(SHIPPED / "target.gguf", SHIPPED / "draft.gguf")

    def second(self, models: Models) -> Models:
        """Return the same pair once more, in files of its own: of two that share theirs, half is shared."""
        draft = models.draft and self._copied(models.draft)
        return Models(self._copied(models.target), draft, models.files)

    def _copied(self, path: Path) -> Path:
        key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        copy = self.work / "second" / f"{key}-{path.name}"
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_suffix(".part")
            shutil.copyfile(path, part)
            part.replace(copy)
        return copy

    def daemon(self, models: Models, context: int, parallel: int = 1) -> Daemon:
        return Daemon(pair=models.pair, context=context, threads=self.threads, parallel=parallel)

    def server(
        self,
        models: Models,
        context: int,
        depth: int = 0,
        parallel: int = 1,
        extra: Sequence[str] = (),
        socket: str = "",
    ) -> AbstractContextManager[Running | None]:
        """llama-server on the same files with `parallel` times `context`; None where it is not asked for.

        socket: the Unix socket where it listens; else a port.
        """
        program: Path | None = self.options.llama_server
        if program is None:
            return contextlib.nullcontext()
        plan = Server(
            program.absolute(),
            models.target,
            models.draft or models.target,  # read only where depth is not 0
            context * parallel,
            self.threads,
            parallel=parallel,
            extra=extra,
            socket=socket,
        )
        return Running(plan, Setting(depth, server=True))


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


@dataclass(frozen=True, slots=True)
class Section:
    """What one part found. text: Markdown; wrong: outputs that left the right text; facts: for JSON."""

    text: str
    verdicts: Sequence[Verdict]
    wrong: int
    facts: object


def in_turns(
    kinds: Sequence[Kind], repetitions: int, rng: random.Random
) -> Iterator[tuple[int, Kind]]:
    """Every kind in every repetition, in an order shuffled for each."""
    for repetition in range(repetitions):
        for kind in rng.sample(kinds, len(kinds)):
            yield repetition, kind


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed (nearest rank).

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]


def worst(
    what: str, cells: Mapping[str, float | None], limit: float, at_least: bool = True
) -> list[Verdict]:
    """Return the cell that is furthest from a limit, by name; nothing where nothing was measured."""
    known = {name: value for name, value in cells.items() if value is not None}
    if not known:
        return []
    name = (min if at_least else max)(known, key=lambda key: known[key])
    return [Verdict(f"{what}, {name}", known[name], limit, at_least)]


def number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


@cache
def sources() -> tuple[str, ...]:
    """Return the texts that are read and edited: our own Python files, always in the same order."""
    paths = sorted((REPOSITORY / "localspec").rglob("*.py"))
    return tuple(path.read_text(encoding="utf-8") for path in paths)


def tokens_of_code(daemon: Daemon, count: int) -> list[int]:
    """At least `count` tokens of our own sources, repeated where they are not enough."""
    tokens: list[int] = []
    text = "".join(sources())
    step = max(2 * count, 4096)
    for start in range(0, len(text), step):
        if len(tokens) >= count:
            return tokens
        body = {"content": text[start : start + step], "add_special": False}
        tokens += daemon.post("/tokenize", body)["tokens"]
    return tokens * -(-count // len(tokens))
