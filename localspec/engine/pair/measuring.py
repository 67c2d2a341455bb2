"""Measuring what passes cost, and whether other programs disturbed the measurement."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from localspec.engine.speculation.cost import Clock

Turn = Callable[[], AbstractContextManager[object]]  # inside it this process has the processors

WIDTHS = tuple(range(1, 17))
FIRST_WIDTHS = (1, 2, 4, 8)
WIDE_WIDTHS = (32, 64)  # passes that copy text; a row costs less there than narrower passes suggest
BUDGET_S = 2.0
MIN_REPEATS, MAX_REPEATS = 5, 25
EXTRA_REPEATS_S = 0.25  # after this time no width is run more than MIN_REPEATS times
# Passes of one row to run before one that is timed. llama.cpp has a graph from the second pass of a width on,
# and on CUDA the second pass records that graph for the third.
SETTLING_PASSES = 2

_STAT = Path("/proc/stat")
_IDLE_FIELDS = slice(3, 5)  # idle, and waiting for a disk
_N_FIELDS = 8  # the two fields after them are included in the first ones


def used_s(line: str, ticks: int) -> float:
    """Return the seconds that all processors together were busy, stolen time included.

    line: the first line of /proc/stat: "cpu" and its fields. ticks: how many make a second.

    Raises:
        ValueError: It is not such a line.
    """
    name, *fields = line.split()
    if name != "cpu" or len(fields) < _N_FIELDS:
        raise ValueError(f"not the line of all processors: {line!r}")
    counts = [int(field) for field in fields[:_N_FIELDS]]
    return (sum(counts) - sum(counts[_IDLE_FIELDS])) / ticks


def _all_used_s() -> float:
    with _STAT.open(encoding="ascii") as file:
        return used_s(file.readline(), os.sysconf("SC_CLK_TCK"))


class Contention:
    """The share of the processors that others have used since this object was made."""

    def __init__(
        self,
        all_used_s: Callable[[], float] = _all_used_s,
        own_used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = (all_used_s, own_used_s, clock)
        self._start = self._now()

    def _now(self) -> tuple[float, float, float] | None:
        try:
            all_s, own_s, time_s = (read() for read in self._readers)
        except (OSError, ValueError):
            return None
        return all_s, own_s, time_s

    @property
    def share(self) -> float:
        """The share from 0 to 1; 0 also where the system does not report it."""
        end = self._now()
        if self._start is None or end is None:
            return 0.0
        used_by_all_s, own_s, elapsed_s = (
            stop - start for start, stop in zip(self._start, end, strict=True)
        )
        all_s = elapsed_s * (os.cpu_count() or 1)
        return min(max((used_by_all_s - own_s) / all_s, 0.0), 1.0) if all_s > 0 else 0.0


class Measured(NamedTuple):
    """Milliseconds by width, and how much others disturbed the measurement, from 0 to 1."""

    ms: dict[int, float]
    noise: float


def measure(
    run: Callable[[int], None],
    widths: Iterable[int],
    deadline: float,
    clock: Clock = time.perf_counter,
    turn: Turn = nullcontext,
) -> Measured:
    """Return the median milliseconds of `run(width)` per width, measured until `deadline` (time.monotonic).

    All widths are run in rounds, so that a disturbance does not hit one of them alone: the comparison is what
    matters. Each is run warm at least once, up to five times while there is time, and more often if that
    takes next to none, because a disturbance hits several of such short runs. Each run is made inside a
    `turn`, whose wait is not counted.

    llama.cpp keeps the graph of a pass for the next one of the same width. So passes of one row, which follow
    each other in practice, are timed after SETTLING_PASSES others like them. The other widths, which come
    between those, are timed after a pass of another width.
    """
    widths = list(widths)
    contention = Contention()
    for width in widths:
        with turn():
            run(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    extra_deadline = min(time.monotonic() + EXTRA_REPEATS_S, deadline)
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and time.monotonic() > extra_deadline:
            break
        for width in widths:
            if repeat and time.monotonic() > deadline:
                break
            with turn():
                for _ in range(SETTLING_PASSES if width == 1 else 0):
                    run(width)
                start = clock()
                run(width)
                times[width].append((clock() - start) * 1e3)
    ms = {width: statistics.median(spent) for width, spent in times.items()}
    # A disturbance makes single runs longer. On a quiet machine the median is near the shortest run.
    spread = statistics.median(ms[width] / max(min(times[width]), 1e-9) - 1 for width in widths)
    return Measured(ms, min(max(spread, contention.share), 1.0))


def measure_widths(
    run: Callable[[int], None], budget_s: float, turn: Turn = nullcontext
) -> Measured:
    """Measure all widths up to 16 if the budget allows, else only 1, 2, 4 and 8.

    The WIDE_WIDTHS follow if they cost no more than that again.
    """
    begin = time.monotonic()
    with turn():
        start = time.monotonic()
        run(1)
        run(8)
        pass_s = time.monotonic() - start  # an overestimate, because both were cold
    # All widths take about as long as sixteen passes of the mean width, run at least twice.
    fits = pass_s * len(WIDTHS) < budget_s
    measured = measure(run, WIDTHS if fits else FIRST_WIDTHS, begin + budget_s, turn=turn)
    noise = measured.noise
    # Each wide width is run twice, which takes less than this.
    if 2 * measured.ms[8] / 8 * sum(WIDE_WIDTHS) < 2e3 * budget_s:
        wide = measure(run, WIDE_WIDTHS, 0.0, turn=turn)
        measured.ms.update(wide.ms)
        noise = max(noise, wide.noise)
    return Measured(dict(sorted(measured.ms.items())), noise)
