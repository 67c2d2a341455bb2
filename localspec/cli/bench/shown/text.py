"""A report on a terminal or in a pipe: tables, the sentence, and how far it is while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

from localspec.cli.bench.report import Estimate, Report, Sampling, Side, Workload
from localspec.cli.bench.running import Now
from localspec.cli.bench.statistics import agree
from localspec.cli.bench.summary import LATE
from localspec.cli.bench.verdict import listed
from localspec.cli.terminal import layout, render
from localspec.cli.terminal.figures import duration, share
from localspec.cli.terminal.pairs import size

COLUMNS = (
    "WORK",
    "PLAIN",
    "SPECULATIVE",
    "SPEED-UP",
    "95% INTERVAL",
    "FIRST TEXT",
    "ACCEPTED",
    "PER PASS",
    "TEXT",
)
# Where they do not fit into a line: those that say whether it pays, and in a table below it the others.
_MAIN = ("WORK", "PLAIN", "SPECULATIVE", "SPEED-UP", "95% INTERVAL", "ACCEPTED")
_MORE = ("WORK", *(each for each in COLUMNS if each not in _MAIN))
HEADINGS: tuple[tuple[Sampling, str], ...] = (
    ("greedy", "Temperature 0, in tokens per second"),
    ("own", "The pair's own sampling, in tokens per second"),
)
_EVERY = 1.0  # seconds
_UNLIKELY = 0.01  # p of a difference that is told
_NOT_MEASURED = "not measured"


def row(told: Workload) -> list[str]:
    """A cell for each of COLUMNS; rates in tokens per second."""
    plain, drafted, found = told.plain, told.speculative, told.acceptance
    if plain is None or drafted is None or found is None:
        return [told.name, *(rate(each) for each in (plain, drafted)), _NOT_MEASURED]
    speed_up = told.speed_up or told.latency
    return [
        told.name,
        rate(plain),
        rate(drafted),
        times(speed_up.value) if speed_up else _NOT_MEASURED,
        interval(speed_up),
        f"{plain.first_ms:.0f}, {drafted.first_ms:.0f} ms",
        "no drafts" if found.of_drafted is None else share(found.of_drafted),
        "" if found.tokens_per_pass is None else f"{found.tokens_per_pass:.2f}",
        "" if told.identical is None else "identical" if told.identical else "differs",
    ]


def rate(side: Side | None) -> str:
    return "" if side is None or side.rate is None else f"{side.rate:.1f}"


def times(value: float) -> str:
    return f"{value:.2f}×"


def interval(found: Estimate | None) -> str:
    if found is None or found.low is None or found.high is None:
        return ""
    return f"{found.low:.2f} to {found.high:.2f}"


def table(workloads: Sequence[Workload]) -> list[list[str]]:
    rows = [row(each) for each in workloads]
    return [list(COLUMNS), *([*cells, *[""] * (len(COLUMNS) - len(cells))] for cells in rows)]


def tables(workloads: Sequence[Workload], room: int | None) -> list[list[list[str]]]:
    """The table, or two that have a line for each row where it is too wide."""
    whole = table(workloads)
    main, more = (
        [
            [cell for cell, name in zip(cells, COLUMNS, strict=True) if name in names]
            for cells in whole
        ]
        for names in (_MAIN, _MORE)
    )
    wide, narrow = (len(layout.table(rows, room)) > len(rows) for rows in (whole, main))
    return [main, more] if wide and not narrow else [whole]


def show(report: Report) -> None:
    """All that is known, the sentence last."""
    render.fields(facts(report))
    for sampling, heading in HEADINGS:
        some = [each for each in report.workloads if each.sampling == sampling]
        if some:
            for at, rows in enumerate(tables(some, layout.width(sys.stdout))):
                render.line("" if at else f"\n{heading}:")
                render.table(rows)
    if report.theirs:
        render.line(f"\n{beside(report)}:")
        render.table(theirs(report))
    if report.drafts:
        render.line("\nDrafts for this target, the best first; the tables above are of that one:")
        render.table(ranking(report))
    if theory := theories(report.workloads):
        render.line(
            "\nBy the formula, and by replay of what was accepted, with the costs of passes here:"
        )
        render.table(theory)
    render.line("")
    for note in (*notes(report), *warnings(report)):
        render.line(note)
    render.line(report.sentence)


def facts(report: Report) -> list[tuple[str, str]]:
    """What was measured."""
    machine = report.machine
    found = [
        ("pair", report.pair),
        ("target", report.target or ""),
        ("draft", report.draft or "none"),
        ("machine", f"{machine.processor}, {machine.cores} cores, {machine.system}"),
        ("memory", size(report.memory) if report.memory else ""),
        (
            "answers",
            f"{len(report.runs)} in {duration(report.seconds)}, {report.tokens} tokens at most",
        ),
    ]
    if report.overall:
        found.append(
            ("speed-up", f"{times(report.overall.value)} {_in_brackets(report.overall)}".strip())
        )
    return [(name, value) for name, value in found if value]


def _in_brackets(found: Estimate) -> str:
    return f"({said})" if (said := interval(found)) else ""


def beside(report: Report) -> str:
    """What the table of another server's figures shows."""
    return (
        f"The same at {report.against}, as it is set up; the ratio is our rate with drafts by its"
    )


