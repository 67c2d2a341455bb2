"""The cost of reading prompts on this machine, learned from the passes that read them.

The token at position p takes a + b·p seconds. The weights' part a is the same everywhere. Attention's part
grows with the text before it, and exceeds a many times in a long text. Both are fitted to the passes, where
older ones count less. Until deep passes were observed, the ratio of b to a comes from the model's sizes.
"""

from __future__ import annotations

import math

from localspec.engine.llama import Model
from localspec.protocol.frames import PromptCost

MEMORY_TOKENS = 16384  # after this many tokens, earlier observations weigh e times less
# The expected ratio of b to a weighs as much as this many tokens read at the end of the context. So passes
# over short prompts, whose times vary a little, cannot determine what deep ones cost.
EXPECTATION_TOKENS = 16
SLOWDOWN_DECAY = 0.2  # how fast a slowdown is forgotten; a new one is believed at once


def deeper(model: Model) -> float:
    """Return b / a: the cost that each token before adds to a token, relative to that of the first.

    It compares attention's multiplications with those of the weights. This is a first guess, because some
    models attend only in some layers, or use only a part of their weights for a token.
    """
    if model.recurrent:
        return 0.0
    return 2 * model.n_layer * model.n_state / max(model.n_params, 1)


class ReadingCost:
    """The cost of a prompt's tokens by their position.

    first_s: seconds per token until one was read. deeper: b / a, until deep passes were observed. n_ctx: how
    deep a text can be.
    """

    def __init__(self, first_s: float, deeper: float, n_ctx: int) -> None:
        # The average, to predict how long a prompt takes.
        self.expected = PromptCost(first_s, deeper * first_s)
        self._deeper = deeper
        # The expectation that b is `deeper` · a, as a sum of squares like those of the passes.
        self._trust = EXPECTATION_TOKENS * float(n_ctx) ** 2
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums, by tokens
        self._slowdown = 1.0  # of recent passes, relative to the expected time

    def at(self, position: float) -> float:
        """Return the seconds to plan for the token at a position."""
        return self._slowdown * self.expected.at(position)

    def observe(self, tokens: int, position: float, spent_s: float) -> None:
        """Learn from a pass over `tokens` tokens at `position` on average, which took `spent_s`."""
        is_first, keep, token_s = self._n == 0, math.exp(-tokens / MEMORY_TOKENS), spent_s / tokens
        self._n = self._n * keep + tokens
        self._x = self._x * keep + tokens * position
        self._y = self._y * keep + tokens * token_s
        self._xx = self._xx * keep + tokens * position**2
        self._xy = self._xy * keep + tokens * position * token_s
        self.expected = self._fit()
        ratio = token_s / self.expected.at(position)
        slowdown = ratio if is_first else self._slowdown
        self._slowdown = max(ratio, slowdown + SLOWDOWN_DECAY * (ratio - slowdown))

    def _fit(self) -> PromptCost:
        """Fit a + b·x to the passes, and b − deeper·a, by least squares; neither is ever below zero."""
        k, trust = self._deeper, self._trust
        aa, ab, bb = self._n + trust * k**2, self._x - trust * k, self._xx + trust
        det = aa * bb - ab**2
        a, b = (self._y * bb - self._xy * ab) / det, (self._xy * aa - self._y * ab) / det
        # The machine was busy in between, so take the average for all positions.
        if b < 0 or a <= 0:
            return PromptCost(self._y / self._n)
        return PromptCost(a, b)
