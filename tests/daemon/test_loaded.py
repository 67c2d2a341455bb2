"""The states of the one pair in memory."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from localspec import ended
from localspec.config import Config
from localspec.daemon.worker.admission import Admission
from localspec.daemon.worker.loaded import LoadedPair, Loading, Ready, Unloaded
from localspec.errors import LoadFailed, WorkerDied, WorkerOutOfMemory
from localspec.paths import Paths
from localspec.protocol.answers import Counts
from localspec.protocol.frames import PairFiles
from tests.support.daemons import FAKE_WORKER, ROOT

ONE, OTHER = PairFiles("one", "/one.gguf"), PairFiles("other", "/other.gguf")
Scenario = Callable[[LoadedPair], Coroutine[None, None, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run a scenario with a pair that fake workers hold; its loads that are over are counted."""

    def run(scenario: Scenario, *options: str, loads: int) -> None:
        async def played() -> None:
            ended = 0

            def over() -> None:
                nonlocal ended
                ended += 1

            loaded = LoadedPair(
                Config(),
                Paths(*[tmp_path] * 5),
                Admission(4, 64),
                Counts(),
                worker_command=(sys.executable, str(FAKE_WORKER), *options),
                load_is_over=over,
            )
            try:
                await scenario(loaded)
            finally:
                await loaded.close()
            assert loaded.state == Unloaded()
            assert ended == loads

        asyncio.run(asyncio.wait_for(played(), 30))

    return run


def test_a_pair_is_unloaded_then_loading_then_ready(play: Callable[..., None]) -> None:
    async def scenario(loaded: LoadedPair) -> None:
        assert loaded.state == Unloaded()
        assert loaded.status("configured").state == "unloaded"
        asked = [asyncio.create_task(loaded.ready(ONE)) for _ in range(3)]
        await asyncio.sleep(0)
        assert isinstance(loaded.state, Loading)
        assert (loaded.uses("one"), loaded.holds("one"), loaded.busy) == (True, None, True)
        first, *others = await asyncio.gather(*asked)
        assert [each is first for each in others] == [True, True]
        assert loaded.state is first
        assert (loaded.info, loaded.holds("one"), loaded.busy) == (first.info, ONE, False)
        assert loaded.status("configured").name == "one"
        await loaded.unload()
        assert loaded.state == Unloaded()

    play(scenario, loads=1)


def test_another_pair_may_be_asked_for_in_the_moment_that_one_is_ready(
    play: Callable[..., None],
) -> None:
    async def scenario(loaded: LoadedPair) -> None:
        asked = asyncio.create_task(loaded.ready(ONE))
        while not isinstance(loaded.state, Ready):
            await asyncio.sleep(0)
        first = loaded.state.engine.worker
        ready = await loaded.ready(OTHER)
        assert loaded.state is ready
        assert (ready.engine.pair, loaded.worker is not first) == (OTHER, True)
        asked.cancel()

    play(scenario, loads=2)


def test_a_load_that_fails_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(loaded: LoadedPair) -> None:
        with pytest.raises(LoadFailed, match=r"The file is no GGUF\."):
            await loaded.ready(ONE)
        assert loaded.state == Unloaded()
        assert loaded.status("one").state == "unloaded"

    play(scenario, "--load-error", loads=1)


# ------------------------------------------------------------------------ killed for memory


@pytest.mark.parametrize(
    ("most", "counted", "ends"),
    [
        pytest.param(700, True, None, id="half the context fits"),
        pytest.param(400, True, WorkerOutOfMemory, id="not even half does"),
        pytest.param(700, False, WorkerDied, id="somebody else has killed it"),
    ],
)
def test_a_load_that_the_kernel_kills_for_memory_is_tried_once_more_with_half_the_context(
    play: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    counted: bool,
    ends: type[Exception] | None,
) -> None:
    """Whoever waits for it is answered or told why not, and who waits for another pair gets that."""
    counts = tmp_path / "counts"
    counts.write_text("oom_kill 3\n")
    read = counts if counted else Path(shutil.copy(counts, tmp_path / "others"))
    monkeypatch.setattr(ended, "_OOM_COUNTS", (read,))
    tries = 2 if counted else 1
    killed = PairFiles("builtin", str(ROOT / "localspec" / "builtin" / "target.gguf"))

    async def scenario(loaded: LoadedPair) -> None:
        asked = [asyncio.create_task(loaded.ready(killed)) for _ in range(2)]
        await asyncio.sleep(0)
        beside = asyncio.create_task(loaded.ready(OTHER))
        first, second = await asyncio.gather(*asked, return_exceptions=True)
        if ends is None:
            assert isinstance(first, Ready)
            assert second is first
            assert first.engine.planned.settings.n_ctx == 512
            assert "512 tokens: with 1024, memory ran out" in first.engine.planned.notes[-1]
        else:
            assert type(first) is type(second) is ends
            assert ("signal SIGKILL" in str(first)) == (not counted)
        assert loaded._counts.worker_starts == loaded._counts.worker_deaths + (ends is None)
        other = await beside
        assert (other.engine.pair, other.engine.planned.notes) == (OTHER, ())
        assert loaded._counts.worker_starts == tries + 1
        assert counts.read_text() == f"oom_kill {3 + tries - (ends is None)}\n"

    play(scenario, "--most", str(most), "--killed", str(counts), loads=tries + 1)
