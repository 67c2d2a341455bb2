"""A lane: one target context with its slots, and how wide its passes are.

The shared lane decodes many sequences in one pass. The exact lane decodes one sequence at a time, in
its own KV cache, always with the same width and with prompts cut in the same chunks, so that its
logits depend on the text alone: llama.cpp uses other kernels for other widths, and other rows or
cells change the order of its sums.
"""

from __future__ import annotations

import math
import time

import numpy as np

from localspec.engine.cache.slots import Slots
from localspec.engine.llama import Batch, Context
from localspec.engine.pair.measuring import SETTLING, WIDTHS
from localspec.engine.pair.reading import ReadingCost, deeper
from localspec.engine.sequence import Sequence
from localspec.engine.speculation.acceptance import Floats
from localspec.engine.speculation.attention import AttentionCost
from localspec.engine.speculation.cost import Clock, CostTable
from localspec.engine.speculation.drafters.model import DraftModel

EXACT_CHUNK = 128  # tokens of a prompt read in one pass of the exact lane
LEAST_LEARNED = 24  # rows of a pass that tells what a row of a prompt costs
LEAST_BESIDE = 8  # tokens of prompts that a pass beside running generations reads at least
# Of what others may wait for a pass that reads prompts, what is planned: the longest of hundreds takes a
# third more than is expected of it.
PLANNED = 0.75
# How much of the last pass counts in what scored rows are expected to cost, unless they were dearer.
SCORES_NEWEST = 0.2
# Of what a pass takes that reads prompts, and seconds, in which it has just begun: requests that are sent
# together arrive within some milliseconds.
BEGINNING, BEGINS_S = 1 / 8, 0.02


