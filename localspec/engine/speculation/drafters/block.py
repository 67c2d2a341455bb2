"""DFlash and DSpark: layers in a file of their own that draft a block of tokens in one pass.

They keep in their cache what some layers of the target have read at each token of a text. A pass over the
last token and a row of masks, which see each other, predicts all tokens of a block. DFlash 2 has a selector,
which scores pairs of neighbours among the best candidates of each place. DSpark biases each place by the
token chosen for the place before, which llama.cpp's graph does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import LayerBatch, Logits, States
from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.cost import average_with
from localspec.engine.speculation.depth import MAX_DEPTH, Candidate
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.draft_model import (
    PROBE_CONTEXT_TOKENS,
    PROBE_ROWS,
    DraftModel,
    ModelDrafter,
)
from localspec.engine.speculation.drafters.mtp import MAX_STATE_GAP_TOKENS

_ROWS = 64  # most tokens that are read in one pass: each takes a row of all layers that are read


class BlockDrafter(ModelDrafter):
    """Drafts of a block sidecar for one sequence."""

    kind, rank = "dflash", 1
    called = "the block draft"

    def offer(self, request: DraftRequest) -> Candidate | None:
        candidate = super().offer(request)
        model = self.model
        if candidate is None or not isinstance(model, BlockDraft):
            return None
        candidate.limit = min(candidate.limit, model.max_drafts)
        candidate.steps = None
        return candidate


class BlockDraft(DraftModel):
    """A block sidecar, for several sequences."""

    kind = BlockDrafter.kind

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of `DraftModel`."""
        super().__init__(*args, **options)
        model = self.context.model
        self._mask = model.vocab.mask
        self._first_row = 0 if model.drafts_from_anchor else 1
        self._n_selected = model.n_selected
        self.max_drafts = min(model.block_size - self._first_row, MAX_DEPTH)
        n_inputs = len(model.target_layers) * model.target_width
        n_positions = 4 if model.repeats_positions else 1
        self._inputs = LayerBatch(min(_ROWS, self._batch.capacity), n_inputs, n_positions)
        block_ms = self._costs.ms(1 + self._first_row)
        self.probe_ms = block_ms + self.token_prefill_ms * PROBE_CONTEXT_TOKENS
        # The time of a round with drafts without that of `draft_ms`: a pass that reads what was accepted, the
        # pass of the block, and all around them. Corrected by each round.
        self.round_ms = 2 * block_ms

    @property
    def draft_ms(self) -> float:
        """The cost of one more draft in a block, in milliseconds."""
        narrowest, widest = 1 + self._first_row, self.max_drafts + self._first_row
        block_ms = self._costs.ms(widest) - self._costs.ms(narrowest)
        return max(block_ms, 0.0) / max(self.max_drafts - 1, 1)

    def first_unread(self, slot: Slot) -> int:
        """Return the first token that it has not read, or the first behind a gap of the target's states."""
        assert slot.hidden is not None
        start = slot.hidden.start
        return start if start > slot.n_past_draft + MAX_STATE_GAP_TOKENS else slot.n_past_draft

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        start, busy = self._clock(), self.busy_s
        active = [request for request in requests if request.more(request)]
        n_unread = max((self.count_unread(request.slot) for request in active), default=0)
        active = self._read_texts([request for request in active if len(request.slot.tokens) > 1])
        if active:
            # Each row of a block has its cost, so it has no more than the tokens that were decided on.
            count = min(max(request.depth for request in active), self.max_drafts)
            self._draft_blocks(active, count)
            self.expected_ms += len(active) * (count * self.draft_ms + self.round_ms)
            if n_unread <= MAX_DEPTH + 1:
                spent_ms = (self._clock() - start) * 1e3 / len(active)
                drafts_ms = count * self.draft_ms
                self.round_ms = average_with(drafts_ms + self.round_ms, spent_ms, 0.2) - drafts_ms
        self.own_s += self._clock() - start - (self.busy_s - busy)

    def _draft_blocks(self, requests: Sequence[DraftRequest], count: int) -> None:
        """Draft at most `count` tokens for each request, until its `more` returns False."""
        self._batch.clear()
        rows = []
        for request in requests:
            slot = request.slot
            rows.append(
                self._add_block(slot.tokens[-1], len(slot.tokens) - 1, slot.draft_id, count)
            )
        try:
            self._run_pass()
            for request, row in zip(requests, rows, strict=True):
                self._take_drafts(request, row, count)
        finally:
            for request in requests:
                self.context.remove(request.slot.draft_id, request.slot.n_past_draft)

    def _take_drafts(self, request: DraftRequest, row: int, count: int) -> None:
        """Take drafts of the block of `count` that begins in `row` until `more` returns False."""
        for offset in range(min(request.limit, count)):
            if offset and not request.more(request):
                return
            self._append_draft(request, row + self._first_row + offset)

    def _add_block(self, last: int, position: int, sequence: int, count: int) -> int:
        """Add the last token of a text and masks for `count` drafts. Return the first row."""
        wants_logits = not self._n_selected
        row = self._batch.add(self._shared.to_draft(last), position, sequence, wants_logits)
        for offset in range(1, count + self._first_row):
            self._batch.add(self._mask, position + offset, sequence, wants_logits)
        return row

    def _read_logits(self, row: int, drafted: Sequence[int]) -> Logits:
        """Return the logits of the draft in `row` of the last pass; `drafted`: those before it.

        A selector's row has the candidates' ids, and then their scores behind each candidate of the row
        before. Behind the text itself, the first scores count.
        """
        if not self._n_selected:
            return super()._read_logits(row, drafted)
        n, lattice = self._n_selected, self.context.finite_states(row)
        before = self.context.states(row - 1)[0][:n] if drafted else np.empty(0)
        places = np.flatnonzero(before == drafted[-1]) if drafted else before
        start = n * (1 + (int(places[0]) if len(places) else 0))
        logits = np.full(self.context.n_vocab, -np.inf, dtype=np.float32)
        logits[lattice[:n].astype(np.intp)] = lattice[start : start + n]
        return logits

    def _read_texts(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Read texts as far as there is time. Return the requests whose text is read."""
        ready, budget = [], self._count_tokens_in(self._gap_s)
        for request in requests:
            slot = request.slot
            end = len(slot.tokens) - 1  # the target has not read the last token either
            begin = self.first_unread(slot)
            self._prefill(slot, min(end, begin + budget))
            assert slot.hidden is not None
            slot.hidden.drop_read(slot.n_past_draft)
            budget -= max(slot.n_past_draft - begin, 0)
            if slot.n_past_draft >= end:
                ready.append(request)
        return ready

    def _prefill(self, slot: Slot, end: int) -> None:
        if (begin := self.first_unread(slot)) > slot.n_past_draft:
            self.context.remove(slot.draft_id, 0)
            slot.set_draft_length(begin)
        self._read(slot, begin, end, begin, slot.draft_id)
        slot.set_draft_length(max(end, begin))
        n_read = end - begin
        if n_read > MAX_DEPTH + 1:  # `round_ms` has the reading of what was accepted
            self.expected_ms += n_read * self.token_prefill_ms

    def _read(self, slot: Slot, start: int, end: int, position: int, sequence: int) -> None:
        """Keep what the target's layers have read at the tokens from `start` to `end`.

        position: where they begin in `sequence`.
        """
        assert slot.hidden is not None
        for first in range(start, end, self._inputs.capacity):
            last = min(first + self._inputs.capacity, end)
            states = slot.hidden.states_before(first + 1, last + 1)
            self._read_rows(states, position + first - start, sequence)

    def _read_rows(self, states: States, position: int, sequence: int) -> None:
        """Keep these states of the target's layers, from `position` on."""
        batch = self._inputs
        for first in range(0, len(states), batch.capacity):
            part = states[first : first + batch.capacity]
            batch.clear()
            for offset in range(len(part)):
                batch.add(0, position + first + offset, sequence, False)
            batch.inputs[: len(part)] = part
            self._decode(batch)

    def read_predictions(
        self,
        tokens: Sequence[int],
        count: int,
        states: States | None = None,
        length: int = 1,
    ) -> Iterator[Logits]:
        """Yield the logits of what it drafts after each of the last `count` of `tokens`.

        length: of each block. Its later drafts do not see the tokens behind its beginning.
        """
        assert states is not None
        n_read, end = 0, len(tokens)
        try:
            for place in range(end - count, end, length):
                self._read_rows(states[n_read:place], n_read, self._scratch)
                n_read = place
                size = min(length, end - place)
                self._batch.clear()
                row = self._add_block(tokens[place], place, self._scratch, size)
                self._run_pass(timed=False)
                for offset in range(size):
                    before = tokens[place + 1 : place + 1 + offset]
                    logits = self._read_logits(row + self._first_row + offset, before)
                    yield self._shared.only_shared(logits)
                self.context.remove(self._scratch, place)
        finally:
            self.context.remove(self._scratch, 0)

    def probe(self, slot: Slot, belief: Belief) -> None:
        """Draft a block before the end of a text that was written without it, and compare."""
        start = self._clock()
        count = min(PROBE_ROWS, self.max_drafts)
        end = len(slot.tokens) - 1 - count
        assert slot.hidden is not None
        begin = max(end - PROBE_CONTEXT_TOKENS, slot.hidden.start, 0)
        if begin < end:
            try:
                self._read(slot, begin, end, 0, self._scratch)
                for bucket, is_hit in self._check_block(slot, end, end - begin, count):
                    belief.observe(bucket, is_hit)
            finally:
                self.context.remove(self._scratch, 0)
        self._time_probe(start)

    def _count_hits(self, slot: Slot, begin: int, end: int, window: int) -> int:
        hits = 0
        for place in range(begin, end, self.max_drafts):
            start = max(place - window, 0)
            self.context.copy(slot.draft_id, self._scratch, place, start=start)
            try:
                checked = self._check_block(slot, place, place, min(self.max_drafts, end - place))
            finally:
                self.context.remove(self._scratch, 0)
            hits += sum(is_hit for _, is_hit in checked)
        return hits

    def _check_block(
        self, slot: Slot, place: int, position: int, count: int
    ) -> list[tuple[int, bool]]:
        """Draft a block of `count` behind a token of a text, and compare up to the first wrong draft.

        Returns for each draft the bucket of its confidence and whether it was right. position: that of the
        token in the scratch sequence.
        """
        self._batch.clear()
        row = self._add_block(slot.tokens[place], position, self._scratch, count)
        self._run_pass(timed=False)
        drafted, checked = list[int](), list[tuple[int, bool]]()
        for offset, token in enumerate(slot.tokens[place + 1 : place + 1 + count]):
            best, bucket = self._predict(row + self._first_row + offset, drafted)
            checked.append((bucket, best == token))
            if best != token:
                break
            drafted.append(best)
        return checked
