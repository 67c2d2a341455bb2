"""Synthetic traces for replays of the depth policy, and the costs measured on one machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.device import bursts
from benchmarks.traces.replay import Costs, Replay
from benchmarks.traces.trace import Trace
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.extras.bench.theory import replay_fixed_ms

# Milliseconds by width: a 1 B target with repacked kernels and its draft, two threads.
TARGET_MS = {1: 78.0, 2: 95, 3: 117, 4: 87, 5: 135, 8: 161, 9: 199, 12: 218, 16: 248}
DRAFT_MS = {1: 7.6, 2: 7.8, 3: 9.3, 4: 10.8, 5: 15.6, 8: 18.1, 9: 23.8, 12: 23.6, 16: 28.3}
OVERHEAD_MS = 1.0
PROFILE = CostProfile(CostTable(TARGET_MS), CostTable(DRAFT_MS), OVERHEAD_MS)
COSTS = Costs.of(PROFILE)

Rates = npt.NDArray[np.float64]


def _trace(name: str, rates: Rates, buckets: list[int], seed: int) -> Trace:
    return Trace.draw(name, rates.tolist(), buckets, PROFILE.as_dict(), seed)


def steady(acceptance: float, length: int, seed: int = 0) -> Trace:
    """Return a trace with one probability everywhere and an uninformative confidence."""
    return _trace(f"alpha {acceptance}", np.full(length, acceptance), [9] * length, seed)


def bursty(high: float, low: float, every: int, length: int, seed: int = 0) -> Trace:
    """Return a trace that alternates between two probabilities every `every` tokens."""
    rates = np.array(bursts(high, low, every, length))
    return _trace(f"bursts of {every}", rates, [9] * length, seed)


def calibrated(length: int, seed: int = 0) -> Trace:
    """Return a trace whose confidence is accurate: bucket b is right with probability (b + ½)/10."""
    shares = [0.15, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.1, 0.15, 0.3]
    buckets = np.random.default_rng(seed + 1).choice(10, size=length, p=shares)
    return _trace("telling", (buckets + 0.5) / 10, buckets.tolist(), seed)


def auto(trace: Trace, calibration: Calibration | None = None) -> Replay:
    """Return the measured policy after it has replayed the trace."""
    replay = Replay(trace, PROFILE, calibration or Calibration())
    replay.run()
    return replay


def together(
    trace: Trace,
    sequences: int,
    depth: int | None = None,
    calibration: Calibration | None = None,
    dearer: float = 0.0,
) -> float:
    """Return milliseconds per token of all clients together, while each generates its part of the trace.

    depth: as in a request.
    """
    replay = Replay(trace, PROFILE, calibration or Calibration(), depth, sequences, dearer)
    return replay.run_together()


def plain_ms(trace: Trace) -> float:
    return replay_fixed_ms(trace.hits, 0, COSTS)


def best_fixed_ms(trace: Trace) -> float:
    """Return the cost of the best fixed depth, 0 included."""
    return min(replay_fixed_ms(trace.hits, depth, COSTS) for depth in range(9))
