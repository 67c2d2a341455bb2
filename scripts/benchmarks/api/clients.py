"""Several clients at once, each with a text of its own: what they get in all, and who waits longest."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks import synthetic
from benchmarks.api.asking import COLD, joint_speed, same_text, together
from benchmarks.api.shared import Bench, Section, in_turns, number, worst
from benchmarks.command import positive, say
from benchmarks.measuring.report import Figure, Verdict, best, median_of, ratio, table, whole
from benchmarks.measuring.runs import AUTO, PLAIN, WARM_TOKENS, Run, Setting
from benchmarks.measuring.workloads import Files
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running

NAME = "clients"
FIXED = Setting(3)
SERVER, SERVER_DRAFT = Setting(0, server=True), Setting(3, server=True)
OURS, THEIRS = (PLAIN, FIXED, AUTO), (SERVER, SERVER_DRAFT)
PROMPT = 32  # tokens of each
AUTO_PLAIN, AUTO_BEST, PLAIN_SERVER, FIRST_SERVER = 0.97, 0.97, 0.98, 1.2
MANY, MANY_LIMIT = 4, 1.5  # so many clients get so many times what one gets that decodes plainly


@dataclass(frozen=True, slots=True)
class Joint(Run):
    """One setting with all clients. speed: of all, while all write; first_ms: the slowest first text."""

    first_ms: float = 0.0


def first(run: Run) -> float | None:
    """Return the time of the slowest client's first text."""
    return run.first_ms if isinstance(run, Joint) else None


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs at one acceptance rate with one number of clients."""

    acceptance: str
    clients: int
    runs: Sequence[Joint]

    @property
    def name(self) -> str:
        return f"α = {self.acceptance} with {self.clients}"

    @property
    def best(self) -> str:
        """The setting of ours, `auto` apart, that was fastest."""
        return best(self.runs, whole) or PLAIN.name

    def ratio(self, over: Setting, under: Setting | str, figure: Figure = whole) -> float | None:
        return ratio(self.runs, over.name, under if isinstance(under, str) else under.name, figure)

    def median(self, setting: Setting, figure: Figure = whole) -> float | None:
        return median_of(self.runs, setting.name, figure)


@dataclass(frozen=True, slots=True)
class Goal:
    """One ratio of a cell and its limit."""

    what: str
    over: Setting
    under: Setting | None  # None: the best fixed setting
    limit: float
    figure: Figure = whole

    @property
    def at_least(self) -> bool:
        return self.figure is whole

    def of(self, cell: Cell) -> float | None:
        return cell.ratio(self.over, self.under or cell.best, self.figure)

    def missed(self, cell: Cell) -> bool:
        value = self.of(cell)
        return value is not None and not Verdict("", value, self.limit, self.at_least).holds


GOALS = (
    Goal("auto/plain", AUTO, PLAIN, AUTO_PLAIN),
    Goal("auto/best", AUTO, None, AUTO_BEST),
    Goal("plain/llama-server", PLAIN, SERVER, PLAIN_SERVER),
    Goal("slowest first token/llama-server", AUTO, SERVER, FIRST_SERVER, first),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(NAME).add_argument
    add("--clients", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="at once (1 2 4 8)")  # fmt: skip
    add("--tokens", type=positive, default=128, help="for each client (128)")


def measure(bench: Bench) -> Section:
    options = bench.options
    cells = [
        _cell(bench, acceptance, clients)
        for acceptance in options.acceptance
        for clients in options.clients
    ]
    wrong = sum(not run.correct for cell in cells for run in cell.runs)
    return Section(_report(cells), verdicts(cells), wrong, [asdict(cell) for cell in cells])


def _cell(bench: Bench, acceptance: str, clients: int) -> Cell:
    tokens = bench.options.tokens
    models = bench.synthetic(acceptance)
    assert models.files is not None
    room = PROMPT + tokens + 160  # for drafts, and for the last round
    runs = []
    with ExitStack() as stack:
        servers = {
            setting.name: stack.enter_context(
                bench.server(models, room, setting.depth or 0, clients)
            )
            for setting in THEIRS
        }
        running = {name: setting for name, setting in servers.items() if setting is not None}
        daemon = stack.enter_context(bench.daemon(models, max(room * clients, 1024), clients))
        kinds = [*OURS, *(setting for setting in THEIRS if setting.name in running)]
        rng = bench.rng(NAME, acceptance, clients)
        for kind in kinds:  # the first passes of every width are slow
            _write(daemon, running, kind, _texts(daemon, models.files, clients, WARM_TOKENS, rng))
        for repetition, kind in in_turns(kinds, bench.options.repetitions, rng):
            # All settings of one repetition have the same texts: how often drafts are accepted
            # differs by more than what is to be seen here.
            same = bench.rng(NAME, acceptance, clients, repetition)
            texts = _texts(daemon, models.files, clients, tokens, same)
            runs.append(_write(daemon, running, kind, texts, repetition))
            say(f"α = {acceptance}, {clients} clients, {kind.name}: {runs[-1].speed:.1f} tokens/s")
    return Cell(acceptance, clients, runs)


@dataclass(frozen=True, slots=True)
class _Text:
    prompt: Sequence[int]
    expected: str
    tokens: int


def _texts(
    daemon: Daemon, files: Files, count: int, tokens: int, rng: random.Random
) -> list[_Text]:
    texts = []
    for _ in range(count):
        prompt = synthetic.follow(files.cycle, rng.randrange(len(files.cycle)), PROMPT)
        right = synthetic.follow(files.cycle, prompt[-1], tokens)
        text = str(daemon.post("/detokenize", {"tokens": right})["content"])
        texts.append(_Text(prompt, text, tokens))
    return texts


def _write(
    daemon: Daemon,
    servers: Mapping[str, Running],
    setting: Setting,
    texts: Sequence[_Text],
    repetition: int | None = None,
) -> Joint:
    """One text a client; what counts is from when the last begins to write to when the first is done."""
    server = servers.get(setting.name, daemon)
    fields: dict[str, Any] = {}
    if not setting.server and setting.depth is not None:
        fields["speculative"] = {"depth": setting.depth} if setting.depth else {"enabled": False}
    bodies = [
        {**COLD, **fields, "prompt": sample.prompt, "n_predict": sample.tokens} for sample in texts
    ]
    answers = together([partial(server.stream, "/completion", body) for body in bodies])
    return Joint(
        setting.name,
        repetition or 0,
        texts[0].tokens,
        all(same_text(a.text, text.expected) for a, text in zip(answers, texts, strict=True)),
        # A run for warming up is too short for all to meet, and nobody reads its speed.
        0.0 if repetition is None else joint_speed([answer.stamps for answer in answers]),
        drafted=sum(int(answer.timings.get("draft_n", 0)) for answer in answers),
        first_ms=max(answer.first_s for answer in answers) * 1e3,
    )


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Of every goal the worst cell; and whether many clients get more than one."""
    result = []
    for goal in GOALS:
        ratios = {cell.name: goal.of(cell) for cell in cells}
        result += worst(goal.what, ratios, goal.limit, goal.at_least)
    alone = {cell.acceptance: cell.median(PLAIN) for cell in cells if cell.clients == 1}
    gains = {
        cell.name: several / one
        for cell in cells
        if cell.clients >= MANY
        and (one := alone.get(cell.acceptance))
        and (several := cell.median(AUTO))
    }
    return result + worst("all clients/one that decodes plainly", gains, MANY_LIMIT)