def theirs(report: Report) -> list[list[str]]:
    """Another server's rates beside ours."""
    ours = {each.name: each.speculative for each in report.workloads if each.sampling == "greedy"}
    rows = [list(_THEIRS)]
    for each in report.theirs:
        side, own = each.side, ours.get(each.workload)
        first = "" if side is None or own is None else f"{side.first_ms:.0f}, {own.first_ms:.0f} ms"
        ratio = "" if each.ours is None else times(each.ours.value)
        rates = [rate(one) for one in (side, own)]
        drafts = "" if not each.drafted else share((each.accepted or 0) / each.drafted)
        texts = "" if each.identical is None else "identical" if each.identical else "differs"
        note = each.note or ("its prompts differ in length" if each.same_prompts is False else "")
        rows.append([each.workload, *rates, ratio, interval(each.ours), first, drafts, texts, note])
    return rows


_THEIRS = (
    "WORK",
    "THEIRS",
    "OURS",
    "RATIO",
    "95% INTERVAL",
    "FIRST TEXT",
    "ITS DRAFTS",
    "TEXT",
    "NOTE",
)


def ranking(report: Report) -> list[list[str]]:
    """Several drafts for one target."""
    rows = [["DRAFT", "SPEED-UP", "CODE", "TEXT", "ACCEPTED", "SIZE", "RESULT"]]
    for each in report.drafts:
        overall = "" if each.overall is None else times(each.overall.value)
        kinds = ["" if value is None else times(value) for value in (each.code, each.text)]
        shares = [
            "" if value is None else share(value) for value in (each.of_drafted, each.size_ratio)
        ]
        rows.append([each.draft, overall, *kinds, *shares, each.note or each.sentence])
    return rows


def theories(workloads: Sequence[Workload]) -> list[list[str]]:
    """Rows of a table; none where nothing is known."""
    rows = []
    for each in workloads:
        if (said := each.theory) is None or each.acceptance is None:
            continue
        conditional = each.acceptance.conditional
        rows.append(
            [
                each.name,
                "" if conditional is None else share(conditional),
                f"{said.depth:.1f}",
                f"{said.tokens_per_pass:.2f}",
                times(said.speed_up),
                ""
                if said.best_speed_up is None
                else f"{said.best_depth}: {times(said.best_speed_up)}",
                "" if said.optimum is None else times(said.optimum),
                "" if said.reached is None else share(said.reached),
                "" if said.regret is None else share(said.regret),
            ]
        )
    return [list(_THEORY), *rows] if rows else []


_THEORY = (
    "WORK",
    "ALPHA",
    "DEPTH",
    "TOKENS",
    "SPEED-UP",
    "BEST FIXED",
    "OPTIMUM",
    "REACHED",
    "REGRET",
)


