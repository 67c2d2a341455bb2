"""Lowering the priority of long work, so that it gives way to the passes of running answers.

The threads of a pass wait for each other many times, so a thread that competes with one of them for a core
makes the whole pass several times slower. Work that is expected to be long therefore runs at a lower
priority. A thread with a lower priority must touch Python objects as little as possible: while it holds the
interpreter's lock and has no core, everything else waits for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path


def lower_priority(thread: int | None = None) -> None:
    """Have a thread, or a process of one thread, give way to all others.

    thread: its native id; None: the caller's own. Linux alone has priorities of single threads; elsewhere
    this does nothing.

    A nice thread would not do. Linux counts threads and not their weights when it spreads them over cores:
    it leaves both threads of a pass on one core and gives the other to the nice one. A core that only runs
    SCHED_IDLE counts as idle.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = thread or threading.get_native_id()
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def lower_session_priority(process: int, niceness: int = 19) -> None:
    """Have the session of a process give way to other sessions.

    Linux shares the processors among sessions first (`sched(7)`, autogroup), so a nice value and SCHED_IDLE
    hold within a session only. Elsewhere this does nothing.
    """
    for _ in range(10):
        try:
            Path(f"/proc/{process}/autogroup").write_text(f"{niceness}\n")
            return
        except BlockingIOError:  # the kernel allows ten changes a second
            time.sleep(0.1)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return
