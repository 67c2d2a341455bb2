"""One slot: its text, what target and draft remember of it, and how that is cut to fewer tokens.

A cache of attention is cut anywhere, unless it has a window whose beginning is gone; a recurrent state
nowhere, so on the way it is marked what to put back instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from localspec.engine.cache.borders import MIN_TOKENS, least_missed
from localspec.engine.cache.hidden import Hidden
from localspec.engine.llama import Context, State
from localspec.protocol.frames import Cache

MARKS = 10  # of one slot; all slots' together take at most a quarter of the memory for prefixes


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What a target keeps besides its cache of attention, after so many tokens of a text."""

    tokens: int
    state: State


def usable(shared: int, least: int, marks: Iterable[int]) -> int:
    """How many of `shared` tokens can be gone on from: all, back to the last mark, or none."""
    if shared >= least:
        return shared
    return max((mark for mark in marks if mark <= shared), default=0)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence id in the target's memory, and one in the draft's.

    tokens[:n_past] are in the target's KV, tokens[:n_past_draft] in the draft's. During a round the
    memories hold more (drafts not verified yet); after it they are rolled back to these counts.
    `Slots` alone writes both counts.
    """

    id: int
    draft_id: int
    tokens: list[int] = field(default_factory=list)
    n_past: int = 0
    n_past_draft: int = 0
    marks: list[Mark] = field(default_factory=list)  # places to go back to, where it cannot be cut
    turns: list[int] = field(default_factory=list)  # where a mark may be worth its copy
    draft_mark: tuple[int, State] | None = None  # a draft's recurrent state after so many tokens
    hidden: Hidden | None = None  # of the target, where it has MTP heads
    snapshots: int = (
        0  # after how many tokens the first one is that the target's last pass has left
    )
    busy: bool = False
    last_used: int = 0
    beside_ms: float = 0.0  # that its cells have cost others since it was left
    shared: int = 0  # tokens whose cells another sequence may have too: they are not moved
    exact: int | None = None  # tokens before the first that was moved; None: none was
    moves: int = 0  # since it was read
    reused: int = 0  # tokens that the present request does not read
    asked: int = 0  # tokens of its prompt
    moved: int = 0  # of those, tokens that were moved
    passing: int | None = None  # where what an editor's next key replaces begins; None: nowhere
    conversation: str | None = None  # whose text it is, where that is to be saved
    source: Literal[""] | Cache = ""  # of what the present request reused

    @property
    def cached(self) -> list[int]:
        return self.tokens[: self.n_past]

    @property
    def own_cells(self) -> int:
        """Those that no other sequence may have too."""
        return self.n_past - self.shared

    def exact_part(self, count: int) -> int:
        """How many of the first `count` tokens are remembered as a fresh reading would."""
        return count if self.exact is None else min(count, self.exact)

    @property
    def reused_exact(self) -> int:
        """Of what a request took from the cache, all before the first token that was ever moved."""
        return self.exact_part(self.reused - self.moved)

    @property
    def lasting(self) -> int:
        """How many of the tokens it has read somebody may come back to."""
        return self.n_past if self.passing is None else min(self.passing, self.n_past)

    @property
    def unread(self) -> list[int]:
        """What the target has not read yet."""
        return self.tokens[self.n_past :]

    @property
    def places(self) -> list[int]:
        """After how many tokens its marks are."""
        return [mark.tokens for mark in self.marks]

    @property
    def last_mark(self) -> int:
        """After how many tokens it is; 0: there is none."""
        return self.marks[-1].tokens if self.marks else 0

    def draft_has_read(self, count: int) -> None:
        """The draft's memory holds so many tokens now, drafts of its own among them."""
        self.n_past_draft = count


