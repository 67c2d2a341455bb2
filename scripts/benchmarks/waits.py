"""How well the wait for a long prompt is forecast: of 1 K to 32 K tokens, cold and behind a cached part.

The forecast is that of the request's first frame, which the daemon shows: by the cost of tokens at their
depth, as it is known by then. Prompts are random tokens in a random order of lengths, so the first forecast
rests on what was measured at the load alone. `--cpu` counts the processor's time of one thread in place of
the clock's, on a machine that others use; what is measured at the load is the clock's time all the same.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.command import positive, say
from benchmarks.measuring.driven import Driven
from localspec.engine import llama
from localspec.engine.pair.load import load_pair
from localspec.protocol.frames import EngineSettings, PairFiles, SpeculationSettings

MIN_TOKENS, MAX_TOKENS = 1024, 32_768
GOAL = 0.15  # of the median error
PLAIN = SpeculationSettings(enabled=False)


def main(arguments: list[str]) -> int:
    """Print the error of each forecast and the medians; exit code 1 if one is beyond its goal."""
    parser = argparse.ArgumentParser("scripts/bench waits", description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=positive, default=16, help="of each kind")
    parser.add_argument("--most", type=positive, default=MAX_TOKENS, help="tokens of a prompt")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="count the processor's time")
    options = parser.parse_args(arguments)
    llama.initialise()
    clock = time.perf_counter
    if options.cpu:
        if options.threads > 1:
            parser.error("--cpu needs one thread")
        time.perf_counter = clock = time.process_time
    settings = EngineSettings(n_threads=options.threads, n_ctx=options.most + 64, prefix_bytes=0)
    pair = load_pair(PairFiles("waits", str(options.target)), settings, lambda *_: None)
    for lane in pair.lanes:
        lane._clock = clock
    engine = Driven(pair, clock)
    errors: dict[str, list[float]] = {"cold": [], "cached": []}
    rng = random.Random(options.seed)
    kinds = [kind for kind in errors for _ in range(options.prompts)]
    rng.shuffle(kinds)
    text: list[int] = []
    for number, kind in enumerate(kinds, start=1):
        length = int(math.exp(rng.uniform(math.log(MIN_TOKENS), math.log(options.most))))
        shared = rng.randrange(length // 2) if kind == "cached" else 0
        text = text[:shared]
        text += [
            rng.randrange(300, min(pair.vocab.size, 10_000)) for _ in range(length - len(text))
        ]
        expected, actual = _measure(engine, number, text, clock)
        errors[kind].append(expected / actual - 1)
        say(f"{number:3} {kind:6} {length:6} tokens: {expected:6.2f} s said, {actual:6.2f} s taken")
    pair.close()
    return 0 if _report(errors) else 1


def _measure(
    engine: Driven, number: int, text: list[int], clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the seconds that were expected of a prompt when it started, and those that it took."""
    answer = engine.write_greedily(number, list(text), 1, PLAIN)
    start = clock()
    engine.finish()
    spent = clock() - start
    started = answer.started
    assert started is not None
    assert started.reading is not None
    return started.reading.range_seconds(started.cached_tokens, started.prompt_tokens), spent


def _report(errors: dict[str, list[float]]) -> bool:
    """Print the median of the errors' sizes, by kind. Return whether all are within the goal."""
    is_met = True
    for kind, values in errors.items():
        sizes = sorted(map(abs, values))
        median, worst = statistics.median(sizes), sizes[-1]
        is_met &= median <= GOAL
        bias = statistics.median(values)
        text = f"{kind:6} median error {median:6.1%} (goal {GOAL:.0%}), worst {worst:6.1%}, bias {bias:+6.1%}"
        sys.stdout.write(f"{text}\n")
    return is_met
