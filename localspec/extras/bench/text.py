"""A report on a terminal or in a pipe: tables, the sentence, and the progress while a bench runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from localspec.cli.terminal import layout, render
from localspec.cli.terminal.figures import format_duration, format_share
from localspec.extras.bench.report import Estimate, Report, Sampling, Side, Workload
from localspec.extras.bench.running import BenchProgress
from localspec.extras.bench.statistics import intervals_overlap
from localspec.extras.bench.summary import NO_TIME_NOTE, join_names
from localspec.files import format_size

COLUMNS = (
    *("WORK", "PLAIN", "SPECULATIVE", "SPEED-UP", "95% INTERVAL", "FIRST TEXT", "ACCEPTED"),
    *("PER PASS", "TEXT"),
)
# If the columns do not fit into a line, the main table has those that say whether speculation pays, and a
# second table below has the others.
_MAIN_COLUMNS = ("WORK", "PLAIN", "SPECULATIVE", "SPEED-UP", "95% INTERVAL", "ACCEPTED")
_MORE_COLUMNS = ("WORK", *(name for name in COLUMNS if name not in _MAIN_COLUMNS))
HEADINGS: tuple[tuple[Sampling, str], ...] = (
    ("greedy", "Temperature 0, in tokens per second"),
    ("own", "The pair's own sampling, in tokens per second"),
)
_REDRAW_INTERVAL_S = 1.0
_SIGNIFICANT_P = 0.01  # p below which the distributions are reported to differ
_NOT_MEASURED = "not measured"


def workload_row(work: Workload) -> list[str]:
    """Return a cell for each of COLUMNS. Rates are tokens per second."""
    plain, speculative, acceptance = work.plain, work.speculative, work.acceptance
    if plain is None or speculative is None or acceptance is None:
        return [work.name, *(format_rate(side) for side in (plain, speculative)), _NOT_MEASURED]
    speed_up = work.speed_up or work.latency
    return [
        work.name,
        format_rate(plain),
        format_rate(speculative),
        format_estimate(speed_up) or _NOT_MEASURED,
        format_interval(speed_up),
        f"{plain.first_ms:.0f}, {speculative.first_ms:.0f} ms",
        format_known(acceptance.of_drafted, format_share) or "no drafts",
        format_known(acceptance.tokens_per_pass, "{:.2f}".format),
        _IDENTICAL[work.identical],
    ]


_IDENTICAL = {None: "", True: "identical", False: "differs"}
Value = TypeVar("Value")


def format_known(value: Value | None, form: Callable[[Value], str]) -> str:
    """Return a figure as text, "" for one that is not known."""
    return "" if value is None else form(value)


def format_rate(side: Side | None) -> str:
    return "" if side is None or side.rate is None else f"{side.rate:.1f}"


def format_ratio(value: float) -> str:
    return f"{value:.2f}×"


def format_estimate(estimate: Estimate | None) -> str:
    """Return a speed-up as text. With too few answers for an interval, its value would mean nothing."""
    if estimate is None:
        return ""
    return "too few" if estimate.low is None else format_ratio(estimate.value)


def format_interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.2f} to {estimate.high:.2f}"


def workload_table(workloads: Sequence[Workload]) -> list[list[str]]:
    rows = [workload_row(work) for work in workloads]
    return [list(COLUMNS), *([*cells, *[""] * (len(COLUMNS) - len(cells))] for cells in rows)]


def fit_tables(workloads: Sequence[Workload], columns: int | None) -> list[list[list[str]]]:
    """Return one table or, if it is too wide, two tables with the same rows."""
    rows = workload_table(workloads)
    main, more = (
        [
            [cell for cell, name in zip(cells, COLUMNS, strict=True) if name in names]
            for cells in rows
        ]
        for names in (_MAIN_COLUMNS, _MORE_COLUMNS)
    )
    # A table with more lines than rows was too wide.
    wraps, main_wraps = (len(layout.table(each, columns)) > len(each) for each in (rows, main))
    return [main, more] if wraps and not main_wraps else [rows]


def print_report(report: Report) -> None:
    """Print the whole report, with the sentence last."""
    render.fields(list_facts(report))
    for sampling, heading in HEADINGS:
        works = [work for work in report.workloads if work.sampling == sampling]
        for number, rows in enumerate(fit_tables(works, layout.width(sys.stdout)) if works else ()):
            render.line("" if number else f"\n{heading}:")
            render.table(rows)
    for heading, rows in (
        (theirs_heading(report), theirs_rows(report)),
        (
            "Drafts for this target, the best first; the tables above are of that one",
            ranking_rows(report),
        ),
        (
            "By the formula, and by replay of what was accepted, with the costs of passes here",
            theory_rows(report.workloads),
        ),
    ):
        if rows:
            render.line(f"\n{heading}:")
            render.table(rows)
    render.line("")
    for note in (*list_notes(report), *list_warnings(report)):
        render.line(note)
    render.line(report.sentence)


def list_facts(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, as names and values."""
    machine, speed_up = report.machine, format_estimate(report.overall)
    interval = format_interval(report.overall)
    speed_up += (f" ({interval})" if interval else " answers to be sure") * bool(speed_up)
    took = (
        f"{len(report.runs)} in {format_duration(report.seconds)}, {report.tokens} tokens at most"
    )
    entries = [
        ("pair", report.pair),
        ("target", report.target or ""),
        ("draft", report.draft or "none"),
        ("machine", f"{machine.processor}, {machine.cores} cores, {machine.system}"),
        ("memory", format_size(report.memory) if report.memory else ""),
        ("answers", took),
        ("speed-up", speed_up),
    ]
    return [(name, value) for name, value in entries if value]


