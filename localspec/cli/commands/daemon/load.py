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
    indicator = spinner.Spinner(client, "loading") if render.is_drawn_on(sys.stderr) else None
    try:
        with closing(client.load(inputs.resolve_pair(name) if name else "")) as states:
            *_, final_state = states
    finally:
        if indicator:
            indicator.stop()
    render.line(f"{final_state['name']} is loaded.")
    return 0
