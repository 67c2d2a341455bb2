"""`localspec catalogue`."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError


@click.command(
    help="List pairs available to pull, and whether each fits into this machine's free "
    "memory; 'partly' means that it needs main memory besides the GPU's. Drafts come "
    "from a draft model, from heads trained with the target (MTP) or from the text itself (n-gram). "
    "With TEXT, list only pairs whose name or description contains it.",
    epilog="Examples:\n\n\b\n  localspec catalogue --fits\n  localspec catalogue coder",
)
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@click.option("--fits", is_flag=True, help="Only list pairs that fit.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(words: tuple[str, ...], fits: bool, as_json: bool) -> int:
    listed = PairsClient().pairs(everything=True)
    listed["pairs"] = [
        entry
        for entry in listed["pairs"]
        if entry["memory"] and not (fits and entry["fits"] not in ("yes", "partly"))
        if all(word.lower() in _searched_text(entry) for word in words)
    ]
    if as_json:
        render.record(listed)
        return 0
    if words and not listed["pairs"]:
        raise LocalspecError(
            f"No pair in the catalogue matches '{' '.join(words)}'. For a model on the Hugging Face hub: "
            "localspec pull OWNER/REPO"
        )
    pairs.catalogue(listed["pairs"], listed.get("configured", ""))
    render.line(f"\n{pairs.format_memory(listed)}. To download one: localspec pull NAME")
    pairs.problems(listed)
    return 0


def _searched_text(entry: dict[str, Any]) -> str:
    """Return the text that a search looks through: names, description and repositories of a pair."""
    names = [entry["name"], *entry["aliases"], entry["target"], entry["draft"] or ""]
    return " ".join([*names, entry["summary"]]).lower()
