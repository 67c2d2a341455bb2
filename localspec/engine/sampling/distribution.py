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
    """top-k → typical → top-p → min-p → temperature, for the rows of one answer.

    With top-k a row is scanned for its top and never sorted or exponentiated whole.
    """

    def __init__(self, settings: Settings) -> None:
        """settings: of a temperature above 0."""
        self._settings = settings
        self._gap = 10.0  # how far below the top the k-th candidate was last time, in nats

    def distribution(self, row: Logits) -> Distribution:
        """The candidates that top-k, typical, top-p and min-p leave."""
        settings = self._settings
        k = settings.top_k
        if 0 < k < len(row):
            ids = self._top(row, k)
            below = _below(row, ids)
            return _truncated(ids, below, float(np.exp(below).sum()), settings)
        if settings.top_p >= 1.0 and settings.min_p <= 0.0 and settings.typical_p >= 1.0:
            ids = np.flatnonzero(row > -np.inf)  # nothing is cut, so nothing is sorted
            return Distribution(ids, _tempered(_below(row, ids), settings.temperature))
        with np.errstate(over="ignore"):  # further below than float32 reaches: never drawn
            everything = np.exp(row - row.max())
        total = float(everything.sum(dtype=np.float64))
        ids = _head(everything, total, settings)
        return _truncated(ids, _below(row, ids), total, settings)

    def _top(self, row: Logits, k: int) -> npt.NDArray[np.int64]:
        """Ids of the k highest logits, unordered. Looks only at those near the top: how near is
        remembered from the row before, and widened until there are k, or what is left is NEVER drawn.
        """
        top = float(row.max())
        never = NEVER * max(self._settings.temperature, 1.0)
        ids = np.flatnonzero(row >= top - self._gap)
        while len(ids) < k and self._gap < never:
            self._gap = min(self._gap * 1.5, never)
            ids = np.flatnonzero(row >= top - self._gap)
        if len(ids) > k:
            ids = ids[np.argpartition(row[ids], -k)[-k:]]
            self._gap = top - float(row[ids].min()) + 1.0  # rows of one text are much alike
        return ids[row[ids] > -np.inf]


def _below(row: Logits, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How far the logits (n,) of `ids` are below the row's highest, as numbers up to 0."""
    return np.asarray(row[ids].astype(np.float64) - float(row.max()))


def _head(weights: Logits, total: float, settings: Settings) -> npt.NDArray[np.int64]:
    """Ids among which top-p and min-p will cut, unordered, where top-k is off.

    weights (n_vocab,): exp(logit - highest); total: their sum. A typical set can lie anywhere, so
    it needs all ids.
    """
    if settings.typical_p >= 1.0 and settings.min_p > 0.0:
        return np.flatnonzero(weights >= settings.min_p * (1 - 1e-6))
    if settings.typical_p >= 1.0 and settings.top_p < 1.0:
        floor = 1e-3
        while floor > 1e-30:
            ids = np.flatnonzero(weights >= floor)
            if float(weights[ids].sum(dtype=np.float64)) >= settings.top_p * total:
                return ids
            floor *= 0.05
    return np.flatnonzero(weights > 0.0)


def _truncated(
    ids: npt.NDArray[np.int64],
    below: npt.NDArray[np.float64],
    total: float,
    settings: Settings,
) -> Distribution:
    """Sort, then typical → top-p → min-p → temperature, each on what the one before left.

    below (n,): logit - highest of the ids; total: the sum of exp(below) that makes probabilities.
    """
    order = np.argsort(-below, kind="stable")
    ids, below = ids[order], below[order]
    weights = np.exp(below)
    if settings.typical_p < 1.0:
        probs = weights / total
        surprise = -np.log(np.maximum(probs, 1e-300))
        rank = np.argsort(np.abs(surprise - (probs * surprise).sum()), kind="stable")
        count = int(np.searchsorted(np.cumsum(probs[rank]), settings.typical_p)) + 1
        keep = np.sort(rank[:count])
        ids, below, weights = ids[keep], below[keep], weights[keep]
        total = float(weights.sum())
    if settings.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights / total), settings.top_p)) + 1
        ids, below, weights = ids[:count], below[:count], weights[:count]
    if settings.min_p > 0.0:
        kept = weights >= weights[0] * settings.min_p
        ids, below = ids[kept], below[kept]
    return Distribution(ids, _tempered(below, settings.temperature))


def _tempered(below: npt.NDArray[np.float64], temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities (n,) of logits at a temperature above 0."""
    # A temperature that is nothing in float32 is as good as nothing, and divides a finite number.
    weights = np.exp((below - below.max()) / max(temperature, 1e-30))
    return np.asarray(weights / weights.sum())


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
