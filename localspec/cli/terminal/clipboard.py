"""Text into the clipboard: by the desktop's program for it, tmux, or the terminal itself (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from localspec.cli.terminal import render
from localspec.errors import LocalspecError

# What xterm takes; others take more, and whatever is longer is dropped without a word.
_LONGEST = 74_994  # characters of base64
_PATIENCE = 5.0  # seconds


def copy(text: str) -> None:
    """Copy `text` as it is, and tell a person at a terminal.

    Raises:
        LocalspecError: nothing here has a clipboard, or none so large.
    """
    how = next((command[0] for command in _programs() if _run(command, text)), "") or _terminal(
        text
    )
    lines = len(text.splitlines())
    render.dim(f"Copied {lines} line{'s' * (lines != 1)} ({how}).")


def _programs() -> Iterator[list[str]]:
    """Those that reach the clipboard of whoever sits there: their display says so."""
    if os.environ.get("WAYLAND_DISPLAY"):
        yield ["wl-copy", "--type", "text/plain"]
    if os.environ.get("DISPLAY"):
        yield ["xclip", "-selection", "clipboard", "-in"]
        yield ["xsel", "--clipboard", "--input"]
    if not os.environ.get("SSH_CONNECTION"):
        if sys.platform == "darwin":
            yield ["pbcopy"]
        yield ["clip.exe"]  # Windows, seen from its Linux
    if os.environ.get("TMUX"):
        yield ["tmux", "load-buffer", "-w", "-"]


def _run(command: list[str], text: str) -> bool:
    """Whether the program is there and took the text."""
    if not (program := shutil.which(command[0])):
        return False
    encoding = "utf-16-le" if command[0] == "clip.exe" else "utf-8"
    try:
        done = subprocess.run(
            [program, *command[1:]],
            input=text.encode(encoding, "replace"),
            # some stay to serve the clipboard, and would keep open what they are given
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_PATIENCE,
            env={**os.environ, "LC_CTYPE": "UTF-8"} if command[0] == "pbcopy" else None,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _terminal(text: str) -> str:
    """Ask the terminal to take the text; whether it does, it does not tell."""
    coded = base64.b64encode(text.encode("utf-8", "replace"))
    if len(coded) > _LONGEST:
        raise LocalspecError(
            f"Not copied: the text has {len(coded) * 3 // 4} bytes, and terminals take "
            f"{_LONGEST * 3 // 4}. Install wl-copy, xclip or xsel for more."
        )
    try:
        if os.environ.get("TERM", "dumb") == "dumb":
            raise OSError
        with open("/dev/tty", "wb", buffering=0) as terminal:  # noqa: PTH123 - pathlib is an import more
            terminal.write(b"\x1b]52;c;" + coded + b"\x07")
    except OSError:
        raise LocalspecError(
            "Not copied: there is no terminal and no clipboard program (wl-copy, xclip, xsel, "
            "pbcopy or clip.exe)."
        ) from None
    return "OSC 52, if the terminal allows it"
