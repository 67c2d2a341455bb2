"""How urgent a thread is to the system: what may take long gives way to the passes of running answers."""

from __future__ import annotations

import contextlib
import os
import sys

# Of two busy threads on one core, one this nice gets a fifteenth of what a normal one does.
NICENESS = 12


def lower_priority(thread: int) -> None:
    """Have a thread of this process give way to all normal ones. thread: its native id.

    Only Linux has priorities of single threads; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
