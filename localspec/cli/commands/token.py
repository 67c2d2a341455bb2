"""`localspec token`: the bearer token that TCP clients need."""

from __future__ import annotations

import sys

import click

from localspec.cli.app import json_option
from localspec.cli.terminal import render
from localspec.errors import UsageError
from localspec.paths import default_paths, read_file


@click.command(
    help="Print the bearer token that TCP clients need.",
    epilog='Examples:\n\n\b\n  localspec token\n  export OPENAI_API_KEY="$(localspec token)"',
)
@json_option
def command(as_json: bool) -> None:
    file = default_paths().token
    token = ""
    try:
        token = read_file(file).decode("ascii", "replace").strip()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"The token file {file} cannot be read: {error.strerror}.") from error
    if not token:
        raise UsageError(
            f"There is no token in {file} yet; it is made when TCP is first served: localspec config set "
            "listen 127.0.0.1:8012"
        )
    if as_json:
        render.record({"token": token, "file": str(file)})
        return
    render.verbatim(token)
    if sys.stdout.isatty():
        render.note(f"It is stored in {file}. Whoever has it can do what you can.")
