"""The slots of a context: which request gets which, and how far each has read.

Idle slots serve as a prefix cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from localspec.engine.cache.prefixes import SPLIT_CELLS, Prefix, PrefixStore, common_prefix
from localspec.engine.cache.slot import (
    MAX_MOVES,
    MIN_TOKENS,
    TAIL_STATES,
    Changes,
    DraftMemory,
    HiddenStates,
    MovableChunk,
    Parking,
    Slot,
    TargetMemory,
    choose_positions,
    count_usable,
    find_chunks,
)
from localspec.engine.llama import Context, begin_of_picture

MAX_RECENT_TEXTS = 32
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SlotRequest:
    """The needs of a request that asks for a slot.

    reuse: whether anything cached may be used. align: reuse ends at a multiple of this many tokens. saved: a
    prefix that may be restored, besides those in the store. min_move: fewest tokens of a chunk that may be
    moved from another place, which is inexact; 0: none. n_reread: tokens at the end of the prompt that are
    always read. n_expected: tokens to generate. slot: the only one that may be used; what it loses is not
    saved.
    """

    prompt: Sequence[int]
    reuse: bool = True
    align: int = 1
    saved: Prefix | None = None
    min_move: int = 0
    n_reread: int = 1
    n_expected: int = 0
    slot: Slot | None = None

    @property
    def moves(self) -> bool:
        """Whether chunks may be moved, and chunks that were moved before may be reused."""
        return self.reuse and self.min_move > 0


@dataclass(frozen=True)
class SlotPlan:
    """Which idle slot a request gets, and what happens to its text.

    The first `n_kept` tokens stay. If there are `chunks`, they are moved to where the prompt has them, and
    all else is dropped. If there are none, and `source` offers more, those `n_offered` tokens are copied
    from there.
    """

    slot: Slot
    source: Slot
    n_kept: int
    n_offered: int
    chunks: Sequence[MovableChunk] = ()


def plan_slot(
    request: SlotRequest,
    slots: Sequence[Slot],
    usable: Mapping[int, int],
    *,
    chunks_move: bool,
    cuttable: bool,
) -> SlotPlan:
    """Return which idle slot a request gets, and from what. Changes nothing.

    usable: by the id of a slot, how many tokens of the prompt it can give. chunks_move: whether chunks of a
    text may be moved now. cuttable: whether a slot's text can be copied to another.
    """
    idle = [slot for slot in slots if not slot.busy]
    source = max(slots, key=lambda s: usable[s.id])
    n_offered = usable[source.id]
    if chunks_move:
        slot, chunks = _choose_chunks(request, idle, usable, n_offered)
        if chunks:
            return SlotPlan(slot, source, usable[slot.id], n_offered, chunks)
    best = max(idle, key=lambda s: (usable[s.id], -s.last_used))
    # A slot whose cache would mostly be lost is spared if another free one can take a copy.
    loses_most = usable[best.id] * 2 < best.reusable_count and cuttable
    if n_offered > usable[best.id] or loses_most:
        best = min(idle, key=lambda s: (s.n_past > 0, s.last_used))
    return SlotPlan(best, source, usable[best.id], n_offered)


def _choose_chunks(
    request: SlotRequest, idle: Sequence[Slot], usable: Mapping[int, int], n_offered: int
) -> tuple[Slot, list[MovableChunk]]:
    """Return the idle slot that saves most reading with moved chunks, and the chunks, or []."""
    best, best_chunks, best_total = idle[0], list[MovableChunk](), n_offered
    for slot in idle:
        n_kept = usable[slot.id]
        if n_kept < slot.shared or slot.moves >= MAX_MOVES:
            continue
        chunks = find_chunks(
            slot.cached, request.prompt, n_kept, request.min_move, request.n_reread
        )
        total = n_kept + sum(chunk.length for chunk in chunks)
        if chunks and total > best_total:
            best, best_chunks, best_total = slot, chunks, total
    return best, best_chunks


class Slots:
    """The slots of one target context, and of the draft context beside it."""

    def __init__(
        self,
        target: Context,
        draft: Context | None,
        first_draft: int,
        count: int,
        prefixes: PrefixStore | None = None,
        exact: bool = False,
        spare: int | None = None,
        first_pin: int | None = None,
    ) -> None:
        """Make `count` slots.

        draft: the draft's context. One that borrows the target's cells has no memory of its own, and its
        sequence ids are the target's.
        prefixes: the store for texts that lose their slot. exact: these are the exact lane's slots.
        spare: a sequence of the target that no slot uses. first_pin: the first of `count` more, which keep
        the cells of a target with a sliding window.
        """
        self._target = target
        self._prefixes = prefixes
        self._exact = exact
        # A restored state occupies different cells than a prefilled one, so sums run in another order.
        self._can_restore = not (exact and target.model.n_swa)
        limit = prefixes.limit if prefixes is not None and self._can_restore else 0
        borrows = draft is not None and draft.borrows
        self._slots = [Slot(i, i if borrows else first_draft + i) for i in range(count)]
        self._first_rows: dict[int, int] = {}  # per slot, its first row in the present pass
        if target.n_state:
            for slot in self._slots:
                slot.hidden = HiddenStates(target.n_state)
        self._memory = TargetMemory(target, self._worth_saving, limit // 4, self._slots, first_pin)
        self._draft_memory = DraftMemory(None if borrows else draft)
        self._parking = Parking(target, spare)
        self._changes = Changes()
        # The texts of the last requests, to say what was read before.
        self._recent = deque[Tokens](maxlen=MAX_RECENT_TEXTS)
        self._use_count = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def cuttable(self) -> bool:
        """Whether what a pass has read can be taken back, however much it is."""
        return self._target.model.cuttable

    @property
    def _goes_back_anywhere(self) -> bool:
        return self.cuttable and not self._target.model.n_swa

    @property
    def free(self) -> bool:
        return any(not slot.busy for slot in self._slots)

    def empty_one(self) -> int:
        """Return the id of a slot that holds nothing. If none does, the oldest idle one loses its text."""
        if all(slot.n_past for slot in self._slots):
            self.evict()
        return next(slot.id for slot in self._slots if not slot.n_past)

    def count_free_cells(self) -> int:
        """Return how many tokens can be read without taking a cell from another text."""
        return self._target.n_ctx - sum(slot.n_past for slot in self._slots)

    def acquire(self, request: SlotRequest) -> Slot:
        """Return a free slot that holds as much of the prompt as possible; its `n_past` says how much.

        This may be what an idle slot holds, a copy of another slot, or a saved prefix where restoring that
        pays. At least the last prompt token stays unread, because its logits are needed. The caller has
        checked `free`.
        """
        return self._apply(request, self.plan(request))

    def plan(self, request: SlotRequest) -> SlotPlan:
        """Return the slot for a request, and what it keeps or gets of other slots. Changes nothing."""
        usable = {slot.id: self._usable(slot, request) for slot in self._slots}
        if (only := request.slot) is not None:
            return SlotPlan(only, only, usable[only.id], usable[only.id])
        moves = request.moves and self._parking.free
        return plan_slot(request, self._slots, usable, chunks_move=moves, cuttable=self.cuttable)

    def _apply(self, request: SlotRequest, plan: SlotPlan) -> Slot:
        """Make the slot of a plan hold what it says, or more where a saved prefix is restored into it."""
        slot, source, prompt, n_kept = plan.slot, plan.source, list(request.prompt), plan.n_kept
        if request.slot is not None:
            self._occupy(slot, prompt, n_kept, saves=False)
            return slot
        if plan.chunks:
            self._occupy(slot, prompt, n_kept, plan.chunks)
            self._save_costly_idle(prompt, n_kept, request.n_expected, (slot,))
            return slot
        known, forks = self._find_known(request)
        # This comes first, so that what is read or restored now gets the cells that become free.
        self._save_costly_idle(prompt, plan.n_offered, request.n_expected, (slot, source))
        n_restored = self._restore(slot, request, plan.n_offered)
        if request.reuse and not n_restored:
            # The attempt to restore may have cost a slot its text.
            n_kept, n_offered = (self._usable(s, request) for s in (slot, source))
            n_kept = self._copy_from(slot, source, n_kept, n_offered)
        self._occupy(slot, prompt, n_restored or n_kept, forks=forks)
        if not n_restored:
            slot.source = "slot" if slot.n_past else ""
        self._explain(slot, request, known)
        self._save_costly_idle(prompt, slot.n_past, request.n_expected, (slot,))
        return slot

    def _usable(self, slot: Slot, request: SlotRequest) -> int:
        """Return how many tokens of the prompt can be reused from what a slot's memory really holds."""
        if not request.reuse:
            return 0
        prompt, align = request.prompt, request.align
        shared = min(common_prefix(slot.cached, prompt), len(prompt) - 1) // align * align
        shared = begin_of_picture(prompt, shared)
        if not request.moves or slot.moves >= MAX_MOVES:
            shared = slot.count_exact(shared)
        return count_usable(shared, self._memory.min_length(slot), slot.mark_positions)

    def _copy_from(self, slot: Slot, source: Slot, n_kept: int, n_offered: int) -> int:
        """Copy a longer shared prefix from another slot; return what `slot` now holds of the prompt."""
        if source is slot or n_offered <= n_kept or not self._target.model.cuttable:
            return n_kept
        self._save_to_memory(slot, 0)
        self.clear(slot)
        self._target.copy(source.id, slot.id, n_offered)
        source.shared, slot.shared = max(source.shared, n_offered), n_offered
        slot.exact, slot.moves = source.exact, source.moves
        slot.marks = [mark for mark in source.marks if mark.tokens <= n_offered]
        slot.turns = [turn for turn in source.turns if turn <= n_offered]
        slot.forks = {fork for fork in source.forks if fork <= n_offered}
        is_cuttable = n_offered >= self._memory.min_length(source)
        if not is_cuttable and self._memory.back_to_mark(slot, n_offered) != n_offered:
            self.clear(slot)
            return 0
        slot.tokens, slot.n_past = source.tokens[:n_offered], n_offered
        slot.n_past_draft = self._draft_memory.copy(source, slot, n_offered)
        if slot.hidden is not None and source.hidden is not None:
            slot.hidden.copy_from(source.hidden, n_offered)
        return n_offered

    def _find_known(self, request: SlotRequest) -> tuple[int, list[int]]:
        """Return with how many tokens of a prompt some text in memory begins, and the forks of the prompt.

        Forks are the places where other texts part from it, or are likely to. Where two texts part, a third
        often does, as those of agents with the same instructions and tools.
        """
        texts: list[Sequence[int]] = [slot.cached for slot in self._slots]
        texts += [prefix.tokens for prefix in self._prefixes or () if prefix.exact == self._exact]
        if request.saved is not None:
            texts.append(request.saved.tokens)
        known = [(common_prefix(tokens, request.prompt), tokens) for tokens in texts]
        shared, nearest = max(known, key=lambda candidate: candidate[0])
        if shared < MIN_TOKENS or self._goes_back_anywhere:
            return shared, []
        self._changes.learn(nearest, shared)
        return shared, [shared, *self._changes.find(request.prompt, shared)]

    def _explain(self, slot: Slot, request: SlotRequest, in_memory: int) -> None:
        """Note how much of a prompt was read before, and why some of it is read again.

        in_memory: the tokens of the prompt with which some text in memory begins.
        """
        prompt = np.array(request.prompt[:-1], np.int32)
        slot.known = min(in_memory, len(prompt))
        for text in self._recent:
            limit = min(len(text), len(prompt))
            differs = text[:limit] != prompt[:limit]
            slot.known = max(slot.known, int(differs.argmax()) if differs.any() else limit)
        slot.loss = None
        if request.reuse and slot.known - slot.reused >= max(MIN_TOKENS, request.align):
            slot.loss = "evicted" if slot.known > in_memory else "checkpoint"

    def _occupy(
        self,
        slot: Slot,
        prompt: list[int],
        n_kept: int,
        chunks: Sequence[MovableChunk] = (),
        forks: Sequence[int] = (),
        *,
        saves: bool = True,
    ) -> None:
        """Mark a slot as busy with `prompt`, of which it keeps the first `n_kept` tokens.

        forks: where other texts part from the prompt. saves: whether what it loses may be saved.
        """
        self._use_count += 1
        slot.busy, slot.last_used, n_moves = True, self._use_count, slot.moves
        slot.idle_cost_ms, slot.n_prompt = 0.0, len(prompt)
        slot.window, slot.along_s = 0, 0.0
        if chunks:
            self._parking.park(slot, list(chunks))
        elif saves:
            self._save_to_memory(slot, n_kept)
        if self._prefixes is not None:
            self._prefixes.now += 1
            slot.requested_at = self._prefixes.now
        n_kept = self._cut(slot, n_kept)
        slot.tokens, slot.n_past = prompt, n_kept
        slot.reused_ahead, slot.ahead = (
            len(range(n_kept)[slot.ahead.start : slot.ahead.stop]),
            range(0),
        )
        slot.moved = sum(chunk.length for chunk in chunks)
        slot.reused = n_kept + slot.moved
        if chunks:
            if slot.exact is None:  # all before the first moved chunk is exact
                slot.exact = chunks[0].new
            slot.moves = n_moves + 1
            slot.source = "shift"
            slot.n_past = self._parking.attach(slot)
        if not self._goes_back_anywhere:
            slot.forks.update(forks)
            is_control, n_marks = self._target.model.vocab.is_control, self._memory.max_marks
            slot.turns += choose_positions(prompt, is_control, n_kept, n_marks, slot.forks)
        slot.n_past_draft = min(slot.n_past_draft, n_kept)
        slot.conversation = slot.volatile_from = None

    def forget_conversation(self, conversation: str | None) -> None:
        """Save nothing more of a conversation, or of any if it is None; idle slots lose its text."""
        self._recent.clear()
        for slot in self._slots:
            if slot.conversation is not None and conversation in (None, slot.conversation):
                slot.conversation = None
                if not slot.busy:
                    self.clear(slot)

    def estimate_reusable(self, tokens: list[int]) -> int:
        """Return about how many of `tokens` some slot could reuse. Safe to call from any thread."""

        def count(slot: Slot) -> int:
            min_length = 0 if self.cuttable else min(len(tokens) + 1, slot.n_past)
            return count_usable(common_prefix(slot.cached, tokens), min_length, slot.mark_positions)

        return max(map(count, self._slots))

    def can_save(self, slot: Slot) -> bool:
        """Whether a slot's text belongs to a conversation and its state is exact."""
        return slot.conversation is not None and slot.count_exact(slot.n_past) == slot.n_past

    def copy_state(self, slot: Slot, n_left: int = 0) -> Prefix:
        """Return a copy of a slot's state in both memories, for the prefix store.

        n_left: the target's memory may be cut to that many tokens while marks are made.
        """
        start = time.perf_counter()
        draft = self._draft_memory.save(slot)
        target, min_length = self._target.save(slot.id), self._memory.min_saved_length(slot)
        spent = time.perf_counter() - start
        self._memory.mark_turns(slot, n_left)
        prefix = Prefix(
            slot.cached,
            target,
            draft,
            n_draft=slot.n_past_draft if draft is not None else 0,
            least=min_length,
            exact=self._exact,
            conversation=slot.conversation,
            marks=tuple(slot.marks),
            editors=slot.volatile_from is not None,
            used_at=slot.requested_at,
        )
        if self._prefixes is not None:
            self._prefixes.copy_cost.observe_copy(prefix.copied, spent * 1e3)
        return prefix

    def _worth_saving(self, tokens: int, size: int) -> bool:
        prefixes = self._prefixes
        return prefixes is not None and prefixes.copy_cost.worth_keeping(tokens, size)

    def _save_to_memory(self, slot: Slot, n_left: int) -> bool:
        """Save a copy of a slot's state before it loses all but `n_left` tokens, if that is worth it.

        Returns whether the store has it now.
        """
        prefixes, n_lost = self._prefixes, slot.reusable_count - n_left
        if prefixes is None or n_lost <= 0 or prefixes.limit <= 0 or not self._can_restore:
            return False
        if slot.count_exact(slot.n_past) < slot.n_past:
            return False  # a moved state is inexact, and of use only for the same editor's next key
        size, is_editors = self._target.state_size(slot.id), slot.volatile_from is not None
        if not self._worth_saving(n_lost, size) or not prefixes.has_room(size, is_editors):
            return False
        if prefixes.touch_if_covered(slot.tokens[: slot.reusable_count], self._exact):
            return True
        prefix = self.copy_state(slot, n_left)
        prefixes.supersede(prefix)
        return prefixes.put(prefix)

    def _save_costly_idle(
        self, prompt: list[int], n_held: int, n_expected: int, needed: Sequence[Slot]
    ) -> None:
        """Move the text of an idle slot to the store if passes over its cells cost more than the copy.

        `prompt` is the new request, of which `n_held` tokens are cached; it will likely generate `n_expected`
        tokens. `needed` are its slots. Nothing is moved for a sliding window, whose older cells a copy would
        lack, or for a recurrent state, which would lose the places that it can go back to.
        """
        prefixes = self._prefixes
        if prefixes is None or not prefixes.copy_cost.cell_ms or not self._goes_back_anywhere:
            return
        costs = self._idle_costs(len(prompt) + n_expected, len(prompt) - n_held, n_expected, needed)
        for slot, cost_ms in costs:
            cost_ms += slot.idle_cost_ms
            size = partial(self._target.state_size, slot.id)
            pays = slot.own_cells > 0 and prefixes.copy_cost.leaving_pays(cost_ms, size)
            if pays and self._save_to_memory(slot, 0):
                self.clear(slot)

    def _idle_costs(
        self, own_cells: int, n_read: int, n_decoded: int, own_slots: Sequence[Slot]
    ) -> list[tuple[Slot, float]]:
        """Return the idle slots and the milliseconds that the cells of each cost a text in `own_slots`.

        own_cells: those of the text at its end. n_read, n_decoded: the rows of its prompt, and of its answer.
        """
        assert self._prefixes is not None
        others = [slot for slot in self._slots if slot not in own_slots]
        if any(slot.busy for slot in others):
            n_decoded = 0  # the rows of an answer count only while it is decoded alone
        # Rows that are decoded while threads share cells with idle texts; see `CopyCost.split_ms`.
        cells = sum(slot.own_cells for slot in others)
        n_split = min(n_decoded, max(own_cells + cells - SPLIT_CELLS, 0)) if cells else 0
        idle_ms, rows = self._prefixes.copy_cost.idle_ms, n_read + n_decoded
        idle = [slot for slot in others if not slot.busy]
        return [(slot, idle_ms(slot.own_cells, own_cells, rows, n_split)) for slot in idle]

    def _restore(self, slot: Slot, request: SlotRequest, n_offered: int) -> int:
        """Restore into `slot` the longest saved prefix if it beats `n_offered` tokens by enough.

        Returns how many tokens of the prompt the slot holds then, 0 if nothing was restored.
        """
        prefixes = self._prefixes
        if not request.reuse or prefixes is None or not self._can_restore:
            return 0
        # At least one token must stay unread, so a state that cannot be cut has to be shorter.
        tokens, extra = list(request.prompt[:-1]), [request.saved] if request.saved else []
        prefix, length = prefixes.find(tokens, exact=self._exact, align=request.align, extra=extra)
        cost = prefixes.copy_cost
        if prefix is None or not cost.restoring_pays(length - n_offered, prefix.copied):
            return 0
        length = begin_of_picture(request.prompt, length)
        self._save_to_memory(slot, 0)
        self.clear(slot)
        # llama.cpp restores a state into free cells only.
        n_free = self._target.n_ctx - len(prefix.tokens)
        while sum(slot.n_past for slot in self._slots) > n_free and self.evict():
            pass
        start = time.perf_counter()
        if not self._target.restore(slot.id, prefix.target):
            self.clear(slot)
            return 0
        slot.tokens, slot.n_past = list(prefix.tokens), len(prefix.tokens)
        slot.snapshots, slot.marks = slot.n_past, list(prefix.marks)
        slot.turns = [mark.tokens for mark in prefix.marks]
        slot.forks = {mark.tokens for mark in prefix.marks if mark.is_fork}
        slot.n_past_draft = self._draft_memory.restore(slot, prefix.draft, prefix.n_draft)
        cost.observe_copy(prefix.copied, (time.perf_counter() - start) * 1e3)
        prefixes.note_restored(prefix, length)
        slot.source = "disk" if prefix.source == "disk" else "memory"
        # The saved text behind the prompt is still in the store, or too short to matter.
        return self._cut(slot, length)

    def begin_pass(self, rows: Mapping[int, int]) -> None:
        """Note the rows of each slot, by its id and in this order, in the pass of the target that begins.

        llama.cpp keeps a snapshot of a recurrent state per row. But it cuts a pass into pieces where
        sequences have different numbers of rows, and a piece moves the states of other sequences without
        their snapshots. A rollback would then find wrong states in their place instead of failing.
        """
        self._first_rows, first_row = {}, 0
        for slot_id, count in rows.items():
            self._first_rows[slot_id] = first_row
            first_row += count
        has_equal_rows = len(set(rows.values())) == 1
        for slot in self._slots:
            count = rows.get(slot.id, 0)
            slot.snapshots = slot.n_past + (min(count, 1) if has_equal_rows else count)

    def limit_prefill(self, slot: Slot, count: int) -> int:
        """Return how many of the next `count` prompt tokens one pass may read; call it before each pass."""
        count = self._memory.limit_prefill(slot, count)
        next_place = self._parking.next_position(slot)
        return count if next_place is None else min(count, next_place - slot.n_past)

    def commit_prefill(self, slot: Slot, count: int, *, emits_states: bool = True) -> None:
        """Note that a pass has read `count` tokens of the prompt.

        emits_states: whether it had a row for each, so that their hidden states are known.
        """
        if emits_states:
            self._store_hidden(slot, count)
        slot.n_past += count
        slot.n_past = self._parking.attach(slot)
        self._memory.pin(slot)

    def commit(self, slot: Slot, count: int) -> None:
        """Keep the first `count` tokens that a pass read, and remove the others from both memories."""
        self._store_hidden(slot, count)
        slot.n_past += count
        self.roll_back(slot, slot.n_past)
        if slot.n_past - slot.pinned >= MIN_TOKENS:  # it takes time, so not with every pass
            self._memory.pin(slot)

    def _store_hidden(self, slot: Slot, count: int) -> None:
        """Store the hidden states that the draft may read of the first `count` tokens of the pass.

        Those before the part of the prompt that the draft is to see are not read: a token of a large target
        has 100 KiB where five layers are read, and copying them took 130 ms for a prompt of 4096 tokens.
        """
        if slot.hidden is None or not self._target.has_states:
            return
        start, limit = time.perf_counter(), max(slot.window, 2 * TAIL_STATES)
        n_unread = len(slot.tokens) - slot.n_past - count
        n_kept = min(count, limit - n_unread)
        if n_kept > 0:
            skipped = count - n_kept
            states = self._target.states(self._first_rows[slot.id] + skipped, n_kept)
            slot.hidden.put(slot.n_past + skipped, states, limit)
        slot.hidden.copy_s += time.perf_counter() - start

    def roll_back(self, slot: Slot, length: int) -> bool:
        """Cut both memories to `length` tokens.

        Returns False if the model cannot, so that some of the text has to be read again.
        """
        target_length = min(length, slot.n_past)
        return self._cut(slot, length) == target_length

    def roll_back_interrupted(self, slot: Slot) -> None:
        """Take back an interrupted pass over this slot in both memories."""
        if self.cuttable:
            self.commit(slot, 0)
            return
        length = self._memory.back_to_mark(slot, slot.n_past)  # its state is that of half a pass
        if not length:
            self.empty(slot)
        self._set_length(slot, length)

    def _cut(self, slot: Slot, length: int) -> int:
        """Cut both memories to `length` tokens, or to fewer where the model cannot; return how many."""
        if self._target.length(slot.id) > length:
            length = self._memory.cut(slot, length)
            if not length:
                self.empty(slot)
        return self._set_length(slot, length)

    def _set_length(self, slot: Slot, length: int) -> int:
        """Note that the target's memory was cut to `length` tokens, and cut the draft's to match."""
        slot.n_past = min(slot.n_past, length)
        self._memory.unpin(slot, slot.n_past)
        slot.shared = min(slot.shared, length)
        if slot.exact is not None and slot.n_past <= slot.exact:
            slot.exact, slot.moves = None, 0
        if slot.hidden is not None:
            slot.hidden.cut(length)
        slot.marks = [mark for mark in slot.marks if mark.tokens <= length]
        slot.turns = [turn for turn in slot.turns if turn <= length]
        slot.forks = {fork for fork in slot.forks if fork <= length}
        self.roll_back_draft(slot, min(slot.n_past_draft, length))
        return slot.n_past

    def roll_back_draft(self, slot: Slot, length: int) -> None:
        """Cut the draft's memory to `length` tokens, or to 0 where it cannot be cut."""
        slot.n_past_draft = self._draft_memory.cut(slot, length)

    def release(self, slot: Slot) -> None:
        """Make a slot idle. What the target has read stays as a cache."""
        self._parking.drop(slot)
        slot.tokens = slot.tokens[: slot.n_past]
        if slot.volatile_from is None:
            self._recent.append(np.array(slot.tokens, np.int32))
        self._memory.pin(slot)
        slot.turns.append(slot.n_past)
        self._memory.mark(slot)
        slot.last_used = self._use_count = self._use_count + 1
        slot.n_past_draft = min(slot.n_past_draft, slot.n_past)
        if slot.hidden is not None:
            slot.hidden.free()
        slot.busy = False
        if self._prefixes is not None:
            # Idle texts are charged with what their cells have cost this request.
            n_read = max(min(slot.n_prompt, slot.n_past) - slot.reused, 0)
            n_decoded = max(slot.n_past - slot.n_prompt, 0)
            for other, cost_ms in self._idle_costs(slot.n_past, n_read, n_decoded, (slot,)):
                other.idle_cost_ms += cost_ms

    def empty(self, slot: Slot) -> None:
        """Empty both memories of a slot; its text is read again."""
        self._parking.drop(slot)
        self._target.remove(slot.id, 0)
        self._memory.unpin(slot, 0)
        self._draft_memory.empty(slot)
        slot.n_past = slot.n_past_draft = slot.shared = slot.moves = 0
        slot.draft_mark = slot.exact = None
        if slot.hidden is not None:
            slot.hidden.cut(0)
        slot.marks, slot.turns, slot.forks = [], [], set()

    def clear(self, slot: Slot) -> None:
        """Empty both memories and the slot's text."""
        self.empty(slot)
        slot.tokens = []
        slot.conversation = slot.volatile_from = None

    def evict_draft(self) -> bool:
        """Empty the draft's memory of the least recently used idle slot.

        Returns False if no idle slot has any.
        """
        idle = [slot for slot in self._slots if not slot.busy and slot.n_past_draft]
        if idle:
            self.roll_back_draft(min(idle, key=lambda s: s.last_used), 0)
        return bool(idle)

    def evict(self) -> bool:
        """Empty the least recently used idle slot. Return False if no idle slot holds anything."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n_past]
        if idle:
            oldest = min(idle, key=lambda s: s.last_used)
            self._save_to_memory(oldest, 0)
            self.clear(oldest)
        return bool(idle)
