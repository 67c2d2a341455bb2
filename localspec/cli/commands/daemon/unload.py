"""`localspec unload`."""

from __future__ import annotations

import click

from localspec.cli.terminal import render
from localspec.client.pairs import PairsClient


@click.command(
    help="Unload the pair and free its memory; the next question loads it again.",
    epilog="Example: localspec unload",
)
def command() -> int:
    unloaded = PairsClient(autostart=False).unload()
    render.line("The pair has been unloaded." if unloaded else "No pair is loaded.")
    return 0
