"""Faults at every point of a real engine's life: what those beside it and those after it are promised.

Whoever lost an answer is told so in a typed error, the next request is answered by a new engine, and a
pair is set aside only after three deaths within ten minutes that may be its own fault.

Every point is tried in one way in every run, and in every way with LOCALSPEC_TEST_FAULTS=all.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import ROOT, Answer, Home, RunningDaemon, temporary_home
from tests.support.pairs import BOS, cycle_pair, expected

PROGRAM = ROOT / "tests" / "support" / "faulty_engine.py"
LOADING = (
    "begin", "start", "load-target", "load-draft", "load-context", "load-measure", "load-last",
)  # fmt: skip
SERVING = ("read-prompt", "write", "draft", "sample")
SUDDEN = ("SIGKILL", "SIGABRT", "exit")
SIGNALS = (*SUDDEN, "SIGSEGV")
LONG = [BOS, *range(1, 80)]


def tried(points: Sequence[str], ways: Sequence[str]) -> list[tuple[str, str]]:
    """Every point and every way, or each point once, the ways in turn."""
    if os.environ.get("LOCALSPEC_TEST_FAULTS") == "all":
        return list(product(points, ways))
    return [(point, ways[number % len(ways)]) for number, point in enumerate(points)]


class Life:
    """A daemon whose engines have the fault that is asked for."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self._fault = home.root / "fault"
        files = cycle_pair(folder / "cycle", 0.9)
        self.target = Path(files.target)
        home.environment |= {
            "LOCALSPEC_ENGINE": shlex.join([sys.executable, "-P", str(PROGRAM), str(self._fault)]),
            "LOCALSPEC_PAIR": f"{files.target},{files.draft}",
            "LOCALSPEC_WATCHDOG": "1",
        }
        self.daemon = RunningDaemon(home)

    def fault(self, point: str, how: str, *, always: bool = False) -> None:
        if point == "load-measure":
            for measured in self.home.root.rglob("profile-*.json"):
                measured.unlink()
        self._fault.write_text(f"{point} {how} {'always' if always else ''}")

    @property
    def happened(self) -> bool:
        return not self._fault.exists()

    def ask(self, prompt: list[int] | str = LONG, **fields: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.home.request("POST", "/v1/completions", body)

    def is_well(self) -> None:
        """A request is answered, and rightly."""
        answer = self.home.request(
            "POST",
            "/completion",
            {"prompt": [5], "n_predict": 9, "temperature": 0, "return_tokens": True},
        )
        assert answer.status == 200, answer.body
        assert answer.json["tokens"] == expected(5, 9)

    def deaths(self) -> int:
        count: int = self.home.status()["counts"]["worker_deaths"]
        return count

    def again(self) -> None:
        """As if nothing had happened: no deaths counted against the pair, and no engine."""
        self._fault.unlink(missing_ok=True)
        assert self.home.request("POST", "/localspec/reset").status == 200
        assert self.home.request("POST", "/localspec/unload").status == 200


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    with temporary_home() as home:
        made = Life(home, tmp_path_factory.mktemp("pair"))
        yield made
        assert made.daemon.stop() == 0


@pytest.fixture(autouse=True)
def fresh(life: Life) -> None:
    life.again()


def error_of(events: bytes) -> Any:
    """The error that ended a stream."""
    last = events.decode().strip().split("\n\n")[-1]
    return json.loads(last.removeprefix("data: "))["error"]


@pytest.mark.parametrize(("point", "how"), tried(LOADING, SUDDEN))
def test_who_waits_for_a_load_that_dies_is_told_and_the_next_load_works(
    life: Life, point: str, how: str
) -> None:
    before = life.deaths()
    life.fault(point, how)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: life.ask(), range(2)))
    assert life.happened
    told = {answer.status: answer.json for answer in answers}
    assert set(told) <= {200, 500}  # one that came later has the next engine
    assert told[500]["error"]["code"] == "worker_died"
    assert life.deaths() == before + 1
    life.is_well()


@pytest.mark.parametrize(("point", "how"), tried(["load-target", "load-measure"], ["SIGSEGV"]))
def test_a_fault_of_the_processor_in_a_load_is_tried_again_in_safe_mode(
    life: Life, point: str, how: str
) -> None:
    before = life.deaths()
    life.fault(point, how)
    answer = life.ask()
    assert life.happened
    assert answer.status == 200, answer.body
    assert life.home.status()["safe_mode"] is True
    assert life.deaths() == before + 1
    life.is_well()


