"""How busy the machine is with other work, which makes every timing mean little."""

from __future__ import annotations

import os
import time

from localspec.machine.host import MAX_NOISE_CORES, OtherProcesses


def load_report(seconds: float = 1.0) -> str:
    """Return a line on the machine's load, with a warning if other processes are busy."""
    others = OtherProcesses()
    time.sleep(seconds)
    cores = others.cores(())
    try:
        line = f"load average {os.getloadavg()[0]:.2f}"
    except OSError:
        line = "load average unknown"
    if cores is None:
        return f"{line}; what other processes do is not known here"
    line += f", other processes {cores * 100:.0f} % of a core"
    if cores <= MAX_NOISE_CORES:
        return line
    names = ", ".join(f"{name} {share * 100:.0f} %" for name, share in others.busiest())
    return f"WARNING: the machine is not quiet, times mean little ({line}{': ' if names else ''}{names})"
