"""`localspec add`."""

from __future__ import annotations

import sys

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render, spinner
from localspec.cli.terminal.pairs import first_use, size
from localspec.client.pairs import PairsClient


@click.command(
    help="Create a pair from your own files. They are checked like a pull and stay where they are.",
    epilog="Examples:\n\n\b\n  localspec add mine --target big.gguf --draft small.gguf\n"
    "  localspec add qwen --target qwen2.5:7b --draft qwen2.5:0.5b",
)
@click.argument("name")
@click.option(
    "--target",
    required=True,
    metavar="FILE",
    shell_complete=suggest.files,
    help="Target model: a file, or the name of a model in Ollama.",
)
@click.option(
    "--draft",
    metavar="FILE",
    shell_complete=suggest.files,
    help="Draft model; without one, drafts come from the text itself (n-gram).",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["chat", "fim"]),
    default=["chat"],
    help="What the pair is for: chat or fim (fill in the middle); repeatable.",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "last"]),
    help="Use the target for embeddings, made of the mean of its tokens, the first or the last one; "
    "embedding models say it in their file.",
)
@click.option("--replace", is_flag=True, help="Replace an existing pair of that name.")
def command(
    name: str,
    target: str,
    draft: str | None,
    roles: tuple[str, ...],
    pooling: str | None,
    replace: bool,
) -> int:
    files = inputs.model_file(target), inputs.model_file(draft) if draft else None
    client = PairsClient()
    turning = spinner.Spinner(client, "checking") if render.is_drawn_on(sys.stderr) else None
    try:
        entry = client.add(name, *files, list(roles), replace=replace, pooling=pooling)
    finally:
        if turning:
            turning.stop()
    told = first_use(name, entry["roles"])
    render.line(f"{entry['name']} is installed ({size(entry['size'])}). {told}")
    for note in entry["notes"]:
        render.line(f"note: {note}")
    return 0
