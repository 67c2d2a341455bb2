"""`localspec load` and `localspec unload`: put a pair into memory now, or free its memory."""

from __future__ import annotations

from contextlib import closing

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import progress, render
from localspec.client.pairs import PairsClient

_name = click.argument("name", required=False, default="", shell_complete=suggest.pairs)


@click.command(
    help="Load a pair now, so that the first question to it does not wait; without NAME, the one that "
    "answers by default.",
    epilog="Examples:\n\n\b\n  localspec load\n  localspec load coder-7b",
)
@_name
def load_command(name: str) -> None:
    client = PairsClient()
    states = client.load(inputs.resolve_pair(name) if name else "")
    with progress.spinning(client, "loading"), closing(states):
        *_, final_state = states
    render.line(f"{final_state['name']} is loaded.")


@click.command(
    help="Unload a pair, or all, and free their memory; the next question loads its pair again.",
    epilog="Examples:\n\n\b\n  localspec unload\n  localspec unload coder-7b",
)
@_name
def unload_command(name: str) -> None:
    unloaded = PairsClient(autostart=False).unload(inputs.resolve_pair(name) if name else "")
    for pair_name in unloaded:
        render.line(f"{pair_name} has been unloaded.")
    if not unloaded:
        render.line(f"{name} is not loaded." if name else "No pair is loaded.")
