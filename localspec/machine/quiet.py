"""Is the machine quiet? Other work on the same cores makes every time meaningless.

Reads /proc; where there is none (macOS), only the load average is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

NOISE = 0.1  # cores of other processes' work beyond which a measurement is doubtful
_PROC = Path("/proc")


def load_average() -> float | None:
    """Runnable processes on average over the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _ticks(stat: Path) -> tuple[str, int]:
    """Name and CPU time of one process, in clock ticks."""
    head, _, tail = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], int(fields[11]) + int(fields[12])


def _processes() -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = _ticks(folder / "stat")
            except (OSError, ValueError, IndexError):
                continue  # it has ended
    return found


def _all_busy() -> int | None:
    """Clock ticks spent on anything, in all; time stolen by other virtual machines included."""
    try:
        first = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(v) for v in first.split()[1:9])
    return user + nice + system + irq + soft + steal


class Others:
    """Cores that other processes kept busy since this was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _all_busy()
        self._processes = _processes()

    def cores(self, ours: Iterable[int]) -> float | None:
        """Busy cores not ours; `ours` are process ids of ours besides this one."""
        busy = _all_busy()
        if self._busy is None or busy is None:
            return None
        own = 0
        for pid in {os.getpid(), *ours}:
            try:
                own += _ticks(_PROC / str(pid) / "stat")[1]
            except (OSError, ValueError, IndexError):
                continue
            own -= self._processes.get(pid, ("", 0))[1]
        spent = (time.monotonic() - self._start) * os.sysconf("SC_CLK_TCK")
        return max(busy - self._busy - own, 0) / max(spent, 1.0)

    def busiest(self, count: int = 3) -> list[tuple[str, float]]:
        """Names of the busiest other processes, and the cores they took."""
        spent = (time.monotonic() - self._start) * os.sysconf("SC_CLK_TCK")
        took = [
            (name, (ticks - self._processes.get(pid, (name, 0))[1]) / max(spent, 1.0))
            for pid, (name, ticks) in _processes().items()
            if pid != os.getpid()
        ]
        took = [(name, cores) for name, cores in took if cores > NOISE / 2]
        return sorted(took, key=lambda item: -item[1])[:count]


def report(seconds: float = 1.0) -> str:
    """A line on the machine's load, with a warning where other processes are at work."""
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
    named = ", ".join(f"{name} {share * 100:.0f} %" for name, share in others.busiest())
    return f"WARNING: the machine is not quiet, times mean little ({line}{': ' if named else ''}{named})"
