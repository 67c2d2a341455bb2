"""Measure whether the machine is quiet. Other work on the same cores makes every timing meaningless.

This reads /proc. Without it (macOS), only the load average is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

NOISE = 0.1  # cores that other processes may keep busy before a measurement is doubtful
_PROC = Path("/proc")


def load_average() -> float | None:
    """Return the average number of runnable processes over the last minute, or None if it is unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _read_process(stat: Path) -> tuple[str, int]:
    """Return the name and the CPU time of one process, in clock ticks."""
    head, _, tail = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], int(fields[11]) + int(fields[12])


def _processes() -> dict[int, tuple[str, int]]:
    processes: dict[int, tuple[str, int]] = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit():
            try:
                processes[int(folder.name)] = _read_process(folder / "stat")
            except (OSError, ValueError, IndexError):
                continue  # it has ended
    return processes


def _read_busy_ticks() -> int | None:
    """Return the clock ticks spent on any work, including time stolen by other virtual machines."""
    try:
        total = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(v) for v in total.split()[1:9])
    return user + nice + system + irq + soft + steal


class Others:
    """The cores that other processes have kept busy since this was created."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _read_busy_ticks()
        self._processes = _processes()

    def cores(self, ours: Iterable[int]) -> float | None:
        """Return how many cores other processes keep busy. `ours` are ids of our processes except this."""
        busy = _read_busy_ticks()
        if self._busy is None or busy is None:
            return None
        our_ticks = 0
        for pid in {os.getpid(), *ours}:
            try:
                our_ticks += _read_process(_PROC / str(pid) / "stat")[1]
            except (OSError, ValueError, IndexError):
                continue
            our_ticks -= self._processes.get(pid, ("", 0))[1]
        elapsed_ticks = (time.monotonic() - self._start) * os.sysconf("SC_CLK_TCK")
        return max(busy - self._busy - our_ticks, 0) / max(elapsed_ticks, 1.0)

    def busiest(self, count: int = 3) -> list[tuple[str, float]]:
        """Return the names of the busiest other processes, and the cores that they use."""
        elapsed_ticks = (time.monotonic() - self._start) * os.sysconf("SC_CLK_TCK")
        usage = [
            (name, (ticks - self._processes.get(pid, (name, 0))[1]) / max(elapsed_ticks, 1.0))
            for pid, (name, ticks) in _processes().items()
            if pid != os.getpid()
        ]
        usage = [(name, cores) for name, cores in usage if cores > NOISE / 2]
        return sorted(usage, key=lambda item: -item[1])[:count]


def report(seconds: float = 1.0) -> str:
    """Return a line on the machine's load, with a warning if other processes are busy."""
    others = Others()
    time.sleep(seconds)
    cores = others.cores(())
    load = load_average()
    line = "load average unknown" if load is None else f"load average {load:.2f}"
    if cores is None:
        return f"{line}; what other processes do is not known here"
    line += f", other processes {cores * 100:.0f} % of a core"
    if cores <= NOISE:
        return line
    names = ", ".join(f"{name} {share * 100:.0f} %" for name, share in others.busiest())
    return f"WARNING: the machine is not quiet, times mean little ({line}{': ' if names else ''}{names})"
