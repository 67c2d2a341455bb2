"""How much of a long text a draft should see: all of it, or its end.

Drafts that were trained on short texts may predict worse with all of a long one in sight. For an EAGLE-3
draft, others measured 2.30 tokens a pass with all of 2 000 tokens and 1.58 with the last ones, and 1.08 and
1.54 at 16 000 (vllm-project/speculators#684). So in idle time a draft predicts the end of an answer once for
each window, and sees as much of the next texts of that length as it predicted best with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from localspec.engine.cache.slot import ALL_TOKENS

WINDOWS = (256, 1024, 4096, 16_384)  # tokens
COMPARED_TOKENS = 48  # at the end of an answer
MIN_COMPARED = 2 * COMPARED_TOKENS  # before anything but all of a text is chosen
MAX_COMPARED = 16 * COMPARED_TOKENS  # older comparisons count less
# A window must predict so much better than all of a text, because the answer may ask for what it hides.
MIN_GAIN = 0.02
# One in so many texts is read as a whole, because only then windows can be compared.
WHOLE_INTERVAL = 64


class WindowTable:
    """How many predictions were right with each window, by how many windows are shorter than the text."""

    def __init__(self) -> None:
        # Of each number of shorter windows: the predictions, and how many were right with each of them in
        # sight and, last, with all of the text.
        self._rows = [[0.0] * (count + 2) for count in range(len(WINDOWS) + 1)]
        self._n_chosen = 0

    @staticmethod
    def list_windows(length: int) -> list[int]:
        """Return the windows that can be compared in a text of `length` tokens; the last is all of it."""
        return [*WINDOWS[: bisect_left(WINDOWS, length)], ALL_TOKENS]

    def observe(self, length: int, hits: Sequence[int], count: int) -> None:
        """Learn from `count` predictions at the end of a text. hits: how many each window had right."""
        row = self._rows[bisect_left(WINDOWS, length)]
        keep = min(1.0, (MAX_COMPARED - count) / max(row[0], 1.0))
        row[:] = [keep * old + new for old, new in zip(row, (count, *hits), strict=True)]

    def choose(self, length: int) -> int:
        """Return how many tokens at the end of a text a draft should see."""
        compared, *hits = self._rows[bisect_left(WINDOWS, length)]
        best = max(range(len(hits)), key=hits.__getitem__)
        if compared < MIN_COMPARED or hits[best] < hits[-1] + MIN_GAIN * compared:
            return ALL_TOKENS
        self._n_chosen += 1
        return WINDOWS[best] if self._n_chosen % WHOLE_INTERVAL else ALL_TOKENS

    def as_list(self) -> list[list[float]]:
        """Return what is stored, [] if nothing was compared."""
        return self._rows if any(row[0] for row in self._rows) else []

    @classmethod
    def from_list(cls, stored: Any) -> WindowTable:
        """Return a stored table, or a new one if it is not valid."""
        table = cls()
        if not isinstance(stored, list) or len(stored) != len(table._rows):
            return table
        for row, known in zip(stored, table._rows, strict=True):
            if not isinstance(row, list) or len(row) != len(known):
                return cls()
            if not all(
                isinstance(n, float | int) and 0 <= n <= row[0] <= MAX_COMPARED for n in row
            ):
                return cls()
        table._rows = stored
        return table
