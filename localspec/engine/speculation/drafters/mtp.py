"""MTP heads: blocks trained with a target to predict the token after next, in its file or a sidecar.

They read each token together with the target's hidden state after the token before. Their first draft follows
from the target's state, and each further one from their own.

Heads in the target's file keep a cache. What they have read of their own drafts is removed after each round,
and what was kept is read again from the target's states. A sidecar keeps no cache. It reads the target's,
always from the position of the next token, and reads one token for each draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, Logits, StateBatch, States
from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.draft_model import DraftModel, ModelDrafter

# The states of up to this many tokens may be missing: their cells are poor, but those before stay useful.
MAX_STATE_GAP_TOKENS = 64


class MtpDrafter(ModelDrafter):
    """Drafts of the target's MTP heads for one sequence."""

    kind, rank = "mtp", 1
    called = "the MTP heads"


class Heads(DraftModel):
    """The MTP heads of a target, for several sequences."""

    kind = MtpDrafter.kind

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `DraftModel`, with a `StateBatch` as the batch."""
        super().__init__(*args, **options)
        assert isinstance(self._batch, StateBatch)
        self._states = self._batch.states
        self._draft_states: dict[
            DraftRequest, States
        ] = {}  # per request, the state after its last draft

    def first_unread(self, slot: Slot) -> int:
        """Return the first unread token, or where states are known again after a gap."""
        assert slot.hidden is not None
        states_start, n_read = slot.hidden.start, slot.n_past_draft
        max_gap = MAX_STATE_GAP_TOKENS if n_read else 0
        return states_start if states_start > n_read + max_gap else n_read

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        try:
            super().propose(requests)
        finally:
            self._draft_states.clear()
            for request in requests:  # what was read from the heads' own states is not kept
                self.context.remove(request.slot.draft_id, request.slot.n_past_draft)

    def _prefill(self, slot: Slot, end: int) -> None:
        if (begin := self.first_unread(slot)) > slot.n_past_draft:
            self.context.remove(slot.draft_id, 0)
            slot.set_draft_length(begin)
        super()._prefill(slot, end)

    def _add_text(
        self, slot: Slot, start: int, end: int, position: int, sequence: int, n_logits: int = 1
    ) -> int:
        last_row = super()._add_text(slot, start, end, position, sequence, n_logits)
        assert slot.hidden is not None
        states = self._make_states(slot.hidden.states_before(start, end))
        self._states[last_row + 1 - (end - start) : last_row + 1] = states
        return last_row

    def read_predictions(
        self, tokens: Sequence[int], count: int, states: States | None = None
    ) -> Iterator[Logits]:
        assert states is not None
        first = self._first_compared(len(tokens), count)
        self._batch.clear()
        row = -1
        for index in range(first, len(tokens)):
            wants_logits = self._compares_all or index >= len(tokens) - count
            token = self._shared.to_draft(tokens[index])
            row = self._batch.add(token, index - first, self._scratch, wants_logits)
        self._states[: row + 1] = self._make_states(states[first - 1 : -1])
        return self._run_comparison(row, count)

    _compares_all = False  # whether all rows of a pass that is compared need logits

    def _first_compared(self, n_tokens: int, count: int) -> int:
        """Return the first token that is read to compare the last ones; a state must come before it."""
        del n_tokens, count
        return 1

    def _make_states(self, states: States) -> States:
        """Return the states that are read together with tokens, of those that the target has emitted."""
        return states

    def _add_draft(self, request: DraftRequest, position: int) -> int:
        row = super()._add_draft(request, position)
        self._states[row] = self._draft_states[request]
        return row

    def _note_read(self, request: DraftRequest, row: int, length: int) -> None:
        self._draft_states[request] = self.context.states(row)[0].copy()
        if not request.tokens:
            slot = request.slot
            slot.set_draft_length(length)
            assert slot.hidden is not None
            slot.hidden.drop_read(length)


@dataclass(frozen=True, slots=True)
class _Prediction:
    """A prediction of the token at position `place`, for the sequence of `belief`."""

    belief: Belief
    place: int
    token: int
    bucket: int


class Sidecar(Heads):
    """Heads in a file of their own, whose context borrows the cells of the target's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._options = options
        self._predictions: dict[int, _Prediction] = {}  # by sequence
        self.probe_ms = self._costs.ms(1)

    def copy_for(self, context: Context, make_room: Callable[[], bool]) -> Self:
        """Return the same heads for the cells of another target context."""
        batch = StateBatch(self._batch.capacity, context.n_state)
        args = context, batch, self._costs, make_room, self._scratch, self._shared
        sidecar = type(self)(*args, **self._options)
        sidecar.steps = self.steps
        return sidecar

    def first_unread(self, slot: Slot) -> int:
        """Return the last token, which the target has not read either."""
        return len(slot.tokens) - 1

    def probe(self, slot: Slot, belief: Belief) -> None:
        """Predict the next token, and compare the prediction of the last probe with what came.

        It can look at the end of a text only, because the target's cells end there.
        """
        start = self._clock()
        previous = self._predictions.pop(slot.draft_id, None)
        if previous is not None and previous.belief is belief and previous.place < len(slot.tokens):
            belief.observe(previous.bucket, slot.tokens[previous.place] == previous.token)
        position = len(slot.tokens)
        self._batch.clear()
        row = self._add_text(slot, position - 1, position, position - 1, slot.draft_id)
        self._run_pass(timed=False)
        self._predictions[slot.draft_id] = _Prediction(belief, position, *self._predict(row))
        self._time_probe(start)

    def _read_texts(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Return the requests whose target has read something.

        A sidecar at position 0 attends to no cell at all. Flash attention makes zeros of that, and
        attention without it NaN, which would end the drafts of the whole answer.
        """
        return [request for request in requests if self.first_unread(request.slot) > 0]

    def _add_draft(self, request: DraftRequest, position: int) -> int:
        return super()._add_draft(request, self.first_unread(request.slot))

    def _note_read(self, request: DraftRequest, row: int, length: int) -> None:
        self._draft_states[request] = self.context.states(row)[0].copy()
