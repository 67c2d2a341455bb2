"""What a draft is worth: how often its tokens are accepted, times what passes cost on this machine.

Acceptance of greedy text does not depend on how busy the machine is, and the costs of all drafts of one
target are weighed together, so that a disturbance while one was loaded does not decide the order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from localspec.protocol.disk import DraftGain

MAX_DEPTH = 16
_Z = 1.96  # of a normal distribution: 95 % lie within
# Student's t, 95 %, by degrees of freedom 1…9: there are few texts.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured of one draft.

    texts: for each text how many drafts were looked at (up to the first rejection of each round) and how
    many of them accepted. target_ms, draft_ms: milliseconds of a pass by its width. overhead_ms: of a
    round, beside the passes.
    """

    texts: Sequence[tuple[int, int]]
    target_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    overhead_ms: float


def weigh(trials: Mapping[_Key, Trial]) -> dict[_Key, DraftGain]:
    """The gain of each draft of one target, at the depth that pays best (at least one token, so that
    drafts which never pay can be compared too).
    """
    target_ms, overhead = _costs(trials)
    return {key: _gain(trial, target_ms, overhead) for key, trial in trials.items()}


def plain_speed(trials: Mapping[_Key, Trial]) -> float | None:
    """Tokens per second of the target alone; None where nothing was tried."""
    target_ms, overhead = _costs(trials)
    return 1e3 / (_padded(target_ms, 1) + overhead) if target_ms else None


def alike(one: DraftGain, other: DraftGain) -> bool:
    """Can the two not be told apart by what was measured?"""
    return one.low <= other.high and other.low <= one.high


def _costs(trials: Mapping[_Key, Trial]) -> tuple[dict[int, float], float]:
    """Milliseconds of a pass of the target by its width, and of a round beside the passes."""
    # The smallest of several measurements is the least disturbed one.
    target_ms: dict[int, float] = {}
    for trial in trials.values():
        for width, ms in trial.target_ms.items():
            target_ms[width] = min(ms, target_ms.get(width, ms))
    return target_ms, min((trial.overhead_ms for trial in trials.values()), default=0.0)


def _gain(trial: Trial, target_ms: Mapping[int, float], overhead: float) -> DraftGain:
    low, acceptance, high = acceptance_interval(trial.texts)
    step = trial.draft_ms.get(1) or min(trial.draft_ms.values())
    plain = _padded(target_ms, 1) + overhead
    deepest = min(MAX_DEPTH, max(target_ms) - 1)

    def speed_up(rate: float, depth: int) -> float:
        spent = depth * step + _padded(target_ms, depth + 1) + overhead
        return expected_tokens(rate, depth) * plain / spent

    depth = max(range(1, max(deepest, 1) + 1), key=lambda each: speed_up(acceptance, each))
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
    """Tokens per round, the target's own included: (1 - α^(γ+1)) / (1 - α) (Leviathan et al. 2022)."""
    return sum(acceptance**each for each in range(depth + 1))


def _padded(costs: Mapping[int, float], width: int) -> float:
    """A pass of so many rows, padded where a wider one is cheaper; of the widest there is beyond it."""
    wide = [ms for each, ms in costs.items() if each >= width]
    return min(wide) if wide else costs[max(costs)]


def acceptance_interval(texts: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Low, rate and high of the acceptance. The interval is the wider of two: of the spread between the
    texts (a ratio estimator's, with Student's t), and Wilson's of a share of that many trials.
    """
    tried, kept = (sum(column) for column in zip(*texts, strict=True)) if texts else (0, 0)
    if not tried:
        return 0.0, 0.0, 1.0
    rate = kept / tried
    low, high = _wilson(rate, tried)
    if len(texts) > 1:
        freedom = len(texts) - 1
        spread = sum((yes - rate * count) ** 2 for count, yes in texts)
        error = sqrt(spread * len(texts) / freedom) / tried
        width = error * _T[min(freedom, len(_T)) - 1]
        low, high = min(low, max(0.0, rate - width)), max(high, min(1.0, rate + width))
    return min(low, rate), rate, max(high, rate)  # they may differ by a rounding


def _wilson(rate: float, count: int) -> tuple[float, float]:
    middle = rate + _Z**2 / (2 * count)
    width = _Z * sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)
