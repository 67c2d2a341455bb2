"""git's editor with a proposed commit message in it: `python -m localspec.extras.shell.message_editor`.

git commits the contents of the file when the editor has ended, whether it was saved or not. A person who
closes the editor without saving does not want the message of a model, so the file is then emptied, and git
aborts the commit.

Arguments: git's comment sign, a comment for the message, the editor's command, the file.
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

# Editors that also save an unchanged file, with :wq. Most others do not, and end without a question.
_VI_EDITORS = "vi vim nvim vim.basic vim.tiny vim.nox elvis nvi vis ex view".split()
# The file's time is set back by this much, so that a save within the same tick of the clock is noticed.
_BACKDATE_NS = 10_000_000_000


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
    return any(os.path.basename(word) in _VI_EDITORS for word in words)  # noqa: PTH119 - a name, no path


def main(arguments: list[str]) -> int:
    """Edit the message, and empty the file if the message is not to be committed."""
    sign, comment, editor, name = arguments
    file, line = Path(name), f"{sign} {comment}\n".encode()
    # The comment goes before git's.
    lines = file.read_bytes().splitlines(keepends=True)
    is_comment = [each.startswith(sign.encode()) for each in lines] + [True]
    lines.insert(is_comment.index(True), line)
    file.write_bytes(b"".join(lines))
    backdated = time.time_ns() - _BACKDATE_NS
    os.utime(file, ns=(backdated, backdated))
    old_state = _file_state(file)
    # Ctrl-C is meant for the editor, which would inherit SIG_IGN, but not this handler.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run(["sh", "-c", f'{editor} "$@"', editor, name], check=False).returncode
    problem = ""
    if code:
        problem = "The editor ended with an error"
    elif _file_state(file) == old_state and not _confirm_unsaved(editor):
        problem = "The message was not saved"
    if problem:
        render.error(f"{problem}; nothing is committed.")
    file.write_bytes(b"" if problem else file.read_bytes().replace(line, b"", 1))
    return 0


def _file_state(file: Path) -> tuple[int, int, int]:
    """Return what changes when an editor saves the file, whether it writes in place or renames a copy."""
    status = file.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _confirm_unsaved(editor: str) -> bool:
    """Ask whether to commit a message that was not saved.

    Returns False without asking for Vi, which saves with :wq, and without a terminal.
    """
    if _is_vi(editor) or not sys.stdin.isatty():
        return False
    render.stderr("The message was not saved. Commit with it as it is? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
