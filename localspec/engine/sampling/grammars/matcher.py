"""A guide that applies one grammar to a whole answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.sources import reason
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected

Mask = npt.NDArray[np.bool_]


class WholeMatcher(Guide):
    """A guide that applies a grammar from the first token of an answer on."""

    forbids_often = True

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self.matcher = matcher
        self.n_vocab = n_vocab
        self._tokens_after_end = 0  # Tokens consumed after the grammar had ended.

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self.matcher.is_stopped()

    def mask(self) -> Mask:
        """Return the mask as `Guide.mask` does, which allows all tokens once the grammar has ended.

        Raises:
            GrammarRejected: the grammar ran into its limits.
        """
        allowed: Mask = np.frombuffer(self.matcher.compute_logit_bias(), dtype=np.uint8) != 0
        self._check()
        return allowed[: self.n_vocab]

    def consume(self, token: int) -> None:
        if self.matcher.is_stopped():
            self._tokens_after_end += 1
            return
        self.matcher.consume_token(token)
        self._check()

    def take_back(self, count: int) -> None:
        consumed = max(count - self._tokens_after_end, 0)
        self._tokens_after_end = max(self._tokens_after_end - count, 0)
        self.matcher.rollback(consumed)
        self._check()

    def count_valid(self, tokens: Sequence[int]) -> int:
        return int(self.matcher.validate_tokens(list(tokens)))

    def forced_tokens(self) -> list[int]:
        return [int(token) for token in self.matcher.compute_ff_tokens()]

    def _check(self) -> None:
        if self.matcher.is_error():
            raise GrammarRejected(f"The grammar ran into its limits: {reason(self.matcher)}")
