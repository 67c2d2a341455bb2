"""Reduce a row of logits to a few candidates with probabilities, and draw from them.

A seeded draw uses one random number per token id and place in the answer. That number is a pure function of
seed, place and token id. A draw therefore does not depend on earlier draws, on the number of draft tokens
in a pass, or on the order of the candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits
from localspec.engine.sampling.settings import Settings

# A token this many nats below the highest logit (at temperature 1) is never a candidate. Its probability is
# at most e^-30 = 1e-13, too small to be drawn even in a long answer. Without this limit, top-k on a peaked
# row would search the whole vocabulary for its k-th token.
MAX_GAP_NATS = 30.0
_MASK_64_BITS = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): the increment of its counter, and the two factors of its mixer.
_INCREMENT = 0x9E3779B97F4A7C15
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Distribution(NamedTuple):
    """Candidate token ids (n,) and their probabilities (n,), which sum to one."""

    ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]

    def probability_of(self, token: int) -> float:
        """Return the probability of `token`, or 0 if it is not a candidate."""
        positions = np.flatnonzero(self.ids == token)
        return float(self.probs[positions[0]]) if len(positions) else 0.0

    def draw_by_delays(self, delays: npt.NDArray[np.float64]) -> int:
        """Return the token with the smallest `delays` (n,) divided by its probability.

        With exponential delays this is a draw from the distribution (the Gumbel-max rule). Unlike a search
        in cumulative probabilities it does not depend on the order of the candidates. If rounding changes
        one probability, or adds or removes a candidate at the edge of top-p, the drawn token changes only
        if that candidate wins or would have won.
        """
        with np.errstate(divide="ignore"):  # A token of probability 0 has an infinite delay.
            return int(self.ids[(delays / self.probs).argmin()])

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """Return the distribution that gives all probability to `token`."""
        return cls(np.array([token]), np.ones(1))

    def pick(self, uniform: float) -> int:
        """Return the token at `uniform` in [0, 1) of the cumulative probabilities."""
        cumulative = np.cumsum(self.probs)
        index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


class Truncation:
    """The chain top-n-sigma → top-k → typical → top-p → min-p → XTC → temperature, for one answer's rows.

    With top-k, a row is only scanned for its highest logits. It is never sorted or exponentiated as a
    whole, which would cost more than the rest of sampling for a large vocabulary.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepare the chain for `settings`, whose temperature must be above 0."""
        self._settings = settings
        # Distance in nats between the highest logit and the k-th candidate of the previous row. It is the
        # first guess for the next row.
        self._gap = 10.0

    def distribution(self, row: Logits, *, without_top: bool = False) -> Distribution:
        """Return the candidates of `row` (n_vocab,) that pass every filter.

        without_top: whether XTC removes the likeliest tokens at this place of the answer.
        """
        settings = self._settings
        if settings.top_n_sigma > 0.0:
            # Logits more than so many standard deviations below the highest are set to -inf.
            possible = row[row > -np.inf].astype(np.float64)
            lowest = possible.max() - settings.top_n_sigma * possible.std()
            row = np.where(row >= lowest, row, np.float32(-np.inf))
        k = settings.top_k
        if 0 < k < len(row):
            ids = self._select_top(row, k)
            below = _distances_below_top(row, ids)
            return _truncate(ids, below, float(np.exp(below).sum()), settings, without_top)
        cut = settings.top_p < 1.0 or settings.min_p > 0.0 or settings.typical_p < 1.0
        if not cut and not without_top:
            # No filter removes anything, so the row need not be sorted.
            ids = np.flatnonzero(row > -np.inf)
            return Distribution(ids, _apply_temperature(_distances_below_top(row, ids), settings))
        with np.errstate(over="ignore"):  # A difference that overflows float32 has weight 0.
            weights = np.exp(row - row.max())
        total = float(weights.sum(dtype=np.float64))
        head = _select_head(weights, total, settings)
        ids = np.flatnonzero(row > -np.inf) if head is None else head
        return _truncate(ids, _distances_below_top(row, ids), total, settings, without_top)

    def _select_top(self, row: Logits, k: int) -> npt.NDArray[np.int64]:
        """Return the ids of the k highest logits, unordered.

        The search looks only at logits within `_gap` of the highest one. It starts with the gap of the
        previous row and widens it until there are k, or until it reaches the largest useful gap.
        """
        top = float(row.max())
        settings = self._settings
        max_gap = MAX_GAP_NATS * max(settings.temperature, 1.0)
        if settings.dynatemp_range > 0.0 or settings.excludes:
            # Dynamic temperature and XTC depend on the number of candidates, so none may be skipped.
            max_gap = top - float(row[row > -np.inf].min())
        ids = np.flatnonzero(row >= top - self._gap)
        while len(ids) < k and self._gap < max_gap:
            self._gap = min(self._gap * 1.5, max_gap)
            ids = np.flatnonzero(row >= top - self._gap)
        if len(ids) > k:
            ids = ids[np.argpartition(row[ids], -k)[-k:]]
            # Consecutive rows of one text have similar gaps; one nat of slack avoids most second scans.
            self._gap = top - float(row[ids].min()) + 1.0
        return ids[row[ids] > -np.inf]


def _distances_below_top(row: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the logits (n,) of `ids` minus the row's highest logit; none is above 0."""
    return np.asarray(row[ids].astype(np.float64) - float(row.max()))


