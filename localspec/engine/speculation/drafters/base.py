"""The interface of a kind of drafts.

A drafter offers what it could bring and at what cost, brings it, and learns from the result. A new kind is a
file with a `Drafter` subclass, imported in this folder's `__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from localspec.engine.cache.slot import Slot
from localspec.engine.cache.slots import Slots
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.acceptance import Belief, find_bucket
from localspec.engine.speculation.budget import Budget
from localspec.engine.speculation.depth import Candidate
from localspec.protocol.frames import SpeculationSettings

if TYPE_CHECKING:
    from localspec.engine.speculation.drafters.draft_model import DraftModel
    from localspec.engine.speculation.drafters.ngram import NgramIndex


@dataclass(slots=True, eq=False)
class DraftRequest:
    """A sequence's request for drafts in one round, and the drafts that it got.

    limit: most tokens. generated: tokens of the answer so far. left: tokens that may still come.
    depth: tokens that were decided on before any was known. A kind that drafts all at once drafts so many.
    sampler: draws from the draft's own distribution; None: take its best token.
    reject: the drafts are verified by the rejection rule, which needs their `probs`.
    more: called after each token; whether another one is wanted.
    hurried: a prompt is read in the same pass, and its sender waits.
    `tokens`, `buckets` and `probs` belong together, but only drafts of a model under `reject` have `probs`.
    """

    slot: Slot
    limit: int
    sampler: Sampler | None = None
    reject: bool = False
    more: Callable[[DraftRequest], bool] = lambda _: False
    hurried: bool = False
    generated: int = 0
    left: int = 0
    depth: int = 0
    tokens: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)

    def cut(self, count: int) -> None:
        """Keep the first `count` drafts."""
        self.tokens, self.buckets = self.tokens[:count], self.buckets[:count]
        self.probs = self.probs[:count]


@dataclass(frozen=True, slots=True)
class Resources:
    """What there is to draft with for one sequence, from its request and from the pair.

    budget: what the drafts may lose.
    """

    asked: SpeculationSettings
    matcher: Guide | None
    lookup: NgramIndex
    model: DraftModel | None
    slots: Slots
    budget: Budget = field(default_factory=Budget)


class Drafter(ABC):
    """Drafts of one kind for one sequence.

    What target and draft model have read of a slot is rolled back by `Slots.commit` after each pass.

    rank: with a fixed depth, the kind with the lowest rank drafts.
    initial_acceptance: the rate expected with a pair that was never used. learned: the calibration known to
    fit any pair, as from `Calibration.as_dict`. certain: as in `Calibration`.
    costly: each draft takes passes of its own.
    called: the kind's name in messages.
    predicted: the drafts come from a text that the client predicted.
    proven: a draft of this kind was accepted in this text.
    """

    kinds: ClassVar[list[type[Drafter]]] = []  # all kinds, ordered by rank
    kind: ClassVar[str]
    called: ClassVar[str] = "the drafts"
    rank: ClassVar[int]
    initial_acceptance: ClassVar[float]
    learned: ClassVar[Mapping[str, Any] | None] = None
    certain: ClassVar[bool] = False
    costly: ClassVar[bool] = False
    predicted = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Drafter.kinds.append(cls)
        Drafter.kinds.sort(key=lambda kind: kind.rank)

    @classmethod
    def asked_for(cls, speculative: SpeculationSettings) -> bool:
        """Whether a request leaves the kind of drafts open or names this kind."""
        return speculative.kind in ("auto", cls.kind)

    @classmethod
    @abstractmethod
    def serves(cls, resources: Resources) -> bool:
        """Whether this kind can draft for the request."""

    def __init__(self, resources: Resources, belief: Belief) -> None:
        self.belief = belief
        self.proven = False

    @abstractmethod
    def offer(self, request: DraftRequest) -> Candidate | None:
        """Return what it could bring now, and at what cost; None: nothing.

        Tokens that are known at once, at no cost, are already in the candidate.
        """

    def known(self, tokens: list[int], bucket: int) -> Candidate | None:
        """Return an offer of tokens that cost nothing, all in one bucket; None if there are none."""
        if not tokens:
            return None
        return Candidate(self.belief, len(tokens), 0.0, 0.0, [bucket] * len(tokens), tokens)

    def propose(self, requests: list[DraftRequest]) -> None:  # noqa: B027 - not all kinds need it
        """Draft for each request until its `more` returns False.

        Called once per round with all sequences that use this kind, unless the tokens were known.

        Raises:
            NoKvSlot: The running requests fill the draft's context.
            NotFinite: The draft's logits are NaN or infinite.
            DecodeFatal: A context is lost.
        """

    def observe(self, request: DraftRequest, kept_tokens: list[int], used: bool) -> None:
        """Learn from a verified pass that kept `kept_tokens`.

        used: the drafts in `request` were of this kind. They are informative up to the first rejection.
        """
        if used:
            accepted = len(kept_tokens) - 1
            self.proven = self.proven or accepted > 0
            for index in range(min(accepted + 1, len(request.tokens))):
                self.belief.observe(request.buckets[index], index < accepted)

    def observe_round(  # noqa: B027 - as propose
        self, used: bool, tokens: int, spent_ms: float, plain_ms: float
    ) -> None:
        """Learn from a round of `spent_ms` with `tokens` tokens. Plain decoding takes `plain_ms` for one."""

    def probe(self, slot: Slot, remaining: int) -> bool:
        """Check now and then whether drafts that do not pay would pay now. Return False if not this time.

        remaining: tokens that may still come.
        """
        return False

    def read_along(self, slot: Slot) -> None:  # noqa: B027 - as propose
        """Read what the target has read, before its states are dropped. Called before each round."""

    def close(self, slot: Slot) -> None:  # noqa: B027 - as propose
        """Release what it holds of the text, because it drafts no more for this sequence."""


# Tokens that a grammar, or the end of the thoughts, forces: they come next whatever the model predicts.


_CERTAIN_BUCKET = find_bucket(1.0)


class GrammarDrafter(Drafter):
    """The forced tokens of a request with a grammar or a limit to its thoughts."""

    kind, rank, initial_acceptance = "grammar", 0, 0.94

    @classmethod
    def serves(cls, resources: Resources) -> bool:
        return resources.matcher is not None

    def __init__(self, resources: Resources, belief: Belief) -> None:
        super().__init__(resources, belief)
        self._matcher = resources.matcher

    def offer(self, request: DraftRequest) -> Candidate | None:
        assert self._matcher is not None
        return self.known(self._matcher.forced_tokens()[: request.limit], _CERTAIN_BUCKET)
