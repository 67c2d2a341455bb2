"""Files that must not be half-written, followed through a link, or touched by two at once."""

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
from dataclasses import dataclass
from pathlib import Path

from localspec import files
from localspec.errors import DiskFull, PullCancelled, StoreError, StoreReadOnly, UnsafePath
from localspec.paths import open_file

CHUNK = 4 << 20
_LOCK_POLL = 0.2  # seconds between two tries, so that a waiting pull can be cancelled


def store_error(
    error: OSError, path: Path, *, needed: int | None = None
) -> StoreError | UnsafePath:
    """What the operating system refused, in our words; `needed` bytes were still to be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        want = f"{needed} more bytes are needed and " if needed is not None else ""
        return DiskFull(
            f"The disk is full: {want}{free_sentence(path)}. What was written of {path.name} "
            "is kept; free some space and try again."
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreReadOnly(f"{path} cannot be written ({error.strerror}).")
    if error.errno == errno.ELOOP:
        return UnsafePath(f"{path} is a symbolic link; remove it and try again.")
    return StoreError(f"{path}: {error.strerror}.")


def free_sentence(path: Path) -> str:
    """How much is free on the disk of `path`, for a message."""
    try:
        info = os.statvfs(path if path.exists() else path.parent)
    except OSError:
        return "the free space is unknown"
    return f"{info.f_bavail * info.f_frsize} bytes are free"


def open_own(path: Path, flags: int) -> int:
    """Open a file of the store: never through a symbolic link, never anything but a file.

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


def make_folder(path: Path) -> Path:
    """Create a folder of the store, for its owner only.

    Raises:
        UnsafePath: a symbolic link is in its place.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink():
            raise UnsafePath(f"{path} is a symbolic link; remove it and try again.")
    except OSError as error:
        raise store_error(error, path) from error
    return path


def write_whole(path: Path, data: bytes) -> None:
    """As `localspec.files.write_whole`, with what goes wrong in our words.

    Raises:
        DiskFull, StoreReadOnly, StoreError, UnsafePath
    """
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise store_error(error, path) from error


@contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    wait: bool = True,
    cancel: threading.Event | None = None,
    waiting: Callable[[], None] | None = None,
) -> Iterator[bool]:
    """Hold a lock between processes and between threads; yields False when it is taken and not
    waited for. The kernel lets go of it when the holder dies.

    `waiting` is called now and again while waiting.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
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
            time.sleep(_LOCK_POLL)
        yield True
    finally:
        os.close(descriptor)


def check_cancel(cancel: threading.Event | None) -> None:
    """Raises PullCancelled once `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise PullCancelled(
            "The pull was cancelled; anything already downloaded is kept for the next one."
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """How far the hashing of a file is, in bytes."""

    file: str
    done: int
    size: int


class Hashes:
    """SHA-256 of whole files, each read once as it is: by inode, size and time of its last change.

    Whoever asks while a file is read waits for that. For threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], _Hash] = {}
        self._reading: dict[int, Reading] = {}  # by the thread that reads

    @property
    def reading(self) -> Reading | None:
        """The file that is read now, of several the largest."""
        with self._lock:
            return max(self._reading.values(), key=lambda each: each.size, default=None)

    def of(
        self,
        path: Path,
        cancel: threading.Event | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> str:
        """Hexadecimal digits; `progress` hears the bytes read so far, whoever reads them.

        Raises:
            PullCancelled: `cancel` was set meanwhile. OSError: it cannot be read.
        """
        info = path.stat()
        with self._lock:
            known = self._files.setdefault((info.st_dev, info.st_ino), _Hash())
        while not known.busy.acquire(timeout=_LOCK_POLL):
            check_cancel(cancel)
            progress(known.done)
        try:
            now = _stamp(path)
            if known.stamp != now:
                digest = self._read(path, known, cancel, progress)
                if _stamp(path) != now:
                    return digest  # of a file that was being written
                known.stamp, known.digest = now, digest
            return known.digest
        finally:
            known.busy.release()

    def _read(
        self,
        path: Path,
        known: _Hash,
        cancel: threading.Event | None,
        progress: Callable[[int], None],
    ) -> str:
        me, size = threading.get_ident(), path.stat().st_size

        def read(done: int) -> None:
            known.done = done
            with self._lock:
                self._reading[me] = Reading(path.name, done, size)
            progress(done)

        try:
            read(0)
            return sha256_of(path, progress=read, cancel=cancel)
        finally:
            with self._lock:
                self._reading.pop(me, None)


class _Hash:
    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.stamp: tuple[int, int] | None = None
        self.digest = ""
        self.done = 0  # bytes, while it is read


def _stamp(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


def sha256_of(
    path: Path,
    *,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> str:
    """Hash of a whole file as hexadecimal digits; `progress` hears the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        while piece := file.read(CHUNK):
            digest.update(piece)  # without the interpreter's lock: others go on
            done += len(piece)
            if progress:
                progress(done)
            check_cancel(cancel)
    return digest.hexdigest()
