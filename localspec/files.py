"""Files written whole: after a crash there is the old one or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# What a process that was killed leaves of a file that it was writing.
UNFINISHED = ".*.tmp"


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file, for its owner alone, that takes the place of `path` when the block ends.

    Where the block fails, or the disk, `path` is as it was. `sync` holds that through a power cut too;
    without it that may leave an empty file, so its reader must tell, or need it no more.

    Raises:
        OSError: it cannot be written; a link or anything else stands in the new file's place.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    new.unlink(missing_ok=True)  # of a process of the same number that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(new, flags, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(handle)
        new.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk's names no file, others that of the new one
            error.filename, error.filename2 = str(path), None
        raise
    if sync:
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Make `data` all that is in `path`; see `replacing`.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path, sync=sync) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Make renames in this folder survive a power cut, where its file system and its owner let us.

    Raises:
        OSError: the disk fails, or is full.
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


def sweep(folder: Path) -> None:
    """Delete what killed processes left unfinished in `folder`, and earlier ones of this number."""
    with contextlib.suppress(OSError):
        for left in folder.glob(UNFINISHED):
            if not _is_written(left):
                left.unlink(missing_ok=True)


def _is_written(unfinished: Path) -> bool:
    """Whether another process, which is alive, has made the file."""
    pid = unfinished.name.split(".")[-3]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
