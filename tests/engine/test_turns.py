"""Workers take turns on the processors: one at a time, and none waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localspec.engine.pair.cpu_lock import CpuLock
from tests.support.patience import PATIENCE

# A worker with rounds of two milliseconds, each logged at its beginning and its end.
ROUNDS = """
import os, sys, time
from pathlib import Path
from localspec.engine.pair.cpu_lock import CpuLock

file, log, rounds, hurry = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "hurry"
turns, out = CpuLock(file, 30.0), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(rounds):
    with turns.hold(hurry):
        os.write(out, f"+{os.getpid()}\\n".encode())
        time.sleep(0.002 if rounds > 1 else 3600)
        os.write(out, f"-{os.getpid()}\\n".encode())
turns.leave_queue()
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker that takes `rounds` turns; a single turn never ends."""
    started = []

    def worker(rounds: int, hurry: str = "") -> subprocess.Popen[bytes]:
        names = [str(tmp_path / "turns"), str(tmp_path / "log"), str(rounds), hurry]
        started.append(subprocess.Popen([sys.executable, "-c", ROUNDS, *names]))
        return started[-1]

    yield worker
    for process in started:
        process.kill()
        process.wait()


def read_log(tmp_path: Path) -> list[str]:
    file = tmp_path / "log"
    return file.read_text().split() if file.exists() else []


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rounds_of_several_workers_never_overlap(start: Start, tmp_path: Path) -> None:
    workers = [start(40), start(40), start(40, "hurry")]
    assert [worker.wait(PATIENCE) for worker in workers] == [0, 0, 0]
    events = read_log(tmp_path)
    assert len(events) == 2 * 3 * 40
    for begins, ends in zip(events[::2], events[1::2], strict=True):
        assert (begins[0], ends[0], begins[1:]) == ("+", "-", ends[1:])


def test_killed_worker_releases_its_turn(start: Start, tmp_path: Path) -> None:
    start(1)
    wait_until(lambda: read_log(tmp_path))
    waiting = start(40)
    os.kill(int(read_log(tmp_path)[0][1:]), signal.SIGKILL)
    assert waiting.wait(PATIENCE) == 0


def test_waiting_for_a_turn_is_limited(start: Start, tmp_path: Path) -> None:
    start(1)
    wait_until(lambda: read_log(tmp_path))
    turns = CpuLock(tmp_path / "turns", 0.05)
    for hurry in (False, True, False):
        with turns.hold(hurry):
            pass
    turns.leave_queue()


def test_others_wait_longer_for_a_worker_in_a_hurry(start: Start, tmp_path: Path) -> None:
    """A round beside an editor's prompt would delay it by more than the round gains."""
    start(1, "hurry")
    wait_until(lambda: read_log(tmp_path))
    turns, patience = CpuLock(tmp_path / "turns", 0.05), 0.05
    began = time.monotonic()
    with turns.hold(False):
        assert time.monotonic() - began >= 4 * patience


def test_without_a_lock_file_there_are_no_turns(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for file in (None, tmp_path / "file" / "turns"):
        with CpuLock(file, 30.0).hold(True):
            pass
