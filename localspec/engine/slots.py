"""Slots: one llama.cpp sequence each, whose tokens stay behind as a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from localspec.engine.llama import Context


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence id in the target's memory, and one in the draft's.

    tokens[:n_target] are in the target's KV, tokens[:n_draft] in the draft's. During a round the
    memories hold more (drafts not verified yet); after it they are rolled back to these counts.
    """

    id: int
    draft_id: int
    tokens: list[int] = field(default_factory=list)
    n_target: int = 0
    n_draft: int = 0
    draft_mark: tuple[int, bytes] | None = None  # a draft's recurrent state after so many tokens
    last_pass: int = 0  # where the target's last pass over this slot began
    busy: bool = False
    last_used: int = 0

    @property
    def cached(self) -> list[int]:
        return self.tokens[: self.n_target]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Slots:
    """The slots of one target context, and of the draft context beside it."""

    def __init__(
        self, target: Context, draft: Context | None, first_draft: int, count: int
    ) -> None:
        self._target = target
        self._draft = draft
        # A recurrent state cannot be cut, only continued whole.
        self._cuttable = not (target.model.recurrent or target.model.hybrid)
        self._draft_cuttable = draft is None or not (draft.model.recurrent or draft.model.hybrid)
        self._slots = [Slot(i, first_draft + i) for i in range(count)]
        self._clock = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def free(self) -> bool:
        return any(not slot.busy for slot in self._slots)

    def acquire(self, prompt: Sequence[int], reuse: bool = True, align: int = 1) -> Slot:
        """A free slot that holds as much of `prompt` as any slot does; its `n_target` says how much.

        At least the last prompt token is left to be read (its logits are needed), and reuse ends at a
        multiple of `align`. The caller has checked `free`.
        """
        prompt = list(prompt)
        idle = [slot for slot in self._slots if not slot.busy]
        shared = {s.id: common_prefix(s.cached, prompt) if reuse else 0 for s in self._slots}
        best = max(idle, key=lambda s: (shared[s.id], -s.last_used))
        source = max(self._slots, key=lambda s: shared[s.id])
        keep = shared[best.id]
        # A slot whose cache would mostly be lost is left alone where another is free to take a copy.
        wasteful = keep * 2 < best.n_target
        if shared[source.id] > keep or wasteful:
            best = min(idle, key=lambda s: (s.n_target > 0, s.last_used))
            keep = shared[best.id]
        keep = self._bring(best, source, keep, shared[source.id])
        self._take(best, prompt, min(keep, len(prompt) - 1) // align * align)
        return best

    def _bring(self, slot: Slot, source: Slot, keep: int, offered: int) -> int:
        """Copy a longer shared prefix from another slot; returns what `slot` now holds of the prompt."""
        if source is slot or offered <= keep or not self._cuttable:
            return keep
        self.clear(slot)
        self._target.copy(source.id, slot.id, offered)
        slot.tokens, slot.n_target = source.tokens[:offered], offered
        if self._draft is not None and self._draft_cuttable:
            slot.n_draft = min(source.n_draft, offered)
            if slot.n_draft:
                self._draft.copy(source.draft_id, slot.draft_id, slot.n_draft)
        return offered

    def _take(self, slot: Slot, prompt: list[int], keep: int) -> None:
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        if not self.roll_back(slot, keep):
            keep = 0
        slot.tokens, slot.n_target = prompt, keep
        slot.n_draft = min(slot.n_draft, keep)

    def roll_back(self, slot: Slot, length: int) -> bool:
        """Cut both memories to `length` tokens. False: the model cannot, and reads all of it again."""
        if self._target.length(slot.id) > length:
            # llama.cpp keeps a snapshot per token of the last pass only, and would give an older
            # pass's instead of refusing.
            kept = self._cuttable or length > slot.last_pass
            if not (kept and self._target.remove(slot.id, length)):
                self.forget(slot)
                return False
        slot.n_target = min(slot.n_target, length)
        self.roll_back_draft(slot, min(slot.n_draft, length))
        return True

    def roll_back_draft(self, slot: Slot, length: int) -> None:
        """Cut the draft's memory to `length` tokens; where it cannot, it starts anew."""
        if self._draft is None:
            return
        slot.n_draft = length
        if self._draft.length(slot.draft_id) > length:
            if not self._draft_cuttable:
                slot.n_draft = self._return_to_mark(self._draft, slot, length)
            elif not self._draft.remove(slot.draft_id, length):
                self._draft.remove(slot.draft_id, 0)
                slot.n_draft = 0

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
        slot.tokens = slot.tokens[: slot.n_target]
        slot.last_used = self._clock = self._clock + 1
        slot.n_draft = min(slot.n_draft, slot.n_target)
        slot.busy = False

    def forget(self, slot: Slot) -> None:
        """Empty both memories; the slot's text is to be read again."""
        self._target.remove(slot.id, 0)
        if self._draft is not None:
            self._draft.remove(slot.draft_id, 0)
        slot.n_target = slot.n_draft = 0
        slot.draft_mark = None

    def clear(self, slot: Slot) -> None:
        """Empty both memories and the slot's text."""
        self.forget(slot)
        slot.tokens = []

    def evict_draft(self) -> bool:
        """Empty the draft's memory of the idle slot that was used longest ago; as `evict`."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n_draft]
        if not idle:
            return False
        self.roll_back_draft(min(idle, key=lambda s: s.last_used), 0)
        return True

    def evict(self) -> bool:
        """Empty the idle slot that was used longest ago. False: no idle slot holds anything."""
        idle = [slot for slot in self._slots if not slot.busy and slot.n_target]
        if not idle:
            return False
        self.clear(min(idle, key=lambda s: s.last_used))
        return True
