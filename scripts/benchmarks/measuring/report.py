"""From runs to figures: medians, ratios, what must hold; as Markdown tables and as JSON.

A ratio is the median of the ratios within each repetition, where both ran on the same text minutes
apart; so it may differ a little from the quotient of the two medians beside it. `best fixed` is the
setting with the highest median found afterwards, plain decoding (depth 0) among them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measuring.interleaved import Measured
from benchmarks.measuring.runs import AUTO, PLAIN, Run
from benchmarks.measuring.workloads import BURSTY

VERSION = 1
Figure = Callable[[Run], float | None]


def whole(run: Run) -> float | None:
    """Speed from the first token on."""
    return run.speed


def after(run: Run) -> float | None:
    """Speed after the tokens that were skipped."""
    return run.speed_after


@dataclass(frozen=True, slots=True)
class Limits:
    """What must hold: ratios of speeds, and `python`, the largest share of a round outside llama.cpp."""

    auto_plain: float = 0.97
    auto_fixed: float = 0.95
    bursty_fixed: float = 1.0
    plain_server: float = 0.97
    auto_server_mean: float = 1.3
    auto_server: float = 1.0
    python: float = 0.03


def median_of(runs: Iterable[Run], setting: str, figure: Figure) -> float | None:
    """Median of one figure over a setting's runs; None where there are none."""
    values = [v for run in runs if run.setting == setting and (v := figure(run)) is not None]
    return statistics.median(values) if values else None


def ratio(runs: Sequence[Run], over: str, under: str, figure: Figure) -> float | None:
    """Median over the repetitions of `over` / `under` in the same repetition."""
    below = {run.repetition: figure(run) for run in runs if run.setting == under}
    quotients = []
    for run in runs:
        value, base = figure(run), below.get(run.repetition)
        if run.setting == over and value is not None and base:
            quotients.append(value / base)
    return statistics.median(quotients) if quotients else None


def best(runs: Sequence[Run], figure: Figure, server: bool = False) -> str | None:
    """Return the setting of highest median among plain and all fixed depths of one engine."""
    medians = {
        name: value
        for name in {run.setting for run in runs}
        if name != AUTO.name and name.startswith("server") == server
        if (value := median_of(runs, name, figure)) is not None
    }
    return max(medians, key=lambda name: (medians[name], name)) if medians else None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one workload. Speeds in tokens per second, `*_after` without the first tokens."""

    workload: str
    acceptance: float
    mean: float  # acceptance asked for
    speeds: Mapping[str, float]
    best: str
    auto_plain: float | None
    auto_best: float | None
    best_after: str | None
    auto_plain_after: float | None
    auto_best_after: float | None
    accepted_share: float | None  # of what auto drafted
    tokens_per_pass: float | None  # auto
    python_share: float | None  # the larger of plain's and auto's medians
    python_ms: float | None
    server_best: str | None
    plain_server: float | None
    auto_server: float | None


def row(measured: Measured) -> Row:
    """All figures of one workload."""
    runs = measured.runs
    speeds = {
        name: value
        for name in dict.fromkeys(run.setting for run in runs)
        if (value := median_of(runs, name, whole)) is not None
    }
    whole_answers, later = best(runs, whole), best(runs, after)
    server = best(runs, whole, server=True)
    auto = [run for run in runs if run.setting == AUTO.name]
    drafted, rounds = sum(r.drafted for r in auto), sum(r.rounds for r in auto)
    accepted = sum(r.accepted for r in auto)
    return Row(
        measured.workload.name,
        measured.acceptance,
        measured.workload.mean,
        speeds,
        whole_answers or PLAIN.name,
        ratio(runs, AUTO.name, PLAIN.name, whole),
        ratio(runs, AUTO.name, whole_answers, whole) if whole_answers else None,
        later,
        ratio(runs, AUTO.name, PLAIN.name, after),
        ratio(runs, AUTO.name, later, after) if later else None,
        accepted / drafted if drafted else None,
        (rounds + accepted) / rounds if rounds else None,
        _largest(median_of(runs, s.name, lambda r: r.python_share) for s in (PLAIN, AUTO)),
        _largest(median_of(runs, s.name, lambda r: r.python_ms) for s in (PLAIN, AUTO)),
        server,
        ratio(runs, PLAIN.name, "server plain", whole),
        ratio(runs, AUTO.name, server, whole) if server else None,
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that must hold: the figure, its limit, and whether it does."""

    what: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def verdicts(rows: Sequence[Row], limits: Limits) -> list[Verdict]:
    """Return what must hold, as far as it was measured. After the first tokens, where that is known."""
    result: list[Verdict] = []

    def least(what: str, values: Iterable[float | None], limit: float) -> None:
        known = [value for value in values if value is not None]
        if known:
            result.append(Verdict(what, min(known), limit))

    steady = [r for r in rows if r.workload != BURSTY.name]
    bursty = [r for r in rows if r.workload == BURSTY.name]
    least(
        "auto / plain, least", (_first(r.auto_plain_after, r.auto_plain) for r in rows),
        limits.auto_plain,
    )  # fmt: skip
    least(
        "auto / best fixed, least", (_first(r.auto_best_after, r.auto_best) for r in steady),
        limits.auto_fixed,
    )  # fmt: skip
    least(
        "auto / best fixed, bursty", (_first(r.auto_best_after, r.auto_best) for r in bursty),
        limits.bursty_fixed,
    )  # fmt: skip
    least("plain / llama-server plain, least", (r.plain_server for r in rows), limits.plain_server)
    good = [r.auto_server for r in rows if r.mean >= 0.4 and r.auto_server is not None]
    if good:
        mean = math.exp(statistics.fmean(math.log(value) for value in good))
        what = "auto / llama-server's best, geometric mean over α ≥ 0.4"
        result.append(Verdict(what, mean, limits.auto_server_mean))
    least("auto / llama-server's best, least", (r.auto_server for r in rows), limits.auto_server)
    python = _largest(r.python_share for r in rows)
    if python is not None:
        result.append(Verdict("Python's share of a round, largest", python, limits.python, False))
    return result


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column left, the others right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def markdown(title: str, notes: Sequence[str], measured: Sequence[Measured], limits: Limits) -> str:
    """Return the whole report."""
    rows = [row(entry) for entry in measured]
    parts = [f"# {title}\n\n", *(f"- {note}\n" for note in notes)]
    ours = [n for n in _names(rows) if not n.startswith("server")]
    parts += ["\nTokens per second (median), by drafted tokens:\n\n", _speeds(rows, ours)]
    parts += ["\nRatios, whole answers and without the first tokens:\n\n", _ratios(rows)]
    theirs = [n for n in _names(rows) if n.startswith("server")]
    if theirs:
        parts += [
            "\nllama-server, tokens per second by drafted tokens:\n\n",
            _servers(rows, theirs),
        ]
    parts += ["\n", *(verdict_line(v) for v in verdicts(rows, limits))]
    wrong = sum(not run.correct for entry in measured for run in entry.runs)
    parts.append(f"- outputs that left the right text: {wrong}\n")
    return "".join(parts)


