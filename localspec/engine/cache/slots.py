"""Slots: one llama.cpp sequence each, whose tokens stay behind as a prefix cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from localspec.engine.cache.prefixes import (
    MIN_TOKENS,
    Mark,
    Prefix,
    Prefixes,
    common_prefix,
    usable,
)
from localspec.engine.llama import Context, State

# A next turn shares the prompt but for its last tokens: they open an answer, or thoughts that templates
# drop later ("<think>\n\n</think>\n\n" is four).
OPENING = 4
MARK_EVERY = 1024  # tokens of a long prompt: an edit in it costs reading so many again
MARKS = 8  # of one slot; all slots' together take at most a quarter of the memory for prefixes


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence id in the target's memory, and one in the draft's.

    tokens[:n_past] are in the target's KV, tokens[:n_past_draft] in the draft's. During a round the
    memories hold more (drafts not verified yet); after it they are rolled back to these counts.
    Both counts are written in this file alone.
    """

    id: int
    draft_id: int
    tokens: list[int] = field(default_factory=list)
    n_past: int = 0
    n_past_draft: int = 0
    marks: list[Mark] = field(default_factory=list)  # places to go back to, where it cannot be cut
    turns: list[int] = field(default_factory=list)  # where answers began and ended
    draft_mark: tuple[int, State] | None = None  # a draft's recurrent state after so many tokens
    last_pass: int = 0  # where the target's last pass over this slot began
    busy: bool = False
    last_used: int = 0
    conversation: str | None = None  # whose text it is, where that is to be saved
    source: Literal["", "slot", "memory", "disk"] = ""  # of what the present request reused

    @property
    def cached(self) -> list[int]:
        return self.tokens[: self.n_past]

    @property
    def unread(self) -> list[int]:
        """What the target has not read yet."""
        return self.tokens[self.n_past :]

    def draft_has_read(self, count: int) -> None:
        """The draft's memory holds so many tokens now, drafts of its own among them."""
        self.n_past_draft = count


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
    ) -> None:
        """prefixes: where what loses its slot is kept; exact: these are the exact lane's."""
        self._target = target
        self._draft = draft
        self._prefixes = prefixes
        self._exact = exact
        # A recurrent state cannot be cut, only continued whole.
        self._cuttable = target.model.cuttable
        self._draft_cuttable = draft is None or draft.model.cuttable
        # A state put back lies in other cells than one that was read, so its sums have another order.
        self._restores = not (exact and target.model.n_swa)
        self._slots = [Slot(i, first_draft + i) for i in range(count)]
        self._clock = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def free(self) -> bool:
        return any(not slot.busy for slot in self._slots)

    def acquire(
        self,
        prompt: Sequence[int],
        reuse: bool = True,
        align: int = 1,
        saved: Prefix | None = None,
    ) -> Slot:
        """A free slot that holds as much of `prompt` as any slot does; its `n_past` says how much.

        Where a kept prefix, or `saved`, holds so much more that putting it back pays, it holds that.
        At least the last prompt token is left to be read (its logits are needed), and reuse ends at a
        multiple of `align`. The caller has checked `free`.
        """
        prompt = list(prompt)
        idle = [slot for slot in self._slots if not slot.busy]
        shared = {s.id: self._usable(s, prompt, align) if reuse else 0 for s in self._slots}
        best = max(idle, key=lambda s: (shared[s.id], -s.last_used))
        source = max(self._slots, key=lambda s: shared[s.id])
        keep = shared[best.id]
        # A slot whose cache would mostly be lost is left alone where another is free to take a copy.
        wasteful = keep * 2 < best.n_past
        if shared[source.id] > keep or wasteful:
            best = min(idle, key=lambda s: (s.n_past > 0, s.last_used))
            keep = shared[best.id]
        back = self._put_back(best, prompt, shared[source.id], align, saved) if reuse else 0
        if reuse and not back:  # trying may have cost a slot what it held
            keep, offered = (self._usable(s, prompt, align) for s in (best, source))
            keep = self._bring(best, source, keep, offered)
        self._take(best, prompt, back or keep)
        if not back:
            best.source = "slot" if best.n_past else ""
        return best

    def _usable(self, slot: Slot, prompt: Sequence[int], align: int) -> int:
        """How many tokens of `prompt` a request can go on from with what is really in a slot's memory."""
        shared = min(common_prefix(slot.cached, prompt), len(prompt) - 1) // align * align
        return usable(shared, self._least(slot), slot.marks)

    def _least(self, slot: Slot) -> int:
        """The fewest tokens that the target's memory of a slot can be cut to."""
        if self._cuttable:
            return _least(self._target, slot.id, slot.n_past)
        # llama.cpp keeps a snapshot per token of the last pass only, and would give an older pass's
        # instead of refusing.
        return min(slot.last_pass + 1, slot.n_past)

    def _bring(self, slot: Slot, source: Slot, keep: int, offered: int) -> int:
        """Copy a longer shared prefix from another slot; returns what `slot` now holds of the prompt."""
        if source is slot or offered <= keep or not self._cuttable:
            return keep
        self._keep(slot, 0)
        self.clear(slot)
        self._target.copy(source.id, slot.id, offered)
        slot.marks = [mark for mark in source.marks if mark.tokens <= offered]
        if offered < self._least(source) and self._back_to_mark(slot, offered) != offered:
            self.clear(slot)
            return 0
        slot.tokens, slot.n_past = source.tokens[:offered], offered
        if self._draft is not None and self._draft_cuttable:
            n_draft = min(source.n_past_draft, offered)
            if n_draft and n_draft >= _least(self._draft, source.draft_id, source.n_past_draft):
                self._draft.copy(source.draft_id, slot.draft_id, n_draft)
                slot.n_past_draft = n_draft
        return offered

    def _take(self, slot: Slot, prompt: list[int], keep: int) -> None:
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        self._keep(slot, keep)
        keep = self._cut(slot, keep)
        slot.tokens, slot.n_past = prompt, keep
        slot.turns.append(max(len(prompt) - OPENING, 0))
        slot.n_past_draft = min(slot.n_past_draft, keep)
        slot.conversation = None

    def forget_conversation(self, conversation: str | None) -> None:
        """Nothing of it, with None of any, is to be saved; idle slots lose its text as well."""
        for slot in self._slots:
            if slot.conversation is not None and conversation in (None, slot.conversation):
                slot.conversation = None
                if not slot.busy:
                    self.clear(slot)

    # ------------------------------------------------------------------ prefixes without a slot

    def snapshot(self, slot: Slot, left: int = 0) -> Prefix:
        """A copy of what both memories hold for a slot, whose target may be cut to `left` for it."""
        start = time.perf_counter()
        draft = None
        if self._draft is not None and slot.n_past_draft:
            draft = self._draft.save(slot.draft_id)
        target, least = self._target.save(slot.id), self._least_saved(slot)
        spent = time.perf_counter() - start
        self._mark_turns(slot, left)
        held = Prefix(
            slot.cached,
            target,
            draft,
            slot.n_past_draft if draft is not None else 0,
            least,
            self._exact,
            slot.conversation,
            marks=tuple(slot.marks),
        )
        if self._prefixes is not None:
            self._prefixes.copy_cost.copied(held.copied, spent * 1e3)
        return held

    def _least_saved(self, slot: Slot) -> int:
        """As `_least`, of a copy: llama.cpp leaves out what the last token of the text could not see."""
        if not self._cuttable:
            return slot.n_past
        least, window = self._least(slot), self._target.model.n_swa
        return least if not window or slot.n_past <= window else max(least, slot.n_past - 1)

    def _keep(self, slot: Slot, left: int) -> None:
        """Before a slot loses all but `left` tokens: keep a copy where that is worth it."""
        kept = self._prefixes
        if kept is None or slot.n_past <= left or kept.limit <= 0 or not self._restores:
            return
        size = self._target.state_size(slot.id)
        worth = kept.copy_cost.worth_keeping(slot.n_past - left, size)
        if not worth or kept.covers(slot.cached, self._exact):
            return
        held = self.snapshot(slot, left)
        kept.supersede(held)
        kept.put(held)

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
        slot.last_pass, slot.marks = slot.n_past, list(found.marks)
        slot.turns = [mark.tokens for mark in found.marks]
        if self._draft is not None and found.draft is not None:
            restored = self._draft.restore(slot.draft_id, found.draft)
            slot.n_past_draft = found.n_draft if restored else 0
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

    def prefilled(self, slot: Slot, count: int) -> None:
        """A pass has read `count` tokens of the prompt."""
        slot.n_past += count

    def commit(self, slot: Slot, count: int) -> None:
        """Of what a pass read, `count` tokens are the text's; all else goes out of both memories."""
        slot.n_past += count
        self.roll_back(slot, slot.n_past)

    def roll_back(self, slot: Slot, length: int) -> bool:
        """Cut both memories to `length` tokens. False: the model cannot, and reads some of it again."""
        wanted = min(length, slot.n_past)
        return self._cut(slot, length) == wanted

    def _cut(self, slot: Slot, length: int) -> int:
        """Cut both memories to `length` tokens, or to fewer where the model cannot; returns how many."""
        if self._target.length(slot.id) > length:
            # What a pass read ahead of `n_past` took no cell that the text up to there needs.
            ahead = self._cuttable and length >= slot.n_past
            there = ahead or length >= self._least(slot)
            if not (there and self._target.remove(slot.id, length)):
                length = self._back_to_mark(slot, length)
        slot.n_past = min(slot.n_past, length)
        slot.marks = [mark for mark in slot.marks if mark.tokens <= length]
        slot.turns = [turn for turn in slot.turns if turn <= length]
        self.roll_back_draft(slot, min(slot.n_past_draft, length))
        return slot.n_past

    # ------------------------------------------------------------------ going back without a cut

    def reading(self, slot: Slot, count: int) -> int:
        """How many of the next `count` tokens of a prompt one pass is to read; call it before each.

        Where the target cannot be cut, it is noted on the way what it would have to be put back to.
        """
        if not self._loses(slot) or self._mark_bytes() <= 0:
            return count
        opening = len(slot.tokens) - OPENING
        if slot.n_past == opening or slot.n_past - _marked(slot) >= MARK_EVERY:
            self._mark(slot)
        if opening - _marked(slot) >= MIN_TOKENS and slot.n_past < opening:
            return min(count, opening - slot.n_past)
        return count

    def _loses(self, slot: Slot) -> bool:
        """Is what a cut would need lost as the text grows? Of a window, once its beginning is gone."""
        return not self._cuttable or self._target.first(slot.id) > 0

    def _mark_bytes(self) -> int:
        """What one slot's marks may take."""
        if self._prefixes is None or not self._restores:
            return 0
        return self._prefixes.limit // (4 * len(self._slots))

    def _mark(self, slot: Slot) -> None:
        """Keep what the target cannot be cut to later, where that is worth its copy."""
        room, kept = self._mark_bytes(), self._prefixes
        if not self._loses(slot) or kept is None or slot.n_past <= _marked(slot):
            return
        if self._target.length(slot.id) != slot.n_past:
            return  # a pass that failed may have left more
        size = self._target.state_size(slot.id, partial=True)
        if size > room or not kept.copy_cost.worth_keeping(slot.n_past - _marked(slot), size):
            return
        self._add_mark(slot, slot.n_past)

    def _mark_turns(self, slot: Slot, left: int) -> None:
        """Before a text with a window leaves: its copy will hold the last one only, so keep the others
        at which turns began and ended. Each is the last one once the text is cut to it.
        """
        kept = self._prefixes
        if not self._cuttable or not self._target.model.n_swa or kept is None:
            return
        least, later = max(self._least(slot), left, 1), slot.n_past + MIN_TOKENS
        for turn in sorted(set(slot.turns), reverse=True):
            apart = least <= turn < slot.n_past and later - turn >= MIN_TOKENS
            if apart and self._target.remove(slot.id, turn):
                size = self._target.state_size(slot.id, partial=True)
                if size <= self._mark_bytes() and kept.copy_cost.worth_keeping(turn, size):
                    self._add_mark(slot, turn)
                    later = turn

    def _add_mark(self, slot: Slot, tokens: int) -> None:
        room = self._mark_bytes()
        marks = {mark.tokens: mark for mark in slot.marks}
        marks[tokens] = Mark(tokens, self._target.save(slot.id, partial=True))
        slot.marks = [marks[at] for at in sorted(marks)]
        while len(slot.marks) > MARKS or sum(mark.state.nbytes for mark in slot.marks) > room:
            # The one without which those left stand closest, but never the last.
            places = [0, *(mark.tokens for mark in slot.marks)]
            gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
            del slot.marks[gaps.index(min(gaps))]

    def _back_to_mark(self, slot: Slot, length: int) -> int:
        """Go back to the last mark within `length` tokens; without one the slot is emptied."""
        for mark in reversed(slot.marks):
            if mark.tokens <= length and self._target.restore(slot.id, mark.state, partial=True):
                if not self._target.remove(slot.id, mark.tokens):
                    break
                slot.last_pass = mark.tokens
                return mark.tokens
        self.forget(slot)
        return 0

    def roll_back_draft(self, slot: Slot, length: int) -> None:
        """Cut the draft's memory to `length` tokens; where it cannot, it starts anew."""
        if self._draft is None:
            return
        slot.n_past_draft = length
        if self._draft.length(slot.draft_id) > length:
            if not self._draft_cuttable:
                slot.n_past_draft = self._return_to_mark(self._draft, slot, length)
            else:
                held = self._draft.length(slot.draft_id)
                there = length >= _least(self._draft, slot.draft_id, held)
                if not (there and self._draft.remove(slot.draft_id, length)):
                    self._draft.remove(slot.draft_id, 0)
                    slot.n_past_draft = 0

    def _return_to_mark(self, draft: Context, slot: Slot, length: int) -> int:
        """Go back to where drafting began (llama.cpp's own snapshots reach no further back than the
        last pass, and a draft reads its drafts one by one); returns the tokens held then.
        """
        if slot.draft_mark is not None and slot.draft_mark[0] <= length:
            tokens, state = slot.draft_mark
            restored = draft.restore(slot.draft_id, state, partial=True)
            if restored and draft.remove(slot.draft_id, tokens):
                return tokens
        draft.remove(slot.draft_id, 0)
        return 0

    def release(self, slot: Slot) -> None:
        """The request is over; what the target has read stays as a cache."""
        slot.tokens = slot.tokens[: slot.n_past]
        slot.turns.append(slot.n_past)
        self._mark(slot)
        slot.last_used = self._clock = self._clock + 1
        slot.n_past_draft = min(slot.n_past_draft, slot.n_past)
        slot.busy = False

    def forget(self, slot: Slot) -> None:
        """Empty both memories; the slot's text is to be read again."""
        self._target.remove(slot.id, 0)
        if self._draft is not None:
            self._draft.remove(slot.draft_id, 0)
        slot.n_past = slot.n_past_draft = 0
        slot.draft_mark = None
        slot.marks, slot.turns = [], []

    def clear(self, slot: Slot) -> None:
        """Empty both memories and the slot's text."""
        self.forget(slot)
        slot.tokens = []
        slot.conversation = None

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


def _marked(slot: Slot) -> int:
    """Where its last mark is."""
    return slot.marks[-1].tokens if slot.marks else 0


def _least(context: Context, sequence: int, held: int) -> int:
    """The fewest of `held` tokens that a cache of attention can be cut to; `held`: it cannot be."""
    return min(held, context.model.can_go_on_from(context.first(sequence)))
