"""The step loop: schedule → draft → decode → verify → commit → emit, for all sequences together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from localspec.engine.llama import DecodeError, DecodeFatal, NoKvSlot, NotFinite
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.pair import Pair
from localspec.engine.scheduler import Scheduler
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.controller import Controller
from localspec.engine.speculation.cost import Clock
from localspec.engine.speculation.verification import Doubtful
from localspec.errors import Cancelled, LocalspecError
from localspec.protocol.frames import Failed, Frame, Started

Emit = Callable[[Frame], None]


class Engine:
    """Runs requests on one loaded pair. One thread calls `submit`, `cancel` and `step`.

    Whatever is raised on one request's behalf ends that request with an error, and the others go on.
    Only a context that can no longer be trusted ends them all (`DecodeFatal` leaves `step`).
    """

    def __init__(self, pair: Pair, emit: Emit, clock: Clock = time.perf_counter) -> None:
        self.pair = pair
        self._emit = emit
        self._clock = clock
        self._scheduler = Scheduler(pair)
        self._controller = Controller(lambda: pair.learned.costs, pair.vocab.is_eog)
        self.rounds = 0
        self.round_s = 0.0  # all of the rounds' time; pair.busy_s() is llama.cpp's part of it

    # ------------------------------------------------------------------------ requests in

    def submit(self, tokenized: TokenizedRequest) -> None:
        """Queue a request; it is refused at once (Failed) where it can never run."""
        try:
            self._scheduler.submit(tokenized)
        except Exception as error:
            self._fail(tokenized.request.id, error)

    def cancel(self, request: int) -> bool:
        """End a request now; what it has generated stays valid. False: there is no such request."""
        waiting = self._scheduler.withdraw(request)
        if isinstance(waiting, TokenizedRequest):
            self._fail(request, Cancelled("The request was cancelled."))
            return True
        found = self._scheduler.running(request) if waiting is None else (self.pair.shared, waiting)
        if found is None:
            return False
        lane, sequence = found
        sequence.finish("cancelled")
        self._guarded(self._finish, lane, sequence)
        return True

    def forget(self, conversation: str | None) -> None:
        """Drop what is kept of a conversation, with None of all; what waits will not be saved either."""
        self._scheduler.forget(conversation)
        self.pair.forget(conversation)

    @property
    def active(self) -> bool:
        return self._scheduler.active

    # ------------------------------------------------------------------------ one step

    def step(self) -> None:
        """One round of every lane that has work."""
        self._scheduler.admit(self._started, self._fail)
        for lane in self._scheduler.lanes:
            if lane.active:
                try:
                    self._round(lane)
                except DecodeFatal:
                    raise
                except Exception as error:  # whose fault it is cannot be told
                    for sequence in list(lane.active):
                        self._break(lane, sequence, error)

    def _started(self, sequence: Sequence, tokenized: TokenizedRequest) -> None:
        cached, source = sequence.tally.cached, sequence.slot.source
        self._emit(Started(sequence.id, sequence.n_prompt, cached, tokenized.tail, source))

    def _round(self, lane: Lane) -> None:
        start, busy = self._clock(), self.pair.busy_s()
        sequences = self._scheduler.schedule(lane)
        self._controller.next([sequence.step for sequence in sequences], lane.pass_ms)
        for sequence in sequences:
            if sequence.step.error is not None:
                self._break(lane, sequence, sequence.step.error)
        sequences = self._carry_out(lane, [each for each in sequences if each in lane.active])
        if sequences:
            self._account(lane, sequences, self._clock() - start, self.pair.busy_s() - busy)
            for sequence in sequences:
                self._guarded(self._after, lane, sequence)

    def _carry_out(self, lane: Lane, sequences: list[Sequence]) -> list[Sequence]:
        """Decode and verify; the sequences that are still there. None: no pass was made."""
        try:
            if not sequences or not self._decode(lane, sequences):
                return []
        except DecodeFatal:
            raise
        except Exception as error:
            return self._one_by_one(lane, sequences, error)
        for sequence in sequences:
            if sequence in lane.active:  # else another one has sent them all to wait
                self._guarded(self._verify, lane, sequence)
        return [sequence for sequence in sequences if sequence in lane.active]

    def _decode(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """One pass over all rows. False: no room; someone was asked to leave, try the next step."""
        decoding_only = self._scheduler.fill(lane, sequences)
        while True:
            try:
                lane.decode(timed=decoding_only)
                return True
            except NoKvSlot:
                if not lane.slots.evict():
                    last = self._scheduler.make_room(lane)
                    if last is not None:
                        last.finish("length")
                        self._finish(lane, last)
                    return False

    def _one_by_one(
        self, lane: Lane, sequences: list[Sequence], error: Exception
    ) -> list[Sequence]:
        """A pass that could not be made has one sequence at fault, if any: each has one of its own."""
        if len(sequences) == 1:
            self._break(lane, sequences[0], error)
            return []
        traceback.print_exception(error)
        for sequence in sequences:  # what was drafted is not verified any more
            self._guarded(lambda lane, each: lane.slots.commit(each.slot, 0), lane, sequence)
        left = [sequence for sequence in sequences if sequence in lane.active]
        return [
            each
            for sequence in left
            for each in self._carry_out(lane, [self._scheduler.alone(lane, sequence)])
        ]

    def _verify(self, lane: Lane, sequence: Sequence) -> None:
        """Keep what the target agrees with, roll both memories back to it, and show the text.

        The logits of the pass are still there. Whatever is raised is this sequence's trouble: what its
        slot holds beyond `n_past` tokens is unknown then, and no other sequence was touched.
        """
        step, slot = sequence.step, sequence.slot
        if step.first_row < 0 or sequence.limit <= 0:
            lane.slots.prefilled(slot, len(step.read))
            if step.first_row >= 0:  # the prompt was only to be read
                sequence.tally.wrote(0, lane.began)
                sequence.finish("length")
            return
        try:
            kept = sequence.verifier.verify(lane.context, step.first_row, slot.tokens, step.drafts)
        except Doubtful:  # the same pass once more, now with logits
            sequence.verifier.on_device = lane.context.choose_on_device(slot.id, False)
            lane.slots.commit(slot, 0)
            return
        sequence.tally.verified(step, len(kept) - 1)
        self._controller.observe(step, kept)
        count, delta = sequence.append(kept, lane.began)
        # Accepted drafts are in the target's KV already; its own last token is not.
        lane.slots.commit(slot, len(step.read) + min(count, len(kept) - 1))
        if delta is not None:
            self._emit(delta)

    # ------------------------------------------------------------------------ the end of a round

    def _account(
        self, lane: Lane, sequences: list[Sequence], round_s: float, busy_s: float
    ) -> None:
        """Book the round's time: to the overhead, and to each sequence that decoded."""
        self.rounds += 1
        self.round_s += round_s
        steps = [sequence.step for sequence in sequences]
        if any(step.first_row < 0 or len(step.read) != 1 for step in steps):
            return  # a round that also read a prompt says nothing about the speed of decoding
        self.pair.learned.costs.observe_overhead((round_s - busy_s) * 1e3)
        plain_ms = float(lane.pass_ms(len(steps))[-1]) + self.pair.learned.costs.overhead_ms
        for sequence in sequences:
            made = sequence.tally.round_over(round_s * 1e3, plain_ms)
            share_ms = round_s * 1e3 / len(steps)
            self._controller.elapsed(sequence.step, made, share_ms, plain_ms)

    def _after(self, lane: Lane, sequence: Sequence) -> None:
        if sequence.finished:
            self._finish(lane, sequence)
            return
        start = self._clock()
        if self._controller.probe(sequence.step, sequence.left):
            sequence.tally.round_ms += (self._clock() - start) * 1e3

    # ------------------------------------------------------------------------ the end of a request

    def _finish(self, lane: Lane, sequence: Sequence) -> None:
        last, done = sequence.last_text(), sequence.done(lane.exact)
        if sequence in lane.active:
            self._scheduler.leave(lane, sequence)
        if last is not None:
            self._emit(last)
        self._emit(done)

    def _guarded(
        self, act: Callable[[Lane, Sequence], None], lane: Lane, sequence: Sequence
    ) -> None:
        """Do something for one request; what is raised ends that one."""
        try:
            act(lane, sequence)
        except DecodeFatal:
            raise
        except Exception as error:
            self._break(lane, sequence, error)

    def _break(self, lane: Lane, sequence: Sequence, error: Exception) -> None:
        """End one request with an error. Nothing of its slot is trusted any more."""
        if isinstance(error, NotFinite) and self._separate(lane, sequence):
            return
        self._scheduler.drop(lane, sequence)
        self._fail(sequence.id, error)

    def _separate(self, lane: Lane, sequence: Sequence) -> bool:
        """Logits that are no numbers may come from any text in the context: some of llama.cpp's kernels
        add what others' cells hold, times nothing, and NaN times nothing is NaN.

        So all is forgotten, and those that ran are run again, one after another. False: this one was
        alone already, so they are its own.
        """
        if sequence.alone:
            self._scheduler.forget_slots(lane)
            return False
        sequence.verifier.take_back()
        for each in sorted(lane.active, key=lambda each: -each.number):
            if each.finished:
                self._finish(lane, each)
        self._scheduler.separate(lane)
        return True

    def _fail(self, request: int, error: Exception) -> None:
        """Tell of an error. One that is no fault of the request is ours, and the log says where."""
        if isinstance(error, LocalspecError) and not isinstance(error, DecodeError):
            sizes = error.n_prompt_tokens, error.n_ctx
            self._emit(Failed(request, error.code, error.message, error.param, *sizes))
            return
        traceback.print_exception(error)
        what = error.message if isinstance(error, LocalspecError) else f"{error!r}."
        self._emit(Failed(request, "internal_error", f"The engine failed in this request: {what}"))
