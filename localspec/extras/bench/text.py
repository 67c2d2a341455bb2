"""A report on a terminal or in a pipe: tables, the sentence, and the progress while a bench runs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

from localspec.cli.terminal import layout, render
from localspec.cli.terminal.figures import format_duration, format_share
from localspec.extras.bench.report import Estimate, Report, Sampling, Side, Workload
from localspec.extras.bench.running import BenchProgress
from localspec.extras.bench.statistics import intervals_overlap
from localspec.extras.bench.summary import NO_TIME_NOTE, join_names
from localspec.files import format_size

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
        format_ratio(speed_up.value) if speed_up else _NOT_MEASURED,
        format_interval(speed_up),
        f"{plain.first_ms:.0f}, {speculative.first_ms:.0f} ms",
        "no drafts" if acceptance.of_drafted is None else format_share(acceptance.of_drafted),
        "" if acceptance.tokens_per_pass is None else f"{acceptance.tokens_per_pass:.2f}",
        "" if work.identical is None else "identical" if work.identical else "differs",
    ]


def format_rate(side: Side | None) -> str:
    return "" if side is None or side.rate is None else f"{side.rate:.1f}"


def format_ratio(value: float) -> str:
    return f"{value:.2f}×"


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
    whole_wraps, main_wraps = (
        len(layout.table(shown, columns)) > len(shown) for shown in (rows, main)
    )
    return [main, more] if whole_wraps and not main_wraps else [rows]


def print_report(report: Report) -> None:
    """Print the whole report, with the sentence last."""
    render.fields(list_facts(report))
    for sampling, heading in HEADINGS:
        works = [work for work in report.workloads if work.sampling == sampling]
        if works:
            for number, rows in enumerate(fit_tables(works, layout.width(sys.stdout))):
                render.line("" if number else f"\n{heading}:")
                render.table(rows)
    if report.theirs:
        render.line(f"\n{theirs_heading(report)}:")
        render.table(theirs_rows(report))
    if report.drafts:
        render.line("\nDrafts for this target, the best first; the tables above are of that one:")
        render.table(ranking_rows(report))
    if theory := theory_rows(report.workloads):
        render.line(
            "\nBy the formula, and by replay of what was accepted, with the costs of passes here:"
        )
        render.table(theory)
    render.line("")
    for note in (*list_notes(report), *list_warnings(report)):
        render.line(note)
    render.line(report.sentence)


def list_facts(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, as names and values."""
    machine = report.machine
    entries = [
        ("pair", report.pair),
        ("target", report.target or ""),
        ("draft", report.draft or "none"),
        ("machine", f"{machine.processor}, {machine.cores} cores, {machine.system}"),
        ("memory", format_size(report.memory) if report.memory else ""),
        (
            "answers",
            f"{len(report.runs)} in {format_duration(report.seconds)}, {report.tokens} tokens at most",
        ),
    ]
    if report.overall:
        entries.append(
            (
                "speed-up",
                f"{format_ratio(report.overall.value)} {_in_brackets(report.overall)}".strip(),
            )
        )
    return [(name, value) for name, value in entries if value]


def _in_brackets(estimate: Estimate) -> str:
    return f"({text})" if (text := format_interval(estimate)) else ""


def theirs_heading(report: Report) -> str:
    """Return the heading of the table with another server's figures."""
    return (
        f"The same at {report.against}, as it is set up; the ratio is our rate with drafts by its"
    )


def theirs_rows(report: Report) -> list[list[str]]:
    """Return the rows of the table with another server's rates beside ours."""
    our_sides = {
        work.name: work.speculative for work in report.workloads if work.sampling == "greedy"
    }
    rows = [list(_THEIRS_COLUMNS)]
    for result in report.theirs:
        their_side, our_side = result.side, our_sides.get(result.workload)
        first = ""
        if their_side is not None and our_side is not None:
            first = f"{their_side.first_ms:.0f}, {our_side.first_ms:.0f} ms"
        ratio = "" if result.ours is None else format_ratio(result.ours.value)
        rates = [format_rate(side) for side in (their_side, our_side)]
        drafts = "" if not result.drafted else format_share((result.accepted or 0) / result.drafted)
        texts = "" if result.identical is None else "identical" if result.identical else "differs"
        note = result.note
        if not note and result.same_prompts is False:
            note = "its prompts differ in length"
        intervals = format_interval(result.ours)
        rows.append([result.workload, *rates, ratio, intervals, first, drafts, texts, note])
    return rows


