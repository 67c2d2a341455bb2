"""Speed-ups from pairs of answers, and how sure they are. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from localspec.cli.bench.report import Estimate

RESAMPLES = 1000
_LEAST = 2  # pairs that an interval needs
# Student's t by degrees of freedom, of 95 % both ways; beyond the last as of a normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045)  # fmt: skip
_SEED = 0  # the same answers give the same interval


class Pair(NamedTuple):
    """The same question answered twice: units of work (tokens, or 1 for whole answers) and seconds."""

    plain: float
    plain_s: float
    speculative: float
    speculative_s: float


def pooled(pairs: Sequence[Pair]) -> float:
    """The speculative rate over the plain one, each of all work by all time; nan where there is none."""
    plain, plain_s = sum(each.plain for each in pairs), sum(each.plain_s for each in pairs)
    drafted = sum(each.speculative for each in pairs)
    drafted_s = sum(each.speculative_s for each in pairs)
    if not plain or not drafted_s:
        return math.nan
    return (drafted / drafted_s) * (plain_s / plain)


def speed_up(pairs: Sequence[Pair]) -> Estimate | None:
    """With its interval; None where nothing can be said."""
    good = [each for each in pairs if min(each) > 0]
    if not good:
        return None
    count = len(good)
    interval = _interval(lambda rng: pooled(rng.choices(good, k=count)), count, count - 1)
    return Estimate(pooled(good), *interval, len(good))


def overall(groups: Sequence[Sequence[Pair]]) -> Estimate | None:
    """The geometric mean of the groups' speed-ups: each kind of work counts once."""
    good = [kept for group in groups if (kept := [each for each in group if min(each) > 0])]
    if not good:
        return None

    def drawn(rng: random.Random) -> float:
        return geometric([pooled(rng.choices(group, k=len(group))) for group in good])

    most, count = max(map(len, good)), sum(map(len, good))
    interval = _interval(drawn, most, count - len(good))
    return Estimate(geometric(list(map(pooled, good))), *interval, count)


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _interval(
    draw: Callable[[random.Random], float], count: int, freedom: int
) -> tuple[float | None, float | None]:
    """Of a figure that is drawn from `count` pairs, with so many degrees of freedom.

    Drawn from few, plain quantiles are too narrow: by the spread of so few, and as if it were known. Wider
    ones make up for that (Hesterberg 2015, expanded percentiles), as far as pairs have been seen: of four
    the truth lies within all of them seven times of eight.
    """
    if count < _LEAST:
        return None, None
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96
    tail = NormalDist().cdf(-t * math.sqrt(count / (count - 1)))
    rng = random.Random(_SEED)
    drawn = sorted(draw(rng) for _ in range(RESAMPLES))
    return quantile(drawn, tail), quantile(drawn, 1 - tail)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, linear between two."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float | None:
    return quantile(sorted(values), 0.5) if values else None


def agree(first: Estimate, second: Estimate) -> bool | None:
    """Whether two intervals overlap; None where one has none."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return None
    return first.low <= second.high and second.low <= first.high
