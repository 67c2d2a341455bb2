"""`localspec embed`: texts as numbers, for search and comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import Limited
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, UsageError

_TEXTS, _CHARACTERS = 256, 1 << 20  # of one request
_SHOWN = 4  # numbers of a vector


@click.command(
    help="Turn files, or standard input, into embeddings: one vector of numbers each. They need an "
    "embedding model.",
    epilog="Examples:\n\n\b\n  localspec pull nomic-embed\n"
    "  localspec embed --json notes/*.md > vectors.jsonl\n"
    '  echo "a question" | localspec embed --json -m nomic-embed',
)
@click.argument("files", nargs=-1, metavar="[FILE]...", shell_complete=suggest.files)
@click.option(
    "-m",
    "--model",
    metavar="PAIR",
    shell_complete=suggest.pairs,
    help="Use this embedding model; needed where several are installed.",
)
@click.option(
    "--dimensions",
    cls=Limited,
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep only the first N numbers, for models that were trained for that.",
)
@click.option(
    "--truncate", is_flag=True, help="Read only the beginning of texts that are too long."
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON for each text.")
def command(
    files: tuple[str, ...],
    model: str | None,
    dimensions: int | None,
    truncate: bool,
    as_json: bool,
) -> int:
    request: dict[str, Any] = {"truncate": truncate}
    if model:
        request["model"] = inputs.pair(model)
    if dimensions:
        request["dimensions"] = dimensions
    client = Client()
    for names, texts in _batches(inputs.named(files or ("-",))):
        try:
            answer = client.embeddings({**request, "input": texts})
        except ContextExceeded as error:
            raise UsageError(_too_long(error, names)) from None
        for name, each in zip(names, answer["data"], strict=True):
            _show(name, answer["model"], each["embedding"], as_json)
    return 0


def _batches(names: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Names and texts, as many as one request should have."""
    batch, texts, size = list[str](), list[str](), 0
    for name in names:
        text = inputs.stdin() if name == "-" else inputs.read_text(name)
        if not text.strip():
            raise UsageError(f"{'Standard input' if name == '-' else name} has no text.")
        if batch and (len(batch) == _TEXTS or size + len(text) > _CHARACTERS):
            yield batch, texts
            batch, texts, size = [], [], 0
        batch.append(name)
        texts.append(text)
        size += len(text)
    yield batch, texts


def _too_long(error: ContextExceeded, names: Sequence[str]) -> str:
    """The daemon says which input it is by its number."""
    said = error.message.replace("send `truncate`: true", "use --truncate")
    number = said.removeprefix("Input ").partition(" ")[0]
    if not number.isdecimal() or not 0 < int(number) <= len(names):
        return said
    return said.replace(f"Input {number}", names[int(number) - 1], 1)


def _show(name: str, model: str, vector: list[float], as_json: bool) -> None:
    if as_json:
        render.record({"file": name, "model": model, "embedding": vector})
        return
    numbers = " ".join(f"{each:.4f}" for each in vector[:_SHOWN])
    more = " …" if len(vector) > _SHOWN else ""
    render.line(f"{name}: {len(vector)} numbers, {numbers}{more}")
