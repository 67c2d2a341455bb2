"""Whether the kernel ended a process for memory: it counts what it kills."""

from __future__ import annotations

import sys
from pathlib import Path

_MACHINE = Path("/proc/vmstat")
_GROUP = Path("/sys/fs/cgroup/memory.events")


def kills() -> int | None:
    """Out-of-memory kills so far, here and in our control group; None where nothing counts them."""
    if sys.platform != "linux":
        return None
    counts = [
        int(line.split()[1])
        for file in (_MACHINE, _GROUP)
        for line in _lines(file)
        if line.startswith("oom_kill ")
    ]
    return sum(counts) if counts else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
