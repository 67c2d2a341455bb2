"""The step loop: admit → choose depth → draft → one target pass → verify → commit → show."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable

import msgspec

from localspec.engine.cache.room import fits
from localspec.engine.llama import DecodeError, DecodeFatal, NoKvSlot, NotFinite
from localspec.engine.pair.lane import EXACT_CHUNK, Lane
from localspec.engine.pair.pair import Pair
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation import policy
from localspec.engine.speculation.commit import commit
from localspec.engine.speculation.controller import Planner, SequenceStep
from localspec.engine.speculation.cost import Clock
from localspec.engine.speculation.depth import (
    MAX_LIMIT,
    PROBE_GAP,
    PROBE_LEFT,
    Belief,
    FixedDepth,
)
from localspec.errors import Cancelled, ContextExceeded, LocalspecError
from localspec.protocol.frames import Failed, Frame, Started

Emit = Callable[[Frame], None]


class Engine:
    """Runs requests on one loaded pair. One thread calls `submit`, `cancel` and `step`.

    Whatever is raised on one request's behalf ends that request with an error, and the others go on.
    Only a context that can no longer be trusted ends them all (`DecodeFatal` leaves `step`).
    """

    def __init__(self, pair: Pair, emit: Emit, clock: Clock = time.perf_counter) -> None:
        self.pair = pair
        self._clock = clock
        self._emit = emit
        self._waiting: deque[TokenizedRequest | Sequence] = deque()
        self._started = 0  # requests that have had a slot
        self._lanes = [pair.shared]
        self._planner = Planner(pair)
        self.rounds = 0
        self.round_s = 0.0  # all of the rounds' time; pair.busy_s() is llama.cpp's part of it

    # ------------------------------------------------------------------------ requests in

    def submit(self, prepared: TokenizedRequest) -> None:
        """Queue a request; it is refused at once (Failed) where it can never run."""
        try:
            self._check(prepared)
        except Exception as error:
            self._fail(prepared.request.id, error)
            return
        if prepared.request.priority == "editor":
            self._waiting.appendleft(prepared)
        else:
            self._waiting.append(prepared)

    def _check(self, prepared: TokenizedRequest) -> None:
        room = self.pair.n_ctx
        count = len(prepared.tokens)
        if count >= room:
            raise ContextExceeded(
                f"The prompt has {count} tokens and the context holds {room}; shorten it by "
                f"{count - room + 1} tokens or set a larger `context`.",
                param="prompt",
            )

    def cancel(self, request: int) -> bool:
        """End a request now; what it has generated stays valid. False: there is no such request."""
        for waiting in self._waiting:
            if waiting.request.id == request:
                self._waiting.remove(waiting)
                if isinstance(waiting, Sequence):  # what it wrote before it gave way is valid
                    waiting.finish = "cancelled"
                    self._guarded(
                        self.pair.shared, waiting, self._finish, self.pair.shared, waiting
                    )
                else:
                    self._fail(request, Cancelled("The request was cancelled."))
                return True
        for lane in self._lanes:
            for gen in lane.active:
                if gen.id == request:
                    gen.finish = "cancelled"
                    self._guarded(lane, gen, self._finish, lane, gen)
                    return True
        return False

    def forget(self, conversation: str | None) -> None:
        """Drop what is kept of a conversation, with None of all; what waits will not be saved either."""
        for waiting in self._waiting:
            if waiting.request.conversation is not None and conversation in (
                None,
                waiting.request.conversation,
            ):
                waiting.request = msgspec.structs.replace(waiting.request, conversation=None)
                if isinstance(waiting, TokenizedRequest):
                    waiting.saved = None
        self.pair.forget(conversation)

    @property
    def active(self) -> bool:
        return bool(self._waiting) or any(lane.active for lane in self._lanes)

    # ------------------------------------------------------------------------ one step

    def step(self) -> None:
        """One round of every lane that has work."""
        self._admit()
        for lane in self._lanes:
            if lane.active:
                try:
                    self._round(lane)
                except DecodeFatal:
                    raise
                except Exception as error:  # whose fault it is cannot be told
                    for gen in list(lane.active):
                        self._break(lane, gen, error)

    def _round(self, lane: Lane) -> None:
        start = self._clock()
        busy = self.pair.busy_s()
        turns = self._schedule(lane)
        for gen, error in self._planner.draft(lane, turns):
            self._break(lane, gen, error)
        turns = self._carry_out(lane, [turn for turn in turns if turn.gen in lane.active])
        if not turns:
            return
        self._account(lane, turns, self._clock() - start, self.pair.busy_s() - busy)
        for turn in turns:
            self._guarded(lane, turn.gen, self._after, lane, turn)

    def _carry_out(self, lane: Lane, turns: list[SequenceStep]) -> list[SequenceStep]:
        """Read, verify and commit; the turns whose requests are still there. None: no pass was made."""
        try:
            if not turns or not self._pass(lane, turns):
                return []
        except DecodeFatal:
            raise
        except Exception as error:
            return self._one_by_one(lane, turns, error)
        for turn in turns:
            if turn.gen in lane.active:  # else another turn has sent them all to wait
                self._guarded(lane, turn.gen, self._commit, lane, turn)
        return [turn for turn in turns if turn.gen in lane.active]

    def _one_by_one(
        self, lane: Lane, turns: list[SequenceStep], error: Exception
    ) -> list[SequenceStep]:
        """A pass that could not be made has one sequence at fault, if any: each has one of its own."""
        if len(turns) == 1:
            self._break(lane, turns[0].gen, error)
            return []
        traceback.print_exception(error)
        for turn in turns:
            self._guarded(lane, turn.gen, self._drop_drafts, lane, turn.gen)
        left = [turn.gen for turn in turns if turn.gen in lane.active]
        return [turn for gen in left for turn in self._carry_out(lane, [self._turn(lane, gen)])]

    def _commit(self, lane: Lane, turn: SequenceStep) -> None:
        delta = commit(lane, turn, self.pair.vocab)
        if delta is not None:
            self._emit(delta)

    def _after(self, lane: Lane, turn: SequenceStep) -> None:
        self._look_in(lane, turn)
        if turn.gen.finish is not None:
            self._finish(lane, turn.gen)

    def _drop_drafts(self, lane: Lane, gen: Sequence) -> None:
        """What was drafted for a pass that was not made is not verified any more."""
        lane.slots.commit(gen.slot, 0)

    # ------------------------------------------------------------------------ admit

    def _admit(self) -> None:
        """Give slots to those that wait, in their order. Who finds no room holds up all but editors."""
        full: set[Lane] = set()
        for waiting in list(self._waiting):
            request = waiting.request
            try:
                exact = policy.wants_exact(self.pair, request)
                lane = self.pair.exact.lane() if exact else self.pair.shared
            except Exception as error:
                self._waiting.remove(waiting)
                self._fail(request.id, error)
                continue
            if lane not in self._lanes:
                self._lanes.append(lane)
            held_up = lane in full and request.priority != "editor"
            if held_up or not lane.slots.free or not fits(lane, waiting):
                full.add(lane)
                continue
            self._waiting.remove(waiting)
            try:
                if isinstance(waiting, Sequence):
                    self._go_on(lane, waiting)
                else:
                    self._start(lane, waiting)
            except Exception as error:
                lane.active = [gen for gen in lane.active if gen.id != request.id]
                self._clean(lane)
                self._fail(request.id, error)

    def _start(self, lane: Lane, prepared: TokenizedRequest) -> None:
        request = prepared.request
        align = EXACT_CHUNK if lane.exact else 1
        slot = lane.slots.acquire(prepared.tokens, request.cache_prompt, align, prepared.saved)
        prepared.saved = None  # as large as a model's memory, and not needed any more
        slot.conversation = request.conversation
        kinds = policy.kinds(self.pair, prepared)
        gen = Sequence(
            prepared,
            slot,
            self.pair.vocab,
            room=self.pair.n_ctx - len(prepared.tokens),
            policy=policy.depth(self.pair, prepared),
            beliefs={kind: Belief(self.pair.learned.calibrations[kind]) for kind in kinds},
            reject=policy.rejects(self.pair, prepared),
            reason=None if kinds else policy.why_no_drafts(self.pair, prepared),
        )
        self._started += 1
        gen.number = self._started
        self._enter(lane, gen)
        self._emit(
            Started(request.id, len(prepared.tokens), gen.tally.cached, prepared.tail, slot.source)
        )

    def _go_on(self, lane: Lane, gen: Sequence) -> None:
        """One that had given way gets a slot again, and its text is read where it is not kept."""
        slot = lane.slots.acquire(gen.tokens, gen.request.cache_prompt)
        slot.conversation = gen.request.conversation
        gen.go_on_in(slot)
        self._enter(lane, gen)

    def _enter(self, lane: Lane, gen: Sequence) -> None:
        chooses = self.pair.chooses_on_device and not lane.exact
        gen.chosen_on_device = lane.context.choose_on_device(
            gen.slot.id, chooses and policy.needs_no_logits(gen)
        )
        lane.active.append(gen)

    def _clean(self, lane: Lane) -> None:
        """A request failed while it got its slot: what no running one holds is not trusted any more."""
        for slot in lane.slots:
            if all(gen.slot is not slot for gen in lane.active):
                lane.slots.clear(slot)
                slot.busy = False

    # ------------------------------------------------------------------------ schedule

    def _schedule(self, lane: Lane) -> list[SequenceStep]:
        """Every writing generation, and a bounded chunk of prompts: editors first, then short ones."""
        writing = [gen for gen in lane.active if not gen.reading]
        if lane.exact:
            return [self._turn(lane, lane.active[0])]
        turns = [SequenceStep(gen, gen.slot.unread) for gen in writing]
        readers = [gen for gen in lane.active if gen.reading]
        readers.sort(key=lambda g: (g.request.priority != "editor", len(g.slot.unread)))
        rows = 0
        for gen in readers:
            turn = self._reading_turn(lane, gen, not writing and len(readers) == 1)
            budget = lane.batch.capacity - (MAX_LIMIT + 1) * len(writing)
            budget = min(budget, lane.batch.capacity // 2, lane.most_rows)
            if rows and rows + len(turn.read) > budget:
                continue
            rows += len(turn.read)
            turns.append(turn)
        return turns

    def _turn(self, lane: Lane, gen: Sequence) -> SequenceStep:
        """A turn of one that has the pass for itself."""
        return (
            self._reading_turn(lane, gen, True)
            if gen.reading
            else SequenceStep(gen, gen.slot.unread)
        )

    def _reading_turn(self, lane: Lane, gen: Sequence, alone: bool) -> SequenceStep:
        left = gen.slot.unread
        count = lane.chunk(gen.slot.n_past, len(left), alone)
        return SequenceStep(gen, left[: lane.slots.reading(gen.slot, count)])

    # ------------------------------------------------------------------------ one target pass

    def _pass(self, lane: Lane, turns: list[SequenceStep]) -> bool:
        """Decode all rows together. False: no room; someone was asked to leave, try the next step."""
        batch = lane.batch
        batch.clear()
        for turn in turns:
            slot = turn.gen.slot
            last_chunk = slot.n_past + len(turn.read) == len(slot.tokens)
            position = slot.last_pass = slot.n_past
            for at, token in enumerate(turn.read, start=1):
                wants = last_chunk and at == len(turn.read)
                row = batch.add(token, position, slot.id, wants)
                position += 1
            turn.first_row = row if last_chunk else -1
            for token in turn.drafted:
                batch.add(token, position, slot.id, True)
                position += 1
        writing_only = all(not turn.gen.reading for turn in turns)
        if len(turns) == 1 and (writing_only or lane.exact):
            self._pad(lane, turns[0])
        while True:
            try:
                lane.decode(timed=writing_only)
                return True
            except NoKvSlot:
                if not lane.slots.evict():
                    self._make_room(lane)
                    return False

    def _pad(self, lane: Lane, turn: SequenceStep) -> None:
        """Rows whose results nobody reads, where a wider pass is cheaper or the width is fixed."""
        batch = lane.batch
        if turn.gen.reading and lane.exact:
            return  # a prompt's chunks are the same in every run as they are
        filler = turn.read[-1]
        position = turn.gen.slot.n_past + turn.rows
        room = self.pair.n_ctx - position
        for _ in range(min(lane.pad_to(batch.rows) - batch.rows, max(room, 0))):
            batch.add(filler, position, turn.gen.slot.id, True)
            position += 1

    def _make_room(self, lane: Lane) -> None:
        """The context is full of running requests: the newest gives way until there is room again.

        So the oldest always goes on, whatever comes after it.
        """
        for gen in lane.active:
            self._drop_drafts(lane, gen)
        newest = max(lane.active, key=lambda gen: gen.number)
        if len(lane.active) == 1:  # its limit leaves room for it alone; llama.cpp sees it otherwise
            newest.finish = "length"
            self._finish(lane, newest)
            return
        self._give_way(lane, newest)
        newest.gave_way = lane.left
        self._waiting.appendleft(newest)

    def _give_way(self, lane: Lane, gen: Sequence) -> None:
        """Leave the slot, which keeps its text as any idle one does, as long as there is room."""
        lane.active.remove(gen)
        lane.slots.release(gen.slot)

    # ------------------------------------------------------------------------ the books

    def _account(
        self, lane: Lane, turns: list[SequenceStep], round_s: float, busy_s: float
    ) -> None:
        """Book the round's time: to the overhead, and to each generation that wrote."""
        self.rounds += 1
        self.round_s += round_s
        writing = [turn for turn in turns if turn.first_row >= 0 and len(turn.read) == 1]
        if len(writing) != len(turns):
            return  # a round that also read a prompt says nothing about the speed of writing
        self.pair.learned.costs.observe_overhead((round_s - busy_s) * 1e3)
        plain = float(lane.pass_ms(len(writing))[-1]) + self.pair.learned.costs.overhead_ms
        for turn in writing:
            tally = turn.gen.tally
            made, tally.produced_timed = tally.produced - tally.produced_timed, tally.produced
            tally.rounds += 1
            tally.timed += made
            tally.round_ms += round_s * 1e3
            tally.plain_ms += plain * made
            if turn.kind == "draft":
                turn.gen.plain_since_probe = 0
            elif "draft" in turn.gen.beliefs and self.pair.drafter is not None:
                turn.gen.plain_since_probe += made
                turn.gen.beliefs["draft"].calibration.earn(round_s * 1e3 / len(writing), plain)

    def _look_in(self, lane: Lane, turn: SequenceStep) -> None:
        """While drafts do not pay, see now and then whether they would, at a bounded share of time."""
        gen, drafter = turn.gen, self.pair.drafter
        if drafter is None or "draft" not in gen.beliefs or gen.finish is not None:
            return
        if turn.kind == "draft" or isinstance(gen.policy, FixedDepth) or turn.first_row < 0:
            return
        if gen.plain_since_probe < PROBE_GAP or gen.left < PROBE_LEFT:
            return
        if not gen.beliefs["draft"].calibration.pay(drafter.probe_ms):
            return
        start = self._clock()
        try:
            drafter.probe(gen.slot.tokens, gen.beliefs["draft"])
        except DecodeFatal:
            raise
        except Exception as error:
            self._planner.stop_drafting(lane, gen, error)
        gen.tally.round_ms += (self._clock() - start) * 1e3
        gen.plain_since_probe = 0

    # ------------------------------------------------------------------------ the end of a request

    def _finish(self, lane: Lane, gen: Sequence) -> None:
        rule = "rejection" if gen.reject else "match"
        last, done = gen.last_text(), gen.done(rule if gen.beliefs else None, lane.exact)
        if gen in lane.active:
            self._leave(lane, gen)
        if last is not None:
            self._emit(last)
        self._emit(done)

    def _leave(self, lane: Lane, gen: Sequence) -> None:
        if lane.exact:  # only whole chunks of a prompt are the same in every run
            chunks = gen.n_prompt // EXACT_CHUNK * EXACT_CHUNK
            lane.slots.roll_back(gen.slot, min(chunks, gen.slot.n_past))
        lane.slots.release(gen.slot)
        lane.active.remove(gen)
        lane.left += 1

    def _guarded(self, lane: Lane, gen: Sequence, act: Callable[..., None], *args: object) -> None:
        """Do something for one request; what is raised ends that one."""
        try:
            act(*args)
        except DecodeFatal:
            raise
        except Exception as error:
            self._break(lane, gen, error)

    def _break(self, lane: Lane, gen: Sequence, error: Exception) -> None:
        """End one request with an error. Nothing of its slot is trusted any more."""
        if isinstance(error, NotFinite) and self._part(lane, gen):
            return
        if gen in lane.active:
            lane.active.remove(gen)
            lane.left += 1
            lane.slots.clear(gen.slot)
            lane.slots.release(gen.slot)
        self._fail(gen.id, error)

    def _part(self, lane: Lane, gen: Sequence) -> bool:
        """Logits that are no numbers may come from any text in the context: some of llama.cpp's kernels
        add what others' cells hold, times nothing, and NaN times nothing is NaN.

        So all is forgotten, and those that ran are run again, one after another. False: this one was
        alone already, so they are its own.
        """
        running = sorted(lane.active, key=lambda each: each.number)
        alone, gen.alone = gen.alone, True
        if not alone:
            gen.take_back()
            for each in reversed(running):
                if each.finish is not None:
                    self._finish(lane, each)
                    continue
                each.alone = True
                self._give_way(lane, each)
                self._waiting.appendleft(each)
        for slot in lane.slots:
            lane.slots.clear(slot)
        lane.context.clear()
        self.pair.prefixes.clear()
        return not alone

    def _fail(self, request: int, error: Exception) -> None:
        """Tell of an error. One that is no fault of the request is ours, and the log says where."""
        if isinstance(error, LocalspecError) and not isinstance(error, DecodeError):
            self._emit(Failed(request, error.code, error.message, error.param))
            return
        traceback.print_exception(error)
        what = error.message if isinstance(error, LocalspecError) else f"{error!r}."
        self._emit(Failed(request, "internal_error", f"The engine failed in this request: {what}"))
