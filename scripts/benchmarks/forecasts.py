"""`scripts/bench forecasts FILE …`: how right forecasts of speed are.

Of each model, passes of 1, 2, 4, 8 and 128 rows are measured, by the processor's time on one thread, each
between passes of the first model: what else the machine does slows both, and their ratio says what is the
model's. Then each is forecast from what the others have shown, as the daemon does it. Drafts are the files
with "draft" in their names. With an acceptance, each is tried with every target of the same vocabulary, whose
rate follows from the measured costs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import positive, say
from benchmarks.goals import met
from localspec.engine import environment
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.registry.header.model import ModelInfo
    from localspec.registry.header.speeds import LoadRecord

READ_ROWS = 128  # of a pass that reads a prompt
# A pass of the first model counts as so many milliseconds, and a round around it adds some.
REFERENCE_MS, ROUND_MS = 20.0, 0.5
GOALS = {"plain writing": 10.0, "reading": 15.0, "2 rows": 10.0, "4 rows": 10.0, "8 rows": 10.0}
QUANTITIES = dict(zip(GOALS, ("1", "read", "2", "4", "8"), strict=True))
WITH_DRAFTS, DRAFTS_GOAL = "writing with drafts", 10.0
ACCEPTANCES = (0.8, 0.5)
Run = Callable[[int], None]


def main(arguments: list[str]) -> int:
    """0: all goals are met; 1: one is missed, or a load failed; 2: usage."""
    environment.prepare()
    parser = argparse.ArgumentParser("scripts/bench forecasts", description=__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, help="models, and drafts with that in their names"
    )
    parser.add_argument("--repeats", type=positive, default=9, help="of each pass (9)")
    options = parser.parse_args(arguments)
    from localspec.engine import llama
    from localspec.registry.header.model import read_local_model

    llama.initialise()
    try:
        models = {file: read_local_model(file, as_draft=_is_draft(file)) for file in options.files}
        records = dict(_measure(models, options.repeats))
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1
    results = [*_compare_passes(records), *_compare_drafts(models, records)]
    return int(not all(results))


def _is_draft(file: Path) -> bool:
    return "draft" in file.name


def _measure(models: dict[Path, ModelInfo], repeats: int) -> Iterator[tuple[Path, LoadRecord]]:
    """Yield what each model has shown."""
    from localspec.registry.header.rate import Placement, RateEstimate
    from localspec.registry.header.speeds import MEASURED_ROWS, LoadRecord, MemorySpeeds

    in_ram = Placement(0, draft_layers=0)
    with ExitStack() as kept:
        beside, _ = _open(next(iter(models)), kept)
        for file, model in models.items():
            say(file.name)
            with ExitStack() as opened:
                run, read = _open(file, opened)
                ms = {str(rows): _time(run, rows, beside, repeats) for rows in MEASURED_ROWS}
                if not _is_draft(file):
                    ms["read"] = _time(read, READ_ROWS, beside, max(repeats // 3, 1)) / READ_ROWS
            if _is_draft(file):
                ms = {"1": ms["1"]}
            else:
                ms["1"] += ROUND_MS
            parts = RateEstimate(model, None, MemorySpeeds()).list_parts(in_ram)
            yield file, LoadRecord(str(file), parts, model.layers, int(not _is_draft(file)), ms)


def _open(file: Path, stack: ExitStack) -> tuple[Run, Run]:
    """Return functions that make passes with logits for all rows, and for the last one."""
    from localspec.engine.llama import Batch, Context, ContextSettings, Model
    from localspec.engine.pair.models import make_pass_runner

    model = stack.enter_context(Model(str(file), n_gpu_layers=0))
    settings = ContextSettings(n_ctx=1024, n_batch=512, n_seq=1, n_outputs=16, n_threads=1)
    context, batch = stack.enter_context(Context(model, settings)), Batch(512)
    return make_pass_runner(context, batch), make_pass_runner(context, batch, last_only=True)


def _time(run: Run, rows: int, beside: Run, repeats: int) -> float:
    """Return the milliseconds of a pass, where one of `beside` takes REFERENCE_MS."""

    def spend(make_pass: Run, width: int) -> float:
        start = time.process_time()
        make_pass(width)
        return time.process_time() - start

    run(rows)  # cold
    ratios = []
    for _ in range(repeats):
        before, spent, after = spend(beside, 1), spend(run, rows), spend(beside, 1)
        ratios.append(2 * spent / (before + after))
    return REFERENCE_MS * statistics.median(ratios)


def _compare_passes(records: dict[Path, LoadRecord]) -> Iterator[bool]:
    """Print what is forecast of each model from the others, and yield whether each goal is met."""
    from localspec.registry.header.speeds import MemorySpeeds, expect_ms

    kept = list[bool]()
    errors: dict[str, list[float]] = {name: [] for name in GOALS}
    for file, record in records.items():
        speeds = MemorySpeeds.learn([each for each in records.values() if each != record])
        shown = []
        for name, quantity in QUANTITIES.items():
            if _is_draft(file):
                break
            expected = expect_ms(record, quantity, speeds.factors.get(quantity, {}))
            error = math.log(record.ms[quantity] / expected)
            errors[name].append(100 * abs(math.exp(-error) - 1))
            kept.append(abs(error) <= 1.28 * speeds.expect_deviation(record.parts, quantity))
            shown.append(f"{name} {record.ms[quantity]:.3g} ms, forecast {expected:.3g}")
        sys.stdout.write(f"{file.stem}: {'; '.join(shown)}\n" if shown else "")
    sys.stdout.write(f"{sum(kept)} of {len(kept)} in the interval, which is for four of five\n")
    for name, goal in GOALS.items():
        yield met(name, errors[name], goal, "%")


def _compare_drafts(
    models: dict[Path, ModelInfo], records: dict[Path, LoadRecord]
) -> Iterator[bool]:
    """Print what is forecast with drafts of a known acceptance, and yield whether the goal is met."""
    from localspec.registry.header.rate import Placement, RateEstimate
    from localspec.registry.header.speeds import MemorySpeeds

    errors, in_ram = list[float](), Placement(0, draft_layers=0)
    targets = [file for file in models if not _is_draft(file)]
    for target, draft in product(targets, [file for file in models if _is_draft(file)]):
        if models[target].vocabulary != models[draft].vocabulary:
            continue
        own = records[target], records[draft]
        others = MemorySpeeds.learn([each for each in records.values() if each not in own])
        forecast = RateEstimate(models[target], models[draft], others)
        measured = RateEstimate(models[target], models[draft], MemorySpeeds.learn(own))
        for acceptance in ACCEPTANCES:
            rate, real = (
                each.tokens_per_second(in_ram, acceptance) for each in (forecast, measured)
            )
            errors.append(100 * abs(rate / real - 1))
            name = f"{target.stem} with {draft.stem} at {acceptance}"
            sys.stdout.write(f"{name}: {real:.1f} tokens/s, forecast {rate:.1f}\n")
    if errors:
        yield met(WITH_DRAFTS, errors, DRAFTS_GOAL, "%")
