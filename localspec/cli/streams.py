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


class _Out(io.BufferedWriter):
    """Standard output, whose errors are told from those of other files.

    They are told here and not by the file: Ctrl-C between its write and the end of a method around that
    would leave in the buffer what is written already, and a word would be shown twice.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        """Raises Unread; LocalspecError: why it cannot be written."""
        try:
            return super().write(data)
        except OSError as error:
            raise _told(error) from error

    def flush(self) -> None:
        """Raises as `write` does."""
        try:
            super().flush()
        except OSError as error:
            raise _told(error) from error


def _told(error: OSError) -> Unread | LocalspecError:
    if isinstance(error, BrokenPipeError):
        return Unread()
    why = "it is closed" if error.errno == errno.EBADF else error.strerror
    return LocalspecError(f"Standard output cannot be written: {why}.")


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
        sys.stdout = io.TextIOWrapper(
            _Out(io.FileIO(1, "w", closefd=False)),
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
