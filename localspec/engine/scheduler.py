"""The scheduler: which requests run, and which tokens of each the next pass reads.

It gives out slots, cuts prompts into chunks, and preempts requests when the context is full.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from localspec.engine.cache.slot import REREAD_TOKENS
from localspec.engine.cache.slots import SlotRequest
from localspec.engine.llama import is_picture, split_pictures
from localspec.engine.pair.lane import (
    EXACT_CHUNK_TOKENS,
    Lane,
    fits_context,
    max_draft_rows_beside,
)
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.prompt.infill import find_suffix_start
from localspec.engine.sequence import (
    MAX_EXPECTED_TOKENS,
    Sequence,
    TokenizedRequest,
    awaits_suggestion,
    expect_answer_tokens,
    saved_conversation,
)
from localspec.engine.speculation.acceptance import MAX_DRAFTS
from localspec.engine.speculation.depth import MAX_DEPTH, RoundCosts
from localspec.engine.speculation.drafters.base import DraftRequest, Resources
from localspec.engine.speculation.drafters.draft_model import ModelDrafter
from localspec.engine.speculation.drafters.ngram import MAX_MATCH_TOKENS
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.engine.speculation.verification import Verifier, uses_rejection
from localspec.errors import EXCEEDS_CONTEXT, ContextExceeded
from localspec.protocol.frames import PRIVATE, Generate


def format_token_count(tokens: int) -> str:
    return f"{tokens} token" if tokens == 1 else f"{tokens} tokens"


class PrefillPace(Enum):
    """How long a pass that reads prompts may be.

    ALONE: the pass reads as many rows as the lane allows, because no other request waits for it.
    BESIDE: the pass reads only as many rows as the pause of other requests permits.
    """

    ALONE = auto()
    BESIDE = auto()


class PrefillOrder(Enum):
    """How several prompts share passes.

    TOGETHER: the prompts fit into one pass and get equal parts of it, so that they end together. One that
    ended earlier would make the others wait for each token that it decodes.
    EDITOR_FIRST: the prompts fit into one pass. An editor's is read first, and the others get the rows that
    are left without delaying it.
    IN_TURN: the prompts do not fit into one pass and are read one after another. If they shared passes, all
    would end as late as the last.
    """

    TOGETHER = auto()
    EDITOR_FIRST = auto()
    IN_TURN = auto()


class Scheduler:
    """The queue of waiting requests, and the lanes with those that run."""

    def __init__(self, pair: LoadedPair) -> None:
        self._pair = pair
        self._waiting: deque[TokenizedRequest | Sequence] = deque()
        self._started = 0  # requests that have had a slot
        self.lanes = [pair.shared]

    def submit(self, tokenized: TokenizedRequest) -> None:
        """Queue a request.

        Raises:
            ContextExceeded: The prompt does not fit into the context.
        """
        n_ctx = self._pair.n_ctx
        count = tokenized.n_tokens
        if count >= n_ctx:
            excess = count - n_ctx + 1
            raise ContextExceeded(
                f"The prompt has {format_token_count(count)}, which {EXCEEDS_CONTEXT} of "
                f"{format_token_count(n_ctx)}; shorten it by {format_token_count(excess)} "
                "or set a larger `context`.",
                param="prompt",
                n_prompt_tokens=count,
                n_ctx=n_ctx,
            )
        if tokenized.request.priority == "editor":
            self._waiting.appendleft(tokenized)
        else:
            self._waiting.append(tokenized)

    def withdraw(self, request_id: int) -> TokenizedRequest | tuple[Lane, Sequence] | None:
        """Find a request by its id, and remove it from the queue. Return None if there is none.

        A sequence comes with the lane it runs in, or would run in.
        """
        for waiting in self._waiting:
            if waiting.request.id == request_id:
                self._waiting.remove(waiting)
                return (self._pair.shared, waiting) if isinstance(waiting, Sequence) else waiting
        running = ((lane, sequence) for lane in self.lanes for sequence in lane.active)
        return next(((lane, seq) for lane, seq in running if seq.id == request_id), None)

    def forget(self, conversation: str | None) -> None:
        """Do not save waiting requests of a conversation, or of any conversation if it is None."""
        for waiting in self._waiting:
            saved_as = saved_conversation(waiting.request)
            if saved_as is not None and conversation in (None, saved_as):
                waiting.request = msgspec.structs.replace(
                    waiting.request, conversation=None, private=True
                )
            if isinstance(waiting, TokenizedRequest) and (saved := waiting.saved):
                is_forgotten = conversation in (None, saved.conversation)
                waiting.saved = None if is_forgotten else saved

    @property
    def _n_running(self) -> int:
        return sum(len(lane.active) for lane in self.lanes)

    @property
    def is_decoding(self) -> bool:
        """Whether a running request may get a token from the next pass, and so waits for it."""
        return any(not sequence.prefilling for lane in self.lanes for sequence in lane.active)

    @property
    def has_waiting_editor(self) -> bool:
        """Whether an editor waits for its first token."""
        editor_waits = any(
            isinstance(waiting, TokenizedRequest) and awaits_suggestion(waiting.request)
            for waiting in self._waiting
        )
        return editor_waits or any(
            sequence.prefilling and awaits_suggestion(sequence.request)
            for lane in self.lanes
            for sequence in lane.active
        )

    @property
    def active(self) -> bool:
        return bool(self._waiting) or any(lane.active for lane in self.lanes)

    # ------------------------------------------------------------------------ admit

    def admit(
        self,
        on_start: Callable[[Sequence, TokenizedRequest], None],
        on_failure: Callable[[int, Exception], None],
    ) -> list[Lane]:
        """Give slots to waiting requests in order, and return the lanes that have work.

        A request that does not fit holds up all behind it except editors.
        on_start, on_failure: called for each request that gets its first slot, or cannot get one.
        """
        full: set[Lane] = set()
        for waiting in list(self._waiting):
            request = waiting.request
            try:
                lane = self._pair.exact.lane() if waiting.exact else self._pair.shared
            except Exception as error:
                # The exact lane could not be made: only this request needs it.
                self._waiting.remove(waiting)
                on_failure(request.id, error)
                continue
            if lane not in self.lanes:
                self.lanes.append(lane)
            held_up = lane in full and request.priority != "editor"
            if held_up or not lane.slots.free or not fits_context(lane, waiting):
                full.add(lane)
                continue
            self._waiting.remove(waiting)
            try:
                if isinstance(waiting, Sequence):
                    self._resume(lane, waiting)
                else:
                    on_start(self._start_sequence(lane, waiting), waiting)
            except Exception as error:  # a bug of ours, too, ends only this request
                lane.active = [sequence for sequence in lane.active if sequence.id != request.id]
                _clear_unused_slots(lane)
                on_failure(request.id, error)
        return [lane for lane in self.lanes if lane.active]

    def _start_sequence(self, lane: Lane, tokenized: TokenizedRequest) -> Sequence:
        request, pair = tokenized.request, self._pair
        # A saved conversation must hold exact states, and states moved within the cache are not exact.
        is_movable = request.conversation is None and not tokenized.pictures
        min_move_tokens = request.n_cache_reuse if is_movable else 0
        # The log-probabilities of a prompt come from reading it, so a cached prompt has none.
        reuse = request.cache_prompt and request.prompt_logprobs is None
        slot = lane.slots.acquire(
            SlotRequest(
                tokenized.tokens,
                reuse=reuse,
                align=EXACT_CHUNK_TOKENS if lane.exact else 1,
                saved=tokenized.saved,
                min_move=min_move_tokens,
                n_reread=REREAD_TOKENS if request.priority == "editor" else 1,
                n_expected=expect_answer_tokens(request),
                slot=tokenized.slot,
            )
        )
        tokenized.saved = None  # it is as large as a model's state, and not needed any more
        sampler, matcher = tokenized.sampler, tokenized.matcher
        speculative, scored = request.speculative, _wants_logprobs(request)
        drafter = pair.get_drafter(lane)
        can_draw_drafts = drafter is not None and speculative.kind in ("auto", drafter.kind)
        reject = uses_rejection(
            speculative, sampler, matcher, can_draw_drafts=can_draw_drafts, scored=scored
        )
        resources = Resources(speculative, matcher, tokenized.lookup, drafter, lane.slots)
        sequence = Sequence(
            tokenized,
            slot,
            pair.vocab,
            room=pair.n_ctx - tokenized.n_tokens,
            drafting=Drafting.create(
                resources,
                pair.learned.calibrations.select(request.priority),
                pair.settings.depth,
                pair.no_rollback,
                pair.why_no_drafts(speculative.kind),
            ),
            verifier=Verifier(sampler, matcher, reject),
        )
        self._started += 1
        sequence.number = self._started
        self._activate(lane, sequence)
        return sequence

    def _resume(self, lane: Lane, sequence: Sequence) -> None:
        """Give a preempted sequence a slot again; what is no longer cached of its text is read again."""
        reuse = sequence.request.cache_prompt and not sequence.scoring
        slot = lane.slots.acquire(SlotRequest(sequence.tokens, reuse))
        sequence.move_to(slot)
        self._activate(lane, sequence)

    def _activate(self, lane: Lane, sequence: Sequence) -> None:
        slot, prompt = sequence.slot, sequence.tokens[: sequence.n_prompt]
        slot.conversation = saved_conversation(sequence.request)
        slot.volatile_from = find_suffix_start(self._pair.vocab.fim, prompt)
        verifier, scored = sequence.verifier, _wants_logprobs(sequence.request)
        on_device = self._pair.chooses_on_device and not lane.exact
        verifier.needs_only_argmax = verifier.needs_no_logits(scored=scored)
        verifier.on_device = lane.context.choose_on_device(
            sequence.slot.id, on_device and verifier.needs_only_argmax
        )
        passes, profile = lane.make_pass_costs(1), self._pair.learned.costs
        costs = RoundCosts(
            passes.ms(MAX_DEPTH + 1),
            profile.overhead(1, False),
            profile.overhead(1, True),
            switch_ms=passes.switch_ms,
        )
        n_left = min(sequence.remaining, expect_answer_tokens(sequence.request))
        prompt_s = lane.reading.expected.range_seconds(slot.n_past, len(slot.tokens))
        if sequence.reads_ahead:  # for the answer after it
            n_left, prompt_s = MAX_EXPECTED_TOKENS, math.inf
        drafting, n_free = sequence.drafting, lane.max_rows
        for drafter in drafting.drafters:
            if isinstance(drafter, ModelDrafter):
                drafter.plan_reading(slot, n_left, costs, 1e3 * prompt_s, n_free, drafting.fixed)
        lane.active.append(sequence)

    # ------------------------------------------------------------------------ schedule

    def schedule(self, lane: Lane) -> list[Sequence]:
        """Return the sequences of the next pass, each with its `step` of this round.

        These are all sequences that decode and a bounded chunk of prompts: editors first, then short ones.
        A sequence whose grammar has not answered yet sits the round out.
        """
        if lane.exact:
            ready = [sequence for sequence in lane.active if not sequence.guide_busy]
            scheduled = [self.schedule_alone(lane, sequence) for sequence in ready[:1]]
            decoding = [sequence for sequence in scheduled if not sequence.prefilling]
        else:
            n_guide_busy = sum(sequence.guide_busy for sequence in lane.active)
            decoding = [seq for seq in lane.active if not (seq.prefilling or seq.guide_busy)]
            for sequence in decoding:
                sequence.step = _make_step(sequence, sequence.slot.unread)
            scheduled = decoding
            if len(decoding) + n_guide_busy < len(lane.active):
                scheduled = decoding + self._schedule_prompts(lane, len(decoding))
        # Most rounds of a text for which nothing can be drafted skip the limits, which take time.
        if drafting := [
            seq for seq in decoding if seq.drafting.drafters and seq.drafting.begin_search()
        ]:
            self._limit_drafts(lane, scheduled, len(decoding), drafting)
        return scheduled

    def schedule_alone(self, lane: Lane, sequence: Sequence) -> Sequence:
        """Give a sequence the step of a pass that it has to itself."""
        prefilling = sequence.prefilling
        max_tokens = (
            min(lane.max_rows, _max_prompt_outputs(lane)) if sequence.scoring else lane.max_rows
        )
        chunk = _next_chunk(lane, sequence, max_tokens) if prefilling else sequence.slot.unread
        sequence.step = _make_step(sequence, chunk)
        return sequence

    def _schedule_prompts(self, lane: Lane, n_decoding: int) -> list[Sequence]:
        """Return the sequences whose prompts are read beside `n_decoding` others that decode.

        A request that only reads its prompt waits while an editor's suggestion is decoded, because each
        token of that would be as late as the pass over the prompt.
        """
        editor_decodes = any(
            awaits_suggestion(seq.request) for seq in lane.active if not seq.prefilling
        )
        prompts = [
            seq
            for seq in lane.active
            if seq.prefilling and not seq.guide_busy and not (editor_decodes and seq.only_read)
        ]
        if not prompts:
            return []
        prompts.sort(key=lambda sequence: sequence.prefill_order)
        budget = lane.batch.capacity - (MAX_DRAFTS + 1) * n_decoding
        if n_decoding:
            budget = min(budget, lane.batch.capacity // 2)
        budget_beside = lane.max_prompt_rows(n_decoding)
        is_alone = self._prefill_pace(lane, prompts[0]) is PrefillPace.ALONE
        budget = min(budget, lane.max_rows if is_alone else budget_beside)
        scheduled: list[Sequence] = []
        rows, outputs = 0, _max_prompt_outputs(lane)
        order = _prefill_order(lane, prompts)
        for n_remaining, sequence in zip(range(len(prompts), 0, -1), prompts, strict=True):
            is_editor = sequence.request.priority == "editor"
            takes_all = is_editor or order is PrefillOrder.IN_TURN
            # The first one must not wait long for the others.
            if scheduled and order is not PrefillOrder.TOGETHER:
                budget = min(budget, budget_beside)
            max_tokens = budget - rows if takes_all else max((budget - rows) // n_remaining, 1)
            max_tokens = min(max_tokens, budget - rows)
            if sequence.scoring and rows < budget:
                max_tokens = min(lane.to_scored_rows(max_tokens), outputs)
            chunk = (
                _next_chunk(lane, sequence, max_tokens) if rows < budget and max_tokens > 0 else []
            )
            if not chunk:
                break
            if sequence.scoring:
                outputs -= len(chunk)
            rows += lane.to_plain_rows(len(chunk)) if sequence.scoring else len(chunk)
            sequence.step = _make_step(sequence, chunk)
            scheduled.append(sequence)
        return scheduled

    def _prefill_pace(self, lane: Lane, first: Sequence) -> PrefillPace:
        """Return how long a pass may be that reads the prompt of `first`, and perhaps others."""
        waits = self.is_decoding or first.reads_in_short_passes or first.reads_ahead
        can_be_long = self._n_running == 1 or lane.can_interrupt
        return PrefillPace.ALONE if can_be_long and not waits else PrefillPace.BESIDE

    def _limit_drafts(
        self, lane: Lane, sequences: list[Sequence], n_decoding: int, drafting: list[Sequence]
    ) -> None:
        """Set how many drafts each of the `drafting` sequences may bring, among `n_decoding` that decode.

        The limits are the rows of the pass, the room in the context, and the tokens still to generate.
        """
        rows = sum(len(sequence.step.read) for sequence in sequences)
        outputs = sum(len(sequence.step.read) if sequence.scoring else 1 for sequence in sequences)
        spare_rows = min(lane.context.n_outputs - outputs, lane.batch.capacity - rows)
        if self._n_running > 1 or self._waiting:
            spare_rows = min(spare_rows, max_draft_rows_beside(lane, sequences, n_decoding))
        max_drafts = min(spare_rows // n_decoding, MAX_DRAFTS)
        if lane.max_depth is not None:
            max_drafts = min(max_drafts, lane.max_depth)
        # Each sequence has as many rows as the one with most drafts.
        if lane.needs_equal_rows and len(sequences) > 1:
            n_tokens = sum(len(sequence.tokens) for sequence in lane.active)
            max_drafts = min(max_drafts, (self._pair.n_ctx - n_tokens) // n_decoding)
            if len(sequences) > n_decoding:
                max_drafts = 0  # no sequence can have as many rows as a prompt's chunk
        for sequence in drafting:
            max_tokens = self._pair.n_ctx - len(sequence.tokens) - 1
            sequence.step.drafts.limit = min(sequence.remaining - 1, max_tokens, max_drafts)
            sequence.step.drafts.hurried = len(sequences) > n_decoding

    def trim_prompt_chunks(self, lane: Lane, sequences: list[Sequence]) -> None:
        """Shorten prompt chunks in favour of drafts where the pass would become too long."""
        n_decoding = sum(not sequence.prefilling for sequence in sequences)
        if n_decoding in (0, len(sequences)):
            return
        max_rows = lane.max_prompt_rows(n_decoding) + n_decoding
        excess = sum(sequence.step.rows for sequence in sequences) - max_rows
        for sequence in reversed(sequences):
            if excess > 0 and sequence.has_more_prompt:
                step = sequence.step
                n_before = len(step.read)
                step.read = _next_chunk(lane, sequence, max(n_before - excess, 1))
                excess -= n_before - len(step.read)

    # ------------------------------------------------------------------------ the pass

    def fill_batch(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """Fill the lane's batch with the rows of all steps. Return True if no prompt is among them."""
        batch = lane.batch
        batch.clear()
        decoding_only = all(not sequence.prefilling for sequence in sequences)
        rows = {sequence.slot.id: sequence.step.rows for sequence in sequences}
        if lane.needs_equal_rows and decoding_only:
            rows = dict.fromkeys(rows, self._equal_rows(lane, sequences))
        lane.slots.begin_pass(rows)
        for sequence in sequences:
            slot, step = sequence.slot, sequence.step
            if step.reads_picture:
                step.n_rows = _fill_picture(lane, sequence)
                continue
            last_chunk = slot.n_past + len(step.read) == len(slot.tokens)
            position = slot.n_past
            step.read_row = batch.rows
            for count, token in enumerate(step.read, start=1):
                is_last = last_chunk and count == len(step.read)
                row = batch.add(
                    token, position, slot.id, is_last or sequence.wants_logits(position)
                )
                position += 1
            step.first_row = row if last_chunk else -1
            for token in step.drafts.tokens:
                batch.add(token, position, slot.id, True)
                position += 1
            for _ in range(rows[slot.id] - step.rows):  # padding, where all must have as many rows
                batch.add(step.read[-1], position, slot.id, False)
                position += 1
        if (decoding_only and not lane.needs_equal_rows) or (len(sequences) == 1 and lane.exact):
            self._pad(lane, sequences[-1], len(sequences))
        return decoding_only

    def fill_rest(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """Fill the batch with more rows of a picture that one pass does not hold, if it is read.

        Return False if there are none.
        """
        step, slot = sequences[0].step, sequences[0].slot
        if not step.n_rows or step.n_rows == len(sequences[0].picture_at(slot.n_past).rows):
            return False
        lane.batch.clear()
        step.n_rows = _fill_picture(lane, sequences[0])
        return True

    def take_back_parts(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """Remove the rows of a picture of which not all could be read. Return whether there was one."""
        in_part = [sequence for sequence in sequences if sequence.step.n_rows]
        for sequence in in_part:
            lane.slots.roll_back_interrupted(sequence.slot)
            sequence.step.n_rows = 0
        return bool(in_part)

    def _equal_rows(self, lane: Lane, sequences: list[Sequence]) -> int:
        """Return the number of rows that each sequence gets where all must have as many.

        It is that of the longest step, or more where a wider pass is cheaper and there is room.
        """
        max_rows, count = max(sequence.step.rows for sequence in sequences), len(sequences)
        padded_rows = lane.choose_width(max_rows * count, count) // count
        slots = lane.slots if count > 1 else [sequences[0].slot]
        used_cells = sum(slot.n_past for slot in slots)
        return padded_rows if used_cells + padded_rows * count <= self._pair.n_ctx else max_rows

    def _pad(self, lane: Lane, sequence: Sequence, n_sequences: int) -> None:
        """Add rows whose results nobody reads, where a wider pass is cheaper or the width is fixed."""
        batch = lane.batch
        if sequence.prefilling and lane.exact:
            return  # the chunks of a prompt are the same in every run without padding
        filler = sequence.step.read[-1]
        position = sequence.slot.n_past + sequence.step.rows
        used_cells = sum(slot.n_past for slot in lane.slots) if n_sequences > 1 else 0
        # Padding must not force another sequence out of the context.
        free_cells = self._pair.n_ctx - max(position, used_cells + batch.rows)
        for _ in range(
            min(lane.choose_width(batch.rows, n_sequences) - batch.rows, max(free_cells, 0))
        ):
            batch.add(filler, position, sequence.slot.id, True)
            position += 1

    def handle_interrupted_pass(
        self, lane: Lane, sequences: list[Sequence], made_room: bool
    ) -> None:
        """Take back a pass that was interrupted. made_room: it was interrupted for a new request."""
        spent_s = time.perf_counter() - lane.began
        # A pass ends only between two steps of its computation, a moment after it was interrupted.
        had_just_begun = spent_s <= 2 * lane.start_s and all(seq.may_restart for seq in sequences)
        for sequence in sequences:
            lane.slots.roll_back_interrupted(sequence.slot)
            if made_room and had_just_begun:
                sequence.note_restart(spent_s)
            elif made_room:
                sequence.note_interruption(spent_s)

    # ------------------------------------------------------------------------ leaving a slot

    def preempt_newest(self, lane: Lane) -> Sequence | None:
        """Preempt the request that started last, because the context is full. The oldest always goes on.

        Return None, or the request that has to end because no other one could give way.
        """
        for sequence in lane.active:
            lane.slots.commit(sequence.slot, 0)
        newest = max(lane.active, key=lambda sequence: sequence.number)
        if len(lane.active) == 1:  # should not happen: its limit keeps it within the context
            return newest
        newest.preempted_at = lane.n_ended
        self._preempt(lane, newest)
        return None

    def _preempt(self, lane: Lane, sequence: Sequence) -> None:
        """Take a sequence out of its slot and queue it. The slot keeps the text while there is room."""
        lane.active.remove(sequence)
        lane.slots.release(sequence.slot)
        self._waiting.appendleft(sequence)

    def release(self, lane: Lane, sequence: Sequence) -> None:
        """Release the slot of a request that is over; the slot keeps its text as a cache."""
        if lane.exact:  # only whole chunks of a prompt are the same in every run
            chunks = sequence.n_prompt // EXACT_CHUNK_TOKENS * EXACT_CHUNK_TOKENS
            lane.slots.roll_back(sequence.slot, min(chunks, sequence.slot.n_past))
        if sequence.reads_ahead:
            # What was read before an interruption counts, too.
            begin = sequence.tally.cached - sequence.tally.ahead
            sequence.slot.ahead = range(begin, sequence.slot.n_past)
        elif (conversation := sequence.slot.conversation) not in (None, PRIVATE):
            # What was cached is known already, but for what tells a repeated question from others.
            start = max(sequence.tally.cached - MAX_MATCH_TOKENS, 0)
            for part in split_pictures(sequence.tokens[start:]):
                if not is_picture(part[0]):
                    self._pair.memory.add(part, conversation)
        lane.slots.release(sequence.slot)
        lane.active.remove(sequence)
        lane.n_ended += 1

    def drop_failed(self, lane: Lane, sequence: Sequence) -> None:
        """Remove a request that has failed, and clear its slot, which is not trusted any more."""
        if sequence in lane.active:
            lane.active.remove(sequence)
            lane.n_ended += 1
            lane.slots.clear(sequence.slot)
            lane.slots.release(sequence.slot)

    def requeue_alone(self, lane: Lane) -> None:
        """Clear the lane, and queue its sequences to be read again, one after another."""
        for sequence in sorted(lane.active, key=lambda sequence: -sequence.number):
            sequence.runs_alone = True
            self._preempt(lane, sequence)
        self.forget_slots(lane)

    def forget_slots(self, lane: Lane) -> None:
        """Clear all slots of a lane whose context is not trusted any more."""
        for slot in lane.slots:
            lane.slots.clear(slot)
        lane.context.clear()
        self._pair.prefixes.clear()


def _prefill_order(lane: Lane, prompts: list[Sequence]) -> PrefillOrder:
    """Return how the prompts, in the order of their turn, share passes."""
    if sum(len(sequence.slot.unread) for sequence in prompts) > lane.batch.capacity:
        return PrefillOrder.IN_TURN
    is_editor = prompts[0].request.priority == "editor"
    return PrefillOrder.EDITOR_FIRST if is_editor else PrefillOrder.TOGETHER


def _make_step(sequence: Sequence, tokens: list[int]) -> SequenceStep:
    verifier, generated = sequence.verifier, sequence.generated
    drafts = DraftRequest(
        sequence.slot,
        limit=0,
        sampler=None if verifier.sampler.settings.greedy else verifier.sampler,
        reject=verifier.reject,
        generated=generated,
        left=sequence.limit - generated,
    )
    return SequenceStep(tokens, drafts, sequence.drafting, verifier)


def _wants_logprobs(request: Generate) -> bool:
    """Whether the request needs logits for log-probabilities."""
    return request.top_logprobs is not None or request.prompt_logprobs is not None


def _max_prompt_outputs(lane: Lane) -> int:
    """Return how many rows of prompts may have logits in a pass: half of all, the others are for drafts.

    This bounds the rows of the vocabulary's size that a pass holds, however long a prompt is.
    """
    return max(lane.context.n_outputs // 2 - len(lane.active), 1)


def _next_chunk(lane: Lane, sequence: Sequence, max_tokens: int) -> list[int]:
    """Return the tokens of its prompt that a sequence reads next, at most `max_tokens`.

    They are all text, or all pictures. An indivisible picture is read at once, however large it is.
    """
    slot = sequence.slot
    unread = slot.unread
    if is_picture(unread[0]) and (part := sequence.picture_at(slot.n_past)).is_indivisible:
        return unread[: part.n_places]
    count = lane.limit_chunk(slot.n_past, len(unread), max_tokens)
    if sequence.has_pictures and count:
        count = len(next(split_pictures(unread[:count])))
    return unread[: lane.slots.limit_prefill(slot, count)] if count else []


def _fill_picture(lane: Lane, sequence: Sequence) -> int:
    """Fill the batch with the rows of a picture that a sequence reads next.

    Return how many of an indivisible picture are read then, 0 for any other.
    """
    slot, step, batch = sequence.slot, sequence.step, lane.batch
    step.read_row = batch.rows
    if not sequence.picture_at(slot.n_past).is_indivisible:
        for position in range(slot.n_past, slot.n_past + len(step.read)):
            part = sequence.picture_at(position)
            batch.add_embedding(part.rows[position - part.start], position, slot.id)
        return 0
    part = sequence.picture_at(slot.n_past)
    batch.both_ways = part.both_ways
    end = min(len(part.rows), step.n_rows + batch.capacity)
    for index in range(step.n_rows, end):
        coordinates: list[int] = []
        position = part.start + index
        if part.positions is not None:
            coordinates = [part.start + place for place in part.positions[index].tolist()]
            position = coordinates[0]
        batch.add_embedding(part.rows[index], position, slot.id, coordinates)
    return end


def _clear_unused_slots(lane: Lane) -> None:
    """Clear the slots that no running request holds, after a request failed while it got its slot."""
    for slot in lane.slots:
        if all(sequence.slot is not slot for sequence in lane.active):
            lane.slots.clear(slot)
            slot.busy = False
