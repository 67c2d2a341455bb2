"""Answers with a tuned draft are the target's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from localspec.engine.llama import initialise
from localspec.extras.tune import training
from localspec.extras.tune.lessons import read_lessons
from localspec.extras.tune.reading import TextReader
from localspec.protocol.frames import PairFiles
from tests.extras.tune.test_training import job_of, lesson_of
from tests.support.followers import draw_rejected_from_draft, measure_sampled_z
from tests.support.pairs import BOS, N_VOCAB, contextual_pair, target_alone
from tests.support.running import GREEDY, Running, drafting, running

LENGTH = 40


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[BOS, *(generator.randrange(3, N_VOCAB) for _ in range(8))] for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PairFiles:
    """Tune the output rows of a poor draft on the target's answers; return the pair with the new draft."""
    initialise()
    folder = tmp_path_factory.mktemp("tuned")
    pair = contextual_pair(folder, noise=0.3)
    with running(target_alone(pair)) as alone:
        texts = [[*p, *alone.ask(p, LENGTH, GREEDY).tokens] for p in draw_prompts(60, 1)]
    teacher = TextReader(pair.target, 1)
    lessons = read_lessons(teacher, [lesson_of(text) for text in texts], lambda _: True)
    teacher.close()
    training._train_rows(job_of(folder), lessons)
    return PairFiles("tuned", pair.target, str(folder / "new.gguf"))


@pytest.fixture(scope="module")
def tuned(files: PairFiles) -> Iterator[Running]:
    with running(files) as engine:
        yield engine


def test_greedy_and_exact_answers_are_those_of_the_target_alone(
    files: PairFiles, tuned: Running
) -> None:
    accepted = 0
    with running(target_alone(files)) as alone:
        for prompt in draw_prompts(8, 2):
            for exact in (False, True):
                options = {"top_logprobs": 2, "exact": exact}
                with_drafts = tuned.ask(prompt, LENGTH, GREEDY, drafting(3), **options)
                plain = alone.ask(prompt, LENGTH, GREEDY, **options)
                assert with_drafts.tokens == plain.tokens
                if exact:
                    assert with_drafts.logprobs == plain.logprobs
                accepted += with_drafts.done.speculation.accepted
    assert accepted > 50


def measure_z(engine: Running) -> float:
    """Return how many standard deviations sampled drafts are from the target's distribution."""
    (prompt,) = draw_prompts(1, 3)
    rule = drafting(2, verification="rejection")
    return measure_sampled_z(engine, prompt, rule, N_VOCAB)


def test_sampled_answers_keep_the_distribution_of_the_target(tuned: Running) -> None:
    assert measure_z(tuned) < 4.5


def test_the_measure_sees_a_wrong_distribution(
    tuned: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_rejected_from_draft(monkeypatch)
    assert measure_z(tuned) > 4.5
