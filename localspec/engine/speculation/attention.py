"""What a pass costs for the text that is before it, beside what its width costs.

Attention looks at every token before: at the end of a long text that is most of a pass, and there rows
that come cheaply at its beginning may cost as much each as the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Rows = TypeVar("Rows", float, np.ndarray)

KEEP = 0.97  # of what was learned, with each pass that says all about it
TRUST = 0.05  # passes that the guess is worth
FIRM = 20.0  # times that, of a processor, which goes over the cache for each row
# Of what its width costs, a pass is expected to cost for each token before it, so that what was thought
# to cost nothing can be learned: a tenth after 32 000.
LEAST = 3e-6
MOST = 3.0  # times the expected that one pass may say


class AttentionCost:
    """d · (a · sequences + c · rows) milliseconds, where each row has d tokens before it, on average.

    a: of going over a text's cache once, however many rows want it; c: of each row. `row_ms` guesses c:
    in prompts rows are many, and what they share is nothing. known: (a, c) as they were learned before.
    shares: rows may share going over the cache, as they do on a GPU; until wider passes have been seen,
    what is dearer than the guess is then put on both alike, and without on each row.
    """

    def __init__(
        self,
        row_ms: Callable[[], float],
        known: tuple[float, float] | None = None,
        shares: bool = False,
    ) -> None:
        self._firm = TRUST if shares else TRUST * FIRM
        self._row_ms = row_ms
        self._known = known
        self._ss = self._sw = self._ww = self._sy = self._wy = 0.0  # weighted sums over the passes

    def ms(self, rows: Rows, sequences: int, depth: float) -> Rows:
        """Expected of a pass over so many sequences, `depth` tokens before each row on average."""
        shared, each = self.costs
        return depth * (shared * sequences + each * rows)

    @property
    def costs(self) -> tuple[float, float]:
        """(a, c): least squares over the passes and the guess; neither is below zero."""
        a, c = self._known or (0.0, self._row_ms())
        ss, ww, sw = self._ss + self._firm, self._ww + TRUST, self._sw
        sy, wy = self._sy + self._firm * a, self._wy + TRUST * c
        det = ss * ww - sw**2
        a, c = (sy * ww - wy * sw) / det, (wy * ss - sy * sw) / det
        if a < 0:
            return 0.0, max(wy / ww, 0.0)
        return (max(sy / ss, 0.0), 0.0) if c < 0 else (a, c)

    def observe(self, rows: int, sequences: int, depth: float, ms: float, width_ms: float) -> float:
        """A pass took `ms`, of which its width was to cost `width_ms`; returns what that has cost then.

        How much it is off the expected counts for each by its share: a pass with little before it says
        little about attention, and a deep one little about widths.
        """
        expected = max(self.ms(float(rows), sequences, depth), LEAST * depth * width_ms)
        share, ratio = expected / (expected + width_ms), ms / (expected + width_ms)
        if share > 0:
            weight, each = share**2, expected * min(max(ratio, 1 / MOST), MOST) / depth
            keep = 1 - (1 - KEEP) * weight
            self._ss = self._ss * keep + weight * sequences**2
            self._sw = self._sw * keep + weight * sequences * rows
            self._ww = self._ww * keep + weight * rows**2
            self._sy = self._sy * keep + weight * sequences * each
            self._wy = self._wy * keep + weight * rows * each
        return float(width_ms * ratio ** (1 - share))


def attention_from(stored: Any) -> tuple[float, float] | None:
    """Stored costs back; None if they are none."""
    if not isinstance(stored, list) or len(stored) != 2:
        return None
    if not all(isinstance(each, int | float) and 0 <= each < 1e3 for each in stored):
        return None
    return float(stored[0]), float(stored[1])
