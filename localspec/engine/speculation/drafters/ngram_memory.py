"""What this process has read and written in earlier requests, to draft from: bounded, and forgotten
with the conversation it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.speculation.drafters.ngram_index import match

KEY = 6  # tokens in a row that are looked up: what was said elsewhere needs more to be believed
ROOM = 1 << 20  # tokens; with their places 12 MiB
WINDOW = 512  # tokens given of what followed
_BEFORE = 64  # tokens before them, to see how long the match is
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB], np.uint64)  # fmt: skip
_FACTOR = [int(factor) for factor in _FACTORS]
_WORD = (1 << 64) - 1


class _Kept(NamedTuple):
    """Where the tokens of one request lie, and whose conversation it was."""

    start: int
    end: int
    conversation: str | None


class Memory:
    """The last ROOM tokens, the oldest overwritten first. Looking one place up takes microseconds.

    A place is found by its last KEY tokens, of equal ones the latest; that it is the right one is seen
    by comparing, so what was overwritten or forgotten is never found.
    """

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._bits = max(room.bit_length(), 8)
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)  # made when there is something
        self._places: npt.NDArray[np.int32] = np.empty(0, np.int32)  # by hash: after a key; 0: none
        self._next = 0
        self._kept: deque[_Kept] = deque()

    def keep(self, tokens: Sequence[int], conversation: str | None) -> None:
        """What a request has read and written, in one piece; of more than there is room for, the end."""
        text = np.array(tokens[-self._room :], np.int32)
        if len(text) <= KEY:
            return
        if not len(self._tokens):
            self._tokens = np.full(self._room, -1, np.int32)
            self._places = np.zeros(1 << self._bits, np.int32)
        if self._next + len(text) > self._room:
            self._overwrite(self._next, self._room)
            self._next = 0
        start, end = self._next, self._next + len(text)
        self._overwrite(start, end)
        self._kept.append(_Kept(start, end, conversation))
        self._tokens[start:end] = text
        if end < self._room:
            self._tokens[end] = -1  # what lies behind is another text
        wide = text.astype(np.uint64)
        hashes = np.zeros(
            len(text) - KEY, np.uint64
        )  # the key at the very end has nothing after it
        for at in range(KEY):
            hashes += wide[at : at + len(hashes)] * _FACTORS[at]
        slots = hashes >> np.uint64(64 - self._bits)
        self._places[slots] = np.arange(start + KEY, end, dtype=np.int32)
        self._next = end

    def _overwrite(self, start: int, end: int) -> None:
        """What lies there, the oldest there is, goes whole."""
        while self._kept and start < self._kept[0].end and self._kept[0].start < end:
            old = self._kept.popleft()
            self._tokens[old.start : old.end] = -1

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int, int] | None:
        """A text, the place in it after the longest match with the last tokens, and the match's length."""
        if not self._kept or len(tokens) < KEY:
            return None
        last = tokens[-KEY:]
        mixed = sum(token * factor for token, factor in zip(last, _FACTOR, strict=True)) & _WORD
        place = int(self._places[mixed >> (64 - self._bits)])
        if not place or self._tokens[place - KEY : place].tolist() != last:
            return None
        start = max(place - _BEFORE, 0)
        text = self._tokens[start : place + WINDOW].tolist()
        place -= start
        if -1 in text:
            text = text[: text.index(-1, place)] if -1 in text[place:] else text
        return text, place, match(text, place, tokens, KEY)

    def forget(self, conversation: str | None) -> None:
        """Nothing of a conversation is found any more; None: nothing of any."""
        if conversation is None:
            self._tokens = self._places = np.empty(0, np.int32)
            self._next = 0
            self._kept.clear()
            return
        for kept in self._kept:
            if kept.conversation == conversation:
                self._tokens[kept.start : kept.end] = -1
        self._kept = deque(each for each in self._kept if each.conversation != conversation)

    def __len__(self) -> int:
        """Tokens that can be found."""
        return sum(kept.end - kept.start for kept in self._kept)
