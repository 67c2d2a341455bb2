"""The draft model: a second GGUF that proposes tokens and keeps its own KV of what it proposed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Batch, Context, Logits, NoKvSlot
from localspec.engine.speculation.acceptance import INITIAL_ACCEPTANCE, Belief, bucket
from localspec.engine.speculation.cost import GUESSED, Clock, CostTable
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.drafters.shared import SharedTokens

# A probe reads so many tokens before the place it looks at: enough to guess well, and never the whole
# text. Of the last rows the guesses are compared with what the target wrote: more would cost the
# draft's output matrix for each, and four hits or misses in a row already say what the text is like.
PROBE_CONTEXT, PROBE_ROWS = 20, 4
PREFILL_WIDTH = 64  # width of the pass whose cost per token stands for a prompt's


KEEP_TAIL = 8  # tokens that are left for the pass of the first draft
PROBE_GAP = 8  # tokens between two probes at least
HURRIED = 16  # tokens that the draft reads at most while somebody waits for a first token
PROBE_LEFT = 32  # with fewer tokens to come there is nothing to win by probing


class ModelDrafter(Drafter):
    """A second model's drafts for one sequence: each costs a pass of that model."""

    kind, rank, initial_acceptance = "draft", 1, INITIAL_ACCEPTANCE
    called = "the draft model"
    costly = True

    @classmethod
    def serves(cls, given: Resources) -> bool:
        model = given.model
        return cls.asked_for(given.asked) and model is not None and model.kind == cls.kind

    def __init__(self, given: Resources, belief: Belief) -> None:
        super().__init__(given, belief)
        assert given.model is not None
        self._model, self._slots = given.model, given.slots
        self._unprobed = 0  # tokens written since drafts were last tried or probed

    def offer(self, request: DraftRequest) -> Candidate | None:
        if request.hurried and self._model.unread(request.slot) > HURRIED:
            return None
        spread = max(min(request.left, 96) / 4, 1.0)  # rounds that a first prefill is spread over
        entry_ms = self._model.prefill_ms(request.slot) / spread
        steps = self._model.steps
        return Candidate(self.belief, request.limit, steps.ms(1), entry_ms, steps=steps)

    def propose(self, requests: list[DraftRequest]) -> None:
        self._model.propose(requests)

    def observe(self, request: DraftRequest, kept: list[int], used: bool) -> None:
        super().observe(request, kept, used)
        if not request.tokens:
            self.belief.fade(len(kept))

    def elapsed(self, used: bool, tokens: int, spent_ms: float, plain_ms: float) -> None:
        if used:
            self._unprobed = 0
            return
        self._unprobed += tokens
        self.belief.calibration.earn(spent_ms, plain_ms)

    def probe(self, slot: Slot, left: int) -> bool:
        if self._unprobed < PROBE_GAP or left < PROBE_LEFT:
            return False
        if not self.belief.calibration.pay(self._model.probe_ms):
            return False
        self._unprobed = 0
        self._model.probe(slot, self.belief)
        return True

    def close(self, slot: Slot) -> None:
        self._slots.roll_back_draft(slot, 0)


