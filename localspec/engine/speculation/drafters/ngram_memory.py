"""The memory of earlier requests' tokens, to draft from.

Its size is bounded, and a conversation's tokens are forgotten with the conversation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.speculation.drafters.ngram_index import match

KEY_TOKENS = 6  # tokens in a row that are looked up; a text of another request needs a longer match
CAPACITY_TOKENS = 1 << 20  # with their index 12 MiB
WINDOW_TOKENS = 512  # tokens returned of what followed
_CONTEXT_TOKENS = 64  # tokens returned before them, to measure the match
_HASH_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)  # fmt: skip
_HASH_FACTOR_INTS = [int(factor) for factor in _HASH_FACTORS]
_WORD_MASK = (1 << 64) - 1


class _Span(NamedTuple):
    """Where the tokens of one request lie, and the conversation that they belong to."""

    start: int
    end: int
    conversation: str | None


class Memory:
    """A ring of the last CAPACITY_TOKENS tokens. A lookup takes microseconds.

    A position is found by the hash of its last KEY_TOKENS tokens, of equal ones the latest. The tokens are
    then compared, so that nothing that was overwritten or forgotten is ever found.
    """

    def __init__(self, capacity: int = CAPACITY_TOKENS) -> None:
        self._capacity = capacity
        self._bits = max(capacity.bit_length(), 8)
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)  # allocated at first use
        # Per hash, the end of a key; 0: none.
        self._places: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._next = 0
        self._spans: deque[_Span] = deque()

    def keep(self, tokens: Sequence[int], conversation: str | None) -> None:
        """Add the tokens of a request, or the end of them if they exceed the capacity."""
        text = np.array(tokens[-self._capacity :], np.int32)
        if len(text) <= KEY_TOKENS:
            return
        if not len(self._tokens):
            self._tokens = np.full(self._capacity, -1, np.int32)
            self._places = np.zeros(1 << self._bits, np.int32)
        if self._next + len(text) > self._capacity:
            self._overwrite(self._next, self._capacity)
            self._next = 0
        start, end = self._next, self._next + len(text)
        self._overwrite(start, end)
        self._spans.append(_Span(start, end, conversation))
        self._tokens[start:end] = text
        if end < self._capacity:
            self._tokens[end] = -1  # the tokens behind belong to another text
        wide = text.astype(np.uint64)
        # Nothing follows the key at the very end.
        hashes = np.zeros(len(text) - KEY_TOKENS, np.uint64)
        for offset in range(KEY_TOKENS):
            hashes += wide[offset : offset + len(hashes)] * _HASH_FACTORS[offset]
        slots = hashes >> np.uint64(64 - self._bits)
        self._places[slots] = np.arange(start + KEY_TOKENS, end, dtype=np.int32)
        self._next = end

    def _overwrite(self, start: int, end: int) -> None:
        """Remove all requests with tokens in [start, end), which are the oldest."""
        while self._spans and start < self._spans[0].end and self._spans[0].start < end:
            old = self._spans.popleft()
            self._tokens[old.start : old.end] = -1

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int, int] | None:
        """Find the longest match with the last tokens.

        Returns a text, the position in it after the match, and the length of the match.
        """
        if not self._spans or len(tokens) < KEY_TOKENS:
            return None
        key = tokens[-KEY_TOKENS:]
        hashed = (
            sum(token * factor for token, factor in zip(key, _HASH_FACTOR_INTS, strict=True))
            & _WORD_MASK
        )
        place = int(self._places[hashed >> (64 - self._bits)])
        if not place or self._tokens[place - KEY_TOKENS : place].tolist() != key:
            return None
        start = max(place - _CONTEXT_TOKENS, 0)
        text = self._tokens[start : place + WINDOW_TOKENS].tolist()
        place -= start
        if -1 in text:
            text = text[: text.index(-1, place)] if -1 in text[place:] else text
        return text, place, match(text, place, tokens, KEY_TOKENS)

    def forget(self, conversation: str | None) -> None:
        """Remove the tokens of a conversation, or of all if it is None."""
        if conversation is None:
            self._tokens = self._places = np.empty(0, np.int32)
            self._next = 0
            self._spans.clear()
            return
        for span in self._spans:
            if span.conversation == conversation:
                self._tokens[span.start : span.end] = -1
        self._spans = deque(span for span in self._spans if span.conversation != conversation)

    def __len__(self) -> int:
        """Return the number of tokens that can be found."""
        return sum(span.end - span.start for span in self._spans)
