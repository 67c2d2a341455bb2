"""`scripts/bench ablation`: mechanisms are switched off and on again, and an interrupted table goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from benchmarks.ablation import ALL_ON, FIXED, MECHANISMS, Case, Job, Results, run
from benchmarks.traces.copying import make_answer

CASES = [Case("draft", "8B", "bursts of 40", 1), Case("ngram", "cpu", "edits", 4)]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "TOKENS", 48)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_is_switched_off_and_on_again(name: str) -> None:
    mechanism = MECHANISMS[name]
    before = [vars(owner)[attribute] for owner, attribute, _ in mechanism.changes]
    with ablation.switched(mechanism):
        for owner, attribute, replacement in mechanism.changes:
            assert vars(owner)[attribute] is replacement
    assert [vars(owner)[attribute] for owner, attribute, _ in mechanism.changes] == before
    assert before or mechanism.cold or not mechanism.idle


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_replay_is_the_same_each_time(case: Case) -> None:
    job = Job(case, ALL_ON, 1)
    assert run(job) == run(job)


def test_the_texts_that_can_be_looked_up_are_as_long_as_an_answer() -> None:
    for text in ablation.LOOKED_UP:
        assert len(make_answer(text, ablation.TOKENS, 1).answer) == ablation.TOKENS, text


def test_an_interrupted_table_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "finished.jsonl"
    results = Results.load(path, "engine 1")
    results.add("a job", [[1.0, 2.0, 3.0, 4.0]])
    with path.open("a", encoding="utf-8") as file:
        file.write('["another job", [[1.')
    assert Results.load(path, "engine 1").finished == {"a job": [[1.0, 2.0, 3.0, 4.0]]}
    assert Results.load(path, "engine 2").finished == {}


def test_the_table_has_a_row_for_each_finished_mechanism() -> None:
    jobs = ablation.list_jobs(CASES, ["margin", "order by depth", "probes"], 1)
    assert [job.name for job in jobs] == [ALL_ON] * 2 + ["margin"] * 2 + ["probes"] + [FIXED] * 2
    slower = {ALL_ON: 1.0, "margin": 1.25}
    results: dict[str, list[Any]] = {
        job.key: [[slower.get(job.name, 1.0)] * 4] for job in jobs if job.name != FIXED
    }
    results |= {job.key: [[[1.0] * 4, [0.5] * 4]] for job in jobs if job.name == FIXED}
    del results[next(job.key for job in jobs if job.name == "probes")]
    rows = ablation.markdown(results, jobs).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| all", "| margin"]
    assert "| -20.0 % | -20.0 %" in rows[3]
    assert "| 0.800 | 0.400 |" in rows[3]
