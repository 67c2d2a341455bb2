"""The engine writing an answer that is known, its passes costing what a profile says.

All above llama.cpp is the engine's own; what is drafted is looked up, since there is no draft model. So
a policy is scored on real texts without the model that wrote them, in a second.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from benchmarks.measuring.driven import Answer, Driven
from benchmarks.measuring.report import table
from benchmarks.texts.answers import Answered
from benchmarks.traces.simulated import (
    Said,
    SimulatedClock,
    SimulatedContext,
    count_together,
    describe_pair,
)
from localspec.engine.llama import Batch
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.pair.profile import LearnedProfile, StoredProfile
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.drafters.base import Drafter
from localspec.engine.speculation.drafters.ngram import NgramIndex
from localspec.protocol.frames import SpeculationSettings

# Milliseconds of a pass by its rows, each with logits: Qwen2.5-Coder 0.5B in Q4_K_M, two threads of a
# virtual machine with AVX-512.
COSTS = {1: 20.3, 2: 38.2, 3: 45.3, 4: 50.3, 5: 69.6, 8: 83.1, 16: 123, 32: 218, 48: 295, 64: 400}
OVERHEAD_MS = 0.3
PASSES = 3  # through all answers, when something is to be learned of them
# Drafts checked, by confidence, that what is known of any pair counts for with a new one.
WORTH = 60.0
_ROOM = 1 << 15  # tokens that a text may have


class _Writing(SimulatedContext):
    """Says at each place what stands there in a text. Ids are one higher than the text's: 0 is special."""

    def __init__(self, clock: SimulatedClock, costs: CostTable, n_seq: int = 1) -> None:
        super().__init__(clock, costs, Said(range(1, _ROOM), [1.0] * _ROOM), n_seq)
        self.find_text: Callable[[int], Sequence[int]] = lambda sequence: ()
        self.n_ctx = _ROOM * n_seq
        self._rows_read: list[tuple[int, int]] = []

    def decode(self, batch: Batch) -> None:
        super().decode(batch)
        rows = batch.struct
        self._rows_read = [
            (int(rows.seq_id[row][0]), int(rows.pos[row]) + 1) for row in range(batch.rows)
        ]

    def choose_on_device(self, sequence: int, on: bool) -> bool:
        return True

    def sampled_token(self, row: int) -> int:
        sequence, place = self._rows_read[row]
        text = self.find_text(sequence)
        return text[place] if place < len(text) else 1


@dataclass(frozen=True, slots=True)
class Written:
    """One answer. ms: from the first token on; passes: those that wrote it, after the prompt's."""

    tokens: int
    passes: int
    ms: float
    drafted: int
    accepted: int

    @property
    def per_pass(self) -> float:
        return (self.tokens - 1) / max(self.passes, 1)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return 1e3 * (self.tokens - 1) / self.ms


