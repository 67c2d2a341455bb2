"""A loaded pair: both models, their contexts, their costs, and what was learned of their drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

from localspec.engine.cache.prefixes import Prefix, PrefixStore
from localspec.engine.cache.sessions import ReadingTime, SessionStore
from localspec.engine.llama import Stop, Vocab, backend
from localspec.engine.pair import profile as measuring
from localspec.engine.pair.candidates import Verdict
from localspec.engine.pair.exact import ExactMode
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.models import PairModels, make_pass_runner
from localspec.engine.pair.profile import LearnedProfile, ProfileStore
from localspec.engine.sampling.settings import default_settings, model_defaults
from localspec.engine.sequence import expect_answer_tokens
from localspec.engine.speculation.cost import Clock
from localspec.engine.speculation.drafters.block import BlockDrafter
from localspec.engine.speculation.drafters.draft_model import DraftModel, ModelDrafter
from localspec.engine.speculation.drafters.eagle import EagleDrafter
from localspec.engine.speculation.drafters.mtp import MtpDrafter
from localspec.engine.speculation.drafters.ngram import NgramMemory
from localspec.protocol.frames import EngineSettings, Generate, Loaded, PairFiles, PassCosts

NO_DRAFT = "this pair has no draft model"
MAX_EXACT_LOSS = 0.02  # of time, where exact mode counts as free
MAX_SAVING_S = 6.0  # for saving states of texts at the end; the daemon waits a little longer
# Why a pair that drafts with something else has no drafts of this kind.
_WITHOUT = {
    ModelDrafter.kind: NO_DRAFT,
    EagleDrafter.kind: "this pair has no EAGLE-3 draft",
    BlockDrafter.kind: "this pair has no DFlash or DSpark draft",
    MtpDrafter.kind: "this pair has another draft, and MTP heads are not used beside one",
}


@dataclass(eq=False)
class LoadedPair:
    """Everything that lives as long as the pair is loaded; `load_pair` makes one.

    shared: the lane of all requests except those in exact mode. no_rollback: why drafts cannot be taken back,
    if they cannot. no_draft: why there is no `drafter`, if there is none. notes: what was reduced because of
    too little memory, in sentences. verdict: how well the drafter predicted the target, if this load compared
    them. memory: earlier texts, to draft from.
    """

    files: PairFiles
    models: PairModels
    shared: Lane
    exact: ExactMode
    drafter: DraftModel | None
    no_rollback: str | None
    no_draft: str
    chooses_on_device: bool
    learned: LearnedProfile
    profile: ProfileStore
    prefixes: PrefixStore
    sessions: SessionStore
    notes: list[str]
    verdict: Verdict | None = None
    memory: NgramMemory = field(default_factory=NgramMemory)

    @property
    def settings(self) -> EngineSettings:
        """The settings as they could be applied."""
        return self.models.settings

    @property
    def n_ctx(self) -> int:
        return self.models.n_ctx

    @property
    def vocab(self) -> Vocab:
        return self.models.target.vocab

    @property
    def lanes(self) -> list[Lane]:
        """The shared lane, and the exact one once it is made."""
        return [self.shared] if self.exact.made is None else [self.shared, self.exact.made]

    @cached_property
    def defaults(self) -> dict[str, float]:
        """The default sampling settings: those of the configuration, else those of the target's file."""
        return {**model_defaults(self.models.target.metadata), **self.files.sampling}

    @property
    def chat_template(self) -> str | None:
        return self.files.chat_template or self.models.target.chat_template

    def get_drafter(self, lane: Lane) -> DraftModel | None:
        """Return what drafts for a lane: a draft model, heads, or None."""
        return lane.drafter or self.drafter

    def why_no_drafts(self, kind: str) -> str:
        """Return why a request for this kind of drafts gets none from a model, as a clause."""
        draft = self.models.draft
        drafts_with = draft.sidecar or ModelDrafter.kind if draft else None
        if drafts_with == "dspark":
            drafts_with = BlockDrafter.kind
        may_have_heads = kind == MtpDrafter.kind and draft is None
        if kind in _WITHOUT and kind != drafts_with and not may_have_heads:
            return _WITHOUT[kind]
        if kind == MtpDrafter.kind and self.no_draft == NO_DRAFT:
            return "this model has no MTP heads"
        return self.no_draft

    def busy_s(self) -> float:
        """Return the seconds spent in llama.cpp's passes so far."""
        passes_s = sum(lane.busy_s for lane in self.lanes)
        return passes_s + sum(drafter.busy_s for drafter in self._drafters)

    def spent_s(self) -> float:
        """Return the seconds spent in passes and on drafting so far."""
        return self.busy_s() + sum(drafter.own_s for drafter in self._drafters)

    def drafting_ms(self) -> float:
        """Return the milliseconds that all drafting so far should have taken."""
        return sum(drafter.expected_ms for drafter in self._drafters)

    @property
    def _drafters(self) -> set[DraftModel]:
        return {drafter for lane in self.lanes if (drafter := self.get_drafter(lane)) is not None}

    def info(self) -> Loaded:
        """Return what the daemon needs to know of the pair."""
        draft, compared, vocab = self.models.draft, self.models.compared, self.vocab
        note = compared.note if compared else ""
        heads = self.drafter is not None and self.drafter.context.heads
        drafts_with = draft.description if draft else "its own MTP heads" if heads else None
        if drafts_with and self.files.draft == self.files.tuned_draft:
            drafts_with += " (tuned)"
        costs = self.learned.costs
        drafting_ms = costs.draft.as_dict() if costs.draft else {}
        backend_name = backend() if self.settings.n_gpu_layers else "cpu"
        return Loaded(
            name=self.files.name,
            target_description=self.models.target.description,
            draft_description=drafts_with,
            n_ctx=self.n_ctx,
            parallel=self.models.parallel,
            chat_template=self.chat_template,
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            speculation=self.no_rollback or (None if self.drafter else self.no_draft),
            notes=self.notes + ([f"{note[:1].upper()}{note[1:]}."] if note else []),
            backend=" + ".join([backend_name, *self.models.machines]),
            sampling_defaults=default_settings(self.defaults),
            costs=PassCosts(costs.target.as_dict(), drafting_ms, round(costs.overhead_ms, 4)),
            reading=self.shared.reading.expected,
        )

    def measure_again(self, stop: Stop | None, clock: Clock) -> None:
        """Measure passes once more, and use the result if less disturbed than the last one.

        A draft that reads the target's cache is not measured.

        Raises:
            Aborted: `stop` has ended a pass.
            NoKvSlot: Texts fill a context.
        """
        lane, drafter, steps = self.shared, self.drafter, self.learned.costs.draft
        # A pass that is stopped could harm the recurrent states of other texts.
        lane.context.stop = stop if lane.slots.cuttable else None
        run = make_pass_runner(lane.context, lane.batch, sequence=lane.slots.empty_one())
        target, draft = measuring.measure_widths(run, 0.7 * measuring.BUDGET_S, clock=clock), None
        if drafter is not None and steps is not None and not drafter.context.borrows:
            drafter.context.stop = stop
            try:
                deadline, model = time.monotonic() + 0.3 * measuring.BUDGET_S, drafter.context.model
                # Passes of several sequences have more rows than llama.cpp takes of one for a selector.
                limit = model.block_size if model.n_selected else math.inf
                widths = [width for width in steps.as_dict() if width <= limit]
                draft = measuring.measure_passes(drafter.run_width, widths, deadline, clock)
            finally:
                drafter.context.stop = None
        noise = max(target.noise, draft.noise if draft else 0.0)
        if noise < self.learned.noise:
            self.learned.noise = noise
            lane.use_costs(target)
            if drafter is not None and draft is not None:
                drafter.use_costs(draft.ms, draft.change)

    def save(self) -> None:
        """Save what was measured and learned for the next load."""
        self.profile.write(
            {
                **self.learned.as_dict(),
                "exact_width": self.exact.width,
                "attention_ms": self.shared.attention.costs,
                "reading_ms": self.shared.reading.learned_ms,
            }
        )

    def load_saved_prefix(self, tokens: list[int], exact: bool) -> Prefix | None:
        """Load the saved state of a text if it covers more than memory does. Safe from any thread."""
        pays = self.prefixes.copy_cost.restoring_pays
        return self.sessions.load(tokens, self._count_held(tokens, exact), exact=exact, pays=pays)

    def _count_held(self, tokens: list[int], exact: bool) -> int:
        """Return how many tokens of a text need not be read in a lane, as far as memory holds them."""
        held = [lane.slots.estimate_reusable(tokens) for lane in self.lanes if lane.exact == exact]
        return max(*held, self.prefixes.find(tokens, exact=exact)[1], 0)

    def is_exact(self, request: Generate, tokens: list[int]) -> bool:
        """Return whether the exact lane answers a request with this prompt. Safe from any thread.

        If the settings say "free", it does where that costs at most MAX_EXACT_LOSS: compared are what the
        shared lane's last answers took and what is expected of the exact lane, with what each has to read.
        """
        exact = self.settings.exact if request.exact is None else request.exact
        token_ms, reading = self.shared.token_ms, self.shared.reading.expected
        if exact != "free":
            return exact
        if token_ms is None or any(lane.active for lane in self.lanes):
            return False

        def expected_ms(exact: bool, token_ms: float) -> float:
            unread_s = reading.range_seconds(self._count_held(tokens, exact), len(tokens))
            return 1e3 * unread_s + expect_answer_tokens(request) * token_ms

        exact_ms = expected_ms(True, self.exact.expected_ms())
        return exact_ms <= (1 + MAX_EXACT_LOSS) * expected_ms(False, token_ms)

    def forget(self, conversation: str | None) -> None:
        """Drop the caches of a conversation, or of all if it is None, in memory and on disk."""
        for lane in self.lanes:
            lane.slots.forget_conversation(conversation)
        self.prefixes.forget(conversation)
        self.memory.forget(conversation)
        self.sessions.forget(conversation)
        self.sessions.allow_saving()

    def _find_texts(self, reading_time: ReadingTime) -> Iterator[Prefix]:
        """Yield the texts in memory to save: those in slots first, each group most recently used first."""
        is_wanted = partial(self.sessions.is_worth_saving, reading_time=reading_time)
        for lane in self.lanes:
            for slot in sorted(filter(lane.slots.can_save, lane.slots), key=lambda s: -s.last_used):
                if is_wanted(slot.conversation, slot.cached, lane.exact):
                    yield lane.slots.copy_state(slot)
        for prefix in self.prefixes:
            if is_wanted(prefix.conversation, prefix.tokens, prefix.exact):
                yield prefix

    def close(self) -> None:
        """Save what is worth it and free everything, contexts before models."""
        reading_time = self.shared.reading.expected.range_seconds
        self.sessions.save_texts(self.memory.texts)
        self.sessions.save_all(self._find_texts(reading_time), MAX_SAVING_S, reading_time)
        self.sessions.close()
        self.save()
        self.models.opened.close()
