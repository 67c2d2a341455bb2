"""`localspec add`."""

from __future__ import annotations

import sys

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render, spinner
from localspec.cli.terminal.pairs import size
from localspec.client.pairs import PairsClient


@click.command(
    help="Make a pair of your own files, checked like a pull and used where they lie.",
    epilog="Examples:\n\n\b\n  localspec add mine --target big.gguf --draft small.gguf\n"
    "  localspec add qwen --target qwen2.5:7b --draft qwen2.5:0.5b",
)
@click.argument("name")
@click.option(
    "--target",
    required=True,
    metavar="FILE",
    shell_complete=suggest.files,
    help="The large model: a file, or its name in Ollama.",
)
@click.option(
    "--draft",
    metavar="FILE",
    shell_complete=suggest.files,
    help="The small one; without it decoding is plain.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["chat", "fim"]),
    default=["chat"],
    help="What it is good for: chat, fim (filling in), or both.",
)
@click.option("--replace", is_flag=True, help="Take the place of a pair of that name.")
def command(
    name: str, target: str, draft: str | None, roles: tuple[str, ...], replace: bool
) -> int:
    files = inputs.model_file(target), inputs.model_file(draft) if draft else None
    client = PairsClient()
    turning = spinner.Spinner(client, "checking") if sys.stderr.isatty() else None
    try:
        entry = client.add(name, *files, list(roles), replace=replace)
    finally:
        if turning:
            turning.stop()
    render.line(
        f'{entry["name"]} is here ({size(entry["size"])}). Try: localspec ask -m {name} "…"'
    )
    for note in entry["notes"]:
        render.line(f"note: {note}")
    return 0