def _names(rows: Sequence[Row]) -> list[str]:
    """Return settings in reading order: plain, depths, auto; then llama-server's."""

    def key(name: str) -> tuple[bool, float]:
        short = name.removeprefix("server ")
        if short in ("plain", "auto"):
            return name.startswith("server"), 0.0 if short == "plain" else math.inf
        return name.startswith("server"), float(short)

    return sorted({name for entry in rows for name in entry.speeds}, key=key)


def _speeds(rows: Sequence[Row], names: Sequence[str]) -> str:
    return table(
        ["α", "in these texts", *names, "best fixed"],
        (
            [r.workload, _number(r.acceptance)]
            + [_number(r.speeds.get(name), ".1f") for name in names]
            + [r.best]
            for r in rows
        ),
    )


def _ratios(rows: Sequence[Row]) -> str:
    header = ["α", "auto/plain", "auto/best", "later: auto/plain", "auto/best", "best"]
    header += ["auto accepted", "tokens/pass", "Python %", "ms/round"]
    return table(
        header,
        (
            [
                r.workload,
                _number(r.auto_plain),
                _number(r.auto_best),
                _number(r.auto_plain_after),
                _number(r.auto_best_after),
                r.best_after or "",
                _number(r.accepted_share),
                _number(r.tokens_per_pass),
                _number(None if r.python_share is None else 100 * r.python_share, ".1f"),
                _number(r.python_ms),
            ]
            for r in rows
        ),
    )


def _servers(rows: Sequence[Row], names: Sequence[str]) -> str:
    short = [name.removeprefix("server ") for name in names]
    return table(
        ["α", *short, "best", "plain/plain", "auto/its best"],
        (
            [r.workload]
            + [_number(r.speeds.get(name), ".1f") for name in names]
            + [
                (r.server_best or "").removeprefix("server "),
                _number(r.plain_server),
                _number(r.auto_server),
            ]
            for r in rows
        ),
    )


def verdict_line(verdict: Verdict) -> str:
    """Return a line of Markdown: the figure, its limit, and whether it holds."""
    sign = "≥" if verdict.at_least else "≤"
    word = "holds" if verdict.holds else "MISSED"
    return f"- {verdict.what}: {verdict.value:.3f} (must be {sign} {verdict.limit:g}): {word}\n"


def as_json(
    notes: Mapping[str, Any], measured: Sequence[Measured], limits: Limits
) -> dict[str, Any]:
    """Everything, raw runs included: other figures can be had from them later."""
    rows = [row(entry) for entry in measured]
    return {
        "version": VERSION,
        **notes,
        "rows": [asdict(entry) for entry in rows],
        "verdicts": [asdict(v) | {"holds": v.holds} for v in verdicts(rows, limits)],
        "workloads": [asdict(entry) for entry in measured],
    }
