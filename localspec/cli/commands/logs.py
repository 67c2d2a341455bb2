"""`localspec logs`: the end of the daemon's log, and what is appended to it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from localspec.cli.app import flag, number_option
from localspec.cli.terminal import render
from localspec.errors import NotFound
from localspec.paths import default_paths

_POLL_INTERVAL_S = 0.2  # between two looks at a log that is followed


@click.command(
    help="Show the end of the daemon's log. It contains no prompts unless `log_prompts` is set.",
    epilog="Examples:\n\n\b\n  localspec logs -n 50\n  localspec logs --follow\n"
    "  localspec logs --path",
)
@number_option("-n", "--lines", default=20, show_default=True, help="Number of lines.")
@flag("-f", "--follow", help="Follow the log.")
@flag("--path", "only_path", help="Print the path of the log.")
def command(lines: int, follow: bool, only_path: bool) -> None:
    log = default_paths().log
    if only_path:
        render.path(log)
        return
    if not log.exists() and not follow:
        raise NotFound(f"There is no log yet ({log}); the daemon has never been started.")
    data, inode = b"", 0
    if log.exists():
        if not log.is_file():
            raise NotFound(f"{log} is not a file, so nothing is logged; remove it.")
        with log.open("rb") as file:
            inode, data = os.fstat(file.fileno()).st_ino, file.read()
    _print_lines(data, lines)
    if follow:
        _follow(log, len(data), inode)


def _print_lines(data: bytes, count: int) -> None:
    """Print the last lines of a log. Only newlines end one: other line ends are part of a logged text."""
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []
    for line in lines[-count:] if count else []:
        render.verbatim(line)


def _follow(log: Path, position: int, inode: int) -> None:
    """Print what is appended after byte `position`, until Ctrl-C.

    A log with another inode than `inode` has been rotated and is read from its beginning.
    """
    while True:
        sys.stdout.flush()
        time.sleep(_POLL_INTERVAL_S)
        if not log.exists():
            continue
        info = log.stat()
        if info.st_ino != inode or info.st_size < position:
            position, inode = 0, info.st_ino
        if info.st_size > position:
            with log.open("rb") as file:
                file.seek(position)
                data = file.read()
            complete_lines = data[: data.rfind(b"\n") + 1]
            position += len(complete_lines)
            _print_lines(complete_lines, len(complete_lines))
