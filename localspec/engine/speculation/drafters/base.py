"""What a kind of drafts is: it says what it could bring and at what cost, brings it, and learns from
what became of it. A new kind is a file with a `Drafter` in it, imported in this folder's `__init__.py`.
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
from localspec.engine.speculation.acceptance import Belief
from localspec.engine.speculation.depth import Candidate
from localspec.protocol.frames import Speculative

if TYPE_CHECKING:
    from localspec.engine.speculation.drafters.model import DraftModel
    from localspec.engine.speculation.drafters.ngram import NgramIndex


@dataclass(slots=True, eq=False)
class DraftRequest:
    """One sequence that wants drafts in one round, and what it got.

    limit: most tokens. sampler: draw from the draft's own distribution with it (rejection rule); None:
    the draft's best token. more: asked after each token whether another is wanted. hurried: a prompt is
    read in the same pass, whose owner waits. generated: tokens
    of the answer so far; left: those that may still come. `tokens`, `buckets` and `probs` go together,
    but that only drawn drafts have `probs`.
    """

    slot: Slot
    limit: int
    sampler: Sampler | None = None
    more: Callable[[DraftRequest], bool] = lambda _: False
    hurried: bool = False
    generated: int = 0
    left: int = 0
    tokens: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)

    def cut(self, count: int) -> None:
        """Keep the first `count` drafts."""
        self.tokens, self.buckets = self.tokens[:count], self.buckets[:count]
        self.probs = self.probs[:count]


@dataclass(frozen=True, slots=True)
class Resources:
    """What there is to draft with for one sequence: of its request and of the pair.

    reject: its drafts are verified by the rejection rule.
    """

    asked: Speculative
    reject: bool
    matcher: Guide | None
    lookup: NgramIndex
    model: DraftModel | None
    slots: Slots


class Drafter(ABC):
    """Drafts of one kind for one sequence.

    What target and draft model have read of a slot is rolled back by `Slots.commit`, after each pass.
    rank: with a fixed depth the kind of the lowest drafts. initial_acceptance: the rate expected with a
    pair nobody has seen at work; learned: what is known of any pair, as `Calibration.as_dict` gives it;
    certain: as a calibration's. costly: each draft takes passes of its own. called: what a person is
    told of what drafts. predicted: the drafts come from a text the caller predicts. proven: one of its
    drafts was kept in this text.
    """

    kinds: ClassVar[list[type[Drafter]]] = []  # all there are, by rank
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
    def asked_for(cls, asked: Speculative) -> bool:
        """Does a request leave the choice of drafts to us, or name this kind?"""
        return asked.kind in ("auto", cls.kind)

    @classmethod
    @abstractmethod
    def serves(cls, given: Resources) -> bool:
        """May it draft for this request?"""

    def __init__(self, given: Resources, belief: Belief) -> None:
        self.belief = belief
        self.proven = False

    @abstractmethod
    def offer(self, request: DraftRequest) -> Candidate | None:
        """What it could bring now, and at what cost; None: nothing. Tokens that are known at once, at
        no cost, are in it already.
        """

    def known(self, tokens: list[int], bucket: int) -> Candidate | None:
        """An offer of tokens that cost nothing, all of one confidence; None where there are none."""
        if not tokens:
            return None
        return Candidate(self.belief, len(tokens), 0.0, 0.0, [bucket] * len(tokens), tokens)

    def propose(self, requests: list[DraftRequest]) -> None:  # noqa: B027 - not all kinds need it
        """Fill requests with drafts until their `more` says no: of all sequences that take this kind in
        a round, in one call. Not called where the tokens were known.

        Raises:
            NoKvSlot: the running requests fill the draft's context.
            NotFinite: the draft's logits are no numbers.
            DecodeFatal: a context is lost.
        """

    def observe(self, request: DraftRequest, kept: list[int], used: bool) -> None:
        """A pass has been verified: `kept` are its tokens. used: the drafts in `request` were this
        kind's; they tell something up to the first rejection.
        """
        if used:
            accepted = len(kept) - 1
            self.proven = self.proven or accepted > 0
            for at in range(min(accepted + 1, len(request.tokens))):
                self.belief.observe(request.buckets[at], at < accepted)

    def elapsed(  # noqa: B027 - as propose
        self, used: bool, tokens: int, spent_ms: float, plain_ms: float
    ) -> None:
        """A round took `spent_ms` and wrote so many tokens; plain decoding takes `plain_ms` for one."""

    def probe(self, slot: Slot, left: int) -> bool:
        """Where its drafts do not pay, see now and then whether they would; False: not now.

        left: tokens that may still come.
        """
        return False

    def close(self, slot: Slot) -> None:  # noqa: B027 - as propose
        """It drafts no more for this sequence: whatever it holds of the text goes."""
