"""git's editor with a proposed commit message in it: `python -m localspec.cli.shell.message_editor`.

git commits what a file holds after the editor has ended, saved or not. A person who leaves the editor without
saving does not want a message that a model wrote, so the file is emptied then, and git aborts.

Arguments: the sign of git's comments, a comment for the message, the editor's command, the file.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from localspec.cli.terminal import render

# These save an unchanged file too, with :wq. Others do not, or do not easily, and end without a question.
_VI = ("vi", "vim", "nvim", "vim.basic", "vim.tiny", "vim.nox", "elvis", "nvi", "vis", "ex", "view")
_EARLIER_NS = 10_000_000_000  # so that a save in the same tick of the clock is seen


def command(sign: str, pair: str, editor: str) -> str:
    """Return the command for GIT_EDITOR that runs `editor` through this module."""
    leave = "leave with :cq" if _is_vi(editor) else "close the editor without saving"
    comment = f"Proposed by localspec ({pair}). To abort: delete the message, or {leave}."
    words = [sys.executable, "-P", "-m", __spec__.name if __spec__ else __name__]
    return shlex.join([*words, sign, comment, editor])


def _is_vi(editor: str) -> bool:
    try:
        words = shlex.split(editor)
    except ValueError:
        return False
    return any(os.path.basename(word) in _VI for word in words)  # noqa: PTH119 - a name, no path


def main(arguments: list[str]) -> int:
    """Edit the message, and empty the file if it is to be committed in no form."""
    sign, comment, editor, name = arguments
    file, line = Path(name), f"{sign} {comment}\n".encode()
    file.write_bytes(_with_line(file.read_bytes(), line, sign.encode()))
    earlier = time.time_ns() - _EARLIER_NS
    os.utime(file, ns=(earlier, earlier))
    before = _state(file)
    # Ctrl-C is for the editor, which would inherit it if it were ignored here.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run(["sh", "-c", f'{editor} "$@"', editor, name], check=False).returncode
    if code:
        render.error("The editor ended with an error; nothing is committed.")
        file.write_bytes(b"")
    elif _state(file) == before and not _wanted_unsaved(editor):
        render.error("The message was not saved; nothing is committed.")
        file.write_bytes(b"")
    else:
        file.write_bytes(file.read_bytes().replace(line, b"", 1))
    return 0


def _with_line(message: bytes, line: bytes, sign: bytes) -> bytes:
    """Return the message with a line of ours before git's comments."""
    lines = message.splitlines(keepends=True)
    at = next((at for at, each in enumerate(lines) if each.startswith(sign)), len(lines))
    return b"".join([*lines[:at], line, *lines[at:]])


def _state(file: Path) -> tuple[int, int, int]:
    """Return what changes when an editor saves the file, whether it writes in place or renames."""
    found = file.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def _wanted_unsaved(editor: str) -> bool:
    """Ask whether to commit a message that was not saved; not after Vi, which saves with :wq."""
    if _is_vi(editor) or not sys.stdin.isatty():
        return False
    render.stderr("The message was not saved. Commit with it as it is? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
