"""A guide that limits the number of tokens in a model's thoughts.

When the limit is reached, the marker that closes the thoughts is forced, as if the model had written it,
and the answer follows. A marker may be one control token or several text tokens, so markers are found in
the text. Forced tokens are handled like those of a grammar: drafts that differ are cut, and the marker
itself is drafted at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.chat.markers import AnswerMarkers, Place, as_bytes
from localspec.engine.sampling.guide import Guide

NO_LIMIT = 1 << 60  # tokens
_MAX_STATES = 128  # States kept for `take_back`; one pass consumes fewer tokens.
_GRACE_TOKENS = 8  # Tokens beyond the limit in which a begun character or marker may be completed.


@dataclass(frozen=True, slots=True)
class ThoughtMarker:
    """The texts that open and close thoughts. `tokens` are those of the closing text."""

    opening: str
    closing: str
    tokens: list[int]


class _State(NamedTuple):
    """The state after one token of the answer.

    held: the end of the text that may begin a marker. last: the last characters, one for each byte.
    spent: number of tokens in thoughts so far. forced: number of tokens of the closing marker that were
    forced.
    """

    place: Place
    held: str = ""
    last: str = ""
    spent: int = 0
    forced: int = 0


class ThoughtLimit(Guide):
    """A guide that lets all thoughts of one answer together have at most `limit` tokens."""

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
        pairs = [(as_bytes(marker.opening), as_bytes(marker.closing)) for marker in markers]
        self._markers = AnswerMarkers(pairs, as_bytes(tail), channels=False)
        self._closing = {as_bytes(marker.closing): marker.tokens for marker in markers}
        self._piece = piece
        self._n_vocab = n_vocab
        self._states = [_State(self._markers.start)]

    @property
    def is_thinking(self) -> bool:
        return self._states[-1].place.region == "thoughts"

    @property
    def is_open(self) -> bool:
        """Whether the answer is in its thoughts, and no marker is being forced that ends them."""
        return self.is_thinking and self._states[-1].spent < self._limit

    def close(self) -> None:
        """End the thoughts as soon as a begun character or marker is complete."""
        self._limit = self._states[-1].spent

    def leave(self) -> None:
        """Note that the text is the answer now, because a call has ended the thoughts."""
        if self.is_thinking:
            self._states[-1] = self._states[-1]._replace(place=Place("text"), held="")

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
        if state.place.region != "thoughts" or state.spent < self._limit:
            return []
        tokens = self._closing[state.place.close]
        # A marker that is a single token has no parts.
        has_part = len(tokens) > 1 and len(state.held) > 1
        is_incomplete = has_part or _ends_within_character(state.last)
        if is_incomplete and not state.forced and 0 < state.spent < self._limit + _GRACE_TOKENS:
            return []
        return tokens[state.forced :]

    def _next_state(self, state: _State, token: int) -> _State:
        if state.place.region == "text":
            return state
        text = state.held + self._piece(token).decode("latin-1")
        place, held = self._markers.follow(state.place, text)
        if state.place.region != "thoughts":
            return _State(place, held, spent=state.spent)
        forced = state.forced + bool(self._forced(state))
        if place.region == "thoughts" and forced < len(self._closing[place.close]):
            return _State(place, held, text[-4:], state.spent + 1, forced)
        # All of the marker was forced, or the model has written it.
        place, held = (Place("behind"), "") if place.region == "thoughts" else (place, held)
        return _State(place, held, spent=state.spent)


def _ends_within_character(text: str) -> bool:
    """Return whether UTF-8 ends in the middle of a character, with one of these for each byte."""
    for back, char in enumerate(reversed(text), start=1):
        if char < "\x80":
            return False
        if char >= "\xc0":
            return back < (2 if char < "\xe0" else 3 if char < "\xf0" else 4)
    return False
