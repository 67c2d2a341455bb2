"""Speed-ups from pairs of answers, and how sure they are. Pure arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localspec.cli.bench.report import Estimate

RESAMPLES = 1000
_LEAST = 2  # pairs that an interval needs
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
    interval = _interval(lambda rng: pooled(rng.choices(good, k=len(good))), len(good))
    return Estimate(pooled(good), *interval, len(good))


def overall(groups: Sequence[Sequence[Pair]]) -> Estimate | None:
    """The geometric mean of the groups' speed-ups: each kind of work counts once."""
    good = [kept for group in groups if (kept := [each for each in group if min(each) > 0])]
    if not good:
        return None

    def drawn(rng: random.Random) -> float:
        return geometric([pooled(rng.choices(group, k=len(group))) for group in good])

    least = max(map(len, good))
    return Estimate(
        geometric(list(map(pooled, good))), *_interval(drawn, least), sum(map(len, good))
    )


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _interval(
    draw: Callable[[random.Random], float], count: int
) -> tuple[float | None, float | None]:
    if count < _LEAST:
        return None, None
    rng = random.Random(_SEED)
    drawn = sorted(draw(rng) for _ in range(RESAMPLES))
    return quantile(drawn, 0.025), quantile(drawn, 0.975)


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
