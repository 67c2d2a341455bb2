"""Replay the engine on the recorded costs of a GPU, where a change of a pass's width is dear.

The costs are those that one H200 had with targets of 8 B, 32 B and 70 B and a draft of 0.5 B. Everything
above llama.cpp is the engine's. Compared are `auto`, after it has read two texts of the pair, every fixed
depth, and plain decoding, for one sequence or several at once. Texts that change between prose and copying
are compared with a clairvoyant, edits and records with plain decoding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.command import positive, say
from benchmarks.measuring.report import table
from benchmarks.texts import replay as lookups
from benchmarks.traces.copying import compare_copying, make_answer, make_copying
from benchmarks.traces.replay import FixedDepths, Replay
from benchmarks.traces.trace import Trace
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import ChangeCost, CostProfile, CostTable
from localspec.engine.speculation.warm_start import COMPARED_TOKENS, set_expectation

# Milliseconds by rows of passes that follow others of their width, and what a change costs.
TARGETS = {
    "8B": (
        {1: 2.9, 2: 3.3, 3: 3.7, 4: 4.1, 5: 4.6, 6: 5.0, 8: 6.0, 9: 7.0, 12: 7.2, 16: 7.4, 32: 9.2},
        ChangeCost(0.8, 4.5),
    ),
    "32B": (
        {1: 9.31, 2: 9.65, 3: 11.36, 4: 13.02, 5: 14.74, 6: 16.4, 8: 19.68, 9: 21.25, 12: 21.85,
         16: 22.24, 32: 27.74},
        ChangeCost(1.6, 9.0),
    ),
    "70B": (
        {1: 17.3, 2: 18.4, 3: 21.7, 4: 25.2, 5: 29.3, 6: 32.9, 8: 39.9, 9: 41.1, 12: 41.7, 16: 42.3,
         32: 52.2},
        ChangeCost(2.0, 11.2),
    ),
}  # fmt: skip
DRAFT = {
    1: 1.03, 2: 1.23, 3: 1.42, 4: 1.51, 5: 1.55, 6: 1.62, 8: 1.79, 9: 3.23, 12: 3.42, 16: 3.51, 32: 4.23,
}  # fmt: skip
DRAFT_CHANGE = ChangeCost(0.95, 0.6)
OVERHEAD_MS = 0.15
DEPTHS = (1, 2, 3, 4, 5, 7, 11, 15)
# Tokens of prose and of each copy, and the number of copies.
COPIES = ((40, 40, 6), (100, 60, 4), (100, 150, 3), (200, 300, 2))


@dataclass(frozen=True, slots=True)
class Outcome(FixedDepths):
    """Milliseconds per token. auto: in the third text of a pair."""

    auto: float


def device_profile(target: str) -> CostProfile:
    """Return the recorded costs of a target and its draft."""
    table, change = TARGETS[target]
    return CostProfile(
        CostTable(table, change=change), CostTable(DRAFT, change=DRAFT_CHANGE), OVERHEAD_MS
    )


def make_text(rates: Sequence[float], seed: int = 1) -> Trace:
    """Return a text of such rates in which the draft is always sure of itself."""
    return Trace.draw("", rates, [9] * len(rates), {}, seed)


def bursts(high: float, low: float, every: int, length: int) -> list[float]:
    """Return rates that change every `every` tokens."""
    return [low if index // every % 2 else high for index in range(length)]


def warm_start(text: Trace) -> Calibration:
    """Return what a load knows of the draft from two short texts, here the two ends of this one."""
    calibration = Calibration()
    comparisons = list(zip(text.buckets, text.hits, strict=True))
    set_expectation(calibration, (comparisons[:COMPARED_TOKENS], comparisons[-COMPARED_TOKENS:]))
    return calibration


def compare(
    target: str, text: Trace, sequences: int = 1, depths: Sequence[int] = DEPTHS
) -> Outcome:
    """Replay a text in every way."""
    calibration = warm_start(text)
    times = [
        Replay(text, device_profile(target), calibration, None, sequences).run_together()
        for _ in range(3)
    ]

    def fixed_ms(depth: int) -> float:
        return Replay(text, device_profile(target), Calibration(), depth, sequences).run_together()

    return Outcome(fixed_ms(0), {depth: fixed_ms(depth) for depth in depths}, times[-1])


def compare_draws(
    target: str,
    rates: Sequence[float],
    draws: int,
    sequences: int = 1,
    depths: Sequence[int] = DEPTHS,
) -> Outcome:
    """Replay several texts of such rates in every way. Return the means of their milliseconds per token."""
    outcomes = [compare(target, make_text(rates, 1 + n), sequences, depths) for n in range(draws)]
    return Outcome(
        fmean(outcome.plain for outcome in outcomes),
        {depth: fmean(outcome.fixed[depth] for outcome in outcomes) for depth in depths},
        fmean(outcome.auto for outcome in outcomes),
    )


def without_draft(target: str) -> CostProfile:
    """Return the recorded costs of a target whose drafts are looked up."""
    return CostProfile(device_profile(target).target, None, OVERHEAD_MS)


def compare_copies(target: str, draws: int) -> Iterator[list[str]]:
    """Yield rows of texts that change between prose and copying."""
    for prose, copy, copies in COPIES:
        ratios = [
            compare_copying(without_draft(target), make_copying(prose, copy, copies, 1 + draw))
            for draw in range(draws)
        ]
        figures = (f"{fmean(column):.3f}" for column in zip(*ratios, strict=True))
        yield [target, f"{prose} of prose, {copy} copied", *figures]


def compare_edits(target: str, draws: int, tokens: int) -> Iterator[list[str]]:
    """Yield rows of texts that nobody knows a shortest way through, each in the third text of a pair."""
    for kind in ("edits", "records", "prose"):
        ratios = []
        for draw in range(draws):
            auto, plain = (
                lookups.Replay(without_draft(target)),
                lookups.Replay(without_draft(target)),
            )
            texts = [make_answer(kind, tokens, 10 * draw + number) for number in range(3)]
            *_, last = [auto.write(text) for text in texts]
            ratios.append(plain.write(texts[-1], plain=True).ms / last.ms)
        yield [target, kind, "", f"{fmean(ratios):.3f}"]


def main(arguments: list[str]) -> int:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser("scripts/bench device", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=512, help="of a text (512)")
    parser.add_argument("--sequences", type=positive, default=1, help="at once (1)")
    parser.add_argument("--draws", type=positive, default=3, help="texts of each kind (3)")
    options = parser.parse_args(arguments)
    length = options.tokens * options.sequences
    texts = {f"{rate}": [rate] * length for rate in (0.95, 0.8, 0.6, 0.4, 0.0)}
    texts |= {f"bursts of {every}": bursts(0.95, 0.1, every, length) for every in (40, 80, 200)}
    rows = []
    for target in TARGETS:
        for name, rates in texts.items():
            outcome = compare_draws(target, rates, options.draws, options.sequences)
            ratios = outcome.best_fixed / outcome.auto, outcome.plain / outcome.auto
            figures = [f"{1e3 / outcome.plain:.1f}", str(outcome.best_depth)]
            rows.append([target, name, *figures, *(f"{ratio:.3f}" for ratio in ratios)])
        say(f"{target}: drafts of a model")
    header = [
        "target",
        "acceptance",
        "plain, tokens/s",
        "best depth",
        "auto ÷ best",
        "auto ÷ plain",
    ]
    sys.stdout.write(table(header, rows))
    if options.sequences == 1:
        header = ["target", "n-grams", "auto ÷ clairvoyant", "auto ÷ plain"]
        rows = [
            row
            for target in TARGETS
            for row in (
                *compare_copies(target, options.draws),
                *compare_edits(target, options.draws, options.tokens),
            )
        ]
        sys.stdout.write("\n" + table(header, rows))
    return 0
