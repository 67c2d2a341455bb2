"""The cost of a pass on this machine, by its width, corrected by every round.

A target pass of width w (rows) takes t_v(w) milliseconds. That is a staircase, and not even monotonic,
because kernels work in groups of rows. So the table holds measured widths, `padded(n)` is the cheapest width
that holds n rows, and the policy compares whole candidates.

A device that records graphs, as CUDA does, replays passes of one width. After a change of the width, the
first pass runs without a graph and the second records one, which costs more than either. Such a change is
counted as a part of the pass that makes it, so that a width is only left for what is worth it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Clock = Callable[
    [], float
]  # seconds, as time.perf_counter; a replay has one that advances by its costs

MAX_ROUND_ROWS = 64  # wider passes read prompts
# A pass counts as at most this many times slower or faster than expected. A larger deviation is likely a
# disturbance by another program, and a wrong cost is corrected by many passes.
MAX_OUTLIER_RATIO = 1.65
# A round changes the expectation by its share of all rounds, but at least by this.
MIN_WEIGHT = 0.08
# Once in so many times a pass is not padded, to notice if the narrower width has become cheaper.
RETRY_INTERVAL_PASSES = 32
# Weight of such a pass if it was faster than expected. It is large, because disturbances only slow passes
# down.
FASTER_WEIGHT = 0.25
# The weight, in rounds, of a measured table, and of one that was measured for something else.
MEASURED_ROUNDS, GUESSED_ROUNDS = 12, 3


# Passes of one width after which the next one is replayed.
SETTLING_PASSES = 2


class ChangeCost(NamedTuple):
    """The milliseconds that the first and the second pass of another width cost more than later ones."""

    first_ms: float = 0.0
    second_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.first_ms + self.second_ms


NO_CHANGE = ChangeCost()


class UsedWidth(NamedTuple):
    """The width whose next pass costs no change, and the price of a narrower one, in milliseconds."""

    rows: int = 0
    change_ms: float = 0.0

    def price_ms(self, rows: int) -> float:
        """Return the price of a pass of `rows` rows.

        The wider it is, the more tokens it may write, and the fewer passes follow until the text changes, so
        the price of a wider one grows with its rows.
        """
        if rows == self.rows:
            return 0.0
        return self.change_ms * max(rows / max(self.rows, 1), 1.0)


NO_WIDTH = UsedWidth()


# The cost of a change is spread over so many passes, about as many as follow until the next one. Their number
# as averaged over earlier changes lost 0.6 % in the mean.
PASSES_PER_CHANGE = 32.0


class WidthHistory:
    """The width of the last passes of a context, and what a change costs there."""

    def __init__(self, change: ChangeCost) -> None:
        self._change = change
        self._last = self._n_repeats = 0

    def note(self, rows: int) -> None:
        self._n_repeats = self._n_repeats + 1 if rows == self._last else 0
        self._last = rows

    @property
    def is_replayed(self) -> bool:
        """Whether the last pass cost no change, not even that its graph was recorded."""
        return not self._change.total_ms or self._n_repeats >= SETTLING_PASSES

    def settling_ms(self, rows: int) -> float:
        """Return what a pass of `rows` rows would cost more now than a replayed one, in milliseconds."""
        if rows != self._last:
            return self._change.first_ms
        return self._change.second_ms if self._n_repeats == 0 else 0.0

    @property
    def used(self) -> UsedWidth:
        """The width in use, and the price of another one."""
        if not self._change.total_ms:
            return NO_WIDTH
        return UsedWidth(self._last, self._change.total_ms / PASSES_PER_CHANGE)


def average_with(known_ms: float, ms: float, weight: float) -> float:
    """Return the average of a known time and a new one of `weight`, limited to MAX_OUTLIER_RATIO times it.

    Without the limit, a single long wait could make something look so dear that it is not tried again.
    """
    return known_ms + weight * (min(ms, MAX_OUTLIER_RATIO * known_ms) - known_ms)


class CostTable:
    """The milliseconds of a pass of one model, by width.

    Every observed round moves its own width slowly and a common factor faster. The context grows or the
    machine gets busy for all widths at once, so an observation at one width informs the others.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        rounds: int = MEASURED_ROUNDS,
        max_rows_each: int = 0,
        sequences: int = 1,
        change: ChangeCost = NO_CHANGE,
    ) -> None:
        """Make a table of the measured milliseconds by width, of passes that follow others of their width.

        rounds: the weight of the given times, in rounds; each observation weighs less the larger it is.
        max_rows_each: limit of a sequence's rows in a padded pass, where all `sequences` have as many; 0:
        none. change: the cost of another width.
        """
        # Results of `padded_ms` and `padded_width`, by the width in use and the latter also by rows.
        self._tables: dict[UsedWidth, npt.NDArray[np.float64]] = {}
        self._padded: dict[tuple[int, UsedWidth], int] = {}
        self._n_padded = 0  # padded passes
        self._rounds = rounds
        self._max_rows_each, self._sequences = max_rows_each, sequences
        self._shared: dict[int, CostTable] = {}
        self.replace(measured, change)

    def replace(self, measured: Mapping[int, float], change: ChangeCost = NO_CHANGE) -> None:
        """Begin again with a measurement, as a new table does; what was learned is forgotten."""
        if not measured or 1 not in measured or min(measured.values()) <= 0:
            raise ValueError("a cost table needs a positive time for width 1")
        # Lists, not arrays: a round looks up one or two widths, and the first use of every function and
        # array after a pass, which has emptied the processor's caches, takes microseconds.
        self._widths = sorted(measured)
        self._ms = [float(measured[width]) for width in self._widths]
        self._drift, self._n_observed, self.change = 1.0, 0, change
        self._shared.clear()
        self._invalidate()

    def for_sequences(self, sequences: int) -> CostTable:
        """Return the table of passes that `sequences` sequences share.

        It begins as a copy and then learns. Rows of several texts cost more than as many of one, because
        each text has its own cache to attend to.
        """
        if sequences <= 1:
            return self
        if sequences not in self._shared:
            table = CostTable(
                self.as_dict(), GUESSED_ROUNDS, self._max_rows_each, sequences, self.change
            )
            self._shared[sequences] = table
        return self._shared[sequences]

    def ms(self, width: int) -> float:
        """Return the expected milliseconds of a pass of this width, interpolated between known widths."""
        at = bisect_left(self._widths, width)
        if at < len(self._widths) and self._widths[at] == width:
            return self._ms[at] * self._drift
        return float(self._interpolate_ms(np.array([width]))[0]) * self._drift

    def per_token_ms(self, width: int) -> float:
        """Return the milliseconds per row of a pass of this width."""
        return self.ms(width) / width

    def _interpolate_ms(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the milliseconds without drift, by number of rows (n,)."""
        widths, ms = self._widths, self._ms
        # Beyond the widest, each row adds the average cost of a row, so the curve never drops.
        slope = max((ms[-1] - ms[0]) / max(widths[-1] - 1, 1), 0.0)
        extra_ms = np.maximum(rows - widths[-1], 0) * slope
        return np.asarray(np.interp(rows, widths, ms) + extra_ms)

    def padded_width(self, rows: int, used: UsedWidth = NO_WIDTH) -> int:
        """Return the cheapest known width ≥ rows, or `rows` itself if no other is cheaper.

        used: the width of the last pass, which alone costs no change.
        """
        if (rows, used) not in self._padded:
            self._padded[rows, used] = self._find_cheapest(rows, used)
        return self._padded[rows, used]

    def choose_width(self, rows: int, used: UsedWidth = NO_WIDTH) -> int:
        """Return how wide the next pass of `rows` rows is: padded, but now and then exactly `rows`."""
        width = self.padded_width(rows, used)
        if width > rows and not used.change_ms:
            self._n_padded += 1
            if self._n_padded % RETRY_INTERVAL_PASSES == 0:
                return rows
        return width

    def _find_cheapest(self, rows: int, used: UsedWidth) -> int:
        widths, ms = self._list_pad_widths(used)
        at = bisect_right(widths, rows)
        if at == len(widths):
            return rows
        best = min(range(at, len(ms)), key=ms.__getitem__)
        # A gain below 2 % is noise, and padding is not free.
        own_ms = (self.ms(rows) + used.price_ms(rows)) / self._drift
        return widths[best] if ms[best] < own_ms * 0.98 else rows

    def _list_pad_widths(self, used: UsedWidth) -> tuple[list[int], list[float]]:
        """Return the widths that passes may be padded to, and their milliseconds without drift."""
        known = dict(zip(self._widths, self._ms, strict=True))
        if 0 < used.rows <= MAX_ROUND_ROWS:
            known[used.rows] = self.ms(used.rows) / self._drift
        max_rows = self._max_rows_each * self._sequences
        pairs = [
            (width, ms + used.price_ms(width) / self._drift)
            for width, ms in sorted(known.items())
            if not max_rows or (width <= max_rows and width % self._sequences == 0)
        ]
        return [width for width, _ in pairs], [ms for _, ms in pairs]

    def padded_ms(self, rows: int, used: UsedWidth = NO_WIDTH) -> npt.NDArray[np.float64]:
        """Return the milliseconds (rows + 1,) of passes of 0…rows rows, padded where that is cheaper.

        Entry 0 is zero: no pass. used: as in `padded_width`.
        """
        table = self._tables.get(used)
        if table is None or len(table) <= rows:
            counts = np.arange(max(rows, MAX_ROUND_ROWS) + 1)
            price_ms = np.array([used.price_ms(count) for count in range(len(counts))])
            table = self._interpolate_ms(counts) + price_ms / self._drift
            widths, ms = self._list_pad_widths(used)
            cheapest = np.append(np.minimum.accumulate(np.array(ms)[::-1])[::-1], np.inf)
            wider_ms = cheapest[np.searchsorted(widths, counts, side="right")]
            table = np.where(wider_ms < table * 0.98, wider_ms, table)
            table[0] = 0.0
            self._tables[used] = table
        return np.asarray(table[: rows + 1] * self._drift)

    def observe(self, width: int, ms: float) -> None:
        """Learn from a pass of `width` rows that took `ms`, limited to MAX_OUTLIER_RATIO."""
        at = bisect_left(self._widths, width)
        is_known = at < len(self._widths) and self._widths[at] == width
        if not is_known and width > MAX_ROUND_ROWS:
            return
        expected = self.ms(width)
        weight = max(1 / (self._rounds + self._n_observed), MIN_WEIGHT)
        ratio = ms / expected
        clipped = min(max(ratio, 1 / MAX_OUTLIER_RATIO), MAX_OUTLIER_RATIO)
        shared_change = clipped**weight
        self._drift *= shared_change
        if is_known:
            is_retry = ratio < 1 and self.padded_width(width) > width
            self._ms[at] *= clipped ** (FASTER_WEIGHT if is_retry else weight / 2)
        else:  # what does not apply to all widths is attributed to this one
            new_ms = expected * min(max(ratio, 1 / 3), 3.0) / self._drift
            self._widths.insert(at, width)
            self._ms.insert(at, new_ms)
            self._invalidate()
        self._n_observed += 1
        if self._n_observed % 16 == 0 or self._n_observed < self._rounds:
            self._invalidate()

    def _invalidate(self) -> None:
        """Discard the cached results."""
        self._tables.clear()
        self._padded.clear()

    def as_dict(self) -> dict[int, float]:
        """Return the present milliseconds by width."""
        pairs = zip(self._widths, self._ms, strict=True)
        return {width: round(ms * self._drift, 4) for width, ms in pairs}


class CostProfile:
    """The tables of both models, and the milliseconds that rounds spend outside llama.cpp.

    overhead_ms: of a round of one sequence without drafts, from which the others are estimated at first.
    """

    def __init__(self, target: CostTable, draft: CostTable | None, overhead_ms: float) -> None:
        self.target = target
        self.draft = draft
        self.overhead_ms = overhead_ms
        self._overheads: dict[tuple[int, bool], tuple[float, int]] = {}

    def overhead(self, sequences: int, drafting: bool) -> float:
        """Return the overhead of a round. The time of drafting itself is in the cost of its steps."""
        known = self._overheads.get((sequences, drafting))
        if known is not None:
            return known[0]
        if drafting:
            return self.overhead(sequences, False) * 1.2
        return self.overhead_ms * (1 + sequences) / 2

    def observe_overhead(self, ms: float, sequences: int = 1, drafting: bool = False) -> None:
        known, count = self._overheads.get((sequences, drafting), (0.0, 0))
        known = known if count else self.overhead(sequences, drafting)
        known += max(1 / (2 + count), 0.05) * (min(ms, 3 * known + 0.1) - known)
        self._overheads[sequences, drafting] = known, count + 1
        if sequences == 1 and not drafting:
            self.overhead_ms = known

    def as_dict(self) -> dict[str, Any]:
        return {
            "target_ms": self.target.as_dict(),
            "target_change_ms": list(self.target.change),
            "draft_ms": self.draft.as_dict() if self.draft else None,
            "draft_change_ms": list(self.draft.change) if self.draft else None,
            "overhead_ms": round(self.overhead_ms, 4),
        }


def parse_cost_table(stored: Any) -> dict[int, float] | None:
    """Return a stored table, or None if it is not valid."""
    if not isinstance(stored, dict):
        return None
    try:
        table = {int(width): float(ms) for width, ms in stored.items()}
    except (TypeError, ValueError):
        return None
    is_valid = 1 in table and all(
        0 < ms < 1e7 and 0 < width <= MAX_ROUND_ROWS for width, ms in table.items()
    )
    return table if is_valid else None


# What a pass costs for the text before it, in addition to the cost of its width.
#
# Attention reads every token before. At the end of a long text that is most of a pass, and there each row
# may
# cost as much as the first, even where additional rows are cheap at the beginning.


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


def parse_pair_of_ms(stored: Any) -> tuple[float, float] | None:
    """Return two stored costs in milliseconds, or None if they are not valid."""
    if not isinstance(stored, list) or len(stored) != 2:
        return None
    if not all(isinstance(cost, int | float) and 0 <= cost < 1e3 for cost in stored):
        return None
    return float(stored[0]), float(stored[1])
