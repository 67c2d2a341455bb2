"""Who may end the pass that runs: a request that is withdrawn, or one that comes and would wait for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from localspec.engine.llama import Stop


class Interruption:
    """What other threads say of requests while the step loop is deep in a pass.

    Each is told to the loop's inbox first and then here; the loop calls `heard` and then looks into its
    inbox. So none is missed, and one that is heard twice costs a pass that ends as it begins.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.stop = Stop()
        self._lock = threading.Lock()
        self._by: frozenset[int] = frozenset()  # requests whose leaving ends the pass
        self._until = -math.inf  # the pass ends for whoever comes until then
        self._left: set[int] = set()
        self._came = math.inf  # when the first came who was not heard of

    # ------------------------------------------------------------------------ any thread

    def left(self, request: int) -> None:
        """Nobody waits for this request any more."""
        with self._lock:
            self._left.add(request)
            self._look()

    def came(self) -> None:
        """Another request waits for a place in a pass."""
        with self._lock:
            self._came = min(self._came, self._clock())
            self._look()

    # ------------------------------------------------------------------------ the step loop

    def heard(self) -> None:
        """All that was told until now is about to be looked at."""
        with self._lock:
            self._left, self._came = set(), math.inf
            self.stop.set(False)

    def begins(self, by: Iterable[int], yields_s: float = 0.0) -> Stop | None:
        """A pass begins that is to end when one of these requests leaves, or when one comes in so many
        seconds; 0: nobody does.

        Returns what it is to heed; None: nothing.
        """
        with self._lock:
            self._by = frozenset(by)
            self._until = self._clock() + yields_s if yields_s else -math.inf
            self._look()
        return self.stop if by or yields_s else None

    @property
    def made_room(self) -> bool:
        """Did the pass that has been ended end for one that comes?"""
        with self._lock:
            return self._came < self._until and not self._left & self._by

    def _look(self) -> None:
        self.stop.set(bool(self._left & self._by) or self._came < self._until)
