"""How much memory there is, and how much of it a program can still have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from localspec.machine.host import Host

_GROUPS = PurePosixPath("/sys/fs/cgroup")
# The limit, what is used, and what of that are files that nobody reads now.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_UNLIMITED = 1 << 60  # version 1 has a number for it


def memory_bytes() -> int:
    """The machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def available_bytes(host: Host) -> int:
    """What a program can still have of main memory on Linux, files in the page cache given up.

    In a container or a service with a limit of its own that is what the limit leaves.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else memory_bytes()
    return max(min([free, *_left_by_groups(host)]), 0)


def _left_by_groups(host: Host) -> Iterator[int]:
    """What each group that we are in leaves us (cgroups(7), both versions)."""
    for line in host.read("/proc/self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        root, files = _GROUPS, _VERSION_2
        if "memory" in controllers.split(","):
            root, files = _GROUPS / "memory", _VERSION_1
        elif controllers:
            continue
        ours = root / path.lstrip("/")
        for folder in (ours, *ours.parents):
            limit = host.read(str(folder / files[0])).strip()
            used = host.read(str(folder / files[1])).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                stat = host.read(str(folder / "memory.stat"))
                cached = re.search(rf"^{files[2]} (\d+)$", stat, re.MULTILINE)
                yield int(limit) - int(used) + (int(cached[1]) if cached else 0)
