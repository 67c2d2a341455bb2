"""The controller: which drafts each sequence brings to the next pass, of which kind, and how many.

`next` decides and drafts for all sequences of a pass together, `observe` learns from the verified drafts, and
`probe` checks now and then whether drafts that did not pay would pay now.
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
from localspec.engine.speculation.step import MAX_REST_ROUNDS, SequenceStep

# Cost of noticing a copyable passage one round late, as a fraction of a target pass. Assumes one such passage
# per 100 tokens, and that each copied token saves half a pass.
NOTICE_DELAY_COST = 1 / 200
MAX_UNPROVEN_DRAFTS = 3  # per round, until a draft of this kind was accepted in the text
_SEARCH_TIME_DECAY = 0.95  # what remains of the estimated time of a search with each new one
# Wide passes are measured only once, while a pair is loaded and the machine may be busy. If that gave too
# high a cost, they would never be used and so never corrected. So after this many rounds (four times as many
# each time) in which more tokens would likely have been accepted than seems to pay, all of them are verified.
NARROW_ROUNDS, MAX_NARROW_ROUNDS, LIKELY_SURVIVAL = 8, 512, 0.5


class Controller:
    """Decides and drafts for all sequences of a round. costs: returns what passes cost now."""

    def __init__(
        self,
        costs: Callable[[], CostProfile],
        is_eog: Callable[[int], bool],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._costs = costs
        self._is_eog = is_eog
        self._clock = clock
        self._search_ms = (
            0.0  # time of a sequence's search for drafts after which nothing is drafted
        )
        self._sequences = 1  # sequences of the present pass
        # Rounds without costly drafts that remain, and the length of the next such pause.
        self._pause_rounds, self._next_pause = 0, 0
        # Rounds that seemed narrower than likely to pay, and after how many a wide pass is tried.
        self._n_narrow, self._narrow_limit = 0, NARROW_ROUNDS

    def draft(self, steps: list[SequenceStep], passes: PassCosts) -> None:
        """Give each step the drafts that are worth verifying, if any, up to its limit.

        A step whose own lookup or grammar fails gets an `error`. If deciding or drafting fails for several
        sequences together, they only lose their drafts.

        Raises:
            DecodeFatal: A context is lost.
        """
        open_steps = [step for step in steps if step.drafts.limit > 0]
        if not open_steps:
            return
        start = self._clock()
        rows = sum(len(step.read) for step in steps)
        if len(steps) != self._sequences:
            self._sequences, self._pause_rounds, self._next_pause = len(steps), 0, 0
        decoding = sum(len(step.read) == 1 for step in steps)
        drafting = []
        # Of equal steps, the one whose sequence has generated least comes first.
        for step in sorted(open_steps, key=lambda step: step.drafts.generated):
            step.looked = True
            try:
                if self._choose_drafter(step, passes, rows):
                    drafting.append(step)
            except Exception as error:
                # Its own lookup or grammar failed: the other sequences go on.
                step.error = error
        costly_offered = any(_is_costly(step) for step in drafting)
        drafting = _pick_explorer(drafting)
        if not drafting:
            self._update_pause(False, False)
            self._time_vain_search(start, len(open_steps))
            return
        try:
            n_others = decoding - len(drafting)
            rate = self._decide_depths(drafting, passes, rows - len(drafting), n_others)
            if all(step.drafter is None for step in drafting):
                self._time_vain_search(start, len(open_steps))
            self._propose_drafts(drafting, passes, rate)
        except DecodeFatal:
            raise
        except Exception as error:  # a bug of ours, too: answers go on without drafts
            _stop_drafting(drafting, error)
        self._update_pause(costly_offered, any(_is_costly(step) for step in drafting))
        for step in drafting:
            _cut_to_grammar(step)

    def _time_vain_search(self, start: float, n_sequences: int) -> None:
        """Note the time that sequences have searched for drafts since `start`, in vain."""
        spent_ms = (self._clock() - start) * 1e3 / n_sequences
        self._search_ms += (1 - _SEARCH_TIME_DECAY) * (spent_ms - self._search_ms)

    def _update_pause(self, offered: bool, taken: bool) -> None:
        """Pause costly drafts for some rounds if they were offered but not taken.

        Deciding takes time as well, and the next round knows nothing new, unless a probe was made.
        """
        if taken:
            self._pause_rounds = self._next_pause = 0
        elif offered:
            self._pause_rounds = min(self._next_pause, MAX_REST_ROUNDS)
            self._next_pause = 2 * self._next_pause or 1
        else:
            self._pause_rounds = max(self._pause_rounds - 1, 0)

    # ------------------------------------------------------------------------ which kind

    def _choose_drafter(self, step: SequenceStep, passes: PassCosts, rows: int) -> bool:
        """Set the step's drafter and candidate to the best offer. Return False if there is none."""
        fixed, offers = step.drafting.policy.fixed, []
        for drafter in step.drafting.drafters:
            if drafter.costly and self._pause_rounds and not fixed:
                continue
            candidate = drafter.offer(step.drafts)
            if candidate is None:
                continue
            if not candidate.tokens and not fixed:
                max_drafts = MAX_DEPTH if drafter.proven else MAX_UNPROVEN_DRAFTS
                candidate.limit = min(candidate.limit, max_drafts)
            offers.append((drafter, candidate))
        if not offers:
            return False
        if not fixed and (len(offers) > 1 or offers[0][1].tokens):  # otherwise there is no choice
            costs = passes.ms_by_depth(rows)
            plain_ms = float(costs[0]) + self._costs().overhead(self._sequences, False)
            costs = costs - costs[0]
            for drafter, candidate in offers:
                if candidate.tokens and not drafter.predicted:
                    price = costs[: candidate.limit + 1] * self._sequences / plain_ms
                    candidate.limit = step.drafting.max_affordable(price)
            offers = [offer for offer in offers if offer[1].limit]
        if not offers:
            return False
        best = offers[
            0
        ]  # with a fixed depth the order of the kinds decides, else the policy compares
        if len(offers) > 1 and not fixed:
            # Of equals, drafts that cost nothing first.
            offers.sort(key=lambda offer: not offer[1].tokens)
            best = max(offers, key=lambda offer: best_value(offer[1], costs, 1 / plain_ms))
        step.drafter, step.candidate = best
        step.drafts.tokens, step.drafts.buckets = list(best[1].tokens), list(best[1].known)
        return True

    # ------------------------------------------------------------------------ how deep

    def _decide_depths(
        self, steps: list[SequenceStep], passes: PassCosts, other_rows: int, n_others: int
    ) -> float:
        """Set the depth of each step, without drafts where it is 0. Return the rate aimed at."""
        candidates = [step.candidate for step in steps if step.candidate is not None]
        limits, alike = [candidate.limit for candidate in candidates], passes.alike
        max_rows = alike * (1 + max(limits)) if alike else other_rows + len(steps) + sum(limits)
        profile, sequences = self._costs(), self._sequences
        costs = RoundCosts(
            passes.ms(max_rows),
            profile.overhead(sequences, False),
            profile.overhead(sequences, True),
            alike,
        )
        if any(step.drafting.policy.fixed for step in steps):
            decisions = [
                step.drafting.policy.decide([candidate], costs, other_rows, n_others)
                for step, candidate in zip(steps, candidates, strict=True)
            ]
            depths, rate = [d.depths[0] for d in decisions], max(d.rate for d in decisions)
        else:
            decision = steps[0].drafting.policy.decide(candidates, costs, other_rows, n_others)
            rate = decision.rate
            depths = self._limit_known_tokens(
                steps, passes, decision.depths, other_rows, n_others, rate
            )
        rows = other_rows + len(steps) + sum(depths)
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            step.base = rows - depth
            step.deepest = max([0, *depths[:at], *depths[at + 1 :]])
            if depth == 0:
                step.drafter = None
            step.drafts.cut(depth)
        return rate

    def _limit_known_tokens(
        self,
        steps: list[SequenceStep],
        passes: PassCosts,
        depths: list[int],
        other_rows: int,
        n_others: int,
        rate: float,
    ) -> list[int]:
        """Return `depths`, with known tokens limited to what this round should verify of them."""
        rows, share = other_rows + len(steps) + sum(depths), 1 / (len(steps) + n_others)
        overhead = self._costs().overhead(self._sequences, True)
        counts = []
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            candidate = step.candidate
            if not depth or candidate is None or not candidate.tokens:
                counts.append(depth)
                continue
            deepest = max([0, *depths[:at], *depths[at + 1 :]])
            ms = passes.ms_by_depth(rows - depth, deepest)
            # Each sequence pays its share of what a round costs without these drafts.
            ms = ms - (1 - share) * ms[0] + share * overhead
            count = self._explore_wider(candidate, depth) if len(steps) == 1 else 0
            count = count or step.drafting.policy.choose_first_count(
                candidate, ms[: depth + 1], rate
            )
            if step.drafter is not None and not step.drafter.predicted:
                step.price = float(ms[count] / ms[0]) - 1
            counts.append(count)
        return counts

    def _explore_wider(self, candidate: Candidate, depth: int) -> int:
        """Return how many known tokens to verify to learn the cost of a wider pass; 0: none now.

        No more than `depth` of them seem to pay.
        """
        survival = candidate.belief.survival(candidate.known, candidate.limit)
        likely = int((survival >= LIKELY_SURVIVAL).sum()) - 1
        if likely > depth:
            self._n_narrow += 1
            if self._n_narrow >= self._narrow_limit:
                self._n_narrow, self._narrow_limit = (
                    0,
                    min(4 * self._narrow_limit, MAX_NARROW_ROUNDS),
                )
                return likely
        return 0

    # ------------------------------------------------------------------------ the drafts

    def _propose_drafts(self, steps: list[SequenceStep], passes: PassCosts, rate: float) -> None:
        """Draft the tokens that are not known yet, for all sequences of one kind of drafts together."""
        unknown = [step for step in steps if step.drafter is not None and not step.drafts.tokens]
        while unknown:
            drafter = unknown[0].drafter
            assert drafter is not None
            group = [step for step in unknown if type(step.drafter) is type(drafter)]
            unknown = [step for step in unknown if step not in group]
            costs = [passes.ms_by_depth(step.base, step.deepest) for step in group]
            relative = [pass_ms - pass_ms[0] for pass_ms in costs]
            for step, extra_ms in zip(group, relative, strict=True):
                if step.candidate is not None and step.candidate.steps is not None:
                    step.candidate.step_ms = step.candidate.steps.ms(len(group)) / len(group)
                step.drafts.more = self._make_continue(step, extra_ms, rate)
            try:
                drafter.propose([step.drafts for step in group])
            except DecodeFatal:
                raise
            except Exception as error:  # the answers go on without this kind of drafts
                _stop_drafting(group, error)
                continue
            for step, extra_ms in zip(group, relative, strict=True):
                # Under the rejection rule no draft may be dropped because of its token: the remaining ones
                # would no longer be distributed as q, and the answer not as p.
                if not step.verifier.reject and step.candidate is not None:
                    step.candidate.known = step.drafts.buckets
                    policy = step.drafting.policy
                    step.drafts.cut(policy.worth_verifying(step.candidate, extra_ms, rate))
                if not step.drafts.tokens:
                    step.drafter = None

    def _make_continue(
        self, step: SequenceStep, pass_ms: Floats, rate: float
    ) -> Callable[[DraftRequest], bool]:
        """Return a function that says whether to draft one more token after those there are."""
        policy, candidate = step.drafting.policy, step.candidate

        def more(drafts: DraftRequest) -> bool:
            if not drafts.tokens:
                return True  # that at least one token is drafted was decided
            if candidate is None or self._is_eog(drafts.tokens[-1]):
                return False
            candidate.known = drafts.buckets
            return policy.keep_drafting(candidate, pass_ms, rate)

        return more

    # ------------------------------------------------------------------------ after the pass

    def observe(self, step: SequenceStep, kept_tokens: list[int]) -> None:
        """Let each drafter learn from the tokens that were kept of a verified step."""
        for drafter in step.drafting.drafters:
            drafter.observe(step.drafts, kept_tokens, drafter is step.drafter)
        step.drafting.book_price(
            step.price or 0.0, 0 if step.price is None else len(kept_tokens) - 1
        )
        if step.looked:
            step.drafting.end_search(len(kept_tokens) > 1, self._max_pause)

    def elapsed(self, step: SequenceStep, tokens: int, spent_ms: float, plain_ms: float) -> None:
        """Report to the drafters how many tokens a step got in its share of the round's time."""
        for drafter in step.drafting.drafters:
            drafter.elapsed(drafter is step.drafter, tokens, spent_ms, plain_ms)

    @property
    def _max_pause(self) -> int:
        """The most rounds to pause after searches in vain, at which their total cost is least.

        Searching every n rounds costs c / n of a pass per round, and noticing a passage n / 2 rounds late
        costs NOTICE_DELAY_COST · n / 2. The sum is least at n = √(2 c / NOTICE_DELAY_COST).
        """
        search_cost = self._sequences * self._search_ms / self._costs().target.ms(self._sequences)
        return min(int(math.sqrt(2 * search_cost / NOTICE_DELAY_COST)) - 1, MAX_REST_ROUNDS)

    def probe(self, step: SequenceStep, remaining: int) -> bool:
        """Check whether drafts that do not pay now would pay, at a bounded share of the time.

        remaining: tokens that may still be generated. Returns False if nothing was probed.

        Raises:
            DecodeFatal: A context is lost.
        """
        if step.drafting.policy.fixed or step.first_row < 0:
            return False
        probed, slot = False, step.drafts.slot
        for drafter in step.drafting.drafters:
            if drafter is step.drafter:
                continue
            try:
                probed |= drafter.probe(slot, remaining)
                if probed:
                    self._pause_rounds = 0
            except DecodeFatal:
                raise
            except Exception as error:  # the answer goes on without this kind of drafts
                step.drafting.stop(drafter, slot, error)
                probed = True
        return probed


