"""How long the threads of a pass wait awake for each other, where they are GNU OpenMP's.

Threads that wait awake go on at once: on two quiet cores a prompt is read up to 5 % faster than with threads
that soon sleep, and what follows a rest comes in half the time. Beside somebody who wants a core for himself
each keeps out the other that it waits for: there passes take up to five times as long.

libgomp waits for as long as GOMP_SPINCOUNT says, and for 1 000 spins (10 µs) while it has more threads than
there are processors (its manual, of OMP_WAIT_POLICY=ACTIVE). So where cores are wanted, a team of idle
threads is held beside.
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

LOOK_S = 0.25  # between two looks at what others do
# Cores that others take of those that the threads of a pass are on. One that computes without a pause gets
# 0.6 to 1; beside one that takes half a core, waiting awake is no worse.
WANTED, FREE = 0.5, 0.3
_STAT = Path("/proc/stat")

Clock = Callable[[], float]


def others_s() -> float:
    """Seconds that processors have spent on anything but this process, those of other virtual machines
    among them. Raises OSError where it is not told.
    """
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, _stat().split()[1:9])
    busy = user + nice + system + irq + soft + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def _stat() -> bytes:
    with _STAT.open("rb") as file:
        return file.readline()


class Waiting:
    """Whether threads wait shortly. `look` is called before each pass."""

    def __init__(self, cores: int, others: Clock = others_s, clock: Clock = time.monotonic) -> None:
        self._cores = cores
        self._others, self._clock = others, clock
        self._threads = 1
        self._team: _Team | None = None
        self._looked = clock()
        self._seen = others()

    @property
    def short(self) -> bool:
        return self._team is not None

    def expect(self, threads: int) -> None:
        """Passes have up to so many."""
        self._threads = max(self._threads, threads)

    def look(self) -> None:
        """See what others have taken since the last look, where that was a while ago."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        seen = self._others()
        taken = (seen - self._seen) / (now - self._looked) - (self._cores - self._threads)
        self._looked, self._seen = now, seen
        if self._team is None and taken > WANTED:
            self._team = _Team(self._cores + 1)
        elif self._team is not None and taken < FREE:
            self._team.end()
            self._team = None


class _Team:
    """Idle threads of libgomp's own, which counts them. They live as long as the thread that led them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._over = threading.Event()
        self._there = threading.Event()
        self._leader = threading.Thread(target=self._lead, name="idle-team", daemon=True)
        self._leader.start()
        self._there.wait()

    def end(self) -> None:
        self._over.set()
        self._leader.join()

    def _lead(self) -> None:
        library = ctypes.CDLL(_library())
        nothing = ctypes.cast(library.omp_get_level, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, ctypes.c_uint(self._threads), ctypes.c_uint(0))
        self._there.set()
        self._over.wait()


def _library() -> str:
    """The libgomp that llama.cpp has loaded, "" where it waits in other ways."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    paths = (line.partition("/")[2] for line in maps.splitlines() if "/" in line)
    return next((f"/{path}" for path in paths if "libgomp" in path.rpartition("/")[2]), "")


_ours: list[Waiting] = []  # of this process, as libgomp's threads are


def begin() -> None:
    """llama.cpp is loaded: heed others from now on, where it waits as we have set it."""
    if not _ours and environment.prepared() and _library():
        with contextlib.suppress(OSError, ValueError):
            _ours.append(Waiting(len(os.sched_getaffinity(0))))


def expect(threads: int) -> None:
    """Passes have up to so many threads."""
    for each in _ours:
        each.expect(threads)


def look() -> None:
    """A pass begins."""
    for each in _ours:
        each.look()


def keep_looking(threads: int) -> None:
    """For a process whose passes are not begun from Python: look beside them, as long as it lives."""
    expect(threads)

    def keep() -> None:
        while True:
            time.sleep(LOOK_S)
            look()

    if _ours:
        threading.Thread(target=keep, name="looking", daemon=True).start()
