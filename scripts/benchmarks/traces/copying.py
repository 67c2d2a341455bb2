"""Made-up texts of which parts can be looked up: copies, edits, records.

Prose has no token twice in the same order, so nothing is found for it. Copies are parts of a text in the
prompt, in which every looked-up token is right. A clairvoyant knows where each copy begins and ends, and
pays only for passes and changes of their width. Edits replace some names of a text everywhere, and records
have the same keys around other values.
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


def make_answer(text: str, tokens: int, seed: int) -> Answered:
    """Return an answer of so many tokens of a kind of text: "copies of N", "records", "edits" or "prose"."""
    rng = random.Random(seed)
    if text.startswith("copies of 40"):
        answered = make_copying(40, 40, 3, seed).answered
    elif text.startswith("copies of 150"):
        answered = make_copying(42, 150, 1, seed).answered
    elif text.startswith("records"):
        answered = _make_records(rng, tokens)
    elif text.startswith("edits"):
        answered = _make_edits(rng)
    else:
        source = rng.choices(range(1, N_IDS), k=400)
        answered = Answered(text, "free", source, rng.choices(range(1, N_IDS), k=tokens))
    return Answered(text, answered.kind, answered.prompt, answered.answer[:tokens])


def _make_records(rng: random.Random, tokens: int) -> Answered:
    """Return records with the same keys around other values."""
    keys = rng.choices(range(1, N_IDS), k=12)
    values = [rng.choices(range(1, 60), k=3) for _ in range(tokens // 7 + 16)]
    records = [
        token
        for at, value in enumerate(values)
        for token in (*keys[at * 4 % 12 : at * 4 % 12 + 4], *value)
    ]
    return Answered("records", "JSON", records[:105], records[105:])


def _make_edits(rng: random.Random) -> Answered:
    """Return a text in which some names, which come everywhere, are replaced, and lines come and go."""
    source = rng.choices(range(1, N_IDS), k=400)
    names = rng.sample(range(1, N_IDS), 6)
    for place in range(5, 400, 13):
        source[place] = names[place % 6]
    renamed = {name: number for number, name in enumerate(names[:3], N_IDS)}
    answer: list[int] = []
    for place, token in enumerate(source):
        if place % 67 == 40:
            answer += rng.choices(range(1, N_IDS), k=5)  # a line more
        if place % 83 < 80:  # or less
            answer.append(renamed.get(token, token))
    return Answered("edits", "refactoring", source, answer)


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
