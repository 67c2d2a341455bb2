"""The end of a model's thoughts where they may have only so many tokens: the marker that closes them is
forced, as if the model had written it, and the answer follows.

A marker may be one control token or several of text, so markers are looked for in the text. Forced tokens
take the way of a grammar's: drafts that differ are cut, and the marker itself is drafted, for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

_KEPT = 128  # states that can be gone back to; a pass brings fewer tokens
_GRACE = 8  # tokens beyond the limit in which a character or the marker may be completed


@dataclass(frozen=True, slots=True)
class Marker:
    """What opens thoughts, and what closes them, as text and as tokens."""

    opening: bytes
    closing: bytes
    tokens: list[int]


class _State(NamedTuple):
    """text: what has come of the answer, or the last of the thoughts. spent: the thoughts' tokens so far.
    forced: how many tokens of the marker have been forced."""

    phase: Literal["before", "thinking", "over"]
    text: bytes = b""
    marker: Marker | None = None
    spent: int = 0
    forced: int = 0


class Thoughts:
    """A Guide: the thoughts of one answer, `limit` tokens of them at most."""

    narrows = False

    def __init__(
        self,
        limit: int,
        markers: Sequence[Marker],
        tail: str,
        piece: Callable[[int], bytes],
        n_vocab: int,
    ) -> None:
        """tail: the prompt's last characters, which may have opened them. piece: a token's bytes."""
        self._limit = limit
        self._markers = markers
        self._piece = piece
        self._n_vocab = n_vocab
        end = tail.rstrip().encode()
        opened = next((each for each in markers if end.endswith(each.opening.rstrip())), None)
        self._states = [_State("thinking", marker=opened) if opened else _State("before")]

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

    def mask(self) -> npt.NDArray[np.bool_] | None:
        forced = self.forced()
        if not forced:
            return None
        allowed = np.zeros(self._n_vocab, dtype=np.bool_)
        allowed[forced[0]] = True
        return allowed

    def consume(self, token: int) -> None:
        self._states.append(self._after(self._states[-1], token))
        del self._states[:-_KEPT]

    def take_back(self, count: int) -> None:
        if count:
            del self._states[-count:]

    def valid(self, tokens: Sequence[int]) -> int:
        state = self._states[-1]
        for at, token in enumerate(tokens):
            forced = self._forced(state)
            if forced and forced[0] != token:
                return at
            state = self._after(state, token)
        return len(tokens)

    def forced(self) -> list[int]:
        return self._forced(self._states[-1])

    def _forced(self, state: _State) -> list[int]:
        if state.phase != "thinking" or state.spent < self._limit or state.marker is None:
            return []
        waits = _unfinished(state.text) or _begins(state.text, state.marker)
        if waits and not state.forced and 0 < state.spent < self._limit + _GRACE:
            return []
        return state.marker.tokens[state.forced :]

    def _after(self, state: _State, token: int) -> _State:
        """The state that a token leads to."""
        if state.phase == "over":
            return state
        forced = state.forced + bool(self._forced(state))
        text = state.text + self._piece(token)
        if state.phase == "before":
            return self._opened(text)
        assert state.marker is not None
        if state.marker.closing in text or forced == len(state.marker.tokens):
            return _State("over")
        text = text[-len(state.marker.closing) :]
        return _State("thinking", text, state.marker, state.spent + 1, forced)

    def _opened(self, text: bytes) -> _State:
        begun = text.lstrip()
        for marker in self._markers:
            if begun.startswith(marker.opening):
                return _State("thinking", marker=marker)
        waits = any(each.opening.startswith(begun) for each in self._markers)
        return _State("before", text) if waits else _State("over")


def _begins(text: bytes, marker: Marker) -> bool:
    """Does `text` end with a part of the closing marker? One that is a single token comes whole."""
    if len(marker.tokens) == 1:
        return False
    closing = marker.closing
    return any(text.endswith(closing[:size]) for size in range(2, len(closing)))


def _unfinished(text: bytes) -> bool:
    """Does it end within a character?"""
    for back, byte in enumerate(reversed(text[-4:]), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
