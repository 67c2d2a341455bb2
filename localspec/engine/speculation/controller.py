"""Which drafts each sequence brings to the next pass: of which kind, and how deep.

`next` decides and drafts for all sequences of a pass together, `observe` learns what became of it, and
`probe` sees now and then whether drafts that do not pay would.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from localspec.engine.cache.slot import Slot
from localspec.engine.llama import DecodeFatal, NoKvSlot, NotFinite
from localspec.engine.speculation.acceptance import MAX_LIMIT, Belief, Calibration, Floats
from localspec.engine.speculation.cost import Clock, CostProfile
from localspec.engine.speculation.depth import (
    MAX_DEPTH,
    Candidate,
    DepthPolicy,
    FixedDepth,
    MeasuredDepth,
    RoundCosts,
    best_value,
)
from localspec.engine.speculation.drafters.base import Drafter, DraftRequest, Resources
from localspec.engine.speculation.verification import Verifier

MOST_REST = 8  # rounds in which no drafts are asked for, after many that did not pay
# What is lost where a passage that could be copied is seen a round later, of a pass: there is one to be
# seen in a hundred tokens, each of which would come at half the price.
LATE = 1 / 200
FIRST = 3  # drafts in a text at most, until one of their kind was kept in it
_KEPT = 0.95  # of what a look was believed to take, with each look
# Wide passes are measured once, while a pair is loaded and whatever else goes on. Were they too dear then,
# nobody would see it: after so many rounds (four times as many each time) in which more would likely have
# been kept than seems to pay, all of that is verified.
NARROW, MOST_NARROW, LIKELY = 8, 512, 0.5


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What the target's pass of a round costs. ms: milliseconds (rows + 1,), by its rows.

    alike: of so many sequences each has as many rows as the one with the most; 0: each has its own.
    """

    ms: Callable[[int], Floats]
    alike: int = 0

    def by_depth(self, rows: int, deepest: int = 0) -> Floats:
        """(MAX_LIMIT + 1,): by the drafts of one sequence beside all other `rows`, its own token among
        them. deepest: drafts of the other that has most.
        """
        if not self.alike:
            return self.ms(rows + MAX_LIMIT)[rows:]
        counts = self.alike * (1 + np.maximum(np.arange(MAX_LIMIT + 1), deepest))
        return np.asarray(self.ms(int(counts[-1]))[counts])


