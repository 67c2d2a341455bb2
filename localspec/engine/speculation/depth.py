"""How deep to draft: pure arithmetic over measured costs and a belief about acceptance.

A round that drafts K tokens yields 1 + Σ_{j≤K} S_j tokens on average, S_j being the probability that
the first j drafts all survive, and costs K·t_d + t_v(width(K+1)) + o. The policy maximises tokens per
second over whole candidates K = 0…K_max, K = 0 being plain decoding. Several sequences share a pass,
so the ratio is maximised jointly (Dinkelbach 1967: maximise gain - rate·cost, with the rate of the
last solution, until it stands).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# What the per-token acceptance rate may be. Finer steps change no decision.
GRID: Floats = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])
_LOGITS: Floats = np.log(GRID / (1 - GRID))
# Confidence of a drafted token, or its match length for lookup, in ten steps.
CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
BUCKETS = len(CONFIDENCE_EDGES) + 1
# Chance per token that the text has changed its nature (prose to code, a quotation begins): the share
# of belief that goes back to the prior at each observation. 1/40 follows changes within ten tokens
# and costs a steady text about one percent of its best depth.
CHANGE = 1 / 40
MAX_DEPTH = 15  # drafted by the policy; one pass of 16 rows
MAX_LIMIT = 64  # a request may ask for so many, lookup may bring so many
# Expected of a draft model nobody has seen at work. Hopeful: a few rounds that did not pay teach more
# than waiting, and are forgotten after the first text.
INITIAL_ACCEPTANCE = 0.75
# Looking whether drafts have become good is paid from a credit in units of one plain token's time: a new
# draft model begins with some, and what short answers leave over is kept. The share of time that earns
# it falls to the least one as the prior comes to say that this pair's drafts are never good.
PROBE_SHARE, LEAST_PROBE_SHARE = 0.007, 0.004
FIRST_CREDIT, MOST_CREDIT = 2.0, 4.0
GOOD = GRID >= 0.6  # rates at which drafting pays on most machines
# Drafting must promise so much more than plain decoding: the best of several estimates is an
# optimistic one, and near the break-even the error would be paid for and nothing won.
MARGIN = 1.03
PROBE_GAP = 8  # tokens between two looks at least
PROBE_LEFT = 32  # with fewer tokens to come there is nothing to win by looking
_KNOWN = 50  # checked drafts from which on a draft model is no longer new


def bucket(confidence: float) -> int:
    """Which of the BUCKETS a confidence in [0, 1] falls into."""
    at = 0
    for edge in CONFIDENCE_EDGES:
        if confidence < edge:
            break
        at += 1
    return at


class Calibration:
    """What is known of one kind of drafts with one pair, kept between runs.

    `prior` (len(GRID),): how likely each acceptance rate is before anything was seen. `offset[b]`: how
    much more (log-odds) a draft of confidence bucket b is accepted than the text's average. `share[b]`:
    how often bucket b occurs. `count[b]`: drafts checked.
    """

    def __init__(self, mean: float = INITIAL_ACCEPTANCE) -> None:
        weights = np.exp(-((GRID - mean) ** 2) / 0.18)  # a broad hill around the expected mean
        self.prior: Floats = weights / weights.sum()
        self.offset: Floats = np.zeros(BUCKETS)
        self.share: Floats = np.full(BUCKETS, 1 / BUCKETS)
        self.count: Floats = np.zeros(BUCKETS)
        self._credit_ms: float | None = None
        self._refresh()

    def _refresh(self) -> None:
        # rates[b, g]: acceptance of a draft of bucket b when the text's rate is GRID[g]
        self.rates: Floats = 1 / (1 + np.exp(-(_LOGITS[None, :] + self.offset[:, None])))
        # unseen[j, g]: chance that j drafts of unknown confidence all survive
        mixed = self.share @ self.rates
        self.unseen: Floats = mixed[None, :] ** np.arange(MAX_LIMIT + 1)[:, None]
        self._since = 0

    def learn(self, at: int, hit: bool, expected: float, belief: Floats) -> None:
        """One checked draft of bucket `at`, expected to be accepted with probability `expected`, in a
        text whose rate is now believed to be `belief`.
        """
        self.count[at] += 1
        # Stochastic gradient on the log-odds, the step shrinking to 2 % so that it still follows.
        step = max(2.0 / (float(self.count[at]) + 8), 0.02)
        self.offset[at] = min(max(self.offset[at] + step * (hit - expected), -6.0), 6.0)
        rate = max(1 / (float(self.count.sum()) + 1), 0.005)
        self.share *= 1 - rate
        self.share[at] += rate
        # The prior moves to what texts turn out to be, faster while little has been seen of any, and
        # keeps a floor under every rate.
        pull = max(1 / (float(self.count.sum()) + 50), 0.002)
        self.prior = np.maximum((1 - pull) * self.prior + pull * belief, 0.002)
        self.prior /= self.prior.sum()
        self._since += 1
        if self._since >= 8:
            self._refresh()

    @property
    def probe_share(self) -> float:
        """The share of time worth spending on looks: where half of all text drafts well, all of it."""
        return max(PROBE_SHARE * min(2 * float(self.prior @ GOOD), 1.0), LEAST_PROBE_SHARE)

    def earn(self, spent_ms: float, plain_ms: float) -> None:
        """`spent_ms` went by without drafts: a share of it may be spent on looking."""
        if self._credit_ms is None:
            new = self.count.sum() < _KNOWN
            self._credit_ms = FIRST_CREDIT * plain_ms if new else 0.0
        self._credit_ms += spent_ms * self.probe_share
        self._credit_ms = min(self._credit_ms, MOST_CREDIT * plain_ms)

    def pay(self, cost_ms: float) -> bool:
        """Spend on a look, if there is enough."""
        if self._credit_ms is None or self._credit_ms < cost_ms:
            return False
        self._credit_ms -= cost_ms
        return True

    def as_dict(self) -> dict[str, Any]:
        return {
            "prior": self.prior.tolist(),
            "offset": self.offset.tolist(),
            "share": self.share.tolist(),
            "count": np.minimum(self.count, 500.0).tolist(),
        }

    @classmethod
    def from_dict(cls, stored: Any, mean: float = INITIAL_ACCEPTANCE) -> Calibration:
        """A stored calibration; a fresh one if it is not sound."""
        fresh = cls(mean)
        sizes = {"prior": len(GRID), "offset": BUCKETS, "share": BUCKETS, "count": BUCKETS}
        if not isinstance(stored, dict):
            return fresh
        for name, size in sizes.items():
            values = stored.get(name)
            if not isinstance(values, list) or len(values) != size:
                return cls(mean)
            if not all(isinstance(v, float | int) and math.isfinite(v) for v in values):
                return cls(mean)
            setattr(fresh, name, np.array(values, dtype=np.float64))
        shares = (fresh.prior, fresh.share)
        if any(abs(s.sum() - 1) > 0.01 or s.min() < 0 for s in shares):
            return cls(mean)
        if np.abs(fresh.offset).max() > 6.0 or fresh.count.min() < 0:
            return cls(mean)
        fresh._refresh()
        return fresh


class Belief:
    """What one sequence believes of its acceptance rate: weights over GRID, updated token by token.

    A switching mixture (Herbster and Warmuth's fixed share): Bayes on each checked draft, then a
    share CHANGE goes back to the prior, so that a burst is noticed within a few tokens.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.weights: Floats = calibration.prior.copy()

    def observe(self, at: int, hit: bool) -> None:
        """A draft of bucket `at` was accepted (`hit`) or rejected; later ones of a round say nothing."""
        rates = self.calibration.rates[at]
        expected = float(self.weights @ rates)
        weights = self.weights * (rates if hit else 1 - rates)
        self.weights = weights / max(float(weights.sum()), 1e-12)
        self.calibration.learn(at, hit, expected, self.weights)
        self.fade(1)

    def fade(self, tokens: int) -> None:
        """`tokens` have passed that told nothing: some of what was known has gone stale."""
        keep = (1 - CHANGE) ** tokens
        self.weights = keep * self.weights + (1 - keep) * self.calibration.prior

    @property
    def mean(self) -> float:
        """The acceptance rate expected of the next draft."""
        return float(self.weights @ self.calibration.unseen[1])

    def survival(self, known: Sequence[int], depth: int) -> Floats:
        """(depth + 1,): entry j is the chance that the first j drafts all survive; entry 0 is 1.

        known: buckets of the tokens drafted already; the others are as the calibration expects.
        """
        cal = self.calibration
        alive = self.weights
        out = np.ones(depth + 1)
        for j, at in enumerate(known[:depth], start=1):
            alive = alive * cal.rates[at]
            out[j] = alive.sum()
        first = len(known)
        if depth > first:
            out[first + 1 :] = cal.unseen[1 : depth - first + 1] @ alive
        return out


@dataclass(slots=True)
class Candidate:
    """One sequence in a round: what it may gain and what a drafted token costs it.

    limit: most tokens worth drafting (max_tokens left, room in the context). entry_ms: what the first
    draft costs besides (text the draft model has not read yet). known: buckets drafted already.
    """

    belief: Belief
    limit: int
    step_ms: float
    entry_ms: float = 0.0
    known: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Depth per candidate, and the rate (tokens per millisecond) they are expected to give."""

    depths: list[int]
    rate: float


def best_depth(
    candidate: Candidate, pass_ms: Floats, rate: float, least: int = 0
) -> tuple[int, float, float]:
    """The depth ≥ `least` that maximises gain - rate·cost; (depth, gain in tokens, that maximum).

    pass_ms[k]: what the target pass costs when this sequence brings k drafted tokens. Costs already
    paid (drafting the tokens of `known`) are not counted again.
    """
    limit = max(min(candidate.limit, len(pass_ms) - 1), least)
    gain = np.cumsum(candidate.belief.survival(candidate.known, limit))[least:]
    depths = np.arange(least, limit + 1)
    cost = (
        np.maximum(depths - len(candidate.known), 0) * candidate.step_ms
        + pass_ms[least : limit + 1]
    )
    if not candidate.known:
        cost = cost + (depths > 0) * candidate.entry_ms
    value = gain - rate * cost
    best = int(np.argmax(value))
    return least + best, float(gain[best]), float(value[best])


def decide(
    candidates: Sequence[Candidate], pass_ms: Floats, overhead_ms: float, other_rows: int = 0
) -> Decision:
    """Depths for all sequences of a round together.

    pass_ms[rows]: the target pass of that width, padding included; long enough for every candidate at
    its limit. other_rows: prompt rows read in the same pass.
    """
    n = len(candidates)
    base = n + other_rows
    rate = n / (float(pass_ms[base]) + overhead_ms)
    depths = [0] * n
    for _ in range(4):
        rows, gain, spent = base, 0.0, overhead_ms
        chosen = []
        for candidate in candidates:
            depth, tokens, _ = best_depth(candidate, pass_ms[rows:] - pass_ms[rows], rate)
            chosen.append(depth)
            rows += depth
            gain += tokens
            spent += depth * candidate.step_ms + (candidate.entry_ms if depth else 0.0)
        reached = gain / (spent + float(pass_ms[rows]))
        if reached <= rate * (1.0001 if any(depths) else MARGIN):
            break
        depths, rate = chosen, reached
    return Decision(depths, rate)


def keep_drafting(candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
    """Is one more draft worth its time, now that the confidence of the last ones is known?"""
    drafted = len(candidate.known)
    return best_depth(candidate, pass_ms, rate, least=drafted)[0] > drafted


def worth_verifying(candidate: Candidate, pass_ms: Floats, rate: float) -> int:
    """How many of the drafted tokens to verify: the last ones may have turned out too doubtful."""
    bounded = Candidate(candidate.belief, len(candidate.known), 0.0, 0.0, candidate.known)
    return best_depth(bounded, pass_ms, rate)[0]


class DepthPolicy(Protocol):
    """What the step loop asks; arguments as for the functions of the same names."""

    def decide(
        self, candidates: Sequence[Candidate], pass_ms: Floats, overhead_ms: float, other_rows: int
    ) -> Decision: ...

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool: ...

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int: ...


class MeasuredDepth:
    """As deep as it pays by the measured costs and the belief, down to not at all."""

    def decide(
        self, candidates: Sequence[Candidate], pass_ms: Floats, overhead_ms: float, other_rows: int
    ) -> Decision:
        return decide(candidates, pass_ms, overhead_ms, other_rows)

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        return keep_drafting(candidate, pass_ms, rate)

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        return worth_verifying(candidate, pass_ms, rate)


class FixedDepth:
    """Always the same number of drafts: what other engines do, and what we measure against."""

    def __init__(self, depth: int) -> None:
        if not 0 <= depth <= MAX_LIMIT:
            raise ValueError(f"depth must be between 0 and {MAX_LIMIT}, not {depth}")
        self.depth = depth

    def decide(
        self, candidates: Sequence[Candidate], pass_ms: Floats, overhead_ms: float, other_rows: int
    ) -> Decision:
        return Decision([min(self.depth, c.limit) for c in candidates], 0.0)

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        return len(candidate.known) < min(self.depth, candidate.limit)

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        return len(candidate.known)
