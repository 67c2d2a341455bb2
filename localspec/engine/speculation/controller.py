"""The controller: which drafts each sequence brings to the next pass, of which kind, and how many.

`draft` decides and drafts for all sequences of a pass together, `observe` learns from verified drafts, and
`probe` checks now and then whether drafts that did not pay would pay now.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from localspec.engine.llama import DecodeFatal
from localspec.engine.speculation.acceptance import Floats
from localspec.engine.speculation.budget import (
    DECISION_BACKOFFS,
    WIDE_PASS_BACKOFFS,
    Backoff,
    max_search_backoff,
)
from localspec.engine.speculation.cost import Clock, CostProfile
from localspec.engine.speculation.depth import (
    MAX_DEPTH,
    Candidate,
    Decision,
    PassCosts,
    RoundCosts,
    best_value,
    choose_first_count,
    decide,
    keep_drafting,
)
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.step import SequenceStep

# Drafts per round until one of this kind was accepted in the text. Where a change of the width is dear,
# drafts that are known are not limited, because growing later would cost one.
MAX_UNPROVEN_DRAFTS = 3
_SEARCH_TIME_DECAY = 0.95  # what remains of the estimated time of a search with each new one
# A wider pass that takes less than this share of its expected time is tried again at once.
_MUCH_FASTER = 0.9
LIKELY_SURVIVAL = 0.5  # drafts that are at least this likely to be kept might pay in a wider pass


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
        # The time of a sequence's search for drafts after which nothing is drafted.
        self._search_ms = 0.0
        self._sequences = 1  # sequences of the present pass
        self._decisions = Backoff(DECISION_BACKOFFS)  # between decisions whether costly drafts pay
        self._wide_passes = Backoff(WIDE_PASS_BACKOFFS)  # before a pass is wider than seems to pay
        self._wide_passes.begin()

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
            self._sequences = len(steps)
            self._decisions.end()
        if any(step.drafts.generated <= 1 for step in open_steps):  # an answer begins
            self._decisions.wake()
        skips_costly = self._decisions.take()
        n_decoding = sum(len(step.read) == 1 for step in steps)
        drafting = []
        # Of drafts that are worth the same, the policy takes the first. So short answers come first.
        for step in sorted(open_steps, key=lambda step: step.drafts.generated):
            step.searched = True
            try:
                if self._choose_drafter(step, passes, rows, skips_costly):
                    drafting.append(step)
            except Exception as error:
                # Its own lookup or grammar failed: the other sequences go on.
                step.error = error
        costly_offered = any(_is_costly(step) for step in drafting)
        if not drafting:
            self._time_fruitless_search(start, len(open_steps))
            return
        if not self._decide_and_propose(drafting, passes, rows, n_decoding):
            self._time_fruitless_search(start, len(open_steps))
        if any(_is_costly(step) for step in drafting):
            self._decisions.end()
        elif costly_offered:  # deciding takes time as well, and the next round knows nothing new
            self._decisions.begin()
        for step in drafting:
            _cut_to_grammar(step)
        self._charge(drafting, passes, rows)

    def _decide_and_propose(
        self, steps: list[SequenceStep], passes: PassCosts, rows: int, n_decoding: int
    ) -> bool:
        """Decide how many drafts each step gets, and draft them.

        Return False if no step gets any. A failure returns True, because its time is not that of a search.

        rows: rows of the pass without drafts. n_decoding: the sequences that decode, `steps` among them.
        """
        try:
            self._set_plain_ms(steps, passes, n_decoding)
            rate = self._decide_depths(steps, passes, rows - len(steps), n_decoding - len(steps))
            drafts = any(step.drafter is not None for step in steps)
            self._propose_drafts(steps, passes, rate)
        except DecodeFatal:
            raise
        except Exception as error:  # a bug of ours, too: answers go on without drafts
            _stop_drafting(steps, error)
            return True
        return drafts

    def _time_fruitless_search(self, start: float, n_sequences: int) -> None:
        """Note the time that sequences have searched since `start` without finding drafts."""
        spent_ms = (self._clock() - start) * 1e3 / n_sequences
        self._search_ms += (1 - _SEARCH_TIME_DECAY) * (spent_ms - self._search_ms)

    def _choose_drafter(
        self, step: SequenceStep, passes: PassCosts, rows: int, skips_costly: bool
    ) -> bool:
        """Set the step's drafter and candidate to the best offer. Return False if there is none.

        skips_costly: costly drafts are left out, unless their depth is fixed.
        """
        fixed, budget, offers = step.drafting.fixed, step.drafting.budget, []
        for drafter in step.drafting.drafters:
            if drafter.costly and skips_costly and not fixed:
                continue
            candidate = drafter.offer(step.drafts)
            if candidate is None:
                continue
            if not candidate.tokens and not fixed:
                candidate.limit = min(candidate.limit, MAX_DEPTH)
            offers.append((drafter, candidate))
        if not offers:
            return False
        if not fixed and (len(offers) > 1 or offers[0][1].tokens):  # otherwise there is no choice
            costs = passes.ms_by_depth(rows)
            plain_ms = float(costs[0]) + self._costs().overhead(self._sequences, False)
            costs = costs - costs[0]
            for drafter, candidate in offers:
                if candidate.tokens and not drafter.predicted:
                    share = 1 / self._sequences
                    budget.known.open(plain_ms * share, passes.round_trip_ms * share)
                    candidate.limit = budget.known.affords(costs[: candidate.limit + 1])
            offers = [offer for offer in offers if offer[1].limit]
        if not offers:
            return False
        # With a fixed depth the order of the kinds decides; otherwise the policy compares them below.
        best = offers[0]
        if len(offers) > 1 and not fixed:
            # Of equals, drafts that cost nothing first.
            offers.sort(key=lambda offer: not offer[1].tokens)
            best = max(offers, key=lambda offer: best_value(offer[1], costs, 1 / plain_ms))
        step.drafter, step.candidate = best
        step.drafts.tokens, step.drafts.buckets = list(best[1].tokens), list(best[1].known)
        return True

    def _decide_depths(
        self, steps: list[SequenceStep], passes: PassCosts, other_rows: int, n_others: int
    ) -> float:
        """Set each step's depth, which may be 0. Return the expected rate in tokens per millisecond."""
        candidates = [step.candidate for step in steps if step.candidate is not None]
        limits, n_equal = [candidate.limit for candidate in candidates], passes.n_equal_sequences
        max_rows = n_equal * (1 + max(limits)) if n_equal else other_rows + len(steps) + sum(limits)
        profile, sequences = self._costs(), self._sequences
        costs = RoundCosts(
            passes.ms(max_rows),
            profile.overhead(sequences, False),
            profile.overhead(sequences, True),
            n_equal,
            passes.switch_ms,
        )
        if any(step.drafting.fixed for step in steps):
            decisions = [
                decide([candidate], costs, other_rows, n_others)
                if (depth := step.drafting.depth) is None
                else Decision([min(depth, candidate.limit)], 0.0)
                for step, candidate in zip(steps, candidates, strict=True)
            ]
            depths, rate = [d.depths[0] for d in decisions], max(d.rate for d in decisions)
        else:
            _limit_to_budget(steps, costs, other_rows + len(steps))
            decision = decide(candidates, costs, other_rows, n_others)
            rate, depths = decision.rate, decision.depths
            depths = self._limit_known_tokens(steps, passes, depths, other_rows, n_others, rate)
            depths = _limit_first_attempts(steps, depths, passes.switch_ms is not None)
        rows = other_rows + len(steps) + sum(depths)
        for at, (step, depth) in enumerate(zip(steps, depths, strict=True)):
            step.base = rows - depth
            step.deepest = max([0, *depths[:at], *depths[at + 1 :]])
            if depth == 0:
                step.drafter = None
            step.drafts.depth = depth
            if len(steps) > 1 and passes.switch_ms is not None and step.candidate is not None:
                # Drafts beyond the depth that was decided would change the width of the pass.
                step.candidate.limit = min(step.candidate.limit, depth)
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
            if not depth or candidate is None:
                counts.append(depth)
                continue
            if len(steps) == 1 and (count := self._explore_wider(step, candidate, depth, passes)):
                counts.append(count)
                continue
            if not candidate.tokens:
                counts.append(depth)
                continue
            deepest = max([0, *depths[:at], *depths[at + 1 :]])
            ms = passes.ms_by_depth(rows - depth, deepest)
            # Each sequence pays its share of what a round costs without these drafts.
            ms = ms - (1 - share) * ms[0] + share * overhead
            counts.append(choose_first_count(candidate, ms[: depth + 1], rate))
        return counts

    def _explore_wider(
        self, step: SequenceStep, candidate: Candidate, depth: int, passes: PassCosts
    ) -> int:
        """Return how many drafts to verify to learn the cost of a wider pass; 0: none now.

        No more than `depth` of them seem to pay. There is none where a change of the width is dear: such
        trials cost n-gram drafts 2 to 5 % there.
        """
        if passes.switch_ms is not None:
            return 0
        survival = candidate.belief.survival(candidate.known, candidate.limit)
        likely = int((survival >= LIKELY_SURVIVAL).sum()) - 1
        if likely > depth and not self._wide_passes.take():
            self._wide_passes.begin()
            step.explores = True
            return likely
        return 0

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
            for step in group:
                step.drafted = len(step.drafts.tokens)
                if not step.drafts.tokens:
                    step.drafter = None

    def _make_continue(
        self, step: SequenceStep, pass_ms: Floats, rate: float
    ) -> Callable[[DraftRequest], bool]:
        """Return a function that says whether to draft one more token after those there are."""
        candidate, depth = step.candidate, step.drafting.depth

        def more(drafts: DraftRequest) -> bool:
            if not drafts.tokens:
                return True  # that at least one token is drafted was decided
            if candidate is None or self._is_eog(drafts.tokens[-1]):
                return False
            if step.explores:
                return len(drafts.tokens) < drafts.depth
            if depth is not None:
                return len(drafts.tokens) < min(depth, candidate.limit)
            candidate.known = drafts.buckets
            return keep_drafting(candidate, pass_ms, rate)

        return more

    def _set_plain_ms(self, steps: list[SequenceStep], passes: PassCosts, n_decoding: int) -> None:
        """Set each step's share of a plain round of the sequences that decode."""
        pass_ms = float(passes.ms(n_decoding)[n_decoding])
        share_ms = (pass_ms + self._costs().overhead(n_decoding, False)) / n_decoding
        for step in steps:
            step.plain_ms = share_ms
            step.balance.open(share_ms, passes.round_trip_ms / len(steps))

    def _charge(self, steps: list[SequenceStep], passes: PassCosts, rows: int) -> None:
        """Divide what the drafts cost beyond a plain round between the budgets of their sequences.

        rows: rows of the pass without any drafts.
        """
        counts, n_equal = [len(step.drafts.tokens) for step in steps], passes.n_equal_sequences
        before = n_equal or rows
        after = n_equal * (1 + max(counts)) if n_equal else rows + sum(counts)
        pass_ms = passes.ms(after)
        extra_ms = float(pass_ms[after] - pass_ms[before])
        if passes.switch_ms is not None:
            extra_ms += passes.switch_ms(after)
        row_ms = extra_ms / max(sum(counts), 1)
        for step, count in zip(steps, counts, strict=True):
            if step.candidate and _is_charged(step) and (count or step.drafted):
                step.cost_ms = row_ms * count + _drafting_ms(step, steps)

    def observe(self, step: SequenceStep, kept_tokens: list[int]) -> None:
        """Let each drafter learn from the tokens that were kept of a verified step."""
        for drafter in step.drafting.drafters:
            drafter.observe(step.drafts, kept_tokens, drafter is step.drafter)
        if step.cost_ms is not None:
            step.balance.settle(step.cost_ms, len(kept_tokens) - 1, step.plain_ms)
        if step.searched:
            step.drafting.end_search(len(kept_tokens) > 1, self._max_search_backoff)

    def observe_round(
        self, step: SequenceStep, tokens: int, spent_ms: float, plain_ms: float, n_sequences: int
    ) -> None:
        """Learn from a round that took `spent_ms` for all sequences and gave one of them `tokens` tokens.

        plain_ms: cost of a round without drafts.
        """
        if step.explores and spent_ms < _MUCH_FASTER * (step.plain_ms + (step.cost_ms or 0.0)):
            self._wide_passes.end()  # it may pay, so go on until its cost is known
        budget = step.drafting.budget
        budget.known.refill(plain_ms / n_sequences)
        budget.model.refill(plain_ms / n_sequences)
        for drafter in step.drafting.drafters:
            drafter.observe_round(drafter is step.drafter, tokens, spent_ms / n_sequences, plain_ms)

    @property
    def _search_cost(self) -> float:
        """The cost of a round's fruitless search for drafts, as a fraction of a target pass."""
        return self._sequences * self._search_ms / self._costs().target.ms(self._sequences)

    @property
    def _max_search_backoff(self) -> int:
        return max_search_backoff(self._search_cost)

    def probe(self, step: SequenceStep, remaining: int) -> bool:
        """Check whether drafts that do not pay now would pay, at a bounded share of the time.

        remaining: tokens that may still be generated. Returns False if nothing was probed.

        Raises:
            DecodeFatal: A context is lost.
        """
        if step.drafting.fixed or step.first_row < 0:
            return False
        probed, slot = False, step.drafts.slot
        for drafter in step.drafting.drafters:
            if drafter is step.drafter:
                continue
            try:
                probed |= drafter.probe(slot, remaining)
                if probed:
                    self._decisions.wake()
            except DecodeFatal:
                raise
            except Exception as error:  # the answer goes on without this kind of drafts
                step.drafting.stop(drafter, slot, error)
                probed = True
        return probed


