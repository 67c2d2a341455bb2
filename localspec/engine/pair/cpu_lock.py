"""The lock with which workers of several pairs take turns, so that each pass has all cores for itself.

Two passes at once are slower than one after the other, because the threads of one wait at their barriers for
threads that the other keeps from running. So all workers open the same file and lock it for each round. The
system frees the lock of a process that ends. A second lock is the queue: its holder is next, and an editor's
request keeps it until its prompt is read.

A worker waits at most `patience` seconds for the lock, or 4 × `patience` while an editor's prompt is being
prefilled. A round beside that, or between its passes, makes a key's suggestion half as late again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_QUEUE, _TURN = 0, 1  # bytes of the file that are locked: the place in the queue, and the turn
_HURRY_FACTOR = 4  # how many times longer a worker waits for an editor's prompt
_POLL_INTERVAL_S = 0.0002  # a hundredth of a large model's pass


class CpuLock:
    """One worker's access to the lock, for use in one thread."""

    def __init__(self, file: Path | None, patience: float) -> None:
        """Open the lock.

        file: the same for all workers; None: no turns are taken. patience: seconds after which a round begins
        beside another worker's.
        """
        self._patience, self._holds_queue = patience, False
        self._file = -1
        if file is not None:
            with contextlib.suppress(OSError):  # on a read-only disk no turns are taken
                file.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def hold(self, hurry: bool) -> Iterator[None]:
        """Hold the lock for a round. hurry: keep the place in the queue for the next round, too."""
        if self._file < 0:
            yield
            return
        queue_s = _HURRY_FACTOR * self._patience
        self._holds_queue = self._holds_queue or self._try_lock(_QUEUE, queue_s)
        has_turn = self._try_lock(_TURN, self._patience)
        if not hurry:  # the queue is held only until the turn comes
            self.leave_queue()
        try:
            yield
        finally:
            if has_turn:
                self._unlock(_TURN)

    def leave_queue(self) -> None:
        """Give up the place in the queue, because there is nothing to do."""
        if self._holds_queue:
            self._holds_queue = False
            self._unlock(_QUEUE)

    def _try_lock(self, byte: int, timeout_s: float) -> bool:
        """Lock a byte of the file, waiting up to `timeout_s`. Return whether it was locked."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(_POLL_INTERVAL_S)

    def _unlock(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
