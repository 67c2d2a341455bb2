"""How deep to draft: pure arithmetic over measured costs and a belief about acceptance.

A round that drafts K tokens yields 1 + Σ_{j≤K} S_j tokens on average, S_j being the probability that
the first j drafts all survive, and costs K·t_d + t_v(width(K+1)) + o. The policy maximises tokens per
second over whole candidates K = 0…K_max, K = 0 being plain decoding. Several sequences share a pass,
so the ratio is maximised jointly (Dinkelbach 1967: maximise gain - rate·cost, with the rate of the
last solution, until it stands).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localspec.engine.speculation.acceptance import MAX_LIMIT, Belief, Floats

MAX_DEPTH = 15  # drafted by the policy; one pass of 16 rows
# Drafting must promise so much more than plain decoding: the best of several estimates is an
# optimistic one, and near the break-even the error would be paid for and nothing won.
MARGIN = 1.03


@dataclass(slots=True)
class Candidate:
    """One sequence in a round: what it may gain and what a drafted token costs it.

    limit: most tokens worth drafting (max_tokens left, room in the context). entry_ms: what the first
    draft costs besides (text the draft model has not read yet). known: buckets drafted already;
    tokens: those tokens, where drafting them cost nothing.
    """

    belief: Belief
    limit: int
    step_ms: float
    entry_ms: float = 0.0
    known: Sequence[int] = ()
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Depth per candidate, and the rate (tokens per millisecond) they are expected to give."""

    depths: list[int]
    rate: float


def best_depth(
    candidate: Candidate, pass_ms: Floats, rate: float, least: int = 0
) -> tuple[int, float, float]:
    """The depth ≥ `least` that maximises gain - rate·cost; (depth, gain in tokens, that maximum).

    pass_ms[k]: what the target pass costs when this sequence brings k drafted tokens. Costs already
    paid (drafting the tokens of `known`) are not counted again.
    """
    limit = max(min(candidate.limit, len(pass_ms) - 1), least)
    gain = np.cumsum(candidate.belief.survival(candidate.known, limit))[least:]
    depths = np.arange(least, limit + 1)
    cost = (
        np.maximum(depths - len(candidate.known), 0) * candidate.step_ms
        + pass_ms[least : limit + 1]
    )
    if not candidate.known:
        cost = cost + (depths > 0) * candidate.entry_ms
    value = gain - rate * cost
    best = int(np.argmax(value))
    return least + best, float(gain[best]), float(value[best])


class DepthPolicy(Protocol):
    """How deep each sequence drafts. fixed: whatever it costs."""

    fixed: bool

    def decide(
        self,
        candidates: Sequence[Candidate],
        pass_ms: Floats,
        overhead_ms: float,
        other_rows: int = 0,
    ) -> Decision:
        """Depths for all sequences of a round together.

        pass_ms[rows]: the target pass of that width, padding included; long enough for every candidate
        at its limit. other_rows: prompt rows read in the same pass.
        """

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        """Is one more draft worth its time, now that the confidence of the last ones is known?"""

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        """How many of the drafted tokens to verify: the last ones may have turned out too doubtful."""


class MeasuredDepth:
    """As deep as it pays by the measured costs and the belief, down to not at all."""

    fixed = False

    def decide(
        self,
        candidates: Sequence[Candidate],
        pass_ms: Floats,
        overhead_ms: float,
        other_rows: int = 0,
    ) -> Decision:
        n = len(candidates)
        base = n + other_rows
        rate = n / (float(pass_ms[base]) + overhead_ms)
        depths = [0] * n
        for _ in range(4):
            rows, gain, spent = base, 0.0, overhead_ms
            chosen = []
            for candidate in candidates:
                depth, tokens, _ = best_depth(candidate, pass_ms[rows:] - pass_ms[rows], rate)
                chosen.append(depth)
                rows += depth
                gain += tokens
                spent += depth * candidate.step_ms + (candidate.entry_ms if depth else 0.0)
            reached = gain / (spent + float(pass_ms[rows]))
            if reached <= rate * (1.0001 if any(depths) else MARGIN):
                break
            depths, rate = chosen, reached
        return Decision(depths, rate)

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        drafted = len(candidate.known)
        return best_depth(candidate, pass_ms, rate, least=drafted)[0] > drafted

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        bounded = Candidate(candidate.belief, len(candidate.known), 0.0, 0.0, candidate.known)
        return best_depth(bounded, pass_ms, rate)[0]


class FixedDepth:
    """Always the same number of drafts: what other engines do, and what we measure against."""

    fixed = True

    def __init__(self, depth: int) -> None:
        if not 0 <= depth <= MAX_LIMIT:
            raise ValueError(f"depth must be between 0 and {MAX_LIMIT}, not {depth}")
        self.depth = depth

    def decide(
        self,
        candidates: Sequence[Candidate],
        pass_ms: Floats,
        overhead_ms: float,
        other_rows: int = 0,
    ) -> Decision:
        return Decision([min(self.depth, c.limit) for c in candidates], 0.0)

    def keep_drafting(self, candidate: Candidate, pass_ms: Floats, rate: float) -> bool:
        return len(candidate.known) < min(self.depth, candidate.limit)

    def worth_verifying(self, candidate: Candidate, pass_ms: Floats, rate: float) -> int:
        return len(candidate.known)
