"""Which requests run, and what of each the next pass reads: slots, prefill chunks, rows, giving way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from localspec.engine.cache.shift import READ_ANEW
from localspec.engine.pair.lane import EXACT_CHUNK, Lane
from localspec.engine.pair.pair import Pair
from localspec.engine.pair.room import drafts_beside, ends_for, fits
from localspec.engine.prompt.infill import after_cursor
from localspec.engine.sequence import Sequence, TokenizedRequest, owner, suggests
from localspec.engine.speculation.acceptance import MAX_LIMIT
from localspec.engine.speculation.drafters.base import DraftRequest, Resources
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.engine.speculation.verification import Verifier, rejects
from localspec.errors import EXCEEDS, ContextExceeded
from localspec.protocol.frames import Generate

USUAL = 256  # tokens that an answer is expected to have, unless it may have fewer


def counted(tokens: int) -> str:
    return f"{tokens} token" if tokens == 1 else f"{tokens} tokens"


class Scheduler:
    """The requests that wait, in their order, and the lanes with those that run."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._waiting: deque[TokenizedRequest | Sequence] = deque()
        self._started = 0  # requests that have had a slot
        self.lanes = [pair.shared]

    def submit(self, tokenized: TokenizedRequest) -> None:
        """Queue a request.

        Raises:
            ContextExceeded: it can never run.
        """
        room = self._pair.n_ctx
        count = len(tokenized.tokens)
        if count >= room:
            over = count - room + 1
            raise ContextExceeded(
                f"The prompt has {counted(count)}, which {EXCEEDS} of {counted(room)}; shorten it by "
                f"{counted(over)} or set a larger `context`.",
                param="prompt",
                n_prompt_tokens=count,
                n_ctx=room,
            )
        if tokenized.request.priority == "editor":
            self._waiting.appendleft(tokenized)
        else:
            self._waiting.append(tokenized)

    def withdraw(self, request: int) -> TokenizedRequest | tuple[Lane, Sequence] | None:
        """Find a request, and take it out of those that wait; None: there is none of this number.

        With a sequence comes the lane it runs in, or would.
        """
        for waiting in self._waiting:
            if waiting.request.id == request:
                self._waiting.remove(waiting)
                return (self._pair.shared, waiting) if isinstance(waiting, Sequence) else waiting
        found = ((lane, each) for lane in self.lanes for each in lane.active)
        return next(((lane, each) for lane, each in found if each.id == request), None)

    def forget(self, conversation: str | None) -> None:
        """What waits of a conversation, with None of any, is not saved."""
        for waiting in self._waiting:
            own = owner(waiting.request)
            if own is not None and conversation in (None, own):
                waiting.request = msgspec.structs.replace(
                    waiting.request, conversation=None, private=True
                )
            if isinstance(waiting, TokenizedRequest) and (saved := waiting.saved):
                whose = saved.conversation
                waiting.saved = None if conversation in (None, whose) else saved

    @property
    def _running(self) -> int:
        return sum(len(lane.active) for lane in self.lanes)

    @property
    def _writing(self) -> bool:
        """Does somebody wait for every pass, for it may give him a token?"""
        return any(not each.prefilling for lane in self.lanes for each in lane.active)

    @property
    def hurries(self) -> bool:
        """Whether an editor waits for its first token."""
        waiting = self._waiting[0] if self._waiting else None
        first = isinstance(waiting, TokenizedRequest) and suggests(waiting.request)
        return first or any(
            each.prefilling and suggests(each.request)
            for lane in self.lanes
            for each in lane.active
        )

    @property
    def active(self) -> bool:
        return bool(self._waiting) or any(lane.active for lane in self.lanes)

    # ------------------------------------------------------------------------ admit

    def admit(
        self,
        started: Callable[[Sequence, TokenizedRequest], None],
        failed: Callable[[int, Exception], None],
    ) -> list[Lane]:
        """Give slots to those that wait, in their order. Who finds no room holds up all but editors.

        started, failed: told of each that has got its first slot, or cannot. Returns the lanes that
        have work.
        """
        full: set[Lane] = set()
        for waiting in list(self._waiting):
            request = waiting.request
            try:
                exact = self._pair.settings.exact if request.exact is None else request.exact
                lane = self._pair.exact.lane() if exact else self._pair.shared
            except Exception as error:  # making the exact lane failed: only who asked for it
                self._waiting.remove(waiting)
                failed(request.id, error)
                continue
            if lane not in self.lanes:
                self.lanes.append(lane)
            held_up = lane in full and request.priority != "editor"
            if held_up or not lane.slots.free or not fits(lane, waiting):
                full.add(lane)
                continue
            self._waiting.remove(waiting)
            try:
                if isinstance(waiting, Sequence):
                    self._go_on(lane, waiting)
                else:
                    started(self._start(lane, waiting), waiting)
            except Exception as error:  # whatever it is, it is this request's
                lane.active = [each for each in lane.active if each.id != request.id]
                _clean(lane)
                failed(request.id, error)
        return [lane for lane in self.lanes if lane.active]

    def _start(self, lane: Lane, tokenized: TokenizedRequest) -> Sequence:
        request, pair = tokenized.request, self._pair
        align = EXACT_CHUNK if lane.exact else 1
        # A conversation's state is kept, and what was moved in the cache is not what it says.
        move = request.n_cache_reuse if request.conversation is None else 0
        anew = READ_ANEW if request.priority == "editor" else 1
        writes = USUAL if request.max_tokens is None else min(request.max_tokens, USUAL)
        # Log-probabilities of a prompt are those of tokens that are read.
        reuse = request.cache_prompt and request.prompt_logprobs is None
        slot = lane.slots.acquire(
            tokenized.tokens, reuse, align, tokenized.saved, move, anew, writes
        )
        tokenized.saved = None  # as large as a model's memory, and not needed any more
        sampler, matcher = tokenized.sampler, tokenized.matcher
        asked, scored = request.speculative, _is_scored(request)
        drafter = pair.drafter_of(lane)
        drawn = drafter is not None and asked.kind in ("auto", drafter.kind)
        reject = rejects(asked, sampler, matcher, drawn=drawn, scored=scored)
        given = Resources(asked, reject, matcher, tokenized.lookup, drafter, lane.slots)
        sequence = Sequence(
            tokenized,
            slot,
            pair.vocab,
            room=pair.n_ctx - len(tokenized.tokens),
            drafting=Drafting.of(
                given,
                pair.learned.calibrations,
                pair.settings.depth,
                pair.no_rollback,
                pair.why_no_drafts(asked.kind),
            ),
            verifier=Verifier(sampler, matcher, reject),
        )
        self._started += 1
        sequence.number = self._started
        self._enter(lane, sequence)
        return sequence

    def _go_on(self, lane: Lane, sequence: Sequence) -> None:
        """One that had given way gets a slot again, and its text is read where it is not kept."""
        reuse = sequence.request.cache_prompt and not sequence.scoring
        slot = lane.slots.acquire(sequence.tokens, reuse)
        sequence.go_on_in(slot)
        self._enter(lane, sequence)

    def _enter(self, lane: Lane, sequence: Sequence) -> None:
        slot, prompt = sequence.slot, sequence.tokens[: sequence.n_prompt]
        slot.conversation = owner(sequence.request)
        slot.passing = after_cursor(self._pair.vocab.fim, prompt)
        verifier, scored = sequence.verifier, _is_scored(sequence.request)
        on_device = self._pair.chooses_on_device and not lane.exact
        verifier.likeliest = verifier.needs_no_logits(scored=scored)
        verifier.on_device = lane.context.choose_on_device(
            sequence.slot.id, on_device and verifier.likeliest
        )
        lane.active.append(sequence)

    # ------------------------------------------------------------------------ schedule

    def schedule(self, lane: Lane) -> list[Sequence]:
        """Every sequence that decodes, and a bounded chunk of prompts: editors first, then short ones.

        A sequence whose grammar has not answered yet sits the round out.

        Each has its `step` of this round.
        """
        if lane.exact:
            ready = [sequence for sequence in lane.active if not sequence.guide_busy]
            chosen = [self.alone(lane, sequence) for sequence in ready[:1]]
            decoding = [each for each in chosen if not each.prefilling]
        else:
            waits = sum(each.guide_busy for each in lane.active)
            decoding = [each for each in lane.active if not (each.prefilling or each.guide_busy)]
            for sequence in decoding:
                sequence.step = _step(sequence, sequence.slot.unread)
            chosen = decoding
            if len(decoding) + waits < len(lane.active):
                chosen = decoding + self._prefill(lane, len(decoding))
        # Most rounds of a text that nothing can be drafted for end here: what drafts may take is not asked.
        if looking := [one for one in decoding if one.drafting.drafters and one.drafting.looks()]:
            self._limit_drafts(lane, chosen, len(decoding), looking)
        return chosen

    def alone(self, lane: Lane, sequence: Sequence) -> Sequence:
        """Give it a step of a pass that it has for itself."""
        prefilling = sequence.prefilling
        most = min(lane.most_rows, _outputs(lane)) if sequence.scoring else lane.most_rows
        read = _chunk(lane, sequence, most) if prefilling else sequence.slot.unread
        sequence.step = _step(sequence, read)
        return sequence

    def _prefill(self, lane: Lane, decoding: int) -> list[Sequence]:
        """Those whose prompts are read beside so many that decode.

        What is only to be read waits while an editor's suggestion is written: each of its tokens would come
        as late as a pass over a part of a prompt.
        """
        busy = any(suggests(each.request) for each in lane.active if not each.prefilling)
        prompts = [
            each
            for each in lane.active
            if each.prefilling and not each.guide_busy and not (busy and each.only_read)
        ]
        if not prompts:
            return []
        prompts.sort(key=lambda s: s.turn)
        budget = lane.batch.capacity - (MAX_LIMIT + 1) * decoding
        if decoding:
            budget = min(budget, lane.batch.capacity // 2)
        beside = lane.rows_beside(decoding)
        wide = not self._writing and not prompts[0].yields
        wide = wide and (self._running == 1 or lane.ends_early)
        budget = min(budget, lane.most_rows if wide else beside)
        chosen: list[Sequence] = []
        rows, outputs = 0, _outputs(lane)
        # Those that one pass could hold, were nobody to wait for it, end together: each that ends before
        # has the others wait for what it writes. Longer ones would only all end as late as the last.
        together = sum(len(each.slot.unread) for each in prompts) <= lane.batch.capacity
        ordered = not together or prompts[0].request.priority == "editor"
        for left, sequence in zip(range(len(prompts), 0, -1), prompts, strict=True):
            whole = not together or sequence.request.priority == "editor"
            if chosen and ordered:  # who is first does not wait for much of the others'
                budget = min(budget, beside)
            most = budget - rows if whole else max((budget - rows) // left, 1)
            most = min(most, budget - rows)
            if sequence.scoring and rows < budget:
                most = min(lane.scored_rows(most), outputs)
            read = _chunk(lane, sequence, most) if rows < budget and most > 0 else []
            if not read:
                break
            if sequence.scoring:
                outputs -= len(read)
            rows += lane.plain_rows(len(read)) if sequence.scoring else len(read)
            sequence.step = _step(sequence, read)
            chosen.append(sequence)
        return chosen

    def _limit_drafts(
        self, lane: Lane, sequences: list[Sequence], decoding: int, looking: list[Sequence]
    ) -> None:
        """How many drafts each may bring of those that are `looking` for some, among so many that decode:
        rows of the pass, room, tokens that may come.
        """
        rows = sum(len(each.step.read) for each in sequences)
        outputs = sum(len(each.step.read) if each.scoring else 1 for each in sequences)
        spare = min(lane.context.n_outputs - outputs, lane.batch.capacity - rows)
        if self._running > 1 or self._waiting:
            spare = min(spare, drafts_beside(lane, sequences, decoding))
        most = min(spare // decoding, MAX_LIMIT)
        if lane.max_depth is not None:
            most = min(most, lane.max_depth)
        if lane.alike and len(sequences) > 1:  # each has rows for the drafts of the others
            held = sum(len(sequence.tokens) for sequence in lane.active)
            most = min(most, (self._pair.n_ctx - held) // decoding)
            if len(sequences) > decoding:
                most = 0  # nobody has as many rows as a prompt
        for sequence in looking:
            room = self._pair.n_ctx - len(sequence.tokens) - 1
            sequence.step.drafts.limit = min(sequence.left - 1, room, most)
            sequence.step.drafts.hurried = len(sequences) > decoding

    def make_way(self, lane: Lane, sequences: list[Sequence]) -> None:
        """Drafts take the place of a prompt's tokens where the pass would get longer than it may be."""
        decoding = sum(not each.prefilling for each in sequences)
        if decoding in (0, len(sequences)):
            return
        whole = lane.rows_beside(decoding) + decoding
        over = sum(each.step.rows for each in sequences) - whole
        for sequence in reversed(sequences):
            if over > 0 and sequence.reads_on:
                step = sequence.step
                before = len(step.read)
                step.read = _chunk(lane, sequence, max(before - over, 1))
                over -= before - len(step.read)

    # ------------------------------------------------------------------------ the pass

    def fill(self, lane: Lane, sequences: list[Sequence]) -> bool:
        """Put the rows of all steps into the lane's batch. True: no prompt is among them."""
        batch = lane.batch
        batch.clear()
        decoding_only = all(not sequence.prefilling for sequence in sequences)
        rows = {each.slot.id: each.step.rows for each in sequences}
        if lane.alike and decoding_only:
            rows = dict.fromkeys(rows, self._rows_alike(lane, sequences))
        lane.slots.begin_pass(rows)
        for sequence in sequences:
            slot, step = sequence.slot, sequence.step
            last_chunk = slot.n_past + len(step.read) == len(slot.tokens)
            position = slot.n_past
            step.read_row = batch.rows
            for at, token in enumerate(step.read, start=1):
                wants = last_chunk and at == len(step.read)
                row = batch.add(token, position, slot.id, wants or sequence.wants_logits(position))
                position += 1
            step.first_row = row if last_chunk else -1
            for token in step.drafts.tokens:
                batch.add(token, position, slot.id, True)
                position += 1
            for _ in range(rows[slot.id] - step.rows):  # as many as the others have
                batch.add(step.read[-1], position, slot.id, False)
                position += 1
        if (decoding_only and not lane.alike) or (len(sequences) == 1 and lane.exact):
            self._pad(lane, sequences[-1], len(sequences))
        return decoding_only

    def _rows_alike(self, lane: Lane, sequences: list[Sequence]) -> int:
        """How many each gets: as many as who has most, or more where that is cheaper and there is room."""
        most, count = max(each.step.rows for each in sequences), len(sequences)
        wider = lane.pad_to(most * count, count) // count
        slots = lane.slots if count > 1 else [sequences[0].slot]
        held = sum(slot.n_past for slot in slots)
        return wider if held + wider * count <= self._pair.n_ctx else most

    def _pad(self, lane: Lane, sequence: Sequence, sequences: int) -> None:
        """Rows whose results nobody reads, where a wider pass is cheaper or the width is fixed."""
        batch = lane.batch
        if sequence.prefilling and lane.exact:
            return  # a prompt's chunks are the same in every run as they are
        filler = sequence.step.read[-1]
        position = sequence.slot.n_past + sequence.step.rows
        held = sum(slot.n_past for slot in lane.slots) if sequences > 1 else 0
        room = self._pair.n_ctx - max(position, held + batch.rows)  # nobody is to leave for them
        for _ in range(min(lane.pad_to(batch.rows, sequences) - batch.rows, max(room, 0))):
            batch.add(filler, position, sequence.slot.id, True)
            position += 1

    def ends_for(self, lane: Lane, sequences: list[Sequence]) -> tuple[list[int], float]:
        """Whose leaving ends the pass on its way, and how many seconds long it ends for one that comes."""
        return ends_for(lane, sequences, self._writing)

    def stopped(self, lane: Lane, sequences: list[Sequence], made_room: bool) -> None:
        """A pass was ended on its way: nobody has read anything. made_room: for one that comes."""
        spent = time.perf_counter() - lane.began
        # It ends at the end of a step of its own, a moment after it was told to.
        begun = spent <= 2 * lane.begins_s and all(each.patient for each in sequences)
        for sequence in sequences:
            lane.slots.stopped(sequence.slot)
            if made_room and begun:
                sequence.has_waited(spent)
            elif made_room:
                sequence.has_lost(spent)

    # ------------------------------------------------------------------------ leaving a slot

    def make_room(self, lane: Lane) -> Sequence | None:
        """The context is full of running requests: the newest gives way until there is room again.

        So the oldest always goes on, whatever comes after it. Returns one that has to end instead.
        """
        for sequence in lane.active:
            lane.slots.commit(sequence.slot, 0)
        newest = max(lane.active, key=lambda sequence: sequence.number)
        if len(lane.active) == 1:  # its limit leaves room for it alone; llama.cpp sees it otherwise
            return newest
        newest.gave_way = lane.ended
        self._give_way(lane, newest)
        return None

    def _give_way(self, lane: Lane, sequence: Sequence) -> None:
        """Leave the slot, which keeps its text as any idle one does, as long as there is room."""
        lane.active.remove(sequence)
        lane.slots.release(sequence.slot)
        self._waiting.appendleft(sequence)

    def leave(self, lane: Lane, sequence: Sequence) -> None:
        """A request is over; its slot keeps its text."""
        if lane.exact:  # only whole chunks of a prompt are the same in every run
            chunks = sequence.n_prompt // EXACT_CHUNK * EXACT_CHUNK
            lane.slots.roll_back(sequence.slot, min(chunks, sequence.slot.n_past))
        if (conversation := sequence.slot.conversation) is not None:
            self._pair.memory.keep(sequence.tokens[sequence.tally.cached :], conversation)
        lane.slots.release(sequence.slot)
        lane.active.remove(sequence)
        lane.ended += 1

    def drop(self, lane: Lane, sequence: Sequence) -> None:
        """A request has failed; nothing of its slot is trusted any more."""
        if sequence in lane.active:
            lane.active.remove(sequence)
            lane.ended += 1
            lane.slots.clear(sequence.slot)
            lane.slots.release(sequence.slot)

    def separate(self, lane: Lane) -> None:
        """Forget all that the lane holds, and have those that run read again, one after another."""
        for sequence in sorted(lane.active, key=lambda each: -each.number):
            sequence.alone = True
            self._give_way(lane, sequence)
        self.forget_slots(lane)

    def forget_slots(self, lane: Lane) -> None:
        """Whatever was read into this lane's context is not trusted any more."""
        for slot in lane.slots:
            lane.slots.clear(slot)
        lane.context.clear()
        self._pair.prefixes.clear()


def _step(sequence: Sequence, read: list[int]) -> SequenceStep:
    verifier, generated = sequence.verifier, sequence.generated
    drafts = DraftRequest(
        sequence.slot,
        limit=0,
        sampler=verifier.sampler if verifier.reject else None,
        generated=generated,
        left=sequence.limit - generated,
    )
    return SequenceStep(read, drafts, sequence.drafting, verifier)


def _is_scored(request: Generate) -> bool:
    """Does anybody look at logits for the sake of log-probabilities?"""
    return request.top_logprobs is not None or request.prompt_logprobs is not None


def _outputs(lane: Lane) -> int:
    """How many rows of prompts may have logits in a pass: half of all, the others are for drafts.

    So no pass holds more than a few rows of the vocabulary's size, however long a prompt is.
    """
    return max(lane.context.n_outputs // 2 - len(lane.active), 1)


def _chunk(lane: Lane, sequence: Sequence, most: int) -> list[int]:
    """What of its prompt a sequence reads next, `most` tokens of it."""
    slot = sequence.slot
    left = slot.unread
    count = lane.chunk(slot.n_past, len(left), most)
    return left[: lane.slots.prefill_chunk(slot, count)] if count else []


def _clean(lane: Lane) -> None:
    """A request failed while it got its slot: what no running one holds is not trusted any more."""
    for slot in lane.slots:
        if all(sequence.slot is not slot for sequence in lane.active):
            lane.slots.clear(slot)
            slot.busy = False
