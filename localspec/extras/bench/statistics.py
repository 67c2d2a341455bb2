"""Estimate speed-ups from pairs of answers, with their intervals. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import geometric_mean, stdev
from typing import NamedTuple

from localspec.extras.bench.report import Estimate

RESAMPLES = 1000
_MIN_FREEDOM = 2  # degrees of freedom for an interval; with two pairs it would say nothing
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1. Beyond the last, the normal
# distribution is used.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045)  # fmt: skip
_MAX_LOG_SPREAD = 20.0  # half-width of an interval in log space; a wider one says nothing anyway
_SEED = 0  # fixed, so that the same answers give the same interval


class PairedAnswers(NamedTuple):
    """The same prompt answered both ways: units of work (tokens, or 1 for an answer) and seconds."""

    plain: float
    plain_s: float
    speculative: float
    speculative_s: float


def pooled_speed_up(pairs: Sequence[PairedAnswers]) -> float:
    """Return the speculative rate divided by the plain one; nan if there is no work.

    Each rate is all work divided by all time.
    """
    plain, plain_s, drafted, drafted_s = (float(sum(column)) for column in zip(*pairs, strict=True))
    if not plain or not drafted_s:
        return math.nan
    return (drafted / drafted_s) * (plain_s / plain)


def estimate_speed_up(pairs: Sequence[PairedAnswers]) -> Estimate | None:
    """Return the speed-up with its interval; None if there are no usable pairs."""
    valid = [pair for pair in pairs if min(pair) > 0]
    if not valid:
        return None
    count, value = len(valid), pooled_speed_up(valid)

    def resample(rng: random.Random) -> float:
        return pooled_speed_up(rng.choices(valid, k=count))

    return Estimate(value, *_bootstrap_interval(value, resample, count, count - 1), count)


def estimate_overall(groups: Sequence[Sequence[PairedAnswers]]) -> Estimate | None:
    """Return the geometric mean of the groups' speed-ups, so that each kind of work counts once."""
    usable = ([pair for pair in group if min(pair) > 0] for group in groups)
    valid = [group for group in usable if group]
    if not valid:
        return None

    def resample(rng: random.Random) -> float:
        drawn = (rng.choices(group, k=len(group)) for group in valid)
        return geometric_mean([pooled_speed_up(group) for group in drawn])

    largest, count = max(map(len, valid)), sum(map(len, valid))
    value = geometric_mean([pooled_speed_up(group) for group in valid])
    interval = _bootstrap_interval(value, resample, largest, count - len(valid))
    return Estimate(value, *interval, count)


def _bootstrap_interval(
    value: float, draw: Callable[[random.Random], float], count: int, freedom: int
) -> tuple[float | None, float | None]:
    """Return the interval around a ratio that is estimated from `count` pairs.

    Quantiles of resamples are too narrow for few pairs: with four, they contain the truth seven times in
    eight. So resampling only gives the spread of the ratio, and Student's t for `freedom` degrees of freedom
    gives how far away the truth may be, which is much farther with two pairs than with twenty.
    """
    if freedom < _MIN_FREEDOM:
        return None, None
    t = _STUDENT_T[freedom - 1] if freedom <= len(_STUDENT_T) else 1.96
    rng = random.Random(_SEED)
    spread = stdev(math.log(draw(rng)) for _ in range(RESAMPLES)) * math.sqrt(count / (count - 1))
    factor = math.exp(min(t * spread, _MAX_LOG_SPREAD))
    return value / factor, value * factor


def intervals_overlap(first: Estimate, second: Estimate) -> bool | None:
    """Return whether two intervals overlap; None if either has none."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return None
    return first.low <= second.high and second.low <= first.high
