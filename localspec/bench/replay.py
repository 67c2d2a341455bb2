"""Depth policies replayed on a trace: how far is `auto` from the best depth, and from a clairvoyant?

Costs come from a profile, not from a clock, so a replay is exact and takes milliseconds. A round at
place p that verifies K drafts writes 1 + (the right guesses in a row from p on, at most K) tokens and
costs K·t_d + t_v(width(K+1)) + o. Two things are simplified: drafts after a wrong one are given the
confidence they have in the right text, and fixed depths and the clairvoyant pay nothing for the
draft's reading of accepted text, so that `auto`'s regret is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.bench.trace import Trace
from localspec.engine.depth import (
    LOOK_GAP,
    LOOK_LEFT,
    MAX_DEPTH,
    Belief,
    Calibration,
    Candidate,
    DepthPolicy,
    Floats,
    MeasuredDepth,
)
from localspec.engine.drafters.model import LOOK_CONTEXT, PROBE_ROWS, READING
from localspec.engine.profile import CostProfile


@dataclass(frozen=True, slots=True)
class Costs:
    """A profile as arrays, milliseconds. pass_ms[rows]: target pass, padded where that is cheaper."""

    pass_ms: Floats
    step_ms: float
    overhead_ms: float
    read_ms: float  # per token, when the draft reads text in wide passes
    look_ms: float  # one look-in

    @classmethod
    def of(cls, profile: CostProfile) -> Costs:
        """The costs of a profile that has a draft. Raises ValueError otherwise."""
        if profile.draft is None:
            raise ValueError("this cost profile has no draft")
        return cls(
            np.asarray(profile.target.padded_ms(MAX_DEPTH + 2)),
            profile.draft.ms(1),
            profile.overhead_ms,
            profile.draft.ms(READING) / READING,
            profile.draft.ms(LOOK_CONTEXT + PROBE_ROWS),
        )

    def round_ms(self, drafted: int, verified: int) -> float:
        """A round that drafts so many tokens and verifies so many of them."""
        return drafted * self.step_ms + float(self.pass_ms[verified + 1]) + self.overhead_ms


def runs_of_hits(hits: Sequence[bool]) -> list[int]:
    """By place: how many guesses in a row are right from there on."""
    runs = [0] * (len(hits) + 1)
    for at in range(len(hits) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if hits[at] else 0
    return runs[:-1]


def fixed_ms(hits: Sequence[bool], costs: Costs, depth: int) -> float:
    """Milliseconds of the whole text with `depth` drafts in every round; 0 is plain decoding."""
    runs = runs_of_hits(hits)
    at, spent = 0, 0.0
    while at < len(hits):
        count = min(depth, len(hits) - at - 1)
        spent += costs.round_ms(count, count)
        at += min(runs[at], count) + 1
    return spent


def clairvoyant_ms(hits: Sequence[bool], costs: Costs) -> float:
    """The shortest way through the text for one who knows which guesses are right.

    Dynamic programming from the end: best[p] = min over K of round(K) + best[p + 1 + accepted(p, K)].
    """
    runs = runs_of_hits(hits)
    best = [0.0] * (len(hits) + 1)
    for at in range(len(hits) - 1, -1, -1):
        most = min(runs[at], MAX_DEPTH, len(hits) - at - 1)  # a wrong draft gains nothing
        best[at] = min(costs.round_ms(k, k) + best[at + k + 1] for k in range(most + 1))
    return best[0]


class Replay:
    """One policy walking along a trace, as the engine's step loop would."""

    def __init__(
        self, trace: Trace, costs: Costs, calibration: Calibration, policy: DepthPolicy
    ) -> None:
        self._hits = trace.hits
        self._runs = runs_of_hits(self._hits)
        self._buckets = trace.buckets
        self._costs = costs
        self._belief = Belief(calibration)
        self._policy = policy
        self._at = 0  # tokens written
        self._read = 0  # of them, read by the draft
        self._since_look = 0
        self.spent_ms = 0.0
        self.depths: list[int] = []  # verified drafts, by round
        self.looks = 0  # look-ins while drafts did not pay

    def run(self) -> float:
        """Milliseconds for the whole text."""
        while self._at < len(self._hits):
            self._round()
        return self.spent_ms

    @property
    def _left(self) -> int:
        return len(self._hits) - self._at

    def _reading_ms(self) -> float:
        return max(self._at - self._read - 1, 0) * self._costs.read_ms

    def _round(self) -> None:
        costs = self._costs
        limit = min(self._left - 1, MAX_DEPTH)
        spread = max(min(self._left, 96) / 4, 1.0)
        candidate = Candidate(self._belief, limit, costs.step_ms, self._reading_ms() / spread)
        depth, rate = 0, 0.0
        if limit > 0:
            decision = self._policy.decide(
                [candidate], costs.pass_ms[: limit + 2], costs.overhead_ms, 0
            )
            depth, rate = decision.depths[0], decision.rate
        if depth:
            self._draft(candidate, rate)
        else:
            self._plain()

    def _draft(self, candidate: Candidate, rate: float) -> None:
        costs, start = self._costs, self._at
        relative = costs.pass_ms[1 : candidate.limit + 2] - costs.pass_ms[1]
        drafted = 1
        while drafted < candidate.limit:
            candidate.known = self._buckets[start : start + drafted]
            if not self._policy.keep_drafting(candidate, relative, rate):
                break
            drafted += 1
        candidate.known = self._buckets[start : start + drafted]
        count = self._policy.worth_verifying(candidate, relative, rate)
        accepted = min(self._runs[start], count)
        self.spent_ms += self._reading_ms() + costs.round_ms(drafted, count)
        self.depths.append(count)
        self._at += accepted + 1
        # It has read all it drafted but the last, and keeps what was right of that.
        self._read = start + min(accepted, drafted - 1)
        if not count:
            self._belief.fade(1)
        for at in range(min(accepted + 1, count)):
            self._belief.observe(self._buckets[start + at], at < accepted)
        self._since_look = 0

    def _plain(self) -> None:
        spent = self._costs.round_ms(0, 0)
        self.spent_ms += spent
        self.depths.append(0)
        self._at += 1
        self._belief.fade(1)
        self._since_look += 1
        self._belief.calibration.earn(spent, spent)
        cost = self._costs.look_ms
        if self._since_look < LOOK_GAP or self._left < LOOK_LEFT:
            return
        if not self._belief.calibration.pay(cost):
            return
        self.looks += 1
        self.spent_ms += cost
        self._since_look = 0
        for at in range(max(self._at - PROBE_ROWS, 0), self._at):
            self._belief.observe(self._buckets[at], self._hits[at])


