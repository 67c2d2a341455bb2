"""Control how long the threads of a pass spin while they wait for each other, if they are GNU OpenMP's.

Spinning threads continue at once. On two otherwise idle cores, a prompt is read up to 5 % faster than with
threads that sleep soon, and the first pass after a pause takes half the time. If another process needs a
core, however, a spinning thread keeps the thread that it waits for off the core, and passes take up to five
times as long.

libgomp spins for as long as GOMP_SPINCOUNT says, but only for 1 000 spins (10 µs) while it has more threads
than there are processors (see OMP_WAIT_POLICY=ACTIVE in its manual). This module therefore keeps a team of
idle threads while other processes need cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from localspec.engine import environment

POLL_INTERVAL_S = 0.25  # Interval between two checks of the load by other processes.
# Load by other processes, in cores, on the cores that a pass uses. Above BUSY_CORES, threads spin shortly;
# below IDLE_CORES, they spin long again. A process that computes without a pause gets 0.6 to 1 core. Beside
# one that takes half a core, spinning is no worse.
BUSY_CORES, IDLE_CORES = 0.5, 0.3

_N_STAT_FIELDS = 8  # the two fields after them are included in the first ones

Clock = Callable[[], float]


def parse_busy_seconds(line: str, ticks: int) -> float:
    """Return the seconds that all processors together were busy, stolen time included.

    line: the first line of /proc/stat: "cpu" and its fields. ticks: how many make a second.

    Raises ValueError if it is not such a line.
    """
    name, *fields = line.split()
    if name != "cpu" or len(fields) < _N_STAT_FIELDS:
        raise ValueError(f"not the line of all processors: {line!r}")
    user, nice, system, _idle, _disk_wait, *others = map(int, fields[:_N_STAT_FIELDS])
    return (user + nice + system + sum(others)) / ticks


def read_busy_s() -> float:
    """Return the same of now. Raises OSError or ValueError where the system does not report it."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        return parse_busy_seconds(file.readline(), os.sysconf("SC_CLK_TCK"))


def read_foreign_cpu_s() -> float:
    """Return the CPU seconds spent on anything but this process. Raises as `read_busy_s`."""
    return read_busy_s() - time.process_time()


class SpinControl:
    """A control of the spinning time. `look` must be called before each pass."""

    def __init__(
        self, cores: int, others: Clock = read_foreign_cpu_s, clock: Clock = time.monotonic
    ) -> None:
        self._cores, self._others, self._clock = cores, others, clock
        self._threads = 1
        self._team: _Team | None = None
        self._last_look, self._last_others_s = clock(), others()

    @property
    def short(self) -> bool:
        """Whether threads spin only shortly."""
        return self._team is not None

    def expect(self, threads: int) -> None:
        """Note that passes have up to `threads` threads."""
        self._threads = max(self._threads, threads)

    def look(self) -> None:
        """Check the load by other processes since the last check, if that was long enough ago."""
        now = self._clock()
        if now - self._last_look < POLL_INTERVAL_S:
            return
        others_s = self._others()
        busy_cores = (others_s - self._last_others_s) / (now - self._last_look)
        load = busy_cores - (self._cores - self._threads)
        self._last_look, self._last_others_s = now, others_s
        if self._team is None and load > BUSY_CORES:
            self._team = _Team(self._cores + 1)
        elif self._team is not None and load < IDLE_CORES:
            self._team.end()
            self._team = None


class _Team:
    """Idle threads of libgomp, which counts them. They live as long as the thread that created them."""

    def __init__(self, threads: int) -> None:
        started, self._ended = threading.Event(), threading.Event()

        def lead() -> None:
            library = ctypes.CDLL(_library())
            no_work = ctypes.cast(library.omp_get_level, ctypes.c_void_p)
            library.GOMP_parallel(no_work, None, ctypes.c_uint(threads), ctypes.c_uint(0))
            started.set()
            self._ended.wait()

        self._leader = threading.Thread(target=lead, name="idle-team", daemon=True)
        self._leader.start()
        started.wait()

    def end(self) -> None:
        self._ended.set()
        self._leader.join()


def _library() -> str:
    """Return the path of the libgomp that llama.cpp has loaded, or "" if it uses none."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    paths = (line.partition("/")[2] for line in maps.splitlines() if "/" in line)
    return next((f"/{path}" for path in paths if "libgomp" in path.rpartition("/")[2]), "")


_ours: list[SpinControl] = []  # At most one, for this process.


def start_control() -> None:
    """Start the control once llama.cpp is loaded, if its spinning time was set by this package."""
    if not _ours and environment.is_prepared() and _library():
        with contextlib.suppress(OSError, ValueError):
            _ours.append(SpinControl(len(os.sched_getaffinity(0))))


def expect_threads(threads: int) -> None:
    for control in _ours:
        control.expect(threads)


def check_load() -> None:
    for control in _ours:
        control.look()


def check_load_in_thread(threads: int) -> None:
    """Check the load regularly in a thread, for a process whose passes are not started from Python."""
    expect_threads(threads)

    def keep() -> None:
        while True:
            time.sleep(POLL_INTERVAL_S)
            check_load()

    if _ours:
        threading.Thread(target=keep, name="looking", daemon=True).start()
