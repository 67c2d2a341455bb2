"""MTP heads: blocks that were trained with a target to tell the token after next, in its file or a sidecar.

They read each token together with the target's hidden state after the token before. Their first draft
follows from the target's state, each further one from their own.

Heads in the target's file keep a cache: what they have read of their own drafts goes out again after each
round, and what was kept is read from the target's states. A sidecar keeps nothing. It looks at the
target's cache, always from where the next token stands, and reads one token for each draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, StateBatch, States
from localspec.engine.speculation.acceptance import Belief, bucket
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.model import DraftModel, ModelDrafter, probability

# Of so many tokens the states may be missing: their cells say little, and those before them stay of use.
GAP = 64


class MtpDrafter(ModelDrafter):
    """Drafts of the target's heads for one sequence."""

    kind, rank = "mtp", 1
    called = "the MTP heads"


class Heads(DraftModel):
    """The heads of a target, for several sequences."""

    kind = MtpDrafter.kind

    def __init__(self, *args: Any, **more: Any) -> None:
        """As DraftModel's, with a StateBatch."""
        super().__init__(*args, **more)
        assert isinstance(self._batch, StateBatch)
        self._states = self._batch.states
        self._own: dict[DraftRequest, States] = {}  # after what each has just drafted

    def begin(self, slot: Slot) -> int:
        """The next token, or where states are known again."""
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
        if (begin := self.begin(slot)) > slot.n_past_draft:
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


@dataclass(frozen=True, slots=True)
class _Guess:
    """What was guessed of the token at a place, for whom."""

    belief: Belief
    place: int
    token: int
    bucket: int


class Sidecar(Heads):
    """Heads in a file of their own, whose context borrows the cells of the target's."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._how = more
        self._guesses: dict[int, _Guess] = {}  # by sequence
        self.probe_ms = self._costs.ms(1)

    def beside(self, context: Context, make_room: Callable[[], bool]) -> Self:
        """The same with another target's cells."""
        batch = StateBatch(self._batch.capacity, context.n_state)
        args = context, batch, self._costs, make_room, self._scratch, self._shared
        other = type(self)(*args, **self._how)
        other.steps = self.steps
        return other

    def begin(self, slot: Slot) -> int:
        """The token that the target has not read either."""
        return len(slot.tokens) - 1

    def probe(self, slot: Slot, belief: Belief) -> None:
        """Would it tell the next token? What it said at the last probe is compared with what came.

        It can look at a text from its end only: the target's cells end there.
        """
        start = self._clock()
        before = self._guesses.pop(slot.draft_id, None)
        if before is not None and before.belief is belief and before.place < len(slot.tokens):
            belief.observe(before.bucket, slot.tokens[before.place] == before.token)
        place = len(slot.tokens)
        self._batch.clear()
        row = self._add_text(slot, place - 1, place, place - 1, slot.draft_id)
        self._pass(timed=False)
        logits = self._proposals(row)
        best = int(logits.argmax())
        sure = bucket(probability(logits, best))
        self._guesses[slot.draft_id] = _Guess(belief, place, best, sure)
        self.probe_ms += 0.3 * ((self._clock() - start) * 1e3 - self.probe_ms)

    def _read(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return those whose target has read something.

        A sidecar at position 0 attends to no cell at all. Flash attention makes zeros of that, and
        attention without it NaN, which would end the drafts of the whole answer.
        """
        return [request for request in requests if self.begin(request.slot) > 0]

    def _add_draft(self, request: DraftRequest, place: int) -> int:
        return super()._add_draft(request, self.begin(request.slot))

    def _has_read(self, request: DraftRequest, row: int, length: int) -> None:
        self._own[request] = self.context.states(row)[0].copy()