class DraftModel:
    """Drafts for several sequences in one pass per depth. Nothing it drafted is read again.

    kind: of the drafters that draft with it.
    """

    kind: ClassVar[str] = ModelDrafter.kind

    def __init__(
        self,
        context: Context,
        batch: Batch,
        costs: CostTable,
        make_room: Callable[[], bool],
        scratch: int,
        shared: SharedTokens,
        clock: Clock = time.perf_counter,
        pass_s: float = 0.0,
        gap_s: float = 0.0,
    ) -> None:
        """make_room: called when the KV is full; frees some, or says False. scratch: a sequence of the
        context that no slot uses. shared: between the target's ids and the draft's. pass_s: seconds
        that a pass should take at most, gap_s: that reading texts may take in a round, for which all
        others wait; 0: any number.
        """
        self._shared = shared
        self._make_room = make_room
        self._clock = clock
        self._pass_s, self._gap_s = pass_s, gap_s
        self._scratch = scratch
        self.context = context
        self._batch = batch
        self._costs = costs
        self.busy_s = 0.0  # time inside llama.cpp
        self.own_s = 0.0  # time that drafting took besides
        # Of one more draft, all that it takes, by how many sequences draft together.
        self.steps = CostTable({m: costs.ms(m) for m in (1, 2, 4, 8)}, GUESSED)
        self.probe_ms = costs.ms(PROBE_CONTEXT + PROBE_ROWS)  # of a probe; corrected by each

    def begin(self, slot: Slot) -> int:
        """The first token of a slot that the draft model has to read."""
        return slot.n_past_draft

    def unread(self, slot: Slot) -> int:
        """Tokens of a slot the draft model has not read (the last is read by the first draft)."""
        return len(slot.tokens) - self.begin(slot)

    def prefill_ms(self, slot: Slot) -> float:
        """What prefilling a slot's unread text would cost, beyond the token a first draft reads anyway."""
        return max(self.unread(slot) - 1, 0) * self.token_prefill_ms

    @property
    def token_prefill_ms(self) -> float:
        """What prefill costs per token, in wide passes."""
        return self._costs.per_token_ms(PREFILL_WIDTH)

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        """Fill each request with drafts until its `more` says no. One whose text is long gets none until
        enough of it is read, a part in each round.

        Raises:
            NoKvSlot: the running requests fill the draft's context.
            NotFinite: the draft model's logits are no numbers.
        """
        start, busy = self._clock(), self.busy_s
        active = self._read([request for request in requests if request.more(request)])
        while active:
            begun, single = self._clock(), active[0].tokens
            rows = self._next_rows(active)
            self._pass()
            for request, (row, length) in zip(active, rows, strict=True):
                self._has_read(request, row, length)
                self._choose(request, self._proposals(row))
            if single:  # the first step also reads what was accepted
                self.steps.observe(len(rows), (self._clock() - begun) * 1e3)
            active = [request for request in active if request.more(request)]
        self.own_s += self._clock() - start - (self.busy_s - busy)

    def _next_rows(self, requests: Sequence[DraftRequest]) -> list[tuple[int, int]]:
        """Fill the batch with what each has not read; its last row, and its length with it."""
        self._batch.clear()
        rows = []
        for request in requests:
            slot, drafted = request.slot, request.tokens
            length = len(slot.tokens) + len(drafted)
            if drafted:
                row = self._add_draft(request, length - 1)
            else:
                begin = self.begin(slot)
                row = self._add_text(slot, begin, length, begin, slot.draft_id)
            rows.append((row, length))
        return rows

    def _add_text(
        self, slot: Slot, start: int, end: int, place: int, sequence: int, wanted: int = 1
    ) -> int:
        """Put tokens [start, end) of a slot's text into the batch, at places of a sequence from `place`
        on, of which the last `wanted` get logits. Returns the last row.
        """
        row = -1
        for at in range(start, end):
            token = self._shared.shown(slot.tokens[at])
            row = self._batch.add(token, place + at - start, sequence, at >= end - wanted)
        return row

    def _add_draft(self, request: DraftRequest, place: int) -> int:
        """Put the last draft of a request into the batch; returns its row."""
        token = self._shared.shown(request.tokens[-1])
        return self._batch.add(token, place, request.slot.draft_id, True)

    def _has_read(self, request: DraftRequest, row: int, length: int) -> None:
        """The last pass has read a request's text up to `length`, in its row `row`."""
        request.slot.draft_has_read(length)

    def _read(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Read the texts, as far as there is time; those whose text is read."""
        ready, left = [], self._tokens_in(self._gap_s)
        for request in requests:
            slot = request.slot
            before, end = slot.n_past_draft, len(slot.tokens) - 1 - KEEP_TAIL
            self._prefill(slot, min(end, before + left))
            left -= max(slot.n_past_draft - before, 0)
            if slot.n_past_draft >= end:
                self._mark(slot)
                ready.append(request)
        return ready

    def _tokens_in(self, seconds: float) -> int:
        """How many tokens of a text are read in that time, at least one; 0 seconds: any number."""
        return max(int(seconds * 1e3 / self.token_prefill_ms), 1) if seconds else 1 << 31

    def _proposals(self, row: int) -> Logits:
        return self._shared.proposals(self.context.finite(row))

    def _mark(self, slot: Slot) -> None:
        """Keep a state that cannot be cut, for Slots to return to after a rejection."""
        if not self.context.cuttable and slot.n_past_draft:
            slot.draft_mark = slot.n_past_draft, self.context.save(slot.draft_id, partial=True)

    def _choose(self, request: DraftRequest, logits: Logits) -> None:
        if request.sampler is None:
            token = int(logits.argmax())
            confidence = probability(logits, token)
        else:
            history = request.slot.tokens + request.tokens
            row = request.sampler.adjusted(logits, history)
            place = request.generated + len(request.tokens)
            probs = request.sampler.distribution(row, place)
            token = probs.pick(request.sampler.uniform())
            confidence = probs.of(token)
            request.probs.append(probs)
        request.tokens.append(token)
        request.buckets.append(bucket(confidence))

    def probe(self, slot: Slot, belief: Belief) -> None:
        """Would the draft model have seen the end of a text coming that was written without it?

        One pass over the last tokens in a sequence of their own: the text before them stays unread, so
        looking costs the same in texts of any length.
        """
        start = self._clock()
        end = len(slot.tokens) - 1
        begin = max(end - PROBE_CONTEXT - PROBE_ROWS, 0)
        self._batch.clear()
        wanted = min(PROBE_ROWS, end - begin)
        last = self._add_text(slot, begin, end, 0, self._scratch, wanted)
        for at, hit in self._foresees(last, slot.tokens[end + 1 - wanted :]):
            belief.observe(at, hit)
        self.probe_ms += 0.3 * ((self._clock() - start) * 1e3 - self.probe_ms)

    def foresees(self, tokens: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, bool]]:
        """Would it have drafted what the target has `chosen` after each of the last `tokens` of a text? The
        bucket of its confidence, and whether; of so many as a pass of it may have logits.
        """
        self._batch.clear()
        last = -1
        for at, token in enumerate(tokens):
            wanted = at >= len(tokens) - len(chosen)
            last = self._batch.add(self._shared.shown(token), at, self._scratch, wanted)
        return self._foresees(last, chosen)

    def _foresees(self, last: int, chosen: Sequence[int]) -> list[tuple[int, bool]]:
        """The same of the text in the batch, whose last row is `last`. It goes out again."""
        try:
            self._pass(timed=False)
        finally:
            self.context.remove(self._scratch, 0)
        found = []
        for row, token in enumerate(chosen, start=last + 1 - len(chosen)):
            logits = self._proposals(row)
            best = int(logits.argmax())
            found.append((bucket(probability(logits, best)), best == token))
        return found

    def _prefill(self, slot: Slot, end: int) -> None:
        """Read tokens up to `end` in chunks."""
        most = min(self._batch.capacity, self._tokens_in(self._pass_s))
        while (size := min(end - slot.n_past_draft, most)) > 0:
            start = slot.n_past_draft
            self._batch.clear()
            self._add_text(slot, start, start + size, start, slot.draft_id, wanted=0)
            self._pass(timed=False)
            slot.draft_has_read(slot.n_past_draft + size)

    def _pass(self, timed: bool = True) -> float:
        start = self._clock()
        while True:
            try:
                self.context.decode(self._batch)
                break
            except NoKvSlot:
                if not self._make_room():
                    raise
        self.context.synchronize()
        spent = self._clock() - start
        self.busy_s += spent
        if timed:
            self._costs.observe(self._batch.rows, spent * 1e3)
        return spent


def probability(logits: Logits, token: int) -> float:
    """Softmax probability of one token, within 1e-2 of the whole row's: tokens 16 nats below it are
    left out, since the exponential of a whole row costs more than everything else here.
    """
    near = logits[logits >= logits[token] - 16.0]
    total = float(np.exp(near - logits[token]).sum())
    return 1.0 / total if total > 0 else 0.0
