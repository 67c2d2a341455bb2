"""Which daemon may run: the one that holds the lock. A pid proves nothing, pids are reused.

Imports little, so that the loser of a race among many ends before it has loaded a web server.
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

# How long a daemon that is just starting or draining may hold the lock without listening: 10 s for
# the answers that are being written, 5 for what hangs, 10 for an engine that saves or hangs.
HANDOVER_SECONDS = 30.0
_POLL = 0.02


class Lock:
    """An exclusive lock on a file, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # O_NOFOLLOW: a link here would let somebody choose which file we truncate.
            self._handle = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise UnsafePath(
                f"The lock file {path} cannot be opened ({error.strerror}); remove it."
            ) from error

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):  # a full disk: only `stop` of a dead daemon needs it
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        return True

    def release(self) -> None:
        os.close(self._handle)


def acquire(path: Path, socket: Path | None, patience: float = HANDOVER_SECONDS) -> Lock:
    """The daemon's lock. `socket` is None where systemd holds it, and answers whoever runs.

    Raises:
        AlreadyRunning: another daemon has it and answers on `socket`, or has had it for `patience`
            seconds without answering.
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
        time.sleep(_POLL)
    return lock
