"""Predict the gain of speculation by formula and by replay with measured costs. Pure arithmetic.

A draft of γ tokens, each of which is accepted with probability α if all before it were, gives
(1 − α^(γ+1)) / (1 − α) tokens per pass, including the target's own one (Leviathan et al. 2023). The cost of a
pass is a staircase of its width that differs by machine, so speed-ups are computed from the measured one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from localspec.extras.bench.report import Acceptance, Costs, Round, Theory

# Answers: their rounds, and the milliseconds taken.
TimedRounds = Sequence[tuple[Sequence[Round], float]]
# A wider pass is used if it costs less than this fraction of the narrower one, as in the engine.
_WIDER_PASS_RATIO = 0.98
MAX_REPLAY_DEPTH = 12  # most drafts of a pass that are replayed


def expected_tokens(alpha: float, depth: float) -> float:
    """Return the expected tokens of a pass with this many drafts; depth 0: 1."""
    return depth + 1 if alpha >= 1 else float((1 - alpha ** (depth + 1)) / (1 - alpha))


class RoundPrices(Protocol):
    """The costs that a replay computes with."""

    def round_cost(self, depth: int) -> float:
        """Return the milliseconds of a round that drafts this many tokens."""


class RoundCosts:
    """A model of the cost of rounds in milliseconds, by the number of drafted tokens.

    The costs of llama.cpp's passes by their width are known from the load. The remaining cost of a round and
    of a drafted token is the time that answers took beyond that: drafting, lookup, sampling and verification.
    All of it includes Python code, which is most of a tiny pair's time.
    """

    def __init__(self, costs: Costs, plain_ms: float | None = None) -> None:
        """Start with the costs at load.

        plain_ms: milliseconds that a token took without drafts; None: not measured.
        """
        self._widths = sorted(costs.target_ms)
        load_ms = [costs.target_ms[width] for width in self._widths]
        self.plain = load_ms[0] + costs.overhead_ms if plain_ms is None else plain_ms
        # If a pass at load was more expensive than a whole round is now, passes of every width were more
        # expensive then, so that all of them are scaled down.
        scale = min(self.plain / load_ms[0], 1.0)
        self._pass_ms = [ms * scale for ms in load_ms]
        self._overhead = self.plain - self._pass_ms[0]
        self.drafted, self.drafting = costs.draft_ms.get(1, 0.0), 0.0

    def learn(self, deep: TimedRounds, shallow: TimedRounds = ()) -> None:
        """Learn the cost of drafting per round and per drafted token from answers at two depths."""
        self.drafted = self.drafting = 0.0
        (rounds, tokens, ms), (shallow_rounds, shallow_tokens, shallow_ms) = (
            self._time_beyond_passes(answers) for answers in (deep, shallow)
        )
        # Two linear equations, one for each depth: rounds × per_round + tokens × per_token = milliseconds.
        # Where noise makes a cost negative, that cost is taken as 0 and the other carries all of the time.
        determinant = rounds * shallow_tokens - shallow_rounds * tokens
        if determinant:
            per_round = (ms * shallow_tokens - shallow_ms * tokens) / determinant
            per_token = (rounds * shallow_ms - shallow_rounds * ms) / determinant
            if min(per_round, per_token) >= 0:
                self.drafting, self.drafted = per_round, per_token
                return
            if per_token < 0:
                self.drafting = max(ms + shallow_ms, 0.0) / (rounds + shallow_rounds)
                return
        if tokens + shallow_tokens:
            self.drafted = max(ms + shallow_ms, 0.0) / (tokens + shallow_tokens)

    def _time_beyond_passes(self, answers: TimedRounds) -> tuple[int, int, float]:
        """Return the rounds that drafted, their drafted tokens, and the milliseconds beyond passes."""
        rounds = [round_ for answer_rounds, _ in answers for round_ in answer_rounds]
        tokens = sum(round_.drafted for round_ in rounds)
        if not tokens:
            return 0, 0, 0.0
        remaining_ms = sum(ms for _, ms in answers) - sum(map(self.reported_cost, rounds))
        return sum(round_.drafted > 0 for round_ in rounds), tokens, remaining_ms

    def pass_cost(self, rows: float) -> float:
        """Return the cost of a pass with this many rows.

        It is interpolated between measured widths, unless a wider pass is cheaper.
        """
        widths, costs = self._widths, self._pass_ms
        if rows <= widths[0]:
            exact = costs[0]
        elif rows > widths[-1]:
            slope = max(costs[-1] - costs[0], 0.0) / max(widths[-1] - 1, 1)
            exact = costs[-1] + (rows - widths[-1]) * slope
        else:
            above = bisect_left(widths, rows)
            low, low_ms = widths[above - 1], costs[above - 1]
            fraction = (rows - low) / (widths[above] - low)
            exact = low_ms + fraction * (costs[above] - low_ms)
        wider = [ms for width, ms in zip(widths, costs, strict=True) if width > rows]
        cheapest = min(wider, default=exact)
        return cheapest if cheapest < exact * _WIDER_PASS_RATIO else exact

    def round_cost(self, depth: float) -> float:
        """Return the cost of a round that drafts this many tokens."""
        drafting = depth * self.drafted + (self.drafting if depth else 0.0)
        return self.pass_cost(depth + 1) + drafting + self._overhead

    def reported_cost(self, reported: Round) -> float:
        """Return the cost of rounds that are reported together.

        Each of them produces one token in addition to the accepted ones.
        """
        count = max(reported.tokens - reported.accepted, 1)
        return count * self.round_cost(reported.drafted / count)


def predict_by_formula(acceptance: Acceptance, depth: float, prices: RoundCosts) -> Theory:
    """Predict the speed-up at the measured acceptance and mean depth."""
    tokens = expected_tokens(acceptance.conditional or 0.0, depth)
    return Theory(depth, tokens, tokens * prices.plain / prices.round_cost(depth))


def draft_hits(rounds: Sequence[Round]) -> list[bool]:
    """Return for each token whether a draft was right, from rounds that drafted as deep as possible.

    Behind drafts that were all accepted this is not known. Those tokens count as wrong, so that a
    replay does not promise more than was observed.
    """
    results: list[bool] = []
    for round_ in rounds:
        results += [True] * round_.accepted + [False] * (round_.tokens - round_.accepted)
    return results


def replay_fixed_ms(hits_by_token: Sequence[bool], depth: int, prices: RoundPrices) -> float:
    """Return the milliseconds of all tokens if every round drafted `depth` tokens.

    The last rounds draft no more than the remaining tokens.
    """
    position, ms = 0, 0.0
    while position < len(hits_by_token):
        drafted = min(depth, len(hits_by_token) - position - 1)
        ms += prices.round_cost(drafted)
        position += _count_hits(hits_by_token, position, drafted) + 1
    return ms


def replay_optimal_ms(hits_by_token: Sequence[bool], deepest: int, prices: RoundPrices) -> float:
    """Return the minimum milliseconds with perfect knowledge of what will be accepted.

    More tokens than that are drafted only if a wider pass was measured to be cheaper.
    """
    round_ms = [prices.round_cost(depth) for depth in range(deepest + 1)]
    remaining_ms = [0.0] * (len(hits_by_token) + 1)
    for position in reversed(range(len(hits_by_token))):
        max_depth = min(deepest, len(hits_by_token) - position - 1)
        hit_count = _count_hits(hits_by_token, position, max_depth)
        remaining_ms[position] = min(
            round_ms[depth] + remaining_ms[position + min(depth, hit_count) + 1]
            for depth in range(max_depth + 1)
        )
    return remaining_ms[0]


def _count_hits(hits_by_token: Sequence[bool], position: int, limit: int) -> int:
    """Return how many of the next `limit` tokens a draft would have right before its first error."""
    count = 0
    while count < limit and hits_by_token[position + count]:
        count += 1
    return count


def predict_by_replay(
    theory: Theory, probes: Sequence[Sequence[Round]], own_ms: float, prices: RoundCosts
) -> Theory:
    """Add the results of a replay to `theory` and return it.

    probes: answers that drafted as deep as possible. own_ms: milliseconds per token at the chosen depths.
    """
    traces = [trace for rounds in probes if (trace := draft_hits(rounds))]
    tokens = sum(map(len, traces))
    if not tokens:
        return theory
    plain, chosen = tokens * prices.plain, tokens * own_ms
    times = [
        sum(replay_fixed_ms(trace, depth, prices) for trace in traces)
        for depth in range(MAX_REPLAY_DEPTH + 1)
    ]
    best = min(range(len(times)), key=times.__getitem__)
    optimum = sum(replay_optimal_ms(trace, MAX_REPLAY_DEPTH, prices) for trace in traces)
    theory.best_depth, theory.best_speed_up = best, plain / times[best]
    theory.optimum, theory.reached = plain / optimum, optimum / chosen
    theory.regret = chosen / times[best] - 1
    return theory
