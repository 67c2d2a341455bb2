"""What a grammar says of an answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.sources import one_line
from localspec.errors import GrammarRejected

Mask = npt.NDArray[np.bool_]


class WholeMatcher:
    """A Guide: the state of one answer in a language that holds from the first token on."""

    narrows = True

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._passed = 0  # tokens after the end, which the grammar has not seen

    @property
    def ended(self) -> bool:
        """It is complete, and nothing can follow."""
        return self._matcher.is_stopped()

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

    def mask(self) -> Mask:
        """As a Guide's; all of them once the grammar has ended.

        Raises:
            GrammarRejected: the grammar ran into its limits.
        """
        allowed: Mask = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        self._check()
        return allowed[: self._n_vocab]

    def consume(self, token: int) -> None:
        if self._matcher.is_stopped():
            self._passed += 1
            return
        self._matcher.consume_token(token)
        self._check()

    def take_back(self, count: int) -> None:
        seen = max(count - self._passed, 0)
        self._passed = max(self._passed - count, 0)
        self._matcher.rollback(seen)
        self._check()

    def valid(self, tokens: Sequence[int]) -> int:
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        return [int(token) for token in self._matcher.compute_ff_tokens()]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarRejected(f"The grammar ran into its limits: {reason(self._matcher)}")


def reason(matcher: LLMatcher) -> str:
    """Its error in one line."""
    return one_line(str(matcher.get_error()).strip())
