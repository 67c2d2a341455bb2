"""Work that may take long gives way to the passes of running answers.

The threads of a pass wait for each other many times, so a thread that competes with one of them for a core
makes the whole pass several times slower. What is expected to be long therefore runs at a lower priority.
A thread with one must touch Python objects as little as possible: while it holds the interpreter's lock and
has no core, everything else waits for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# How much nicer than normal: of two busy threads on one core it gets a fifteenth of what the other does.
NICENESS = 12


def lower_priority(thread: int | None = None) -> None:
    """Have a thread give way to its process's others. thread: its native id; None: the caller's own.

    Only Linux has priorities of single threads. Elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            normal = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(os.PRIO_PROCESS, thread or threading.get_native_id(), normal + NICENESS)
