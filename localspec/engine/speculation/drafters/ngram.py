"""N-gram lookup: what followed the last tokens when they occurred before.

They are looked up in the prompt, the answer so far, a text that the client predicts, and earlier requests
(Saxena 2023, "prompt lookup decoding"; OpenAI's `prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.cost import MAX_ROUND_ROWS
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.drafters.ngram_index import (
    GRAM_TOKENS,
    MAX_MATCH_TOKENS,
    MAX_POSITIONS,
    GrowingGrams,
    SortedGrams,
    match,
)
from localspec.engine.speculation.drafters.ngram_memory import Memory
from localspec.engine.speculation.drafters.ngram_prior import LEARNED
from localspec.engine.speculation.drafters.ngram_trail import (
    FOREIGN_MARGIN_TOKENS,
    NOTHING,
    Changes,
    Expected,
    Trail,
)

# Tokens of a copied passage verified in one pass, whose cost is known from others as wide. Kernels work in
# groups of rows, and a pass of 64 rows fills its groups.
MAX_LOOKUP_TOKENS = MAX_ROUND_ROWS - 1
SETTLED_TOKENS = 12  # after this many expected tokens in a row no other place is searched for
MAX_TRAILS = 3  # places that are followed at once
DISPUTE_MARGIN_TOKENS = 4  # a match must be longer by this where another one continues differently
# A match of fewer tokens offers at most this many drafts.
WEAK_MATCH_TOKENS, MAX_WEAK_DRAFTS = 5, 16


class NgramDrafter(Drafter):
    """Drafts from n-gram lookup. While others draft, it learns at no cost how good its own would be."""

    kind, rank, initial_acceptance = "ngram", 2, 0.4
    learned, certain = LEARNED, True

    @classmethod
    def serves(cls, resources: Resources) -> bool:
        return cls.asked_for(resources.asked) and not resources.reject

    def __init__(self, resources: Resources, belief: Belief) -> None:
        super().__init__(resources, belief)
        self.index = resources.lookup
        self.predicted = resources.asked.prediction is not None
        self._offered: Candidate | None = None

    def offer(self, request: DraftRequest) -> Candidate | None:
        limit = min(request.limit, MAX_LOOKUP_TOKENS)
        expected = self.index.propose(request.slot.tokens, limit, request.generated)
        self._offered = None
        if expected.tokens:
            self._offered = Candidate(
                self.belief, len(expected.tokens), 0.0, 0.0, buckets(expected), expected.tokens
            )
        return self._offered

    def observe(self, request: DraftRequest, kept_tokens: list[int], used: bool) -> None:
        super().observe(request, kept_tokens, used)
        if self._offered is not None and not used:
            guesses = zip(self._offered.tokens, self._offered.known, kept_tokens, strict=False)
            for guess, bucket, token in guesses:
                self.belief.observe(bucket, guess == token)
                if guess != token:
                    break
        self._offered = None


# The bucket of each strength of a match. Bucket 0 is for places where a change is expected.
_STRENGTH_EDGES = (2, 3, 4, 5, 9, 12, 16, 24, 48)
_BUCKETS = [sum(strength >= edge for edge in _STRENGTH_EDGES) for strength in range(49)]


def buckets(expected: Expected) -> list[int]:
    """Return the buckets of the expected tokens. Each token that comes makes the match longer."""
    strength, count = min(expected.strength, MAX_MATCH_TOKENS), len(expected.tokens)
    known = _BUCKETS[strength : strength + count]
    known += _BUCKETS[-1:] * (count - len(known))
    if expected.disputed:
        known[0] = _BUCKETS[max(strength - DISPUTE_MARGIN_TOKENS, 0)]
    for index in expected.doubtful:
        known[index] = 0
    return known


class NgramIndex:
    """The texts in which one request looks up what may follow its last tokens, in microseconds.

    Texts known from the start are given to the constructor. It sorts long ones in the thread that calls it,
    outside the step loop.
    """

    def __init__(
        self,
        prediction: Sequence[int] = (),
        prompt: Sequence[int] = (),
        memory: Memory | None = None,
    ) -> None:
        self._prediction = list(prediction)
        self._prediction_grams = SortedGrams(self._prediction)
        self._prompt_grams = SortedGrams(prompt)
        self._text_grams = GrowingGrams(len(prompt))
        self._memory = memory
        self._changes = Changes()
        self._trails: list[Trail] = []  # the last one is followed, the others were before
        self._n_followed = -1

    def propose(self, tokens: Sequence[int], limit: int, generated: int) -> Expected:
        """Return at most `limit` tokens that may follow.

        tokens: prompt and answer so far. generated: how many of them are the answer's. A predicted answer is
        expected from its beginning while the answer is too short to be looked up in it.
        """
        if limit <= 0:
            return NOTHING
        self._follow_trails(tokens)
        self._text_grams.extend(tokens)
        if generated < GRAM_TOKENS and len(self._prediction) > generated:
            answer = list(tokens[len(tokens) - generated :])
            if answer == self._prediction[:generated]:
                self._trails = [Trail(self._prediction, generated, MAX_MATCH_TOKENS, self._changes)]
        followed: set[int] = set()
        if not self._trails or self._trails[-1].strength < SETTLED_TOKENS:
            followed = self._look_up(tokens)
        if not self._trails:
            return NOTHING
        trail = self._trails[-1]
        if trail.strength < WEAK_MATCH_TOKENS:
            limit = min(limit, MAX_WEAK_DRAFTS)
        expected = trail.expected(limit)
        disputed = bool(followed.difference(expected.tokens[:1]))
        return expected._replace(disputed=True) if expected.tokens and disputed else expected

    def _follow_trails(self, tokens: Sequence[int]) -> None:
        """Advance the trails by the tokens that have come since the last call."""
        new = tokens[self._n_followed :] if 0 <= self._n_followed <= len(tokens) else ()
        self._n_followed = len(tokens)
        for trail in self._trails:
            for token in new:
                trail.wrote(token)
                if trail.lost:
                    break
        self._trails = [trail for trail in self._trails if not trail.lost]

    def _look_up(self, tokens: Sequence[int]) -> set[int]:
        """Follow the longest match, if it is worth more than the present trail.

        Returns all tokens that have followed the last tokens in this text.
        """
        if len(tokens) < GRAM_TOKENS:
            return set()
        gram = tuple(tokens[-GRAM_TOKENS:])
        own_places = [*self._prompt_grams.places(gram), *self._text_grams.places(gram)][
            -MAX_POSITIONS:
        ]
        best: tuple[Sequence[int], int, int] | None = None
        is_foreign = False
        for places, text in (
            (self._prediction_grams.places(gram), self._prediction),
            (own_places, tokens),
        ):
            for place in reversed(places):
                length = match(text, place, tokens)
                if best is None or length > best[2]:
                    best = text, place, length
        has_foreign_trail = any(trail.elsewhere and trail.strength for trail in self._trails)
        if (
            self._memory is not None
            and not has_foreign_trail
            and (best is None or best[2] < MAX_MATCH_TOKENS)
        ):
            remembered = self._memory.find(tokens)
            if remembered is not None and (
                best is None or remembered[2] > best[2] + FOREIGN_MARGIN_TOKENS
            ):
                best, is_foreign = remembered, True
        if best is not None and not any(trail.at(best[0], best[1]) for trail in self._trails):
            self._trails = [
                *self._trails[-MAX_TRAILS + 1 :],
                Trail(*best, self._changes, is_current=best[0] is tokens, elsewhere=is_foreign),
            ]
        self._trails.sort(key=lambda trail: trail.strength)  # of equals, the newest stays last
        return {tokens[place] for place in own_places}
