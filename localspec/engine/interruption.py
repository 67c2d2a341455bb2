"""Which requests may end the pass that runs: one that is withdrawn, or a new one that would wait for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from localspec.engine.llama import Stop


class Interruption:
    """What other threads report of requests while the step loop is deep in a pass.

    They put each request into the loop's inbox first and then report it here. The loop calls `clear` and
    then reads its inbox. So no request is missed, and one that is reported twice only costs a pass that
    ends as it begins.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.stop = Stop()
        self._lock = threading.Lock()
        self._by: frozenset[int] = frozenset()  # requests whose withdrawal ends the pass
        self._until = -math.inf  # a new request ends the pass until this time
        self._left: set[int] = set()  # requests withdrawn since `clear`
        self._came = math.inf  # when the first new request since `clear` came

    # ------------------------------------------------------------------------ any thread

    def request_left(self, request: int) -> None:
        """Report that a request was withdrawn."""
        with self._lock:
            self._left.add(request)
            self._look()

    def request_came(self) -> None:
        """Report that a new request waits for a place in a pass."""
        with self._lock:
            self._came = min(self._came, self._clock())
            self._look()

    # ------------------------------------------------------------------------ the step loop

    def clear(self) -> None:
        """Forget all reports, because the loop is about to read its inbox."""
        with self._lock:
            self._left, self._came = set(), math.inf
            self.stop.set(False)

    def begin_pass(self, by: Iterable[int], yields_s: float = 0.0) -> Stop | None:
        """Prepare the next pass, and return the flag that it must check; None if nothing may end it.

        by: requests whose withdrawal ends the pass. yields_s: for so many seconds a new request ends it,
        too; 0: none does.
        """
        with self._lock:
            self._by = frozenset(by)
            self._until = self._clock() + yields_s if yields_s else -math.inf
            self._look()
        return self.stop if by or yields_s else None

    @property
    def was_for_new_request(self) -> bool:
        """Whether the pass was interrupted for a new request."""
        with self._lock:
            return self._came < self._until and not self._left & self._by

    def _look(self) -> None:
        self.stop.set(bool(self._left & self._by) or self._came < self._until)
