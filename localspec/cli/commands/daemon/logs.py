"""`localspec logs`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from localspec.cli.app import Limited
from localspec.cli.terminal import render
from localspec.errors import NotFound
from localspec.paths import default_paths

_LOOK = 0.2  # seconds


@click.command(
    help="Show the end of the daemon's log. It contains no prompts unless `log_prompts` is set.",
    epilog="Examples:\n\n\b\n  localspec logs -n 50\n  localspec logs --follow\n"
    "  localspec logs --path",
)
@click.option(
    "-n",
    "--lines",
    cls=Limited,
    type=click.IntRange(min=0),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Follow the log.")
@click.option("--path", "only_path", is_flag=True, help="Print the path of the log.")
def command(lines: int, follow: bool, only_path: bool) -> int:
    log = default_paths().log
    if only_path:
        render.path(log)
        return 0
    if not log.exists() and not follow:
        raise NotFound(f"There is no log yet ({log}); the daemon has never been started.")
    data, number = b"", 0
    if log.exists():
        if not log.is_file():
            raise NotFound(f"{log} is not a file, so nothing is logged; remove it.")
        with log.open("rb") as file:
            number, data = os.fstat(file.fileno()).st_ino, file.read()
    last = _lines(data)
    for each in last[-lines:] if lines else []:
        render.verbatim(each)
    if follow:
        _follow(log, len(data), number)
    return 0


def _lines(data: bytes) -> list[str]:
    """Ended by newlines alone: other ends are part of what was logged, and seen."""
    return data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []


def _follow(log: Path, place: int, number: int) -> None:
    """Print what comes after byte `place` until Ctrl-C.

    A log that was rotated has another inode than `number` and is read from its beginning.
    """
    while True:
        sys.stdout.flush()
        time.sleep(_LOOK)
        if not log.exists():
            continue
        info = log.stat()
        if info.st_ino != number or info.st_size < place:
            place, number = 0, info.st_ino
        if info.st_size > place:
            with log.open("rb") as file:
                file.seek(place)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            place += len(whole)
            for each in _lines(whole):
                render.verbatim(each)
