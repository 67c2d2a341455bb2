"""Speed-ups from pairs of answers, and how sure they are. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import stdev
from typing import NamedTuple

from localspec.cli.bench.report import Estimate

RESAMPLES = 1000
_FREEDOM = 2  # degrees that an interval needs: of two pairs it says nothing
# Student's t by degrees of freedom, of 95 % both ways; beyond the last as of a normal distribution.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045)  # fmt: skip
_WIDEST = 20.0  # of a logarithm; beyond, nothing is known
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
    count, value = len(good), pooled(good)
    interval = _interval(value, lambda rng: pooled(rng.choices(good, k=count)), count, count - 1)
    return Estimate(value, *interval, count)


def overall(groups: Sequence[Sequence[Pair]]) -> Estimate | None:
    """The geometric mean of the groups' speed-ups: each kind of work counts once."""
    good = [kept for group in groups if (kept := [each for each in group if min(each) > 0])]
    if not good:
        return None

    def drawn(rng: random.Random) -> float:
        return geometric([pooled(rng.choices(group, k=len(group))) for group in good])

    most, count = max(map(len, good)), sum(map(len, good))
    value = geometric(list(map(pooled, good)))
    return Estimate(value, *_interval(value, drawn, most, count - len(good)), count)


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _interval(
    value: float, draw: Callable[[random.Random], float], count: int, freedom: int
) -> tuple[float | None, float | None]:
    """Around a ratio that is drawn from `count` pairs, with so many degrees of freedom.

    Plain quantiles of what is drawn from few are too narrow: four pairs hold the truth between them seven
    times of eight. So the drawn ones only tell how far the ratio varies, and Student's t how far the truth
    may be from it: much farther with two pairs than with twenty.
    """
    if freedom < _FREEDOM:
        return None, None
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96
    rng = random.Random(_SEED)
    spread = stdev(math.log(draw(rng)) for _ in range(RESAMPLES)) * math.sqrt(count / (count - 1))
    factor = math.exp(min(t * spread, _WIDEST))
    return value / factor, value * factor


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
