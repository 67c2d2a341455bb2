"""Write files atomically: after a crash there is the old file or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# The names of unfinished files, which a process that is killed leaves behind.
UNFINISHED_PATTERN = ".*.tmp"


@contextlib.contextmanager
def replace_atomically(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file, readable by its owner only, that replaces `path` when the block ends.

    If the block or the disk fails, `path` stays as it was. With `sync` that holds through a power cut too.
    Without it a power cut may leave an empty file, so the reader must detect that or not need the file.
    Raises OSError if the file cannot be written, or something else is in the new file's place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process that had the same process id
        descriptor = os.open(temporary, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # name the file that the caller knows
            error.filename, error.filename2 = str(path), None
        raise
    if sync:
        sync_folder(path.parent)


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace the content of `path` with `data`, as `replace_atomically` does. Raises OSError."""
    with replace_atomically(path, sync=sync) as file:
        file.write(data)


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[bool]:
    """Hold a lock of a folder during the block; yield False if another process holds it.

    The kernel releases it when its holder dies. Raises OSError if the folder cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Delete a folder with its content, unless another process holds it. Raises OSError."""
    import shutil  # imported late, because most commands do not need it

    with contextlib.suppress(FileNotFoundError), hold_folder(folder) as is_free:
        if is_free:
            shutil.rmtree(folder)


def sync_folder(path: Path) -> None:
    """Make renames in this folder survive a power cut, if the file system supports it and we may read it.

    Raises OSError if the disk fails or is full.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def delete_unfinished(folder: Path) -> None:
    """Delete the unfinished files in `folder` that no other running process is writing."""
    with contextlib.suppress(OSError):
        for unfinished in folder.glob(UNFINISHED_PATTERN):
            if not _has_live_writer(unfinished):
                unfinished.unlink(missing_ok=True)


def _has_live_writer(unfinished: Path) -> bool:
    """Return whether another running process is writing the file."""
    pid = unfinished.name.split(".")[-3]
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


# Options of a TCP socket, of which each operating system has some, see `keepalive_options`.
_OPTIONS = {
    "TCP_KEEPIDLE": 10,  # seconds
    "TCP_KEEPALIVE": 10,  # seconds; the name of TCP_KEEPIDLE on macOS
    "TCP_KEEPINTVL": 5,  # seconds
    "TCP_KEEPCNT": 4,  # probes
    "TCP_USER_TIMEOUT": 30_000,  # milliseconds
}


def keepalive_options() -> list[tuple[int, int, int]]:
    """Return options by which a TCP socket notices a cut link, as arguments of `setsockopt`.

    A cut link sends no message, and a busy server may be silent for minutes, so silence alone proves nothing.
    Keep-alive probes are answered by the other operating system and not by its server, and sent data has to
    be acknowledged. If neither happens for half a minute, the connection ends.
    """
    options = [(getattr(socket, name, None), value) for name, value in _OPTIONS.items()]
    supported = [(socket.IPPROTO_TCP, number, value) for number, value in options if number]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *supported]


def format_size(count: float) -> str:
    """Return a number of bytes in a readable form, such as "1.4 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "MiB" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
