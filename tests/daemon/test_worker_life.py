"""Faults at every point of a real engine's life, from loading to unloading.

A lost answer gets a typed error, the next request is answered by a new engine, and a pair is set aside
only after three deaths within ten minutes that may be its own fault.

Each run tries every point with one fault; LOCALSPEC_TEST_FAULTS=all tries every point with every fault.
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
LONG_PROMPT = [BOS, *range(1, 80)]


def combine_faults(points: Sequence[str], ways: Sequence[str]) -> list[tuple[str, str]]:
    """Return each point with one of the ways in turn, or all combinations on request."""
    if os.environ.get("LOCALSPEC_TEST_FAULTS") == "all":
        return list(product(points, ways))
    return [(point, ways[number % len(ways)]) for number, point in enumerate(points)]


class EngineLife:
    """A daemon whose engines fail on request."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self._fault = home.root / "fault"
        files = cycle_pair(folder / "cycle", 0.9)
        self.target, self.draft = Path(files.target), str(files.draft)
        home.environment |= {
            "LOCALSPEC_ENGINE": shlex.join([sys.executable, "-P", str(PROGRAM), str(self._fault)]),
            "LOCALSPEC_PAIR": f"{files.target},{files.draft}",
            "LOCALSPEC_WATCHDOG": "3",
        }
        self.daemon = RunningDaemon(home)

    def fault(self, point: str, way: str, *, always: bool = False) -> None:
        if point == "load-measure":
            for measured in self.home.root.rglob("profile-*.json"):
                measured.unlink()
        self._fault.write_text(f"{point} {way} {'always' if always else ''}")

    @property
    def happened(self) -> bool:
        return not self._fault.exists()

    def ask(self, prompt: list[int] | str = LONG_PROMPT, **fields: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.home.request("POST", "/v1/completions", body)

    def is_well(self) -> None:
        """Check that a request gets the right answer."""
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

    def reset(self) -> None:
        """Reset the counted deaths and unload the engine."""
        self._fault.unlink(missing_ok=True)
        assert self.home.request("POST", "/localspec/reset").status == 200
        assert self.home.request("POST", "/localspec/unload").status == 200


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLife]:
    with temporary_home() as home:
        engine_life = EngineLife(home, tmp_path_factory.mktemp("pair"))
        yield engine_life
        assert engine_life.daemon.stop() == 0


@pytest.fixture(autouse=True)
def fresh(life: EngineLife) -> None:
    life.reset()


def read_error(events: bytes) -> Any:
    """Return the error that ended a stream."""
    last = events.decode().strip().split("\n\n")[-1]
    return json.loads(last.removeprefix("data: "))["error"]


@pytest.mark.parametrize(("point", "way"), combine_faults(LOADING, SUDDEN))
def test_a_load_that_dies_is_reported_and_the_next_one_works(
    life: EngineLife, point: str, way: str
) -> None:
    before = life.deaths()
    life.fault(point, way)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: life.ask(), range(2)))
    assert life.happened
    answers_by_status = {answer.status: answer.json for answer in answers}
    assert set(answers_by_status) <= {200, 500}  # a late request may get the next engine
    assert answers_by_status[500]["error"]["code"] == "worker_died"
    assert life.deaths() == before + 1
    life.is_well()


@pytest.mark.parametrize(
    ("point", "way"), combine_faults(["load-target", "load-measure"], ["SIGSEGV"])
)
def test_a_processor_fault_in_a_load_is_retried_in_safe_mode(
    life: EngineLife, point: str, way: str
) -> None:
    before = life.deaths()
    life.fault(point, way)
    answer = life.ask()
    assert life.happened
    assert answer.status == 200, answer.body
    assert life.home.status()["safe_mode"] is True
    assert life.deaths() == before + 1
    life.is_well()


@pytest.mark.parametrize(("point", "way"), combine_faults(SERVING, SIGNALS))
def test_an_engine_death_is_reported_and_the_next_request_works(
    life: EngineLife, point: str, way: str
) -> None:
    life.is_well()  # a death at the first decode is handled differently
    before = life.deaths()
    drafts = {"kind": "draft", "depth": 3}  # fixed, even if drafts do not pay on this machine
    with life.home.streaming(
        "x", ignore_eos=True, max_tokens=1900, speculative=drafts
    ) as bystander:
        assert bystander.readline().startswith(b"data: ")
        life.fault(point, way)
        life.ask()  # with a long prompt
        error = read_error(bystander.read())
    assert life.happened
    assert error["code"] == "worker_died"
    assert error["message"].startswith("Server error: The engine crashed")
    assert life.deaths() == before + 1
    life.is_well()


