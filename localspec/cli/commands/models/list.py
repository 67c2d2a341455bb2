"""`localspec list`."""

from __future__ import annotations

import click

from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient


@click.command(
    help="List installed pairs; * marks the one that answers where none is named (`localspec use`).",
    epilog="Examples:\n\n\b\n  localspec list\n  localspec list --all",
)
@click.option("-a", "--all", "everything", is_flag=True, help="Also list pairs available to pull.")
@click.option(
    "--disk", is_flag=True, help="List models of other programs, like `localspec import`."
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(everything: bool, disk: bool, as_json: bool) -> int:
    if disk:
        from localspec.cli.commands.models import import_

        report = import_.look(())
        (render.record if as_json else import_.show)(report)
        return 0
    listed = PairsClient().pairs(everything=everything)
    if as_json:
        render.record(listed)
        return 0
    (pairs.catalogue if everything else pairs.pairs)(listed["pairs"], listed.get("configured", ""))
    pairs.problems(listed)
    return 0
