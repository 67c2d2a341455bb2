"""Whether the drafted tokens of sampled answers follow the target's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation import verification
from localspec.engine.speculation.verification import residual
from localspec.protocol.frames import Sampling, SpeculationSettings
from tests.support.running import GREEDY, Answer, Running
from tests.support.statistics import chi_square_z


def measure_follower_z(
    engine: Running,
    prompt: Sequence[int],
    answers: Sequence[Answer],
    sampler: Sampler,
    n_vocab: int,
) -> float:
    """Return how many standard deviations the second tokens of answers are from the target's distribution.

    The second tokens after each first token are one sample, if there are more than 40. sampler: truncates the
    target's logits as the answers' sampling did.
    """
    by_first: dict[int, list[int]] = {}
    for answer in answers:
        by_first.setdefault(answer.tokens[0], []).append(answer.tokens[1])
    samples = []
    for first_token, drawn in by_first.items():
        entry = engine.ask([*prompt, first_token], 1, GREEDY, top_logprobs=n_vocab).logprobs
        row = np.full(n_vocab, -np.inf, dtype=np.float32)
        for token, _, value in entry[0].top:
            row[token] = value
        distribution = sampler.distribution(row)
        if len(drawn) > 40:
            chances = {int(t): distribution.probability_of(int(t)) for t in distribution.ids}
            samples.append((drawn, chances))
    assert samples
    return chi_square_z(*samples)


def measure_sampled_z(
    engine: Running, prompt: Sequence[int], rule: SpeculationSettings, n_vocab: int
) -> float:
    """Return how many standard deviations sampled answers with drafts are from the target's distribution."""
    sampling = Sampling(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    answers = [engine.ask(prompt, 3, sampling, rule) for _ in range(300)]
    assert sum(answer.done.speculation.drafted for answer in answers) > 300
    return measure_follower_z(engine, prompt, answers, sampler, n_vocab)


def draw_rejected_from_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection, draw from the draft's own distribution, which is wrong."""

    def draw_from_draft(
        target: Distribution, draft: Distribution, weight: float
    ) -> tuple[Distribution, float]:
        return draft, residual(target, draft, weight)[1]

    monkeypatch.setattr(verification, "residual", draw_from_draft)
