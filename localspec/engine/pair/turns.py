"""Workers of several pairs take turns: each pass has all cores for itself.

Two passes at once are slower than one after the other, because the threads of one wait at their barriers for
those that the other keeps from running. A lock in a file that all workers open is held for a round. It is
the system's: it goes with a process that ends. Whoever waits is next (a second lock, the queue), and an
editor's request keeps its place until its prompt is read. Nobody waits longer for a round than a running
answer may pause, and four times as long for an editor's prompt: a round beside that, or between its passes,
makes a key's suggestion half as late again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_QUEUE, _TURN = 0, 1  # bytes of the file: who is next, and whose turn it is
_HURRIED = 4  # times its patience that a worker waits for one that hurries
_LOOK = 0.0002  # seconds between two looks: a hundredth of a large model's pass


class Turns:
    """One worker's part in it; for one thread."""

    def __init__(self, file: Path | None, patience: float) -> None:
        """file: the same for all workers; None: there are no turns. patience: seconds, after which a round
        begins beside another one.
        """
        self._patience = patience
        self._next = False  # whether we are
        self._file = -1
        if file is not None:
            with contextlib.suppress(OSError):  # a read-only disk: then there are no turns
                file.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextlib.contextmanager
    def one(self, hurry: bool) -> Iterator[None]:
        """A round of ours. hurry: the next one is to be ours, too."""
        if self._file < 0:
            yield
            return
        # Only one that hurries keeps its place in a round; who is next holds it no longer than it waits.
        self._next = self._next or self._locked(_QUEUE, _HURRIED * self._patience)
        mine = self._locked(_TURN, self._patience)
        if self._next and not hurry:
            self._next = False
            self._unlock(_QUEUE)
        try:
            yield
        finally:
            if mine:
                self._unlock(_TURN)

    def rest(self) -> None:
        """Nothing is left to do."""
        if self._next:
            self._next = False
            self._unlock(_QUEUE)

    def _locked(self, what: int, patience: float) -> bool:
        """Whether it is ours, after so many seconds at most."""
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, what)
                return True
            except OSError:
                if time.monotonic() >= until:
                    return False
            time.sleep(_LOOK)

    def _unlock(self, what: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, what)
