"""Measuring what passes cost, and whether others used the processors meanwhile: then it says little
about quiet times.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from localspec.engine.speculation.cost import Clock

Turn = Callable[[], AbstractContextManager[object]]  # within it the processors are ours

WIDTHS = tuple(range(1, 17))
FIRST_WIDTHS = (1, 2, 4, 8)
WIDE = (32, 64)  # of passes that copy text: a row costs less there than narrower passes tell
BUDGET_S = 2.0
REPEATS, MOST_REPEATS = 5, 25
ENOUGH_S = 0.25  # after which nothing is run more than REPEATS times
# Passes of one row before one that tells what they cost: the second of a width is the first for which
# llama.cpp has a graph, and on CUDA that one records it for the third.
SETTLING = 2

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


class Contention:
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


class Measured(NamedTuple):
    """Milliseconds by width, and how much others disturbed the measuring: 0 not at all, 1 very much."""

    ms: dict[int, float]
    noise: float


def measure(
    run: Callable[[int], None],
    widths: Iterable[int],
    deadline: float,
    clock: Clock = time.perf_counter,
    turn: Turn = nullcontext,
) -> Measured:
    """Median milliseconds of `run(width)` per width, warm; stops at `deadline` (time.monotonic).

    All widths are run in rounds, so that a disturbance does not fall on one of them alone: what counts is
    how they compare. Each is run at least once warm; up to five times while there is time, and more often
    where that takes next to none: of so short runs a disturbance reaches several. A run is made in a
    `turn`, the wait for which is no part of it.

    llama.cpp keeps the graph of a pass for the next one of its width. So passes of one row, which follow
    each other, are timed after SETTLING of theirs, and the others, which come between those, after another.
    """
    widths = list(widths)
    contention = Contention()
    for width in widths:
        with turn():
            run(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    enough = min(time.monotonic() + ENOUGH_S, deadline)
    for repeat in range(MOST_REPEATS):
        if repeat >= REPEATS and time.monotonic() > enough:
            break
        for width in widths:
            if repeat and time.monotonic() > deadline:
                break
            with turn():
                for _ in range(SETTLING if width == 1 else 0):
                    run(width)
                start = clock()
                run(width)
                times[width].append((clock() - start) * 1e3)
    ms = {width: statistics.median(spent) for width, spent in times.items()}
    # What disturbs makes single runs longer: on a quiet machine the median is near the shortest.
    spread = statistics.median(ms[width] / max(min(times[width]), 1e-9) - 1 for width in widths)
    return Measured(ms, min(max(spread, contention.share), 1.0))


def measure_widths(
    run: Callable[[int], None], budget_s: float, turn: Turn = nullcontext
) -> Measured:
    """All widths up to 16 where that fits into the budget; first 1, 2, 4, 8 where passes are slow.

    And the WIDE ones, where they cost no more than that again.
    """
    begun = time.monotonic()
    with turn():
        start = time.monotonic()
        run(1)
        run(8)
        pass_s = time.monotonic() - start  # both cold: an overestimate
    # all widths: about as long as sixteen passes of the mean width, twice at least
    fits = pass_s * len(WIDTHS) < budget_s
    found = measure(run, WIDTHS if fits else FIRST_WIDTHS, begun + budget_s, turn=turn)
    noise = found.noise
    if 2 * found.ms[8] / 8 * sum(WIDE) < 2e3 * budget_s:  # each is run twice, for less than that
        wide = measure(run, WIDE, 0.0, turn=turn)
        found.ms.update(wide.ms)
        noise = max(noise, wide.noise)
    return Measured(dict(sorted(found.ms.items())), noise)