def _report(cells: Sequence[Cell]) -> str:
    names = [run.setting for cell in cells for run in cell.runs]
    settings = [setting for setting in (*OURS, *THEIRS) if setting.name in names]
    with_server = SERVER.name in names
    header = ["α", "clients", *(setting.name for setting in settings), "auto/plain", "auto/best"]
    header += ["plain/server plain"] if with_server else []
    header += ["first ms"] + (["server's", "×"] if with_server else []) + ["drafted", "missed"]
    rows = (_row(cell, settings, with_server) for cell in cells)
    return (
        "Several clients at once, tokens/s in sum; ratios are medians of those within a "
        f"repetition, the first text is the slowest client's:\n\n{table(header, rows)}"
    )


def _row(cell: Cell, settings: Sequence[Setting], with_server: bool) -> list[str]:
    missed = [goal.what for goal in GOALS if goal.missed(cell)]
    row = [cell.acceptance, str(cell.clients)]
    row += [number(cell.median(setting), ".1f") for setting in settings]
    row += [number(goal.of(cell), ".3f") for goal in (GOALS[:3] if with_server else GOALS[:2])]
    row += [number(cell.median(AUTO, first), ".0f")]
    if with_server:
        row += [number(cell.median(SERVER, first), ".0f"), number(GOALS[3].of(cell))]
    drafted = statistics.median(run.drafted for run in cell.runs if run.setting == AUTO.name)
    return [*row, f"{drafted:g}", ", ".join(missed)]
