"""The tasks for real: every way of decoding on each of them in turns, and what comes out, as a table."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.measuring.runs import PLAIN, BenchError, Setting
from benchmarks.measuring.workloads import Text
from benchmarks.servers.llama_server import Running, Server
from benchmarks.texts.answers import Asker
from benchmarks.texts.tasks import Task
from localspec.machine.host import OtherProcesses
from localspec.protocol.frames import EngineSettings, Failed, SpeculationSettings

OURS = ("plain", "auto")
KINDS = ("plain", "ngram-simple", "ngram-mod", "ngram-map-k")  # of llama-server
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. server: llama-server's program; None: ours alone."""

    target: Path
    tasks: Sequence[Task]
    tokens: int
    repetitions: int
    engine: EngineSettings
    server: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. speed: tokens per second after the first; others: cores that other programs used."""

    task: Task
    setting: str
    tokens: int
    speed: float
    drafted: int
    accepted: int
    others: float


def measure(plan: Plan, say: Say) -> list[Timed]:
    """Measure all tasks in each repetition, in an order of its own.

    Each repetition begins with nothing learned and nothing remembered. Raises BenchError, LoadFailed.
    """
    rng, runs = random.Random(plan.seed), list[Timed]()
    for repetition in range(plan.repetitions):
        with _Session(plan) as session:
            for number, task in enumerate(rng.sample(plan.tasks, len(plan.tasks)), start=1):
                for setting in rng.sample(session.settings, len(session.settings)):
                    runs.append(session.run(setting, task))
                    say(
                        f"[{repetition + 1}: {number}/{len(plan.tasks)}] {task.name}, {setting}: "
                        f"{runs[-1].speed:.1f} tokens/s"
                    )
    return runs


class _Session:
    """Everything that answers, started anew: our engine, and a llama-server of each kind."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._opened = plan, ExitStack()

    def __enter__(self) -> _Session:
        with ExitStack() as opened:
            self._ours = Asker(self._plan.target, self._plan.engine)
            opened.callback(self._ours.close)
            self._servers = {
                f"llama-server {kind}": opened.enter_context(Running(server, PLAIN_SERVER))
                for kind, server in _servers(self._plan).items()
            }
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def settings(self) -> list[str]:
        return [*OURS, *self._servers]

    def run(self, setting: str, task: Task) -> Timed:
        """One answer. Raises BenchError."""
        others = OtherProcesses()
        if (server := self._servers.get(setting)) is None:
            measured = self._run_ours(setting, task)
            return Timed(task, setting, *measured, others.cores(()) or 0.0)
        prompt = self._ours.request(task, 1, SpeculationSettings(False)).tokens
        run = server.run(Text(prompt, [0] * self._plan.tokens, 0.0), 0)
        busy = others.cores([server.pid]) or 0.0
        return Timed(task, setting, run.tokens, run.speed, run.drafted, run.accepted, busy)

    def _run_ours(self, setting: str, task: Task) -> tuple[int, float, int, int]:
        speculative = SpeculationSettings(setting != "plain")
        # What is measured plain is not to be remembered: the next would only repeat it.
        request = self._ours.request(
            task, self._plan.tokens, speculative, private=setting == "plain"
        )
        answer = self._ours.submit(request)
        self._ours.finish()
        if isinstance(answer.ending, Failed):
            raise BenchError(answer.ending.message)
        done = answer.done
        counts = done.speculation.drafted, done.speculation.accepted
        return done.completion_tokens, done.timings.predicted_per_second, *counts


PLAIN_SERVER = Setting(PLAIN.depth, server=True)


def _servers(plan: Plan) -> dict[str, Server]:
    if plan.server is None:
        return {}
    extra = {kind: () if kind == "plain" else ("--spec-type", kind) for kind in KINDS}
    return {
        kind: Server(
            plan.server,
            plan.target,
            plan.target,
            context=plan.engine.n_ctx,
            threads=plan.engine.n_threads,
            gpu_layers=plan.engine.n_gpu_layers,
            extra=extra[kind],
        )
        for kind in KINDS
    }


def markdown(runs: Sequence[Timed]) -> str:
    """Medians over the repetitions, by task and by kind of task."""
    ways = [*OURS, *(f"llama-server {kind}" for kind in KINDS)]
    settings = [way for way in ways if any(run.setting == way for run in runs)]
    tasks = list(dict.fromkeys(run.task for run in runs))
    speeds = {
        (task, setting): statistics.median(
            run.speed for run in runs if run.task is task and run.setting == setting
        )
        for task in tasks
        for setting in settings
    }
    others = max(run.others for run in runs)
    text = f"Tokens per second; other programs used {others * 100:.0f} % of a core at most.\n\n"
    text += (
        f"| task | {' | '.join(settings)} | accepted |\n| --- |{' --: |' * (len(settings) + 1)}\n"
    )
    for task in tasks:
        row = [f"{speeds[task, setting]:.1f}" for setting in settings]
        auto = [run for run in runs if run.task is task and run.setting == "auto"]
        drafted, accepted = sum(run.drafted for run in auto), sum(run.accepted for run in auto)
        text += f"| {task.name} | {' | '.join(row)} | {accepted} of {drafted} |\n"
    for kind in dict.fromkeys(task.kind for task in tasks):
        means = [
            geometric_mean([speeds[task, setting] for task in tasks if task.kind == kind])
            for setting in settings
        ]
        text += f"| **{kind}** | {' | '.join(f'**{mean:.1f}**' for mean in means)} | |\n"
    return text
