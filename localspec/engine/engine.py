"""The step loop: schedule → draft → decode → verify → commit → emit, for all sequences together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from localspec.engine.cache.slots import SlotRequest
from localspec.engine.interruption import Interruption
from localspec.engine.llama import Aborted, DecodeError, DecodeFatal, NoKvSlot, NotFinite
from localspec.engine.pair.lane import Lane, choose_interruptions
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.pair.profile import MAX_QUIET_NOISE
from localspec.engine.read_ahead import ReadAhead, is_own
from localspec.engine.sampling.guide import GuideBusy
from localspec.engine.scheduler import Scheduler
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.budget import MEASURING_BACKOFFS, Backoff
from localspec.engine.speculation.controller import Controller
from localspec.engine.speculation.cost import Clock
from localspec.engine.speculation.drafters.draft_model import ModelDrafter
from localspec.engine.speculation.hindsight import Hindsight
from localspec.engine.speculation.verification import DoubtfulToken
from localspec.engine.statistics import PlainRound, RoundTimes
from localspec.errors import Cancelled, LocalspecError
from localspec.protocol.frames import (
    Failed,
    Frame,
    Generate,
    InfillPrompt,
    Reading,
    Started,
    TokenLogprob,
)

MAX_IDLE_PASS_S = 60.0  # a pass in idle time is ended by a new request, if that comes before
# How long the loop sleeps when every running request waits for its grammar.
GUIDE_POLL_S = 0.005


class Meters(NamedTuple):
    """Totals so far: what has been spent, and what a lane's passes and all drafting should have taken."""

    clock_s: float
    spent_s: float
    pass_s: float
    expected_pass_ms: float
    expected_drafting_ms: float


