"""Threads of a pass spin for each other while their cores are free, and only briefly if not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine import environment
from localspec.engine.llama import waiting
from localspec.engine.llama.waiting import BUSY_CORES, IDLE_CORES, POLL_INTERVAL_S, SpinControl
from localspec.protocol.frames import PairFiles

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux builds llama.cpp with GNU OpenMP"
)
ROOT = Path(__file__).parents[2]
# A separate process, because the switch affects the whole process. It runs passes in threads of libgomp,
# while other processes use the cores and while they do not.
PASSES = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from localspec.engine import environment
environment.prepare()
from localspec.engine import llama
from localspec.engine.llama import waiting
llama.initialise()
from localspec.engine.llama import Batch, Context, ContextSettings, Model
model = Model(sys.argv[2], n_gpu_layers=0)
context = Context(model, ContextSettings(n_ctx=256, n_batch=64, n_seq=1, n_outputs=1, n_threads=2))
[ours] = waiting._ours
usage = [0.0]
ours._others = lambda: usage[0]
ours._clock = lambda: clock[0]
clock = [0.0]
ours._last_look = ours._last_others_s = 0.0
def threads():
    return len(os.listdir("/proc/self/task"))
states = []
for busy in (0.0, 9.0, 9.0, 0.0):
    clock[0] += 1.0
    usage[0] += busy
    context.clear()
    batch = Batch(64)
    for at in range(8):
        batch.add(7 + at, at, 0, logits=at == 7)
    context.decode(batch)
    end = time.monotonic() + 300
    while states and not ours.short and threads() != states[0][1] and time.monotonic() < end:
        time.sleep(0.01)  # ended threads disappear a little later
    states.append([ours.short, threads(), context.logits(7)[:50].tolist()])
print(json.dumps(states))
"""


class Machine:
    """A simulated machine with `cores` cores, of which other processes use `usage`."""

    def __init__(self, cores: int, threads: int) -> None:
        self.now = self.spent = 0.0
        self.waiting = SpinControl(cores, lambda: self.spent, lambda: self.now)
        self.waiting.expect(threads)

    def passes(self, seconds: float, usage: float) -> bool:
        self.now += seconds
        self.spent += seconds * usage
        self.waiting.look()
        return self.waiting.short


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the existing teams of threads."""
    sizes: list[int] = []

    class Team:
        def __init__(self, threads: int) -> None:
            sizes.append(threads)
            self._threads = threads

        def end(self) -> None:
            sizes.remove(self._threads)

    monkeypatch.setattr(waiting, "_Team", Team)
    return sizes


def test_idle_cores_do_not_shorten_the_wait(teams: list[int]) -> None:
    machine = Machine(cores=16, threads=8)
    assert not machine.passes(1.0, usage=8.2)
    assert machine.passes(1.0, usage=9.0)
    assert teams == [17]
    # Between the thresholds nothing changes.
    assert machine.passes(1.0, usage=8.0 + (BUSY_CORES + IDLE_CORES) / 2)
    assert not machine.passes(1.0, usage=4.0)
    assert teams == []


@given(
    looks=st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.0, 2.0)), min_size=1, max_size=40)
)
def test_wait_follows_the_usage_since_the_last_poll(looks: list[tuple[float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_Team", lambda threads: type("Team", (), {"end": lambda _: None})())
        machine, short = Machine(cores=2, threads=2), False
        last_poll = spent_at_poll = 0.0
        for seconds, usage in looks:
            now_short = machine.passes(seconds, usage)
            if machine.now - last_poll >= POLL_INTERVAL_S:
                share = (machine.spent - spent_at_poll) / (machine.now - last_poll)
                last_poll, spent_at_poll = machine.now, machine.spent
                short = share > BUSY_CORES or (short and share >= IDLE_CORES)
            assert now_short == short


def test_foreign_cpu_time_is_measured() -> None:
    """The time of another process counts as foreign, and that of this process does not."""
    foreign_before, own = waiting.read_foreign_cpu_s(), os.times()
    subprocess.run([sys.executable, "-c", "for _ in range(8_000_000): pass"], check=True)
    foreign_after, child = waiting.read_foreign_cpu_s(), os.times()
    spent = child.children_user - own.children_user
    assert spent > 0.05
    assert foreign_after - foreign_before >= spent - 0.05


def test_passes_are_the_same_and_idle_threads_come_and_go(cycle_files: PairFiles) -> None:
    command = [sys.executable, "-c", PASSES, str(ROOT), cycle_files.target]
    quiet = {k: v for k, v in os.environ.items() if k not in environment.OPENMP_ENVIRONMENT}
    run = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    states = json.loads(run.stdout)
    assert [short for short, _, _ in states] == [False, True, True, False]
    alone, with_team = states[0][1], states[1][1]
    assert with_team > alone + len(os.sched_getaffinity(0))
    assert states[3][1] == alone
    assert all(logits == states[0][2] for _, _, logits in states)


@pytest.mark.parametrize("name", ["", *environment.OPENMP_ENVIRONMENT])
def test_explicit_openmp_settings_are_respected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_ours", [])
    monkeypatch.setattr(waiting, "_library", lambda: "libgomp.so.1")
    variables = {k: v for k, v in os.environ.items() if k not in environment.OPENMP_ENVIRONMENT}
    monkeypatch.setattr(os, "environ", variables | ({name: "1"} if name else {}))
    environment.prepare()
    waiting.start_control()
    assert bool(waiting._ours) is not bool(name)
