"""What a pass costs for the text before it, in addition to the cost of its width.

Attention reads every token before. At the end of a long text that is most of a pass, and there each row may
cost as much as the first, even where additional rows are cheap at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Rows = TypeVar("Rows", float, np.ndarray)

OBSERVATION_DECAY = 0.97  # what remains of earlier observations after a pass that is all attention
GUESS_WEIGHT = 0.05  # weight of the initial guess, in passes
CPU_GUESS_FACTOR = (
    20.0  # the guess weighs this much more on a CPU, which reads the cache once per row
)
# Minimal expected cost of each token before, as a share of the cost of the width. With it a cost that was
# believed to be zero can be learned. It is a tenth after 32 000 tokens.
MIN_SHARE_PER_TOKEN = 3e-6
MAX_RATIO = 3.0  # one pass counts as at most this many times the expected cost


class AttentionCost:
    """The cost d · (a · sequences + c · rows) in milliseconds, where d tokens are before a row on average.

    a is the cost of reading a text's cache once, however many rows need it, and c that of each row.
    row_ms: returns a guess of c. It comes from prompts, which have so many rows that a does not matter.
    known: (a, c) as learned before.
    shares: whether rows may share the reading of the cache, as on a GPU. Until wider passes were observed, a
    cost above the guess is then attributed to both a and c, and otherwise to c alone.
    """

    def __init__(
        self,
        row_ms: Callable[[], float],
        known: tuple[float, float] | None = None,
        shares: bool = False,
    ) -> None:
        self._sequence_weight = GUESS_WEIGHT if shares else GUESS_WEIGHT * CPU_GUESS_FACTOR
        self._row_ms = row_ms
        self._known = known
        self._ss = self._sw = self._ww = self._sy = self._wy = 0.0  # weighted sums over the passes

    def ms(self, rows: Rows, sequences: int, depth: float) -> Rows:
        """Return the expected cost of a pass whose rows have `depth` tokens before them on average."""
        sequence_cost, row_cost = self.costs
        return depth * (sequence_cost * sequences + row_cost * rows)

    @property
    def costs(self) -> tuple[float, float]:
        """(a, c): the least squares over the passes and the guess; neither is below zero."""
        a, c = self._known or (0.0, self._row_ms())
        ss, ww, sw = self._ss + self._sequence_weight, self._ww + GUESS_WEIGHT, self._sw
        sy, wy = self._sy + self._sequence_weight * a, self._wy + GUESS_WEIGHT * c
        det = ss * ww - sw**2
        a, c = (sy * ww - wy * sw) / det, (wy * ss - sy * sw) / det
        if a < 0:
            return 0.0, max(wy / ww, 0.0)
        return (max(sy / ss, 0.0), 0.0) if c < 0 else (a, c)

    def observe(self, rows: int, sequences: int, depth: float, ms: float, width_ms: float) -> float:
        """Learn from a pass that took `ms`, and return the part of it that its width has cost.

        width_ms: what the width was expected to cost. The deviation from the expected time is divided by
        the shares of both: a pass with little text before it says little about attention, and a deep one
        says little about widths.
        """
        expected = max(
            self.ms(float(rows), sequences, depth), MIN_SHARE_PER_TOKEN * depth * width_ms
        )
        share, ratio = expected / (expected + width_ms), ms / (expected + width_ms)
        if share > 0:
            weight, ms_per_depth = (
                share**2,
                expected * min(max(ratio, 1 / MAX_RATIO), MAX_RATIO) / depth,
            )
            keep = 1 - (1 - OBSERVATION_DECAY) * weight
            self._ss = self._ss * keep + weight * sequences**2
            self._sw = self._sw * keep + weight * sequences * rows
            self._ww = self._ww * keep + weight * rows**2
            self._sy = self._sy * keep + weight * sequences * ms_per_depth
            self._wy = self._wy * keep + weight * rows * ms_per_depth
        return float(width_ms * ratio ** (1 - share))


def attention_from(stored: Any) -> tuple[float, float] | None:
    """Return stored costs (a, c), or None if they are not valid."""
    if not isinstance(stored, list) or len(stored) != 2:
        return None
    if not all(isinstance(cost, int | float) and 0 <= cost < 1e3 for cost in stored):
        return None
    return float(stored[0]), float(stored[1])