class Engine:
    """Runs requests on one loaded pair.

    One thread calls `submit`, `cancel` and `step`. An exception raised on behalf of one request ends that
    request with an error, and the others go on. Only `DecodeFatal`, which says that a context can no longer
    be trusted, leaves `step` and ends them all.
    """

    accepts = TokenizedRequest

    def __init__(
        self,
        pair: LoadedPair,
        emit: Emit,
        clock: Clock = time.perf_counter,
        prepare: Callable[[Generate], None] | None = None,
    ) -> None:
        """prepare: has the engine's own requests tokenized and submitted; None: it makes none."""
        self.pair = pair
        self._send = emit
        self._clock = clock
        self._scheduler = Scheduler(pair)
        self._endings = Endings(self._scheduler, self._emit)
        self._controller = Controller(lambda: pair.learned.costs, pair.vocab.is_eog, clock)
        self._hindsight = Hindsight()
        self._measuring = Backoff(MEASURING_BACKOFFS)
        self._measures = False  # whether passes are measured again in idle time
        self._ahead = ReadAhead(prepare) if prepare is not None else None
        self._guess: int | None = None  # a client's request that is read ahead
        self.interruption = Interruption()  # called by other threads
        self.rounds = 0

    def submit(self, tokenized: TokenizedRequest) -> None:
        """Queue a request, or fail it at once if it can never run."""
        is_ahead = tokenized.request.priority == "ahead"
        if self._ahead is not None and is_ahead and is_own(tokenized.request):
            self._ahead.accept(tokenized)
            return
        if is_ahead and (self.active or not self._has_room_for_guess(tokenized)):
            error = Cancelled("It is read ahead in idle time only, and in free memory.")
            self._endings.send_failure(tokenized.request.id, error)
            return
        self._stop_reading_ahead()
        self._guess = tokenized.request.id if is_ahead else None
        if self._ahead is not None:
            cost = self.pair.shared.reading.expected
            tokenized.sent_back = self._ahead.observe(tokenized, cost)
        try:
            self._scheduler.submit(tokenized)
        except Exception as error:  # a bug of ours, too, ends only this request
            self._endings.send_failure(tokenized.request.id, error)

    def _stop_reading_ahead(self) -> None:
        """Stop reading ahead, because somebody waits. A next turn goes on later."""
        if self._guess is not None:
            guess, self._guess = self._guess, None
            self.cancel(guess)
        if self._ahead is not None and (turn := self._ahead.running) is not None:
            self._ahead.running = None
            if self.cancel(turn.request.id):
                self._ahead.put_back(turn)

    def _has_room_for_guess(self, tokenized: TokenizedRequest) -> bool:
        """Return whether no other text has to make room for what a client guesses that it will ask.

        An editor's older text may make room for its next one.
        """
        slots, request = self.pair.shared.slots, tokenized.request
        plan = slots.plan(SlotRequest(tokenized.tokens, min_move=request.n_cache_reuse))
        n_unread = len(tokenized.tokens) - plan.n_kept
        is_editor = isinstance(request.prompt, InfillPrompt)
        keeps = not plan.slot.n_past or (is_editor and plan.slot.volatile_from is not None)
        if not keeps:
            tokenized.slot = plan.slot
            keeps = plan.n_kept == plan.n_offered and 2 * plan.n_kept >= plan.slot.n_past
        return slots.free and keeps and n_unread <= slots.count_free_cells()

    def _emit(self, frame: Frame) -> None:
        """Send a frame of a request, unless it is the engine's own."""
        if not is_own(frame):
            self._send(frame)

    def cancel(self, request_id: int) -> bool:
        """End a request now. Return False if there is no such request.

        What the request has generated so far stays valid.
        """
        withdrawn = self._scheduler.withdraw(request_id)
        if withdrawn is None:
            return False
        if isinstance(withdrawn, TokenizedRequest):
            self._endings.send_failure(request_id, Cancelled("The request was cancelled."))
        else:
            withdrawn[1].finish("cancelled")
            self._endings.guard(self._endings.finish, *withdrawn)
        return True

    def end_thoughts(self, request_id: int) -> bool:
        """End the thoughts of a running request, so that its answer follows.

        Return False if it is not in its thoughts.
        """
        for lane in self.pair.lanes:
            for sequence in lane.active:
                if sequence.id == request_id and sequence.is_thinking:
                    self._close_thoughts(lane, sequence)
                    return True
        return False

    def _close_thoughts(self, lane: Lane, sequence: Sequence) -> None:
        sequence.close_thoughts()
        sequence.verifier.on_device = lane.context.choose_on_device(sequence.slot.id, False)

    def forget(self, conversation: str | None) -> None:
        """Drop the caches of a conversation, or of all of them if it is None.

        Requests of it that still wait will not be saved either.
        """
        if self._ahead is not None:
            self._stop_reading_ahead()
            self._ahead.forget(conversation)
        self._scheduler.forget(conversation)
        self._hindsight.forget()
        self.pair.forget(conversation)

    def forget_saved(self, conversation: str | None, done: Callable[[], None]) -> None:
        """Delete a conversation's files at once. Safe to call from any thread.

        done: called when they are gone.
        """
        self.pair.sessions.forget(conversation, done)

    def shrink_prompt_cache(self, most: int) -> int:
        """Shrink the prompt cache's limit to what it holds; see `PrefixStore.set_limit`."""
        return self.pair.prefixes.set_limit(most)

    def save(self) -> None:
        """Write what was learned about the pair to disk."""
        self.pair.save()

    def close(self) -> None:
        self.pair.close()

    @property
    def active(self) -> bool:
        return self._scheduler.active

    @property
    def has_waiting_editor(self) -> bool:
        """Whether an editor waits for its first token."""
        return self._scheduler.has_waiting_editor

    def _emit_started(self, sequence: Sequence, tokenized: TokenizedRequest) -> None:
        cached, source = sequence.tally.cached, sequence.slot.source
        sampling = tokenized.request.sampling
        has_bias = sampling.ignore_eos or sampling.logit_bias or sampling.text_bias
        bias = dict(tokenized.sampler.settings.logit_bias) if has_bias else {}
        read = sequence.n_prompt_tokens, cached, source
        cost = self.pair.shared.reading.expected
        if (sent := sequence.sent_back) is not None and (ahead := sequence.tally.ahead):
            sent.saved_ms = 1e3 * cost.range_seconds(cached - ahead, cached)
        exact = sequence.tally.exact
        self._emit(Started(sequence.id, *read, bias, cost, tokenized.note, exact_tokens=exact))

    def _report_reading(self, lane: Lane, sequence: Sequence) -> None:
        """Send a Reading frame if the last pass read a part of the prompt."""
        step = sequence.step
        scores = self._score_prompt(lane, sequence)
        reports = step.first_row < 0 or sequence.request.progress or scores
        if not sequence.generated and reports:
            processed = sequence.slot.n_past + len(step.read)
            spent, cost = sequence.tally.since_start_ms(), self.pair.shared.reading.expected
            first = sequence.n_scored - len(scores)
            self._emit(Reading(sequence.id, processed, spent, cost, scores, first))

    def _score_prompt(self, lane: Lane, sequence: Sequence) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt tokens just read, if the request wants them."""
        if not sequence.scoring:
            return []
        start = self._clock()
        scores = sequence.score_prompt(lane.context)
        rows = len(sequence.step.read)
        lane.observe_scores(rows, lane.spent_s + self._clock() - start)
        return scores

    @property
    def has_idle_work(self) -> bool:
        """Whether there is something to read or to learn while nobody waits."""
        reads = self._ahead is not None and self._ahead.is_due
        return reads or self._hindsight.is_due or self._measures

    def use_idle_time(self) -> None:
        """Begin to read a next turn, learn from an answer, or measure passes again. A new request ends it.

        Raises:
            DecodeFatal: As of `step`.
        """
        if self._ahead is not None and self._ahead.is_due:
            tokenized = self._ahead.begin(self.pair.shared.slots.count_free_cells())
            if tokenized is not None:
                self._scheduler.submit(tokenized)
            return
        stop = self.interruption.begin_pass((), MAX_IDLE_PASS_S)
        try:
            if self._hindsight.is_due:
                self._hindsight.learn(stop)
                return
            self._measures = False
            self.pair.measure_again(stop, self._clock)
            self._measuring.begin()
        except Aborted:  # until the next idle moment
            self._measures = True
        except NoKvSlot:
            pass
        except DecodeFatal:
            raise
        except Exception as error:  # a bug of ours, too: answers do not depend on it
            traceback.print_exception(error)

    def step(self) -> None:
        """Run one round of every lane that has work.

        Raises:
            DecodeFatal: A context can no longer be trusted; the process must end.
        """
        lanes = self._scheduler.admit(self._emit_started, self._endings.send_failure)
        for lane in lanes:
            for sequence in list(lane.active):
                self._endings.guard(lambda _, sequence: sequence.begin_round(), lane, sequence)
            try:
                self._round(lane)
            except DecodeFatal:
                raise
            except Exception as error:  # nothing tells which sequence is at fault, so all fail
                for sequence in list(lane.active):
                    self._endings.fail(lane, sequence, error)
        running = [sequence for lane in lanes for sequence in lane.active]
        if running and all(sequence.guide_busy for sequence in running):
            running[0].await_guide(GUIDE_POLL_S)

    def _round(self, lane: Lane) -> None:
        before = self._read_meters(lane)
        for sequence in lane.active:
            sequence.drafting.read_along(sequence.slot)
        sequences, readers = self._read_pictures(lane, self._scheduler.schedule(lane))
        sequences = self._decode_and_verify(lane, self._draft(lane, sequences))
        sequences = readers + sequences
        if sequences:
            self._account(lane, sequences, before)
            for sequence in sequences:
                self._endings.guard(self._finish_or_probe, lane, sequence)

    def _read_pictures(
        self, lane: Lane, sequences: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Read the pictures that are next in prompts, in passes of their own.

        Return the other sequences, and those that have read pictures and still run.
        """
        if not any(sequence.step.reads_picture for sequence in sequences):
            return sequences, []
        readers: list[Sequence] = []
        for sequence in sequences:
            if sequence.step.reads_picture and sequence in lane.active:
                readers += self._decode_and_verify(lane, [sequence])
        text_only = [
            sequence
            for sequence in sequences
            if not sequence.step.reads_picture and sequence in lane.active
        ]
        return text_only, readers

    def _draft(self, lane: Lane, sequences: list[Sequence]) -> list[Sequence]:
        """Draft for each sequence what is worth verifying. Return the sequences that still run."""
        if not any(sequence.step.drafts.limit > 0 for sequence in sequences):
            return sequences
        steps = [sequence.step for sequence in sequences]
        self._controller.draft(steps, lane.make_pass_costs(len(steps)))
        for sequence in sequences:
            if sequence.step.error is not None:
                self._endings.fail(lane, sequence, sequence.step.error)
        self._scheduler.trim_prompt_chunks(lane, sequences)
        return [sequence for sequence in sequences if sequence in lane.active]

    def _decode_and_verify(self, lane: Lane, sequences: list[Sequence]) -> list[Sequence]:
        """Make one pass and verify its drafts. Return the sequences that still run, [] without a pass."""
        try:
            if not sequences or not self._decode(lane, sequences):
                return []
        except DecodeFatal:
            raise
        except Exception as error:  # one sequence may be at fault: separate passes show which
            return self._retry_one_by_one(lane, sequences, error)
        for sequence in sequences:
            if sequence in lane.active:  # verifying another one may have made all of them wait
                self._endings.guard(self._verify, lane, sequence)
        return [
            sequence
            for sequence in sequences
            if sequence in lane.active and not sequence.step.repeats
        ]

    def _decode(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """Make one pass over all rows. Return False if there was none.

        Either the context had no room and a sequence gave way, or the pass was interrupted. The next step
        tries again.
        """
        decoding_only = self._scheduler.fill_batch(lane, sequences)
        lane.context.stop = self.interruption.begin_pass(
            *choose_interruptions(lane, sequences, self._scheduler.is_decoding)
        )
        while True:
            try:
                scored = any(sequence.scoring for sequence in sequences)
                lane.decode(decoding_only, len(sequences), scored=scored)
                if not self._scheduler.fill_rest(lane, sequences):
                    return True
            except Aborted:
                self._scheduler.handle_interrupted_pass(
                    lane, sequences, self.interruption.was_for_new_request
                )
                return False
            except NoKvSlot:
                is_in_part = self._scheduler.take_back_parts(lane, sequences)
                if not lane.slots.evict():
                    if (last := self._scheduler.preempt_newest(lane)) is not None:
                        last.finish("length")
                        self._endings.finish(lane, last)
                    return False
                if is_in_part:  # a picture has to be read from its first row again
                    return False

    def _verify(self, lane: Lane, sequence: Sequence) -> None:
        """Keep the drafts that the target agrees with, roll both memories back to them, and emit the text.

        The logits of the pass are still valid. If this raises, only this sequence is affected: what its
        slot holds beyond `n_past` tokens is unknown then.
        """
        step, slot = sequence.step, sequence.slot
        self._report_reading(lane, sequence)
        if step.first_row < 0 or sequence.limit <= 0:
            lane.slots.commit_prefill(slot, len(step.read), emits_states=not step.n_rows)
            if step.first_row >= 0:  # the request reads its prompt and generates nothing
                sequence.tally.observe_tokens(0, lane.began)
                sequence.finish("length")
            return
        try:
            kept = sequence.verifier.verify(lane.context, step.first_row, slot.tokens, step.drafts)
        except GuideBusy:  # read the last token again once its grammar has answered
            sequence.verifier.take_back()
            lane.slots.commit(slot, len(step.read) - 1)
            step.repeats = True
            return
        except DoubtfulToken:  # make the same pass again, now with logits
            sequence.verifier.on_device = lane.context.choose_on_device(slot.id, False)
            lane.slots.commit(slot, 0)
            return
        sequence.tally.observe_verification(step, len(kept) - 1)
        self._controller.observe(step, kept)
        count, delta = sequence.append(kept, lane.began)
        # Accepted drafts are in the target's KV already; its own last token is not.
        lane.slots.commit(slot, len(step.read) + min(count, len(kept) - 1))
        if sequence.must_close_thoughts:
            self._close_thoughts(lane, sequence)
        if delta is not None:
            self._emit(delta)

    def _retry_one_by_one(
        self, lane: Lane, sequences: list[Sequence], error: Exception
    ) -> list[Sequence]:
        """Give each sequence a pass of its own after a shared pass failed, to find the one at fault."""
        if len(sequences) == 1:
            self._endings.fail(lane, sequences[0], error)
            return []
        traceback.print_exception(error)
        for sequence in sequences:  # the drafts of the failed pass are not verified any more
            self._endings.guard(
                lambda lane, failed: lane.slots.commit(failed.slot, 0), lane, sequence
            )
        survivors: list[Sequence] = []
        for sequence in sequences:
            if sequence in lane.active:
                survivors += self._decode_and_verify(
                    lane, [self._scheduler.schedule_alone(lane, sequence)]
                )
        return survivors

    def _read_meters(self, lane: Lane) -> Meters:
        passes = lane.busy_s, lane.expected_ms
        return Meters(self._clock(), self.pair.spent_s(), *passes, self.pair.drafting_ms())

    def _account(self, lane: Lane, sequences: list[Sequence], before: Meters) -> None:
        """Book what happened since `before` as overhead and to each sequence that decoded."""
        now = self._read_meters(lane)
        round_s, busy_s = now.clock_s - before.clock_s, now.spent_s - before.spent_s
        self.rounds += 1
        steps = [sequence.step for sequence in sequences]
        if any(step.first_row < 0 or len(step.read) != 1 for step in steps):
            return  # a round that also read a prompt says nothing about the speed of decoding
        costs, count = self.pair.learned.costs, len(steps)
        drafting = any(step.drafts.tokens for step in steps)
        costs.observe_overhead((round_s - busy_s) * 1e3, count, drafting)
        plain = PlainRound(lane.plain_ms(count), costs.overhead(count, False))
        spent = RoundTimes(
            total_ms=round_s * 1e3,
            pass_ms=(now.pass_s - before.pass_s) * 1e3,
            expected_pass_ms=now.expected_pass_ms - before.expected_pass_ms,
            expected_rest_ms=now.expected_drafting_ms
            - before.expected_drafting_ms
            + costs.overhead(count, drafting),
            max_pass_ms=max(step.rows for step in steps) * plain.pass_ms
            + lane.costs.change.total_ms,
        )
        for sequence in sequences:
            made = sequence.tally.observe_round(spent, plain)
            self._controller.observe_round(
                sequence.step, made, spent.total_ms, plain.total_ms, count
            )

    def _finish_or_probe(self, lane: Lane, sequence: Sequence) -> None:
        start, drafting_ms = self._clock(), self.pair.drafting_ms()
        if sequence.finished:
            self._note_answer(lane, sequence)
            if sequence.only_read:  # no other round would do so
                sequence.drafting.read_along(sequence.slot)
            self._endings.finish(lane, sequence)
            if self._ahead is not None and lane is self.pair.shared:
                self._ahead.note_answer(sequence)
        elif self._controller.probe(sequence.step, sequence.remaining):
            sequence.tally.comparison.observe_probe(
                (self._clock() - start) * 1e3, self.pair.drafting_ms() - drafting_ms
            )

    def _note_answer(self, lane: Lane, sequence: Sequence) -> None:
        """Note an answer of the shared lane, to learn from it in idle time."""
        drafting = sequence.drafting
        if self.pair.learned.noise > MAX_QUIET_NOISE and not self._measuring.take():
            self._measures = True
        if lane is self.pair.shared and sequence.generated:
            self._hindsight.note_end(drafting.drafters, sequence.slot)
        if lane is self.pair.shared and not drafting.fixed:
            n_drafted = sequence.tally.kinds[ModelDrafter.kind]
            self._hindsight.note(drafting.drafters, sequence.tokens, sequence.generated, n_drafted)


# How requests end: with an answer, or with an error that is theirs alone.


Emit = Callable[[Frame], None]


class Endings:
    """Takes requests out of the scheduler and sends each one its last frames."""

    def __init__(self, scheduler: Scheduler, emit: Emit) -> None:
        self._scheduler = scheduler
        self._emit = emit

    def finish(self, lane: Lane, sequence: Sequence) -> None:
        """Send the end of an answer that is complete or was cut off."""
        last_text, done = sequence.flush_text(), sequence.make_done(lane.exact)
        compared = sequence.tally.comparison
        if (quiet_ms := compared.quiet_ms) is not None:
            lane.observe_answer(compared.tokens, compared.rounds, quiet_ms)
        done.passes, done.busy = lane.n_passes, lane.n_sequence_passes
        lane.n_passes = lane.n_sequence_passes = 0
        if sequence in lane.active:
            self._scheduler.release(lane, sequence)
        if last_text is not None:
            self._emit(last_text)
        self._emit(done)

    def guard(self, act: Callable[[Lane, Sequence], None], lane: Lane, sequence: Sequence) -> None:
        """Call `act` for one request, and fail that request if it raises.

        Raises:
            DecodeFatal: A context is lost.
        """
        try:
            act(lane, sequence)
        except DecodeFatal:
            raise
        except Exception as error:  # a bug of ours, too: the other requests go on
            self.fail(lane, sequence, error)

    def fail(self, lane: Lane, sequence: Sequence, error: Exception) -> None:
        """End one request with an error. What its slot holds is not trusted any more."""
        if isinstance(error, NotFinite) and self._separate(lane, sequence):
            return
        self._scheduler.drop_failed(lane, sequence)
        self.send_failure(sequence.id, error)

    def _separate(self, lane: Lane, sequence: Sequence) -> bool:
        """Empty the lane after NaN or infinite logits, and run its requests again one after another.

        They may come from any text in the context: some of llama.cpp's kernels add what the cells of
        other sequences hold, multiplied by zero, and NaN times zero is NaN. Returns False if the sequence
        ran alone already, so that the values are its own.
        """
        if sequence.runs_alone:
            self._scheduler.forget_slots(lane)
            return False
        sequence.verifier.take_back()
        for active in sorted(lane.active, key=lambda sequence: -sequence.number):
            if active.finished:
                self.finish(lane, active)
        self._scheduler.requeue_alone(lane)
        return True

    def send_failure(self, request_id: int, error: Exception) -> None:
        self._emit(make_failure(request_id, error))


def make_failure(request_id: int, error: Exception) -> Failed:
    """Return the frame of an error.

    An error that the request did not cause is reported as internal, with its traceback in the log.
    """
    if isinstance(error, LocalspecError) and not isinstance(error, DecodeError):
        sizes = error.n_prompt_tokens, error.n_ctx
        return Failed(request_id, error.code, error.message, error.param, *sizes)
    traceback.print_exception(error)
    detail = error.message if isinstance(error, LocalspecError) else f"{error!r}."
    return Failed(request_id, "internal_error", f"The engine failed on this request: {detail}")