def test_texts_that_crash_the_tokenizer_are_blamed(life: EngineLife) -> None:
    """Three such deaths do not count against the pair."""
    life.is_well()
    before = life.deaths()
    for way in ("SIGSEGV", "SIGABRT", "SIGSEGV"):
        life.fault("tokenize", way)
        text = f"a text that ends it, {way}, {life.deaths()}"
        answer = life.ask(text)
        assert life.happened
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        life.is_well()
    assert life.deaths() == before + 3


def test_a_hanging_engine_is_ended_and_replaced(life: EngineLife) -> None:
    life.is_well()
    for point in ("write", "tokenize"):
        life.fault(point, "SIGSTOP")
        answer = life.ask("some text" if point == "tokenize" else LONG_PROMPT)
        assert (answer.status, answer.error["code"]) == (504, "worker_timeout")
        life.is_well()


@pytest.mark.parametrize(
    ("point", "way"), [("draft", "SIGABRT"), ("load-draft", "SIGABRT"), ("draft", "SIGSEGV")]
)
def test_a_draft_that_ends_the_engine_is_left_out(life: EngineLife, point: str, way: str) -> None:
    if point == "draft":
        life.is_well()
    life.fault(point, way, always=True)
    drafts = {"kind": "draft", "depth": 3}
    died = life.ask(speculative=drafts)
    assert (died.status, died.error["code"]) == (500, "worker_died")
    problem = "is left out, because the engine crashed with it"
    assert problem in died.error["message"]
    for _ in range(2):
        answer = life.ask(speculative=drafts)
        assert answer.status == 200, answer.body
    life.is_well()
    (pair,) = life.home.status()["pairs"]
    assert f"{Path(life.draft).name} {problem}" in pair["note"]
    life.reset()
    assert life.ask(speculative=drafts).json["localspec"]["speculation"]["drafted"]


def test_three_deaths_set_the_pair_aside_until_a_reset(life: EngineLife) -> None:
    """The draft is left out after the first one, which does not count."""
    life.is_well()
    life.fault("write", "SIGSEGV", always=True)
    for _ in range(4):
        assert life.ask().error["code"] == "worker_died"
    assert life.ask().error["code"] == "pair_set_aside"
    life.reset()
    life.is_well()


def test_a_death_during_unload_is_not_counted(life: EngineLife) -> None:
    """Three such deaths do not set the pair aside."""
    before = life.deaths()
    for point in ("close", "closed", "close"):
        life.is_well()
        life.fault(point, "SIGSEGV")
        assert life.home.request("POST", "/localspec/unload").status == 200
        assert life.happened
    life.is_well()
    assert life.deaths() == before


@pytest.mark.parametrize(("point", "way"), combine_faults(["save"], SIGNALS))
def test_a_death_while_saving_loses_only_the_saved_state(
    life: EngineLife, point: str, way: str
) -> None:
    options = {"localspec": {"conversation": "new"}, "temperature": 0, "max_tokens": 4}
    answer = life.home.chat("x " * 400, **options)
    assert answer.status == 200, answer.body
    before = life.deaths()
    life.fault(point, way)
    assert life.home.request("POST", "/localspec/unload").status == 200
    assert life.happened
    assert life.deaths() == before
    following = life.home.chat("and then", **(options | {"localspec": {"conversation": "last"}}))
    assert following.status == 200, following.body
    life.is_well()


def test_truncated_weights_end_only_the_engine(life: EngineLife) -> None:
    """The weights are mapped, so that access to the missing part raises SIGBUS."""
    life.is_well()
    original = life.target.read_bytes()
    os.truncate(life.target, 4096)
    try:
        answer = life.ask()
        assert answer.error["code"] in ("worker_died", "load_failed"), answer.body
        assert life.home.request("GET", "/health").status in (200, 503)
        assert life.ask().status >= 400
    finally:
        life.target.write_bytes(original)
    life.reset()
    life.is_well()
