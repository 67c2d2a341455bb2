"""Two pairs in memory: an editor types on one while a chat is written by the other."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks import synthetic
from benchmarks.api.asking import COLD, GREEDY, dropped, same_text, so_far
from benchmarks.api.recorded import Step, typing
from benchmarks.api.shared import (
    Bench,
    Models,
    Section,
    in_turns,
    number,
    percentile,
    tokens_of_code,
)
from benchmarks.command import positive, say
from benchmarks.measuring.report import Verdict, table
from benchmarks.measuring.runs import BenchError
from benchmarks.servers.daemon import ANSWER_S, Daemon
from benchmarks.servers.llama_server import Running

NAME = "several"
SHARE = 1.3  # of an editor's first token alone; a pass of the chat's may come on top
CONTEXT, BATCH, DEPTH = 4096, 512, 3
PROMPT = 32  # tokens that a text of the chat begins with
UNDER_WAY = 24  # tokens of the chat before anything is measured
TEXTS = 8  # of the chat, then the first one again
SECOND, SHIPPED = "second pair", "shipped pair"


class Server(NamedTuple):
    """Who is asked, and what every request to it says."""

    asked: Daemon | Running
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One session. editor: the pair it types with, "" for none; chat: whether one is written meanwhile.

    first_ms: until the first token of each request that was waited for; speed: the chat's tokens per second;
    gap_ms: between two pieces of its text, the median; wrong: texts of it that were not the right ones.
    """

    ours: bool
    repetition: int
    editor: str
    chat: bool
    first_ms: Sequence[float]
    speed: float | None
    gap_ms: float | None
    wrong: int


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        NAME, "The chat and the editor have a pair each, of --size or --model and --draft."
    ).add_argument
    add("--pauses", type=positive, default=10, help="of the typing, with an answer waited for (10)")
    add("--burst", type=positive, default=8, help="keys before each, their requests dropped (8)")
    add("--typing", type=float, default=40.0, help="milliseconds from key to key (40)")
    add("--answer", type=positive, default=400, help="tokens of each of the chat's texts (400)")
    add("--alone", type=float, default=4.0, help="seconds of the chat without an editor (4)")
    add("--no-shipped", action="store_true", help="do not type with the shipped pair, too")


def measure(bench: Bench) -> Section:
    options = bench.options
    chat = bench.models(options.acceptance[0])
    editors = {SECOND: bench.second(chat)}
    if not options.no_shipped:
        editors[SHIPPED] = bench.shipped()
    with ExitStack() as stack:
        daemon = stack.enter_context(bench.daemon(chat, CONTEXT, 2))
        servers = {(True, ""): Server(daemon, {})}
        for name, models in editors.items():
            say(f"loading the {name}")
            daemon.load(models.pair)
            servers[True, name] = Server(daemon, {"model": models.pair})
        flags = ["--cache-reuse", "256", "-b", str(BATCH), "-ub", str(BATCH)]
        flags += ["-n", str(max(options.predict, 8))]
        for name, models in {"": chat, **editors}.items():
            places, extra = (2, flags) if name else (1, [])
            depth = DEPTH if models.draft else 0
            peer = stack.enter_context(bench.server(models, CONTEXT, depth, places, extra))
            if peer is not None:
                servers[False, name] = Server(peer, {})
        sessions = _Sessions(bench, daemon, chat, servers)
        before = _loads(daemon)
        cells = [*sessions.all(list(editors))]
        loads = _loads(daemon) - before
    wrong = sum(cell.wrong for cell in cells)
    facts = {"loads": loads, "cells": [asdict(cell) for cell in cells]}
    return Section(report(cells, loads), verdicts(cells, loads), wrong, facts)


def _loads(daemon: Daemon) -> int:
    return int(daemon.get("/localspec/status")["counts"]["worker_starts"])


