"""Prompt lookup: what followed the last tokens when they occurred before, in the prompt, the answer so
far, or a text the caller predicts (Saxena 2023, "prompt lookup decoding"; OpenAI's `prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3  # shortest match worth following
_PLACES = 8  # latest occurrences compared for the longest match
_LONGEST = 48  # matches are not measured further than this
# Match length → the confidence bucket (see depth.CONFIDENCE_EDGES) whose calibration it uses.
_LENGTH_EDGES = (4, 5, 6, 8, 11, 16, 24, 32, 48)


def length_bucket(length: int) -> int:
    """Bucket 0…9 of a match of this many tokens."""
    return sum(length >= edge for edge in _LENGTH_EDGES)


class _Index:
    """Where each GRAM-gram of a growing token list ends."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._done, GRAM), len(tokens)):
            # `end` is the place after the gram, so a gram at the very end is not its own match
            gram = tuple(tokens[end - GRAM : end])
            places = self._ends.setdefault(gram, [])
            places.append(end)
            if len(places) > _PLACES:
                del places[0]
        self._done = max(self._done, len(tokens))

    def places(self, gram: tuple[int, ...]) -> Sequence[int]:
        return self._ends.get(gram, ())


class Lookup:
    """Lookup for one request. `propose` costs microseconds and no pass."""

    kind = "ngram"

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._text = _Index()
        self._prediction = list(prediction)
        self._predicted = _Index()
        self._predicted.extend(self._prediction)

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
        for index, corpus in ((self._predicted, self._prediction), (self._text, tokens)):
            for end in reversed(index.places(gram)):
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
