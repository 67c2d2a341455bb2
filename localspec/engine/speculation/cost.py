"""What a pass costs on this machine, by width, and how rounds correct it.

A target pass of width w (rows) takes t_v(w) milliseconds: a staircase, and not even monotonic, since
kernels work in groups of rows. So the table is of measured widths, `padded(n)` is the cheapest width
that holds n rows, and the policy compares whole candidates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Clock = Callable[[], float]  # seconds, as time.perf_counter; a replay has one that its costs move

WIDEST = 64  # wider passes are prompts, not rounds
# A pass that took so much longer than expected, or shorter, says no more than this: one that another
# program disturbed is as likely, and a wrong cost is corrected by many.
OUTLIER = 1.65
# How much a round changes what is expected: by its share of all rounds, and never less than this.
LEAST_WEIGHT = 0.08
# A pass that is padded has the width of its rows once in so many, or nobody would see that it is cheaper.
RETRY = 32
# How much such a pass changes what it is expected to cost where it was faster: others only slow passes down.
SEEN_FASTER = 0.25
# Of wider passes one of each is measured, when a pair is loaded: what the first round says of them counts
# as much as that, and so does each that was faster, for others only slow passes down.
OFTEN, ONCE = 16, 0.5
# Rounds that a measured table is worth, and one that was measured for something else.
MEASURED, GUESSED = 12, 3


class CostTable:
    """Milliseconds of a pass by width, of one model.

    Every observed round moves its own width slowly and a common factor faster: the context grows or
    the machine gets busy for all widths at once, so what is seen at one width is news for the others.
    Widths that no round had yet go with their neighbours.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        rounds: int = MEASURED,
        each: int = 0,
        sequences: int = 1,
    ) -> None:
        """rounds: how many what is given is worth; what is seen in each weighs less the more it was.

        each: most rows of a sequence in a padded pass, where all `sequences` have as many; 0: any.
        """
        if not measured or 1 not in measured or min(measured.values()) <= 0:
            raise ValueError("a cost table needs a positive time for width 1")
        # Lists, not arrays: a round looks at one width or two, and the first touch of every function
        # and array after a pass, which has emptied the processor's caches, takes microseconds.
        self._widths = sorted(measured)
        self._ms = [float(measured[width]) for width in self._widths]
        self._measured = self._ms[:]
        self._seen: set[int] = set()  # widths of rounds
        self._drift = 1.0
        self._table: npt.NDArray[np.float64] | None = None
        self._padded: dict[int, int] = {}  # as the table, of what was true when it was asked for
        self._widened = 0  # passes
        self._observed = 0
        self._rounds = rounds
        self._each, self._sequences = each, sequences
        self._shared: dict[int, CostTable] = {}

    def of(self, sequences: int) -> CostTable:
        """Of passes that so many sequences share: at first as of one's, then as they turn out to be.

        Rows of several texts are dearer than as many of one: each has its own cache to attend to.
        """
        if sequences <= 1:
            return self
        if sequences not in self._shared:
            table = CostTable(self.as_dict(), GUESSED, self._each, sequences)
            self._shared[sequences] = table
        return self._shared[sequences]

    def ms(self, width: int) -> float:
        """Expected milliseconds of a pass of this width; between measured widths, linear."""
        at = bisect_left(self._widths, width)
        if at < len(self._widths) and self._widths[at] == width:
            return self._ms[at] * self._drift
        return float(self._shape(np.array([width]))[0]) * self._drift

    def per_token_ms(self, width: int) -> float:
        """Milliseconds per row of a pass of this width."""
        return self.ms(width) / width

    def _shape(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Milliseconds without drift, by number of rows (n,)."""
        widths, ms = self._widths, self._ms
        # beyond the widest: per row what it costs on average, never a cliff downwards
        slope = max((ms[-1] - ms[0]) / max(widths[-1] - 1, 1), 0.0)
        beyond = np.maximum(rows - widths[-1], 0) * slope
        return np.asarray(np.interp(rows, widths, ms) + beyond)

    def padded(self, rows: int) -> int:
        """The cheapest measured width ≥ rows (`rows` itself if none is cheaper)."""
        if rows not in self._padded:
            self._padded[rows] = self._cheapest(rows)
        return self._padded[rows]

    def width(self, rows: int) -> int:
        """How wide the next pass of so many rows is to be: padded, but now and then as wide as they are."""
        width = self.padded(rows)
        if width > rows:
            self._widened += 1
            if self._widened % RETRY == 0:
                return rows
        return width

    def _cheapest(self, rows: int) -> int:
        widths, ms = self._paddable()
        at = bisect_right(widths, rows)
        if at == len(widths):
            return rows
        best = min(range(at, len(ms)), key=ms.__getitem__)
        # 2 %: less is noise, and padding is not free
        own = self.ms(rows) / self._drift
        return widths[best] if ms[best] < own * 0.98 else rows

    def _paddable(self) -> tuple[list[int], list[float]]:
        """Widths that narrower passes may be padded to, and their milliseconds without drift."""
        if not self._each:
            return self._widths, self._ms
        most = self._each * self._sequences
        pairs = zip(self._widths, self._ms, strict=True)
        found = [(w, ms) for w, ms in pairs if w <= most and w % self._sequences == 0]
        return [w for w, _ in found], [ms for _, ms in found]

    def padded_ms(self, rows: int) -> npt.NDArray[np.float64]:
        """Milliseconds (rows + 1,) of a pass that must hold 0…rows rows, padded where that is cheaper.

        Entry 0 is zero: no pass.
        """
        if self._table is None or len(self._table) <= rows:
            counts = np.arange(max(rows, 64) + 1)
            own = self._shape(counts)
            widths, ms = self._paddable()
            cheapest = np.append(np.minimum.accumulate(np.array(ms)[::-1])[::-1], np.inf)
            wider = cheapest[np.searchsorted(widths, counts, side="right")]
            own = np.where(wider < own * 0.98, wider, own)
            own[0] = 0.0
            self._table = own
        return np.asarray(self._table[: rows + 1] * self._drift)

    def observe(self, width: int, ms: float) -> None:
        """One pass of `width` took `ms`. Outliers count as OUTLIER times the expected at most."""
        at = bisect_left(self._widths, width)
        known = at < len(self._widths) and self._widths[at] == width
        if not known and width > WIDEST:
            return
        expected = self.ms(width)
        weight = max(1 / (self._rounds + self._observed), LEAST_WEIGHT)
        ratio = ms / expected
        clipped = min(max(ratio, 1 / OUTLIER), OUTLIER)
        news = clipped**weight
        self._drift *= news
        first = width not in self._seen
        self._seen.add(width)
        if known:
            retried = ratio < 1 and self.padded(width) > width
            if width > OFTEN and (first or ratio < 1):
                self._ms[at] *= min(max(ratio, 1 / 3), OUTLIER) ** ONCE
            else:
                self._ms[at] *= clipped ** (SEEN_FASTER if retried else weight / 2)
        else:  # what is not news for all widths is this one's
            new = expected * min(max(ratio, 1 / 3), 3.0) / self._drift
            self._widths.insert(at, width)
            self._ms.insert(at, new)
            self._measured.insert(at, new)
            self._forget()
        self._observed += 1
        if self._observed % 16 == 0 or self._observed < self._rounds:
            self._forget()

    def _forget(self) -> None:
        """What was worked out is to be worked out again."""
        if 0 < len(self._seen) < len(self._widths):
            self._move_unseen()
        self._table = None
        self._padded.clear()

    def _move_unseen(self) -> None:
        """Widths that no round had yet cost as much more than when they were measured as their neighbours."""
        pairs = list(zip(self._widths, self._ms, self._measured, strict=True))
        seen = [(width, ms / before) for width, ms, before in pairs if width in self._seen]
        moved = np.interp(self._widths, *np.transpose(seen)).tolist()
        self._ms = [before * by for before, by in zip(self._measured, moved, strict=True)]

    def as_dict(self) -> dict[int, float]:
        """Width → milliseconds as they stand now."""
        pairs = zip(self._widths, self._ms, strict=True)
        return {width: round(ms * self._drift, 4) for width, ms in pairs}


class CostProfile:
    """Both models' tables, and what rounds cost outside llama.cpp, in milliseconds.

    overhead_ms: of a round of one sequence without drafts, for which the others are guessed at first.
    """

    def __init__(self, target: CostTable, draft: CostTable | None, overhead_ms: float) -> None:
        self.target = target
        self.draft = draft
        self.overhead_ms = overhead_ms
        self._overheads: dict[tuple[int, bool], tuple[float, int]] = {}

    def overhead(self, sequences: int, drafting: bool) -> float:
        """Of a round of so many sequences; what drafting itself takes is in the cost of its steps."""
        known = self._overheads.get((sequences, drafting))
        if known is not None:
            return known[0]
        if drafting:
            return self.overhead(sequences, False) * 1.2
        return self.overhead_ms * (1 + sequences) / 2

    def observe_overhead(self, ms: float, sequences: int = 1, drafting: bool = False) -> None:
        known, seen = self._overheads.get((sequences, drafting), (0.0, 0))
        known = known if seen else self.overhead(sequences, drafting)
        known += max(1 / (2 + seen), 0.05) * (min(ms, 3 * known + 0.1) - known)
        self._overheads[sequences, drafting] = known, seen + 1
        if sequences == 1 and not drafting:
            self.overhead_ms = known

    def as_dict(self) -> dict[str, Any]:
        return {
            "target_ms": self.target.as_dict(),
            "draft_ms": self.draft.as_dict() if self.draft else None,
            "overhead_ms": round(self.overhead_ms, 4),
        }


def table_from(stored: Any) -> dict[int, float] | None:
    """A stored table back; None if it is not one."""
    if not isinstance(stored, dict):
        return None
    try:
        table = {int(width): float(ms) for width, ms in stored.items()}
    except (TypeError, ValueError):
        return None
    good = 1 in table and all(0 < ms < 1e7 and 0 < width <= WIDEST for width, ms in table.items())
    return table if good else None