_THEIRS_COLUMNS = (
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


def ranking_rows(report: Report) -> list[list[str]]:
    """Return the rows of the table that compares several drafts for one target."""
    rows = [["DRAFT", "SPEED-UP", "CODE", "TEXT", "ACCEPTED", "SIZE", "RESULT"]]
    for ranked in report.drafts:
        overall = "" if ranked.overall is None else format_ratio(ranked.overall.value)
        kinds = [
            "" if value is None else format_ratio(value) for value in (ranked.code, ranked.text)
        ]
        shares = [
            "" if value is None else format_share(value)
            for value in (ranked.of_drafted, ranked.size_ratio)
        ]
        rows.append([ranked.draft, overall, *kinds, *shares, ranked.note or ranked.sentence])
    return rows


def theory_rows(workloads: Sequence[Workload]) -> list[list[str]]:
    """Return the rows of the table with predictions; none if there are none."""
    rows = []
    for work in workloads:
        if (theory := work.theory) is None or work.acceptance is None:
            continue
        conditional = work.acceptance.conditional
        rows.append(
            [
                work.name,
                "" if conditional is None else format_share(conditional),
                f"{theory.depth:.1f}",
                f"{theory.tokens_per_pass:.2f}",
                format_ratio(theory.speed_up),
                ""
                if theory.best_speed_up is None
                else f"{theory.best_depth}: {format_ratio(theory.best_speed_up)}",
                "" if theory.optimum is None else format_ratio(theory.optimum),
                "" if theory.reached is None else format_share(theory.reached),
                "" if theory.regret is None else format_share(theory.regret),
            ]
        )
    return [list(_THEORY_COLUMNS), *rows] if rows else []


_THEORY_COLUMNS = (
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


def list_notes(report: Report) -> list[str]:
    """Return what a reader must know in addition to the figures, except `warnings`."""
    unmeasured = [
        work.name
        for work in report.workloads
        if work.note == NO_TIME_NOTE and work.sampling == "greedy"
    ]
    notes = [f"There was no time for {join_names(unmeasured)}."] if unmeasured else []
    for work in report.workloads:
        if work.note not in ("", NO_TIME_NOTE) and work.sampling == "greedy":
            notes.append(f"{work.name}: {work.note}")
        notes += [
            _describe_difference(
                work.name, difference.at, difference.plain, difference.speculative, difference.gap
            )
            for difference in work.differences
        ]
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


def _describe_difference(name: str, at: int, plain: str, other: str, gap: float | None) -> str:
    preference = (
        "" if gap is None else f"; the target preferred its token by {gap:.3f} in log-probability"
    )
    return f"{name}: the texts part after {at} characters, {plain!r} and {other!r}{preference}."


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
        time_left = (
            "" if progress.left_s is None else f"about {format_duration(progress.left_s)} left"
        )
        current = f"{progress.turn.work.name}, {progress.who}"
        parts = [f"{progress.done}/{progress.total}", current, time_left, "Ctrl-C: report now"]
        lines = [layout.join_fitting([part for part in parts if part], columns)]
        works = [work for work in workloads() if work.verdict != "not measured"]
        if works:
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
    render.fields(
        [
            (name, _describe_report(report))
            for name, report in zip(names, (first, second), strict=True)
        ]
    )
    second_works = {(work.name, work.sampling): work for work in second.workloads}
    rows = [["WORK", "SAMPLING", "PLAIN", "SPECULATIVE", "SPEED-UP", "INTERVALS"]]
    differing = unknown = 0
    for work in first.workloads:
        counterpart = second_works.get((work.name, work.sampling))
        if counterpart is None or work.speed_up is None or counterpart.speed_up is None:
            continue
        overlap = intervals_overlap(work.speed_up, counterpart.speed_up)
        differing += overlap is False
        unknown += overlap is None
        rows.append(
            [
                work.name,
                work.sampling,
                _format_change(work.plain, counterpart.plain),
                _format_change(work.speculative, counterpart.speculative),
                f"{format_ratio(work.speed_up.value)} → {format_ratio(counterpart.speed_up.value)}",
                "" if overlap is None else "overlap" if overlap else "apart",
            ]
        )
    if len(rows) == 1:
        render.line("No kind of work was measured in both.")
        return
    render.table(rows)
    if unknown == len(rows) - 1:
        render.line("There are too few answers to say whether the speed-ups agree.")
        return
    render.line(
        "The speed-ups agree within their intervals."
        if not differing
        else f"{differing} of {len(rows) - 1} speed-ups differ by more than their intervals."
    )


def _describe_report(report: Report) -> str:
    partial = ", partial" if report.partial else ""
    return f"{report.pair}, {report.when}, localspec {report.localspec}, {report.machine.processor}{partial}"


def _format_change(before: Side | None, after: Side | None) -> str:
    if before is None or after is None or not before.rate or not after.rate:
        return ""
    return f"{format_rate(before)} → {format_rate(after)} ({100 * (after.rate / before.rate - 1):+.0f}%)"
