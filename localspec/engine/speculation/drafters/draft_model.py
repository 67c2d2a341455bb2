"""The draft model: a second GGUF that proposes tokens and keeps a KV cache of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from localspec.compatibility import Compatibility
from localspec.engine.cache.slot import ALL_TOKENS, TAIL_STATES, Slot
from localspec.engine.llama import Batch, Context, Logits, NoKvSlot, States, Stop, Vocab, is_picture
from localspec.engine.speculation.acceptance import INITIAL_ACCEPTANCE, Belief, find_bucket
from localspec.engine.speculation.cost import (
    GUESSED_ROUNDS,
    ChangeCost,
    Clock,
    CostTable,
    WidthHistory,
    average_with,
)
from localspec.engine.speculation.depth import MAX_DEPTH, Candidate, RoundCosts, decide
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.windows import COMPARED_TOKENS, WindowTable

# A probe reads this many tokens before the positions that it compares: enough for a good prediction, without
# the cost of the whole text. The predictions of the last rows are compared with what the target wrote. More
# rows would cost the draft's output matrix for each, and four in a row already show what the text is like.
PROBE_CONTEXT_TOKENS, PROBE_ROWS = 20, 4
PREFILL_WIDTH = 64  # the cost per token of a pass of this width stands for that of a prompt


# A draft's confidence is computed from at least so many tokens of its row, evenly spread, and from all that
# are at least _LIGHT times as likely, unless these are more than 1/16 of the row.
_MIN_SAMPLED_TOKENS, _LIGHT, _MAX_HEAVY_SHARE = 4096, math.exp(-5), 1 / 16
ROUND_WEIGHT = 0.1  # of the last round in the cost of a round's first draft
READ_WEIGHT = 0.3  # of the last part of a prompt in the cost of its tokens
# What reading a prompt along with the target may cost: this share of what drafts gain in the answer, and of
# the time until its first token.
GAIN_SHARE, MAX_DELAY_SHARE = 0.5, 0.03
UNREAD_TAIL_TOKENS = 8  # tokens that are left for the pass of the first draft
PROBE_INTERVAL_TOKENS = 8  # fewest tokens between two probes
MAX_HURRIED_TOKENS = (
    16  # most tokens that the draft reads while a request waits for its first token
)
MIN_PROBE_REMAINING = 32  # with fewer tokens to come a probe cannot pay


class ModelDrafter(Drafter):
    """Drafts of a second model for one sequence. Each costs a pass of that model."""

    kind, rank, initial_acceptance = "draft", 1, INITIAL_ACCEPTANCE
    called = "the draft model"
    costly = True

    @classmethod
    def serves(cls, resources: Resources) -> bool:
        model = resources.model
        return cls.asked_for(resources.asked) and model is not None and model.kind == cls.kind

    def __init__(self, resources: Resources, belief: Belief) -> None:
        super().__init__(resources, belief)
        assert resources.model is not None
        self.model, self._slots = resources.model, resources.slots
        self._balance = resources.budget.model
        self._tokens_since_probe = 0  # tokens written since drafts were last tried or probed

    def offer(self, request: DraftRequest) -> Candidate | None:
        if request.hurried and self.model.count_unread(request.slot) > MAX_HURRIED_TOKENS:
            return None
        # Rounds that share the cost of a first prefill.
        spread = max(min(request.left, 96) / 4, 1.0)
        entry_ms = self.model.prefill_ms(request.slot) / spread
        model = self.model
        return Candidate(
            self.belief,
            request.limit,
            model.draft_ms,
            entry_ms,
            steps=model.steps,
            round_ms=model.round_ms,
        )

    def propose(self, requests: list[DraftRequest]) -> None:
        self.model.propose(requests)

    def observe(self, request: DraftRequest, kept_tokens: list[int], used: bool) -> None:
        super().observe(request, kept_tokens, used)
        if not request.tokens:
            self.belief.fade(len(kept_tokens))

    def observe_round(self, used: bool, tokens: int, spent_ms: float, plain_ms: float) -> None:
        if used:
            self._tokens_since_probe = 0
            return
        self._tokens_since_probe += tokens
        calibration = self.belief.calibration
        calibration.probes.refill(spent_ms, plain_ms, new=calibration.is_new)

    def probe(self, slot: Slot, remaining: int) -> bool:
        if self._tokens_since_probe < PROBE_INTERVAL_TOKENS or remaining < MIN_PROBE_REMAINING:
            return False
        if not self._balance.pay_probe(self.model.probe_ms, self.belief.calibration.probes):
            return False
        self._tokens_since_probe = 0
        self.model.probe(slot, self.belief)
        return True

    def plan_reading(
        self, slot: Slot, n_left: int, costs: RoundCosts, prompt_ms: float, n_free: int, fixed: bool
    ) -> None:
        """Decide how much of its prompt the draft reads along with the target.

        It reads as much as it gains in `n_left` tokens by what is known, and delays the first token little.

        prompt_ms: the target's time for the prompt. n_free: tokens that delay nothing, because the draft
        reads the last pass over the prompt after the first token. fixed: it drafts whatever that costs.
        """
        model, length = self.model, len(slot.tokens)
        candidate = self.offer(DraftRequest(slot, min(n_left, MAX_DEPTH), left=n_left))
        if slot.hidden is None or model.context.borrows or candidate is None:
            return
        candidate.entry_ms = 0.0
        plain_ms, token_ms = float(costs.pass_ms[1]) + costs.plain_ms, model.token_prefill_ms
        gain_ms = n_left * (plain_ms - 1 / decide([candidate], costs).rate)
        max_ms = MAX_DELAY_SHARE * prompt_ms + n_free * token_ms
        count = ALL_TOKENS if fixed else int(min(GAIN_SHARE * gain_ms, max_ms) / token_ms)
        if count > 2 * TAIL_STATES:  # the states of so many tokens are kept anyway
            seen = self.belief.calibration.windows.choose(length)
            model.context.remove(slot.draft_id, 0, max(length - seen, 0))
            count = min(count, seen)
            slot.window = count if count < length - slot.n_past else ALL_TOKENS
            slot.along_s = token_ms / 1e3

    def read_along(self, slot: Slot) -> None:
        if not slot.window or slot.n_past - self.model.first_unread(slot) <= TAIL_STATES:
            return
        # Its answer is read at the cost of the budget, in case that drafts do not pay in it.
        n_generated = max(slot.n_past - max(slot.n_past_draft, slot.n_prompt), 0)
        if self._balance.pay(n_generated * self.model.token_prefill_ms):
            self.model.read_along(slot)
        else:
            slot.window = 0

    def close(self, slot: Slot) -> None:
        slot.window = 0
        self._slots.roll_back_draft(slot, 0)


class DraftModel:
    """Drafts for several sequences in one pass per depth. Nothing that it drafted is read again.

    kind: the kind of the drafters that use it.
    """

    kind: ClassVar[str] = ModelDrafter.kind

    def __init__(
        self,
        context: Context,
        batch: Batch,
        costs: CostTable,
        make_room: Callable[[], bool],
        scratch: int,
        shared: SharedTokens,
        clock: Clock = time.perf_counter,
        pass_s: float = 0.0,
        gap_s: float = 0.0,
    ) -> None:
        """Wrap the context of a draft model.

        make_room: called when the KV is full; frees some, or returns False.
        scratch: a sequence of the context that no slot uses.
        shared: translates between the target's ids and the draft's.
        pass_s: longest pass in seconds. gap_s: longest time in a round for reading texts, for which all
        sequences wait. 0: no limit.
        """
        self._shared = shared
        self._make_room = make_room
        self._clock = clock
        self._pass_s, self._gap_s = pass_s, gap_s
        self._scratch = scratch
        self.context = context
        self._batch = batch
        self._costs = costs
        self._widths = WidthHistory(costs.change)
        # What a prompt's token has cost with its states; 0: not known yet.
        self._read_ms = 0.0
        self.busy_s = 0.0  # time inside llama.cpp
        self.own_s = 0.0  # time of drafting outside llama.cpp
        self.expected_ms = 0.0  # what all of it should have taken
        # The time of one more draft in total, by how many sequences draft together.
        self.steps = CostTable({m: costs.ms(m) for m in (1, 2, 4, 8)}, GUESSED_ROUNDS)
        # What the first draft of a round costs a sequence more than others, because it reads what was
        # accepted: often one token more, in the same pass or, every other round, in one of its own.
        self.round_ms = max(costs.ms(2) - costs.ms(1), 0.0)
        if costs.change.total_ms:
            self.round_ms = costs.ms(1) / 2
        # The time of a probe, corrected by each.
        self.probe_ms = costs.ms(PROBE_CONTEXT_TOKENS + PROBE_ROWS)

    def run_width(self, width: int) -> None:
        """Make a pass of so many rows, to measure it."""
        self._batch.clear()
        for position in range(width):
            self._batch.add(position % 7, position, self._scratch, position == width - 1)
        self.context.decode(self._batch)
        self.context.synchronize()
        self.context.remove(self._scratch, 0)

    def use_costs(self, measured: Mapping[int, float], change: ChangeCost) -> None:
        """Replace what was measured and learned of passes."""
        before_ms = self._costs.ms(1)
        self._costs.replace(measured, change)
        self._widths = WidthHistory(change)
        self.steps.replace({m: self._costs.ms(m) for m in (1, 2, 4, 8)})
        self.round_ms *= self._costs.ms(1) / before_ms
        self.probe_ms *= self._costs.ms(1) / before_ms

    def first_unread(self, slot: Slot) -> int:
        """Return the first token of a slot that the draft model has to read."""
        return slot.n_past_draft

    def count_unread(self, slot: Slot) -> int:
        """Return how many tokens of a slot are unread. The last one is read by the first draft."""
        return len(slot.tokens) - self.first_unread(slot)

    def prefill_ms(self, slot: Slot) -> float:
        """Return the cost of reading a slot's unread text except the last token, in milliseconds."""
        return max(self.count_unread(slot) - 1, 0) * self.token_prefill_ms

    def read_along(self, slot: Slot) -> None:
        """Read what the target has read, so that its states need not be kept."""
        if slot.hidden is None or slot.hidden.end < slot.n_past:
            return  # those of the last pass are unknown, or too far from the end of the prompt
        start, busy, begin = self._clock(), self.busy_s, self.first_unread(slot)
        self._prefill(slot, min(slot.n_past, len(slot.tokens) - 1 - UNREAD_TAIL_TOKENS))
        slot.hidden.drop_read(slot.n_past_draft)
        spent, n_read = self._clock() - start, slot.n_past_draft - begin
        self.own_s += spent - (self.busy_s - busy)
        if n_read >= PREFILL_WIDTH:
            read_ms = (spent + slot.hidden.copy_s) * 1e3 / n_read
            self._read_ms = average_with(self.token_prefill_ms, read_ms, READ_WEIGHT)
        slot.hidden.copy_s = 0.0

    @property
    def draft_ms(self) -> float:
        """The cost of one more draft for one sequence, in milliseconds."""
        return self.steps.ms(1)

    @property
    def token_prefill_ms(self) -> float:
        """The cost of a prompt's token in milliseconds, in wide passes."""
        return self._read_ms or self._costs.per_token_ms(PREFILL_WIDTH)

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        """Draft for each request until its `more` returns False.

        A request whose text is long gets no drafts until enough of it is read, a part in each round.

        Raises:
            NoKvSlot: The running requests fill the draft's context.
            NotFinite: The draft model's logits are NaN or infinite.
        """
        start, busy = self._clock(), self.busy_s
        active = self._read_texts([request for request in requests if request.more(request)])
        step_start, is_first = self._clock(), True
        width, later_ms = self._read_singly(active), dict[int, list[float]]()
        while active:
            rows = self._fill_batch(active)
            self._run_padded_pass(width, timed=is_first)
            for request, (row, length) in zip(active, rows, strict=True):
                self._note_read(request, row, length)
                self._append_draft(request, row)
            self.expected_ms += self.steps.ms(len(rows)) + is_first * len(rows) * self.round_ms
            spent_ms = (self._clock() - step_start) * 1e3
            if self._widths.is_replayed:  # a change of width says nothing about other rounds
                if is_first:  # it reads text as well
                    step_ms = self.steps.ms(len(rows))
                    first_ms = average_with(
                        step_ms + len(rows) * self.round_ms, spent_ms, ROUND_WEIGHT
                    )
                    self.round_ms = max(first_ms - step_ms, 0.0) / len(rows)
                else:
                    later_ms.setdefault(max(len(rows), width), []).append(spent_ms)
            active = [request for request in active if request.more(request)]
            step_start, is_first = self._clock(), False
        for sequences, times in later_ms.items():
            self.steps.observe(sequences, sum(times) / len(times))
        self.own_s += self._clock() - start - (self.busy_s - busy)

    def _read_singly(self, requests: Sequence[DraftRequest]) -> int:
        """Read all but the last unread token of each text in passes as narrow as those of drafts.

        Return the width of these passes, which is then that of all passes of the round; 0 if a wide pass
        costs less than narrow ones, whose width does not change.
        """
        width = len(requests)
        unread = [self.count_unread(request.slot) for request in requests]
        if not requests or not self._costs.change.total_ms or self.context.borrows:
            return 0
        wide_ms = self._costs.ms(sum(unread)) + self._costs.change.first_ms
        change_ms = self._costs.change.total_ms if sum(unread) > width else 0.0
        if max(unread) * self._costs.ms(width) > wide_ms + change_ms:
            return 0
        for _ in range(max(unread) - 1):
            self._batch.clear()
            ends = []
            for request in requests:
                if self.count_unread(slot := request.slot) > 1:
                    begin = self.first_unread(slot)
                    row = self._add_text(slot, begin, begin + 1, begin, slot.draft_id)
                    ends.append((request, row, begin + 1))
            self._run_padded_pass(width)
            for request, row, end in ends:
                self._note_read(request, row, end)
        return width

    def _run_padded_pass(self, width: int, timed: bool = True) -> None:
        """Run a pass with rows that nobody reads, until it has `width`."""
        n_added = max(width - self._batch.rows, 0)
        for position in range(n_added):
            self._batch.add(0, position, self._scratch, True)
        try:
            self._run_pass(timed)
        finally:
            if n_added:
                self.context.remove(self._scratch, 0)

    def _fill_batch(self, requests: Sequence[DraftRequest]) -> list[tuple[int, int]]:
        """Fill the batch with the unread tokens. Return each request's last row, and its length then."""
        self._batch.clear()
        rows = []
        for request in requests:
            slot, drafted = request.slot, request.tokens
            length = len(slot.tokens) + len(drafted)
            if drafted:
                row = self._add_draft(request, length - 1)
            else:
                begin = self.first_unread(slot)
                row = self._add_text(slot, begin, length, begin, slot.draft_id)
            rows.append((row, length))
        return rows

    def _add_text(
        self, slot: Slot, start: int, end: int, position: int, sequence: int, n_logits: int = 1
    ) -> int:
        """Put tokens [start, end) of a slot's text into the batch, and return the last row.

        position: where they begin in `sequence`. n_logits: how many of the last ones get logits.
        """
        row = -1
        for index in range(start, end):
            token = self._shared.to_draft(slot.tokens[index])
            row = self._batch.add(
                token, position + index - start, sequence, index >= end - n_logits
            )
        return row

    def _add_draft(self, request: DraftRequest, position: int) -> int:
        """Put the last draft of a request into the batch, and return its row."""
        token = self._shared.to_draft(request.tokens[-1])
        return self._batch.add(token, position, request.slot.draft_id, True)

    def _note_read(self, request: DraftRequest, row: int, length: int) -> None:
        """Note that the last pass has read a request's text up to `length`, the end of it in `row`."""
        request.slot.set_draft_length(length)

    def _read_texts(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Read texts as far as there is time. Return the requests whose text is read."""
        ready, budget = [], self._count_tokens_in(self._gap_s)
        for request in requests:
            slot = request.slot
            n_before, end = slot.n_past_draft, len(slot.tokens) - 1 - UNREAD_TAIL_TOKENS
            self._prefill(slot, min(end, n_before + budget))
            budget -= max(slot.n_past_draft - n_before, 0)
            if slot.n_past_draft >= end:
                self._save_mark(slot)
                ready.append(request)
        return ready

    def _count_tokens_in(self, seconds: float) -> int:
        """Return how many tokens of a text are read in that time, at least one; 0 seconds: no limit."""
        return max(int(seconds * 1e3 / self.token_prefill_ms), 1) if seconds else 1 << 31

    def _read_logits(self, row: int, drafted: Sequence[int]) -> Logits:
        """Return the draft's logits in a row of the last pass. drafted: the round's drafts before it."""
        del drafted
        return self.context.logits(row)

    def _predict(self, row: int, drafted: Sequence[int] = ()) -> tuple[int, int]:
        """Return the likeliest token in a row of the last pass, and the bucket of its confidence."""
        return self._judge(self._shared.only_shared(self._read_logits(row, drafted)))

    def _judge(self, logits: Logits) -> tuple[int, int]:
        """Return the likeliest token and the bucket of its confidence."""
        token = self.context.find_highest(logits)
        return token, find_bucket(probability(logits, token))

    def _save_mark(self, slot: Slot) -> None:
        """Save a state that cannot be cut, so that `Slots` can go back to it after a rejection."""
        if not self.context.cuttable and slot.n_past_draft:
            slot.draft_mark = slot.n_past_draft, self.context.save(slot.draft_id, partial=True)

    def _append_draft(self, request: DraftRequest, row: int) -> None:
        """Add the draft that a row of the last pass gives.

        Where drafts are compared with what the target draws, they are drawn as the target's tokens are, with
        the same delays for seed, place and token. Draft and target then meet with a probability of at least
        (1 - d) / (1 + d), where d is the total variation between them (Daliri et al. 2025). The likeliest
        token would be met with the target's probability of it.
        """
        if request.sampler is None:
            token, bucket = self._predict(row, request.tokens)
        else:
            logits = self._read_logits(row, request.tokens)
            self.context.find_highest(logits)
            adjusted = request.sampler.adjusted(
                self._shared.to_target_logits(logits), request.slot.tokens, drafts=request.tokens
            )
            position = request.generated + len(request.tokens)
            probs = request.sampler.distribution(adjusted, position)
            if request.reject:
                token = probs.pick(request.sampler.uniform())
                request.probs.append(probs)
            else:
                token = request.sampler.draw(probs, position)
            bucket = find_bucket(probs.probability_of(token))
        request.tokens.append(token)
        request.buckets.append(bucket)

    def probe(self, slot: Slot, belief: Belief) -> None:
        """Check whether the draft model predicts the end of a text that was written without it.

        It reads the last tokens in one pass, in a sequence of their own. The text before them stays unread,
        so a probe costs the same in texts of any length.
        """
        start = self._clock()
        end = len(slot.tokens) - 1
        begin = max(end - PROBE_CONTEXT_TOKENS - PROBE_ROWS, 0)
        self._batch.clear()
        n_compared = min(PROBE_ROWS, end - begin)
        last_row = self._add_text(slot, begin, end, 0, self._scratch, n_compared)
        predictions = self._run_comparison(last_row, n_compared)
        for logits, token in zip(predictions, slot.tokens[end + 1 - n_compared :], strict=True):
            belief.observe(*self._compare(logits, token))
        self._time_probe(start)

    def compare_windows(self, slot: Slot, table: WindowTable, stop: Stop | None) -> None:
        """Learn how well the end of an idle text is predicted with each window in sight.

        Raises:
            Aborted: `stop` has ended a pass.
            NoKvSlot, NotFinite: as of `propose`; no other text makes room.
        """
        assert slot.hidden is not None
        end = min(slot.n_past_draft, len(slot.tokens) - 1)
        begin = max(end - COMPARED_TOKENS, slot.hidden.start + 1)
        windows = table.list_windows(begin)
        if begin >= end or self.context.first_position(slot.draft_id) > 1:
            return
        make_room, self._make_room, self.context.stop = self._make_room, lambda: False, stop
        try:
            hits = [self._count_hits(slot, begin, end, window) for window in windows]
        finally:
            self._make_room, self.context.stop = make_room, None
        table.observe(begin, hits, end - begin)

    def _count_hits(self, slot: Slot, begin: int, end: int, window: int) -> int:
        """Return how many tokens behind those in [begin, end) are predicted with `window` tokens in sight."""
        hits, n_rows = 0, min(self.context.n_outputs, COMPARED_TOKENS)
        for first in range(begin, end, n_rows):
            last = min(first + n_rows, end)
            self._batch.clear()
            last_row = self._add_text(slot, first, last, first, self._scratch, last - first)
            start = max(first - window, 0)
            self.context.copy(slot.draft_id, self._scratch, first, start=start)
            predictions = self._run_comparison(last_row, last - first)
            next_tokens = slot.tokens[first + 1 : last + 1]
            hits += sum(
                self._judge(logits)[0] == token
                for logits, token in zip(predictions, next_tokens, strict=True)
            )
        return hits

    def _time_probe(self, start: float) -> None:
        """Learn from the time of a probe that began at `start`."""
        self.expected_ms += self.probe_ms
        self.probe_ms = average_with(self.probe_ms, (self._clock() - start) * 1e3, 0.3)

    def compare_predictions(
        self, tokens: Sequence[int], chosen: Sequence[int], states: States | None = None
    ) -> list[tuple[int, bool]]:
        """Compare its predictions with what the target has `chosen` after each of the last `tokens`.

        Returns, for each, the bucket of the prediction's confidence and whether it was right. `chosen` must
        not be longer than the rows with logits of a pass. states: as of `read_predictions`.
        """
        predictions = self.read_predictions(tokens, len(chosen), states)
        return [
            self._compare(logits, token) for logits, token in zip(predictions, chosen, strict=True)
        ]

    def review(
        self, tokens: Sequence[int], count: int, stop: Stop | None
    ) -> list[tuple[int, bool]]:
        """Compare its predictions of the last `count` of `tokens` with them, as `compare_predictions` does.

        As many tokens before them are read as a pass holds that delays nobody for long.

        Raises:
            Aborted: `stop` has ended the pass.
            NoKvSlot, NotFinite: as of `propose`.
        """
        limit = min(self._batch.capacity, self.context.n_ctx, self._count_tokens_in(self._gap_s))
        count = min(count, self.context.n_outputs, limit, len(tokens) - 1)
        self.context.stop = stop
        try:
            return self.compare_predictions(tokens[-limit - 1 : -1], tokens[-count:])
        finally:
            self.context.stop = None

    def _compare(self, logits: Logits, token: int) -> tuple[int, bool]:
        best, bucket = self._judge(logits)
        return bucket, best == token

    def read_predictions(
        self, tokens: Sequence[int], count: int, states: States | None = None
    ) -> Iterator[Logits]:
        """Yield the logits of what it drafts after each of the last `count` of `tokens`, by the target's ids.

        Each is valid until the next one. states: the target's after each of `tokens`, where they are read.
        """
        del states
        self._batch.clear()
        last_row = -1
        for position, token in enumerate(tokens):
            last_row = self._batch.add(
                self._shared.to_draft(token),
                position,
                self._scratch,
                position >= len(tokens) - count,
            )
        return self._run_comparison(last_row, count)

    def _run_comparison(self, last_row: int, count: int) -> Iterator[Logits]:
        """Yield the logits of the last `count` rows of the text in the batch, and remove it again."""
        try:
            self._run_pass(timed=False)
        finally:
            self.context.remove(self._scratch, 0)
        for row in range(last_row + 1 - count, last_row + 1):
            yield self._shared.only_shared(self._read_logits(row, ()))

    def _prefill(self, slot: Slot, end: int) -> None:
        """Read the tokens up to `end` in chunks."""
        max_tokens = min(self._batch.capacity, self._count_tokens_in(self._pass_s))
        while (size := min(end - slot.n_past_draft, max_tokens)) > 0:
            start = slot.n_past_draft
            self._batch.clear()
            self._add_text(slot, start, start + size, start, slot.draft_id, n_logits=0)
            self._run_pass(timed=False)
            self.expected_ms += size * self.token_prefill_ms
            slot.set_draft_length(slot.n_past_draft + size)

    def _run_pass(self, timed: bool = True) -> None:
        spent = self._decode(self._batch)
        if timed and self._widths.is_replayed:
            self._costs.observe(self._batch.rows, spent * 1e3)

    def _decode(self, batch: Batch) -> float:
        """Run a pass, with room made for it if there is none, and return its seconds."""
        start = self._clock()
        while True:
            try:
                self.context.decode(batch)
                break
            except NoKvSlot:
                if not self._make_room():
                    raise
        self.context.synchronize()
        self.expected_ms += self._widths.settling_ms(batch.rows)
        self._widths.note(batch.rows)
        spent = self._clock() - start
        self.busy_s += spent
        return spent


def probability(logits: Logits, token: int) -> float:
    """Return the softmax probability of a row's likeliest token, within about 5 % of itself.

    The exponential of a whole row would cost more than all else here. So tokens that are less than e^-5 as
    likely are counted by a sample of them, and in a row in which many are more likely, all others are.
    """
    best = logits[token]
    step = max(len(logits) // _MIN_SAMPLED_TOKENS, 1)
    sample = np.exp(logits[::step] - best)
    light = sample[sample < _LIGHT]
    if len(sample) - len(light) > _MAX_HEAVY_SHARE * len(sample):
        return 1.0 / max(step * float(sample.sum()), 1.0)
    heavy = logits[logits >= best + math.log(_LIGHT)]
    return 1.0 / (float(np.exp(heavy - best).sum()) + step * float(light.sum()))


# The tokens that target and draft model share, where their vocabularies differ.
#
# All code but the draft's own memory uses the target's ids. What the draft reads and what it proposes is
# translated here. An id is shared if both vocabularies have it with the same text.


@dataclass(frozen=True)
class SharedTokens:
    """The part of the target's vocabulary that the draft can read and propose; by default all of it.

    size: size of the target's vocabulary, 0 where the two are the same. common, differing: as in
    Compatibility. stand_ins: the draft's token for each that only the target has. picture: the draft's token
    for each place of a picture, which it cannot see.
    """

    size: int = 0
    common: int = 0
    differing: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    stand_ins: Mapping[int, int] = field(default_factory=dict)
    picture: int = 0

    @classmethod
    def of(cls, target: Vocab, draft: Vocab, compatibility: Compatibility) -> SharedTokens:
        space = _find_space(draft)
        if not compatibility.differing and target.size == draft.size:
            return cls(picture=space)
        differing = np.array(compatibility.differing, dtype=np.intp)
        return cls(
            target.size,
            compatibility.common,
            differing,
            _stand_ins(target, draft, compatibility, space),
            space,
        )

    def to_draft(self, token: int) -> int:
        """Return the draft's id for a token of the target: the same, or its stand-in."""
        return self.picture if is_picture(token) else self.stand_ins.get(token, token)

    def only_shared(self, logits: Logits) -> Logits:
        """Return the draft's logits of the shared tokens, by the target's ids; the others are changed."""
        if not self.size:
            return logits
        logits[self.differing] = -np.inf
        return logits[: self.common]

    def to_target_logits(self, logits: Logits) -> Logits:
        """Return the draft's logits as a row of the target's.

        The argument has shape (n_vocab of the draft,), the result (n_vocab of the target,) with minus
        infinity for every token that is not shared.
        """
        if not self.size:
            return logits
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[: self.common] = logits[: self.common]
        row[self.differing] = -np.inf
        return row


def _stand_ins(
    target: Vocab, draft: Vocab, compatibility: Compatibility, space: int
) -> Mapping[int, int]:
    """Return the draft's stand-in for each token that only the target has.

    It has the same text, or the same meaning as begin or end of the text. Otherwise it is a space, which
    says little and keeps all positions as they are.
    """
    missing = [*compatibility.differing, *range(compatibility.common, target.size)]
    if not missing:
        return {}
    by_text = {draft.text(token): token for token in reversed(range(draft.size))}
    meanings = {target.bos: draft.bos, target.eos: draft.eos, target.end: draft.end}
    stand_ins = {}
    for token in missing:
        equivalent = meanings.get(token, -1)
        stand_ins[token] = by_text.get(target.text(token), equivalent if equivalent >= 0 else space)
    return stand_ins


def _find_space(vocab: Vocab) -> int:
    tokens: Sequence[int] = vocab.tokenize(" ", add_special=False, parse_special=False)
    return tokens[-1] if tokens else 0
