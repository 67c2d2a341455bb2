"""Who else is using the processors: whether what is measured now says something about quiet times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of the fields of its first line: idle, and waiting for a disk
_SHOWN = 8  # fields; the two after them are counted twice in the first ones


def used_s(line: str, ticks: int) -> float:
    """Seconds of all processors together in which they were not idle, stolen time among them.

    line: the first one of /proc/stat, "cpu" and its fields; ticks: of them in a second.

    Raises:
        ValueError: it is no such line.
    """
    name, *fields = line.split()
    if name != "cpu" or len(fields) < _SHOWN:
        raise ValueError(f"not the line of all processors: {line!r}")
    counts = [int(field) for field in fields[:_SHOWN]]
    return (sum(counts) - sum(counts[_IDLE])) / ticks


def _all_used_s() -> float:
    with _STAT.open(encoding="ascii") as file:
        return used_s(file.readline(), os.sysconf("SC_CLK_TCK"))


class Company:
    """What share of the processors others have used since this was made."""

    def __init__(
        self,
        all_used_s: Callable[[], float] = _all_used_s,
        own_used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = (all_used_s, own_used_s, clock)
        self._start = self._now()

    def _now(self) -> tuple[float, float, float] | None:
        try:
            everybody, own, clock = (read() for read in self._read)
        except (OSError, ValueError):
            return None
        return everybody, own, clock

    @property
    def share(self) -> float:
        """0 where nobody else did anything, or where this system does not tell; 1: all of them."""
        end = self._now()
        if self._start is None or end is None:
            return 0.0
        everybody, own, spent = (b - a for a, b in zip(self._start, end, strict=True))
        all_s = spent * (os.cpu_count() or 1)
        return min(max((everybody - own) / all_s, 0.0), 1.0) if all_s > 0 else 0.0
