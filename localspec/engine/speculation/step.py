"""What one sequence brings to a pass, and how it drafts as long as its request runs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import NoKvSlot, NotFinite
from localspec.engine.speculation.acceptance import MAX_LIMIT, Belief, Calibration, Floats
from localspec.engine.speculation.depth import Candidate, DepthPolicy, FixedDepth, MeasuredDepth
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.verification import Verifier

MOST_REST = 8  # rounds in which no drafts are asked for, after many that did not pay
# What drafts that were looked up may lose an answer, in rounds without any: so many at first, this share of
# all that come, and what they have gained, up to so many (a pass of 64 rows takes 20).
LOSS, LOSS_SHARE, MOST_LOSS = 2.0, 0.02, 32.0


@dataclass(slots=True)
class Drafting:
    """How one sequence drafts, as long as its request runs. reason: why it cannot at all.

    rest: rounds in which it does not look for drafts; missed: looks in a row that brought nothing. spare:
    what drafts that were looked up may still lose, in rounds without any.
    """

    drafters: list[Drafter]
    policy: DepthPolicy
    reason: str | None = None
    rest: int = 0
    missed: int = 0
    spare: float = LOSS

    @classmethod
    def of(
        cls,
        given: Resources,
        calibrations: Mapping[str, Calibration],
        usual_depth: int | None,
        impossible: str | None,
        no_model: str,
    ) -> Drafting:
        """For a new sequence. usual_depth: where the request names none; None: as it pays.

        impossible: why this pair cannot speculate at all, if so; no_model: why no model drafts for it.
        """
        asked = given.asked
        depth = asked.depth if asked.depth is not None else usual_depth
        policy: DepthPolicy = (
            MeasuredDepth() if depth is None else FixedDepth(min(depth, MAX_LIMIT))
        )
        if asked.enabled and depth != 0 and impossible is None:
            drafters = [
                kind(given, Belief(calibrations[kind.kind]))
                for kind in Drafter.kinds
                if kind.serves(given)
            ]
            if drafters:
                return cls(drafters, policy)
        if not asked.enabled:
            reason = "disabled by the request"
        elif asked.depth == 0 or usual_depth == 0:
            reason = "depth 0 was requested"
        else:
            reason = impossible or no_model
        return cls([], policy, reason)

    def looks(self) -> bool:
        """Does it look for drafts in this round? To be asked once in each."""
        self.rest -= 1
        return self.rest < 0 or self.policy.fixed

    def looked(self, found: bool, most: int) -> None:
        """A look has brought tokens, or none. most: rounds to rest, after many that brought none."""
        self.missed = 0 if found else min(self.missed + 1, MOST_REST)
        self.rest = min(2**self.missed // 2, most)

    def affords(self, price: Floats) -> int:
        """The most known tokens that it may try. price[k]: what a round with k of them costs more, in rounds
        without any.
        """
        return int(np.flatnonzero(price <= self.spare)[-1])

    def settle(self, price: float, gained: int) -> None:
        """A round has brought so many tokens more, at this price."""
        self.spare = min(max(self.spare + LOSS_SHARE + gained - price, 0.0), MOST_LOSS)

    def stop(self, drafter: Drafter, slot: Slot, error: Exception) -> None:
        """A kind of drafts cannot serve this sequence any more; its answer goes on without."""
        drafter.close(slot)
        self.drafters = [each for each in self.drafters if each is not drafter]
        if isinstance(error, NoKvSlot):
            self.reason = f"the context of {drafter.called} is full"
        elif isinstance(error, NotFinite):
            self.reason = f"NaN or infinite values from {drafter.called}"
        else:
            traceback.print_exception(error)
            self.reason = "drafting failed"


@dataclass(slots=True, eq=False)
class SequenceStep:
    """One sequence's part of a pass: tokens to read, then drafts to verify.

    drafter, candidate: what it was decided to draft, None for nothing. base: rows of the pass, as it was
    decided, but for this step's drafts; deepest: drafts of the other step that has most. price: of known
    tokens, in rounds without them; None: none are tried, or the caller foretold them. looked: whether it was
    asked for drafts. first_row: the row of the last token read; -1 for a chunk in the middle of a
    prompt. read_row: the row of the first token read. repeats: the pass brought nothing and is made again.
    error: what ends this sequence alone.
    """

    read: list[int]
    drafts: DraftRequest
    drafting: Drafting
    verifier: Verifier
    drafter: Drafter | None = None
    candidate: Candidate | None = None
    base: int = 0
    deepest: int = 0
    price: float | None = None
    looked: bool = False
    first_row: int = -1
    read_row: int = -1
    repeats: bool = False
    error: Exception | None = None

    @property
    def rows(self) -> int:
        return len(self.read) + len(self.drafts.tokens)

    def drop_drafts(self) -> None:
        """The pass brings one token for this step."""
        self.drafter = self.candidate = None
        self.drafts.cut(0)
