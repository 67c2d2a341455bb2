"""Prompts of one kind of character, with a real engine that splits text by regular expressions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.daemons import Answer, Home, RunningDaemon, temporary_home
from tests.support.gguf_files import relabelled

SHIPPED = Path(__file__).resolve().parents[2] / "localspec" / "builtin"
ROWS = (" ", "-", "a", "Z", "aB", "中", "\u0301", "7", "\n", "\u3000", "/\n", "😀", "\x01")
LENGTH = 30_000
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
QUESTION = "What does shutil.copytree do?"


@pytest.fixture(scope="module")
def cut_by_expressions() -> Iterator[Home]:
    with temporary_home() as home:
        pair = [
            relabelled(SHIPPED / f"{name}.gguf", "tekken", home.root / f"{name}.gguf")
            for name in ("target", "draft")
        ]
        home.environment["LOCALSPEC_PAIR"] = ",".join(map(str, pair))
        home.environment["LOCALSPEC_PARALLEL"] = "4"
        RunningDaemon(home)
        yield home


def test_runs_of_one_kind_of_character_do_no_harm(cut_by_expressions: Home) -> None:
    home = cut_by_expressions
    # With `exact`, concurrent requests cannot change the answer.
    alone = home.chat(QUESTION, **GREEDY, exact=True)
    assert alone.status == 200, alone.body

    def run(row: str) -> Answer:
        return home.chat((row * LENGTH)[:LENGTH], max_tokens=1)

    def tokenized(row: str) -> Answer:
        return home.request("POST", "/tokenize", {"content": (row * LENGTH)[:LENGTH]})

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run, row) for row in ROWS]
        counted = [pool.submit(tokenized, row) for row in ROWS]
        beside = [home.chat(QUESTION, **GREEDY, exact=True) for _ in range(3)]
    for answer in beside:
        assert answer.status == 200, answer.body
        assert answer.text == alone.text
    for future in futures:
        # Some rows have so few tokens that they fit.
        assert future.result().status in (200, 400), future.result().body
        if future.result().status == 400:
            assert future.result().error["code"] == "context_length_exceeded"
    assert {future.result().status for future in counted} == {200}
    counts = home.status()["counts"]
    assert (counts["worker_deaths"], counts["worker_starts"]) == (0, 1)
