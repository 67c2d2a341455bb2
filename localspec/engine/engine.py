"""The step loop: admit → choose depth → draft → one target pass → verify → commit → show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from localspec.engine import sampling
from localspec.engine.depth import (
    LOOK_GAP,
    LOOK_LEFT,
    MAX_LIMIT,
    Belief,
    DepthPolicy,
    FixedDepth,
    MeasuredDepth,
)
from localspec.engine.drafters.lookup import length_bucket
from localspec.engine.generation import Generation, Prepared
from localspec.engine.lane import EXACT_CHUNK, Lane
from localspec.engine.llama import NoKvSlot
from localspec.engine.pair import Pair
from localspec.engine.planner import Planner, Turn
from localspec.engine.profile import Clock
from localspec.engine.sampling import Logits
from localspec.engine.speculate import verify_chosen, verify_match, verify_rejection
from localspec.errors import Cancelled, ContextExceeded, LocalspecError
from localspec.protocol.frames import Failed, Frame, Started, TokenLogprob

Emit = Callable[[Frame], None]


class Engine:
    """Runs requests on one loaded pair. One thread calls `submit`, `cancel` and `step`."""

    def __init__(self, pair: Pair, emit: Emit, clock: Clock = time.perf_counter) -> None:
        self.pair = pair
        self._clock = clock
        self._emit = emit
        self._waiting: deque[Prepared] = deque()
        self._lanes = [pair.shared]
        self._planner = Planner(pair)
        self.rounds = 0
        self.round_s = 0.0  # all of the rounds' time; pair.busy_s() is llama.cpp's part of it

    # ------------------------------------------------------------------------ requests in

    def submit(self, prepared: Prepared) -> None:
        """Queue a request; it is refused at once (Failed) where it can never run."""
        try:
            self._check(prepared)
        except LocalspecError as error:
            self._fail(prepared.request.id, error)
            return
        if prepared.request.priority == "editor":
            self._waiting.appendleft(prepared)
        else:
            self._waiting.append(prepared)

    def _check(self, prepared: Prepared) -> None:
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
        for prepared in self._waiting:
            if prepared.request.id == request:
                self._waiting.remove(prepared)
                self._fail(request, Cancelled("The request was cancelled."))
                return True
        for lane in self._lanes:
            for gen in lane.active:
                if gen.id == request:
                    gen.finish = "cancelled"
                    self._finish(lane, gen)
                    return True
        return False

    @property
    def active(self) -> bool:
        return bool(self._waiting) or any(lane.active for lane in self._lanes)

    # ------------------------------------------------------------------------ one step

    def step(self) -> None:
        """One round of every lane that has work."""
        self._admit()
        for lane in self._lanes:
            if lane.active:
                self._round(lane)

    def _round(self, lane: Lane) -> None:
        start = self._clock()
        busy = self.pair.busy_s()
        turns = self._schedule(lane)
        self._planner.draft(lane, turns)
        if not self._pass(lane, turns):
            return
        for turn in turns:
            self._verify(lane, turn)
        turns = [turn for turn in turns if turn.gen in lane.active]
        self._account(lane, turns, self._clock() - start, self.pair.busy_s() - busy)
        for turn in turns:
            self._look_in(lane, turn)
            if turn.gen.finish is not None:
                self._finish(lane, turn.gen)

    # ------------------------------------------------------------------------ admit

    def _admit(self) -> None:
        for prepared in list(self._waiting):
            exact = self.pair.wants_exact(prepared.request)
            try:
                lane = self.pair.exact() if exact else self.pair.shared
            except LocalspecError as error:
                self._waiting.remove(prepared)
                self._fail(prepared.request.id, error)
                continue
            if lane not in self._lanes:
                self._lanes.append(lane)
            if lane.slots.free:
                self._waiting.remove(prepared)
                self._start(lane, prepared)

    def _start(self, lane: Lane, prepared: Prepared) -> None:
        request = prepared.request
        align = EXACT_CHUNK if lane.exact else 1
        slot = lane.slots.acquire(prepared.tokens, request.cache_prompt, align, prepared.saved)
        prepared.saved = None  # as large as a model's memory, and not needed any more
        slot.conversation = request.conversation
        room = self.pair.n_ctx - len(prepared.tokens)
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        asked = request.speculative
        depth = asked.depth if asked.depth is not None else self.pair.settings.depth
        policy: DepthPolicy = (
            MeasuredDepth() if depth is None else FixedDepth(min(depth, MAX_LIMIT))
        )
        kinds = self.pair.kinds(prepared)
        gen = Generation(
            prepared,
            slot,
            self.pair.vocab,
            limit=limit,
            policy=policy,
            beliefs={kind: Belief(self.pair.calibrations[kind]) for kind in kinds},
            reject=self.pair.rejects(prepared),
            reason=None if kinds else self.pair.why_no_drafts(prepared),
        )
        chooses = self.pair.chooses_on_device and not lane.exact
        gen.chosen_on_device = lane.context.choose_on_device(
            slot.id, chooses and self.pair.needs_no_logits(prepared)
        )
        lane.active.append(gen)
        self._emit(
            Started(request.id, len(prepared.tokens), gen.tally.cached, prepared.tail, slot.source)
        )

    # ------------------------------------------------------------------------ schedule

    def _schedule(self, lane: Lane) -> list[Turn]:
        """Every writing generation, and a bounded chunk of prompts: editors first, then short ones."""
        writing = [gen for gen in lane.active if not gen.reading]
        if lane.exact:
            gen = lane.active[0]
            return [self._reading_turn(lane, gen, True) if gen.reading else Turn(gen, _unread(gen))]
        turns = [Turn(gen, _unread(gen)) for gen in writing]
        readers = [gen for gen in lane.active if gen.reading]
        readers.sort(key=lambda g: (g.request.priority != "editor", len(_unread(g))))
        rows = 0
        for gen in readers:
            turn = self._reading_turn(lane, gen, not writing and len(readers) == 1)
            budget = lane.batch.capacity - (MAX_LIMIT + 1) * len(writing)
            if rows and rows + len(turn.read) > min(budget, lane.batch.capacity // 2):
                continue
            rows += len(turn.read)
            turns.append(turn)
        return turns

    def _reading_turn(self, lane: Lane, gen: Generation, alone: bool) -> Turn:
        left = _unread(gen)
        return Turn(gen, left[: lane.chunk(gen.slot.n_target, len(left), alone)])

    # ------------------------------------------------------------------------ one target pass

    def _pass(self, lane: Lane, turns: Sequence[Turn]) -> bool:
        """Decode all rows together. False: no room; someone was asked to leave, try the next step."""
        batch = lane.batch
        batch.clear()
        for turn in turns:
            slot = turn.gen.slot
            last_chunk = slot.n_target + len(turn.read) == len(slot.tokens)
            position = slot.last_pass = slot.n_target
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

    def _pad(self, lane: Lane, turn: Turn) -> None:
        """Rows whose results nobody reads, where a wider pass is cheaper or the width is fixed."""
        batch = lane.batch
        if turn.gen.reading and lane.exact:
            return  # a prompt's chunks are the same in every run as they are
        filler = turn.read[-1]
        position = turn.gen.slot.n_target + turn.rows
        room = self.pair.n_ctx - position
        for _ in range(min(lane.pad_to(batch.rows) - batch.rows, max(room, 0))):
            batch.add(filler, position, turn.gen.slot.id, True)
            position += 1

    def _make_room(self, lane: Lane) -> None:
        """The context is full of running requests: the one that came last ends here."""
        gen = lane.active[-1]
        for other in lane.active:  # what was drafted for this pass is not verified any more
            lane.slots.roll_back(other.slot, other.slot.n_target)
        if gen.generated == 0:
            lane.active.remove(gen)
            lane.slots.clear(gen.slot)
            lane.slots.release(gen.slot)
            full = ContextExceeded(
                "The context is full of other running requests; try again later."
            )
            self._fail(gen.id, full)
            return
        gen.finish = "length"
        self._finish(lane, gen)

    # ------------------------------------------------------------------------ verify and commit

    def _verify(self, lane: Lane, turn: Turn) -> None:
        """Keep what the target agrees with, roll both memories back to it, show the text."""
        gen, slot = turn.gen, turn.gen.slot
        if turn.first_row < 0:
            slot.n_target += len(turn.read)
            return
        if gen.limit <= 0:  # the prompt was only to be read
            slot.n_target += len(turn.read)
            gen.first_token_now()
            gen.finish = "length"
            return
        logprobs: list[TokenLogprob] = []
        raw: dict[int, Logits] = {}

        def rows(i: int, kept: Sequence[int]) -> Logits:
            row = lane.context.logits(turn.first_row + i)
            raw[i] = row
            mask = None
            if gen.matcher is not None:
                gen.consume(kept)
                mask = gen.matcher.mask()
            history = slot.tokens + list(kept) if gen.sampler.settings.penalised else slot.tokens
            return gen.sampler.adjusted(row, history, mask)

        try:
            if gen.chosen_on_device:
                kept = verify_chosen(
                    lambda i: lane.context.chosen(turn.first_row + i), turn.drafted
                )
            elif turn.probs:
                kept = verify_rejection(rows, turn.drafted, turn.probs, gen.sampler, gen.generated)
            else:
                kept = verify_match(rows, turn.drafted, gen.sampler, gen.generated)
            gen.consume(kept)
        except LocalspecError as error:  # the grammar ran into its limits
            slot.n_target += len(turn.read)
            lane.slots.roll_back(slot, slot.n_target)
            self._drop(lane, gen, error)
            return
        gen.round_over()
        if gen.request.top_logprobs is not None:
            logprobs = [
                sampling.logprob(raw[i], token, gen.request.top_logprobs, self.pair.vocab.piece)
                for i, token in enumerate(kept)
            ]
        self._observe(turn, kept)
        before = slot.n_target + len(turn.read)
        count, delta = gen.keep(kept, len(kept) - 1, logprobs)
        # Accepted drafts are in the target's KV already; its own last token is not.
        slot.n_target = before + min(count, len(kept) - 1)
        lane.slots.roll_back(slot, slot.n_target)
        gen.tally.produced += count
        if delta is not None:
            self._emit(delta)

    def _observe(self, turn: Turn, kept: Sequence[int]) -> None:
        """Teach the beliefs: each verified draft up to the first rejection, and lookup for free."""
        gen = turn.gen
        accepted = len(kept) - 1
        if len(turn.read) == 1:  # else it was mostly there to read a prompt
            gen.tally.depths[len(turn.drafted)] += 1
            gen.tally.accepts[accepted] += 1
        if turn.drafted and turn.kind is not None:
            for at in range(min(accepted + 1, len(turn.drafted))):
                gen.beliefs[turn.kind].observe(turn.buckets[at], at < accepted)
            tally = gen.tally
            tally.drafted += len(turn.drafted)
            tally.accepted += accepted
            tally.kinds[turn.kind] = tally.kinds.get(turn.kind, 0) + len(turn.drafted)
            if turn.kind == "ngram" and gen.request.speculative.prediction is not None:
                tally.predicted_accepted += accepted
                tally.predicted_rejected += len(turn.drafted) - accepted
        elif "draft" in gen.beliefs:
            gen.beliefs["draft"].fade(len(kept))
        if turn.looked_up and turn.kind != "ngram":
            at = length_bucket(turn.match)
            for guess, token in zip(turn.looked_up, kept, strict=False):
                gen.beliefs["ngram"].observe(at, guess == token)
                if guess != token:
                    break

    def _account(self, lane: Lane, turns: Sequence[Turn], round_s: float, busy_s: float) -> None:
        """Book the round's time: to the overhead, and to each generation that wrote."""
        self.rounds += 1
        self.round_s += round_s
        writing = [turn for turn in turns if turn.first_row >= 0 and len(turn.read) == 1]
        if len(writing) != len(turns):
            return  # a round that also read a prompt says nothing about the speed of writing
        self.pair.costs.observe_overhead((round_s - busy_s) * 1e3)
        plain = float(lane.pass_ms(len(writing))[-1]) + self.pair.costs.overhead_ms
        for turn in writing:
            tally = turn.gen.tally
            made, tally.produced_timed = tally.produced - tally.produced_timed, tally.produced
            tally.rounds += 1
            tally.timed += made
            tally.round_ms += round_s * 1e3
            tally.plain_ms += plain * made
            if turn.kind == "draft":
                turn.gen.plain_since_look = 0
            elif "draft" in turn.gen.beliefs and self.pair.drafter is not None:
                turn.gen.plain_since_look += made
                turn.gen.beliefs["draft"].calibration.earn(round_s * 1e3 / len(writing), plain)

    def _look_in(self, lane: Lane, turn: Turn) -> None:
        """While drafts do not pay, see now and then whether they would, at a bounded share of time."""
        gen, drafter = turn.gen, self.pair.drafter
        if drafter is None or "draft" not in gen.beliefs or gen.finish is not None:
            return
        if turn.kind == "draft" or isinstance(gen.policy, FixedDepth) or turn.first_row < 0:
            return
        if gen.plain_since_look < LOOK_GAP or gen.left < LOOK_LEFT:
            return
        if not gen.beliefs["draft"].calibration.pay(drafter.look_ms):
            return
        start = self._clock()
        try:
            drafter.look_in(gen.slot.tokens, gen.beliefs["draft"])
        except NoKvSlot:
            lane.slots.roll_back_draft(gen.slot, 0)
            gen.no_draft_model("the draft's context is full")
        gen.tally.round_ms += (self._clock() - start) * 1e3
        gen.plain_since_look = 0

    # ------------------------------------------------------------------------ the end of a request

    def _finish(self, lane: Lane, gen: Generation) -> None:
        last = gen.last_text()
        if last is not None:
            self._emit(last)
        rule = "rejection" if gen.reject else "match"
        self._emit(gen.done(rule if gen.beliefs else None, lane.exact))
        self._leave(lane, gen)

    def _leave(self, lane: Lane, gen: Generation) -> None:
        lane.active.remove(gen)
        if lane.exact:  # only whole chunks of a prompt are the same in every run
            chunks = gen.n_prompt // EXACT_CHUNK * EXACT_CHUNK
            lane.slots.roll_back(gen.slot, min(chunks, gen.slot.n_target))
        lane.slots.release(gen.slot)

    def _drop(self, lane: Lane, gen: Generation, error: LocalspecError) -> None:
        """End one request with an error; the others go on."""
        self._leave(lane, gen)
        self._fail(gen.id, error)

    def _fail(self, request: int, error: LocalspecError) -> None:
        self._emit(Failed(request, error.code, error.message, error.param))


def _unread(gen: Generation) -> list[int]:
    return gen.slot.tokens[gen.slot.n_target :]