def notes(report: Report) -> list[str]:
    """What a reader must know beside the figures, but for `warnings`."""
    late = [
        each.name for each in report.workloads if each.note == LATE and each.sampling == "greedy"
    ]
    found = [f"There was no time for {listed(late)}."] if late else []
    for each in report.workloads:
        if each.note not in ("", LATE) and each.sampling == "greedy":
            found.append(f"{each.name}: {each.note}")
        found += [
            _parts(each.name, one.at, one.plain, one.speculative, one.gap)
            for one in each.differences
        ]
    if report.theirs and all(each.same_prompts for each in report.theirs if each.side):
        found.append(f"All prompts had as many tokens at {report.against} as here.")
    if sampled := report.distribution:
        word = "differ" if sampled.p < _UNLIKELY else "begin alike, as they should"
        ways = f"{sampled.answers} sampled answers with drafts and {sampled.answers} without"
        found.append(f"{ways} {word} (p = {sampled.p:.3f}).")
    return [*found, *report.notes]


def warnings(report: Report) -> list[str]:
    """Why figures may be wrong, or too few."""
    found = []
    if report.partial:
        found.append("Interrupted: these are the answers that were complete by then.")
    if report.quiet is False:
        found.append("The machine was not quiet, so figures may be wrong.")
    return found


def _parts(name: str, at: int, plain: str, other: str, gap: float | None) -> str:
    how = "" if gap is None else f"; the target preferred its token by {gap:.3f} in log-probability"
    return f"{name}: the texts part after {at} characters, {plain!r} and {other!r}{how}."


class Live:
    """The table so far and a line of progress, in place on a terminal; elsewhere nothing."""

    def __init__(self) -> None:
        self._drawn, self._shown = 0, 0.0
        self._terminal = render.is_drawn_on(sys.stderr)

    def show(self, now: Now, workloads: Callable[[], list[Workload]]) -> None:
        """At most once a second: adding up takes time that the next answer waits for."""
        if not self._terminal or time.monotonic() - self._shown < _EVERY:
            return
        columns = (layout.width(sys.stderr) or 80) - 1
        left = "" if now.left_s is None else f"about {duration(now.left_s)} left"
        what = f"{now.turn.work.name}, {now.who}"
        parts = [f"{now.done}/{now.of}", what, left, "Ctrl-C: report now"]
        lines = [layout.fitting([each for each in parts if each], columns)]
        measured = [each for each in workloads() if each.verdict != "not measured"]
        if measured:
            lines = [*layout.table(tables(measured, columns)[0], columns), *lines]
        room = shutil.get_terminal_size().lines - 1
        lines = [render.harmless(line, lines=False)[:columns] for line in lines][-room:]
        self.clear()
        render.stderr("\n".join(lines) + "\n")
        self._drawn, self._shown = len(lines), time.monotonic()

    def say(self, text: str) -> None:
        """A line where there is a terminal, until the next."""
        if self._terminal:
            self.clear()
            render.stderr(f"{render.harmless(text, lines=False)}\n")
            self._drawn = 1

    def clear(self) -> None:
        if self._drawn:
            render.stderr(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0


def compare(first: Report, second: Report, names: tuple[str, str]) -> None:
    """Two reports, work by work."""
    render.fields([(name, _what(each)) for name, each in zip(names, (first, second), strict=True)])
    others = {(each.name, each.sampling): each for each in second.workloads}
    rows = [["WORK", "SAMPLING", "PLAIN", "SPECULATIVE", "SPEED-UP", "INTERVALS"]]
    apart = 0
    for each in first.workloads:
        other = others.get((each.name, each.sampling))
        if other is None or each.speed_up is None or other.speed_up is None:
            continue
        same = agree(each.speed_up, other.speed_up)
        apart += same is False
        rows.append(
            [
                each.name,
                each.sampling,
                _change(each.plain, other.plain),
                _change(each.speculative, other.speculative),
                f"{times(each.speed_up.value)} → {times(other.speed_up.value)}",
                "" if same is None else "overlap" if same else "apart",
            ]
        )
    if len(rows) == 1:
        render.line("No kind of work was measured in both.")
        return
    render.table(rows)
    render.line(
        "All speed-ups agree within their intervals."
        if not apart
        else f"{apart} of {len(rows) - 1} speed-ups differ by more than their intervals."
    )


def _what(report: Report) -> str:
    partial = ", partial" if report.partial else ""
    return f"{report.pair}, {report.when}, localspec {report.localspec}, {report.machine.processor}{partial}"


def _change(before: Side | None, after: Side | None) -> str:
    if before is None or after is None or not before.rate or not after.rate:
        return ""
    return f"{rate(before)} → {rate(after)} ({100 * (after.rate / before.rate - 1):+.0f}%)"