def _is_costly(step: SequenceStep) -> bool:
    return step.drafter is not None and step.drafter.costly


def _is_charged(step: SequenceStep) -> bool:
    """Whether the step's drafts are under the budget."""
    return not step.drafting.fixed and not (step.drafter and step.drafter.predicted)


def _drafting_ms(step: SequenceStep, steps: list[SequenceStep]) -> float:
    """Return a step's share of the time in which all of `steps` were drafted, token by token.

    Fewer sequences take part in deeper steps of the draft model, so each one's share of them is larger.
    """
    candidate = step.candidate
    if candidate is None or not step.drafted:
        return 0.0
    if (table := candidate.steps) is None:
        return step.drafted * candidate.step_ms + candidate.round_ms
    together = (sum(other.drafted > depth for other in steps) for depth in range(step.drafted))
    return candidate.round_ms + sum(table.ms(count) / count for count in together)


def _limit_to_budget(steps: list[SequenceStep], costs: RoundCosts, base_rows: int) -> None:
    """Limit the drafts of models to as many as each step's budget could pay for if all failed.

    A step pays a share of the pass, in which all of `steps` are taken to have equally many drafts.
    """
    n_equal = costs.n_equal_sequences
    for step in steps:
        if (candidate := step.candidate) is None or candidate.tokens:
            continue
        counts = np.arange(candidate.limit + 1)
        rows = n_equal * (1 + counts) if n_equal else base_rows + len(steps) * counts
        pass_ms = costs.pass_ms[np.minimum(rows, len(costs.pass_ms) - 1)]
        if costs.switch_ms is not None:
            pass_ms = pass_ms + np.array([0.0, *map(costs.switch_ms, rows[1:].tolist())])
        extra_ms = (pass_ms - pass_ms[0]) / len(steps) + counts * candidate.step_ms
        extra_ms[1:] += candidate.round_ms
        candidate.limit = step.balance.affords(extra_ms)


def _limit_first_attempts(
    steps: list[SequenceStep], depths: list[int], is_change_dear: bool
) -> list[int]:
    """Return `depths`, with few drafts where none of this kind was accepted in the text yet.

    Whether to try at all was decided by what more drafts would give, because they follow if these are kept.

    is_change_dear: a change of the pass's width is, so that growing later would cost one.
    """
    limited = []
    for step, depth in zip(steps, depths, strict=True):
        drafter, candidate = step.drafter, step.candidate
        if drafter is not None and candidate is not None and not candidate.tokens:
            is_known = not candidate.belief.calibration.is_new
            if not (drafter.proven or (is_known and is_change_dear)):
                candidate.limit = min(candidate.limit, MAX_UNPROVEN_DRAFTS)
                depth = min(depth, MAX_UNPROVEN_DRAFTS)
        limited.append(depth)
    return limited


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


def _stop_drafting(steps: list[SequenceStep], error: Exception) -> None:
    """Remove a kind of drafts from these steps after it failed; their answers go on without it."""
    for step in steps:
        drafter = step.drafter
        step.drop_drafts()
        if drafter is not None:
            step.drafting.stop(drafter, step.drafts.slot, error)
