"""From a row of logits to a few candidates with their probabilities, and a draw from them.

A draw with a seed takes a number for each token at each place of an answer. It is a pure function of
seed, place and token id, so that what was drawn before, how many drafts a pass held and in which order
candidates come have no part in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits
from localspec.engine.sampling.settings import Settings

# Nats below the top (at temperature 1) from which on a token is no candidate: e^-30 is 1e-13, which
# even a long answer does not meet, and a peaked row of a large vocabulary has nothing else to offer.
NEVER = 30.0
_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): the step of its counter, and the factors of its mixing.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Distribution(NamedTuple):
    """Candidate ids (n,) and their probabilities (n,), which sum to one."""

    ids: npt.NDArray[np.int64]
    probs: npt.NDArray[np.float64]

    def of(self, token: int) -> float:
        """The probability of one token; 0 if it is no candidate."""
        at = np.flatnonzero(self.ids == token)
        return float(self.probs[at[0]]) if len(at) else 0.0

    def first(self, delays: npt.NDArray[np.float64]) -> int:
        """The token that comes first where each waits `delays` (n,) over its probability.

        With exponential delays that is a draw from the distribution (the Gumbel-max rule). Unlike a
        walk along cumulated probabilities it knows no order: a probability that changes in its last
        bits, or a candidate more or less at the edge of top-p, changes only a draw between that
        token and the one that comes first.
        """
        with np.errstate(divide="ignore"):  # what has no probability never comes
            return int(self.ids[(delays / self.probs).argmin()])

    @classmethod
    def certain(cls, token: int) -> Distribution:
        return cls(np.array([token]), np.ones(1))

    def pick(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulated probabilities."""
        total = np.cumsum(self.probs)
        at = int(np.searchsorted(total, uniform * total[-1], side="right"))
        return int(self.ids[min(at, len(self.ids) - 1)])


class Truncation:
    """top-n-sigma → top-k → typical → top-p → min-p → XTC → temperature, for the rows of one answer.

    With top-k a row is scanned for its top and never sorted or exponentiated whole.
    """

    def __init__(self, settings: Settings) -> None:
        """settings: of a temperature above 0."""
        self._settings = settings
        self._gap = 10.0  # how far below the top the k-th candidate was last time, in nats

    def distribution(self, row: Logits, *, without_top: bool = False) -> Distribution:
        """The candidates that are left. without_top: XTC's turn has come."""
        settings = self._settings
        if settings.top_n_sigma > 0.0:
            row = _within(row, settings.top_n_sigma)
        k = settings.top_k
        if 0 < k < len(row):
            ids = self._top(row, k)
            below = _below(row, ids)
            return _truncated(ids, below, float(np.exp(below).sum()), settings, without_top)
        cut = settings.top_p < 1.0 or settings.min_p > 0.0 or settings.typical_p < 1.0
        if not cut and not without_top:
            ids = np.flatnonzero(row > -np.inf)  # nothing is cut, so nothing is sorted
            return Distribution(ids, _tempered(_below(row, ids), settings))
        with np.errstate(over="ignore"):  # further below than float32 reaches: never drawn
            everything = np.exp(row - row.max())
        total = float(everything.sum(dtype=np.float64))
        head = _head(everything, total, settings)
        ids = np.flatnonzero(row > -np.inf) if head is None else head
        return _truncated(ids, _below(row, ids), total, settings, without_top)

    def _top(self, row: Logits, k: int) -> npt.NDArray[np.int64]:
        """Ids of the k highest logits, unordered. Looks only at those near the top: how near is
        remembered from the row before, and widened until there are k, or what is left is NEVER drawn.
        """
        top = float(row.max())
        settings = self._settings
        never = NEVER * max(settings.temperature, 1.0)
        if settings.dynatemp_range > 0.0 or settings.excludes:  # how many there are counts
            never = top - float(row[row > -np.inf].min())
        ids = np.flatnonzero(row >= top - self._gap)
        while len(ids) < k and self._gap < never:
            self._gap = min(self._gap * 1.5, never)
            ids = np.flatnonzero(row >= top - self._gap)
        if len(ids) > k:
            ids = ids[np.argpartition(row[ids], -k)[-k:]]
            self._gap = top - float(row[ids].min()) + 1.0  # rows of one text are much alike
        return ids[row[ids] > -np.inf]


def _within(row: Logits, sigmas: float) -> Logits:
    """`row` without what is further below its highest than so many standard deviations of all of it."""
    possible = row[row > -np.inf].astype(np.float64)
    return np.where(row >= possible.max() - sigmas * possible.std(), row, np.float32(-np.inf))


