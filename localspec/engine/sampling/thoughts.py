"""A guide that limits the number of tokens in a model's thoughts.

When the limit is reached, the marker that closes the thoughts is forced, as if the model had written it, and
the answer follows. A marker may be one control token or several text tokens, so markers are found in the
text. Forced tokens are handled like those of a grammar: drafts that differ are cut, and the marker itself is
drafted at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

NO_LIMIT = 1 << 60  # tokens
_MAX_STATES = 128  # States kept for `take_back`; one pass consumes fewer tokens.
_GRACE_TOKENS = 8  # Tokens beyond the limit in which a begun character or marker may be completed.


@dataclass(frozen=True, slots=True)
class ThoughtMarker:
    """The texts that open and close thoughts. `tokens` are those of the closing text."""

    opening: bytes
    closing: bytes
    tokens: list[int]


class _State(NamedTuple):
    """The state after one token of the answer.

    text: the answer so far while thoughts may still begin; later the end of the thoughts. spent: number of
    tokens in the thoughts so far. forced: number of marker tokens that were forced.
    """

    phase: Literal["before", "thinking", "over"]
    text: bytes = b""
    marker: ThoughtMarker | None = None
    spent: int = 0
    forced: int = 0


class ThoughtLimit:
    """A guide that lets the thoughts of one answer have at most `limit` tokens."""

    forbids_often = False

    def __init__(
        self,
        limit: int,
        markers: Sequence[ThoughtMarker],
        tail: str,
        piece: Callable[[int], bytes],
        n_vocab: int,
    ) -> None:
        """Begin the answer. tail: the end of the prompt, which may open the thoughts already.

        piece: returns a token's bytes.
        """
        self._limit = limit
        self._markers = markers
        self._piece = piece
        self._n_vocab = n_vocab
        prompt_end = tail.rstrip().encode()
        marker = next((m for m in markers if prompt_end.endswith(m.opening.rstrip())), None)
        self._states = [_State("thinking", marker=marker) if marker else _State("before")]

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is in its thoughts."""
        return self._states[-1].phase == "thinking"

    @property
    def is_open(self) -> bool:
        """Whether the answer is in its thoughts, and no marker is being forced that ends them."""
        return self.is_thinking and self._states[-1].spent < self._limit

    def close(self) -> None:
        """End the thoughts as soon as a begun character or marker is complete."""
        self._limit = self._states[-1].spent

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

    def mask(self) -> npt.NDArray[np.bool_] | None:
        forced = self.forced_tokens()
        if not forced:
            return None
        allowed = np.zeros(self._n_vocab, dtype=np.bool_)
        allowed[forced[0]] = True
        return allowed

    def consume(self, token: int) -> None:
        self._states.append(self._next_state(self._states[-1], token))
        del self._states[:-_MAX_STATES]

    def take_back(self, count: int) -> None:
        if count:
            del self._states[-count:]

    def count_valid(self, tokens: Sequence[int]) -> int:
        state = self._states[-1]
        for index, token in enumerate(tokens):
            forced = self._forced(state)
            if forced and forced[0] != token:
                return index
            state = self._next_state(state, token)
        return len(tokens)

    def forced_tokens(self) -> list[int]:
        return self._forced(self._states[-1])

    def _forced(self, state: _State) -> list[int]:
        """Return the tokens of the closing marker that must follow `state`."""
        if state.phase != "thinking" or state.spent < self._limit or state.marker is None:
            return []
        incomplete = _ends_within_character(state.text) or _ends_with_part_of(
            state.text, state.marker
        )
        if incomplete and not state.forced and 0 < state.spent < self._limit + _GRACE_TOKENS:
            return []
        return state.marker.tokens[state.forced :]

    def _next_state(self, state: _State, token: int) -> _State:
        """Return the state that follows `state` after `token`."""
        if state.phase == "over":
            return state
        forced = state.forced + bool(self._forced(state))
        text = state.text + self._piece(token)
        if state.phase == "before":
            return self._open(text)
        assert state.marker is not None
        if state.marker.closing in text or forced == len(state.marker.tokens):
            return _State("over")
        text = text[-len(state.marker.closing) :]
        return _State("thinking", text, state.marker, state.spent + 1, forced)

    def _open(self, text: bytes) -> _State:
        """Return the state after the first text of the answer, which may open the thoughts."""
        stripped = text.lstrip()
        for marker in self._markers:
            if stripped.startswith(marker.opening):
                return _State("thinking", marker=marker)
        may_open = any(marker.opening.startswith(stripped) for marker in self._markers)
        return _State("before", text) if may_open else _State("over")


def _ends_with_part_of(text: bytes, marker: ThoughtMarker) -> bool:
    """Return whether `text` ends with part of the closing marker; a single token has no parts."""
    if len(marker.tokens) == 1:
        return False
    closing = marker.closing
    return any(text.endswith(closing[:size]) for size in range(2, len(closing)))


def _ends_within_character(text: bytes) -> bool:
    """Return whether UTF-8 `text` ends in the middle of a character."""
    for back, byte in enumerate(reversed(text[-4:]), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
