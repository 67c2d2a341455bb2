"""`localspec complete`: the code that an editor would suggest at a position in a file."""

from __future__ import annotations

import re
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import Limited
from localspec.cli.commands.editors import pair_option
from localspec.cli.terminal import figures, render
from localspec.client.api import Client
from localspec.errors import UsageError

_POSITION = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")
_FENCE = "```"
_DEFAULT_TOKENS = 64  # enough for the few lines that an editor shows


@click.command(
    help="Complete code at a position in a file, as an editor does. Lines and columns count "
    "from 1; without a column, the end of the line is used.",
    epilog="Examples:\n\n\b\n  localspec complete src/cache.py:42\n"
    "  localspec complete src/cache.py:42:17 -m coder-7b -n 128",
)
@click.argument("place", metavar="FILE:LINE[:COL]", shell_complete=suggest.files)
@pair_option
@click.option(
    "-q",
    "--query",
    multiple=True,
    metavar="TEXT",
    help="Use the pair whose name contains TEXT; repeatable.",
)
@click.option(
    "-n",
    "--tokens",
    cls=Limited,
    type=click.IntRange(min=1),
    metavar="TOKENS",
    default=_DEFAULT_TOKENS,
    show_default=True,
    help="Maximum number of tokens.",
)
@click.option("--no-log", is_flag=True, help="Do not count it in `localspec stats`.")
@click.option("-u", "--usage", is_flag=True, help="Print statistics to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the response as one line of JSON.")
def command(
    place: str,
    model: str | None,
    query: tuple[str, ...],
    tokens: int,
    no_log: bool,
    usage: bool,
    as_json: bool,
) -> int:
    prefix, suffix = split_at(place)
    lines_before, newline, line = prefix.rpartition("\n")
    request: dict[str, Any] = {
        "input_prefix": lines_before + newline,
        "prompt": line,
        "input_suffix": suffix,
        "n_predict": tokens,
        "temperature": 0,
    }
    if not no_log:
        request["localspec"] = {"kind": "complete"}
    has_fence = _FENCE in prefix + suffix
    if not has_fence:
        # A model that was trained to chat ends its code with a fence and then explains it.
        request["stop"] = [f"\n{_FENCE}"]
    pair_options = {"model": model, "query": list(query), "no_daemon_start": False}
    if model := inputs.resolve_query(pair_options)["model"]:
        request["model"] = inputs.resolve_pair(model)
    response = Client().infill(request)
    if as_json:
        render.record(response)
        return 0
    printer = render.Printer()  # prints code as it is, not as Markdown
    printer.text(response["content"] if has_fence else code_of(response["content"]), [])
    printer.close()
    if usage:
        figures.statistics(response)
    return 0


def code_of(content: str) -> str:
    """Return the code of a completion, without a fence around it and the text after that."""
    if content.lstrip().startswith(_FENCE):
        content = content.lstrip().partition("\n")[2]
    return content.split(f"\n{_FENCE}")[0]


def split_at(place: str) -> tuple[str, str]:
    """Return the text before and after a position in a file.

    Raises:
        UsageError: it is not a position, or the file has no such position.
    """
    match = _POSITION.fullmatch(place)
    if not match:
        raise UsageError(
            f"'{place}' is not FILE:LINE[:COL]; for example: localspec complete src/cache.py:42:17"
        )
    text = inputs.read_text(match["file"])
    lines = text.splitlines(keepends=True) or [""]
    number = int(match["line"])
    if not 1 <= number <= len(lines):
        raise UsageError(f"{match['file']} has no line {number}; it has {len(lines)} lines.")
    line = lines[number - 1].rstrip("\r\n")
    column = int(match["column"]) if match["column"] else len(line) + 1
    if not 1 <= column <= len(line) + 1:
        raise UsageError(
            f"Line {number} of {match['file']} has no such column; its columns are 1 to "
            f"{len(line) + 1}."
        )
    offset = sum(map(len, lines[: number - 1])) + column - 1
    return text[:offset], text[offset:]
