"""Answers with a tuned draft are the target's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from localspec.engine.llama import initialise
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation import verification
from localspec.engine.speculation.verification import residual
from localspec.extras.tune import training
from localspec.extras.tune.lessons import read_lessons
from localspec.extras.tune.reading import TextReader
from localspec.protocol.frames import PairFiles, Sampling
from tests.extras.tune.test_training import job_of, lesson_of
from tests.support.followers import measure_follower_z
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
    sampling = Sampling(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    rule = drafting(2, verification="rejection")
    answers = [engine.ask(prompt, 3, sampling, rule) for _ in range(600)]
    assert sum(answer.done.speculation.drafted for answer in answers) > 600
    return measure_follower_z(engine, prompt, answers, sampler, N_VOCAB)


def test_sampled_answers_keep_the_distribution_of_the_target(tuned: Running) -> None:
    assert measure_z(tuned) < 4.5


def test_the_measure_sees_a_wrong_distribution(
    tuned: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_from_draft(
        target: Distribution, draft: Distribution, weight: float
    ) -> tuple[Distribution, float]:
        return draft, residual(target, draft, weight)[1]

    monkeypatch.setattr(verification, "residual", draw_from_draft)
    assert measure_z(tuned) > 4.5
