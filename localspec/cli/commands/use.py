"""`localspec use`: choose the pair that answers where none is named."""

from __future__ import annotations

import click

from localspec.cli import settings, suggest


@click.command(
    help="Choose the pair that answers where none is named; without NAME, show it. The same as `localspec "
    "config set pair NAME`, for pairs that are installed.",
    epilog="Examples:\n\n\b\n  localspec use coder-7b\n  localspec use",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def command(name: str) -> None:
    if name:
        settings.use(name)
    else:
        settings.get("pair")