@dataclass(slots=True)
class Drafting:
    """How one sequence drafts, as long as its request runs. reason: why it cannot at all.

    rest: rounds in which it does not look for drafts; missed: looks in a row that brought nothing.
    """

    drafters: list[Drafter]
    policy: DepthPolicy
    reason: str | None = None
    rest: int = 0
    missed: int = 0

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
    decided, but for this step's drafts; deepest: drafts of the other step that has most. looked: whether
    it was asked for drafts. first_row: the row of the last token read; -1 for a chunk in the middle of a
    prompt. error: what ends this sequence, and no other.
    """

    read: list[int]
    drafts: DraftRequest
    drafting: Drafting
    verifier: Verifier
    drafter: Drafter | None = None
    candidate: Candidate | None = None
    base: int = 0
    deepest: int = 0
    looked: bool = False
    first_row: int = -1
    error: Exception | None = None

    @property
    def rows(self) -> int:
        return len(self.read) + len(self.drafts.tokens)

    def drop_drafts(self) -> None:
        """The pass brings one token for this step."""
        self.drafter = self.candidate = None
        self.drafts.cut(0)


class Controller:
    """Decides and drafts for all sequences of a round. costs: what passes cost, as it is known now."""

    def __init__(
        self,
        costs: Callable[[], CostProfile],
        is_eog: Callable[[int], bool],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._costs = costs
        self._is_eog = is_eog
        self._clock = clock
        self._look_ms = 0.0  # of a sequence, where nothing is drafted after it
        self._sequences = 1  # of the present pass
        self._rest, self._declined = 0, 0
        self._narrow, self._patience = 0, NARROW

    def next(self, steps: list[SequenceStep], passes: PassCosts) -> None:
        """Give each step the drafts that are worth verifying, if any, up to its limit.

        A step whose own lookup or grammar fails has the `error` then. What fails in deciding or drafting
        for several together costs them their drafts only.

        Raises:
            DecodeFatal: a context is lost.
        """
        wanting = [step for step in steps if step.drafts.limit > 0]
        if not wanting:
            return
        start = self._clock()
        rows = sum(len(step.read) for step in steps)
        if len(steps) != self._sequences:
            self._sequences, self._rest, self._declined = len(steps), 0, 0
        decoding = sum(len(step.read) == 1 for step in steps)
        choosing = []
        # Of equals, who has written least is first.
        for step in sorted(wanting, key=lambda step: step.drafts.generated):
            step.looked = True
            try:
                if self._choose(step, passes, rows):
                    choosing.append(step)
            except Exception as error:  # its own lookup or grammar: no other sequence's trouble
                step.error = error
        asked = any(_costly(step) for step in choosing)
        choosing = _one_explores(choosing)
        if not choosing:
            self._took(False, False)
            self._found_nothing(start, len(wanting))
            return
        try:
            others = decoding - len(choosing)
            rate = self._decide(choosing, passes, rows - len(choosing), others)
            if all(step.drafter is None for step in choosing):
                self._found_nothing(start, len(wanting))
            self._propose(choosing, passes, rate)
        except DecodeFatal:
            raise
        except Exception as error:  # whatever it is, answers go on without drafts
            _drop(choosing, error)
        self._took(asked, any(_costly(step) for step in choosing))
        for step in choosing:
            _cut_to_grammar(step)

    def _found_nothing(self, start: float, looking: int) -> None:
        """So many sequences have looked for drafts since `start`, and none is worth it."""
        spent_ms = (self._clock() - start) * 1e3 / looking
        self._look_ms += (1 - _KEPT) * (spent_ms - self._look_ms)

    def _took(self, asked: bool, taken: bool) -> None:
        """Drafts that cost something were `asked` for, and `taken`: if not, nobody asks for some rounds.

        To decide takes time as well, and the next round knows nothing new, unless somebody probes.
        """
        if taken:
            self._rest = self._declined = 0
        elif asked:
            self._rest = min(self._declined, MOST_REST)
            self._declined = 2 * self._declined or 1
        else:
            self._rest = max(self._rest - 1, 0)

    # ------------------------------------------------------------------------ which kind

    def _choose(self, step: SequenceStep, passes: PassCosts, rows: int) -> bool:
        """Set the step's drafter and candidate to the best this sequence could have now."""
        offers = []
        for drafter in step.drafting.drafters:
            if drafter.costly and self._rest and not step.drafting.policy.fixed:
                continue
            candidate = drafter.offer(step.drafts)
            if candidate is not None:
                if not candidate.tokens and not step.drafting.policy.fixed:
                    most = MAX_DEPTH if drafter.proven else FIRST
                    candidate.limit = min(candidate.limit, most)
                offers.append((drafter, candidate))
        if not offers:
            return False
        best = offers[0]  # a fixed depth ranks the kinds; the policy compares what they may give
        if len(offers) > 1 and not step.drafting.policy.fixed:
            offers.sort(key=lambda offer: not offer[1].tokens)  # of equals, what costs nothing
            costs = passes.by_depth(rows)
            rate = 1 / (float(costs[0]) + self._costs().overhead(self._sequences, False))
            best = max(offers, key=lambda offer: best_value(offer[1], costs - costs[0], rate))
        step.drafter, step.candidate = best
        step.drafts.tokens, step.drafts.buckets = list(best[1].tokens), list(best[1].known)
        return True

    # ------------------------------------------------------------------------ how deep

    def _decide(
        self, steps: list[SequenceStep], passes: PassCosts, other: int, others: int
    ) -> float:
        """Fix each step's depth; those of depth 0 lose drafter and drafts. Returns the rate aimed at."""
        candidates = [step.candidate for step in steps if step.candidate is not None]
        limits, alike = [candidate.limit for candidate in candidates], passes.alike
        most = alike * (1 + max(limits)) if alike else other + len(steps) + sum(limits)
        profile, sequences = self._costs(), self._sequences
        costs = RoundCosts(
            passes.ms(most),
            profile.overhead(sequences, False),
            profile.overhead(sequences, True),
            alike,
        )
        if any(step.drafting.policy.fixed for step in steps):
            each = [
                step.drafting.policy.decide([candidate], costs, other, others)
                for step, candidate in zip(steps, candidates, strict=True)
            ]
            depths, rate = [d.depths[0] for d in each], max(d.rate for d in each)
        else:
            decision = steps[0].drafting.policy.decide(candidates, costs, other, others)
            depths, rate = decision.depths, decision.rate
            if len(candidates) == 1 and candidates[0].tokens and depths[0]:
                depths = [self._widened(candidates[0], depths[0])]
        rows = other + len(steps) + sum(depths)
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            step.base = rows - depth
            step.deepest = max([0, *depths[:at], *depths[at + 1 :]])
            if depth == 0:
                step.drafter = None
            step.drafts.cut(depth)
        return rate

    def _widened(self, candidate: Candidate, depth: int) -> int:
        """How many tokens to verify of those that were looked up, where `depth` of them seem to pay."""
        survival = candidate.belief.survival(candidate.known, candidate.limit)
        likely = int((survival >= LIKELY).sum()) - 1
        if likely > depth:
            self._narrow += 1
            if self._narrow >= self._patience:
                self._narrow, self._patience = 0, min(4 * self._patience, MOST_NARROW)
                return likely
        return depth

    # ------------------------------------------------------------------------ the drafts

    def _propose(self, steps: list[SequenceStep], passes: PassCosts, rate: float) -> None:
        """Have those drafted that are not known yet, each kind's for all sequences together."""
        unknown = [step for step in steps if step.drafter is not None and not step.drafts.tokens]
        while unknown:
            drafter = unknown[0].drafter
            assert drafter is not None
            group = [step for step in unknown if type(step.drafter) is type(drafter)]
            unknown = [step for step in unknown if step not in group]
            costs = [passes.by_depth(step.base, step.deepest) for step in group]
            relative = [each - each[0] for each in costs]
            for step, own in zip(group, relative, strict=True):
                if step.candidate is not None and step.candidate.steps is not None:
                    step.candidate.step_ms = step.candidate.steps.ms(len(group)) / len(group)
                step.drafts.more = self._asked(step, own, rate)
            try:
                drafter.propose([step.drafts for step in group])
            except DecodeFatal:
                raise
            except Exception as error:  # as above, for this kind of drafts
                _drop(group, error)
                continue
            for step, own in zip(group, relative, strict=True):
                # Under the rejection rule a draft may not be dropped for what it turned out to be: the
                # ones left would no longer be drawn from q, and the answer not from p.
                if not step.verifier.reject and step.candidate is not None:
                    step.candidate.known = step.drafts.buckets
                    policy = step.drafting.policy
                    step.drafts.cut(policy.worth_verifying(step.candidate, own, rate))
                if not step.drafts.tokens:
                    step.drafter = None

    def _asked(
        self, step: SequenceStep, pass_ms: Floats, rate: float
    ) -> Callable[[DraftRequest], bool]:
        """Whether another draft is wanted after those there are."""
        policy, candidate = step.drafting.policy, step.candidate

        def more(drafts: DraftRequest) -> bool:
            if not drafts.tokens:
                return True  # that something is drafted has been decided
            if candidate is None or self._is_eog(drafts.tokens[-1]):
                return False
            candidate.known = drafts.buckets
            return policy.keep_drafting(candidate, pass_ms, rate)

        return more

    # ------------------------------------------------------------------------ what became of it

    def observe(self, step: SequenceStep, kept: list[int]) -> None:
        """A step has been verified: each drafter learns from the tokens kept."""
        for drafter in step.drafting.drafters:
            drafter.observe(step.drafts, kept, drafter is step.drafter)
        if step.looked:
            step.drafting.looked(len(kept) > 1, self._most_rest)

    def elapsed(self, step: SequenceStep, tokens: int, spent_ms: float, plain_ms: float) -> None:
        """A round has given this step so many tokens, in its share of the round's time."""
        for drafter in step.drafting.drafters:
            drafter.elapsed(drafter is step.drafter, tokens, spent_ms, plain_ms)

    @property
    def _most_rest(self) -> int:
        """Rounds between looks that bring nothing, so that these and what is seen late cost least.

        To look every n rounds costs c / n of a pass a round, to see n / 2 rounds later LATE · n / 2: least
        at n = √(2 c / LATE).
        """
        look = self._sequences * self._look_ms / self._costs().target.ms(self._sequences)
        return min(int(math.sqrt(2 * look / LATE)) - 1, MOST_REST)

    def probe(self, step: SequenceStep, left: int) -> bool:
        """While drafts do not pay, see now and then whether they would, at a bounded share of time.

        left: tokens that may still come. False: nothing was probed.

        Raises:
            DecodeFatal: a context is lost.
        """
        if step.drafting.policy.fixed or step.first_row < 0:
            return False
        probed, slot = False, step.drafts.slot
        for drafter in step.drafting.drafters:
            if drafter is step.drafter:
                continue
            try:
                probed |= drafter.probe(slot, left)
                if probed:
                    self._rest = 0
            except DecodeFatal:
                raise
            except Exception as error:  # as above
                step.drafting.stop(drafter, slot, error)
                probed = True
        return probed


