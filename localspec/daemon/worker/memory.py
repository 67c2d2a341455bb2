"""How much memory a pair could have on this machine, now."""

from __future__ import annotations

import re
from typing import NamedTuple

from localspec import machine

MIB = 1 << 20
# Of a Mac's memory its GPU may take about this share (Metal's recommended working set).
MAC_SHARE = 0.7


class Free(NamedTuple):
    """Bytes; `vram` is 0 without an NVIDIA GPU."""

    ram: int
    vram: int


def free_memory(host: machine.Host, worker: int | None = None) -> Free:
    """What is free, counting what the engine worker of this pid holds: it would be unloaded first."""
    if host.system == "Darwin":
        return Free(int(machine.memory_bytes() * MAC_SHARE), 0)
    found = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    ram = int(found[1]) << 10 if found else machine.memory_bytes()
    return Free(ram + (_held(host, worker) if worker else 0), _vram(host, worker))


def _held(host: machine.Host, worker: int) -> int:
    """Caches and buffers of the worker; mapped weights count as available already."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", host.read(f"/proc/{worker}/status"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _vram(host: machine.Host, worker: int | None) -> int:
    """Free memory of the GPUs the worker would see, all together."""
    if not host.which("nvidia-smi"):
        return 0
    free = _query(host, "--query-gpu=memory.free")
    held = _query(host, "--query-compute-apps=pid,used_memory") if worker else []
    ours = sum(row[1] for row in held if len(row) == 2 and row[0] == worker)
    return (sum(row[0] for row in free) + ours) * MIB


def _query(host: machine.Host, what: str) -> list[list[int]]:
    """Rows of numbers; rows with anything else ("[N/A]") are left out."""
    asked = host.run(["nvidia-smi", what, "--format=csv,noheader,nounits"])
    if asked.code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.out.splitlines()]
    return [[int(cell) for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
