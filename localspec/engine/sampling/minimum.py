"""A guide that enforces the minimum length of an answer (`min_tokens`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class MinimumLength:
    """A guide that forbids the tokens in `ends` at the first `min_tokens` places of an answer."""

    narrows = False

    def __init__(self, min_tokens: int, ends: Iterable[int], n_vocab: int) -> None:
        self._min_tokens = min_tokens
        self._ends = frozenset(ends)
        self._count = 0
        self._allowed = np.ones(n_vocab, dtype=np.bool_)
        self._allowed[list(self._ends)] = False

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

    def mask(self) -> npt.NDArray[np.bool_] | None:
        return self._allowed if self._count < self._min_tokens else None

    def consume(self, token: int) -> None:
        self._count += 1

    def take_back(self, count: int) -> None:
        self._count -= count

    def valid(self, tokens: Sequence[int]) -> int:
        for index, token in enumerate(tokens[: max(self._min_tokens - self._count, 0)]):
            if token in self._ends:
                return index
        return len(tokens)

    def forced(self) -> list[int]:
        return []
