"""What a context remembers of a slot's text, and how it is cut to fewer tokens.

A cache of attention is cut anywhere, unless it has a window whose beginning is gone; a recurrent state
nowhere, so on the way it is marked what to put back instead.
"""

from __future__ import annotations

from localspec.engine.cache.prefixes import MIN_TOKENS, Prefix, Prefixes
from localspec.engine.cache.slot import Mark, Slot
from localspec.engine.llama import Context, State

# A next turn shares the prompt but for its last tokens: they open an answer, or thoughts that templates
# drop later ("<think>\n\n</think>\n\n" is four).
OPENING = 4
MARK_EVERY = 1024  # tokens of a long prompt: an edit in it costs reading so many again
MARKS = 8  # of one slot; all slots' together take at most a quarter of the memory for prefixes


class TargetMemory:
    """The target's. mark_bytes: what the marks of one slot may take."""

    def __init__(self, context: Context, prefixes: Prefixes | None, mark_bytes: int) -> None:
        self._context = context
        self._prefixes = prefixes
        self._mark_bytes = mark_bytes
        self._cuttable = context.model.cuttable

    def least(self, slot: Slot) -> int:
        """The fewest tokens that it can be cut to."""
        if self._cuttable:
            return _least(self._context, slot.id, slot.n_past)
        # llama.cpp keeps a snapshot per token of the last pass only, and would give an older pass's
        # instead of refusing.
        return min(slot.last_pass + 1, slot.n_past)

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
            return length
        return self.back_to_mark(slot, length)

    def back_to_mark(self, slot: Slot, length: int) -> int:
        """Go back to the last mark within `length` tokens; returns how many it has, 0: there is none."""
        for mark in reversed(slot.marks):
            if mark.tokens <= length and self._context.restore(slot.id, mark.state, partial=True):
                if not self._context.remove(slot.id, mark.tokens):
                    break
                slot.last_pass = mark.tokens
                return mark.tokens
        return 0

    def before_pass(self, slot: Slot, count: int) -> int:
        """How many of the next `count` tokens of a prompt one pass is to read; call it before each.

        Where it cannot be cut, it is noted on the way what it would have to be put back to.
        """
        if not self._loses(slot) or self._mark_bytes <= 0:
            return count
        opening = len(slot.tokens) - OPENING
        if slot.n_past == opening or slot.n_past - slot.last_mark >= MARK_EVERY:
            self.mark(slot)
        if opening - slot.last_mark >= MIN_TOKENS and slot.n_past < opening:
            return min(count, opening - slot.n_past)
        return count

    def _loses(self, slot: Slot) -> bool:
        """Is what a cut would need lost as the text grows? Of a window, once its beginning is gone."""
        return not self._cuttable or self._context.first(slot.id) > 0

    def mark(self, slot: Slot) -> None:
        """Keep what it cannot be cut to later, where that is worth its copy."""
        kept = self._prefixes
        if not self._loses(slot) or kept is None or slot.n_past <= slot.last_mark:
            return
        if self._context.length(slot.id) != slot.n_past:
            return  # a pass that failed may have left more
        size = self._context.state_size(slot.id, partial=True)
        worth = kept.copy_cost.worth_keeping(slot.n_past - slot.last_mark, size)
        if size <= self._mark_bytes and worth:
            self._add_mark(slot, slot.n_past)

    def mark_turns(self, slot: Slot, left: int) -> None:
        """Before a text with a window leaves: its copy will hold the last one only, so keep the others
        at which turns began and ended. Each is the last one once the text is cut to it.
        """
        kept = self._prefixes
        if not self._cuttable or not self._context.model.n_swa or kept is None:
            return
        least, later = max(self.least(slot), left, 1), slot.n_past + MIN_TOKENS
        for turn in sorted(set(slot.turns), reverse=True):
            apart = least <= turn < slot.n_past and later - turn >= MIN_TOKENS
            if apart and self._context.remove(slot.id, turn):
                size = self._context.state_size(slot.id, partial=True)
                if size <= self._mark_bytes and kept.copy_cost.worth_keeping(turn, size):
                    self._add_mark(slot, turn)
                    later = turn

    def _add_mark(self, slot: Slot, tokens: int) -> None:
        marks = {mark.tokens: mark for mark in slot.marks}
        marks[tokens] = Mark(tokens, self._context.save(slot.id, partial=True))
        slot.marks = [marks[at] for at in sorted(marks)]
        while (
            len(slot.marks) > MARKS
            or sum(mark.state.nbytes for mark in slot.marks) > self._mark_bytes
        ):
            # The one without which those left stand closest, but never the last.
            places = [0, *(mark.tokens for mark in slot.marks)]
            gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
            del slot.marks[gaps.index(min(gaps))]


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
        if not context.model.cuttable:
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
        if context is None or not context.model.cuttable or not shared:
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

    def restore(self, slot: Slot, prefix: Prefix) -> int:
        if self._context is None or prefix.draft is None:
            return 0
        restored = self._context.restore(slot.draft_id, prefix.draft)
        return prefix.n_draft if restored else 0

    def empty(self, slot: Slot) -> None:
        if self._context is not None:
            self._context.remove(slot.draft_id, 0)


def _least(context: Context, sequence: int, held: int) -> int:
    """The fewest of `held` tokens that a cache of attention can be cut to; `held`: it cannot be."""
    return min(held, context.model.can_go_on_from(context.first(sequence)))
