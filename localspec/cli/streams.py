"""The standard streams, and how they fail: closed, on a full disk, or a pipe without a reader."""

from __future__ import annotations

import errno
import io
import os
import sys

from localspec.errors import LocalspecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputClosed(Exception):
    """Raised where the program that read the output has ended, as `head` does."""


class _StandardOutput(io.BufferedWriter):
    """Standard output, whose errors can be distinguished from those of other files.

    A write or flush raises OutputClosed if nobody reads, and LocalspecError for any other reason. The methods
    of this buffer are wrapped, not those of the raw file below it. Ctrl-C between the write of the raw file
    and the end of a wrapper would leave written data in the buffer, which would then be shown twice.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _translate_error(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _translate_error(error) from error


def _translate_error(error: OSError) -> OutputClosed | LocalspecError:
    if isinstance(error, BrokenPipeError):
        return OutputClosed()
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror
    return LocalspecError(f"Standard output cannot be written: {reason}.")


def prepare() -> None:
    """Make sure that all three streams exist, and translate the errors of stdout.

    A stream that the shell closed (`>&-`) is None in Python, and the first socket would get its file
    number. Such a stdin is empty, text for such a stderr is lost, and such a stdout fails when written.
    """
    if sys.stdin is None:
        _open_null_as(os.O_RDONLY, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    if sys.stdout is None:
        _open_null_as(os.O_RDONLY, 1)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    if sys.stderr is None:
        _open_null_as(os.O_WRONLY, 2)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    if sys.stdout is sys.__stdout__ or sys.__stdout__ is None:  # otherwise a test has replaced it
        sys.stdout = io.TextIOWrapper(
            _StandardOutput(io.FileIO(1, "w", closefd=False)),
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
        )


def drop_output() -> None:
    """Discard what could not be written to stdout, so that Python does not try again at exit."""
    try:
        sys.stdout.flush()
    except (OutputClosed, LocalspecError):
        _open_null_as(os.O_WRONLY, 1)


def end_by_signal(number: int) -> None:
    """End this process by a signal, after what Python does at exit."""
    import atexit
    import contextlib
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends it at once
    atexit._run_exitfuncs()
    drop_output()
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _open_null_as(flags: int, number: int) -> None:
    descriptor = os.open(os.devnull, flags)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
