"""What stands beside the target's logits and says which tokens may come: a grammar, an end to thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Guide(Protocol):
    """The state of one answer; it advances with each token kept.

    narrows: it forbids something at most places, so that what is drafted without it is seldom right.
    """

    narrows: bool

    def begin_round(self) -> bool:
        """Return whether it can answer in the round that begins; False: its sequence sits this one out."""

    def wait(self, seconds: float) -> None:
        """Wait at most so long until it can answer, where it cannot yet."""

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """(n_vocab,): which tokens may come next; None: all of them."""

    def consume(self, token: int) -> None:
        """Advance by one token, which the mask allowed."""

    def take_back(self, count: int) -> None:
        """Be as before the last `count` tokens that were consumed; at most those of one pass."""

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could come next, in this order."""

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says."""


class Both:
    """Two guides of one answer: the end of its thoughts, and what holds in it. A Guide itself."""

    def __init__(self, first: Guide, second: Guide) -> None:
        """`first` forces tokens before `second` does."""
        self._guides = first, second
        self.narrows = first.narrows or second.narrows

    def begin_round(self) -> bool:
        ready = [guide.begin_round() for guide in self._guides]  # each is asked
        return all(ready)

    def wait(self, seconds: float) -> None:
        for guide in self._guides:
            guide.wait(seconds)

    def mask(self) -> npt.NDArray[np.bool_] | None:
        first, second = (each.mask() for each in self._guides)
        if first is None or second is None:
            return second if first is None else first
        both: npt.NDArray[np.bool_] = first & second
        return both if both.any() else first

    def consume(self, token: int) -> None:
        for each in self._guides:
            each.consume(token)

    def take_back(self, count: int) -> None:
        for each in self._guides:
            each.take_back(count)

    def valid(self, tokens: Sequence[int]) -> int:
        return min(each.valid(tokens) for each in self._guides)

    def forced(self) -> list[int]:
        first, second = self._guides
        return first.forced() or second.forced()
