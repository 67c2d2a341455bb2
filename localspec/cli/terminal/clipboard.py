"""Copy text into the clipboard, by a program of the desktop, tmux, or the terminal itself (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from localspec.cli.terminal import render
from localspec.errors import LocalspecError

# The limit of xterm, in characters of base64. A terminal drops longer text without an error. Other
# terminals accept more.
_MAX_BASE64_CHARS = 74_994
_TIMEOUT_S = 5.0


def copy(text: str) -> None:
    """Copy `text` as it is, and print a note at a terminal.

    Raises LocalspecError if there is no clipboard, or the text is too long for it.
    """
    accepting = (command[0] for command in _list_programs() if _copy_with_program(command, text))
    method = next(accepting, "") or _copy_with_terminal(text)
    lines = len(text.splitlines())
    render.dim(f"Copied {lines} line{'s' * (lines != 1)} ({method}).")


def _list_programs() -> Iterator[list[str]]:
    """Yield the commands that reach the clipboard of the person, according to the environment."""
    if os.environ.get("WAYLAND_DISPLAY"):
        yield ["wl-copy", "--type", "text/plain"]
    if os.environ.get("DISPLAY"):
        yield ["xclip", "-selection", "clipboard", "-in"]
        yield ["xsel", "--clipboard", "--input"]
    if not os.environ.get("SSH_CONNECTION"):
        if sys.platform == "darwin":
            yield ["pbcopy"]
        yield ["clip.exe"]  # Windows, when this is its Linux subsystem
    if os.environ.get("TMUX"):
        yield ["tmux", "load-buffer", "-w", "-"]


def _copy_with_program(command: list[str], text: str) -> bool:
    if not (program := shutil.which(command[0])):
        return False
    encoding = "utf-16-le" if command[0] == "clip.exe" else "utf-8"
    try:
        process = subprocess.run(
            [program, *command[1:]],
            input=text.encode(encoding, "replace"),
            # Some programs keep running to serve the clipboard, and would keep our streams open.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "LC_CTYPE": "UTF-8"} if command[0] == "pbcopy" else None,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0


def _copy_with_terminal(text: str) -> str:
    """Send the text to the terminal, which does not report whether it copied it."""
    encoded = base64.b64encode(text.encode("utf-8", "replace"))
    if len(encoded) > _MAX_BASE64_CHARS:
        raise LocalspecError(
            f"Not copied: the text has {len(encoded) * 3 // 4} bytes, and terminals take "
            f"{_MAX_BASE64_CHARS * 3 // 4}. Install wl-copy, xclip or xsel for more."
        )
    try:
        if os.environ.get("TERM", "dumb") == "dumb":
            raise OSError
        with open("/dev/tty", "wb", buffering=0) as terminal:  # noqa: PTH123 - pathlib would be one more import
            terminal.write(b"\x1b]52;c;" + encoded + b"\x07")
    except OSError:
        raise LocalspecError(
            "Not copied: there is no terminal and no clipboard program (wl-copy, xclip, xsel, "
            "pbcopy or clip.exe)."
        ) from None
    return "OSC 52, if the terminal allows it"
