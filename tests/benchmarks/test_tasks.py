"""Tasks like those of users: recorded, replayed without the model, and measured."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import localspec
from benchmarks.device import without_draft
from benchmarks.tasks import main
from benchmarks.texts.answers import Answered, saved
from benchmarks.texts.replay import COSTS, Replay, calibration
from benchmarks.texts.tasks import LEARNED_FROM, TASKS
from benchmarks.traces.copying import make_answer
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.budget import INITIAL_KNOWN_ROUNDS, KNOWN_REFILL_ROUNDS
from localspec.engine.speculation.controller import Controller
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.step import SequenceStep

TARGET = Path(localspec.__file__).parent / "builtin" / "target.gguf"
COPY = Answered("copy", "copy", list(range(100, 400)), list(range(100, 400)))
texts = st.lists(st.integers(0, 3), min_size=2, max_size=60)


def test_the_twelve_tasks_are_not_among_the_training_tasks() -> None:
    assert len(TASKS) == 12
    assert {task.kind for task in TASKS} == {task.kind for task in LEARNED_FROM}
    learned = {task.file for task in LEARNED_FROM if task.file}
    assert not learned & {task.file for task in TASKS}
    assert all(len(task.question) > 40 for task in (*TASKS, *LEARNED_FROM))


@settings(max_examples=25)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_drafts_never_change_the_answer(exchanges: list[tuple[list[int], list[int]]]) -> None:
    """This holds whatever the texts are, and no pass yields less than one token."""
    replay = Replay()
    for prompt, answer in exchanges:
        result = replay.write(Answered("any", "free", prompt, answer))
        assert result.passes <= result.tokens - 1
        assert result.accepted <= result.drafted
        assert result.tokens - 1 <= result.passes + result.accepted


def test_a_copy_drafts_widely_at_once_and_free_text_costs_nothing() -> None:
    copied, plain = Replay().write(COPY), Replay().write(COPY, plain=True)
    assert plain.passes == plain.tokens - 1
    assert copied.per_pass > 12
    assert copied.ms < 0.4 * plain.ms
    free = Answered("free", "free", list(range(300)), list(range(1000, 1300)))
    assert Replay().write(free).ms == Replay().write(free, plain=True).ms


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.floats(0, 0.9))
def test_drafts_cost_little_whatever_a_text_repeats(seed: int, longest: int, new: float) -> None:
    """Passages of earlier text break off anywhere: drafts cost at most two rounds and two per hundred."""
    rng = random.Random(seed)
    prompt = [rng.randrange(30_000) for _ in range(200)]
    answer: list[int] = []
    while len(answer) < 300:
        text = prompt + answer
        start = rng.randrange(len(text))
        answer += text[start : start + rng.randint(1, longest)]
        answer += [rng.randrange(30_000)] * (rng.random() < new)
    task = Answered("any", "free", prompt, answer)
    drafted, plain = Replay().write(task), Replay().write(task, plain=True)
    round_ms = plain.ms / plain.passes
    assert (
        drafted.ms
        <= plain.ms + (INITIAL_KNOWN_ROUNDS + KNOWN_REFILL_ROUNDS * drafted.passes) * round_ms
    )


@pytest.mark.parametrize(
    ("least", "factor"), [(16, 2.0), (16, 3.0), (32, 2.0), (32, 3.0), (16, 0.4)]
)
def test_a_copy_drafts_widely_despite_wrong_measured_costs(least: int, factor: float) -> None:
    """Wide passes were measured as much more or less expensive, because another program was starting."""
    rng = random.Random(5)
    copies = [copy_task(rng) for _ in range(3)]
    replay = Replay(measured={w: ms * (factor if w >= least else 1) for w, ms in COSTS.items()})
    right = Replay()
    first_pair, _, third = [(replay.write(copy), right.write(copy)) for copy in copies]
    assert first_pair[0].speed >= 0.8 * first_pair[1].speed
    assert third[0].speed >= 0.84 * third[1].speed


@pytest.mark.parametrize("factor", [1.3, 2])
def test_probing_expensive_wide_passes_costs_little(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    copies = [copy_task(rng) for _ in range(4)]

    def speeds() -> list[float]:
        expensive = CostTable({w: ms * (factor if w > 16 else 1) for w, ms in COSTS.items()})
        replay = Replay(CostProfile(expensive, None, 0.3))
        return [replay.write(copy).speed for copy in copies]

    with_probes = speeds()
    monkeypatch.setattr("localspec.engine.speculation.controller.WIDE_PASS_BACKOFFS", (math.inf,))
    ratios = [probed / unprobed for probed, unprobed in zip(with_probes, speeds(), strict=True)]
    assert ratios[0] >= 0.96
    assert min(ratios[1:]) >= 0.98


def test_no_wide_pass_is_tried_where_a_change_of_width_is_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []
    observe = Controller.observe_round

    def note(self: Controller, step: SequenceStep, *args: Any) -> None:
        tried.append(step.explores)
        observe(self, step, *args)

    monkeypatch.setattr(Controller, "observe_round", note)
    replay = Replay(without_draft("32B"))
    for seed in range(4):
        replay.write(make_answer("edits", 192, seed))
    assert len(tried) > 100
    assert not any(tried)


def copy_task(rng: random.Random) -> Answered:
    """Return a task whose answer copies a long text with a word changed here and there."""
    text = [rng.randrange(30_000) for _ in range(2600)]
    changed = [rng.randrange(30_000, 32_000) if rng.random() < 1 / 300 else token for token in text]
    return Answered("copy", "copy", text, changed)


def test_an_earlier_answer_is_remembered() -> None:
    replay = Replay()
    new = Answered("new", "free", list(range(9)), list(range(500, 700)))
    first_result, second_result = replay.write(new), replay.write(new)
    assert first_result.accepted == 0
    assert second_result.per_pass > 8


def test_the_learned_file_has_a_valid_calibration() -> None:
    learned = json.loads(calibration([COPY], 0))
    assert Calibration.from_dict(learned, 0.4).as_dict() == learned


def test_commits_and_pages_become_answers(tmp_path: Path) -> None:
    history = [
        "history",
        str(tmp_path),
        "--target",
        str(TARGET),
        "--edits",
        "1",
        "--context",
        "512",
    ]
    assert main(history) == 0
    kinds = [answer.kind for answer in saved(tmp_path)]
    assert kinds.count("refactoring") <= 1  # none in a shallow clone
    assert kinds.count("free") > 3


def test_answers_are_recorded_once_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(TARGET), "--only", "story", "--tokens", "6", "--context", "512"]
    assert main(["record", str(tmp_path), *arguments]) == 0
    (answered,) = saved(tmp_path)
    assert (answered.name, answered.kind) == ("story", "free")
    assert 0 < len(answered.answer) <= 6
    assert main(["replay", str(tmp_path)]) == 0
    assert "| story | " in capsys.readouterr().out


def test_all_settings_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_server: Path
) -> None:
    arguments = ["--target", str(TARGET), "--only", "story", "--tokens", "6", "--context", "512"]
    arguments += ["--repetitions", "1", "--threads", "1", "--llama-server", str(fake_server)]
    assert main([*arguments, "--json", str(tmp_path / "runs.json")]) == 0
    table = capsys.readouterr().out
    head = "| task | plain | auto | llama-server plain | llama-server ngram-simple |"
    assert head in table
    assert "| 42.0 |" in table
    assert (tmp_path / "runs.json").stat().st_size > 100


def test_an_unknown_task_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(TARGET), "--only", "nothing"]) == 1
    assert "no task is called nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
