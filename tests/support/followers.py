"""Whether the drafted tokens of sampled answers follow the target's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.engine.sampling.sampler import Sampler
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
