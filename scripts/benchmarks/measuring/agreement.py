"""One pair asked by `localspec bench` and stepped in this process: what both report of it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.command import say
from benchmarks.measuring.report import Verdict, verdict_line
from benchmarks.servers.daemon import Daemon
from benchmarks.texts.answers import Asker
from localspec.engine.pair.models import physical_cores
from localspec.extras.bench import prompts, summary
from localspec.extras.bench.asking import DaemonServer, RequestOptions, TimedAnswer
from localspec.extras.bench.prompts import Prompt, Work
from localspec.extras.bench.report import Mode, Run
from localspec.extras.bench.running import Bench, BenchPlan, plan_trials
from localspec.machine import host
from localspec.protocol.frames import (
    ChatPrompt,
    EngineSettings,
    Generate,
    Message,
    Sampling,
    SpeculationSettings,
)

CLOSE = 0.05  # of each other


def compare(files: Sequence[Path], tokens: int, repetitions: int, context: int) -> int:
    """Of a target, and its draft where it has one: print both; 1 where they do not agree."""
    works = [replace(work, prompts=_chats(work)) for work in prompts.shipped_works()]
    plan = BenchPlan([work for work in works if work.prompts], tokens, repetitions, probe=False)
    settings = {"context": context, "parallel": 1}
    with Daemon(pair=",".join(map(str, files)), **settings) as daemon:
        ours = DaemonServer()
        ours.socket_path = daemon.socket
        pids = [daemon.pid, *(work["pid"] for work in daemon.get("/localspec/status")["pairs"])]
        stepped = Stepped(files, context)
        try:
            both = [
                Bench(server, plan, context, pids)
                for server in (ours, cast("DaemonServer", stepped))
            ]
            _measure(both, plan)
        finally:
            stepped.close()
    return _report_agreement([bench.answers.runs for bench in both], plan.works)


def _chats(work: Work) -> list[Prompt]:
    """Return what can be asked without a grammar and without markers for a hole."""
    return [prompt for prompt in work.prompts if not prompt.is_place and not prompt.schema]


def _measure(both: Sequence[Bench], plan: BenchPlan) -> None:
    for bench in both:
        bench.warm_up()
    for at, turn in enumerate(plan_trials(plan)):
        say(f"{turn.work.name}, prompt {turn.prompt + 1}")
        for mode in both[0]._modes_of(turn):
            for bench in both if at % 2 else both[::-1]:
                bench._ask_and_record(turn, mode)


def _report_agreement(both: Sequence[Sequence[Run]], works: Sequence[Work]) -> int:
    """Print a line for each kind of work and each side, and check what must hold of all together."""
    for work in works:
        own = [[run for run in runs if run.workload == work.name] for runs in both]
        cells = [f"{_rate(runs, 'plain'):7.1f} {_rate(runs, 'speculative'):7.1f}" for runs in own]
        sys.stdout.write(f"  {work.name:20} bench {cells[0]}   engine {cells[1]}\n")
    for runs, name in zip(both, ("bench", "engine"), strict=True):
        tried, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
        spent = sum(run.total_ms - run.first_ms for run in runs) / sum(run.write_ms for run in runs)
        loud = sum((run.others or 0.0) > host.MAX_NOISE_CORES for run in runs)
        sys.stdout.write(
            f"{name}: {sum(run.tokens for run in runs)} tokens, {tried} drafted, {accepted} accepted; by the "
            f"client's clock {spent:.3f} times as long; disturbed in {loud} of {len(runs)} answers\n"
        )
    plain, drafted = (_beside(both, mode) for mode in ("plain", "speculative"))
    gains = [drafted[at] / plain[at] for at in plain.keys() & drafted.keys()]
    verdicts = []
    for what, values in (("plain", list(plain.values())), ("auto / plain", gains)):
        middle = median(values)
        text = f"{what}: the bench's by the engine's, median {middle:.3f} of {len(values)}: apart"
        verdicts.append(Verdict(text, abs(middle - 1), CLOSE, at_least=False))
    sys.stdout.writelines(map(verdict_line, verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _rate(runs: Sequence[Run], mode: Mode) -> float:
    """Of one mode, tokens per second; nan where answers are too short for one."""
    return summary.summarize_mode([run for run in runs if run.mode == mode]).rate or math.nan


def _beside(both: Sequence[Sequence[Run]], mode: Mode) -> dict[tuple[str, int, int], float]:
    """Return the bench's rate over the engine's, of answers that were written right after each other."""
    ours, theirs = (
        {(run.workload, run.prompt, run.repetition): run.rate for run in runs if run.mode == mode}
        for runs in both
    )
    return {at: rate / other for at, rate in ours.items() if rate and (other := theirs.get(at))}


class Stepped(Asker):
    """An engine in this process, asked as `localspec bench` asks a server."""

    name = "engine"

    def __init__(self, files: Sequence[Path], context: int) -> None:
        """Load the pair. Raises LoadFailed."""
        settings = EngineSettings(n_ctx=context, parallel=1, n_threads=physical_cores())
        super().__init__(files[0], settings, *files[1:])

    def ask(self, prompt: Prompt, how: RequestOptions) -> TimedAnswer:
        """By the engine's clock and by that of whoever steps it."""
        self._asked += 1
        options: dict[str, Any] = how.speculative or {}
        request = Generate(
            self._asked,
            ChatPrompt([Message("user", prompt.question(how.room))]),
            Sampling(temperature=0.0),
            how.tokens,
            speculative=SpeculationSettings(**options),
            exact=False,
            cache_prompt=False,
            private=True,
        )
        self.answers.clear()
        start = time.perf_counter()
        answer = self.submit(self._preparer.prepare(request))
        self.finish()
        total, done = time.perf_counter() - start, answer.done
        statistics = done.speculation
        counts = {"draft_n": statistics.drafted, "draft_n_accepted": statistics.accepted}
        return TimedAnswer(
            answer.text,
            done.completion_tokens,
            answer.stamps[0] - start,
            total,
            timings={"predicted_ms": done.timings.predicted_ms, **counts},
            usage={"prompt_tokens": done.prompt_tokens},
            speculation={
                "rounds": statistics.rounds,
                "kind": statistics.kind,
                "reason": statistics.reason,
            },
        )
