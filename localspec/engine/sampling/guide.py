"""The interface of guides, which restrict the next token beside the target's logits.

A grammar is a guide, and so is a limit on the length of thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Guide(Protocol):
    """The constraint on one answer; its state advances with guide accepted token.

    narrows: whether it forbids tokens at most places. Drafts made without its mask are then rarely
    accepted.
    """

    narrows: bool

    def begin_round(self) -> bool:
        """Return whether the guide can answer in the round that begins; if not, its sequence skips it."""

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the guide can answer, if it cannot yet."""

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may come next, of shape (n_vocab,); None means all of them."""

    def consume(self, token: int) -> None:
        """Advance by one token, which the mask must allow."""

    def take_back(self, count: int) -> None:
        """Undo the last `count` consumed tokens, at most as many as one pass consumes."""

    def valid(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, could come next in this order."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, whatever the logits."""


class Both:
    """A guide that combines two guides, such as a limit on thinking and a grammar for the answer."""

    def __init__(self, first: Guide, second: Guide) -> None:
        """Combine two guides. Where both force tokens, or no token satisfies both, `first` prevails."""
        self._guides = first, second
        self.narrows = first.narrows or second.narrows

    def begin_round(self) -> bool:
        # A list and not a generator: every guide must begin the round, even if one is not ready.
        ready = [guide.begin_round() for guide in self._guides]
        return all(ready)

    def wait(self, seconds: float) -> None:
        for guide in self._guides:
            guide.wait(seconds)

    def mask(self) -> npt.NDArray[np.bool_] | None:
        first, second = (guide.mask() for guide in self._guides)
        if first is None or second is None:
            return second if first is None else first
        both: npt.NDArray[np.bool_] = first & second
        return both if both.any() else first

    def consume(self, token: int) -> None:
        for guide in self._guides:
            guide.consume(token)

    def take_back(self, count: int) -> None:
        for guide in self._guides:
            guide.take_back(count)

    def valid(self, tokens: Sequence[int]) -> int:
        return min(guide.valid(tokens) for guide in self._guides)

    def forced(self) -> list[int]:
        first, second = self._guides
        return first.forced() or second.forced()
