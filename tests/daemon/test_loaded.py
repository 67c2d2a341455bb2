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
from localspec.daemon.worker.loaded import LoadedEngine
from localspec.daemon.worker.table import PairTable
from localspec.errors import LoadFailed, WorkerDied, WorkerOutOfMemory
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles
from tests.support.daemons import FAKE_WORKER, ROOT

ONE, OTHER = PairFiles("one", "/one.gguf"), PairFiles("other", "/other.gguf")
Scenario = Callable[[PairTable], Coroutine[None, None, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a scenario with fake workers and checks how many it starts."""

    def run(scenario: Scenario, *options: str, starts: int) -> None:
        async def run_scenario() -> None:
            command = (sys.executable, str(FAKE_WORKER), *options)
            table = PairTable(Config(), Paths(*[tmp_path] * 5), worker_command=command)
            try:
                await scenario(table)
            finally:
                await table.close()
            assert {pair.status().state for pair in table.all} == {"unloaded"}
            assert table.counts.worker_starts == starts

        asyncio.run(asyncio.wait_for(run_scenario(), 30))

    return run


def test_a_pair_is_unloaded_then_loading_then_ready(play: Callable[..., None]) -> None:
    async def scenario(table: PairTable) -> None:
        loaded = table.get("one")
        assert loaded.status().state == "unloaded"
        tasks = [asyncio.create_task(loaded.ready(ONE)) for _ in range(3)]
        await asyncio.sleep(0)
        assert loaded.status().state == "loading"
        assert (table.is_loaded_or_loading("one"), table.loaded_files("one"), loaded.busy) == (
            True,
            None,
            True,
        )
        first, *others = await asyncio.gather(*tasks)
        assert [ready is first for ready in others] == [True, True]
        assert loaded.engine is first
        assert loaded.status().state == "ready"
        assert (table.loaded_files("one"), loaded.busy) == (ONE, False)
        assert table.most_recent() is loaded
        await loaded.unload()
        assert loaded.status().state == "unloaded"

    play(scenario, starts=1)


def test_another_pair_is_loaded_beside_the_first(play: Callable[..., None]) -> None:
    async def scenario(table: PairTable) -> None:
        task = asyncio.create_task(table.get("one").ready(ONE))
        while not table.info("one"):
            await asyncio.sleep(0)
        other = await table.get("other").ready(OTHER)
        assert [pair.name for pair in table.loaded] == ["other", "one"]
        assert other.worker.pid != (await task).worker.pid
        assert sorted(table.pids) == sorted(status.pid or 0 for status in table.statuses())
        assert await table.unload({"one"}) == ["one"]
        assert [pair.name for pair in table.loaded] == ["other"]

    play(scenario, starts=2)


def test_changed_files_of_a_name_replace_the_loaded_ones(play: Callable[..., None]) -> None:
    changed = PairFiles("one", "/another.gguf")

    async def scenario(table: PairTable) -> None:
        first = await table.get("one").ready(ONE)
        second = await table.get("one").ready(changed)
        assert table.get("one").engine is second
        assert (second.pair, first.worker.alive) == (changed, False)

    play(scenario, starts=2)


def test_a_load_that_fails_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(table: PairTable) -> None:
        with pytest.raises(LoadFailed, match=r"The file is no GGUF\."):
            await table.get("one").ready(ONE)
        assert table.get("one").status().state == "unloaded"

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

    async def scenario(table: PairTable) -> None:
        totals, loaded = table.counts, table.get("builtin")
        tasks = [asyncio.create_task(loaded.ready(builtin)) for _ in range(2)]
        await asyncio.sleep(0)
        bystander = asyncio.create_task(table.get("other").ready(OTHER))
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        if error is None:
            assert isinstance(first, LoadedEngine)
            assert second is first
            assert first.planned.settings.n_ctx == 512
            assert "512 tokens: with 1024, memory ran out" in first.planned.notes[-1]
        else:
            assert type(first) is type(second) is error
            assert ("signal SIGKILL" in str(first)) == (not oom_recorded)
        assert totals.worker_deaths == tries - (error is None)
        other = await bystander
        assert (other.pair, other.planned.notes) == (OTHER, ())
        assert totals.worker_starts == tries + 1
        assert counts.read_text() == f"oom_kill {3 + tries - (error is None)}\n"

    play(scenario, "--most", str(memory_mib), "--killed", str(counts), starts=tries + 1)
