"""`localspec unload`."""

from __future__ import annotations

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render
from localspec.client.pairs import PairsClient


@click.command(
    help="Unload a pair, or all, and free their memory; the next question loads its pair again.",
    epilog="Examples:\n\n\b\n  localspec unload\n  localspec unload coder-7b",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def command(name: str) -> int:
    unloaded = PairsClient(autostart=False).unload(inputs.resolve_pair(name) if name else "")
    for pair_name in unloaded:
        render.line(f"{pair_name} has been unloaded.")
    if not unloaded:
        render.line(f"{name} is not loaded." if name else "No pair is loaded.")
    return 0
