"""What speculation should gain, by formula and by replay with measured costs. Pure arithmetic.

A draft of γ tokens of which each is accepted with probability α if all before it were, gives
(1 − α^(γ+1)) / (1 − α) tokens per pass, the target's own one included (Leviathan et al. 2023). What a pass
costs is a staircase of its width that differs by machine, so speed-ups come from the measured one.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.cli.bench.report import Acceptance, Costs, Round, Theory

Took = Sequence[tuple[Sequence[Round], float]]
_PAD = 0.98  # a wider pass is taken where it costs less than this share: as the engine does
DEEPEST = 12  # drafts of a pass that are replayed


def expected_tokens(alpha: float, depth: float) -> float:
    """Of one pass with so many drafts; depth 0: 1."""
    if alpha >= 1:
        return depth + 1
    survives: float = alpha ** (depth + 1)
    return (1 - survives) / (1 - alpha)


class Prices:
    """Milliseconds of rounds by how many tokens they draft.

    What llama.cpp's passes cost by their width is known from the load. What else a round takes, and a drafted
    token, is what answers took beyond that: drafting, looking up, choosing and checking, all of it in Python
    too, which is most of a tiny pair's time.
    """

    def __init__(self, costs: Costs, plain_ms: float | None = None) -> None:
        """plain_ms: that a token took without drafts; None: it was not measured."""
        self._widths = sorted(costs.target_ms)
        load = [costs.target_ms[width] for width in self._widths]
        self.plain = load[0] + costs.overhead_ms if plain_ms is None else plain_ms
        # Passes that were dearer at the load than whole rounds are now were dearer at every width.
        share = min(self.plain / load[0], 1.0)
        self._ms = [ms * share for ms in load]
        self._overhead = self.plain - self._ms[0]
        self.drafted, self.drafting = costs.draft_ms.get(1, 0.0), 0.0

    def learn(self, deep: Took, shallow: Took = ()) -> None:
        """What drafting costs, each round and each drafted token, from answers at two depths: their rounds,
        and the milliseconds these took.
        """
        self.drafted = self.drafting = 0.0
        (rounds, tokens, ms), (few, others, own) = (self._beyond(each) for each in (deep, shallow))
        apart = rounds * others - few * tokens
        if apart:
            drafting = (ms * others - own * tokens) / apart
            drafted = (rounds * own - few * ms) / apart
            if min(drafting, drafted) >= 0:
                self.drafting, self.drafted = drafting, drafted
                return
            if drafted < 0:
                self.drafting = max(ms + own, 0.0) / (rounds + few)
                return
        if tokens + others:
            self.drafted = max(ms + own, 0.0) / (tokens + others)

    def _beyond(self, answers: Took) -> tuple[int, int, float]:
        """Rounds that drafted, tokens they drafted, and milliseconds beyond all passes."""
        rounds = [each for some, _ in answers for each in some]
        tokens = sum(each.drafted for each in rounds)
        if not tokens:
            return 0, 0, 0.0
        spent = sum(ms for _, ms in answers) - sum(map(self.spent, rounds))
        return sum(each.drafted > 0 for each in rounds), tokens, spent

    def target(self, rows: float) -> float:
        """Of a pass with so many rows: linear between measured widths, or a wider one that is cheaper."""
        own = self._linear(rows)
        wider = [ms for width, ms in zip(self._widths, self._ms, strict=True) if width > rows]
        best = min(wider, default=own)
        return best if best < own * _PAD else own

    def round(self, depth: float) -> float:
        drafting = depth * self.drafted + (self.drafting if depth else 0.0)
        return self.target(depth + 1) + drafting + self._overhead

    def spent(self, seen: Round) -> float:
        """What came together may be of several rounds: each brings one token beside the accepted."""
        count = max(seen.tokens - seen.accepted, 1)
        return count * self.round(seen.drafted / count)

    def _linear(self, rows: float) -> float:
        if rows <= self._widths[0]:
            return self._ms[0]
        for at in range(1, len(self._widths)):
            if rows <= self._widths[at]:
                low, high = self._widths[at - 1], self._widths[at]
                share = (rows - low) / (high - low)
                return self._ms[at - 1] + share * (self._ms[at] - self._ms[at - 1])
        slope = max(self._ms[-1] - self._ms[0], 0.0) / max(self._widths[-1] - 1, 1)
        return self._ms[-1] + (rows - self._widths[-1]) * slope


def by_formula(acceptance: Acceptance, depth: float, prices: Prices) -> Theory:
    """At the measured acceptance and mean depth."""
    tokens = expected_tokens(acceptance.conditional or 0.0, depth)
    return Theory(depth, tokens, tokens * prices.plain / prices.round(depth))


def hits(rounds: Sequence[Round]) -> list[bool]:
    """Token by token, whether a draft was right there, from rounds that drafted as deep as they could.

    Behind drafts that were all accepted nobody knows; there none is taken for right, so that what replay
    promises is no more than was seen.
    """
    known: list[bool] = []
    for each in rounds:
        known += [True] * each.accepted + [False] * (each.tokens - each.accepted)
    return known


def fixed(known: Sequence[bool], depth: int, prices: Prices) -> float:
    """Milliseconds of all tokens if every round drafted so many, but no more than there are tokens left."""
    at, ms = 0, 0.0
    while at < len(known):
        drafted = min(depth, len(known) - at - 1)
        ms += prices.round(drafted)
        at += _right(known, at, drafted) + 1
    return ms


def clairvoyant(known: Sequence[bool], deepest: int, prices: Prices) -> float:
    """Milliseconds at the least, of somebody who knows what will be accepted: more than that is drafted only
    where a wider pass was measured to be cheaper.
    """
    round_ms = [prices.round(depth) for depth in range(deepest + 1)]
    left = [0.0] * (len(known) + 1)
    for at in reversed(range(len(known))):
        most = min(deepest, len(known) - at - 1)
        right = _right(known, at, most)
        left[at] = min(
            round_ms[depth] + left[at + min(depth, right) + 1] for depth in range(most + 1)
        )
    return left[0]


def _right(known: Sequence[bool], at: int, most: int) -> int:
    """How many tokens from there on a draft would have right, `most` at the most."""
    count = 0
    while count < most and known[at + count]:
        count += 1
    return count


def replay(
    theory: Theory, probes: Sequence[Sequence[Round]], own_ms: float, prices: Prices
) -> Theory:
    """`theory` with what replay says. probes: answers drafted as deep as they could; own_ms: that a token
    took at the depths chosen here.
    """
    traces = [known for each in probes if (known := hits(each))]
    tokens = sum(map(len, traces))
    if not tokens:
        return theory
    plain, own = tokens * prices.plain, tokens * own_ms
    times = [sum(fixed(known, depth, prices) for known in traces) for depth in range(DEEPEST + 1)]
    best = min(range(len(times)), key=times.__getitem__)
    least = sum(clairvoyant(known, DEEPEST, prices) for known in traces)
    theory.best_depth, theory.best_speed_up = best, plain / times[best]
    theory.optimum, theory.reached = plain / least, least / own
    theory.regret = own / times[best] - 1
    return theory