def theirs_heading(report: Report) -> str:
    """Return the heading of the table with another server's figures."""
    return (
        f"The same at {report.against}, as it is set up; the ratio is our rate with drafts by its"
    )


def theirs_rows(report: Report) -> list[list[str]]:
    """Return the rows of the table with another server's rates beside ours; none if it was not asked."""
    our_sides = {
        work.name: work.speculative for work in report.workloads if work.sampling == "greedy"
    }
    rows = []
    for result in report.theirs:
        sides = (result.side, our_sides.get(result.workload))
        times = [f"{side.first_ms:.0f}" for side in sides if side]
        drafts = format_share((result.accepted or 0) / result.drafted) if result.drafted else ""
        differs = "its prompts differ in length" if result.same_prompts is False else ""
        rows.append(
            [
                result.workload,
                *map(format_rate, sides),
                format_estimate(result.ours),
                format_interval(result.ours),
                f"{', '.join(times)} ms" if len(times) == 2 else "",
                drafts,
                _IDENTICAL[result.identical],
                result.note or differs,
            ]
        )
    return [list(_THEIRS_COLUMNS), *rows] if rows else []


_THEIRS_COLUMNS = (
    *("WORK", "THEIRS", "OURS", "RATIO", "95% INTERVAL", "FIRST TEXT", "ITS DRAFTS", "TEXT"),
    "NOTE",
)


def ranking_rows(report: Report) -> list[list[str]]:
    """Return the rows of the table that compares several drafts for one target; none if there is one."""
    rows = [
        [
            ranked.draft,
            format_estimate(ranked.overall),
            format_known(ranked.code, format_ratio),
            format_known(ranked.text, format_ratio),
            format_known(ranked.of_drafted, format_share),
            format_known(ranked.size_ratio, format_share),
            ranked.note or ranked.sentence,
        ]
        for ranked in report.drafts
    ]
    header = ["DRAFT", "SPEED-UP", "CODE", "TEXT", "ACCEPTED", "SIZE", "RESULT"]
    return [header, *rows] if rows else []


def theory_rows(workloads: Sequence[Workload]) -> list[list[str]]:
    """Return the rows of the table with predictions; none if there are none."""
    rows = [
        [
            work.name,
            format_known(work.acceptance.conditional, format_share),
            f"{theory.depth:.1f}",
            f"{theory.tokens_per_pass:.2f}",
            format_ratio(theory.speed_up),
            format_known(theory.best_speed_up, f"{theory.best_depth}: {{:.2f}}×".format),
            format_known(theory.optimum, format_ratio),
            format_known(theory.reached, format_share),
            format_known(theory.regret, format_share),
        ]
        for work in workloads
        if (theory := work.theory) and work.acceptance
    ]
    return [list(_THEORY_COLUMNS), *rows] if rows else []


_THEORY_COLUMNS = (
    *("WORK", "ALPHA", "DEPTH", "TOKENS", "SPEED-UP", "BEST FIXED", "OPTIMUM", "REACHED"),
    "REGRET",
)


