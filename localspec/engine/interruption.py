"""Who may end the pass that runs: a request that is withdrawn, or one that comes and would wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from localspec.engine.llama import Stop


class Interruption:
    """What other threads say of requests while the step loop is deep in a pass.

    Each is told to the loop's inbox first and then here; the loop calls `heard` and then looks into its
    inbox. So none is missed, and one that is heard twice costs a pass that ends as it begins.
    """

    def __init__(self) -> None:
        self.stop = Stop()
        self._lock = threading.Lock()
        self._by: frozenset[int] = frozenset()  # requests whose leaving ends the pass
        self._yields = False  # does the pass end for whoever comes?
        self._left: set[int] = set()
        self._came = False

    # ------------------------------------------------------------------------ any thread

    def left(self, request: int) -> None:
        """Nobody waits for this request any more."""
        with self._lock:
            self._left.add(request)
            self._look()

    def came(self) -> None:
        """Another request waits for a place in a pass."""
        with self._lock:
            self._came = True
            self._look()

    # ------------------------------------------------------------------------ the step loop

    def heard(self) -> None:
        """All that was told until now is about to be looked at."""
        with self._lock:
            self._left, self._came = set(), False
            self.stop.set(False)

    def begins(self, by: Iterable[int], yields: bool) -> Stop | None:
        """A pass begins that is to end when one of these requests leaves, or when one comes.

        Returns what it is to heed; None: nothing.
        """
        with self._lock:
            self._by, self._yields = frozenset(by), yields
            self._look()
        return self.stop if by or yields else None

    @property
    def made_room(self) -> bool:
        """Did the pass that has been ended end for one that comes?"""
        with self._lock:
            return self._came and self._yields and not self._left & self._by

    def _look(self) -> None:
        self.stop.set(bool(self._left & self._by) or (self._came and self._yields))