def _select_head(weights: Logits, total: float, settings: Settings) -> npt.NDArray[np.int64] | None:
    """Return a superset, unordered, of the ids that top-p and min-p will keep; None if it may be all.

    Used where top-k is off. weights (n_vocab,): exp(logit - highest); total: their sum. A token whose
    weight is 0 in float32 may still be a candidate: a typical set can lie anywhere in the row, the
    temperature may be high, and `min_keep`, XTC and dynamic temperature depend on the number of tokens.
    """
    if settings.typical_p < 1.0 or settings.dynatemp_range > 0.0:
        return None
    if settings.min_p > 0.0:
        ids = np.flatnonzero(weights >= settings.min_p * (1 - 1e-6))
        return ids if len(ids) >= settings.min_keep else None
    floor = 1e-3
    while floor > 1e-30 and settings.top_p < 1.0:
        ids = np.flatnonzero(weights >= floor)
        if float(weights[ids].sum(dtype=np.float64)) >= settings.top_p * total:
            return ids if len(ids) >= settings.min_keep else None
        floor *= 0.05
    return None


def _truncate(
    ids: npt.NDArray[np.int64],
    below: npt.NDArray[np.float64],
    total: float,
    settings: Settings,
    without_top: bool,
) -> Distribution:
    """Sort the candidates and apply typical → top-p → min-p → XTC → temperature, one after the other.

    below (n,): logit - highest of the ids. total: the sum of exp(below) that turns weights into
    probabilities.
    """
    order = np.argsort(-below, kind="stable")
    ids, below = ids[order], below[order]
    weights = np.exp(below)
    min_keep = settings.min_keep  # No filter leaves fewer candidates than this.
    if settings.typical_p < 1.0:
        probs = weights / total
        surprise = -np.log(np.maximum(probs, 1e-300))
        rank = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(probs[rank]), settings.typical_p)) + 1
        keep = np.sort(rank[: max(count, min_keep)])
        ids, below, weights = ids[keep], below[keep], weights[keep]
        total = float(weights.sum())
    if settings.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights / total), settings.top_p)) + 1
        count = max(count, min_keep)
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if settings.min_p > 0.0:
        count = max(int((weights >= weights[0] * settings.min_p).sum()), min_keep)
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if without_top:
        # XTC keeps the least likely of the candidates above its threshold, and all below it.
        first = int((weights >= settings.xtc_threshold * weights.sum()).sum()) - 1
        if first > 0 and len(ids) - first >= min_keep:
            ids, below = ids[first:], below[first:]
    return Distribution(ids, _apply_temperature(below, settings))


def _apply_temperature(
    below: npt.NDArray[np.float64], settings: Settings
) -> npt.NDArray[np.float64]:
    """Return probabilities (n,) of logits at the temperature of `settings`, which is not negative."""
    temperature, spread = settings.temperature, settings.dynatemp_range
    if spread > 0.0 and len(below) > 1:  # It rises with the entropy of the candidates.
        probs = np.exp(below - below.max())
        probs /= probs.sum()
        positive = probs[probs > 0.0]
        share = -float((positive * np.log(positive)).sum()) / float(np.log(len(below)))
        lowest = max(temperature - spread, 0.0)
        scale = min(max(share, 0.0), 1.0) ** settings.dynatemp_exponent
        temperature = lowest + (temperature + spread - lowest) * scale
    # The lower bound avoids a division by zero. It makes the likeliest token certain.
    weights = np.exp((below - below.max()) / max(temperature, 1e-30))
    return np.asarray(weights / weights.sum())


def uniform_at(seed: int, place: int) -> float:
    """Return the uniform variate in (0, 1) of one place of an answer, independent of all `delays`."""
    bits = _mix(_mix(~seed & _MASK_64_BITS) + (place + 1) * _INCREMENT & _MASK_64_BITS)
    return float((bits >> 11) + 0.5) * 2.0**-53


def delays(seed: int, place: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return exponential variates (n,) of mean 1, independent between seeds, places and token ids.

    All are above 0. Takes about 10 ns per id.
    """
    key = _mix(_mix(seed & _MASK_64_BITS) + (place + 1) * _INCREMENT & _MASK_64_BITS)
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_INCREMENT)
    bits += np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FACTOR_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_FACTOR_2)
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53  # Now in (0, 1), without both ends.
    return np.asarray(-np.log(uniform))


def _mix(value: int) -> int:
    """Return the SplitMix64 hash of a 64-bit integer."""
    value = (value ^ value >> 30) * _FACTOR_1 & _MASK_64_BITS
    value = (value ^ value >> 27) * _FACTOR_2 & _MASK_64_BITS
    return value ^ value >> 31
