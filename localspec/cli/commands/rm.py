"""`localspec rm`."""

from __future__ import annotations

import click

from localspec.cli import render, suggest
from localspec.cli.render_pairs import size
from localspec.client.pairs import PairsClient


@click.command(
    help="Remove a pair. Files that another pair needs stay, and so do your own files.",
    epilog="Example: localspec rm coder-7b",
)
@click.argument("name", shell_complete=suggest.pairs)
def command(name: str) -> int:
    removed = PairsClient().remove(name)
    render.line(f"{removed['name']} is removed; {size(removed['freed'])} freed.")
    for kept in removed["kept"]:
        render.line(f"kept: {kept}")
    return 0