def _below(row: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How far the logits (n,) of `ids` are below the row's highest, as numbers up to 0."""
    return np.asarray(row[ids].astype(np.float64) - float(row.max()))


def _head(weights: Logits, total: float, settings: Settings) -> npt.NDArray[np.int64] | None:
    """Ids among which top-p and min-p will cut, unordered, where top-k is off; None: among all.

    weights (n_vocab,): exp(logit - highest); total: their sum. A weight that is 0 in float32 still says
    nothing against a token: a typical set can lie anywhere, the temperature may be high, and `min_keep`,
    XTC and a temperature by the entropy hang on how many there are.
    """
    ids = None
    if settings.typical_p >= 1.0 and settings.dynatemp_range <= 0.0:
        if settings.min_p > 0.0:
            ids = np.flatnonzero(weights >= settings.min_p * (1 - 1e-6))
        elif settings.top_p < 1.0:
            ids = _likeliest(weights, settings.top_p * total)
    return None if ids is None or len(ids) < settings.min_keep else ids


def _likeliest(weights: Logits, most: float) -> npt.NDArray[np.int64] | None:
    """Ids of the highest weights that make up `most` together, and perhaps some more."""
    floor = 1e-3
    while floor > 1e-30:
        ids = np.flatnonzero(weights >= floor)
        if float(weights[ids].sum(dtype=np.float64)) >= most:
            return ids
        floor *= 0.05
    return None


def _truncated(
    ids: npt.NDArray[np.int64],
    below: npt.NDArray[np.float64],
    total: float,
    settings: Settings,
    without_top: bool,
) -> Distribution:
    """Sort, then typical → top-p → min-p → XTC → temperature, each on what the one before left.

    below (n,): logit - highest of the ids; total: the sum of exp(below) that makes probabilities.
    """
    order = np.argsort(-below, kind="stable")
    ids, below = ids[order], below[order]
    weights = np.exp(below)
    least = settings.min_keep
    if settings.typical_p < 1.0:
        probs = weights / total
        surprise = -np.log(np.maximum(probs, 1e-300))
        rank = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(probs[rank]), settings.typical_p)) + 1
        keep = np.sort(rank[: max(count, least)])
        ids, below, weights = ids[keep], below[keep], weights[keep]
        total = float(weights.sum())
    if settings.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights / total), settings.top_p)) + 1
        count = max(count, least)
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if settings.min_p > 0.0:
        count = max(int((weights >= weights[0] * settings.min_p).sum()), least)
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if without_top:
        # of those that are likely enough, the least likely is the first that stays
        first = int((weights >= settings.xtc_threshold * weights.sum()).sum()) - 1
        if first > 0 and len(ids) - first >= least:
            ids, below = ids[first:], below[first:]
    return Distribution(ids, _tempered(below, settings))


def _tempered(below: npt.NDArray[np.float64], settings: Settings) -> npt.NDArray[np.float64]:
    """Probabilities (n,) of logits at a temperature that is not below 0."""
    temperature = settings.temperature
    if settings.dynatemp_range > 0.0 and len(below) > 1:
        temperature = _by_entropy(below, settings)
    # A temperature that is nothing in float32 is as good as nothing, and divides a finite number.
    weights = np.exp((below - below.max()) / max(temperature, 1e-30))
    return np.asarray(weights / weights.sum())


def _by_entropy(below: npt.NDArray[np.float64], settings: Settings) -> float:
    """llama.cpp's dynamic temperature: the more open the choice among the (n,) candidates, the higher."""
    probs = np.exp(below - below.max())
    probs /= probs.sum()
    likely = probs[probs > 0.0]
    share = -float((likely * np.log(likely)).sum()) / float(np.log(len(below)))
    lowest = max(settings.temperature - settings.dynatemp_range, 0.0)
    highest = settings.temperature + settings.dynatemp_range
    power: float = min(max(share, 0.0), 1.0) ** settings.dynatemp_exponent
    return lowest + (highest - lowest) * power


def chance(seed: int, place: int) -> float:
    """A number in (0, 1) of that place, which has no part in any of `delays`."""
    bits = _mixed(_mixed(~seed & _MASK) + (place + 1) * _STEP & _MASK)
    return float((bits >> 11) + 0.5) * 2.0**-53


def delays(seed: int, place: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Exponential variates (n,) of mean 1, independent between seeds, places and token ids.

    Above 0 always. About 10 ns per id.
    """
    key = _mixed(_mixed(seed & _MASK) + (place + 1) * _STEP & _MASK)
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_STEP)
    bits += np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    uniform = (bits >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53  # in (0, 1), both ends excluded
    return np.asarray(-np.log(uniform))


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31
