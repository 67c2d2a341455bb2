"""Measure how much memory the machine has, and how much of it a program can still use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from localspec.machine.host import Host

_CGROUP_ROOT = PurePosixPath("/sys/fs/cgroup")
# Names of the limit, of the used memory, and of the part of it that is inactive page cache.
_CGROUP_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2_NAMES = ("memory.max", "memory.current", "inactive_file")
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a number above this one


def memory_bytes() -> int:
    """Return the machine's memory in bytes, or 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def available_bytes(host: Host) -> int:
    """Return the bytes of main memory that a program can still use on Linux, page cache included.

    In a container or a service with a memory limit, this is at most what the limit leaves.
    """
    match = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    free = int(match[1]) << 10 if match else memory_bytes()
    return max(min([free, *_available_in_cgroups(host)]), 0)


def _available_in_cgroups(host: Host) -> Iterator[int]:
    """Yield what the limit of each of our cgroups leaves, in bytes (cgroups(7), both versions)."""
    for line in host.read("/proc/self/cgroup").splitlines():
        _number, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        root, names = _CGROUP_ROOT, _CGROUP_V2_NAMES
        if "memory" in controllers.split(","):
            root, names = _CGROUP_ROOT / "memory", _CGROUP_V1_NAMES
        elif controllers:
            continue
        cgroup = root / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):
            limit = host.read(str(folder / names[0])).strip()
            used = host.read(str(folder / names[1])).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED_BYTES:
                stat = host.read(str(folder / "memory.stat"))
                cached = re.search(rf"^{names[2]} (\d+)$", stat, re.MULTILINE)
                yield int(limit) - int(used) + (int(cached[1]) if cached else 0)
