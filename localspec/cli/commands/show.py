"""`localspec show`."""

from __future__ import annotations

import click

from localspec.cli import render, render_pairs, suggest
from localspec.client.pairs import PairsClient


@click.command(
    help="Show a pair: its models, whether they match, the memory they need.",
    epilog="Examples:\n\n\b\n  localspec show builtin\n  localspec show coder-7b --context 16384",
)
@click.argument("name", shell_complete=suggest.pairs)
@click.option("--context", type=click.IntRange(min=0), default=0, help="Count for so many tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print it as one line of JSON.")
def command(name: str, context: int, as_json: bool) -> int:
    view = PairsClient().pair(name, context)
    (render.record if as_json else render_pairs.pair)(view)
    return 0
