"""Replay depth policies on a trace: how far `auto` is from the best depth, and from a clairvoyant.

`auto` is the engine itself, on a simulated pair whose passes move a clock by what a profile says they
cost, so that a replay is exact and takes a second. Fixed depths and the clairvoyant are computed: a
round at place p that verifies K drafts writes 1 + (the right guesses in a row from p on, at most K)
tokens and costs K·t_d + t_v(width(K+1)) + o. Two things are simplified: drafts after a wrong one are
given the confidence they have in the right text, and what is computed pays nothing for the draft's
reading of accepted text, so that `auto`'s regret is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.measuring.driven import Driven
from benchmarks.measuring.report import table
from benchmarks.measuring.runs import BenchError
from benchmarks.traces.simulated import SimulatedClock, SimulatedPair, count_together
from benchmarks.traces.trace import Trace
from localspec.engine.speculation.acceptance import Calibration, Floats
from localspec.engine.speculation.cost import CostProfile
from localspec.engine.speculation.depth import MAX_DEPTH
from localspec.extras.bench.theory import replay_fixed_ms, replay_optimal_ms
from localspec.protocol.frames import Done, Failed, Frame, SpeculationSettings


@dataclass(frozen=True, slots=True)
class Costs:
    """A profile as arrays, milliseconds. pass_ms[rows]: target pass, padded where that is cheaper."""

    pass_ms: Floats
    step_ms: float
    overhead_ms: float

    @classmethod
    def of(cls, profile: CostProfile) -> Costs:
        """Return the costs of a profile that has a draft. Raises ValueError otherwise."""
        if profile.draft is None:
            raise ValueError("this cost profile has no draft")
        return cls(
            np.asarray(profile.target.padded_ms(MAX_DEPTH + 2)),
            profile.draft.ms(1),
            profile.overhead_ms,
        )

    def round_cost(self, depth: int) -> float:
        """Return a round that drafts so many tokens and verifies them."""
        return depth * self.step_ms + float(self.pass_ms[depth + 1]) + self.overhead_ms


def runs_of_hits(hits: Sequence[bool]) -> list[int]:
    """By place: how many guesses in a row are right from there on."""
    runs = [0] * (len(hits) + 1)
    for at in range(len(hits) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if hits[at] else 0
    return runs[:-1]


class Replay(Driven):
    """The engine walking along a trace, its passes costing what the profile says.

    depth: as a request's `speculative.depth`, None for `auto`. calibration: learns. sequences: that walk
    at once, each along its own part of the trace, of the same length; dearer: as a SimulatedContext's.
    believed: what the engine begins with instead of the profile.
    """

    def __init__(
        self,
        trace: Trace,
        profile: CostProfile,
        calibration: Calibration,
        depth: int | None = None,
        sequences: int = 1,
        dearer: float = 0.0,
        believed: CostProfile | None = None,
        clock: SimulatedClock | None = None,
    ) -> None:
        self.clock = clock or SimulatedClock()
        self._simulated = SimulatedPair(
            trace, profile, calibration, self.clock, sequences, dearer, believed
        )
        super().__init__(self._simulated, self.clock)
        self._overhead_ms = profile.overhead_ms
        self._tokens = len(trace.target) // sequences
        self._sequences = sequences
        self._depth = depth
        self._drafted: dict[int, int] = {}  # verified so far, by request
        self.depths: list[int] = []  # verified drafts, by round
        self.spent_ms: list[float] = [0.0]  # by tokens written

    def run(self) -> float:
        """Milliseconds for the whole text."""
        for part in range(self._sequences):
            prompt = [part * self._tokens]
            speculative = SpeculationSettings(True, self._depth, "draft")
            self.write_greedily(part + 1, prompt, self._tokens, speculative)
        written: dict[int, int] = {}
        while self.engine.active:
            before = sum(self._drafted.values())
            self.engine.step()
            for sequence in self.pair.shared.active:
                self._drafted[sequence.id] = sequence.tally.drafted
            self.depths.append(sum(self._drafted.values()) - before)
            # Each token has a character to show, so there is a delta in every round.
            self.clock.spend(self._overhead_ms)
            for number, answer in self.answers.items():
                written[number] = answer.deltas[-1].tokens if answer.deltas else 0
            new = sum(written.values()) - len(self.spent_ms) + 1
            self.spent_ms += [1e3 * self.clock()] * new
        return self.spent_ms[-1]

    def run_together(self) -> float:
        """Return milliseconds per token of all sequences, while each is generating its part of the text."""
        self.run()
        answers = self.answers.values()
        end = min(answer.stamps[-1] for answer in answers)
        return 1e3 * end / count_together(answers, 0.0, end)

    def _receive(self, frame: Frame) -> None:
        super()._receive(frame)
        match frame:
            case Done():
                self._drafted[frame.id] = frame.speculation.drafted
            case Failed():
                raise BenchError(frame.message)
            case _:
                pass

    @property
    def looks(self) -> int:
        """Look-ins while drafts did not pay."""
        return self._simulated.looks


@dataclass(frozen=True, slots=True)
class FixedDepths:
    """Milliseconds by the depth of every round. plain: without drafts."""

    plain: float
    fixed: dict[int, float]

    @property
    def best_depth(self) -> int:
        """The fixed depth that would have been fastest, 0 (plain) among them."""
        ways = {0: self.plain} | self.fixed
        return min(ways, key=lambda depth: ways[depth])

    @property
    def best_fixed(self) -> float:
        return min(self.plain, *self.fixed.values())


@dataclass(frozen=True, slots=True)
class Regret(FixedDepths):
    """Milliseconds for the whole text by every way. auto_first: with nothing learned before."""

    clairvoyant: float
    auto_first: float
    auto: float
    depths: Sequence[int]  # auto's, by round
    looks: int  # of auto, while drafts did not pay


def regret(trace: Trace, profile: CostProfile, depths: Sequence[int], passes: int = 3) -> Regret:
    """Replay a trace by every way; `auto` reads it `passes` times, keeping what it learns of the pair."""
    costs = Costs.of(profile)
    hits = trace.hits
    calibration = Calibration()
    replays = [Replay(trace, profile, calibration) for _ in range(max(passes, 1))]
    times = [replay.run() for replay in replays]
    return Regret(
        replay_fixed_ms(hits, 0, costs),
        {depth: replay_fixed_ms(hits, depth, costs) for depth in depths},
        replay_optimal_ms(hits, MAX_DEPTH, costs),
        times[0],
        times[-1],
        replays[-1].depths,
        replays[-1].looks,
    )


def markdown(trace: Trace, result: Regret) -> str:
    """Return the comparison as text."""
    count = len(trace.target)
    rate = sum(trace.hits) / max(count, 1)

    def row(name: str, ms: float) -> list[str]:
        ratios = [result.best_fixed / ms, result.clairvoyant / ms]
        speed = f"{1e3 * count / ms:.1f}"
        return [name, f"{ms:.0f}", speed, *(f"{r:.3f}" for r in ratios), f"{result.plain / ms:.2f}"]

    head = f"# Replay of {trace.name}\n\n- {count} tokens, the draft is right about {rate:.2f} of them\n"
    head += (
        f"- auto verified {np.mean(result.depths):.2f} drafts per pass on average, and looked in "
    )
    head += f"{result.looks} times while they did not pay\n\n"
    rows = [row("plain", result.plain)]
    rows += [row(f"fixed {depth}", ms) for depth, ms in sorted(result.fixed.items())]
    rows += [row("auto, nothing learned", result.auto_first), row("auto", result.auto)]
    rows.append(row("clairvoyant", result.clairvoyant))
    header = ["", "ms", "tokens/s", "× best fixed", "× clairvoyant", "× plain"]
    return head + table(header, rows)
