"""How deep to draft: pure arithmetic over measured costs and a belief about acceptance.

A round that drafts K tokens yields 1 + Σ_{j≤K} S_j tokens on average, S_j being the probability that
the first j drafts all survive, and costs K·t_d + t_v(width(K+1)) + o. The policy maximises tokens per
second over whole candidates K = 0…K_max, K = 0 being plain decoding. Several sequences share a pass,
so drafts are added to the round in the order of what each is worth beyond its own cost, and the best
of all these rounds is taken: rows are alike to the pass, so no other choice of as many gains more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from localspec.engine.speculation.acceptance import MAX_LIMIT, Belief, Floats
from localspec.engine.speculation.cost import CostTable

MAX_DEPTH = 15  # drafted by the policy; one pass of 16 rows
# Drafting must promise so much more than plain decoding: the best of several estimates is an
# optimistic one, and near the break-even the error would be paid for and nothing won.
MARGIN = 1.02
_COUNTS = np.arange(MAX_LIMIT + 1)
LEAST = 0.01  # chance to be kept, below which a draft is not looked at


@dataclass(slots=True)
class Candidate:
    """One sequence in a round: what it may gain and what a drafted token costs it.

    limit: most tokens worth drafting (max_tokens left, room in the context). step_ms: of one more draft.
    entry_ms: what the first one costs besides (text the draft model has not read yet). known: buckets
    drafted already; tokens: those tokens, where drafting them cost nothing. steps: of one more draft for
    several sequences together, by their number; None: each costs as much as alone.
    """

    belief: Belief
    limit: int
    step_ms: float
    entry_ms: float = 0.0
    known: Sequence[int] = ()
    tokens: Sequence[int] = ()
    steps: CostTable | None = None


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


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Milliseconds of a round. pass_ms[rows]: the target's pass of that width, padding included, long
    enough for every candidate at its limit. plain_ms, drafting_ms: all that is neither a pass nor a
    draft, in a round without drafts and in one with some. alike: of so many sequences each has as many
    rows as the one with the most; 0: each has its own.
    """

    pass_ms: Floats
    plain_ms: float
    drafting_ms: float
    alike: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Depth per candidate, and the rate (tokens per millisecond) they are expected to give."""

    depths: list[int]
    rate: float


def best_value(candidate: Candidate, pass_ms: Floats, rate: float) -> float:
    """The most that gain - rate·cost comes to at any depth, in tokens.

    pass_ms[k]: what the target pass costs when this sequence brings k drafted tokens. Drafting the tokens of
    `known` is paid.
    """
    limit = min(candidate.limit, len(pass_ms) - 1)
    cost = pass_ms[: limit + 1]
    if (drafted := len(candidate.known)) < limit:
        cost = cost.copy()
        cost[drafted + 1 :] += _COUNTS[1 : limit - drafted + 1] * candidate.step_ms
    if not candidate.known:
        cost[1:] += candidate.entry_ms
    gain = candidate.belief.survival(candidate.known, limit).cumsum()
    return float((gain - rate * cost).max())


class DepthPolicy(Protocol):
    """How deep each sequence drafts. fixed: whatever it costs."""

    fixed: bool

    def decide(
        self,
        candidates: Sequence[Candidate],
        costs: RoundCosts,
        other_rows: int = 0,
        others: int = 0,
    ) -> Decision:
        """Depths for all sequences of a round together.

        other_rows: of the same pass, of prompts and of sequences that bring no drafts; others: of those,
        sequences that get a token each.
        """

    def at_first(self, candidate: Candidate, round_ms: Floats, rate: float) -> int:
        """How many known tokens to verify in this round, where the rest may come with the next one; 0: none.

        round_ms[k]: what a round costs in which this sequence brings k of them, the most they may be at the
        end.
        """

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        """Is one more draft worth its time, now that the confidence of the last ones is known?"""

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        """How many of the drafted tokens to verify: the last ones may have turned out too doubtful."""


class MeasuredDepth:
    """As deep as it pays by the measured costs and the belief, down to not at all."""

    fixed = False

    def decide(
        self,
        candidates: Sequence[Candidate],
        costs: RoundCosts,
        other_rows: int = 0,
        others: int = 0,
    ) -> Decision:
        n, rows = len(candidates), len(candidates) + other_rows
        gain, spent = float(n + others), costs.drafting_ms
        plain = gain / (float(costs.pass_ms[rows]) + costs.plain_ms)
        depths, taken = [0] * n, list[int]()
        together = _Together()
        best, count = plain * MARGIN, 0
        for survival, at in _by_worth(candidates, plain, costs.alike > 0):
            taken.append(at)
            depths[at] += 1
            gain += survival
            spent += together.added_ms(candidates[at], depths[at])
            rows = max(rows, costs.alike * (1 + depths[at])) if costs.alike else rows + 1
            reached = gain / (spent + float(costs.pass_ms[rows]))
            if reached > best:
                best, count = reached, len(taken)
        if not count:
            return Decision([0] * n, plain)
        return Decision([taken[:count].count(at) for at in range(n)], best)

    def at_first(self, candidate: Candidate, round_ms: Floats, rate: float) -> int:
        """The k that gains most in two rounds: Σ_{j≤k} S_j - rate·cost(k), and what the next round gains
        at its best depth, if these and the token after them come (S_{k+1}).

        Whether a passage is repeated shows in its first tokens. They tell it at a small part of the price,
        or, as the target's own, for nothing; then all the rest is surer.
        """
        most = len(round_ms) - 1
        known = [*candidate.known[: 2 * most + 1]]
        known += known[-1:] * (2 * most + 1 - len(known))
        survival = candidate.belief.survival(known, 2 * most + 1)
        cost = rate * round_ms
        kept = survival.cumsum()
        # later[k, j]: Σ_{i≤j} S_{k+1+i}, the tokens of the next round with j drafts
        later = sliding_window_view(kept[1:], most + 1) - kept[: most + 1, None]
        after = (later - survival[1 : most + 2, None] * cost).max(axis=1)
        return int((kept[: most + 1] - cost + after.clip(min=0)).argmax())

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        drafted = len(candidate.known)  # what those have cost is paid
        limit = min(candidate.limit, len(pass_ms) - 1)
        if drafted >= limit:
            return False
        gain = candidate.belief.survival(candidate.known, limit)[drafted + 1 :].cumsum()
        cost = pass_ms[drafted + 1 : limit + 1] - pass_ms[drafted]
        cost += _COUNTS[1 : limit - drafted + 1] * candidate.step_ms
        return bool((gain - rate * cost).max() > 0)

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        limit = min(len(candidate.known), len(pass_ms) - 1)
        gain = candidate.belief.survival(candidate.known, limit).cumsum()
        return int((gain - rate * pass_ms[: limit + 1]).argmax())


def _by_worth(candidates: Sequence[Candidate], rate: float, alike: bool) -> list[tuple[float, int]]:
    """(chance to be kept, whose) of each draft there may be, what is worth most beyond its step first.

    Of one sequence the earlier ones first: they are likelier to be kept. alike: rows up to the deepest
    cost nothing, so all that are as deep come together, and what is not worth its step does not come.
    """
    found = []
    for at, candidate in enumerate(candidates):
        cost = rate * candidate.step_ms
        survival = candidate.belief.survival(candidate.known, candidate.limit)[1:].tolist()
        for depth, each in enumerate(survival):
            if each > (max(LEAST, cost) if alike else LEAST):
                found.append((depth if alike else 0, cost - each, each, at))
    found.sort(key=lambda each: each[:2])
    return [(survival, at) for *_, survival, at in found]


class _Together:
    """What drafts cost where several sequences take each step in one pass of the draft."""

    def __init__(self) -> None:
        self._drafting: dict[int, int] = {}  # how many draft so deep

    def added_ms(self, candidate: Candidate, depth: int) -> float:
        """Of the draft that takes this one to `depth`."""
        if depth <= len(candidate.known):
            return 0.0
        entry_ms = candidate.entry_ms if depth == 1 else 0.0
        if candidate.steps is None:
            return candidate.step_ms + entry_ms
        others = self._drafting.get(depth, 0)
        self._drafting[depth] = others + 1
        before = candidate.steps.ms(others) if others else 0.0
        return max(candidate.steps.ms(others + 1) - before, 0.0) + entry_ms


class FixedDepth:
    """Always the same number of drafts: what other engines do, and what we measure against."""

    fixed = True

    def __init__(self, depth: int) -> None:
        if not 0 <= depth <= MAX_LIMIT:
            raise ValueError(f"depth must be between 0 and {MAX_LIMIT}, not {depth}")
        self.depth = depth

    def decide(
        self,
        candidates: Sequence[Candidate],
        costs: RoundCosts,
        other_rows: int = 0,
        others: int = 0,
    ) -> Decision:
        return Decision([min(self.depth, c.limit) for c in candidates], 0.0)

    def at_first(self, candidate: Candidate, round_ms: Floats, rate: float) -> int:
        return len(round_ms) - 1

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        return len(candidate.known) < min(self.depth, candidate.limit)

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        return len(candidate.known)
