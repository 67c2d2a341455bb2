"""A lane: one target context with its slots, and the width of its passes.

The shared lane decodes many sequences in one pass. The exact lane decodes one sequence at a time, in its own
KV cache, always with the same width and with prompts cut into the same chunks. So its logits depend on the
text alone. Otherwise llama.cpp would use other kernels for other widths, and other rows or cells would change
the order of its sums.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import Batch, Context
from localspec.engine.pair.profile import WIDTHS, PassTimes, PrefillCost, estimate_depth_ratio
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.acceptance import MAX_DRAFTS, Floats
from localspec.engine.speculation.cost import AttentionCost, Clock, CostTable, WidthHistory
from localspec.engine.speculation.depth import MAX_DEPTH, PassCosts
from localspec.engine.speculation.drafters.draft_model import DraftModel

EXACT_CHUNK_TOKENS = 128  # tokens of a prompt read in one pass of the exact lane
MIN_LEARNED_ROWS = 24  # a pass with fewer rows says little about the cost of a prompt's row
MIN_PROMPT_ROWS = 8  # least tokens of prompts in a pass beside running generations
# The share of the allowed pause that is planned for a pass that reads prompts. The longest of hundreds takes
# a third more than expected.
PLANNED_GAP_SHARE = 0.75
TOKEN_COST_TOKENS = 512  # tokens of earlier answers that count beside the last one
# Weight of the last pass in the expected cost of scored rows, unless it was dearer.
SCORE_COST_WEIGHT = 0.2
# A pass that reads prompts has just begun during this share of its time, and at most so many seconds.
# Requests that are sent together arrive within some milliseconds.
START_SHARE, MAX_START_S = 1 / 8, 0.02


class Lane:
    """One target context with its slots and its running sequences.

    width: None for passes as wide as needed, padded where that is cheaper; else always this many rows.
    pass_s: longest pass in seconds. gap_s: longest pass that reads prompts beside sequences that decode,
    which have to wait for it. 0: no limit.
    attention: the costs of attention as learned before.
    on_gpu: the lane computes on a GPU, where a pass cannot be interrupted.
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
        reading: tuple[float, float] | None = None,
    ) -> None:
        self.context, self.batch, self.slots = context, batch, slots
        self.costs, self.width, self._clock = costs, width, clock
        # An overestimate, because it comes from narrow passes, in which every row has logits.
        first_s = costs.per_token_ms(WIDTHS[-1]) / 1e3
        depth_ratio = estimate_depth_ratio(context.model)
        self.reading = PrefillCost(first_s, depth_ratio, context.n_ctx, reading)
        # The cost that prompts show, until passes that decode have been observed.
        self.attention = AttentionCost(
            lambda: 1e3 * self.reading.expected.deeper_s, attention, on_gpu
        )
        self._on_gpu = on_gpu
        self._widths = WidthHistory(costs.change)
        self.drafter: DraftModel | None = None  # only of this lane, if it is not the pair's
        self.active: list[Sequence] = []
        self.n_ended = 0  # requests that have ended in this lane
        self.began = 0.0  # when the last pass began (perf_counter)
        # A state that can go back only a few tokens also limits how far a pass may run ahead.
        self.rollback = None if context.model.cuttable else context.n_rollback
        self.busy_s = 0.0  # time inside llama.cpp
        self.expected_ms = 0.0  # what the passes so far should have taken
        self.spent_s = 0.0  # time of the last pass
        # The cost of a prompt's row with log-probabilities, in rows without them.
        self._scored_cost: float | None = None
        # Milliseconds per token of answers that had the lane to themselves, on a quiet machine.
        self.token_ms: float | None = None
        # Passes since the last request ended, and the sum of the sequences in them.
        self.n_passes = self.n_sequence_passes = 0
        self._pass_s, self._gap_s = pass_s or math.inf, gap_s or math.inf

    def use_costs(self, measured: PassTimes) -> None:
        """Replace what was measured and learned of passes."""
        self.costs.replace(measured.ms, measured.change)
        self._widths = WidthHistory(measured.change)

    @property
    def exact(self) -> bool:
        return self.width is not None

    @property
    def max_depth(self) -> int | None:
        """The most tokens that a pass can take back; None: no limit."""
        if self.width is not None:
            return self.width - 1
        return self.rollback

    @property
    def needs_equal_rows(self) -> bool:
        """Whether all sequences of a pass with drafts must have the same number of rows.

        llama.cpp cuts a pass over recurrent states into pieces with equal numbers of rows. Between the pieces
        it may move a state away from the snapshots that a rollback of its drafts needs.
        """
        return self.rollback is not None

    def make_pass_costs(self, n_sequences: int) -> PassCosts:
        """Return the costs of passes over `n_sequences` sequences, for a decision."""
        n_equal_sequences = n_sequences if self.needs_equal_rows and n_sequences > 1 else 0
        known = np.empty(0)  # for all that the decision asks for

        def ms(rows: int) -> Floats:
            nonlocal known
            if len(known) <= rows:
                known = self.pass_ms(max(rows, n_sequences + MAX_DRAFTS), n_sequences)
            return known[: rows + 1]

        change_ms, used = self.costs.change.total_ms, self._widths.used
        if not change_ms or self.width is not None:
            return PassCosts(ms, n_equal_sequences)
        table = self.costs.for_sequences(n_sequences)
        plain_width = table.padded_width(n_sequences, used)

        def switch_ms(rows: int) -> float:
            width = table.padded_width(rows, used)
            comes_back = width != used.rows and plain_width == used.rows
            counted_ms = used.price_ms(width) - used.price_ms(plain_width)
            return self._widths.settling_ms(width) + change_ms * comes_back - counted_ms

        return PassCosts(ms, n_equal_sequences, switch_ms, 2 * change_ms)

    def pass_ms(self, rows: int, n_sequences: int = 1) -> Floats:
        """Return the milliseconds (rows + 1,) of a pass, by the number of rows that it must hold.

        The pass is over `n_sequences` sequences, as deep in their texts as those that decode now.
        """
        counts = np.arange(rows + 1)
        if self.width is None:
            attention_ms = self.attention.ms(counts, n_sequences, self._depth)
            attention_ms[0] = 0.0  # no pass
            costs = self.costs.for_sequences(n_sequences)
            return np.asarray(costs.padded_ms(rows, self._widths.used) + attention_ms)
        return np.asarray(-(-counts // self.width) * self.plain_ms(1))

    def plain_ms(self, n_sequences: int) -> float:
        """Return the milliseconds of a pass in which each sequence has one row, as all before it."""
        rows, costs = self.width or n_sequences, self.costs.for_sequences(n_sequences)
        width_ms = costs.ms(self.width or costs.padded_width(rows))
        return width_ms + self.attention.ms(float(rows), n_sequences, self._depth)

    @property
    def _depth(self) -> float:
        """Average number of tokens before those that are decoded."""
        depths = [sequence.slot.n_past for sequence in self.active if not sequence.prefilling]
        return sum(depths) / max(len(depths), 1)

    def choose_width(self, rows: int, n_sequences: int = 1) -> int:
        """Return the width of the next pass, which must hold `rows` rows of `n_sequences` sequences."""
        if self.width is not None:
            return max(self.width, rows)
        return self.costs.for_sequences(n_sequences).choose_width(rows, self._widths.used)

    def limit_chunk(self, start: int, n_unread: int, max_tokens: int) -> int:
        """Return how many of `n_unread` prompt tokens to read in one pass, from position `start`."""
        if self.width is not None:
            return min(EXACT_CHUNK_TOKENS - start % EXACT_CHUNK_TOKENS, n_unread)
        return min(n_unread, max_tokens)

    def max_prompt_rows(self, n_decoding: int) -> int:
        """Return how many tokens of prompts a pass may read in total beside `n_decoding` sequences."""
        affordable = PLANNED_GAP_SHARE * self._gap_s / self._row_s
        rows = min(affordable, self.batch.capacity) - n_decoding  # a decoded row costs as much
        return min(self.max_rows, int(max(rows, MIN_PROMPT_ROWS)))

    @property
    def can_interrupt(self) -> bool:
        """Whether a pass over several texts can be interrupted.

        llama.cpp allows that on a CPU only, and a recurrent state cannot be restored afterwards.
        """
        return self.slots.cuttable and not self._on_gpu

    @property
    def is_long(self) -> bool:
        """Whether a pass over the batch takes longer than other requests should wait for it."""
        return self.batch.rows * self._row_s > self._gap_s

    @property
    def start_s(self) -> float:
        """For how many seconds a pass over the batch counts as having just begun."""
        return min(START_SHARE * self.batch.rows * self._row_s, MAX_START_S)

    @property
    def _row_s(self) -> float:
        """Seconds per token of the prompt that is read at the greatest depth, also by a draft."""
        slots = [sequence.slot for sequence in self.active if sequence.prefilling]
        along_s = max((slot.along_s for slot in slots), default=0.0)
        return self.reading.planned_s(max((slot.n_past for slot in slots), default=0)) + along_s

    @property
    def max_rows(self) -> int:
        """The most tokens of prompts that a pass may read within its time limit, at least one.

        The exact lane always reads the same chunks, whatever they cost.
        """
        return int(max(min(self._pass_s / self._row_s, self.batch.capacity), 1))

    def to_scored_rows(self, rows: int) -> int:
        """Return how many rows with log-probabilities cost as much as `rows` without, at least one."""
        if self._scored_cost is None:
            return min(rows, MIN_PROMPT_ROWS)
        return max(int(rows / self._scored_cost), 1)

    def to_plain_rows(self, scored: int) -> int:
        """Return how many rows without log-probabilities cost as much as `scored` rows with them."""
        return math.ceil(scored * (self._scored_cost or 1.0))

    def observe_scores(self, rows: int, seconds: float) -> None:
        """Learn from a pass with `rows` scored rows that took `seconds`, log-probabilities included.

        A higher cost is believed at once, because other requests wait for these rows.
        """
        others_s = (self.batch.rows - rows) * self._row_s
        cost = max((seconds - others_s) / (rows * self._row_s), 1.0)
        known_cost = self._scored_cost or cost
        self._scored_cost = max(cost, known_cost + SCORE_COST_WEIGHT * (cost - known_cost))

    def observe_answer(self, tokens: int, rounds: int, quiet_ms: float) -> None:
        """Learn what a token costs from an answer that has just ended, if none was decoded beside it.

        quiet_ms: the milliseconds that its rounds would have taken on a quiet machine.
        """
        if self.n_passes == self.n_sequence_passes >= rounds:
            weight = 1 if self.token_ms is None else tokens / (tokens + TOKEN_COST_TOKENS)
            self.token_ms = (self.token_ms or 0.0) * (1 - weight) + weight * quiet_ms / tokens

    def decode(self, timed: bool, n_sequences: int = 1, *, scored: bool = False) -> float:
        """Make one pass over the batch of `n_sequences` sequences, and return its seconds.

        timed: the cost table learns from it. scored: it has rows of a prompt with logits, which cost more
        than others.
        """
        self.began = time.perf_counter()
        start = self._clock()
        self.context.decode(self.batch)
        self.context.synchronize()
        spent_s = self.spent_s = self._clock() - start
        self.busy_s += spent_s
        self.n_passes += 1
        self.n_sequence_passes += n_sequences
        rows, costs = self.batch.rows, self.costs.for_sequences(n_sequences)
        depth, width_ms = self.batch.mean_position, costs.ms(rows)
        attention_ms = self.attention.ms(float(rows), n_sequences, depth)
        self.expected_ms += width_ms + attention_ms + self._widths.settling_ms(rows)
        self._widths.note(rows)
        if timed and self._widths.is_replayed:
            pass_ms = spent_s * 1e3
            costs.observe(rows, self.attention.observe(rows, n_sequences, depth, pass_ms, width_ms))
        elif not timed and not scored and rows >= min(self.max_prompt_rows(0), MIN_LEARNED_ROWS):
            self.reading.observe(rows, depth, spent_s)
        return spent_s


# What fits into a lane: one more text, drafts beside a prompt, and a new request while a pass runs.

# Tokens that each sequence can still generate before one may be preempted for the others. Preemption costs
# reading a text again, so some progress must come first.
GROWTH_TOKENS = 64
# Drafts may replace one in so many tokens of a prompt that is read in the same pass.
PROMPT_TOKENS_PER_DRAFT = 4


def fits_context(lane: Lane, waiting: TokenizedRequest | Sequence) -> bool:
    """Whether a request fits beside those that run, with room for all to go on for a while.

    A request that runs alone always fits. A preempted one waits until another has ended, so that requests
    are not started and stopped in turns.
    """
    if not lane.active:
        return True
    if any(sequence.runs_alone for sequence in lane.active):
        return False
    growth = sum(min(sequence.remaining, GROWTH_TOKENS) for sequence in lane.active)
    if isinstance(waiting, Sequence):
        if waiting.runs_alone or waiting.preempted_at == lane.n_ended:
            return False
        growth += min(waiting.remaining, GROWTH_TOKENS)
    else:
        max_tokens = waiting.request.max_tokens
        growth += GROWTH_TOKENS if max_tokens is None else min(max_tokens, GROWTH_TOKENS)
    texts = [waiting.tokens, *(sequence.tokens for sequence in lane.active)]
    n_cells, n_free = sum(map(len, texts)), lane.context.n_ctx - growth
    if n_cells > n_free:
        # At best each text shares its beginning with the others as far as it can. Texts that are read at the
        # same time share less.
        n_cells -= sum(common_prefix(a, b) for a, b in pairwise(sorted(texts)))
    return n_cells <= n_free


def max_draft_rows_beside(lane: Lane, sequences: list[Sequence], n_decoding: int) -> int:
    """Return how many rows of drafts a pass may have that other sequences wait for.

    Copied text must not delay them too much, and where a prompt is read in the same pass, drafts must not
    make it longer than it may be.
    """
    max_prompt_rows = lane.max_prompt_rows(n_decoding)
    max_rows = max(max_prompt_rows, MAX_DEPTH * n_decoding)
    prompts = [sequence for sequence in sequences if sequence.prefilling]
    if not prompts:
        return max_rows
    remaining = max_prompt_rows - sum(len(sequence.step.read) for sequence in prompts)
    n_unfinished = sum(len(sequence.step.read) for sequence in prompts if sequence.has_more_prompt)
    if any(sequence.request.priority == "editor" for sequence in prompts):
        n_unfinished = 0
    return min(max_rows, max(remaining, 0) + n_unfinished // PROMPT_TOKENS_PER_DRAFT)


def choose_interruptions(
    lane: Lane, sequences: list[Sequence], writing: bool
) -> tuple[list[int], float]:
    """Return the ids of requests whose withdrawal interrupts the pass, and when a new one does.

    The latter is a number of seconds from the start of the pass: 0.0 for never, inf for always.
    The withdrawal of a request with more than half of the rows does, because the rest is soon done again. A
    new request does unless somebody is `writing`: at any time if the pass is long or reads ahead, but not
    again just after such an interruption; otherwise only as the pass begins, so that requests sent together
    are read together.
    """
    own_slot = sequences[0].slot
    if not lane.slots.cuttable and any(slot.n_past for slot in lane.slots if slot is not own_slot):
        return [], 0.0  # a pass of llama.cpp moves the states of all of them
    rows = lane.batch.rows
    withdrawals = [s.id for s in sequences if s.prefilling and 2 * len(s.step.read) > rows]
    makes_room = lane.slots.cuttable and lane.slots.free
    reads_in_short_passes = any(sequence.reads_in_short_passes for sequence in sequences)
    if not makes_room or writing or lane.exact or reads_in_short_passes:
        return withdrawals, 0.0
    if lane.is_long or all(sequence.reads_ahead for sequence in sequences):
        return withdrawals, math.inf
    return withdrawals, lane.start_s if all(sequence.may_restart for sequence in sequences) else 0.0