class Replay(Driven):
    """One loaded pair that writes known answers one after another, and learns from them.

    measured: what was measured of passes when it was loaded, by width, where that is not what they cost.
    sequences: how many answers it may write at once.
    """

    def __init__(
        self,
        costs: CostProfile | None = None,
        measured: Mapping[int, float] | None = None,
        sequences: int = 1,
    ) -> None:
        costs = costs or CostProfile(CostTable(COSTS), None, OVERHEAD_MS)
        self._time = SimulatedClock()
        table = CostTable(measured or costs.target.as_dict(), change=costs.target.change)
        self._context = _Writing(self._time, costs.target, sequences)
        calibrations = StoredProfile(None, None, 1.0).load_calibrations(Drafter.kinds)
        learned = LearnedProfile(CostProfile(table, None, costs.overhead_ms), calibrations)
        parts = describe_pair(
            "texts", self._context, None, learned, self._time, chooses_on_device=True
        )
        super().__init__(LoadedPair(drafter=None, **parts), self._time)
        self._overhead_ms = costs.overhead_ms
        self._count = 0
        self._texts: dict[int, Sequence[int]] = {}  # by request
        self._context.find_text = self._find_text

    @property
    def calibration(self) -> Calibration:
        """What it has learned of looked-up drafts."""
        return self.pair.learned.calibrations.answers["ngram"]

    def write(self, answered: Answered, plain: bool = False) -> Written:
        """One answer, after its prompt. plain: without drafts."""
        answer = self._ask(answered, SpeculationSettings(not plain))
        passes, start = 0, self._time()
        while self.engine.active:
            writing = bool(answer.deltas)
            self.engine.step()
            if writing:
                passes += 1
                self._time.spend(self._overhead_ms)
            else:
                start = self._time()
        assert answer.tokens == self._texts[self._count][len(answered.prompt) :]
        done = answer.done.speculation
        spent = 1e3 * (self._time() - start)
        return Written(len(answered.answer), passes, spent, done.drafted, done.accepted)

    def write_together(
        self, answers: Sequence[Answered], speculation: SpeculationSettings | None = None
    ) -> float:
        """Return milliseconds per token of several answers at once, while all of them are written."""
        asked = [self._ask(answered, speculation) for answered in answers]
        while self.engine.active:
            self.engine.step()
            self._time.spend(self._overhead_ms)
        start = max(answer.stamps[0] for answer in asked)
        end = min(answer.stamps[-1] for answer in asked)
        return 1e3 * (end - start) / count_together(asked, start, end)

    def _ask(self, answered: Answered, speculation: SpeculationSettings | None = None) -> Answer:
        """Submit the request for an answer, and return what it is sent."""
        prompt = [token + 1 for token in answered.prompt]
        self._count += 1
        self._texts[self._count] = prompt + [token + 1 for token in answered.answer]
        return self.write_greedily(
            self._count,
            prompt,
            len(answered.answer),
            speculation or SpeculationSettings(),
            NgramIndex((), prompt, self.pair.memory),
        )

    def _find_text(self, slot: int) -> Sequence[int]:
        """Return the text that is written in a slot."""
        return next(
            self._texts[sequence.id]
            for sequence in self.pair.shared.active
            if sequence.slot.id == slot
        )


def markdown(written: Sequence[tuple[Answered, Written]]) -> str:
    """By answer and by kind of task: tokens per pass, and how much faster than without drafts."""
    rows, gains = list[list[str]](), dict[str, list[float]]()
    for answered, replayed in written:
        gain = replayed.speed * (COSTS[1] + OVERHEAD_MS) / 1e3
        gains.setdefault(answered.kind, []).append(gain)
        accepted = f"{replayed.accepted} of {replayed.drafted}"
        figures = [str(replayed.tokens), f"{replayed.per_pass:.2f}", accepted, f"{gain:.2f}"]
        rows.append([answered.name, *figures])
    for kind, factors in gains.items():
        rows.append([f"**{kind}**", "", "", "", f"**{geometric_mean(factors):.2f}**"])
    return table(["answer", "tokens", "per pass", "accepted", "× plain"], rows)


def calibration(answers: Sequence[Answered], seed: int) -> str:
    """Return what is learned of looked-up drafts from all these answers, as `ngram.json` has it.

    It follows what was written last, so what is given is the mean over all but the first pass.
    """
    rng, replay = random.Random(seed), Replay()
    states = []
    for _ in range(PASSES):
        for answered in rng.sample(answers, len(answers)):
            replay.pair.memory.forget(None)  # else it would only repeat itself
            replay.write(answered)
            states.append(replay.calibration.as_dict())
    late = states[len(answers) :]
    averages = {name: np.mean([state[name] for state in late], axis=0) for name in late[0]}
    averages["count"] = np.minimum(averages["count"], WORTH)
    lines = ",\n".join(
        f'  "{name}": [{", ".join(f"{answered:.4g}" for answered in values)}]'
        for name, values in averages.items()
    )
    return f"{{\n{lines}\n}}\n"
