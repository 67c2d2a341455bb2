"""What is known of how often drafts are accepted: of a kind of drafts with a pair, and of one text.

Acceptance is per drafted token, by the draft's confidence in it. `Calibration` is kept between runs;
a `Belief` begins with it and follows one sequence token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
MAX_LIMIT = 64  # a request may ask for so many drafts, lookup may bring so many
# Expected of a draft model nobody has seen at work. Hopeful: a few rounds that did not pay teach more
# than waiting, and are forgotten after the first text.
INITIAL_ACCEPTANCE = 0.75
# Probing whether drafts have become good is paid from a credit in units of one plain token's time: a new
# draft model begins with some, and what short answers leave over is kept. The share of time that earns
# it falls to the least one as the prior comes to say that this pair's drafts are never good.
PROBE_SHARE, LEAST_PROBE_SHARE = 0.007, 0.004
FIRST_CREDIT, MOST_CREDIT = 2.0, 4.0
GOOD = GRID >= 0.6  # rates at which drafting pays on most machines
_TRIED = 16  # checked drafts from which on a draft model is not new, and all sequences may try it
_HOPE = 50  # checked drafts that what is expected of a new one is worth


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

    def __init__(self, mean: float = INITIAL_ACCEPTANCE, certain: bool = False) -> None:
        """certain: some of its drafts are as good as certain in any text, and say nothing about one."""
        self._certain = certain
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
        # The share of time worth spending on probes: where half of all text drafts well, all of it.
        good = min(2 * float(self.prior @ GOOD), 1.0)
        self.probe_share = max(PROBE_SHARE * good, LEAST_PROBE_SHARE)
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
        pull = max(1 / (float(self.count.sum()) + _HOPE), 0.002)
        if self._certain:
            pull *= 4 * expected * (1 - expected)
        self.prior = np.maximum((1 - pull) * self.prior + pull * belief, 0.002)
        self.prior /= self.prior.sum()
        self._since += 1
        if self._since >= 8:
            self._refresh()

    def expect(self, belief: Floats) -> None:
        """Texts are likely to be as `belief` (len(GRID),) says: as much as what was expected before."""
        self.prior = np.maximum((self.prior + belief) / 2, 0.002)
        self.prior /= self.prior.sum()
        self._refresh()

    @property
    def unknown(self) -> bool:
        """Has nothing been checked yet?"""
        return not self.count.any()

    @property
    def new(self) -> bool:
        """Has so little been checked that what the first texts show is news for all?"""
        return float(self.count.sum()) < _TRIED

    def earn(self, spent_ms: float, plain_ms: float) -> None:
        """`spent_ms` went by without drafts: a share of it may be spent on probing."""
        if self._credit_ms is None:
            self._credit_ms = FIRST_CREDIT * plain_ms if self.new else 0.0
        self._credit_ms += spent_ms * self.probe_share
        self._credit_ms = min(self._credit_ms, MOST_CREDIT * plain_ms)

    def pay(self, cost_ms: float) -> bool:
        """Spend on a probe, if there is enough."""
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
    def from_dict(
        cls, stored: Any, mean: float = INITIAL_ACCEPTANCE, certain: bool = False
    ) -> Calibration:
        """A stored calibration; a fresh one if it is not sound."""
        fresh = cls(mean, certain)
        sizes = {"prior": len(GRID), "offset": BUCKETS, "share": BUCKETS, "count": BUCKETS}
        if not isinstance(stored, dict):
            return fresh
        for name, size in sizes.items():
            values = stored.get(name)
            if not isinstance(values, list) or len(values) != size:
                return cls(mean, certain)
            if not all(isinstance(v, float | int) and math.isfinite(v) for v in values):
                return cls(mean, certain)
            setattr(fresh, name, np.array(values, dtype=np.float64))
        shares = (fresh.prior, fresh.share)
        if any(abs(s.sum() - 1) > 0.01 or s.min() < 0 for s in shares):
            return cls(mean, certain)
        if np.abs(fresh.offset).max() > 6.0 or fresh.count.min() < 0:
            return cls(mean, certain)
        fresh._refresh()
        return fresh


class Belief:
    """What one sequence believes of its acceptance rate: weights over GRID, updated token by token.

    A switching mixture (Herbster and Warmuth's fixed share): Bayes on each checked draft, then a
    share CHANGE goes back to the prior, so that a burst is noticed within a few tokens.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._weights: Floats = calibration.prior.copy()
        self._unseen = 0  # tokens that told nothing and are not in the weights yet

    @property
    def weights(self) -> Floats:
        """(len(GRID),): how likely each acceptance rate is now."""
        if self._unseen:
            keep = (1 - CHANGE) ** self._unseen
            self._weights = keep * self._weights + (1 - keep) * self.calibration.prior
            self._unseen = 0
        return self._weights

    @weights.setter
    def weights(self, weights: Floats) -> None:
        self._weights, self._unseen = weights, 0

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
        self._unseen += tokens

    @property
    def mean(self) -> float:
        """The acceptance rate expected of the next draft."""
        return float(self.weights @ self.calibration.unseen[1])

    def survival(self, known: Sequence[int], depth: int) -> Floats:
        """(depth + 1,): entry j is the chance that the first j drafts all survive; entry 0 is 1.

        known: buckets of the tokens drafted already; the others are as the calibration expects.
        """
        cal, alive = self.calibration, self.weights
        out = np.ones(depth + 1)
        first = min(len(known), depth)
        if first:
            all_kept = cal.rates[list(known[:first])].cumprod(axis=0)
            out[1 : first + 1] = all_kept @ alive
            alive = alive * all_kept[-1]
        if depth > first:
            out[first + 1 :] = cal.unseen[1 : depth - first + 1] @ alive
        return out
