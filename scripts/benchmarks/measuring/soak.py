"""Does memory grow with the rounds? Many short answers on a small pair with a large vocabulary.

A row of logits kept by mistake is 128 KB here, so that a leak of one row per round is a gigabyte
after 10 000 rounds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measuring.interleaved import Plan, rss_mb
from benchmarks.measuring.runner import Runner
from benchmarks.measuring.runs import AUTO, PLAIN, BenchError, Setting
from benchmarks.measuring.workloads import Say, Workload, build, text

POINTS = 20  # readings of the memory
GROWTH_MB = 2.0  # beyond the first tenth of the rounds: allocators breathe, leaks add up


@dataclass(frozen=True, slots=True)
class Soaked:
    """Resident memory in MB by rounds done: (rounds, MB) pairs."""

    readings: Sequence[tuple[int, float]]

    @property
    def growth_mb(self) -> float:
        """From the end of the first tenth, when caches have filled, to the end."""
        last = self.readings[-1]
        warm = next((r for r in self.readings if r[0] * 10 >= last[0]), self.readings[0])
        return last[1] - warm[1]

    @property
    def flat(self) -> bool:
        return self.growth_mb <= GROWTH_MB


def soak(plan: Plan, rounds: int, say: Say) -> Soaked:
    """Generate until `rounds` rounds are done, in turns plain, fixed and auto.

    Raises:
        BenchError: an answer was wrong.
    """
    workload: Workload = plan.workloads[0]
    files = build(plan.work, plan.sizes, workload, say)
    rng = random.Random(plan.seed)
    settings: tuple[Setting, ...] = (PLAIN, Setting(3), AUTO)
    with Runner(files.target, files.draft, plan.engine_settings(None)) as runner:
        vocab = runner.pair.vocab
        for token in range(
            vocab.size
        ):  # its caches are bounded, but would fill all the way through
            vocab.piece(token)
            vocab.is_eog(token)
        readings = [(0, rss_mb())]
        while runner.engine.rounds < rounds:
            for setting in settings:
                sample = text(files, plan.prompt, plan.tokens, rng)
                if not runner.run(setting, sample, 0, 0).correct:
                    raise BenchError(f"A wrong answer after {runner.engine.rounds} rounds.")
            if runner.engine.rounds - readings[-1][0] >= rounds / POINTS:
                readings.append((runner.engine.rounds, rss_mb()))
                say(f"{readings[-1][0]} rounds: {readings[-1][1]:.1f} MB")
        readings.append((runner.engine.rounds, rss_mb()))
    return Soaked(readings)
