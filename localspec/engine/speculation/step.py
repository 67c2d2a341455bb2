"""What one sequence brings to a pass, and how it drafts while its request runs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import NoKvSlot, NotFinite
from localspec.engine.speculation.acceptance import MAX_DRAFTS, Belief, Calibration, Floats
from localspec.engine.speculation.depth import Candidate, DepthPolicy, FixedDepth, MeasuredDepth
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.verification import Verifier

MAX_REST_ROUNDS = 8  # longest pause in searching for drafts, after many searches that did not pay
# Loss budget for drafts from lookup, in plain rounds per answer: initial budget, refill per round, cap. Gains
# refill it as well. A pass of 64 rows costs about 20 rounds.
LOSS_BUDGET_ROUNDS, LOSS_REFILL_ROUNDS, MAX_LOSS_BUDGET_ROUNDS = 2.0, 0.02, 32.0


@dataclass(slots=True)
class Drafting:
    """How one sequence drafts while its request runs. reason: why it cannot draft at all.

    rest: rounds in which it does not search for drafts. missed: searches in a row that found nothing.
    spare: what is left of the loss budget for drafts from lookup, in plain rounds.
    """

    drafters: list[Drafter]
    policy: DepthPolicy
    reason: str | None = None
    rest: int = 0
    missed: int = 0
    spare: float = LOSS_BUDGET_ROUNDS

    @classmethod
    def create(
        cls,
        resources: Resources,
        calibrations: Mapping[str, Calibration],
        default_depth: int | None,
        why_impossible: str | None,
        why_no_model: str,
    ) -> Drafting:
        """Set up the drafting of a new sequence.

        default_depth: depth where the request names none; None: the policy decides.
        why_impossible: why this pair cannot speculate at all, if so. why_no_model: why no model drafts.
        """
        speculative = resources.asked
        depth = speculative.depth if speculative.depth is not None else default_depth
        policy: DepthPolicy = (
            MeasuredDepth() if depth is None else FixedDepth(min(depth, MAX_DRAFTS))
        )
        if speculative.enabled and depth != 0 and why_impossible is None:
            drafters = [
                kind(resources, Belief(calibrations[kind.kind]))
                for kind in Drafter.kinds
                if kind.serves(resources)
            ]
            if drafters:
                return cls(drafters, policy)
        if not speculative.enabled:
            reason = "disabled by the request"
        elif speculative.depth == 0 or default_depth == 0:
            reason = "depth 0 was requested"
        else:
            reason = why_impossible or why_no_model
        return cls([], policy, reason)

    def begin_search(self) -> bool:
        """Whether to search for drafts in this round. Must be called once per round."""
        self.rest -= 1
        return self.rest < 0 or self.policy.fixed

    def end_search(self, has_found: bool, max_rest: int) -> None:
        """Note whether a search has found drafts. max_rest: limit of the pause after searches in vain."""
        self.missed = 0 if has_found else min(self.missed + 1, MAX_REST_ROUNDS)
        self.rest = min(2**self.missed // 2, max_rest)

    def max_affordable(self, price: Floats) -> int:
        """Return how many known tokens the loss budget allows to try.

        price[k]: additional cost of a round with k of them, in plain rounds.
        """
        return int(np.flatnonzero(price <= self.spare)[-1])

    def book_price(self, price: float, gained: int) -> None:
        """Book the price of a round with known tokens, and the tokens that it has gained."""
        self.spare = min(
            max(self.spare + LOSS_REFILL_ROUNDS + gained - price, 0.0), MAX_LOSS_BUDGET_ROUNDS
        )

    def stop(self, drafter: Drafter, slot: Slot, error: Exception) -> None:
        """Remove a kind of drafts that failed for this sequence; its answer goes on without it."""
        drafter.close(slot)
        self.drafters = [other for other in self.drafters if other is not drafter]
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

    drafter, candidate: the chosen kind of drafts; None: no drafts.
    base: rows of the pass without this step's drafts, as decided. deepest: drafts of the other step with
    most. price: cost of known tokens in plain rounds; None: none are tried, or the request predicted them.
    looked: whether a search for drafts was made.
    first_row: row of the last token read; -1 for a chunk in the middle of a prompt. read_row: row of the
    first token read.
    repeats: the pass brought nothing and is made again. error: an error that ends this sequence alone.
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
        """Remove the drafts, so that the pass brings one token for this step."""
        self.drafter = self.candidate = None
        self.drafts.cut(0)