@dataclass(frozen=True, slots=True)
class Regret:
    """Milliseconds for the whole text by every way. auto_first: with nothing learned before."""

    plain: float
    fixed: dict[int, float]
    clairvoyant: float
    auto_first: float
    auto: float
    depths: Sequence[int]  # auto's, by round
    looks: int  # of auto, while drafts did not pay

    @property
    def best_depth(self) -> int:
        """The fixed depth that would have been fastest, 0 (plain) among them."""
        ways = {0: self.plain} | self.fixed
        return min(ways, key=lambda depth: ways[depth])

    @property
    def best_fixed(self) -> float:
        return min(self.plain, *self.fixed.values())


def regret(trace: Trace, profile: CostProfile, depths: Sequence[int], passes: int = 3) -> Regret:
    """Replay a trace by every way; `auto` reads it `passes` times, keeping what it learns of the pair."""
    costs = Costs.of(profile)
    hits = trace.hits
    calibration = Calibration()
    replays = [Replay(trace, costs, calibration, MeasuredDepth()) for _ in range(max(passes, 1))]
    times = [replay.run() for replay in replays]
    return Regret(
        fixed_ms(hits, costs, 0),
        {depth: fixed_ms(hits, costs, depth) for depth in depths},
        clairvoyant_ms(hits, costs),
        times[0],
        times[-1],
        replays[-1].depths,
        replays[-1].looks,
    )


def markdown(trace: Trace, found: Regret) -> str:
    """The comparison as text."""
    count = len(trace.target)
    rate = sum(trace.hits) / max(count, 1)

    def line(name: str, ms: float) -> str:
        versus = (
            f"{found.best_fixed / ms:.3f} | {found.clairvoyant / ms:.3f} | {found.plain / ms:.2f}"
        )
        return f"| {name} | {ms:.0f} | {1e3 * count / ms:.1f} | {versus} |\n"

    head = f"# Replay of {trace.name}\n\n- {count} tokens, the draft is right about {rate:.2f} of them\n"
    head += (
        f"- auto verified {np.mean(found.depths):.2f} drafts per pass on average, and looked in "
    )
    head += f"{found.looks} times while they did not pay\n\n"
    head += "| | ms | tokens/s | × best fixed | × clairvoyant | × plain |\n"
    head += "| --- | --: | --: | --: | --: | --: |\n"
    rows = [line("plain", found.plain)]
    rows += [line(f"fixed {depth}", ms) for depth, ms in sorted(found.fixed.items())]
    rows += [line("auto, nothing learned", found.auto_first), line("auto", found.auto)]
    return head + "".join(rows) + line("clairvoyant", found.clairvoyant)
