"""`localspec embed`: embeddings of texts, for search and comparison."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import flag, number_option
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, UsageError

# Limits of one request.
_MAX_BATCH_TEXTS = 256
_MAX_BATCH_CHARS = 1 << 20
_SHOWN_NUMBERS = 4  # of a vector, where it is not printed as JSON


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
@number_option(
    "--dimensions",
    low=1,
    help="Keep only the first N numbers, for models that were trained for that.",
)
@flag("--truncate", help="Read only the beginning of texts that are too long.")
@flag("--json", "as_json", help="Output one line of JSON for each text.")
def command(
    files: tuple[str, ...], model: str | None, dimensions: int | None, truncate: bool, as_json: bool
) -> None:
    request: dict[str, Any] = {"truncate": truncate}
    if model:
        request["model"] = inputs.resolve_pair(model)
    if dimensions:
        request["dimensions"] = dimensions
    _refuse_texts(files)
    client = Client()
    for names, texts in _make_batches(inputs.expand_patterns(files or ("-",))):
        try:
            response = client.embeddings({**request, "input": texts})
        except ContextExceeded as error:
            raise UsageError(_describe_too_long(error, names)) from None
        for name, item in zip(names, response["data"], strict=True):
            vector = item["embedding"]
            if as_json:
                render.record({"file": name, "model": response["model"], "embedding": vector})
                continue
            numbers = " ".join(f"{number:.4f}" for number in vector[:_SHOWN_NUMBERS])
            ellipsis = " …" if len(vector) > _SHOWN_NUMBERS else ""
            render.line(f"{name}: {len(vector)} numbers, {numbers}{ellipsis}")


def _refuse_texts(files: Sequence[str]) -> None:
    """Raise UsageError if an argument seems to be a text instead of a file."""
    for file in files:
        is_other = file in inputs.STDIN or any(sign in file for sign in "/*[")
        if not is_other and not glob.glob(file):  # noqa: PTH207 - Path.glob raises where a name is long
            advice = f"To embed a text: echo {shlex.quote(file)} | localspec embed"
            raise UsageError(f"There is no file '{file}'. {advice}")


def _make_batches(names: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names and texts of the files in batches, each of which fits into one request."""
    batch, texts, size = list[str](), list[str](), 0
    for name in names:
        text = inputs.read_stdin() if name == "-" else inputs.read_text(name)
        if not text.strip():
            raise UsageError(f"{'Standard input' if name == '-' else name} has no text.")
        if batch and (len(batch) == _MAX_BATCH_TEXTS or size + len(text) > _MAX_BATCH_CHARS):
            yield batch, texts
            batch, texts, size = [], [], 0
        batch.append(name)
        texts.append(text)
        size += len(text)
    yield batch, texts


def _describe_too_long(error: ContextExceeded, names: Sequence[str]) -> str:
    """Return the daemon's error message with the name of the file instead of the number of the input."""
    message = error.message.replace("send `truncate`: true", "use --truncate")
    number = message.removeprefix("Input ").partition(" ")[0]
    if not number.isdecimal() or not 0 < int(number) <= len(names):
        return message
    return message.replace(f"Input {number}", names[int(number) - 1], 1)
