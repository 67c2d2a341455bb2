"""The slots of a context: who gets which, what stays behind as a prefix cache, and how far each has read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from localspec.engine.cache.borders import places
from localspec.engine.cache.hidden import Hidden
from localspec.engine.cache.prefixes import SPLIT_CELLS, Prefix, Prefixes, common_prefix
from localspec.engine.cache.shift import MOST_MOVES, Chunk, Parking, find_chunks
from localspec.engine.cache.slot import DraftMemory, Slot, TargetMemory, usable
from localspec.engine.llama import Context


class Slots:
    """The slots of one target context, and of the draft context beside it."""

    def __init__(
        self,
        target: Context,
        draft: Context | None,
        first_draft: int,
        count: int,
        prefixes: Prefixes | None = None,
        exact: bool = False,
        spare: int | None = None,
    ) -> None:
        """draft: one that borrows the target's cells has no memory of a slot, whose sequence is the same in
        both. prefixes: where what loses its slot is kept; exact: these are the exact lane's.

        spare: a sequence of the target's that is nobody's.
        """
        self._target = target
        self._prefixes = prefixes
        self._exact = exact
        # A state put back lies in other cells than one that was read, so its sums have another order.
        self._restores = not (exact and target.model.n_swa)
        limit = prefixes.limit if prefixes is not None and self._restores else 0
        borrows = draft is not None and draft.borrows
        self._slots = [Slot(i, i if borrows else first_draft + i) for i in range(count)]
        self._first_rows: dict[int, int] = {}  # of the present pass, by slot
        if target.n_state:
            for slot in self._slots:
                slot.hidden = Hidden(target.n_state, tail=borrows)
        self._memory = TargetMemory(target, self._worth_keeping, limit // 4, self._slots)
        self._draft_memory = DraftMemory(None if borrows else draft)
        self._parking = Parking(target, spare)
        self._clock = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def cuttable(self) -> bool:
        """Can what a pass has read be taken back, however much it is?"""
        return self._target.model.cuttable

    @property
    def free(self) -> bool:
        return any(not slot.busy for slot in self._slots)

    def acquire(
        self,
        prompt: Sequence[int],
        reuse: bool = True,
        align: int = 1,
        saved: Prefix | None = None,
        move: int = 0,
        anew: int = 1,
        writes: int = 0,
    ) -> Slot:
        """A free slot that holds as much of `prompt` as any slot does; its `n_past` says how much.

        Where a kept prefix, or `saved`, holds so much more that putting it back pays, it holds that.
        At least the last prompt token is left to be read (its logits are needed), and reuse ends at a
        multiple of `align`. The caller has checked `free`.

        move: the least tokens of a chunk that may be moved from another place, near as that is to what
        reading it would give; 0: nothing may. anew: tokens at the prompt's end that are read in any case.
        writes: tokens that are likely to follow.
        """
        prompt = list(prompt)
        idle = [slot for slot in self._slots if not slot.busy]
        move = move if reuse else 0
        shared = {s.id: self._usable(s, prompt, align, move) if reuse else 0 for s in self._slots}
        if move and self._parking.free:
            slot, chunks = self._chunks(idle, prompt, shared, move, anew)
            if chunks:
                self._take(slot, prompt, shared[slot.id], chunks)
                self._send_off(prompt, shared[slot.id], writes, (slot,))
                return slot
        best = max(idle, key=lambda s: (shared[s.id], -s.last_used))
        source = max(self._slots, key=lambda s: shared[s.id])
        keep = shared[best.id]
        # A slot whose cache would mostly be lost is left alone where another is free to take a copy.
        wasteful = keep * 2 < best.lasting and self.cuttable
        if shared[source.id] > keep or wasteful:
            best = min(idle, key=lambda s: (s.n_past > 0, s.last_used))
            keep = shared[best.id]
        # First: what is read or put back now gets the cells that become free.
        self._send_off(prompt, shared[source.id], writes, (best, source))
        back = self._put_back(best, prompt, shared[source.id], align, saved) if reuse else 0
        if reuse and not back:  # trying may have cost a slot what it held
            keep, offered = (self._usable(s, prompt, align, move) for s in (best, source))
            keep = self._bring(best, source, keep, offered)
        self._take(best, prompt, back or keep)
        if not back:
            best.source = "slot" if best.n_past else ""
        self._send_off(prompt, best.n_past, writes, (best,))
        return best

    def _usable(self, slot: Slot, prompt: Sequence[int], align: int, move: int) -> int:
        """How many tokens of `prompt` a request can go on from with what is really in a slot's memory."""
        shared = min(common_prefix(slot.cached, prompt), len(prompt) - 1) // align * align
        if not move or slot.moves >= MOST_MOVES:
            shared = slot.exact_part(shared)
        return usable(shared, self._memory.least(slot), slot.places)

    def _chunks(
        self, idle: list[Slot], prompt: list[int], shared: dict[int, int], least: int, anew: int
    ) -> tuple[Slot, list[Chunk]]:
        """The idle slot that saves most reading with chunks that are moved, and those; else none."""
        best, chosen, most = idle[0], list[Chunk](), max(shared.values())
        for slot in idle:
            keep = shared[slot.id]
            if keep < slot.shared or slot.moves >= MOST_MOVES:
                continue
            chunks = find_chunks(slot.cached, prompt, keep, least, anew)
            total = keep + sum(chunk.length for chunk in chunks)
            if chunks and total > most:
                best, chosen, most = slot, chunks, total
        return best, chosen

    def _bring(self, slot: Slot, source: Slot, keep: int, offered: int) -> int:
        """Copy a longer shared prefix from another slot; returns what `slot` now holds of the prompt."""
        if source is slot or offered <= keep or not self._target.model.cuttable:
            return keep
        self._keep(slot, 0)
        self.clear(slot)
        self._target.copy(source.id, slot.id, offered)
        source.shared, slot.shared = max(source.shared, offered), offered
        slot.exact, slot.moves = source.exact, source.moves
        slot.marks = [mark for mark in source.marks if mark.tokens <= offered]
        whole = offered >= self._memory.least(source)
        if not whole and self._memory.back_to_mark(slot, offered) != offered:
            self.clear(slot)
            return 0
        slot.tokens, slot.n_past = source.tokens[:offered], offered
        slot.n_past_draft = self._draft_memory.copy(source, slot, offered)
        if slot.hidden is not None and source.hidden is not None:
            slot.hidden.take(source.hidden, offered)
        return offered

    def _take(self, slot: Slot, prompt: list[int], keep: int, chunks: Sequence[Chunk] = ()) -> None:
        self._clock += 1
        slot.busy, slot.last_used, moves = True, self._clock, slot.moves
        slot.beside_ms, slot.asked = 0.0, len(prompt)
        if chunks:
            self._parking.park(slot, list(chunks))
        else:
            self._keep(slot, keep)
        keep = self._cut(slot, keep)
        slot.tokens, slot.n_past = prompt, keep
        slot.moved = sum(chunk.length for chunk in chunks)
        slot.reused = keep + slot.moved
        if chunks:
            if slot.exact is None:  # what is read up to the first of them is as ever
                slot.exact = chunks[0].new
            slot.moves = moves + 1
            slot.source = "shift"
            slot.n_past = self._parking.attach(slot)
        if not self.cuttable or self._target.model.n_swa:
            slot.turns += places(prompt, self._target.model.vocab.is_control, keep)
        slot.n_past_draft = min(slot.n_past_draft, keep)
        slot.conversation = slot.passing = None

    def forget_conversation(self, conversation: str | None) -> None:
        """Nothing of it, with None of any, is to be saved; idle slots lose its text as well."""
        for slot in self._slots:
            if slot.conversation is not None and conversation in (None, slot.conversation):
                slot.conversation = None
                if not slot.busy:
                    self.clear(slot)

    # ------------------------------------------------------------------ prefixes without a slot

    def about(self, tokens: list[int]) -> int:
        """About how many of these tokens some slot can be gone on from with; from any thread."""
        least = 0 if self.cuttable else len(tokens) + 1
        return max(
            usable(common_prefix(slot.cached, tokens), min(least, slot.n_past), slot.places)
            for slot in self._slots
        )

    def savable(self, slot: Slot) -> bool:
        """Is what a slot holds what its text says, and somebody's?"""
        return slot.conversation is not None and slot.exact_part(slot.n_past) == slot.n_past

    def snapshot(self, slot: Slot, left: int = 0) -> Prefix:
        """A copy of what both memories hold for a slot, whose target may be cut to `left` for it."""
        start = time.perf_counter()
        draft = self._draft_memory.save(slot)
        target, least = self._target.save(slot.id), self._memory.least_saved(slot)
        spent = time.perf_counter() - start
        self._memory.mark_turns(slot, left)
        held = Prefix(
            slot.cached,
            target,
            draft,
            slot.n_past_draft if draft is not None else 0,
            least,
            self._exact,
            slot.conversation,
            marks=tuple(slot.marks),
            editors=slot.passing is not None,
        )
        if self._prefixes is not None:
            self._prefixes.copy_cost.copied(held.copied, spent * 1e3)
        return held

    def _worth_keeping(self, tokens: int, size: int) -> bool:
        kept = self._prefixes
        return kept is not None and kept.copy_cost.worth_keeping(tokens, size)

    def _keep(self, slot: Slot, left: int) -> bool:
        """Before a slot loses all but `left` tokens: keep a copy where that is worth it.

        Returns whether memory has it now.
        """
        kept, lost = self._prefixes, slot.lasting - left
        if kept is None or lost <= 0 or kept.limit <= 0 or not self._restores:
            return False
        if slot.exact_part(slot.n_past) < slot.n_past:
            return False  # what was moved is for the next key, and for nobody else
        size = self._target.state_size(slot.id)
        if not self._worth_keeping(lost, size) or not kept.has_room(size, slot.passing is not None):
            return False
        if kept.covers(slot.tokens[: slot.lasting], self._exact):
            return True
        held = self.snapshot(slot, left)
        kept.supersede(held)
        return kept.put(held)

    def _send_off(self, prompt: list[int], held: int, writes: int, stay: Sequence[Slot]) -> None:
        """Idle texts leave for memory where passes over their cells have cost enough, or will: those of a
        request that comes with this prompt, of which `held` tokens are not read, and that is likely to
        write so many more. stay: those that it needs.

        Not where that would take what a window has left, or what a recurrent state can be put back to.
        """
        kept, target = self._prefixes, self._target
        if kept is None or not kept.copy_cost.cell_ms or target.model.n_swa or not self.cuttable:
            return
        own, written = len(prompt) + writes, writes if self._alone(stay) else 0
        rows, split = len(prompt) - held + written, self._split(own, written, stay)
        for slot in self._slots:
            cells = slot.own_cells
            if slot.busy or cells <= 0 or slot in stay:
                continue
            cost = slot.beside_ms + kept.copy_cost.idle_ms(cells, own, rows, split)
            size = partial(target.state_size, slot.id)
            if kept.copy_cost.leaving_pays(cost, size) and self._keep(slot, 0):
                self.clear(slot)

    def _split(self, own: int, written: int, mine: Sequence[Slot]) -> int:
        """Of the `written` tokens of a text that has `own` cells in the end, those for which threads share
        these with the cells of idle texts.
        """
        idle = sum(each.own_cells for each in self._slots if each not in mine)
        return min(written, max(own + idle - SPLIT_CELLS, 0)) if idle else 0

    def _alone(self, mine: Sequence[Slot]) -> bool:
        """Is nothing written but in these slots?"""
        return not any(slot.busy and slot not in mine for slot in self._slots)

    def _put_back(
        self, slot: Slot, prompt: list[int], offered: int, align: int, saved: Prefix | None
    ) -> int:
        """Give `slot` the longest kept prefix where that beats the `offered` tokens by enough.

        Returns how many tokens of the prompt it holds then, 0 where nothing was put back.
        """
        kept = self._prefixes
        if kept is None or not self._restores:
            return 0
        # At least one token is left to be read, so a state that cannot be cut must be shorter.
        found, length = kept.find(
            prompt[:-1],
            exact=self._exact,
            align=align,
            also=[saved] if saved is not None else [],
        )
        if found is None or not kept.copy_cost.pays(length - offered, found.copied):
            return 0
        self._keep(slot, 0)
        self.clear(slot)
        self._make_cells(len(found.tokens))
        start = time.perf_counter()
        if not self._target.restore(slot.id, found.target):
            self.clear(slot)
            return 0
        slot.tokens, slot.n_past = list(found.tokens), len(found.tokens)
        slot.snapshots, slot.marks = slot.n_past, list(found.marks)
        slot.turns = [mark.tokens for mark in found.marks]
        slot.n_past_draft = self._draft_memory.restore(slot, found.draft, found.n_draft)
        kept.copy_cost.copied(found.copied, (time.perf_counter() - start) * 1e3)
        kept.taken(found, length)
        slot.source = "disk" if found.source == "disk" else "memory"
        # What goes beyond the prompt is still kept, or too little to be: it is no loss.
        return self._cut(slot, length)

    def _make_cells(self, count: int) -> None:
        """llama.cpp puts a state back only where cells are free: others give theirs up for it."""
        while sum(slot.n_past for slot in self._slots) + count > self._target.n_ctx:
            if not self.evict():
                return

    # ------------------------------------------------------------------ a pass

    def begin_pass(self, rows: Mapping[int, int]) -> None:
        """A pass of the target begins, with so many rows of each slot, by its id, in this order.

        llama.cpp keeps a snapshot of a recurrent state per row, but cuts a pass into pieces where
        sequences have different numbers of rows, and a piece moves the states of others without their
        snapshots; it would give what it finds in their place instead of refusing.
        """
        self._first_rows, first = {}, 0
        for slot_id, count in rows.items():
            self._first_rows[slot_id] = first
            first += count
        whole = len(set(rows.values())) == 1
        for slot in self._slots:
            count = rows.get(slot.id, 0)
            slot.snapshots = slot.n_past + (min(count, 1) if whole else count)

    def prefill_chunk(self, slot: Slot, count: int) -> int:
        """How many of the next `count` tokens of a prompt one pass is to read; call it before each."""
        count = self._memory.before_pass(slot, count)
        until = self._parking.next(slot)
        return count if until is None else min(count, until - slot.n_past)

    def prefilled(self, slot: Slot, count: int) -> None:
        """A pass has read `count` tokens of the prompt."""
        self._keep_states(slot, count)
        slot.n_past += count
        slot.n_past = self._parking.attach(slot)

    def commit(self, slot: Slot, count: int) -> None:
        """Of what a pass read, `count` tokens are the text's; all else goes out of both memories."""
        self._keep_states(slot, count)
        slot.n_past += count
        self.roll_back(slot, slot.n_past)

    def _keep_states(self, slot: Slot, count: int) -> None:
        """What the heads want to know of the first `count` tokens that a pass read."""
        if slot.hidden is not None and count:
            states = self._target.states(self._first_rows[slot.id], count)
            slot.hidden.put(slot.n_past, states)

    def roll_back(self, slot: Slot, length: int) -> bool:
        """Cut both memories to `length` tokens. False: the model cannot, and reads some of it again."""
        wanted = min(length, slot.n_past)
        return self._cut(slot, length) == wanted

    def stopped(self, slot: Slot) -> None:
        """A pass over this slot was ended on its way: nothing of it is kept, in either memory."""
        if self.cuttable:
            self.commit(slot, 0)
            return
        length = self._memory.back_to_mark(slot, slot.n_past)  # half a pass has gone into its state
        if not length:
            self.forget(slot)
        self._holds(slot, length)

    def _cut(self, slot: Slot, length: int) -> int:
        """Cut both memories to `length` tokens, or to fewer where the model cannot; returns how many."""
        if self._target.length(slot.id) > length:
            length = self._memory.cut(slot, length)
            if not length:
                self.forget(slot)
        return self._holds(slot, length)

    def _holds(self, slot: Slot, length: int) -> int:
        """The target's memory was cut to so many tokens; the draft's is to have no more."""
        slot.n_past = min(slot.n_past, length)
        slot.shared = min(slot.shared, length)
        if slot.exact is not None and slot.n_past <= slot.exact:
            slot.exact, slot.moves = None, 0
        if slot.hidden is not None:
            slot.hidden.cut(length)
        slot.marks = [mark for mark in slot.marks if mark.tokens <= length]
        slot.turns = [turn for turn in slot.turns if turn <= length]
        self.roll_back_draft(slot, min(slot.n_past_draft, length))
        return slot.n_past

    def roll_back_draft(self, slot: Slot, length: int) -> None:
        """Cut the draft's memory to `length` tokens; where it cannot, it starts anew."""
        slot.n_past_draft = self._draft_memory.cut(slot, length)

    # ------------------------------------------------------------------ the end

    def release(self, slot: Slot) -> None:
        """The request is over; what the target has read stays as a cache."""
        self._parking.drop(slot)
        slot.tokens = slot.tokens[: slot.n_past]
        slot.turns.append(slot.n_past)
        self._memory.mark(slot)
        slot.last_used = self._clock = self._clock + 1
        slot.n_past_draft = min(slot.n_past_draft, slot.n_past)
        slot.busy = False
        self._charge(slot)

    def _charge(self, left: Slot) -> None:
        """What the request that has left this slot has paid for the cells of idle texts."""
        if self._prefixes is None:
            return
        cost, own = self._prefixes.copy_cost, left.n_past
        written = max(own - left.asked, 0) if self._alone(()) else 0
        rows = max(min(left.asked, own) - left.reused, 0) + written
        split = self._split(own, written, (left,))
        for slot in self._slots:
            if not slot.busy and slot is not left:
                slot.beside_ms += cost.idle_ms(slot.own_cells, own, rows, split)

    def forget(self, slot: Slot) -> None:
        """Empty both memories; the slot's text is to be read again."""
        self._parking.drop(slot)
        self._target.remove(slot.id, 0)
        self._draft_memory.empty(slot)
        slot.n_past = slot.n_past_draft = slot.shared = slot.moves = 0
        slot.draft_mark = slot.exact = None
        if slot.hidden is not None:
            slot.hidden.cut(0)
        slot.marks, slot.turns = [], []

    def clear(self, slot: Slot) -> None:
        """Empty both memories and the slot's text."""
        self.forget(slot)
        slot.tokens = []
        slot.conversation = slot.passing = None

    def evict_draft(self) -> bool:
        """Empty the draft's memory of the idle slot that was used longest ago; as `evict`."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n_past_draft]
        if not idle:
            return False
        self.roll_back_draft(min(idle, key=lambda s: s.last_used), 0)
        return True

    def evict(self) -> bool:
        """Empty the idle slot that was used longest ago. False: no idle slot holds anything."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n_past]
        if not idle:
            return False
        oldest = min(idle, key=lambda s: s.last_used)
        self._keep(oldest, 0)
        self.clear(oldest)
        return True
