"""What one sequence brings to a pass, and how it drafts while its request runs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import DecodeFatal, NoKvSlot, NotFinite, is_picture
from localspec.engine.speculation.acceptance import MAX_DRAFTS, Belief, Calibration
from localspec.engine.speculation.budget import Balance, Budget
from localspec.engine.speculation.depth import Candidate
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.verification import Verifier


@dataclass(slots=True)
class Drafting:
    """How one sequence drafts while its request runs.

    depth: the number of drafts of each round, whatever they cost; None: as many as pay.
    reason: why it cannot draft at all.
    """

    drafters: list[Drafter]
    depth: int | None = None
    reason: str | None = None
    budget: Budget = field(default_factory=Budget)

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
        depth = None if depth is None else min(depth, MAX_DRAFTS)
        if speculative.enabled and depth != 0 and why_impossible is None:
            drafters = [
                kind(resources, Belief(calibrations[kind.kind]))
                for kind in Drafter.kinds
                if kind.serves(resources)
            ]
            if drafters:
                return cls(drafters, depth, budget=resources.budget)
        if not speculative.enabled:
            reason = "disabled by the request"
        elif speculative.depth == 0 or default_depth == 0:
            reason = "depth 0 was requested"
        else:
            reason = why_impossible or why_no_model
        return cls([], depth, reason)

    @property
    def fixed(self) -> bool:
        """Whether the depth is used whatever it costs."""
        return self.depth is not None

    def read_along(self, slot: Slot) -> None:
        """Read what the target has read, where a draft needs its states.

        Raises:
            DecodeFatal: A context is lost.
        """
        for drafter in self.drafters:
            try:
                drafter.read_along(slot)
            except DecodeFatal:
                raise
            except Exception as error:  # the answer goes on without this kind of drafts
                self.stop(drafter, slot, error)

    def begin_search(self) -> bool:
        """Whether to search for drafts in this round. Must be called once per round."""
        return not self.budget.searches.take() or self.fixed

    def end_search(self, has_found: bool, max_backoff: int) -> None:
        """Note whether a search has found drafts. max_backoff: most rounds to wait if it has not."""
        if has_found:
            self.budget.searches.end()
        else:
            self.budget.searches.begin(max_backoff)

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
    most. drafted: tokens that were drafted, of which not all need be verified.
    cost_ms: cost of the drafts beyond a plain round, as the budget bears it; None: outside the budget.
    plain_ms: the sequence's share of a plain round.
    searched: whether a search for drafts was made. explores: whether it has more drafts than seem to pay.
    first_row: row of the last token read; -1 for a chunk in the middle of a prompt. read_row: row of the
    first token read.
    n_rows: rows of an indivisible picture that were put into passes.
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
    drafted: int = 0
    cost_ms: float | None = None
    plain_ms: float = 0.0
    searched: bool = False
    explores: bool = False
    first_row: int = -1
    read_row: int = -1
    n_rows: int = 0
    repeats: bool = False
    error: Exception | None = None

    @property
    def balance(self) -> Balance:
        """The part of the budget that pays for the chosen drafts."""
        budget = self.drafting.budget
        return budget.known if self.candidate and self.candidate.tokens else budget.model

    @property
    def reads_picture(self) -> bool:
        """Whether it reads a picture, for which it needs a pass without tokens."""
        return is_picture(self.read[0])

    @property
    def rows(self) -> int:
        return len(self.read) + len(self.drafts.tokens)

    def drop_drafts(self) -> None:
        """Remove the drafts, so that the pass brings one token for this step."""
        self.drafter = self.candidate = None
        self.drafts.cut(0)
