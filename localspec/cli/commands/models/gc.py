"""`localspec gc`."""

from __future__ import annotations

import click

from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.client.pairs import PairsClient


@click.command(
    help="Delete files that no pair or conversation needs, including those of cancelled pulls.",
    epilog="Example: localspec gc --dry-run",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(dry_run: bool, as_json: bool) -> int:
    result = PairsClient().collect(dry_run=dry_run)
    if as_json:
        render.record(result)
        return 0
    for file in result["files"]:
        render.line(file)
    if not result["files"]:
        render.line("Nothing to delete.")
    else:
        verb = "would be freed" if dry_run else "freed"
        render.line(f"{size(result['freed'])} {verb}.")
    return 0
