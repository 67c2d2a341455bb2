"""MTP heads: a block behind the target's own, in its file, that was trained to tell the token after next.

It reads each token together with the target's hidden state after the token before, and keeps a cache of
its own. Its first draft follows from the target's state, each further one from its own: what it has read
so goes out again after each round, and what was kept is read from the target's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import StateBatch, States
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.model import DraftModel, ModelDrafter

# Of so many tokens the states may be missing: their cells say little, and those before them stay of use.
GAP = 64


class MtpDrafter(ModelDrafter):
    """Drafts of the target's own heads for one sequence."""

    kind, rank = "mtp", 1


class Heads(DraftModel):
    """The heads of a target, for several sequences."""

    kind = MtpDrafter.kind

    def __init__(self, *args: Any, **more: Any) -> None:
        """As DraftModel's, with a StateBatch."""
        super().__init__(*args, **more)
        assert isinstance(self._batch, StateBatch)
        self._states = self._batch.states
        self._own: dict[DraftRequest, States] = {}  # after what each has just drafted

    def unread(self, slot: Slot) -> int:
        return len(slot.tokens) - self._begin(slot)

    def _begin(self, slot: Slot) -> int:
        """The first token that is to be read: the next, or where states are known again."""
        assert slot.hidden is not None
        known, read = slot.hidden.start, slot.n_past_draft
        return known if known > read + GAP else read

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        try:
            super().propose(requests)
        finally:
            self._own.clear()
            for request in requests:  # what follows from its own states goes
                self.context.remove(request.slot.draft_id, request.slot.n_past_draft)

    def _prefill(self, slot: Slot, end: int) -> None:
        if (begin := self._begin(slot)) > slot.n_past_draft:
            self.context.remove(slot.draft_id, 0)
            slot.draft_has_read(begin)
        super()._prefill(slot, end)

    def _add_text(
        self, slot: Slot, start: int, end: int, place: int, sequence: int, wanted: int = 1
    ) -> int:
        last = super()._add_text(slot, start, end, place, sequence, wanted)
        assert slot.hidden is not None
        self._states[last + 1 - (end - start) : last + 1] = slot.hidden.before(start, end)
        return last

    def _add_draft(self, request: DraftRequest, place: int) -> int:
        row = super()._add_draft(request, place)
        self._states[row] = self._own[request]
        return row

    def _has_read(self, request: DraftRequest, row: int, length: int) -> None:
        self._own[request] = self.context.states(row)[0].copy()
        if not request.tokens:
            slot = request.slot
            slot.draft_has_read(length)
            assert slot.hidden is not None
            slot.hidden.were_read(length)
