"""Energy that the machine has used so far, where it counts it: processors by RAPL, NVIDIA's GPUs by NVML.

RAPL's counters are files that on most systems only root may read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class Meter:
    """Joules since it was made. Use `joules` as often as once an hour: counters begin again at their end."""

    def __init__(self, rapl: Path = RAPL) -> None:
        self._counters = [*_rapl(rapl), *_nvml()]
        self._before = [read() for read, _ in self._counters]
        self._total = 0.0

    @property
    def counts(self) -> bool:
        """Whether the machine tells anything."""
        return bool(self._counters)

    def joules(self) -> float | None:
        """None where nothing is counted, or no longer."""
        if not self._counters:
            return None
        try:
            now = [read() for read, _ in self._counters]
        except (OSError, ValueError):
            self._counters = []
            return None
        for before, after, (_, most) in zip(self._before, now, self._counters, strict=True):
            self._total += after - before if after >= before else after + most - before
        self._before = now
        return self._total


Counter = tuple[Callable[[], float], float]  # joules now, and at its end


def _rapl(folder: Path) -> list[Counter]:
    """One counter for each processor; those inside (cores, memory) are parts of it."""
    found: list[Counter] = []
    for each in sorted(folder.glob("*rapl:*")):
        if each.name.count(":") != 1:
            continue
        try:
            most = int((each / "max_energy_range_uj").read_text())
            int((each / "energy_uj").read_text())
        except (OSError, ValueError):
            continue
        found.append((partial(_joules, each / "energy_uj"), most / 1e6))
    return found


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _nvml() -> list[Counter]:
    """One for each GPU whose driver counts."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
    except (OSError, AttributeError):
        return []
    found: list[Counter] = []
    for at in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(at, ctypes.byref(device)):
            continue

        def read(device: ctypes.c_void_p = device) -> float:
            millijoules = ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                raise ValueError("this GPU counts no energy")
            return millijoules.value / 1e3

        try:
            read()
        except (ValueError, AttributeError):
            continue
        found.append((read, 0.0))
    return found
