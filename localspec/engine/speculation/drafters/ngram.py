"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt, the answer so
far, or a text the caller predicts (Saxena 2023, "prompt lookup decoding"; OpenAI's `prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.depth import MAX_DEPTH, Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources

LIMIT = 4 * MAX_DEPTH  # tokens of a copied passage verified in one pass
GRAM = 3  # shortest match worth following
_PLACES = 8  # latest occurrences compared for the longest match
_BITS = 63 // GRAM  # of a token id in a gram's key: no vocabulary has two million tokens
_LONGEST = 48  # matches are not measured further than this
# Match length → the confidence bucket (see CONFIDENCE_EDGES) whose calibration it uses.
_LENGTH_EDGES = (4, 5, 6, 8, 11, 16, 24, 32, 48)


def length_bucket(length: int) -> int:
    """Bucket 0…9 of a match of this many tokens."""
    return sum(length >= edge for edge in _LENGTH_EDGES)


class _Sorted:
    """Where each GRAM-gram of a text ends that does not grow: some 0.1 µs and 16 bytes per token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        text = np.array(tokens, np.int64)
        # The place after a gram; the one at the very end has nothing after it.
        ends = max(len(text) - GRAM, 0)
        keys = np.zeros(ends, np.int64)
        for at in range(GRAM):
            keys = keys << _BITS | text[at : at + ends]
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys = keys[self._order]

    def places(self, gram: Sequence[int]) -> list[int]:
        """The latest _PLACES of them, in their order."""
        key = 0
        for token in gram:
            key = key << _BITS | token
        first = self._keys.searchsorted(key, "left")
        last = int(self._keys.searchsorted(key, "right"))
        found = self._order[max(int(first), last - _PLACES) : last]
        return [int(place) + GRAM for place in found]


class _Growing:
    """Where each GRAM-gram of a growing text ends, from a place on."""

    def __init__(self, start: int) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._done = max(start, GRAM)

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._done, len(tokens)):
            # `end` is the place after the gram, so a gram at the very end is not its own match
            gram = tuple(tokens[end - GRAM : end])
            places = self._ends.setdefault(gram, [])
            places.append(end)
            if len(places) > _PLACES:
                del places[0]
        self._done = max(self._done, len(tokens))

    def places(self, gram: tuple[int, ...]) -> list[int]:
        return self._ends.get(gram, [])


class NgramDrafter(Drafter):
    """What followed the last tokens before. While others draft it learns for free how good it is."""

    kind, rank, initial_acceptance = "ngram", 2, 0.4

    @classmethod
    def serves(cls, given: Resources) -> bool:
        return cls.asked_for(given.asked) and not given.reject

    def __init__(self, given: Resources, belief: Belief) -> None:
        super().__init__(given, belief)
        self.index = given.lookup
        self.predicted = given.asked.prediction is not None
        self._found: list[int] = []
        self._match = 0

    def offer(self, request: DraftRequest) -> Candidate | None:
        limit = min(request.limit, LIMIT)
        found = self.index.propose(request.slot.tokens, limit, request.generated)
        self._found, self._match = found
        return self.known(self._found, length_bucket(self._match)) if self._found else None

    def observe(self, request: DraftRequest, kept: list[int], used: bool) -> None:
        super().observe(request, kept, used)
        if self._found and not used:
            at = length_bucket(self._match)
            for guess, token in zip(self._found, kept, strict=False):
                self.belief.observe(at, guess == token)
                if guess != token:
                    break
        self._found = []


class NgramIndex:
    """Where to look for what follows the last tokens of one request, in microseconds.

    What is known from the start is given at the start: long texts are then sorted where it is made,
    beside the step loop, and not in it.
    """

    def __init__(self, prediction: Sequence[int] = (), prompt: Sequence[int] = ()) -> None:
        self._prediction = list(prediction)
        self._predicted = _Sorted(self._prediction)
        self._begun = _Sorted(prompt)
        self._text = _Growing(len(prompt))

    def propose(self, tokens: Sequence[int], limit: int, generated: int) -> tuple[list[int], int]:
        """(drafts, match length): at most `limit` tokens that followed the longest match.

        generated: how many of `tokens` are the answer's. A predicted answer is expected from its
        beginning, as long as the answer is too short to be looked up in it.
        """
        if limit <= 0:
            return [], 0
        if generated < GRAM and len(self._prediction) > generated:
            begun = list(tokens[len(tokens) - generated :])
            if begun == self._prediction[:generated]:
                return self._prediction[generated : generated + limit], _LONGEST
        self._text.extend(tokens)
        if len(tokens) < GRAM:
            return [], 0
        gram = tuple(tokens[-GRAM:])
        best: list[int] = []
        longest = 0
        own = [*self._begun.places(gram), *self._text.places(gram)][-_PLACES:]
        for places, corpus in (
            (self._predicted.places(gram), self._prediction),
            (own, tokens),
        ):
            for end in reversed(places):
                length = _match(corpus, end, tokens)
                if length > longest:
                    best, longest = list(corpus[end : end + limit]), length
        return best, longest


def _match(corpus: Sequence[int], end: int, tokens: Sequence[int]) -> int:
    """How many tokens before `end` in the corpus equal the last tokens."""
    limit = min(end, len(tokens), _LONGEST)
    length = GRAM
    while length < limit and corpus[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