class _Sessions:
    """Every session on every server, in turns."""

    def __init__(
        self, bench: Bench, daemon: Daemon, chat: Models, servers: Mapping[tuple[bool, str], Server]
    ) -> None:
        self._bench = bench
        self._options = bench.options
        self._daemon = daemon
        self._models = chat
        self._servers = servers
        self._code = tokens_of_code(daemon, 4 * CONTEXT)

    def all(self, editors: Sequence[str]) -> Iterator[Cell]:
        servers = [True, False] if (False, "") in self._servers else [True]
        sessions = [("", True), *itertools.product(editors, (False, True))]
        kinds = [(ours, *session) for ours in servers for session in sessions]
        for kind in kinds:
            self._session(-1, *kind, pauses=1)  # the first passes are slow
        rng = self._bench.rng(NAME)
        for repetition, kind in in_turns(kinds, self._options.repetitions, rng):
            cell = self._session(repetition, *kind, pauses=self._options.pauses)
            say(_describe_cell(cell))
            yield cell

    def _session(
        self, repetition: int, ours: bool, editor: str, chat: bool, *, pauses: int
    ) -> Cell:
        # The same for both servers: what is typed, and what is written.
        rng = self._bench.rng(NAME, repetition, editor, chat)
        steps = typing(pauses * (self._options.burst + 1), rng)
        if not chat:
            first = self._type(ours, editor, steps)
            return Cell(ours, repetition, editor, False, first, None, None, 0)
        with Chat(self._servers[ours, ""].asked, self._texts(rng)) as writing:
            start = time.perf_counter()
            if editor:
                first = self._type(ours, editor, steps)
            else:
                first = []
                time.sleep(self._options.alone)
            end = time.perf_counter()
        speed, gap = writing.speed(start, end), writing.gap_ms(start, end)
        return Cell(ours, repetition, editor, True, first, speed, gap, writing.wrong)

    def _texts(self, rng: random.Random) -> list[tuple[dict[str, Any], str | None]]:
        """Return what the chat is asked, and the right answer where it is known."""
        texts: list[tuple[dict[str, Any], str | None]] = []
        for _ in range(TEXTS):
            start, right = rng.randrange(len(self._code) - PROMPT), None
            prompt, tokens = self._code[start : start + PROMPT], self._options.answer
            if self._models.files is not None:
                expected = synthetic.follow(self._models.files.cycle, prompt[-1], tokens)
                right = str(self._daemon.post("/detokenize", {"tokens": expected})["content"])
            body = {**COLD, "prompt": prompt, "n_predict": tokens, "ignore_eos": True}
            texts.append((body, right))
        return texts

    def _type(self, ours: bool, editor: str, steps: Sequence[Step]) -> list[float]:
        """Milliseconds to the first token after each pause; what the other keys ask is dropped."""
        server, fields = self._servers[ours, editor]
        fields = {**GREEDY, **fields, "n_predict": self._options.predict}
        server.post("/infill", {**fields, **steps[0].fields})
        keys = []
        for at, step in enumerate(steps[1:], 1):
            body = {**fields, **step.fields}
            if at % (self._options.burst + 1):
                dropped(server, "/infill", body, self._options.typing / 1e3)
            else:
                keys.append(server.stream("/infill", body, empty=True).first_s * 1e3)
        return keys


class _Left(Exception):
    """The chat is over."""