class Lane:
    """`width` None: passes as wide as needed, padded where that is cheaper; else always `width` rows.

    pass_s: seconds that a pass should take at most; gap_s: one that reads prompts beside those that
    decode, who wait for it. 0: any number. attention: what it had learned of that cost before. on_gpu: it
    computes there, where a pass costs more whose width is not the last one's.
    """

    def __init__(
        self,
        context: Context,
        batch: Batch,
        slots: Slots,
        costs: CostTable,
        width: int | None = None,
        pass_s: float = 0.0,
        gap_s: float = 0.0,
        clock: Clock = time.perf_counter,
        attention: tuple[float, float] | None = None,
        on_gpu: bool = False,
    ) -> None:
        self._clock = clock
        self.context = context
        self.batch = batch
        self.slots = slots
        self.costs = costs
        # Said by narrow passes it is too much: there every row has its logits.
        first_s = costs.per_token_ms(WIDTHS[-1]) / 1e3
        self.reading = ReadingCost(first_s, deeper(context.model), context.n_ctx)
        # As prompts have it, until passes that write have shown.
        self.attention = AttentionCost(
            lambda: 1e3 * self.reading.expected.deeper_s, attention, on_gpu
        )
        self._on_gpu = on_gpu
        self._last_rows = self._repeats = 0  # of the last pass, and how many before it had as many
        self.width = width
        self.drafter: DraftModel | None = None  # of this lane alone, where it is not the pair's
        self.active: list[Sequence] = []
        self.ended = 0  # requests that have, here
        self.began = 0.0  # when the last pass did (perf_counter)
        # A state that can go back only a few tokens also limits how far a pass may run ahead.
        self.rollback = None if context.model.cuttable else context.n_rollback
        self.busy_s = 0.0  # time inside llama.cpp
        self.spent_s = 0.0  # of that, in the last pass
        # What a row of a prompt costs whose log-probabilities are computed, in rows without them.
        self._scored_cost: float | None = None
        # since the last request ended: passes, and the sequences in them
        self.passes = self.busy = 0
        self._pass_s, self._gap_s = pass_s or math.inf, gap_s or math.inf

    @property
    def exact(self) -> bool:
        return self.width is not None

    @property
    def max_depth(self) -> int | None:
        """Most tokens a pass can take back; None: any number."""
        if self.width is not None:
            return self.width - 1
        return self.rollback

    @property
    def alike(self) -> bool:
        """Does each sequence of a pass with drafts have as many rows as the others?

        llama.cpp cuts a pass over recurrent states into pieces of such, and between pieces it may move a
        state away from the snapshots that taking back its drafts needs.
        """
        return self.rollback is not None

    def pass_ms(self, rows: int, sequences: int = 1) -> Floats:
        """Milliseconds (rows + 1,) of a pass over so many sequences by the rows it must hold, as deep in
        their texts as those are that write.
        """
        counts = np.arange(rows + 1)
        if self.width is None:
            deeper = self.attention.ms(counts, sequences, self._depth)
            deeper[0] = 0.0  # no pass
            return np.asarray(self.costs.of(sequences).padded_ms(rows) + deeper)
        return np.asarray(-(-counts // self.width) * self.plain_ms(1))

    def plain_ms(self, sequences: int) -> float:
        """Milliseconds of a pass in which each of so many has one row: what `pass_ms` ends with then, for
        every round asks for that.
        """
        rows, costs = self.width or sequences, self.costs.of(sequences)
        own = costs.ms(self.width or costs.padded(rows))
        return own + self.attention.ms(float(rows), sequences, self._depth)

    @property
    def _depth(self) -> float:
        """Tokens before those that are written, on average over the texts."""
        before = [each.slot.n_past for each in self.active if not each.prefilling]
        return sum(before) / max(len(before), 1)

    def pad_to(self, rows: int, sequences: int = 1) -> int:
        """How wide the next pass, for so many rows of so many sequences, is to be."""
        if self.width is not None:
            return max(self.width, rows)
        return self.costs.of(sequences).width(rows)

    def chunk(self, start: int, left: int, most: int) -> int:
        """How many prompt tokens to read in one pass, from position `start`, where `most` may be."""
        if self.width is not None:
            return min(EXACT_CHUNK - start % EXACT_CHUNK, left)
        return min(left, most)

    def rows_beside(self, decoding: int) -> int:
        """How many tokens of prompts a pass may read beside so many sequences that decode, together."""
        rows = min(PLANNED * self._gap_s / self._row, self.batch.capacity) - decoding  # as dear
        return min(self.most_rows, int(max(rows, LEAST_BESIDE)))

    @property
    def ends_early(self) -> bool:
        """Can a pass over several texts be ended on its way? llama.cpp asks a CPU alone, and a recurrent
        state is not what it was before.
        """
        return self.slots.cuttable and not self._on_gpu

    @property
    def is_long(self) -> bool:
        """Will a pass over the batch take longer than somebody else should wait for it?"""
        return self.batch.rows * self._row > self._gap_s

    @property
    def begins_s(self) -> float:
        """So long has a pass over the batch just begun: who comes with another is told a moment later."""
        return min(BEGINNING * self.batch.rows * self._row, BEGINS_S)

    @property
    def _row(self) -> float:
        """Seconds of a token of the prompt that is read deepest."""
        reading = (each.slot.n_past for each in self.active if each.prefilling)
        return self.reading.at(max(reading, default=0))

    @property
    def most_rows(self) -> int:
        """How many tokens of prompts a pass may read, so that it takes no longer than passes should.

        At least one. The exact lane always reads the same chunks, whatever they take.
        """
        return int(max(min(self._pass_s / self._row, self.batch.capacity), 1))

    def scored_rows(self, rows: int) -> int:
        """How many rows with log-probabilities take as long as so many without; at least one."""
        if self._scored_cost is None:
            return min(rows, LEAST_BESIDE)
        return max(int(rows / self._scored_cost), 1)

    def plain_rows(self, scored: int) -> int:
        """How many rows without log-probabilities take as long as so many with them."""
        return math.ceil(scored * (self._scored_cost or 1.0))

    def observe_scores(self, rows: int, seconds: float) -> None:
        """A pass with so many scored rows, and computing their log-probabilities, took `seconds`.

        Dearer rows are believed at once, for others wait for them.
        """
        others = (self.batch.rows - rows) * self._row
        cost = max((seconds - others) / (rows * self._row), 1.0)
        known = self._scored_cost or cost
        self._scored_cost = max(cost, known + SCORES_NEWEST * (cost - known))

    def _learn_prefill(self, spent: float) -> None:
        """A pass that read a prompt took `spent` seconds."""
        if self.batch.rows < min(self.rows_beside(0), LEAST_LEARNED):
            return  # a prompt's last rows say little about a row among many
        self.reading.observe(self.batch.rows, self.batch.mean_position, spent)

    def decode(self, timed: bool, sequences: int = 1, *, scored: bool = False) -> float:
        """One pass over the batch, of so many sequences; returns its seconds, and tells the cost table if
        `timed`. scored: it has rows of a prompt with logits, which cost more than others.
        """
        self.began = time.perf_counter()
        start = self._clock()
        self.context.decode(self.batch)
        self.context.synchronize()
        spent = self.spent_s = self._clock() - start
        self.busy_s += spent
        self.passes, self.busy = self.passes + 1, self.busy + sequences
        rows, costs = self.batch.rows, self.costs.of(sequences)
        self._repeats = self._repeats + 1 if rows == self._last_rows else 0
        self._last_rows = rows
        if timed and self._tells(rows, costs.padded(sequences)):
            depth, width_ms = self.batch.mean_position, costs.ms(rows)
            own = self.attention.observe(rows, sequences, depth, spent * 1e3, width_ms)
            costs.observe(rows, own)
        elif not timed and not scored:
            self._learn_prefill(spent)
        return spent

    def _tells(self, rows: int, plain: int) -> bool:
        """Does a pass of so many rows tell what they cost? `plain`: rows of one without drafts.

        On a GPU the first passes without drafts after some with are dearer by the change (an H100: 5.4 and
        not 3.2 ms). Taken for what plain decoding costs, that would make drafts look good which are not.
        """
        return not self._on_gpu or rows > plain or self._repeats >= SETTLING
