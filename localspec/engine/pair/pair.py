"""A loaded pair: both models, their contexts, what they cost and what is known of their drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from localspec.engine.cache.prefixes import Prefix, Prefixes
from localspec.engine.cache.sessions import SessionStore
from localspec.engine.llama import Vocab, backend
from localspec.engine.pair.exact import ExactMode
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.models import Models
from localspec.engine.pair.profile import Learned, ProfileStore
from localspec.engine.sampling.settings import model_defaults, unasked
from localspec.engine.speculation.drafters.model import DraftModel, ModelDrafter
from localspec.engine.speculation.drafters.mtp import MtpDrafter
from localspec.engine.speculation.drafters.ngram_memory import Memory
from localspec.protocol.frames import EngineSettings, Loaded, PairFiles

NO_DRAFT = "this pair has no draft model"
SAVING_S = 6.0  # for saving texts' states at the end; the daemon waits a little longer


@dataclass(frozen=True, eq=False)
class Pair:
    """Everything that lives as long as the pair is loaded; `load_pair` makes one.

    shared: the lane of all requests but those in exact mode. no_rollback: why drafts cannot be taken
    back, if they cannot. no_draft: why there is no `drafter`, where there is none. notes: what had to
    give for want of memory, in sentences. memory: of texts, to draft from.
    """

    files: PairFiles
    models: Models
    shared: Lane
    exact: ExactMode
    drafter: DraftModel | None
    no_rollback: str | None
    no_draft: str
    chooses_on_device: bool
    learned: Learned
    profile: ProfileStore
    prefixes: Prefixes
    sessions: SessionStore
    notes: list[str]
    memory: Memory = field(default_factory=Memory)

    @property
    def settings(self) -> EngineSettings:
        """As they could be carried out."""
        return self.models.settings

    @property
    def n_ctx(self) -> int:
        return self.models.n_ctx

    @property
    def vocab(self) -> Vocab:
        return self.models.target.vocab

    @property
    def lanes(self) -> list[Lane]:
        """The shared one, and the exact one once it is made."""
        return [self.shared] if self.exact.made is None else [self.shared, self.exact.made]

    @cached_property
    def defaults(self) -> dict[str, float]:
        """How it wants to be sampled: as a person says, else as the target's own file does."""
        return {**model_defaults(self.models.target.metadata), **self.files.sampling}

    @property
    def chat_template(self) -> str | None:
        return self.files.chat_template or self.models.target.chat_template

    def drafter_of(self, lane: Lane) -> DraftModel | None:
        """What drafts for it: a draft model, or heads."""
        return lane.drafter or self.drafter

    def why_no_drafts(self, kind: str) -> str:
        """Why a request that names this kind of drafts gets none of a model, as a clause."""
        if kind == ModelDrafter.kind and (self.models.draft is None or self.models.sidecar):
            return NO_DRAFT
        if kind == MtpDrafter.kind and self.models.draft and not self.models.sidecar:
            return "this pair has a draft model, and MTP heads are not used beside one"
        if kind == MtpDrafter.kind and self.no_draft == NO_DRAFT:
            return "this model has no MTP heads"
        return self.no_draft

    def busy_s(self) -> float:
        """Seconds spent inside llama.cpp's passes so far."""
        passes = sum(lane.busy_s for lane in self.lanes)
        return passes + sum(each.busy_s for each in self._drafters)

    def spent_s(self) -> float:
        """Seconds of passes so far, and of all that drafting takes: what no round has besides."""
        return self.busy_s() + sum(each.own_s for each in self._drafters)

    @property
    def _drafters(self) -> set[DraftModel]:
        found = (self.drafter_of(lane) for lane in self.lanes)
        return {each for each in found if each is not None}

    def info(self) -> Loaded:
        """What the daemon is told of it."""
        target, draft, compared = self.models.target, self.models.draft, self.models.compared
        vocab = self.vocab
        note = compared.note if compared else ""
        heads = self.drafter is not None and self.drafter.context.heads
        own = backend() if self.settings.n_gpu_layers else "cpu"
        return Loaded(
            name=self.files.name,
            target_description=target.description,
            draft_description=draft.description
            if draft
            else "its own MTP heads"
            if heads
            else None,
            n_ctx=self.n_ctx,
            parallel=self.models.parallel,
            chat_template=self.chat_template,
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            speculation=self.no_rollback or (None if self.drafter else self.no_draft),
            notes=self.notes + ([f"{note[:1].upper()}{note[1:]}."] if note else []),
            backend=" + ".join([own, *self.models.machines]),
            sampling_defaults=unasked(self.defaults),
            profile=self.learned.costs.as_dict(),
            reading=self.shared.reading.expected,
        )

    def save(self) -> None:
        """Keep what was measured and learned for the next load."""
        self.profile.write(
            {
                **self.learned.as_dict(),
                "exact_width": self.exact.width,
                "attention_ms": self.shared.attention.costs,
            }
        )

    def saved(self, tokens: list[int], exact: bool) -> Prefix | None:
        """What a file has of a text's beginning, where that is more than memory has; from any thread."""
        held = [lane.slots.about(tokens) for lane in self.lanes if lane.exact == exact]
        held.append(self.prefixes.find(tokens, exact=exact)[1])
        pays = self.prefixes.copy_cost.pays
        return self.sessions.load(tokens, max(held), exact=exact, pays=pays)

    def forget(self, conversation: str | None) -> None:
        """Drop what is kept of a conversation, with None of all, in memory and on disk."""
        for lane in self.lanes:
            lane.slots.forget_conversation(conversation)
        self.prefixes.forget(conversation)
        self.memory.forget(conversation)
        self.sessions.forget(conversation)
        self.sessions.forgotten()

    def _save_texts(self) -> None:
        """Those in memory, the ones in slots first, each where it was used last."""
        found: list[Callable[[], Prefix]] = []
        reading = self.shared.reading.expected.of
        wanted = partial(self.sessions.wanted, reading=reading)
        for lane in self.lanes:
            for slot in sorted(lane.slots, key=lambda s: -s.last_used):
                if lane.slots.savable(slot) and wanted(slot.conversation, slot.cached, lane.exact):
                    found.append(partial(lane.slots.snapshot, slot))
        for prefix in self.prefixes:
            if wanted(prefix.conversation, prefix.tokens, prefix.exact):
                found.append(partial(_same, prefix))
        self.sessions.save_all(found, SAVING_S, reading)
        self.sessions.close()

    def close(self) -> None:
        """Save what is to be saved and free everything, contexts before models."""
        self._save_texts()
        self.save()
        self.models.opened.close()


def _same(prefix: Prefix) -> Prefix:
    return prefix
