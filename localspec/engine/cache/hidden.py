"""Hidden states of the target for one text, kept until its MTP heads read them, if they ever do."""

from __future__ import annotations

import numpy as np

from localspec.engine.llama import States

# Limit per slot. Heads that begin late read only the end of a long text, because they draft from that.
MAX_BYTES = 32 << 20
TAIL_STATES = (
    64  # states that stay after the heads have read them, because a rollback reads them again
)


class Hidden:
    """The states after the tokens [start, end) of a text, one row each."""

    def __init__(self, width: int, tail: bool = False) -> None:
        """width: numbers in a state. tail: only the last states are ever read."""
        self.start = self.end = 0
        self._max_rows = 2 * TAIL_STATES if tail else max(MAX_BYTES // (4 * width), 2 * TAIL_STATES)
        self._rows: States = np.empty((0, width), np.float32)

    def put(self, position: int, rows: States) -> None:
        """Add the states after the tokens from `position` on.

        Older states go if they do not end at `position`, or if there are too many.
        """
        end, rows = position + len(rows), rows[-self._max_rows :]
        n_known = self.end - self.start if position == self.end else 0
        n_stay = n_known
        # Drops a quarter at once, so that rows seldom move.
        if n_known + len(rows) > self._max_rows:
            n_stay = min(n_known, max(self._max_rows * 3 // 4 - len(rows), 0))
        self._make_room(n_known, n_stay, len(rows))
        self._rows[n_stay : n_stay + len(rows)] = rows
        self.start, self.end = end - n_stay - len(rows), end

    def _make_room(self, n_known: int, n_stay: int, n_new: int) -> None:
        """Move the last `n_stay` of `n_known` rows to the front, with room for `n_new` behind them."""
        rows = self._rows
        if n_stay + n_new > len(rows):
            size = min(max(2 * (n_stay + n_new), TAIL_STATES), self._max_rows)
            self._rows = np.empty((size, rows.shape[1]), np.float32)
        if self._rows is not rows or n_stay < n_known:
            self._rows[:n_stay] = rows[n_known - n_stay : n_known]

    def cut(self, length: int) -> None:
        """Drop the states behind the first `length` tokens."""
        self.end = min(self.end, length)
        self.start = min(self.start, self.end)

    def were_read(self, n_read: int) -> None:
        """Drop most states of the first `n_read` tokens, because the heads have read them."""
        n_stay = self.end - max(n_read - TAIL_STATES, self.start)
        if self.end - self.start > 2 * max(n_stay, TAIL_STATES):
            self._make_room(self.end - self.start, n_stay, 0)
            self.start = self.end - n_stay

    def before(self, first: int, last: int) -> States:
        """Return the states (last - first, width) before the tokens [first, last).

        Each is the state after the previous token; one that is not known is all zeros.
        """
        states: States = np.zeros((last - first, self._rows.shape[1]), np.float32)
        start, end = max(first - 1, self.start), min(last - 1, self.end)
        if start < end:
            states[start - first + 1 : end - first + 1] = self._rows[
                start - self.start : end - self.start
            ]
        return states

    def take(self, other: Hidden, length: int) -> None:
        """Copy the states of the first `length` tokens from another text."""
        self.start = self.end = 0
        end = min(other.end, length)
        if other.start < end:
            self.put(other.start, other._rows[: end - other.start])
