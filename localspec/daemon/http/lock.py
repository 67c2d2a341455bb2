"""The lock that decides which daemon may run. A pid file would not do, because pids are reused.

This module imports little: if many daemons start at once, the losers end before they load a web server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from localspec.daemon.http import sockets
from localspec.errors import AlreadyRunning, UnsafePath
from localspec.paths import open_file

# How long a daemon that is starting or draining may hold the lock without listening: 10 s for
# running answers, 5 s for requests that hang, 10 s for an engine that saves its state or hangs.
HANDOVER_SECONDS = 30.0
_POLL_INTERVAL_S = 0.02


class Lock:
    """An exclusive lock on a file, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # O_NOFOLLOW, because with a link somebody could choose which file we truncate.
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise UnsafePath(
                f"The lock file {path} cannot be opened ({error.strerror}); remove it."
            ) from error

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Only `stop` of an unresponsive daemon needs the pid, so a full disk does not matter.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
        return True

    def release(self) -> None:
        os.close(self._descriptor)


def acquire(path: Path, socket: Path | None, patience: float = HANDOVER_SECONDS) -> Lock:
    """Acquire and return the daemon's lock.

    `socket` is None if systemd holds it, because systemd accepts connections without a daemon.

    Raises:
        AlreadyRunning: Another daemon holds the lock and answers on `socket`, or has held it for
            `patience` seconds without answering.
    """
    lock = Lock(path)
    deadline = time.monotonic() + patience
    while not lock.try_acquire():
        if socket and sockets.answers(socket):
            lock.release()
            raise AlreadyRunning("A daemon is already running; see: localspec status")
        if time.monotonic() > deadline:
            lock.release()
            raise AlreadyRunning(
                f"Another daemon holds {path} and has not responded for {patience:.0f} s; to stop "
                "it: localspec stop"
            )
        time.sleep(_POLL_INTERVAL_S)
    return lock
