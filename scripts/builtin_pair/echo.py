"""Random tokens that come again: text in which copying is all that helps.

Code repeats its own names, so a model must learn to copy before anything else is worth learning.  The first
pair had not learnt it from 4.6 M tokens of code and prose; from this, after `model.look_back`, 0.4 M are enough.
"""

from __future__ import annotations

import random

STRETCH = (3, 14)
"""Fewest and most tokens of what is repeated."""
STRETCHES = (2, 4)


def echo(rng: random.Random, choice: range, length: int) -> tuple[list[int], list[float]]:
    """`length` tokens of `choice`, and for each the weight of predicting it: 1 where it can be known, else 0."""
    stretches = [
        rng.choices(choice, k=rng.randint(*STRETCH)) for _ in range(rng.randint(*STRETCHES))
    ]
    tokens: list[int] = []
    weights: list[float] = []
    met: set[int] = set()
    while len(tokens) < length:
        number = rng.randrange(len(stretches))
        tokens += stretches[number]
        # What follows the first token of a stretch met before can be known.
        weights += [0.0] + [float(number in met)] * (len(stretches[number]) - 1)
        met.add(number)
    return tokens[:length], weights[:length]
