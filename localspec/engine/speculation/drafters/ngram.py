"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt, the answer so
far, a text the caller predicts, or an earlier request (Saxena 2023, "prompt lookup decoding"; OpenAI's
`prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.cost import WIDEST
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.drafters.ngram_index import (
    GRAM,
    LONGEST,
    PLACES,
    Growing,
    Sorted,
    match,
)
from localspec.engine.speculation.drafters.ngram_memory import Memory
from localspec.engine.speculation.drafters.ngram_prior import LEARNED
from localspec.engine.speculation.drafters.ngram_trail import (
    ELSEWHERE,
    NOTHING,
    Changes,
    Expected,
    Trail,
)

# Tokens of a copied passage verified in one pass, whose cost is known from others as wide. Kernels work in
# groups of rows, and 64 are whole ones.
LIMIT = WIDEST - 1
SETTLED = 12  # tokens in a row after which no other place is looked for
MOST = 3  # places that are followed at once
DISPUTED = 4  # tokens that a match must be longer where another one goes on otherwise
WEAK, WEAK_LIMIT = 5, 16  # of a match of fewer tokens so many are offered at most


class NgramDrafter(Drafter):
    """What followed the last tokens before. While others draft it learns for free how good it is."""

    kind, rank, initial_acceptance = "ngram", 2, 0.4
    learned, certain = LEARNED, True

    @classmethod
    def serves(cls, given: Resources) -> bool:
        return cls.asked_for(given.asked) and not given.reject

    def __init__(self, given: Resources, belief: Belief) -> None:
        super().__init__(given, belief)
        self.index = given.lookup
        self.predicted = given.asked.prediction is not None
        self._offered: Candidate | None = None

    def offer(self, request: DraftRequest) -> Candidate | None:
        limit = min(request.limit, LIMIT)
        found = self.index.propose(request.slot.tokens, limit, request.generated)
        self._offered = None
        if found.tokens:
            self._offered = Candidate(
                self.belief, len(found.tokens), 0.0, 0.0, buckets(found), found.tokens
            )
        return self._offered

    def observe(self, request: DraftRequest, kept: list[int], used: bool) -> None:
        super().observe(request, kept, used)
        if self._offered is not None and not used:
            guesses = zip(self._offered.tokens, self._offered.known, kept, strict=False)
            for guess, at, token in guesses:
                self.belief.observe(at, guess == token)
                if guess != token:
                    break
        self._offered = None


# Strength of a match → the bucket whose calibration is used; 0: a change is expected.
_STRENGTH_EDGES = (2, 3, 4, 5, 9, 12, 16, 24, 48)
_BUCKETS = [sum(strength >= edge for edge in _STRENGTH_EDGES) for strength in range(49)]


def buckets(found: Expected) -> list[int]:
    """How sure each token is if those before it come: then the match is as much longer."""
    strength, count = min(found.strength, LONGEST), len(found.tokens)
    known = _BUCKETS[strength : strength + count]
    known += _BUCKETS[-1:] * (count - len(known))
    if found.disputed:
        known[0] = _BUCKETS[max(strength - DISPUTED, 0)]
    for at in found.doubtful:
        known[at] = 0
    return known


class NgramIndex:
    """Where to look for what follows the last tokens of one request, in microseconds.

    What is known from the start is given at the start: long texts are then sorted where it is made,
    beside the step loop, and not in it.
    """

    def __init__(
        self,
        prediction: Sequence[int] = (),
        prompt: Sequence[int] = (),
        memory: Memory | None = None,
    ) -> None:
        self._prediction = list(prediction)
        self._predicted = Sorted(self._prediction)
        self._begun = Sorted(prompt)
        self._text = Growing(len(prompt))
        self._memory = memory
        self._changes = Changes()
        self._trails: list[Trail] = []  # the last one is followed, the others were
        self._seen = -1

    def propose(self, tokens: Sequence[int], limit: int, generated: int) -> Expected:
        """At most `limit` tokens that may follow.

        tokens: prompt and answer so far; generated: how many of them are the answer's. A predicted
        answer is expected from its beginning, as long as the answer is too short to be looked up in it.
        """
        if limit <= 0:
            return NOTHING
        self._follow(tokens)
        self._text.extend(tokens)
        if generated < GRAM and len(self._prediction) > generated:
            begun = list(tokens[len(tokens) - generated :])
            if begun == self._prediction[:generated]:
                self._trails = [Trail(self._prediction, generated, LONGEST, self._changes)]
        followed: set[int] = set()
        if not self._trails or self._trails[-1].strength < SETTLED:
            followed = self._look_up(tokens)
        if not self._trails:
            return NOTHING
        trail = self._trails[-1]
        if trail.strength < WEAK:
            limit = min(limit, WEAK_LIMIT)
        found = trail.expected(limit)
        disputed = bool(followed.difference(found.tokens[:1]))
        return found._replace(disputed=True) if found.tokens and disputed else found

    def _follow(self, tokens: Sequence[int]) -> None:
        """What has come since the last time, along the trails."""
        new = tokens[self._seen :] if 0 <= self._seen <= len(tokens) else ()
        self._seen = len(tokens)
        for trail in self._trails:
            for token in new:
                trail.wrote(token)
                if trail.lost:
                    break
        self._trails = [trail for trail in self._trails if not trail.lost]

    def _look_up(self, tokens: Sequence[int]) -> set[int]:
        """Follow the longest match, if it is worth more than where the answer seemed to be.

        Gives what has followed the last tokens in this text, wherever they stand.
        """
        if len(tokens) < GRAM:
            return set()
        gram = tuple(tokens[-GRAM:])
        own = [*self._begun.places(gram), *self._text.places(gram)][-PLACES:]
        best: tuple[Sequence[int], int, int] | None = None
        elsewhere = False
        for places, text in ((self._predicted.places(gram), self._prediction), (own, tokens)):
            for place in reversed(places):
                length = match(text, place, tokens)
                if best is None or length > best[2]:
                    best = text, place, length
        there = any(trail.elsewhere and trail.strength for trail in self._trails)
        if self._memory is not None and not there and (best is None or best[2] < LONGEST):
            found = self._memory.find(tokens)
            if found is not None and (best is None or found[2] > best[2] + ELSEWHERE):
                best, elsewhere = found, True
        if best is not None and not any(trail.at(best[0], best[1]) for trail in self._trails):
            self._trails = [
                *self._trails[-MOST + 1 :],
                Trail(*best, self._changes, own=best[0] is tokens, elsewhere=elsewhere),
            ]
        self._trails.sort(key=lambda trail: trail.strength)  # of equals the last that was found
        return {tokens[place] for place in own}
