"""Several pairs in memory: concurrent answers, eviction, deaths, queues, roles and idle times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localspec.config import Config
from localspec.daemon.worker.death import MappedFiles
from localspec.daemon.worker.eviction import MemorySnapshot
from localspec.daemon.worker.loaded import LoadedEngine
from localspec.daemon.worker.plan import LoadPlanner, engine_settings
from localspec.daemon.worker.queue import Job
from localspec.daemon.worker.table import PairTable
from localspec.errors import LoadFailed, QueueFull
from localspec.paths import Paths
from localspec.protocol.frames import Loaded, PairFiles, Tokenize
from localspec.registry.catalogue import Preset
from localspec.registry.header.fit import FreeMemory
from localspec.registry.registry import Registry, builtin_files
from tests.support.asynchronous import asynchronous, pair_table
from tests.support.daemons import Home, scripted_home, wait_for

MEMORY_FOR_TWO_MIB = 300  # MiB, which hold two scripted engines


def create_pairs(home: Home, *names: str) -> list[str]:
    """Create files for pairs and return their paths, which are names of pairs."""
    files = [home.root / f"{name}.gguf" for name in names]
    for file in files:
        file.touch()
    return [str(file) for file in files]


def list_loaded(home: Home) -> list[str]:
    """Return the names of the pairs in memory, the most recently used first."""
    return [pair["name"] for pair in home.status()["pairs"]]


def get_status(home: Home, pair: str) -> Any:
    return next((entry for entry in home.status()["pairs"] if entry["name"] == pair), None)


@pytest.fixture(scope="module")
def shared() -> Iterator[Home]:
    """Run one daemon, with room for all pairs, for the tests that leave nothing behind."""
    with scripted_home("--load-delay", "0.02") as home:
        yield home


@pytest.fixture
def unloaded_home(shared: Home) -> Iterator[Home]:
    wait_for(lambda: shared.request("POST", "/localspec/unload", {}).status == 200, "nothing")
    yield shared
    shared.request("POST", "/localspec/reset", {})


def test_two_pairs_answer_concurrently_without_reloads(unloaded_home: Home) -> None:
    home = unloaded_home
    one, two = create_pairs(home, "one", "two")
    before = home.status()["counts"]["worker_starts"]
    with home.streaming("slow 100", model=one) as stream:
        stream.readline()
        for turn in range(10):
            assert home.chat(f"say {turn}", model=two).text == str(turn)
        assert {pair["name"]: pair["running"] for pair in home.status()["pairs"]} == {
            one: 1,
            two: 0,
        }
        assert b'"99 "' in stream.read()
    assert home.status()["counts"]["worker_starts"] == before + 2
    assert list_loaded(home) == [one, two]
    first, second = (get_status(home, pair) for pair in (one, two))
    assert first["pid"] != second["pid"]
    assert before <= first["since"] <= second["since"] <= time.time()


def test_status_shows_the_figures_of_the_pair_that_it_names(unloaded_home: Home) -> None:
    """A pair that has answered next to nothing does not get the figures of another one."""
    home = unloaded_home
    fast, new = create_pairs(home, "fast", "new")
    before = home.status()["figures"]["measured_tokens"]
    home.chat("say" + " word" * 250, model=fast)
    assert "speed-up" in home.run("status").stdout
    home.chat("say x", model=new)
    status = home.status()
    assert status["pair"]["name"] == new
    assert status["pair"]["figures"]["measured_tokens"] == 1
    assert get_status(home, fast)["figures"]["measured_tokens"] == 250
    assert get_status(home, fast)["figures"]["speed_up"] == pytest.approx(1.8)
    assert status["figures"]["measured_tokens"] == before + 251
    for arguments in ([], ["-v"]):
        assert "1.80×" not in home.run("status", *arguments).stdout
    assert "of all pairs: " in home.run("status", "-v").stdout


def test_unload_takes_one_pair_by_name_or_all(unloaded_home: Home) -> None:
    home = unloaded_home
    one, two, three = create_pairs(home, "one", "two", "three")
    for pair in (one, two, three):
        assert home.chat("say x", model=pair).text == "x"
    unloaded = home.request("POST", "/localspec/unload", {"model": two})
    assert unloaded.json == {"unloaded": True, "pairs": [two]}
    assert home.request("POST", "/localspec/unload", {"model": two}).json["unloaded"] is False
    assert list_loaded(home) == [three, one]
    with home.streaming("forever", model=one) as stream:
        stream.readline()
        busy = home.request("POST", "/localspec/unload", {})
        assert (busy.status, busy.error["code"]) == (409, "conflict")
        assert f"The pair {one} is busy" in busy.error["message"]
        assert list_loaded(home) == [one]
        with home.streaming("forever", model=two) as second_stream:
            second_stream.readline()
            busy = home.request("POST", "/localspec/unload", {})
            assert f"These pairs are busy: {one}, {two};" in busy.error["message"]
    wait_for(lambda: home.status()["running"] == 0, "the end of the answer")
    assert home.request("POST", "/localspec/unload").json == {"unloaded": True, "pairs": [one, two]}


def test_loaded_pairs_are_listed_in_models_and_metrics(unloaded_home: Home) -> None:
    home = unloaded_home
    one, two = create_pairs(home, "one", "two")
    for pair in (one, two):
        home.chat("say x", model=pair)
    statuses = {
        item["id"]: item["status"] for item in home.request("GET", "/v1/models").json["data"]
    }
    assert [statuses[name]["value"] for name in (one, two, "builtin")] == [
        "loaded",
        "loaded",
        "unloaded",
    ]
    assert statuses[one]["since"] <= statuses[two]["since"]
    metrics = home.request("GET", "/metrics").body.decode()
    assert "localspec_pairs_loaded 2" in metrics
    assert f'localspec_pair_requests_running{{pair="{one}"}} 0' in metrics


@pytest.mark.parametrize("prompt", ["die SIGKILL", "deadly SIGSEGV"])
def test_a_worker_death_does_not_affect_other_pairs(prompt: str, unloaded_home: Home) -> None:
    home = unloaded_home
    one, two = create_pairs(home, "one", "two")
    with home.streaming("slow 20", model=one) as stream:
        stream.readline()
        pid = get_status(home, one)["pid"]
        assert home.chat(prompt, model=two).status >= 400
        assert home.chat("say back", model=two).text == "back"
        assert b'"19 "' in stream.read()
    assert get_status(home, one)["pid"] == pid


def test_killing_one_engine_at_random_does_not_affect_the_others(unloaded_home: Home) -> None:
    home = unloaded_home
    names = create_pairs(home, "one", "two", "three")
    rng = random.Random(7)
    expected = " ".join(map(str, range(20)))

    def follow(pair: str) -> list[str]:
        return [home.chat("slow 20", model=pair).text.strip() for _ in range(3)]

    for name in names:
        home.chat("say x", model=name)
    with ThreadPoolExecutor(2) as pool:
        followers = [pool.submit(follow, name) for name in names[:2]]
        while not all(follower.done() for follower in followers):
            home.request("POST", "/localspec/reset", {})
            connection = home.open("/v1/chat/completions", "slow 100", model=names[2])
            time.sleep(rng.uniform(0, 0.15))
            connection.close()
            if victim := (get_status(home, names[2]) or {}).get("pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        assert [follower.result() for follower in followers] == [[expected] * 3] * 2


def test_the_least_recently_used_of_three_pairs_is_evicted(home: Home) -> None:
    home.start(memory=MEMORY_FOR_TWO_MIB)
    names = create_pairs(home, "one", "two", "three")
    rng = random.Random(3)
    expected: list[str] = []  # the most recently used first
    starts = 0
    for turn in range(24):
        pair = rng.choice(names)
        starts += pair not in expected
        expected = [pair, *(name for name in expected if name != pair)][:2]
        kind = rng.randrange(3)
        if kind == 0:
            body = {"prompt": f"!say {turn}", "model": pair}
            assert home.request("POST", "/infill", body).json["content"] == str(turn)
        elif kind == 1:
            body = {"content": "a", "model": pair}
            assert home.request("POST", "/tokenize", body).json["tokens"] == [97]
        else:
            assert home.chat(f"say {turn}", model=pair).text == str(turn)
        assert list_loaded(home) == expected
    counts = home.status()["counts"]
    assert (counts["worker_starts"], counts["worker_deaths"]) == (starts, 0)


def test_no_request_is_lost_while_pairs_are_swapped(home: Home) -> None:
    home.start("--load-delay", "0.01", memory=MEMORY_FOR_TWO_MIB, queue=1000)
    names = create_pairs(home, "one", "two", "three", "four")
    max_loaded = 0

    def ask(number: int) -> str:
        rng = random.Random(number)
        pair = names[min(int(rng.expovariate(1.2)), 3)]
        if rng.random() < 0.1:  # a client that disconnects at a random moment
            connection = home.open("/v1/chat/completions", f"slow {number % 9}", model=pair)
            time.sleep(rng.uniform(0, 0.05))
            connection.close()
            return "left"
        answer = home.chat(f"say {number}", model=pair)
        return "right" if answer.status == 200 and answer.text == str(number) else str(answer.body)

    with ThreadPoolExecutor(12) as pool:
        outcomes = pool.map(ask, range(150))
        for _ in range(20):
            max_loaded = max(
                max_loaded, len([pair for pair in home.status()["pairs"] if pair["pid"]])
            )
        counts = Counter(outcomes)
    assert set(counts) == {"right", "left"}
    assert max_loaded <= 2
    wait_for(lambda: home.status()["running"] == 0, "the end of all")
    assert home.status()["counts"]["worker_deaths"] == 0


def test_a_new_pair_replaces_the_first_pair_that_is_idle(home: Home) -> None:
    home.start(memory=MEMORY_FOR_TWO_MIB)
    one, two, three = create_pairs(home, "one", "two", "three")
    with home.streaming("forever", model=one) as endless_stream, ThreadPoolExecutor(1) as pool:
        endless_stream.readline()
        with home.streaming("slow 30", model=two) as stream:
            stream.readline()
            future = pool.submit(home.chat, "say new", model=three)
            assert b'"29 "' in stream.read()
        assert future.result().text == "new"
        assert list_loaded(home) == [three, one]
        endless_stream.readline()


def test_a_waiting_client_that_leaves_blocks_nobody(home: Home) -> None:
    home.start(memory=MEMORY_FOR_TWO_MIB)
    one, two, three = create_pairs(home, "one", "two", "three")
    with home.streaming("forever", model=one) as first_stream:
        first_stream.readline()
        with home.streaming("forever", model=two) as second_stream:
            second_stream.readline()
            connection = home.open("/v1/chat/completions", "say new", model=three)
            wait_for(lambda: get_status(home, three), "the request for the third")
            assert get_status(home, three)["stage"] == "waiting"
            connection.close()
            wait_for(lambda: not get_status(home, three), "its end")
            assert home.chat("say a", model=one).text == "a"
            assert home.chat("say b", model=two).text == "b"
    assert home.status()["counts"]["worker_starts"] == 2


def test_config_changes_apply_to_loaded_pairs(home: Home) -> None:
    home.start()
    one, two = create_pairs(home, "one", "two")
    for pair in (one, two):
        home.chat("say x", model=pair)
    config = home.root / "config" / "config.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text("memory = 200\n")
    assert home.request("POST", "/localspec/config", {}).status == 200
    wait_for(lambda: list_loaded(home) == [two], "the first to leave")
    pid = get_status(home, two)["pid"]
    config.write_text("depth = 2\n")
    home.request("POST", "/localspec/config", {})
    assert home.chat("say y", model=two).text == "y"
    assert get_status(home, two)["pid"] != pid
    assert home.status()["counts"]["worker_deaths"] == 0


@asynchronous
async def test_a_smaller_budget_evicts_a_busy_pair_after_its_answer(tmp_path: Path) -> None:
    async with pair_table(tmp_path) as table:
        first, second = [
            (await table.get(name).ready(PairFiles(name, f"/{name}.gguf"))).worker
            for name in ("one", "two")
        ]
        with second.running(Tokenize(0, "a")):
            with first.running(Tokenize(0, "a")):
                table.configure(Config(memory=200))
                assert [pair.name for pair in table.loaded] == ["two", "one"]
            assert [pair.name for pair in table.loaded] == ["two"]
        assert [pair.name for pair in table.loaded] == ["two"]


def test_freed_memory_goes_to_the_remaining_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, paths = Config(), Paths(*[tmp_path] * 5)
    table = PairTable(config, paths, worker_command=())
    plenty = FreeMemory(1 << 36)
    plan = LoadPlanner(builtin_files(), engine_settings(config, paths), "cpu").plan(plenty)
    limits = list[tuple[str, int]]()

    class RecordingWorker:
        """A worker that only records how much memory it gets for caches."""

        busy, pid = False, 0

        def __init__(self, name: str) -> None:
            self.name = name

        async def limit_cache(self, limit: int) -> int:
            limits.append((self.name, limit))
            return limit

    def measure(_: object) -> MemorySnapshot:
        table.get("one").engine = None
        return MemorySnapshot(plenty)

    async def scenario() -> None:
        for name in ("one", "two"):
            worker: Any = RecordingWorker(name)
            engine = LoadedEngine(worker, plan.pair, config, MappedFiles(plan.pair), plan, 0.0)
            engine.set_cache_bytes(0)
            table.get(name).engine = engine
            table.get(name).info = Loaded(name, "fake", None, 1, 1, None, "", "")
        table.on_memory_freed()
        while not limits:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(MemorySnapshot, "measure", measure)
    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert limits == [("two", config.prefix_memory << 20)]


@asynchronous
async def test_the_queue_limit_counts_all_pairs(tmp_path: Path) -> None:
    table = PairTable(Config(parallel=1, queue=3), Paths(*[tmp_path] * 5))
    over = asyncio.Event()

    async def hold(name: str) -> None:
        async with table.get(name).admission.place(Job()):
            await over.wait()

    holders = [asyncio.create_task(hold(name)) for name in ("a", "a", "a", "b", "b")]
    await asyncio.sleep(0)
    assert (table.running(), table.waiting()) == (2, 3)
    assert table.get("a").admission.ahead(Job()).position == 2
    with pytest.raises(QueueFull):
        await hold("b")
    third = asyncio.create_task(hold("c"))  # runs at once, so the queue limit does not apply
    await asyncio.sleep(0)
    assert table.running() == 3
    over.set()
    await asyncio.gather(*holders, third)


def test_the_idle_time_is_counted_for_each_pair(home: Home) -> None:
    home.start(idle_unload=4)
    one, two = create_pairs(home, "one", "two")
    home.chat("say x", model=one)
    with home.streaming("forever", model=two) as stream:
        stream.readline()
        assert 0 < get_status(home, one)["unloads_in"] <= 4
        wait_for(lambda: list_loaded(home) == [two], "the first's idle time")
        assert get_status(home, two)["running"] == 1


def test_infill_requests_go_to_the_pair_with_that_role(home: Home) -> None:
    one, two = create_pairs(home, "one", "two")
    home.start(pair=one, pair_fim=two)
    assert home.chat("say x").json["model"] == one
    assert home.request("POST", "/infill", {"prompt": "!say y"}).json["content"] == "y"
    assert list_loaded(home) == [two, one]
    body = {"prompt": "a", "suffix": "b"}
    assert home.request("POST", "/v1/completions", body).json["model"] == two
    assert home.request("POST", "/v1/completions", {"prompt": "say z"}).json["model"] == one
    assert home.request("POST", "/infill", {"prompt": "!say y", "model": one}).status == 200
    assert list_loaded(home) == [one, two]


@asynchronous
async def test_a_pair_that_is_kept_is_never_evicted(tmp_path: Path) -> None:
    pinned = {"one"}
    async with pair_table(tmp_path, Config(memory=MEMORY_FOR_TWO_MIB)) as table:
        table.preset = lambda name: Preset(
            keep=name in pinned, idle_unload=0.05 if name == "three" else None
        )
        for name in ("one", "two", "three"):
            await table.get(name).ready(PairFiles(name, f"/{name}.gguf"))
        assert [pair.name for pair in table.loaded] == ["three", "one"]
        pinned.add("three")
        with pytest.raises(LoadFailed, match=r"kept loaded: one \(128 MiB\), three \(128 MiB\)"):
            await table.get("two").ready(PairFiles("two", "/two.gguf"))
        assert [pair.name for pair in table.loaded] == ["three", "one"]
        with table.get("three").in_use():
            pinned.clear()
        while table.info("three"):  # its own idle time
            await asyncio.sleep(0.01)
        assert table.info("one")


def test_models_toml_sets_how_long_a_pair_stays(tmp_path: Path) -> None:
    paths = Paths(*[tmp_path] * 5)
    registry = Registry(paths, lambda _: False, lambda: FreeMemory(0))
    assert registry.preset("coder-7b") == Preset()
    paths.user_catalogue.write_text(
        "[pairs.coder-7b]\nkeep = true\n[pairs.builtin]\nidle_unload = 5\n"
    )
    assert registry.preset("coder-7b") == Preset(keep=True)
    assert registry.preset("builtin") == Preset(idle_unload=5.0)
    paths.user_catalogue.write_text("[pairs.coder-7b]\nidle_unload = -1\n")
    registry.reload()
    assert "pairs.coder-7b.idle_unload" in registry.problem
    assert registry.preset("coder-7b") == Preset(keep=True)
