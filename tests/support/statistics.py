"""Tests of whether a sample is drawn from a distribution: Pearson's chi-square without a library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from math import inf, sqrt
from typing import TypeVar

Cell = TypeVar("Cell", bound=Hashable)


def chi_square_z(*samples: tuple[Iterable[Cell], Mapping[Cell, float]]) -> float:
    """Return by how many standard deviations the chi-square statistic exceeds its expectation.

    samples: independent (draws, probability of each cell). Wilson and Hilferty's approximation (1931).
    Cells expected fewer than five times are merged; a draw of probability zero returns infinity.
    """
    statistic, freedom = 0.0, 0
    for draws, probabilities in samples:
        counts = Counter(draws)
        total = sum(counts.values())
        if any(probabilities.get(cell, 0.0) <= 0.0 for cell in counts):
            return inf
        pairs = [(counts[cell], total * p) for cell, p in probabilities.items() if p > 0]
        rare = [pair for pair in pairs if pair[1] < 5]
        pairs = [pair for pair in pairs if pair[1] >= 5]
        if rare:
            pairs.append(
                (sum(observed for observed, _ in rare), sum(expected for _, expected in rare))
            )
        statistic += sum((observed - expected) ** 2 / expected for observed, expected in pairs)
        freedom += len(pairs) - 1
    spread = 2 / (9 * freedom)
    root: float = (statistic / freedom) ** (1 / 3)
    return (root - (1 - spread)) / sqrt(spread)
