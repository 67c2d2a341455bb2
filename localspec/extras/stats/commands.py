"""`localspec stats`: tokens, speed and time saved over days."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from localspec.cli import suggest
from localspec.cli.app import json_option, number_option
from localspec.cli.terminal import render
from localspec.cli.terminal.figures import format_time
from localspec.client.conversations import ConversationsClient
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, UsageError
from localspec.paths import expand_user


@click.command(
    help="Show how many tokens were generated, how fast, and how much time speculation saved: by pair, "
    "by kind of work and by day. The figures come from the history. Below stands what reading next turns "
    "ahead has saved, by client.",
    epilog="Examples:\n\n\b\n  localspec stats -d 7\n  localspec stats -d 365 --pair coder-7b\n"
    "  localspec stats -d 7 --html stats.html",
)
@number_option(
    "-d",
    "--days",
    low=1,
    high=10_000,
    default=30,
    show_default=True,
    help="Number of days, up to today.",
)
@click.option(
    "--pair", default="", metavar="NAME", shell_complete=suggest.pairs, help="Count only this pair."
)
@json_option
@click.option(
    "--html",
    metavar="FILE",
    shell_complete=suggest.files,
    help="Write an HTML page to FILE; - is stdout.",
)
def command(days: int, pair: str, as_json: bool, html: str | None) -> None:
    if as_json and html:
        raise UsageError("--json and --html cannot be used together.")
    statistics = ConversationsClient().statistics(days, pair)
    if as_json:
        render.record(statistics)
        return
    from localspec.extras.stats import page

    if html == "-":
        render.text(page.render_page(statistics))
    elif html:
        file = expand_user(html)
        file.write_text(page.render_page(statistics), encoding="utf-8")
        render.line(f"Saved {file}.")
    else:
        page.print_statistics(statistics)
        _print_tuned_drafts(statistics)


def _print_tuned_drafts(statistics: dict[str, Any]) -> None:
    """Print a sentence for each counted pair that drafts with a tuned draft."""
    client = PairsClient()
    for name in (group["name"] for group in statistics["by_pair"]):
        tuned = None
        with contextlib.suppress(LocalspecError):  # a pair that was removed since
            tuned = client.pair(name).get("tuned")
        if tuned:
            since = format_time(tuned["created"])
            told = f"{name} uses a tuned draft since {since}."
            render.line(f"{told} What it gained: localspec show {name}")
