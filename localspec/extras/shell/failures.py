"""The last command that failed in a shell: the hook by which the shell records it, and the record.

A record is a file in the runtime folder that only its owner can read. It is named after the shell's
process, so that every terminal has its own. It has the exit code, a newline and the command line. Commands
that begin with a blank are not recorded, because shells keep them out of their history.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path
from typing import NamedTuple

from localspec import paths
from localspec.extras.shell import proposal

_RECORD_PREFIX = "failed-"
_MAX_RECORD_BYTES = 1 << 16  # a longer command is a file that somebody pasted

# A hook for each shell. 130 and 148 are Ctrl-C and Ctrl-Z. FILE is quoted for the shell, which adds its
# process number.
_HOOKS = Path(__file__).with_name("hooks")


class Failure(NamedTuple):
    """A failed command and its exit code."""

    command: str
    code: int


def hook(shell: str) -> str:
    """Return the code that bash, zsh or fish evaluates at its start to record failures.

    Records of shells that have ended are removed. Raises UnsafePath if the runtime folder is not a private
    one of this user.
    """
    folder = paths.make_private_directory(paths.default_paths().runtime)
    for record in folder.glob(f"{_RECORD_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(record.name.removeprefix(_RECORD_PREFIX)), 0)
            except ProcessLookupError:
                record.unlink()
    file = str(folder / _RECORD_PREFIX)
    quoted = shlex.quote(file)
    if shell == "fish":
        quoted = "'" + file.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return (_HOOKS / f"failures.{shell}").read_text(encoding="utf-8").replace("FILE", quoted)


def last() -> Failure | None:
    """Return the last failure of the nearest ancestor shell that has a record, or None."""
    folder = paths.default_paths().runtime
    for process in proposal.ancestors():
        with contextlib.suppress(OSError, ValueError):
            data = paths.read_file(folder / f"{_RECORD_PREFIX}{process.pid}", os.O_NOFOLLOW)
            text = data[:_MAX_RECORD_BYTES].decode(errors="replace")
            code, _, command = text.partition("\n")
            return Failure(command.strip("\n"), int(code))
    return None


def meaning(code: int) -> str:
    """Return the general meaning of an exit code in brackets, or an empty string."""
    if code == 126:
        return " (found, but not executable)"
    if code == 127:
        return " (command not found)"
    with contextlib.suppress(ValueError):
        return f" (ended by {signal.Signals(code - 128).name})" if code > 128 else ""
    return ""
