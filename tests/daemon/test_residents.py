"""Several pairs in memory: beside each other, one after the other, and each with deaths of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localspec.config import Config
from localspec.daemon.pairs.names import builtin_files
from localspec.daemon.pairs.registry import Registry
from localspec.daemon.worker import eviction
from localspec.daemon.worker.death import MappedFiles
from localspec.daemon.worker.eviction import MemorySnapshot
from localspec.daemon.worker.loaded import LoadedEngine, Ready, Unloaded
from localspec.daemon.worker.queue import Job
from localspec.daemon.worker.residents import ResidentTable, RetentionPolicy
from localspec.errors import LoadFailed, QueueFull
from localspec.paths import Paths
from localspec.protocol.answers import Counts
from localspec.protocol.frames import Loaded, PairFiles, Tokenize
from localspec.registry.header.fit import FreeMemory
from tests.support.daemons import FAKE_WORKER, Home, RunningDaemon, scripted_home, wait_for

Start = Callable[..., RunningDaemon]
TWO = 300  # MiB, which hold two scripted engines


def pairs(home: Home, *names: str) -> list[str]:
    """Names that mean files which are there."""
    files = [home.root / f"{name}.gguf" for name in names]
    for file in files:
        file.touch()
    return [str(file) for file in files]


def loaded(home: Home) -> list[str]:
    """What is in memory, the one that was asked last ahead."""
    return [each["name"] for each in home.status()["pairs"]]


def of(home: Home, pair: str) -> Any:
    return next((each for each in home.status()["pairs"] if each["name"] == pair), None)


@pytest.fixture(scope="module")
def shared() -> Iterator[Home]:
    """One daemon for the tests that leave nothing behind; it has room for all."""
    with scripted_home("--load-delay", "0.02") as home:
        yield home


@pytest.fixture
def home_of_all(shared: Home) -> Iterator[Home]:
    wait_for(lambda: shared.request("POST", "/localspec/unload", {}).status == 200, "nothing")
    yield shared
    shared.request("POST", "/localspec/reset", {})


def test_two_pairs_answer_at_once_and_nothing_is_loaded_in_between(home_of_all: Home) -> None:
    home = home_of_all
    one, two = pairs(home, "one", "two")
    before = home.status()["counts"]["worker_starts"]
    with home.streaming("slow 40", model=one) as stream:
        stream.readline()
        for turn in range(10):
            assert home.chat(f"say {turn}", model=two).text == str(turn)
        assert {each["name"]: each["running"] for each in home.status()["pairs"]} == {
            one: 1,
            two: 0,
        }
        assert b'"39 "' in stream.read()
    assert home.status()["counts"]["worker_starts"] == before + 2
    assert loaded(home) == [one, two]
    first, second = (of(home, each) for each in (one, two))
    assert first["pid"] != second["pid"]
    assert before <= first["since"] <= second["since"] <= time.time()


def test_a_pair_is_unloaded_by_its_name_and_all_without_one(home_of_all: Home) -> None:
    home = home_of_all
    one, two, three = pairs(home, "one", "two", "three")
    for each in (one, two, three):
        assert home.chat("say x", model=each).text == "x"
    asked = home.request("POST", "/localspec/unload", {"model": two})
    assert asked.json == {"unloaded": True, "pairs": [two]}
    assert home.request("POST", "/localspec/unload", {"model": two}).json["unloaded"] is False
    assert loaded(home) == [three, one]
    with home.streaming("forever", model=one) as stream:
        stream.readline()
        busy = home.request("POST", "/localspec/unload", {})
        assert (busy.status, busy.error["code"]) == (409, "conflict")
        assert f"The pair {one} is busy" in busy.error["message"]
        assert loaded(home) == [one]
        with home.streaming("forever", model=two) as other:
            other.readline()
            busy = home.request("POST", "/localspec/unload", {})
            assert f"These pairs are busy: {one}, {two};" in busy.error["message"]
    wait_for(lambda: home.status()["running"] == 0, "the end of the answer")
    assert home.request("POST", "/localspec/unload").json == {"unloaded": True, "pairs": [one, two]}


def test_what_is_in_memory_is_told_everywhere(home_of_all: Home) -> None:
    home = home_of_all
    one, two = pairs(home, "one", "two")
    for each in (one, two):
        home.chat("say x", model=each)
    told = {each["id"]: each["status"] for each in home.request("GET", "/v1/models").json["data"]}
    assert [told[each]["value"] for each in (one, two, "builtin")] == [
        "loaded",
        "loaded",
        "unloaded",
    ]
    assert told[one]["since"] <= told[two]["since"]
    metrics = home.request("GET", "/metrics").body.decode()
    assert "localspec_pairs_loaded 2" in metrics
    assert f'localspec_pair_requests_running{{pair="{one}"}} 0' in metrics


@pytest.mark.parametrize("prompt", ["die SIGKILL", "deadly SIGSEGV"])
def test_a_death_is_nothing_to_other_pairs(prompt: str, home_of_all: Home) -> None:
    home = home_of_all
    one, two = pairs(home, "one", "two")
    with home.streaming("slow 20", model=one) as stream:
        stream.readline()
        pid = of(home, one)["pid"]
        assert home.chat(prompt, model=two).status >= 400
        assert home.chat("say back", model=two).text == "back"
        assert b'"19 "' in stream.read()
    assert of(home, one)["pid"] == pid


def test_engines_that_are_killed_at_any_moment_leave_the_others_answers_as_they_are(
    home_of_all: Home,
) -> None:
    home = home_of_all
    names = pairs(home, "one", "two", "three")
    chosen = random.Random(7)
    whole = " ".join(map(str, range(20)))

    def follow(pair: str) -> list[str]:
        return [home.chat("slow 20", model=pair).text.strip() for _ in range(3)]

    for each in names:
        home.chat("say x", model=each)
    with ThreadPoolExecutor(2) as pool:
        undisturbed = [pool.submit(follow, each) for each in names[:2]]
        while not all(each.done() for each in undisturbed):
            home.request("POST", "/localspec/reset", {})
            asked = home.open("/v1/chat/completions", "slow 100", model=names[2])
            time.sleep(chosen.uniform(0, 0.15))
            asked.close()
            if victim := (of(home, names[2]) or {}).get("pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        assert [each.result() for each in undisturbed] == [[whole] * 3] * 2


# ------------------------------------------------------------------------ where memory is short


def test_of_three_pairs_with_room_for_two_the_one_asked_least_recently_leaves(
    home: Home, start_daemon: Start
) -> None:
    start_daemon(memory=TWO)
    names = pairs(home, "one", "two", "three")
    chosen = random.Random(3)
    expected: list[str] = []  # the one that was asked last ahead
    starts = 0
    for turn in range(24):
        pair = chosen.choice(names)
        starts += pair not in expected
        expected = [pair, *(each for each in expected if each != pair)][:2]
        kind = chosen.randrange(3)
        if kind == 0:
            body = {"prompt": f"!say {turn}", "model": pair}
            assert home.request("POST", "/infill", body).json["content"] == str(turn)
        elif kind == 1:
            body = {"content": "a", "model": pair}
            assert home.request("POST", "/tokenize", body).json["tokens"] == [97]
        else:
            assert home.chat(f"say {turn}", model=pair).text == str(turn)
        assert loaded(home) == expected
    counts = home.status()["counts"]
    assert (counts["worker_starts"], counts["worker_deaths"]) == (starts, 0)


def test_no_request_is_lost_where_pairs_come_and_go(home: Home, start_daemon: Start) -> None:
    start_daemon("--load-delay", "0.01", memory=TWO, queue=1000)
    names = pairs(home, "one", "two", "three", "four")
    most = 0

    def ask(number: int) -> str:
        chosen = random.Random(number)
        pair = names[min(int(chosen.expovariate(1.2)), 3)]
        if chosen.random() < 0.1:  # who leaves, at whatever moment
            connection = home.open("/v1/chat/completions", f"slow {number % 9}", model=pair)
            time.sleep(chosen.uniform(0, 0.05))
            connection.close()
            return "left"
        answer = home.chat(f"say {number}", model=pair)
        return "right" if answer.status == 200 and answer.text == str(number) else str(answer.body)

    with ThreadPoolExecutor(12) as pool:
        asked = pool.map(ask, range(150))
        for _ in range(20):
            most = max(most, len([each for each in home.status()["pairs"] if each["pid"]]))
        told = Counter(asked)
    assert set(told) == {"right", "left"}
    assert most <= 2
    wait_for(lambda: home.status()["running"] == 0, "the end of all")
    assert home.status()["counts"]["worker_deaths"] == 0


def test_a_newcomer_takes_the_place_of_whoever_is_quiet_first(
    home: Home, start_daemon: Start
) -> None:
    start_daemon(memory=TWO)
    one, two, three = pairs(home, "one", "two", "three")
    with home.streaming("forever", model=one) as endless, ThreadPoolExecutor(1) as pool:
        endless.readline()
        with home.streaming("slow 30", model=two) as stream:
            stream.readline()
            new = pool.submit(home.chat, "say new", model=three)
            assert b'"29 "' in stream.read()
        assert new.result().text == "new"
        assert loaded(home) == [three, one]
        endless.readline()


def test_those_who_wait_for_room_and_leave_hold_nobody_up(home: Home, start_daemon: Start) -> None:
    start_daemon(memory=TWO)
    one, two, three = pairs(home, "one", "two", "three")
    with home.streaming("forever", model=one) as first:
        first.readline()
        with home.streaming("forever", model=two) as second:
            second.readline()
            new = home.open("/v1/chat/completions", "say new", model=three)
            wait_for(lambda: of(home, three), "the request for the third")
            assert of(home, three)["stage"] == "waiting"
            new.close()
            wait_for(lambda: not of(home, three), "its end")
            assert home.chat("say a", model=one).text == "a"
            assert home.chat("say b", model=two).text == "b"
    assert home.status()["counts"]["worker_starts"] == 2


def test_a_smaller_budget_and_another_setting_count_at_once(
    home: Home, start_daemon: Start
) -> None:
    start_daemon()
    one, two = pairs(home, "one", "two")
    for each in (one, two):
        home.chat("say x", model=each)
    config = home.root / "config" / "config.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text("memory = 200\n")
    assert home.request("POST", "/localspec/config", {}).status == 200
    wait_for(lambda: loaded(home) == [two], "the first to leave")
    pid = of(home, two)["pid"]
    config.write_text("depth = 2\n")
    home.request("POST", "/localspec/config", {})
    assert home.chat("say y", model=two).text == "y"
    assert of(home, two)["pid"] != pid
    assert home.status()["counts"]["worker_deaths"] == 0


def test_a_smaller_budget_counts_for_those_that_answer_once_they_are_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        residents = ResidentTable(
            Config(),
            Paths(*[tmp_path] * 5),
            Counts(),
            worker_command=(sys.executable, str(FAKE_WORKER)),
        )
        try:
            first, second = [
                (await residents.get(name).ready(PairFiles(name, f"/{name}.gguf"))).engine.worker
                for name in ("one", "two")
            ]
            with second.running(Tokenize(0, "a")):
                with first.running(Tokenize(0, "a")):
                    residents.configure(Config(memory=200))
                    assert [each.name for each in residents.loaded] == ["two", "one"]
                assert [each.name for each in residents.loaded] == ["two"]
            assert [each.name for each in residents.loaded] == ["two"]
        finally:
            await residents.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_room_is_given_back_to_the_others_though_a_pair_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, paths = Config(), Paths(*[tmp_path] * 5)
    residents = ResidentTable(config, paths, Counts(), worker_command=())
    plenty = FreeMemory(1 << 36)
    planned = eviction.plan_load(
        builtin_files(), eviction.engine_settings(config, paths), plenty, "cpu"
    )
    told = list[tuple[str, int]]()

    class Told:
        """A worker that is only told how much room it has."""

        busy, pid = False, 0

        def __init__(self, name: str) -> None:
            self.name = name

        async def limit_cache(self, most: int) -> int:
            told.append((self.name, most))
            return most

    def looked(_: object) -> MemorySnapshot:
        residents.get("one").state = Unloaded()
        return MemorySnapshot(plenty)

    async def scenario() -> None:
        for name in ("one", "two"):
            worker: Any = Told(name)
            engine = LoadedEngine(
                worker, planned.pair, config, MappedFiles(planned.pair), planned, 0.0
            )
            info = Loaded(name, "fake", None, 1, 1, None, "", "")
            residents.get(name).state = Ready(engine.with_cache_bytes(0), info)
        residents.on_memory_freed()
        while not told:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(MemorySnapshot, "measure", looked)
    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert told == [("two", config.prefix_memory << 20)]


# ------------------------------------------------------------------------ one queue for all


def test_those_who_wait_for_any_pair_count_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        residents = ResidentTable(
            Config(parallel=1, queue=3),
            Paths(*[tmp_path] * 5),
            Counts(),
            worker_command=(sys.executable, str(FAKE_WORKER)),
        )
        over = asyncio.Event()

        async def hold(name: str) -> None:
            async with residents.get(name).admission.place(Job()):
                await over.wait()

        held = [asyncio.create_task(hold(name)) for name in ("a", "a", "a", "b", "b")]
        await asyncio.sleep(0)
        assert (residents.running(), residents.waiting()) == (2, 3)
        assert residents.get("a").admission.ahead(Job()).position == 2
        with pytest.raises(QueueFull):
            await hold("b")
        third = asyncio.create_task(hold("c"))  # one that has a place needs none in a queue
        await asyncio.sleep(0)
        assert residents.running() == 3
        over.set()
        await asyncio.gather(*held, third)

    asyncio.run(scenario())


def test_an_idle_time_is_each_pairs_own(home: Home, start_daemon: Start) -> None:
    start_daemon(idle_unload=0.4)
    one, two = pairs(home, "one", "two")
    home.chat("say x", model=one)
    with home.streaming("forever", model=two) as stream:
        stream.readline()
        assert 0 < of(home, one)["unloads_in"] <= 0.4
        wait_for(lambda: loaded(home) == [two], "the first's idle time")
        assert of(home, two)["running"] == 1


# ------------------------------------------------------------------------ roles, and who stays


def test_an_editors_request_goes_to_the_pair_that_has_the_role(
    home: Home, start_daemon: Start
) -> None:
    one, two = pairs(home, "one", "two")
    start_daemon(pair=one, pair_fim=two)
    assert home.chat("say x").json["model"] == one
    assert home.request("POST", "/infill", {"prompt": "!say y"}).json["content"] == "y"
    assert loaded(home) == [two, one]
    body = {"prompt": "a", "suffix": "b"}
    assert home.request("POST", "/v1/completions", body).json["model"] == two
    assert home.request("POST", "/v1/completions", {"prompt": "say z"}).json["model"] == one
    assert home.request("POST", "/infill", {"prompt": "!say y", "model": one}).status == 200
    assert loaded(home) == [one, two]


def test_a_pair_that_is_kept_leaves_for_nobody(tmp_path: Path) -> None:
    kept = {"one"}

    async def scenario() -> None:
        residents = ResidentTable(
            Config(memory=TWO),
            Paths(*[tmp_path] * 5),
            Counts(),
            worker_command=(sys.executable, str(FAKE_WORKER)),
        )
        residents.retention_policy = lambda name: RetentionPolicy(
            name in kept, 0.05 if name == "three" else None
        )
        try:
            for name in ("one", "two", "three"):
                await residents.get(name).ready(PairFiles(name, f"/{name}.gguf"))
            assert [each.name for each in residents.loaded] == ["three", "one"]
            kept.add("three")
            with pytest.raises(
                LoadFailed, match=r"kept loaded: one \(128 MiB\), three \(128 MiB\)"
            ):
                await residents.get("two").ready(PairFiles("two", "/two.gguf"))
            assert [each.name for each in residents.loaded] == ["three", "one"]
            with residents.get("three").in_use():
                kept.clear()
            while residents.info("three"):  # its own idle time
                await asyncio.sleep(0.01)
            assert residents.info("one")
        finally:
            await residents.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_models_toml_says_how_long_a_pair_stays(tmp_path: Path) -> None:
    paths = Paths(*[tmp_path] * 5)
    registry = Registry(paths, lambda _: False, lambda: ())
    assert registry.retention_policy("coder-7b") == RetentionPolicy()
    paths.user_catalogue.write_text(
        "[pairs.coder-7b]\nkeep = true\n[pairs.builtin]\nidle_unload = 5\n"
    )
    assert registry.retention_policy("coder-7b") == RetentionPolicy(keep=True)
    assert registry.retention_policy("builtin") == RetentionPolicy(idle_unload=5.0)
    paths.user_catalogue.write_text("[pairs.coder-7b]\nidle_unload = -1\n")
    registry.reload()
    assert "pairs.coder-7b.idle_unload" in registry.problem
    assert registry.retention_policy("coder-7b") == RetentionPolicy(keep=True)
