"""The states of one pair and of several: unloaded, loading, ready."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from localspec import ended
from localspec.config import Config
from localspec.daemon.worker.loaded import LoadingPair, Ready, Unloaded
from localspec.daemon.worker.residents import ResidentTable
from localspec.errors import LoadFailed, WorkerDied, WorkerOutOfMemory
from localspec.paths import Paths
from localspec.protocol.answers import Counts
from localspec.protocol.frames import PairFiles
from tests.support.daemons import FAKE_WORKER, ROOT

ONE, OTHER = PairFiles("one", "/one.gguf"), PairFiles("other", "/other.gguf")
Scenario = Callable[[ResidentTable], Coroutine[None, None, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a scenario with fake workers and checks how many it starts."""

    def run(scenario: Scenario, *options: str, starts: int) -> None:
        async def run_scenario() -> None:
            residents = ResidentTable(
                Config(),
                Paths(*[tmp_path] * 5),
                Counts(),
                worker_command=(sys.executable, str(FAKE_WORKER), *options),
            )
            try:
                await scenario(residents)
            finally:
                await residents.close()
            assert {type(resident.state) for resident in residents.all} == {Unloaded}
            assert residents.counts.worker_starts == starts

        asyncio.run(asyncio.wait_for(run_scenario(), 30))

    return run


def test_a_pair_is_unloaded_then_loading_then_ready(play: Callable[..., None]) -> None:
    async def scenario(residents: ResidentTable) -> None:
        loaded = residents.get("one")
        assert loaded.state == Unloaded()
        assert loaded.status().state == "unloaded"
        tasks = [asyncio.create_task(loaded.ready(ONE)) for _ in range(3)]
        await asyncio.sleep(0)
        assert isinstance(loaded.state, LoadingPair)
        assert (
            residents.is_loaded_or_loading("one"),
            residents.loaded_files("one"),
            loaded.busy,
        ) == (True, None, True)
        first, *others = await asyncio.gather(*tasks)
        assert [ready is first for ready in others] == [True, True]
        assert loaded.state is first
        assert (loaded.info, residents.loaded_files("one"), loaded.busy) == (first.info, ONE, False)
        assert residents.most_recent() is loaded
        await loaded.unload()
        assert loaded.state == Unloaded()

    play(scenario, starts=1)


def test_another_pair_is_loaded_beside_the_first(play: Callable[..., None]) -> None:
    async def scenario(residents: ResidentTable) -> None:
        task = asyncio.create_task(residents.get("one").ready(ONE))
        while not isinstance(residents.get("one").state, Ready):
            await asyncio.sleep(0)
        other = await residents.get("other").ready(OTHER)
        assert [pair.name for pair in residents.loaded] == ["other", "one"]
        assert other.engine.worker.pid != (await task).engine.worker.pid
        assert sorted(residents.pids) == sorted(status.pid or 0 for status in residents.statuses())
        assert await residents.unload({"one"}) == ["one"]
        assert [pair.name for pair in residents.loaded] == ["other"]

    play(scenario, starts=2)


def test_changed_files_of_a_name_replace_the_loaded_ones(play: Callable[..., None]) -> None:
    changed = PairFiles("one", "/another.gguf")

    async def scenario(residents: ResidentTable) -> None:
        first = await residents.get("one").ready(ONE)
        second = await residents.get("one").ready(changed)
        assert residents.get("one").state is second
        assert (second.engine.pair, first.engine.worker.alive) == (changed, False)

    play(scenario, starts=2)


def test_a_load_that_fails_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(residents: ResidentTable) -> None:
        with pytest.raises(LoadFailed, match=r"The file is no GGUF\."):
            await residents.get("one").ready(ONE)
        assert residents.get("one").state == Unloaded()

    play(scenario, "--load-error", starts=1)


# ------------------------------------------------------------------------ killed for memory


@pytest.mark.parametrize(
    ("memory_mib", "oom_recorded", "error"),
    [
        pytest.param(700, True, None, id="half the context fits"),
        pytest.param(400, True, WorkerOutOfMemory, id="not even half does"),
        pytest.param(700, False, WorkerDied, id="somebody else has killed it"),
    ],
)
def test_a_load_killed_for_memory_is_retried_with_half_the_context(
    play: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_mib: int,
    oom_recorded: bool,
    error: type[Exception] | None,
) -> None:
    """Every waiter gets the pair or the error, and a load of another pair is not affected."""
    counts = tmp_path / "counts"
    counts.write_text("oom_kill 3\n")
    counter_file = counts if oom_recorded else Path(shutil.copy(counts, tmp_path / "others"))
    monkeypatch.setattr(ended, "_OOM_COUNTERS", (counter_file,))
    tries = 2 if oom_recorded else 1
    builtin = PairFiles("builtin", str(ROOT / "localspec" / "builtin" / "target.gguf"))

    async def scenario(residents: ResidentTable) -> None:
        totals, loaded = residents.counts, residents.get("builtin")
        tasks = [asyncio.create_task(loaded.ready(builtin)) for _ in range(2)]
        await asyncio.sleep(0)
        bystander = asyncio.create_task(residents.get("other").ready(OTHER))
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        if error is None:
            assert isinstance(first, Ready)
            assert second is first
            assert first.engine.planned.settings.n_ctx == 512
            assert "512 tokens: with 1024, memory ran out" in first.engine.planned.notes[-1]
        else:
            assert type(first) is type(second) is error
            assert ("signal SIGKILL" in str(first)) == (not oom_recorded)
        assert totals.worker_deaths == tries - (error is None)
        other = await bystander
        assert (other.engine.pair, other.engine.planned.notes) == (OTHER, ())
        assert totals.worker_starts == tries + 1
        assert counts.read_text() == f"oom_kill {3 + tries - (error is None)}\n"

    play(scenario, "--most", str(memory_mib), "--killed", str(counts), starts=tries + 1)
