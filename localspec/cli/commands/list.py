"""`localspec list` and `localspec catalogue`: the pairs that are installed, and those that can be pulled."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import topics
from localspec.cli.app import flag, json_option
from localspec.cli.commands import import_
from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError


@click.command(
    help="List installed pairs; * marks the one that answers where none is named (`localspec use`).",
    epilog="Examples:\n\n\b\n  localspec list\n  localspec list --all",
)
@flag("-a", "--all", "everything", help="Also list pairs available to pull.")
@flag("--disk", help="List models of other programs, like `localspec import`.")
@json_option
def list_command(everything: bool, disk: bool, as_json: bool) -> None:
    if disk:
        (render.record if as_json else pairs.disk)(import_.look(()))
        return
    listed = PairsClient().pairs(everything=everything)
    if as_json:
        render.record(listed)
        return
    (_print_catalogue if everything else pairs.pairs)(listed["pairs"], listed.get("configured", ""))
    pairs.problems(listed)


@click.command(
    help="List pairs available to pull, and whether each fits into this machine's free "
    "memory; 'partly' means that it needs main memory besides the GPU's. Drafts come "
    "from a draft model, from heads trained with the target (MTP) or from the text itself (n-gram). "
    "TOKENS/S is a forecast, from plain writing to that with drafts. "
    "With TEXT, list only pairs whose name or description contains it.",
    epilog="Examples:\n\n\b\n  localspec catalogue --fits\n  localspec catalogue coder",
)
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@flag("--fits", help="Only list pairs that fit.")
@json_option
def catalogue_command(words: tuple[str, ...], fits: bool, as_json: bool) -> None:
    listed = PairsClient().pairs(everything=True)
    found = []
    for entry in listed["pairs"]:
        names = [entry["name"], *entry["aliases"], entry["target"], entry["draft"] or ""]
        text = " ".join([*names, entry["summary"]]).lower()
        may_fit = not fits or entry["fits"] in ("yes", "partly")
        if entry["memory"] and may_fit and all(word.lower() in text for word in words):
            found.append(entry)
    if as_json:
        render.record({**listed, "pairs": found})
        return
    if words and not found:
        advice = "For a model on the Hugging Face hub: localspec pull OWNER/REPO"
        mistakes = "".join(f". {problem}" for problem in listed["problems"])
        raise LocalspecError(
            f"No pair in the catalogue matches '{' '.join(words)}'. {advice}{mistakes}"
        )
    _print_catalogue(found, listed.get("configured", ""))
    render.line(f"\n{pairs.format_memory(listed)}. To download one: localspec pull NAME")
    pairs.problems(listed)


def _print_catalogue(entries: list[dict[str, Any]], configured: str) -> None:
    # The best are at the top, which a long list would move out of a small window.
    topics.show_text("\n".join(render.table_lines(pairs.catalogue_rows(entries, configured))))
