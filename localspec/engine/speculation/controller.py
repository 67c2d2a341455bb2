"""Which drafts each sequence brings to the next pass: of which kind, and how deep.

`next` decides and drafts for all sequences of a pass together, `observe` learns what became of it, and
`probe` sees now and then whether drafts that do not pay would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from localspec.engine.llama import DecodeFatal
from localspec.engine.speculation.acceptance import Floats
from localspec.engine.speculation.cost import Clock, CostProfile
from localspec.engine.speculation.depth import (
    MAX_DEPTH,
    Candidate,
    PassCosts,
    RoundCosts,
    best_value,
)
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.step import MOST_REST, SequenceStep

# What is lost where a passage that could be copied is seen a round later, of a pass: there is one to be
# seen in a hundred tokens, each of which would come at half the price.
LATE = 1 / 200
FIRST = 3  # drafts in a text at most, until one of their kind was kept in it
_KEPT = 0.95  # of what a look was believed to take, with each look
# Wide passes are measured once, while a pair is loaded and whatever else goes on. Were they too dear then,
# nobody would see it: after so many rounds (four times as many each time) in which more would likely have
# been kept than seems to pay, all of that is verified.
NARROW, MOST_NARROW, LIKELY = 8, 512, 0.5


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
        fixed, offers = step.drafting.policy.fixed, []
        for drafter in step.drafting.drafters:
            if drafter.costly and self._rest and not fixed:
                continue
            candidate = drafter.offer(step.drafts)
            if candidate is None:
                continue
            if not candidate.tokens and not fixed:
                most = MAX_DEPTH if drafter.proven else FIRST
                candidate.limit = min(candidate.limit, most)
            offers.append((drafter, candidate))
        if not offers:
            return False
        if not fixed and (len(offers) > 1 or offers[0][1].tokens):  # there is something to weigh
            costs = passes.by_depth(rows)
            plain_ms = float(costs[0]) + self._costs().overhead(self._sequences, False)
            costs = costs - costs[0]
            for drafter, candidate in offers:
                if candidate.tokens and not drafter.predicted:
                    price = costs[: candidate.limit + 1] * self._sequences / plain_ms
                    candidate.limit = step.drafting.affords(price)
            offers = [offer for offer in offers if offer[1].limit]
        if not offers:
            return False
        best = offers[0]  # a fixed depth ranks the kinds; the policy compares what they may give
        if len(offers) > 1 and not fixed:
            offers.sort(key=lambda offer: not offer[1].tokens)  # of equals, what costs nothing
            best = max(offers, key=lambda offer: best_value(offer[1], costs, 1 / plain_ms))
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
            rate = decision.rate
            depths = self._at_first(steps, passes, decision.depths, other, others, rate)
        rows = other + len(steps) + sum(depths)
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            step.base = rows - depth
            step.deepest = max([0, *depths[:at], *depths[at + 1 :]])
            if depth == 0:
                step.drafter = None
            step.drafts.cut(depth)
        return rate

    def _at_first(
        self,
        steps: list[SequenceStep],
        passes: PassCosts,
        depths: list[int],
        other: int,
        others: int,
        rate: float,
    ) -> list[int]:
        """`depths`, but of known tokens only as many as this round should bring."""
        rows, share = other + len(steps) + sum(depths), 1 / (len(steps) + others)
        overhead = self._costs().overhead(self._sequences, True)
        found = []
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            candidate = step.candidate
            if not depth or candidate is None or not candidate.tokens:
                found.append(depth)
                continue
            deepest = max([0, *depths[:at], *depths[at + 1 :]])
            ms = passes.by_depth(rows - depth, deepest)
            # What a round costs without these drafts, each sequence pays its share of.
            ms = ms - (1 - share) * ms[0] + share * overhead
            count = self._wider(candidate, depth) if len(steps) == 1 else 0
            count = count or step.drafting.policy.at_first(candidate, ms[: depth + 1], rate)
            if step.drafter is not None and not step.drafter.predicted:
                step.price = float(ms[count] / ms[0]) - 1
            found.append(count)
        return found

    def _wider(self, candidate: Candidate, depth: int) -> int:
        """How many of the looked-up tokens to verify, where no more than `depth` of them seem to pay, to see
        what that costs; 0: not now.
        """
        survival = candidate.belief.survival(candidate.known, candidate.limit)
        likely = int((survival >= LIKELY).sum()) - 1
        if likely > depth:
            self._narrow += 1
            if self._narrow >= self._patience:
                self._narrow, self._patience = 0, min(4 * self._patience, MOST_NARROW)
                return likely
        return 0

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
        step.drafting.settle(step.price or 0.0, 0 if step.price is None else len(kept) - 1)
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