def list_notes(report: Report) -> list[str]:
    """Return what a reader must know in addition to the figures, except `warnings`."""
    greedy = [work for work in report.workloads if work.sampling == "greedy"]
    unmeasured = [work.name for work in greedy if work.note == NO_TIME_NOTE]
    notes = [f"There was no time for {join_names(unmeasured)}."] if unmeasured else []
    for work in report.workloads:
        if work.note not in ("", NO_TIME_NOTE) and work.sampling == "greedy":
            notes.append(f"{work.name}: {work.note}")
        for each in work.differences:
            gap = format_known(each.gap, "{:.3f} in log-probability".format)
            preference = f"; the target preferred its token by {gap}" if gap else ""
            texts = f"{each.plain!r} and {each.speculative!r}{preference}"
            notes.append(f"{work.name}: the texts part after {each.at} characters, {texts}.")
    if report.theirs and all(result.same_prompts for result in report.theirs if result.side):
        notes.append(f"All prompts had as many tokens at {report.against} as here.")
    if sampled := report.distribution:
        word = "differ" if sampled.p < _SIGNIFICANT_P else "begin alike, as they should"
        ways = f"{sampled.answers} sampled answers with drafts and {sampled.answers} without"
        notes.append(f"{ways} {word} (p = {sampled.p:.3f}).")
    return [*notes, *report.notes]


def list_warnings(report: Report) -> list[str]:
    """Return why figures may be wrong or too few."""
    warnings = []
    if report.partial:
        warnings.append("Interrupted: these are the answers that were complete by then.")
    if report.quiet is False:
        warnings.append("The machine was not quiet, so figures may be wrong.")
    return warnings


class LiveTable:
    """The table so far and a line of progress, redrawn in place; nothing outside a terminal."""

    def __init__(self) -> None:
        self._drawn, self._shown = 0, 0.0
        self._terminal = render.is_drawn_on(sys.stderr)

    def show(self, progress: BenchProgress, workloads: Callable[[], list[Workload]]) -> None:
        """Redraw at most once a second, because adding up delays the next answer."""
        if not self._terminal or time.monotonic() - self._shown < _REDRAW_INTERVAL_S:
            return
        columns = (layout.width(sys.stderr) or 80) - 1
        time_left = format_known(
            progress.left_s, lambda left: f"about {format_duration(left)} left"
        )
        current = f"{progress.turn.work.name}, {progress.who}"
        parts = [f"{progress.done}/{progress.total}", current, time_left, "Ctrl-C: report now"]
        lines = [layout.join_fitting([part for part in parts if part], columns)]
        if works := [work for work in workloads() if work.verdict != "not measured"]:
            lines = [*layout.table(fit_tables(works, columns)[0], columns), *lines]
        max_lines = shutil.get_terminal_size().lines - 1
        lines = [render.harmless(line, lines=False)[:columns] for line in lines][-max_lines:]
        self.clear()
        render.stderr("\n".join(lines) + "\n")
        self._drawn, self._shown = len(lines), time.monotonic()

    def show_message(self, text: str) -> None:
        """Show a line until the next output, if there is a terminal."""
        if self._terminal:
            self.clear()
            render.stderr(f"{render.harmless(text, lines=False)}\n")
            self._drawn = 1

    def clear(self) -> None:
        if self._drawn:
            render.stderr(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0


def print_comparison(first: Report, second: Report, names: tuple[str, str]) -> None:
    """Print two reports side by side, work by work."""
    fields = []
    for name, report in zip(names, (first, second), strict=True):
        version, partial = f"localspec {report.localspec}", ", partial" * report.partial
        where = f"{version}, {report.machine.processor}{partial}"
        fields.append((name, f"{report.pair}, {report.when}, {where}"))
    render.fields(fields)
    second_works = {(work.name, work.sampling): work for work in second.workloads}
    rows = [["WORK", "SAMPLING", "PLAIN", "SPECULATIVE", "SPEED-UP", "INTERVALS"]]
    overlaps = []
    for work in first.workloads:
        counterpart = second_works.get((work.name, work.sampling))
        if counterpart is None or work.speed_up is None or counterpart.speed_up is None:
            continue
        speed_ups = (work.speed_up, counterpart.speed_up)
        overlaps.append(intervals_overlap(*speed_ups))
        rows.append(
            [
                work.name,
                work.sampling,
                _format_change(work.plain, counterpart.plain),
                _format_change(work.speculative, counterpart.speculative),
                " → ".join(map(format_estimate, speed_ups)),
                {None: "", True: "overlap", False: "apart"}[overlaps[-1]],
            ]
        )
    if len(rows) == 1:
        render.line("No kind of work was measured in both.")
        return
    render.table(rows)
    differing = overlaps.count(False)
    if overlaps.count(None) == len(overlaps):
        render.line("There are too few answers to say whether the speed-ups agree.")
    elif differing:
        of_all = f"{differing} of {len(overlaps)}"
        render.line(f"{of_all} speed-ups differ by more than their intervals.")
    else:
        render.line("The speed-ups agree within their intervals.")


def _format_change(before: Side | None, after: Side | None) -> str:
    if before is None or after is None or not before.rate or not after.rate:
        return ""
    return f"{format_rate(before)} → {format_rate(after)} ({100 * (after.rate / before.rate - 1):+.0f}%)"
