"""What reading prompts costs on this machine, learned from the passes that read them.

The token at position p takes a + b·p seconds: the weights' share is the same everywhere, attention's grows
with what is before it, to many times the weights' in a long text. Both are fitted to the passes, those
of long ago counting less; until deep ones have been seen, what is known of the model says how b is to a.
"""

from __future__ import annotations

import math

from localspec.engine.llama import Model
from localspec.protocol.frames import PromptCost

MEMORY = 16384  # tokens, after which those read before count e times less
# What is known of the model counts as much as so many tokens, read at the end of the context: passes of
# short prompts, each a little slower or faster than the others, are not to say what deep ones cost.
EXPECTED = 16
RECOVERY = 0.2  # how fast dearer passes are forgotten, each of which is believed at once


def deeper(model: Model) -> float:
    """How much each token before another adds to what reading that costs, as a share of the first's:
    attention's multiplications to those of the weights. A first guess: there are models that attend in
    some layers alone, or use a part of their weights for a token.
    """
    if model.recurrent:
        return 0.0
    return 2 * model.n_layer * model.n_state / max(model.n_params, 1)


class ReadingCost:
    """first_s: of a token, until one was read. deeper: b as a share of a, as long as no deep ones were.
    n_ctx: how deep a text can be.
    """

    def __init__(self, first_s: float, deeper: float, n_ctx: int) -> None:
        self.expected = PromptCost(
            first_s, deeper * first_s
        )  # on average, to say how long it takes
        self._deeper = deeper
        # The expectation that b is `deeper` · a, as a sum of squares like those of the passes.
        self._trust = EXPECTED * float(n_ctx) ** 2
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums, by tokens
        self._slower = 1.0  # than expected, of late

    def at(self, position: float) -> float:
        """Seconds of the token at a position that are to be reckoned with now."""
        return self._slower * self.expected.at(position)

    def observe(self, tokens: int, position: float, spent: float) -> None:
        """A pass over so many tokens, whose positions are `position` on average, took `spent` seconds."""
        first, keep, each = self._n == 0, math.exp(-tokens / MEMORY), spent / tokens
        self._n = self._n * keep + tokens
        self._x = self._x * keep + tokens * position
        self._y = self._y * keep + tokens * each
        self._xx = self._xx * keep + tokens * position**2
        self._xy = self._xy * keep + tokens * position * each
        self.expected = self._fit()
        ratio = each / self.expected.at(position)
        known = ratio if first else self._slower
        self._slower = max(ratio, known + RECOVERY * (ratio - known))

    def _fit(self) -> PromptCost:
        """Least squares of a + b·x over the passes, and of b − deeper·a; neither is ever below zero."""
        k, trust = self._deeper, self._trust
        aa, ab, bb = self._n + trust * k**2, self._x - trust * k, self._xx + trust
        det = aa * bb - ab**2
        a, b = (self._y * bb - self._xy * ab) / det, (self._xy * aa - self._y * ab) / det
        if b < 0 or a <= 0:  # the passes of a machine that was busy in between: all cost the same
            return PromptCost(self._y / self._n)
        return PromptCost(a, b)
