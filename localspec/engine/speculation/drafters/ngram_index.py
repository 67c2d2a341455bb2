"""The index of n-grams: where the last tokens of a text occurred before, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRAM_TOKENS = 3  # shortest match worth following
MAX_MATCH_TOKENS = 48  # longer matches are not measured
MAX_POSITIONS = 8  # latest occurrences that are compared for the longest match
# Bits of a token id in a gram's key; no vocabulary has two million tokens.
_BITS = 63 // GRAM_TOKENS


class SortedGrams:
    """The ends of all n-grams of a fixed text. It takes about 0.1 µs and 16 bytes per token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        text = np.array(tokens, np.int64)
        # The position after each gram. The one at the very end has nothing after it.
        ends = max(len(text) - GRAM_TOKENS, 0)
        keys = np.zeros(ends, np.int64)
        for offset in range(GRAM_TOKENS):
            keys = keys << _BITS | text[offset : offset + ends]
        self._order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys = keys[self._order]

    def places(self, gram: Sequence[int]) -> list[int]:
        """Return the latest MAX_POSITIONS ends of a gram, in order."""
        key = 0
        for token in gram:
            key = key << _BITS | token
        first = self._keys.searchsorted(key, "left")
        last = int(self._keys.searchsorted(key, "right"))
        ends = self._order[max(int(first), last - MAX_POSITIONS) : last]
        return [int(place) + GRAM_TOKENS for place in ends]


class GrowingGrams:
    """The ends of all n-grams of a growing text, from a position on."""

    def __init__(self, start: int) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._n_indexed = max(start, GRAM_TOKENS)

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._n_indexed, len(tokens)):
            # `end` is the position after the gram, so a gram at the very end does not match itself.
            gram = tuple(tokens[end - GRAM_TOKENS : end])
            places = self._ends.setdefault(gram, [])
            places.append(end)
            if len(places) > MAX_POSITIONS:
                del places[0]
        self._n_indexed = max(self._n_indexed, len(tokens))

    def places(self, gram: tuple[int, ...]) -> list[int]:
        return self._ends.get(gram, [])


def match(text: Sequence[int], end: int, tokens: Sequence[int], known: int = GRAM_TOKENS) -> int:
    """Return how many tokens before `end` in `text` equal the last of `tokens`; `known` surely do."""
    limit = min(end, len(tokens), MAX_MATCH_TOKENS)
    length = known
    while length < limit and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
