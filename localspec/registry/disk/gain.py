"""Estimate the speed-up of a draft from its acceptance rate and the cost of passes on this machine.

The acceptance rate of greedy text does not depend on the load of the machine. The pass costs of all drafts of
one target are combined, so that a disturbance during one measurement does not decide the order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from localspec.protocol.disk import DraftGain

MAX_DEPTH = 16
_Z_95 = 1.96  # standard deviations of a normal distribution that contain 95 %
# Student's t for 95 %, by degrees of freedom from 1 to 9. There are only a few texts.
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of one draft.

    texts: for each text, the number of draft tokens checked (up to the first rejection of each round) and
    the number accepted. target_ms, draft_ms: milliseconds of a pass by its width in rows. overhead_ms:
    milliseconds of a round besides its passes.
    """

    texts: Sequence[tuple[int, int]]
    target_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    overhead_ms: float


def weigh(trials: Mapping[_Key, Trial]) -> dict[_Key, DraftGain]:
    """Return the gain of each draft of one target, at its best depth.

    The depth is at least one token, so that drafts that never pay off can be compared too.
    """
    target_ms, overhead = _combine_costs(trials)
    return {key: _estimate_gain(trial, target_ms, overhead) for key, trial in trials.items()}


def plain_speed(trials: Mapping[_Key, Trial]) -> float | None:
    """Return the tokens per second of the target alone, or None without measurements."""
    target_ms, overhead = _combine_costs(trials)
    return 1e3 / (_pass_ms(target_ms, 1) + overhead) if target_ms else None


def alike(first: DraftGain, second: DraftGain) -> bool:
    """Return whether the confidence intervals of two gains overlap."""
    return first.low <= second.high and second.low <= first.high


def _combine_costs(trials: Mapping[_Key, Trial]) -> tuple[dict[int, float], float]:
    """Return the milliseconds of a target pass by width, and of a round besides its passes."""
    # The smallest of several measurements is the least disturbed.
    target_ms: dict[int, float] = {}
    for trial in trials.values():
        for width, ms in trial.target_ms.items():
            target_ms[width] = min(ms, target_ms.get(width, ms))
    return target_ms, min((trial.overhead_ms for trial in trials.values()), default=0.0)


def _estimate_gain(trial: Trial, target_ms: Mapping[int, float], overhead: float) -> DraftGain:
    """Return the gain of a draft at the depth with the best speed-up."""
    low, acceptance, high = acceptance_interval(trial.texts)
    draft_ms = trial.draft_ms.get(1) or min(trial.draft_ms.values())
    plain_ms = _pass_ms(target_ms, 1) + overhead
    max_depth = min(MAX_DEPTH, max(target_ms) - 1)

    def speed_up(rate: float, depth: int) -> float:
        round_ms = depth * draft_ms + _pass_ms(target_ms, depth + 1) + overhead
        return expected_tokens(rate, depth) * plain_ms / round_ms

    depth = max(range(1, max(max_depth, 1) + 1), key=lambda depth: speed_up(acceptance, depth))
    return DraftGain(
        acceptance,
        low,
        high,
        speed_up(acceptance, depth),
        speed_up(low, depth),
        speed_up(high, depth),
        depth,
    )


def expected_tokens(acceptance: float, depth: int) -> float:
    """Return the expected tokens per round, including the target's own.

    It is (1 - α^(γ+1)) / (1 - α) for the acceptance rate α and the depth γ (Leviathan et al. 2022).
    """
    return sum(acceptance**position for position in range(depth + 1))


def _pass_ms(costs: Mapping[int, float], width: int) -> float:
    """Return the milliseconds of a pass with `width` rows.

    The pass is padded if a wider one is cheaper. Beyond the widest measured pass, the cost of that one is
    used.
    """
    candidates = [ms for measured_width, ms in costs.items() if measured_width >= width]
    return min(candidates) if candidates else costs[max(costs)]


def acceptance_interval(texts: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the lower bound, the rate and the upper bound of the acceptance.

    The interval is the wider of two: one from the spread between the texts (a ratio estimator with Student's
    t), and Wilson's interval for that number of trials.
    """
    checked, accepted = (sum(column) for column in zip(*texts, strict=True)) if texts else (0, 0)
    if not checked:
        return 0.0, 0.0, 1.0
    rate = accepted / checked
    low, high = _wilson_interval(rate, checked)
    if len(texts) > 1:
        degrees = len(texts) - 1
        spread = sum((hits - rate * count) ** 2 for count, hits in texts)
        error = sqrt(spread * len(texts) / degrees) / checked
        width = error * _T_95[min(degrees, len(_T_95)) - 1]
        low, high = min(low, max(0.0, rate - width)), max(high, min(1.0, rate + width))
    return min(low, rate), rate, max(high, rate)  # guard against rounding errors


def _wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a rate."""
    center = rate + _Z_95**2 / (2 * count)
    width = _Z_95 * sqrt(rate * (1 - rate) / count + _Z_95**2 / (4 * count**2))
    scale = 1 + _Z_95**2 / count
    return max(0.0, (center - width) / scale), min(1.0, (center + width) / scale)