@pytest.mark.parametrize(("point", "how"), tried(SERVING, SIGNALS))
def test_who_is_in_an_engine_that_dies_is_told_and_the_next_request_works(
    life: Life, point: str, how: str
) -> None:
    life.is_well()  # a death at the very first decode has a rule of its own
    before = life.deaths()
    drafts = {"kind": "draft", "depth": 3}  # whether they pay on this machine or not
    with life.home.streaming(
        "x", ignore_eos=True, max_tokens=1900, speculative=drafts
    ) as bystander:
        assert bystander.readline().startswith(b"data: ")
        life.fault(point, how)
        life.ask()  # with a long prompt
        error = error_of(bystander.read())
    assert life.happened
    assert error["code"] == "worker_died"
    assert error["message"].startswith("The engine crashed")
    assert life.deaths() == before + 1
    life.is_well()


def test_texts_that_end_the_tokenizer_are_refused_and_the_pair_is_kept(life: Life) -> None:
    """Three of them, which would set a pair aside whose fault it was."""
    life.is_well()
    before = life.deaths()
    for how in ("SIGSEGV", "SIGABRT", "SIGSEGV"):
        life.fault("tokenize", how)
        text = f"a text that ends it, {how}, {life.deaths()}"
        answer = life.ask(text)
        assert life.happened
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        again = life.ask(text)  # and it is not read by the next one, which is well
        assert (again.status, again.error["code"]) == (400, "invalid_request")
        life.is_well()
    assert life.deaths() == before + 3


def test_one_that_hangs_is_ended_and_the_next_request_works(life: Life) -> None:
    life.is_well()
    for point in ("write", "tokenize"):
        life.fault(point, "SIGSTOP")
        answer = life.ask("some text" if point == "tokenize" else LONG)
        assert (answer.status, answer.error["code"]) == (504, "worker_timeout")
        life.is_well()


def test_three_deaths_of_a_kind_set_the_pair_aside_until_reset(life: Life) -> None:
    life.is_well()
    life.fault("write", "SIGSEGV", always=True)
    for _ in range(3):
        assert life.ask().error["code"] == "worker_died"
    assert life.ask().error["code"] == "pair_set_aside"
    life.again()
    life.is_well()


def test_a_death_on_the_way_out_is_nobodys_trouble(life: Life) -> None:
    """Three times, which would set a pair aside that dies so while it serves."""
    before = life.deaths()
    for point in ("close", "closed", "close"):
        life.is_well()
        life.fault(point, "SIGSEGV")
        assert life.home.request("POST", "/localspec/unload").status == 200
        assert life.happened
    life.is_well()
    assert life.deaths() == before


@pytest.mark.parametrize(("point", "how"), tried(["save"], SIGNALS))
def test_a_death_while_a_conversation_is_saved_loses_no_more_than_that(
    life: Life, point: str, how: str
) -> None:
    options = {"localspec": {"conversation": "new"}, "temperature": 0, "max_tokens": 4}
    told = life.home.chat("x " * 400, **options)
    assert told.status == 200, told.body
    before = life.deaths()
    life.fault(point, how)
    assert life.home.request("POST", "/localspec/unload").status == 200
    assert life.happened
    assert life.deaths() == before
    following = life.home.chat("and then", **(options | {"localspec": {"conversation": "last"}}))
    assert following.status == 200, following.body
    life.is_well()


def test_weights_cut_off_under_a_running_engine_end_it_and_nothing_else(life: Life) -> None:
    """They are mapped: what is gone from the file is gone from memory, and touching it is SIGBUS."""
    life.is_well()
    whole = life.target.read_bytes()
    os.truncate(life.target, 4096)
    try:
        answer = life.ask()
        assert answer.error["code"] in ("worker_died", "load_failed"), answer.body
        assert life.home.request("GET", "/health").status in (200, 503)
        assert life.ask().status >= 400
    finally:
        life.target.write_bytes(whole)
    life.again()
    life.is_well()


def test_a_load_that_memory_does_not_suffice_for_is_tried_once_more_with_half_the_context() -> None:
    with temporary_home() as home:
        for most, answers in ((700, True), (400, False)):
            home.use_fake("--most", str(most), pair="builtin", context=0)
            daemon = RunningDaemon(home)
            answer = home.chat("say x")
            assert (answer.status == 200) == answers, answer.body
            status = home.status()
            if answers:
                assert "memory ran out while the pair was loaded" in status["pair"]["note"]
                assert "config set context" in status["pair"]["note"]
                assert status["counts"]["worker_starts"] == 2
            else:
                assert answer.error["code"] == "out_of_memory"
            daemon.stop()
