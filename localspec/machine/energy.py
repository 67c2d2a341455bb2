"""Measure the energy that the machine uses: processors by RAPL, NVIDIA GPUs by NVML.

RAPL's counters are files that only root may read on most systems.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class Meter:
    """A meter of the energy used since its creation.

    Call `joules` at least once an hour, because the counters wrap around.
    """

    def __init__(self, rapl: Path = RAPL) -> None:
        self._counters = [*_rapl_counters(rapl), *_nvml_counters()]
        self._last = [read() for read, _ in self._counters]
        self._total = 0.0

    @property
    def counts(self) -> bool:
        """Whether the machine has any energy counter."""
        return bool(self._counters)

    def joules(self) -> float | None:
        """Return the joules used so far, or None if nothing is counted, or no longer."""
        if not self._counters:
            return None
        try:
            readings = [read() for read, _ in self._counters]
        except (OSError, ValueError):
            self._counters = []
            return None
        for last, now, (_, maximum) in zip(self._last, readings, self._counters, strict=True):
            self._total += now - last if now >= last else now + maximum - last
        self._last = readings
        return self._total


# A function that reads the joules counted so far, and the joules at which the counter wraps around.
Counter = tuple[Callable[[], float], float]


def _rapl_counters(folder: Path) -> list[Counter]:
    """Return one counter for each processor. Zones inside one (cores, memory) are parts of it."""
    counters: list[Counter] = []
    for zone in sorted(folder.glob("*rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            max_microjoules = int((zone / "max_energy_range_uj").read_text())
            int((zone / "energy_uj").read_text())
        except (OSError, ValueError):
            continue
        counters.append((partial(_read_joules, zone / "energy_uj"), max_microjoules / 1e6))
    return counters


def _read_joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _nvml_counters() -> list[Counter]:
    """Return one counter for each GPU whose driver counts energy."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
    except (OSError, AttributeError):
        return []
    counters: list[Counter] = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
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
        counters.append((read, 0.0))
    return counters
