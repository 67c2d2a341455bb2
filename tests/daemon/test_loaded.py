"""The states of one pair and of several: unloaded, loading, ready."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from localspec import ended
from localspec.daemon.worker.loaded import LoadedEngine
from localspec.errors import LoadFailed, WorkerDied, WorkerOutOfMemory
from localspec.protocol.frames import PairFiles
from tests.support.asynchronous import asynchronous, pair_table
from tests.support.daemons import ROOT

ONE, OTHER = PairFiles("one", "/one.gguf"), PairFiles("other", "/other.gguf")


@asynchronous
async def test_a_pair_is_unloaded_then_loading_then_ready(tmp_path: Path) -> None:
    async with pair_table(tmp_path) as table:
        loaded = table.get("one")
        assert loaded.status().state == "unloaded"
        tasks = [asyncio.create_task(loaded.ready(ONE)) for _ in range(3)]
        await asyncio.sleep(0)
        assert loaded.status().state == "loading"
        assert (table.is_loaded_or_loading("one"), loaded.busy) == (True, True)
        assert table.loaded_files("one") is None
        first, *others = await asyncio.gather(*tasks)
        assert [ready is first for ready in others] == [True, True]
        assert loaded.engine is first
        assert loaded.status().state == "ready"
        assert (table.loaded_files("one"), loaded.busy) == (ONE, False)
        assert table.most_recent() is loaded
        await loaded.unload()
        assert loaded.status().state == "unloaded"
        assert table.counts.worker_starts == 1


@asynchronous
async def test_another_pair_is_loaded_beside_the_first(tmp_path: Path) -> None:
    async with pair_table(tmp_path) as table:
        task = asyncio.create_task(table.get("one").ready(ONE))
        while not table.info("one"):
            await asyncio.sleep(0)
        other = await table.get("other").ready(OTHER)
        assert [pair.name for pair in table.loaded] == ["other", "one"]
        assert other.worker.pid != (await task).worker.pid
        assert sorted(table.pids) == sorted(status.pid or 0 for status in table.statuses())
        assert await table.unload({"one"}) == ["one"]
        assert [pair.name for pair in table.loaded] == ["other"]
        assert table.counts.worker_starts == 2


@asynchronous
async def test_changed_files_of_a_name_replace_the_loaded_ones(tmp_path: Path) -> None:
    changed = PairFiles("one", "/another.gguf")
    async with pair_table(tmp_path) as table:
        first = await table.get("one").ready(ONE)
        second = await table.get("one").ready(changed)
        assert table.get("one").engine is second
        assert (second.pair, first.worker.alive) == (changed, False)
        assert table.counts.worker_starts == 2


@asynchronous
async def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async with pair_table(tmp_path, None, "--load-error") as table:
        with pytest.raises(LoadFailed, match=r"The file is no GGUF\."):
            await table.get("one").ready(ONE)
        assert table.get("one").status().state == "unloaded"
        assert table.counts.worker_starts == 1


@pytest.mark.parametrize(
    ("memory_mib", "oom_recorded", "error"),
    [
        pytest.param(700, True, None, id="half the context fits"),
        pytest.param(400, True, WorkerOutOfMemory, id="not even half does"),
        pytest.param(700, False, WorkerDied, id="somebody else has killed it"),
    ],
)
@asynchronous
async def test_a_load_killed_for_memory_is_retried_with_half_the_context(
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

    options = ("--most", str(memory_mib), "--killed", str(counts))
    async with pair_table(tmp_path, None, *options) as table:
        totals, loaded = table.counts, table.get("builtin")
        tasks = [asyncio.create_task(loaded.ready(builtin)) for _ in range(2)]
        await asyncio.sleep(0)
        bystander = asyncio.create_task(table.get("other").ready(OTHER))
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        if error is None:
            assert isinstance(first, LoadedEngine)
            assert second is first
            assert first.planned.settings.n_ctx == 512
            note = loaded.status().note or ""
            assert "512 tokens: with 1024, memory ran out while the pair was loaded" in note
            assert "config set context" in note
        else:
            assert type(first) is type(second) is error
            assert ("signal SIGKILL" in str(first)) == (not oom_recorded)
        assert totals.worker_deaths == tries - (error is None)
        other = await bystander
        assert (other.pair, other.planned.notes) == (OTHER, ())
        assert totals.worker_starts == tries + 1
        assert counts.read_text() == f"oom_kill {3 + tries - (error is None)}\n"
