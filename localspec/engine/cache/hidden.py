"""A target's hidden states of one text, kept until its MTP heads read them: they may never want to."""

from __future__ import annotations

import numpy as np

from localspec.engine.llama import States

# Of one slot. Heads that begin late read the end of a long text only, which is what they draft from.
MOST_BYTES = 32 << 20
TAIL = 64  # states that stay when they have been read: what is cut back is read again


class Hidden:
    """States after the tokens [start, end) of a text, a row each."""

    def __init__(self, width: int, tail: bool = False) -> None:
        """width: numbers of a state. tail: nobody wants more than the last ones."""
        self.start = self.end = 0
        self._most = 2 * TAIL if tail else max(MOST_BYTES // (4 * width), 2 * TAIL)
        self._rows: States = np.empty((0, width), np.float32)

    def put(self, at: int, rows: States) -> None:
        """The states after the tokens from `at` on. Where those right before them are not known all begins
        there, and of too many the oldest go.
        """
        end, rows = at + len(rows), rows[-self._most :]
        known = self.end - self.start if at == self.end else 0
        stay = known
        if known + len(rows) > self._most:  # by a part at once, so that few are moved
            stay = min(known, max(self._most * 3 // 4 - len(rows), 0))
        self._make_room(known, stay, len(rows))
        self._rows[stay : stay + len(rows)] = rows
        self.start, self.end = end - stay - len(rows), end

    def _make_room(self, known: int, stay: int, more: int) -> None:
        """Of `known` rows the last `stay` are the first, and `more` fit behind them."""
        rows = self._rows
        if stay + more > len(rows):
            size = min(max(2 * (stay + more), TAIL), self._most)
            self._rows = np.empty((size, rows.shape[1]), np.float32)
        if self._rows is not rows or stay < known:
            self._rows[:stay] = rows[known - stay : known]

    def cut(self, length: int) -> None:
        """The text has so many tokens now."""
        self.end = min(self.end, length)
        self.start = min(self.start, self.end)

    def were_read(self, before: int) -> None:
        """Heads have read the tokens `before` a place: but for the last, their states may go."""
        stay = self.end - max(before - TAIL, self.start)
        if self.end - self.start > 2 * max(stay, TAIL):
            self._make_room(self.end - self.start, stay, 0)
            self.start = self.end - stay

    def before(self, first: int, last: int) -> States:
        """The states (last - first, width) that stand before the tokens [first, last): that after the
        token before each. One that is not known is all zeros.
        """
        found: States = np.zeros((last - first, self._rows.shape[1]), np.float32)
        a, b = max(first - 1, self.start), min(last - 1, self.end)
        if a < b:
            found[a - first + 1 : b - first + 1] = self._rows[a - self.start : b - self.start]
        return found

    def take(self, other: Hidden, length: int) -> None:
        """Know what another one does of the first `length` tokens of a text."""
        self.start = self.end = 0
        end = min(other.end, length)
        if other.start < end:
            self.put(other.start, other._rows[: end - other.start])
