"""How often drafts are accepted: of one kind of drafts with a pair, and in one text.

Acceptance is the probability per drafted token, given the draft's confidence in it. A `Calibration` is kept
between runs; a `Belief` begins with it and follows one sequence token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.engine.speculation.budget import ProbeBudget
from localspec.engine.speculation.windows import WindowTable

Floats = npt.NDArray[np.float64]

# The possible acceptance rates per token. Finer steps change no decision.
GRID: Floats = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])
_LOGITS: Floats = np.log(GRID / (1 - GRID))
# Edges of ten buckets of the confidence in a drafted token, or of the match length for n-gram lookup.
CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
N_BUCKETS = len(CONFIDENCE_EDGES) + 1
# Probability per token that the text changes its nature (from prose to code, or to a quotation): the share of
# belief that returns to the prior with each observation. 1/40 follows changes within ten tokens, and costs a
# steady text about one per cent of its best depth.
CHANGE_RATE = 1 / 40
MAX_DRAFTS = 64  # the most drafts that a request may ask for or that n-gram lookup may bring
# Expected of a draft model that was never used. It is hopeful because a few rounds that do not pay teach more
# than waiting does, and their cost is small after the first text.
INITIAL_ACCEPTANCE = 0.75
# After this many checked drafts a draft model is not new, and all sequences may try it.
_NEW_DRAFTS = 16
_REFRESH_DRAFTS = 8  # checked drafts after which what was learned is applied
_PRIOR_DRAFTS = 50  # the weight of the initial expectation, in checked drafts


def find_bucket(confidence: float) -> int:
    """Return the index of the bucket of a confidence in [0, 1]."""
    index = 0
    for edge in CONFIDENCE_EDGES:
        if confidence < edge:
            break
        index += 1
    return index


class Calibration:
    """The acceptance of one kind of drafts with one pair, kept between runs.

    `prior` (len(GRID),): the probability of each acceptance rate before any draft of a text was checked.
    `windows`: how well they predict with the end of a text in sight.
    `offset[b]`: how much more often (in log-odds) a draft of confidence bucket b is accepted than the
    average of its text. `share[b]`: how often bucket b occurs. `count[b]`: the drafts checked.
    """

    def __init__(self, mean: float = INITIAL_ACCEPTANCE, certain: bool = False) -> None:
        """certain: some of its drafts are nearly certain in any text, so they say nothing about one."""
        self._certain = certain
        weights = np.exp(-((GRID - mean) ** 2) / 0.18)  # a broad hill around the expected mean
        self.prior: Floats = weights / weights.sum()
        self.offset: Floats = np.zeros(N_BUCKETS)
        self.share: Floats = np.full(N_BUCKETS, 1 / N_BUCKETS)
        self.count: Floats = np.zeros(N_BUCKETS)
        self.probes = ProbeBudget()
        self.windows = WindowTable()
        self._refresh()

    def _refresh(self) -> None:
        # rates[b, g]: acceptance of a draft of bucket b where the text's rate is GRID[g]
        self.rates: Floats = 1 / (1 + np.exp(-(_LOGITS[None, :] + self.offset[:, None])))
        # unseen[j, g]: probability that j drafts of unknown confidence all survive
        mixed = self.share @ self.rates
        self.unseen: Floats = mixed[None, :] ** np.arange(MAX_DRAFTS + 1)[:, None]
        self._n_checked = float(self.count.sum())
        # The prior's movement since: prior ← _kept · prior + _pulled
        self._n_learned, self._kept, self._pulled = 0, 1.0, np.zeros(len(GRID))

    def learn(self, bucket_index: int, hit: bool, expected: float, belief: Floats) -> None:
        """Learn from one checked draft.

        bucket_index: the bucket of its confidence. expected: the probability with which it was expected to
        be accepted. belief: what is now believed of the text's rate.
        """
        self.count[bucket_index] += 1
        self._n_checked += 1
        # Stochastic gradient descent on the log-odds. The step shrinks to 2 %, so that it still follows.
        step = max(2.0 / (float(self.count[bucket_index]) + 8), 0.02)
        offset = float(self.offset[bucket_index]) + step * (hit - expected)
        self.offset[bucket_index] = min(max(offset, -6.0), 6.0)
        rate = max(1 / (self._n_checked + 1), 0.005)
        self.share *= 1 - rate
        self.share[bucket_index] += rate
        # The prior moves toward what texts turn out to be, faster while few drafts were checked.
        pull = max(1 / (self._n_checked + _PRIOR_DRAFTS), 0.002)
        if self._certain:
            pull *= 4 * expected * (1 - expected)
        self._kept *= 1 - pull
        self._pulled *= 1 - pull
        self._pulled += pull * belief
        self._n_learned += 1
        if self._n_learned >= _REFRESH_DRAFTS:
            self._apply_learned()

    def _apply_learned(self) -> None:
        """Apply what was learned to the prior, which keeps a floor under every rate, and to the rates."""
        self.prior = np.maximum(self._kept * self.prior + self._pulled, 0.002)
        self.prior /= self.prior.sum()
        self._refresh()

    def average_prior(self, belief: Floats) -> None:
        """Average the prior with `belief` (len(GRID),), an estimate of what texts are like."""
        self.prior = np.maximum((self.prior + belief) / 2, 0.002)
        self.prior /= self.prior.sum()
        self._refresh()

    @property
    def is_unused(self) -> bool:
        """Whether no draft was ever checked."""
        return not self.count.any()

    @property
    def is_new(self) -> bool:
        """Whether so few drafts were checked that the first texts still teach all others."""
        return float(self.count.sum()) < _NEW_DRAFTS

    def as_dict(self) -> dict[str, Any]:
        if self._n_learned:
            self._apply_learned()
        windows = self.windows.as_list()
        return {
            **({"windows": windows} if windows else {}),
            "prior": self.prior.tolist(),
            "offset": self.offset.tolist(),
            "share": self.share.tolist(),
            "count": np.minimum(self.count, 500.0).tolist(),
        }

    @classmethod
    def from_dict(
        cls, stored: Any, mean: float = INITIAL_ACCEPTANCE, certain: bool = False
    ) -> Calibration:
        """Return a stored calibration, or a new one if it is not valid."""
        fresh = cls(mean, certain)
        sizes = {"prior": len(GRID), "offset": N_BUCKETS, "share": N_BUCKETS, "count": N_BUCKETS}
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
        fresh.windows = WindowTable.from_list(stored.get("windows"))
        fresh._refresh()
        return fresh


class Belief:
    """What one sequence believes of its acceptance rate: weights over GRID, updated token by token.

    It is a switching mixture (the fixed share of Herbster and Warmuth, 1998): Bayes' rule on each checked
    draft, then a share CHANGE_RATE returns to the prior, so that a burst is noticed within a few tokens.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._weights: Floats = calibration.prior.copy()
        self._n_faded = 0  # tokens without information that are not in the weights yet

    @property
    def weights(self) -> Floats:
        """The probability of each acceptance rate now (len(GRID),)."""
        if self._n_faded:
            keep = (1 - CHANGE_RATE) ** self._n_faded
            self._weights = keep * self._weights + (1 - keep) * self.calibration.prior
            self._n_faded = 0
        return self._weights

    @weights.setter
    def weights(self, weights: Floats) -> None:
        self._weights, self._n_faded = weights, 0

    def observe(self, bucket_index: int, hit: bool) -> None:
        """Learn that a draft was accepted or rejected. The drafts after a rejected one say nothing."""
        before, rates = self.weights, self.calibration.rates[bucket_index]
        expected = float(before @ rates)
        after = before * rates
        if not hit:
            after = before - after
        after /= max(expected if hit else 1 - expected, 1e-12)
        self.weights = after
        self.calibration.learn(bucket_index, hit, expected, after)
        self._n_faded = 1

    def fade(self, tokens: int) -> None:
        """Note that `tokens` tokens have passed without information, so some of the belief is stale."""
        self._n_faded += tokens

    @property
    def mean(self) -> float:
        """The acceptance rate expected of the next draft."""
        return float(self.weights @ self.calibration.unseen[1])

    def survival_beyond(self, known: Sequence[int], count: int) -> Floats:
        """Return (count,) probabilities: that the drafts of these buckets and 1…count more all survive."""
        weights = self.weights
        for bucket_index in known:
            weights = weights * self.calibration.rates[bucket_index]
        return np.asarray(self.calibration.unseen[1 : count + 1] @ weights)

    def survival(self, known: Sequence[int], depth: int) -> Floats:
        """Return (depth + 1,) probabilities: entry j is that the first j drafts all survive.

        known: buckets of the tokens drafted already; for the others it uses what the calibration expects.
        """
        cal, weights = self.calibration, self.weights
        survival = np.ones(depth + 1)
        n_known = min(len(known), depth)
        if n_known:
            all_survive = cal.rates[list(known[:n_known])].cumprod(axis=0)
            survival[1 : n_known + 1] = all_survive @ weights
            weights = weights * all_survive[-1]
        if depth > n_known:
            survival[n_known + 1 :] = cal.unseen[1 : depth - n_known + 1] @ weights
        return survival
