"""Texts that change between prose and copying, replayed where a change of a pass's width is dear.

Prose has no token twice in the same order, so nothing is found for it. Copies are parts of a text in the
prompt, in which every looked-up token is right. A clairvoyant knows where each copy begins and ends, and
pays only for passes and changes of their width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.texts.answers import Answered
from benchmarks.texts.replay import Replay
from benchmarks.traces.replay import runs_of_hits
from localspec.engine.speculation.cost import CostProfile
from localspec.engine.speculation.drafters.ngram import GRAM_TOKENS

N_IDS = 20_000
SOURCE_TOKENS = 600
# Widths that the clairvoyant chooses from.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Copying:
    """An answer, and of each of its tokens whether it can be looked up."""

    answered: Answered
    known: Sequence[bool]


def make_copying(prose: int, copy: int, copies: int, seed: int) -> Copying:
    """Return an answer of prose of so many tokens, and copies of so many between."""
    rng = random.Random(seed)
    source = rng.choices(range(1, N_IDS), k=SOURCE_TOKENS)
    answer, known = list[int](), list[bool]()
    for number in range(copies + 1):
        answer += rng.choices(range(1, N_IDS), k=prose)
        known += [False] * prose
        if number < copies:
            start = rng.randrange(SOURCE_TOKENS - copy)
            answer += source[start : start + copy]
            # A passage is found when its first tokens are written.
            known += [index >= GRAM_TOKENS for index in range(copy)]
    return Copying(Answered("copying", "copy", source, answer), known)


def shortest_ms(known: Sequence[bool], costs: CostProfile) -> float:
    """Return the milliseconds of the shortest way through a text, with changes of the width.

    Dynamic programming from the end, over places, the width of the last pass, and whether it was the first
    of this width.
    """
    runs, table, change = runs_of_hits(known), costs.target, costs.target.change
    round_ms = {width: table.ms(width) + costs.overhead_ms for width in WIDTHS}
    best = [dict.fromkeys(((w, first) for w in WIDTHS for first in (True, False)), 0.0)]
    for place in range(len(known) - 1, -1, -1):
        ways = []
        for width in WIDTHS:
            n_right = min(runs[place], width - 1)
            if n_right or width == 1:
                after = min(n_right, len(best) - 1)  # `best` begins with the place behind this one
                ways.append((width, after))
        best.insert(0, {})
        for used, first in best[-1]:
            best[0][used, first] = min(
                round_ms[width]
                + (change.first_ms if width != used else change.second_ms * first)
                + best[1 + after][width, width != used]
                for width, after in ways
            )
    return best[0][1, False]


def compare_copying(costs: CostProfile, copying: Copying) -> tuple[float, float]:
    """Return how fast `auto` is beside the clairvoyant, and beside plain decoding."""
    auto, plain = (Replay(costs).write(copying.answered, plain) for plain in (False, True))
    return shortest_ms(copying.known[1:], costs) / auto.ms, plain.ms / auto.ms
