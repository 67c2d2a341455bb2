"""`localspec load`."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render, spinner
from localspec.client.pairs import PairsClient


@click.command(
    help="Load a pair now, so that the first question to it does not wait; without NAME, the one that "
    "answers by default.",
    epilog="Examples:\n\n\b\n  localspec load\n  localspec load coder-7b",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def command(name: str) -> int:
    client = PairsClient()
    turning = spinner.Spinner(client, "loading") if render.is_drawn_on(sys.stderr) else None
    try:
        with closing(client.load(inputs.pair(name) if name else "")) as states:
            *_, last = states
    finally:
        if turning:
            turning.stop()
    render.line(f"{last['name']} is loaded.")
    return 0