class Chat:
    """`with Chat(…)`: text after text is written meanwhile."""

    def __init__(
        self, server: Daemon | Running, texts: Sequence[tuple[Mapping[str, Any], str | None]]
    ) -> None:
        self.wrong = 0
        self._asked = server
        self._texts = itertools.cycle(texts)
        self._stamps: list[tuple[float, int]] = []
        self._under_way, self._leave = threading.Event(), threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._under_way.wait(ANSWER_S)
        return self

    def __exit__(
        self,
        type_: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave.set()
        if type_ is None:
            self._thread.join()
            if self._failed is not None:
                raise BenchError(f"The chat failed: {self._failed}")

    def _write(self) -> None:
        try:
            for body, right in self._texts:
                before = self._stamps[-1][1] if self._stamps else 0
                heard = self._counts_from(before)
                answer = self._asked.stream("/completion", body, heard=heard)
                self.wrong += right is not None and not same_text(answer.text, right)
        except _Left:
            pass
        except Exception as error:  # raised again where it is waited for
            self._failed = error
        finally:
            self._under_way.set()

    def _counts_from(self, before: int) -> Callable[[int], None]:
        def heard(tokens: int) -> None:
            if self._leave.is_set():
                raise _Left
            self._stamps.append((time.perf_counter(), before + tokens))
            if before + tokens >= UNDER_WAY:
                self._under_way.set()

        return heard

    def speed(self, start: float, end: float) -> float:
        """Tokens per second between two times of perf_counter."""
        made = so_far(self._stamps, end) - so_far(self._stamps, start)
        return made / (end - start)

    def gap_ms(self, start: float, end: float) -> float | None:
        """Return the median between two pieces; None where there were none."""
        stamps = [at for at, _ in self._stamps if start <= at <= end]
        gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
        return statistics.median(gaps) if gaps else None


def _describe_cell(cell: Cell) -> str:
    who = "ours" if cell.ours else "llama-server"
    prefix = f"repetition {cell.repetition}, {who}:"
    if cell.editor:
        p50, p95 = (percentile(cell.first_ms, share) for share in (0.5, 0.95))
        prefix += f" an editor on the {cell.editor}: first token {p50:.0f} ms, p95 {p95:.0f};"
    if cell.speed is not None:
        prefix += f" the chat {cell.speed:.1f} tokens/s"
    return prefix


def _of(cells: Sequence[Cell], ours: bool, editor: str, chat: bool) -> list[Cell]:
    return [c for c in cells if (c.ours, c.editor, c.chat) == (ours, editor, chat)]


def _first(cells: Sequence[Cell], share: float) -> float | None:
    """Over the requests of all repetitions."""
    all_ms = [ms for cell in cells for ms in cell.first_ms]
    return percentile(all_ms, share) if all_ms else None


def _speed(cells: Sequence[Cell]) -> float | None:
    speeds = [cell.speed for cell in cells if cell.speed is not None]
    return statistics.median(speeds) if speeds else None


def slower(cells: Sequence[Cell], ours: bool, editor: str, share: float) -> float | None:
    """Return an editor's first token beside the chat, without one piece of the chat, over what it is alone.

    The median of the repetitions' ratios.
    """
    gaps = [cell.gap_ms for cell in _of(cells, ours, "", True) if cell.gap_ms is not None]
    alone = {cell.repetition: cell for cell in _of(cells, ours, editor, False)}
    ratios = [
        (percentile(cell.first_ms, share) - statistics.median(gaps or [0.0]))
        / percentile(alone[cell.repetition].first_ms, share)
        for cell in _of(cells, ours, editor, True)
    ]
    return statistics.median(ratios) if ratios else None


def kept_speed_share(cells: Sequence[Cell], ours: bool, editor: str) -> float | None:
    """Return the share of its speed that the chat keeps beside an editor, the median of the repetitions'."""
    alone = {cell.repetition: cell.speed for cell in _of(cells, ours, "", True)}
    shares = [
        cell.speed / base
        for cell in _of(cells, ours, editor, True)
        if cell.speed is not None and (base := alone[cell.repetition])
    ]
    return statistics.median(shares) if shares else None


def verdicts(cells: Sequence[Cell], loads: int) -> list[Verdict]:
    """Of ours."""
    judged = []
    for editor in dict.fromkeys(cell.editor for cell in cells if cell.editor):
        for share in (0.5, 0.95):
            ratio = slower(cells, True, editor, share)
            if ratio is not None:
                what = f"first token p{share * 100:.0f} on the {editor} beside a chat, less a pass / alone"
                judged.append(Verdict(what, ratio, SHARE, at_least=False))
    return [*judged, Verdict("loads of pairs meanwhile", loads, 0, at_least=False)]


def report(all_cells: Sequence[Cell], loads: int) -> str:
    header = ["editor types with", "", "first token ms alone p50", "p95", "beside the chat p50"]
    header += ["p95", "less a pass ×", "p95 ×"]
    header += ["chat tokens/s alone", "beside the editor", "kept"]
    rows = []
    for editor in dict.fromkeys(cell.editor for cell in all_cells if cell.editor):
        for ours in sorted({cell.ours for cell in all_cells}, reverse=True):
            alone, beside = (_of(all_cells, ours, editor, chat) for chat in (False, True))
            firsts = [_first(cells, share) for cells in (alone, beside) for share in (0.5, 0.95)]
            rows.append(
                [
                    editor,
                    "localspec" if ours else "llama-servers",
                    *(number(value, ".1f") for value in firsts),
                    *(number(slower(all_cells, ours, editor, share)) for share in (0.5, 0.95)),
                    number(_speed(_of(all_cells, ours, "", True)), ".1f"),
                    number(_speed(beside), ".1f"),
                    number(kept_speed_share(all_cells, ours, editor)),
                ]
            )
    return (
        "An editor types on one pair while a chat is written by another, each key's request dropped by the "
        f"next, the last one before each pause waited for:\n\n{table(header, rows)}\n"
        f"Loads meanwhile: {loads}.\n"
    )
