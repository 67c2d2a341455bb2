"""A measured median beside the goal it has to meet."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence


def met(name: str, values: Sequence[float], goal: float, unit: str) -> bool:
    """Print the median, the range and whether the goal, an upper limit, was met."""
    median = statistics.median(values)
    ok = median <= goal
    sys.stdout.write(
        f"{name:38} median {median:6.1f} {unit} of {len(values)} "
        f"({min(values):.1f} … {max(values):.1f}); goal {goal} {unit}: {'met' if ok else 'MISSED'}\n"
    )
    return ok
