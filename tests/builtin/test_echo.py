"""Random token sequences with repetitions."""

from __future__ import annotations

import itertools
import random

from builtin_pair.echo import echo


def test_every_weighted_token_can_be_copied_from_before() -> None:
    weighted_count = 0
    for seed in range(50):
        tokens, weights = echo(random.Random(seed), range(7, 300), 112)
        assert len(tokens) == len(weights) == 112
        assert set(tokens) <= set(range(7, 300))
        pairs = list(itertools.pairwise(tokens))
        for i, weight in enumerate(weights):
            if weight:
                assert pairs[i - 1] in pairs[: i - 1]
                weighted_count += 1
    assert weighted_count > 50 * 112 / 2
