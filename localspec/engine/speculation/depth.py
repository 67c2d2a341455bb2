"""How deep to draft: pure arithmetic over measured costs and a belief about acceptance.

A round that drafts K tokens yields 1 + Σ_{j≤K} S_j tokens on average, where S_j is the probability that the
first j drafts all survive. It costs K·t_d + t_v(width(K+1)) + o. The policy maximises tokens per second over
whole candidates K = 0…K_max, where K = 0 is plain decoding. Several sequences share a pass, so drafts are
added to the round in the order of what each is worth beyond its own cost, and the best of all these rounds is
taken. The pass does not care whose rows it has, so no other choice of as many drafts gains more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from localspec.engine.speculation.acceptance import MAX_DRAFTS, Belief, Floats
from localspec.engine.speculation.cost import CostTable

MAX_DEPTH = 15  # most drafts chosen by the policy, for a pass of 16 rows
# Drafting must promise this much more than plain decoding. The best of several estimates is an optimistic
# one, and near the break-even its error would cost more than drafting gains.
MARGIN = 1.02
_COUNTS = np.arange(MAX_DRAFTS + 1)
MIN_SURVIVAL = 0.01  # drafts that are less likely to be kept are not considered


@dataclass(slots=True)
class Candidate:
    """One sequence in a round: what it may gain, and what a drafted token costs it.

    limit: most tokens worth drafting (max_tokens left, room in the context).
    step_ms: cost of one more draft. round_ms: additional cost of the first one of a round. entry_ms: the
    same, for text that the draft model has not read yet.
    known: buckets of the tokens drafted already. tokens: these tokens, if drafting them cost nothing.
    steps: cost of one more draft for several sequences together, by their number; None: each costs as much
    as alone.
    """

    belief: Belief
    limit: int
    step_ms: float
    entry_ms: float = 0.0
    known: Sequence[int] = ()
    tokens: Sequence[int] = ()
    steps: CostTable | None = None
    round_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The cost of the target's pass of a round. ms: returns milliseconds (rows + 1,) by the pass's rows.

    n_equal_sequences: number of sequences if all must have equally many rows; 0: each has its own number.
    switch_ms: returns what a change of the width for so many rows really costs, with the way back, beyond the
    share of it that `ms` counts; None: changes cost nothing. round_trip_ms: a change there and back.
    """

    ms: Callable[[int], Floats]
    n_equal_sequences: int = 0
    switch_ms: Callable[[int], float] | None = None
    round_trip_ms: float = 0.0

    def ms_by_depth(self, rows: int, deepest: int = 0) -> Floats:
        """Return the milliseconds (MAX_DRAFTS + 1,) by the drafts of one sequence.

        rows: all other rows, its own token among them. deepest: drafts of the other sequence with most.
        """
        if not self.n_equal_sequences:
            return self.ms(rows + MAX_DRAFTS)[rows:]
        counts = self.n_equal_sequences * (1 + np.maximum(np.arange(MAX_DRAFTS + 1), deepest))
        return np.asarray(self.ms(int(counts[-1]))[counts])


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """The milliseconds of a round.

    pass_ms[rows]: the target's pass of that width, padding included, long enough for every candidate at
    its limit. plain_ms, drafting_ms: all that is neither a pass nor a draft, in a round without drafts and
    in one with drafts. n_equal_sequences, switch_ms: as in `PassCosts`.
    """

    pass_ms: Floats
    plain_ms: float
    drafting_ms: float
    n_equal_sequences: int = 0
    switch_ms: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The depth of each candidate, and the rate (tokens per millisecond) that they are expected to give."""

    depths: list[int]
    rate: float


def best_value(candidate: Candidate, pass_ms: Floats, rate: float) -> float:
    """Return the maximum over all depths of gain - rate·cost, in tokens.

    pass_ms[k]: what the target pass costs when this sequence brings k drafted tokens. The cost of drafting
    the tokens of `known` is already paid.
    """
    limit = min(candidate.limit, len(pass_ms) - 1)
    cost = pass_ms[: limit + 1]
    if (drafted := len(candidate.known)) < limit:
        cost = cost.copy()
        cost[drafted + 1 :] += _COUNTS[1 : limit - drafted + 1] * candidate.step_ms
    if not candidate.known:
        cost[1:] += candidate.entry_ms + candidate.round_ms
    gain = candidate.belief.survival(candidate.known, limit).cumsum()
    return float((gain - rate * cost).max())


def decide(
    candidates: Sequence[Candidate], costs: RoundCosts, other_rows: int = 0, others: int = 0
) -> Decision:
    """Choose the depths for all sequences of a round together.

    They are as deep as it pays by the measured costs and the beliefs, which may be not at all.

    other_rows: rows of the same pass that belong to prompts and to sequences without drafts.
    others: how many of those sequences get a token each.
    """
    n = len(candidates)
    plain_ms = float(costs.pass_ms[n + other_rows]) + costs.plain_ms
    plain_rate = (n + others) / plain_ms
    best = Decision([0] * n, plain_rate * MARGIN)
    for by_depth in _list_orders(candidates, costs.n_equal_sequences > 0):
        ranked = _rank_drafts(candidates, plain_rate, by_depth)
        best = _add_drafts(candidates, ranked, costs, other_rows, others, best)
    return best if any(best.depths) else Decision(best.depths, plain_rate)


def choose_first_count(candidate: Candidate, round_ms: Floats, rate: float) -> int:
    """Return how many known tokens to verify in this round; 0: none. The rest may follow in the next.

    round_ms[k]: what a round costs in which this sequence brings k of them. Its length limits k.

    The k is the one that gains most in two rounds. The gain is Σ_{j≤k} S_j - rate·cost(k), and, with the
    probability S_{k+1} that these tokens and the one after them are right, what the next round gains at its
    best depth. Whether a passage is repeated shows in its first tokens. They are a small part of the cost, or
    free where the target generates them, and make the rest surer.
    """
    limit = len(round_ms) - 1
    known = [*candidate.known[: 2 * limit + 1]]
    known += known[-1:] * (2 * limit + 1 - len(known))
    survival = candidate.belief.survival(known, 2 * limit + 1)
    cost = rate * round_ms
    n_kept = survival.cumsum()
    # next_tokens[k, j]: Σ_{i≤j} S_{k+1+i}, the tokens of the next round with j drafts
    next_tokens = sliding_window_view(n_kept[1:], limit + 1) - n_kept[: limit + 1, None]
    next_gain = (next_tokens - survival[1 : limit + 2, None] * cost).max(axis=1)
    return int((n_kept[: limit + 1] - cost + next_gain.clip(min=0)).argmax())


def keep_drafting(candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
    """Return whether one more draft is worth its time, given the confidence of those so far."""
    drafted = len(candidate.known)  # their cost is already paid
    limit = min(candidate.limit, len(pass_ms) - 1)
    if drafted >= limit:
        return False
    gain = candidate.belief.survival_beyond(candidate.known, limit - drafted).cumsum()
    cost = pass_ms[drafted + 1 : limit + 1] - pass_ms[drafted]
    cost += _COUNTS[1 : limit - drafted + 1] * candidate.step_ms
    return bool((gain - rate * cost).max() > 0)


def _add_drafts(
    candidates: Sequence[Candidate],
    ranked: Sequence[tuple[float, int]],
    costs: RoundCosts,
    other_rows: int,
    others: int,
    best: Decision,
) -> Decision:
    """Return the best of `best` and the rounds that have the first 1, 2, … drafts of `ranked`."""
    n, rows = len(candidates), len(candidates) + other_rows
    n_tokens, spent_ms = float(n + others), costs.drafting_ms
    depths, shared_steps, n_equal = [0] * n, _SharedSteps(), costs.n_equal_sequences
    best_rate, count = best.rate, 0
    for n_drafts, (survival, index) in enumerate(ranked, 1):
        depths[index] += 1
        n_tokens += survival
        spent_ms += shared_steps.added_ms(candidates[index], depths[index])
        rows = max(rows, n_equal * (1 + depths[index])) if n_equal else rows + 1
        round_rate = n_tokens / (spent_ms + float(costs.pass_ms[rows]))
        if round_rate > best_rate:
            best_rate, count = round_rate, n_drafts
    if not count:
        return best
    indexes = [index for _, index in ranked[:count]]
    return Decision([indexes.count(index) for index in range(n)], best_rate)


def _list_orders(candidates: Sequence[Candidate], equal_rows: bool) -> tuple[bool, ...]:
    """Return the orders of drafts to try: whether those of equal depth come together.

    Where the sequences share each step of the draft model, a step costs nearly as much for one of them as
    for all, so that equal depths may be better than the likeliest drafts. With four sequences on the
    recorded costs of a GPU they gain up to 14 %.
    """
    if equal_rows:
        return (True,)
    shares_steps = len(candidates) > 1 and all(c.steps is not None for c in candidates)
    return (False, True) if shares_steps else (False,)


def _rank_drafts(
    candidates: Sequence[Candidate], rate: float, by_depth: bool
) -> list[tuple[float, int]]:
    """Return (survival, index of the candidate) of each possible draft, in the order of their worth.

    The worth is the survival beyond the cost of its step. Earlier drafts of a sequence come first, because
    they are likelier to be kept. by_depth: drafts of equal depth come together, and those that are not worth
    what they add to a step do not come.
    """
    drafts = []
    for index, candidate in enumerate(candidates):
        cost = rate * (
            _added_step_ms(candidate, len(candidates)) if by_depth else candidate.step_ms
        )
        survival = candidate.belief.survival(candidate.known, candidate.limit)[1:].tolist()
        for depth, chance in enumerate(survival):
            if chance > (max(MIN_SURVIVAL, cost) if by_depth else MIN_SURVIVAL):
                drafts.append((depth if by_depth else 0, cost - chance, chance, index))
    drafts.sort(key=lambda draft: draft[:2])
    return [(survival, index) for *_, survival, index in drafts]


def _added_step_ms(candidate: Candidate, n_sequences: int) -> float:
    """Return what a draft adds to a step that the other sequences take, averaged, in milliseconds."""
    if candidate.steps is None or n_sequences == 1:
        return candidate.step_ms
    together_ms = candidate.steps.ms(n_sequences) - candidate.steps.ms(1)
    return max(together_ms, 0.0) / (n_sequences - 1)


class _SharedSteps:
    """The cost of drafts where several sequences take each step in one pass of the draft model."""

    def __init__(self) -> None:
        self._drafting: dict[int, int] = {}  # by depth, the number of sequences that draft so deep

    def added_ms(self, candidate: Candidate, depth: int) -> float:
        """Return the cost of the draft that takes this candidate to `depth`."""
        if depth <= len(candidate.known):
            return 0.0
        entry_ms = candidate.entry_ms + candidate.round_ms if depth == 1 else 0.0
        if candidate.steps is None:
            return candidate.step_ms + entry_ms
        n_others = self._drafting.get(depth, 0)
        self._drafting[depth] = n_others + 1
        others_ms = candidate.steps.ms(n_others) if n_others else 0.0
        return max(candidate.steps.ms(n_others + 1) - others_ms, 0.0) + entry_ms
