"""The three standard streams, whatever the shell made of them: closed, a full disk, a pipe nobody reads."""

from __future__ import annotations

import errno
import io
import os
import sys

from localspec.errors import LocalspecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Unread(Exception):
    """Whoever read the output has left, as `head` does."""


class _Out(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Raises Unread; LocalspecError: why it cannot be written."""
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise Unread from error
        except OSError as error:
            why = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise LocalspecError(f"Standard output cannot be written: {why}.") from error


def prepare() -> None:
    """Let each of the three be a stream, and errors of stdout be ours.

    One that is closed (`>&-`) is None in Python, and the first socket would get its number. Then there
    is nothing to read on stdin, what is said on stderr is lost, and stdout fails like a closed one.
    """
    if sys.stdin is None:
        _put(os.O_RDONLY, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - to stay open
    if sys.stdout is None:
        _put(os.O_RDONLY, 1)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - to stay open
    if sys.stderr is None:
        _put(os.O_WRONLY, 2)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - to stay open
    if sys.stdout is sys.__stdout__ or sys.__stdout__ is None:  # else somebody's own, as a test's
        raw = _Out(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
        )


def drop_output() -> None:
    """What was not written of stdout is not tried again, by Python at exit."""
    try:
        sys.stdout.flush()
    except (Unread, LocalspecError):
        _put(os.O_WRONLY, 1)


def _put(flags: int, number: int) -> None:
    """Nothing, and nowhere, as file `number`."""
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