def _is_costly(step: SequenceStep) -> bool:
    return step.drafter is not None and step.drafter.costly


def _cut_to_grammar(step: SequenceStep) -> None:
    """Cut the drafts to what the grammar allows.

    Drafts for the rejection rule stay as they are: it rejects what the grammar forbids, and dropping them
    here would change the distribution.
    """
    matcher = step.verifier.matcher
    if matcher is not None and step.drafts.tokens and not step.drafts.probs:
        try:
            step.drafts.cut(matcher.count_valid(step.drafts.tokens))
        except Exception as error:  # the grammar belongs to this step alone
            step.error = error


def _pick_explorer(steps: list[SequenceStep]) -> list[SequenceStep]:
    """Let a single sequence try a new kind of drafts, the one that it costs least to begin with.

    Otherwise each of several would pay for the same lesson. The others bring no drafts.
    """
    candidates = [
        step
        for step in steps
        if step.candidate is not None
        and not step.candidate.tokens
        and not step.drafting.policy.fixed
        and step.candidate.belief.calibration.is_new
    ]
    if len(candidates) < 2:
        return steps
    explorer = min(candidates, key=lambda step: step.candidate.entry_ms if step.candidate else 0.0)
    for step in candidates:
        if step is not explorer:
            step.drop_drafts()
    return [step for step in steps if step.drafter is not None]


def _stop_drafting(steps: list[SequenceStep], error: Exception) -> None:
    """Remove a kind of drafts from these steps after it failed; their answers go on without it."""
    for step in steps:
        drafter = step.drafter
        step.drop_drafts()
        if drafter is not None:
            step.drafting.stop(drafter, step.drafts.slot, error)