def _costly(step: SequenceStep) -> bool:
    return step.drafter is not None and step.drafter.costly


def _cut_to_grammar(step: SequenceStep) -> None:
    """Under the rejection rule what a grammar forbids is rejected, and the rest made up for it."""
    matcher = step.verifier.matcher
    if matcher is not None and step.drafts.tokens and not step.drafts.probs:
        try:
            step.drafts.cut(matcher.valid(step.drafts.tokens))
        except Exception as error:  # the grammar is this step's alone
            step.error = error


def _one_explores(steps: list[SequenceStep]) -> list[SequenceStep]:
    """While a kind of drafts is new, one sequence tries it for all: the one it costs least to begin with.

    Each of several would pay for the same lesson. Those left out bring no drafts.
    """
    trying = [
        step
        for step in steps
        if step.candidate is not None
        and not step.candidate.tokens
        and not step.drafting.policy.fixed
        and step.candidate.belief.calibration.new
    ]
    if len(trying) < 2:
        return steps
    first = min(trying, key=lambda step: step.candidate.entry_ms if step.candidate else 0.0)
    for step in trying:
        if step is not first:
            step.drop_drafts()
    return [step for step in steps if step.drafter is not None]


def _drop(steps: list[SequenceStep], error: Exception) -> None:
    """Drafting failed for these: they go on, without that kind of drafts."""
    for step in steps:
        drafter = step.drafter
        step.drop_drafts()
        if drafter is not None:
            step.drafting.stop(drafter, step.drafts.slot, error)
