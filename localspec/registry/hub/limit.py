"""How fast a pull may be."""

from __future__ import annotations

import threading
import time


class Limit:
    """Bytes per second for all connections of a pull together."""

    def __init__(self, rate: int) -> None:
        """`rate` 0: no limit."""
        self._rate = rate
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, size: int, cancel: threading.Event) -> None:
        """Wait until `size` more bytes are within the limit, or `cancel` is set."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._due, now)
            self._due = start + size / self._rate
        cancel.wait(start - now)