class TargetMemory:
    """The target's. worth: is a copy of so many tokens, of such a size in bytes, worth the chance that
    they need not be read again? mark_bytes: what the marks of all `slots` may take.
    """

    def __init__(
        self,
        context: Context,
        worth: Callable[[int, int], bool],
        mark_bytes: int,
        slots: Sequence[Slot],
    ) -> None:
        self._context = context
        self._worth = worth
        self._mark_bytes = mark_bytes
        self._slots = slots
        self._cuttable = context.model.cuttable

    def least(self, slot: Slot) -> int:
        """The fewest tokens that it can be cut to."""
        if self._cuttable:
            return _least(self._context, slot.id, slot.n_past)
        return min(slot.snapshots, slot.n_past)

    def least_saved(self, slot: Slot) -> int:
        """As `least`, of a copy: llama.cpp leaves out what the last token of the text could not see."""
        if not self._cuttable:
            return slot.n_past
        least, window = self.least(slot), self._context.model.n_swa
        return least if not window or slot.n_past <= window else max(least, slot.n_past - 1)

    def cut(self, slot: Slot, length: int) -> int:
        """Cut it to `length` tokens, or to the last mark before; returns how many, 0: it is of no use."""
        # What a pass read ahead of `n_past` took no cell that the text up to there needs.
        ahead = self._cuttable and length >= slot.n_past
        there = ahead or length >= self.least(slot)
        if there and self._context.remove(slot.id, length):
            slot.snapshots = length  # they are gone back to once
            return length
        return self.back_to_mark(slot, length)

    def back_to_mark(self, slot: Slot, length: int) -> int:
        """Go back to the last mark within `length` tokens; returns how many it has, 0: there is none."""
        for mark in reversed(slot.marks):
            if mark.tokens <= length and self._context.restore(slot.id, mark.state, partial=True):
                if not self._context.remove(slot.id, mark.tokens):
                    break
                slot.snapshots = mark.tokens
                return mark.tokens
        return 0

    def before_pass(self, slot: Slot, count: int) -> int:
        """How many of the next `count` tokens of a prompt one pass is to read; call it before each.

        Where it cannot be cut, it is noted on the way what it would have to be put back to.
        """
        if not self._loses(slot) or self._mark_bytes <= 0:
            return count
        if slot.n_past in slot.turns:
            self.mark(slot)
        least = max(slot.n_past + 1, slot.last_mark + MIN_TOKENS)
        return min([count, *(turn - slot.n_past for turn in slot.turns if turn >= least)])

    def _loses(self, slot: Slot) -> bool:
        """Is what a cut would need lost as the text grows? Of a window, once its beginning is gone."""
        return not self._cuttable or self._context.first(slot.id) > 0

    def mark(self, slot: Slot) -> None:
        """Keep what it cannot be cut to later, where that is worth its copy."""
        if not self._loses(slot) or slot.n_past <= slot.last_mark:
            return
        if self._context.length(slot.id) != slot.n_past:
            return  # a pass that failed may have left more
        size = self._context.state_size(slot.id, partial=True)
        if size <= self._mark_bytes and self._worth(slot.n_past - slot.last_mark, size):
            self._add_mark(slot, slot.n_past)

    def mark_turns(self, slot: Slot, left: int) -> None:
        """Before a text with a window leaves: its copy will hold the last one only, so keep the others
        at which turns began and ended. Each is the last one once the text is cut to it.
        """
        if not self._cuttable or not self._context.model.n_swa or not self._mark_bytes:
            return
        least, later = max(self.least(slot), left, 1), slot.n_past + MIN_TOKENS
        for turn in sorted(set(slot.turns), reverse=True):
            apart = least <= turn < slot.n_past and later - turn >= MIN_TOKENS
            if apart and self._context.remove(slot.id, turn):
                size = self._context.state_size(slot.id, partial=True)
                if size <= self._mark_bytes and self._worth(turn, size):
                    self._add_mark(slot, turn)
                    later = turn

    def _add_mark(self, slot: Slot, tokens: int) -> None:
        marks = {mark.tokens: mark for mark in slot.marks}
        marks[tokens] = Mark(tokens, self._context.save(slot.id, partial=True))
        slot.marks = [marks[at] for at in sorted(marks)]
        if len(slot.marks) > MARKS:
            del slot.marks[least_missed(slot.places)]
        while (
            sum(mark.state.nbytes for each in self._slots for mark in each.marks) > self._mark_bytes
        ):
            having = [each for each in self._slots if len(each.marks) > (each is slot)]
            if not having:
                break
            richest = max(having, key=lambda s: (len(s.marks), not s.busy, -s.last_used))
            del richest.marks[least_missed(richest.places)]


class DraftMemory:
    """The draft's; of no draft, one that holds nothing. Each returns how many tokens it holds then."""

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def cut(self, slot: Slot, length: int) -> int:
        """Cut it to `length` tokens; where it cannot be, it goes back to its mark or starts anew."""
        context = self._context
        if context is None:
            return 0
        held = context.length(slot.draft_id)
        if held <= length:
            return length
        if not context.cuttable:
            return self._back_to_mark(context, slot, length)
        there = length >= _least(context, slot.draft_id, held)
        if there and context.remove(slot.draft_id, length):
            return length
        context.remove(slot.draft_id, 0)
        return 0

    def _back_to_mark(self, context: Context, slot: Slot, length: int) -> int:
        """Go back to where drafting began: llama.cpp's own snapshots reach no further back than the
        last pass, and a draft reads its drafts one by one.
        """
        if slot.draft_mark is not None and slot.draft_mark[0] <= length:
            tokens, state = slot.draft_mark
            restored = context.restore(slot.draft_id, state, partial=True)
            if restored and context.remove(slot.draft_id, tokens):
                return tokens
        context.remove(slot.draft_id, 0)
        return 0

    def copy(self, source: Slot, slot: Slot, length: int) -> int:
        """Share what it holds of the first `length` tokens of another slot, if it holds nothing."""
        context, shared = self._context, min(source.n_past_draft, length)
        if context is None or not context.cuttable or not shared:
            return 0
        if shared < _least(context, source.draft_id, source.n_past_draft):
            return 0
        context.copy(source.draft_id, slot.draft_id, shared)
        return shared

    def save(self, slot: Slot) -> State | None:
        """A copy; None where it holds nothing."""
        if self._context is None or not slot.n_past_draft:
            return None
        return self._context.save(slot.draft_id)

    def restore(self, slot: Slot, state: State | None, count: int) -> int:
        """Put a copy back that was made after `count` tokens; None: there is none."""
        if self._context is None or state is None:
            return 0
        return count if self._context.restore(slot.draft_id, state) else 0

    def empty(self, slot: Slot) -> None:
        if self._context is not None:
            self._context.remove(slot.draft_id, 0)


def _least(context: Context, sequence: int, held: int) -> int:
    """The fewest of `held` tokens that a cache of attention can be cut to; `held`: it cannot be."""
    return min(held, context.model.can_go_on_from(context.first(sequence)))
