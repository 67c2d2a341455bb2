"""Files that must not be half-written, followed through a link, or changed by two processes at once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from localspec import files
from localspec.errors import DiskFull, PullCancelled, StoreError, StoreReadOnly, UnsafePath
from localspec.files import format_size
from localspec.paths import open_file
from localspec.protocol.answers import Hashing

CHUNK_BYTES = 4 << 20
_LOCK_POLL_S = 0.2  # between two tries, so that a waiting pull can be cancelled


def store_error(
    error: OSError, path: Path, *, needed: int | None = None
) -> StoreError | UnsafePath:
    """Return the localspec error for an error of the operating system.

    needed: the bytes that were still to be written.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{format_size(needed)} more are needed and " if needed is not None else ""
        return DiskFull(
            f"The disk is full: {need}{describe_free_space(path)}. What was written of {path.name} "
            "is kept; free some space and try again."
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreReadOnly(f"{path} cannot be written ({error.strerror}).")
    if error.errno == errno.ELOOP:
        return UnsafePath(f"{path} is a symbolic link; remove it and try again.")
    return StoreError(f"{path}: {error.strerror}.")


def describe_free_space(path: Path) -> str:
    """Return how much is free on the disk of `path`, for a message."""
    try:
        info = os.statvfs(path if path.exists() else path.parent)
    except OSError:
        return "the free space is unknown"
    return f"{format_size(info.f_bavail * info.f_frsize)} are free"


def open_store_file(path: Path, flags: int) -> int:
    """Open a file of the store. Symbolic links and anything but a regular file are refused.

    Raises:
        UnsafePath, StoreError
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise store_error(error, path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePath(f"{path} is not a file; remove it and try again.")
    return descriptor


def make_folder(path: Path) -> None:
    """Create a folder of the store that only its owner may enter.

    Raises:
        UnsafePath: a symbolic link is in its place.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise UnsafePath(f"{path} is a symbolic link; remove it and try again.")
    except OSError as error:
        raise store_error(error, path) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file as `localspec.files.write_whole` does, and raise localspec's own errors.

    Raises:
        DiskFull, StoreReadOnly, StoreError, UnsafePath
    """
    try:
        files.write_atomically(path, data)
    except OSError as error:
        raise store_error(error, path) from error


@contextmanager
def hold_lock(
    path: Path,
    *,
    shared: bool = False,
    wait: bool = True,
    cancel: threading.Event | None = None,
    waiting: Callable[[], None] | None = None,
) -> Iterator[bool]:
    """Hold a lock between processes and threads; yield False if it is taken and `wait` is false.

    The kernel releases the lock when its holder dies. waiting: called from time to time while waiting.
    """
    descriptor = open_store_file(path, os.O_RDWR | os.O_CREAT)
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        while True:
            try:
                fcntl.flock(descriptor, mode)
                break
            except BlockingIOError:
                if not wait:
                    yield False
                    return
            check_cancel(cancel)
            if waiting:
                waiting()
            time.sleep(_LOCK_POLL_S)
        yield True
    finally:
        os.close(descriptor)


def check_cancel(cancel: threading.Event | None) -> None:
    """Raise PullCancelled once `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise PullCancelled(
            "The pull was cancelled; anything already downloaded is kept for the next one."
        )


class FileState(NamedTuple):
    """Which file lies at a path, and in which state. A file that was replaced has another one."""

    path: str
    inode: int = 0
    size: int = 0
    modified_ns: int = 0
    changed_ns: int = 0


def file_state(path: Path) -> FileState:
    try:
        info = path.stat()
    except OSError:  # whoever reads it will say so
        return FileState(str(path))
    return FileState(str(path), info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class HashCache:
    """A cache of the SHA-256 of whole files. It may be used from several threads.

    Each version of a file, identified by inode, size and modification time, is read once. Other threads that
    need its hash meanwhile wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], _HashEntry] = {}
        self._reading: dict[int, Hashing] = {}  # by the id of the reading thread

    @property
    def reading(self) -> Hashing | None:
        """The file that is being hashed; of several, the largest."""
        with self._lock:
            return max(self._reading.values(), key=lambda reading: reading.size, default=None)

    def sha256(
        self,
        path: Path,
        cancel: threading.Event | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> str:
        """Return the SHA-256 of a file in hexadecimal digits.

        progress: called with the bytes read so far, even if another thread reads the file.

        Raises:
            PullCancelled: `cancel` was set meanwhile.
            OSError: the file cannot be read.
        """
        info = path.stat()
        with self._lock:
            entry = self._files.setdefault((info.st_dev, info.st_ino), _HashEntry())
        while not entry.busy.acquire(timeout=_LOCK_POLL_S):
            check_cancel(cancel)
            progress(entry.done)
        try:
            stamp = _file_stamp(path)
            if entry.stamp != stamp:

                def report(done: int) -> None:
                    entry.done = done
                    reading = Hashing(path.name, done, stamp[0])
                    with self._lock:
                        self._reading[threading.get_ident()] = reading
                    progress(done)

                report(0)
                digest = sha256_of(path, progress=report, cancel=cancel)
                if _file_stamp(path) != stamp:
                    return digest  # the file is being written, so the hash is not kept
                entry.stamp, entry.digest = stamp, digest
            return entry.digest
        finally:
            entry.busy.release()
            with self._lock:
                self._reading.pop(threading.get_ident(), None)


class _HashEntry:
    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.stamp: tuple[int, int] | None = None
        self.digest = ""
        self.done = 0  # bytes read so far


def _file_stamp(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


def sha256_of(
    path: Path,
    *,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> str:
    """Return the SHA-256 of a whole file; `progress` is called with the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)  # releases the interpreter lock, so other threads run
            done += len(chunk)
            if progress:
                progress(done)
            check_cancel(cancel)
    return digest.hexdigest()
