"""Measure every setting on every text in turns.

So drift of the machine's speed falls on all of them alike.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring.runner import Runner
from benchmarks.measuring.runs import AUTO, PLAIN, Run, Setting
from benchmarks.measuring.workloads import (
    BIG,
    LAYER_READERS,
    WORKLOADS,
    Files,
    Heads,
    Say,
    Sizes,
    Text,
    Workload,
    build,
    text,
)
from benchmarks.servers.llama_server import Running, Server
from localspec.engine.pair.models import physical_cores
from localspec.machine.host import OtherProcesses
from localspec.protocol.frames import EngineSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Lengths in tokens; threads 0: one per core.

    skip: tokens at the beginning of each answer that the second figure leaves out.
    """

    work: Path
    sizes: Sizes = BIG
    workloads: Sequence[Workload] = WORKLOADS
    depths: Sequence[int] = tuple(range(1, 9))
    prompt: int = 64
    tokens: int = 256
    skip: int = 64
    repetitions: int = 3
    seed: int = 0
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: Path | None = None
    server_arguments: Sequence[str] = ()
    rpc: tuple[str, ...] = ()  # machines that have layers of the target

    @property
    def settings(self) -> list[Setting]:
        """Ours, then llama-server's."""
        ours = [PLAIN, *(Setting(depth) for depth in self.depths), AUTO]
        if self.server is None:
            return ours
        return ours + [replace(s, server=True) for s in ours if s != AUTO]

    def engine_settings(self, state: Path | None) -> EngineSettings:
        """One sequence, room for the text and a full round; `state` keeps what is learned."""
        room = -(-(self.prompt + self.tokens + 64) // 256) * 256
        return EngineSettings(
            n_ctx=max(self.engine.n_ctx, room),
            parallel=1,
            n_threads=self.engine.n_threads or physical_cores(),
            n_batch=self.engine.n_batch,
            n_gpu_layers=self.engine.n_gpu_layers,
            type_kv=self.engine.type_kv,
            extra_buffers=self.engine.extra_buffers,
            state_dir=str(state) if state else "",
            rpc_needed=bool(self.rpc),
        )


@dataclass(slots=True)
class Measured:
    """All runs of one workload.

    acceptance: how many of the texts' tokens the draft predicts. costs: the profile at the end, in
    milliseconds. rss_mb: resident memory after the first and after the last run.
    """

    workload: Workload
    acceptance: float
    runs: list[Run]
    costs: dict[str, object]
    rss_mb: tuple[float, float]


def measure(plan: Plan, say: Say) -> list[Measured]:
    """All workloads of a plan. What `auto` learns starts fresh, and again with every pair.

    Raises:
        BenchError: a run failed; LoadFailed: a model does not load.
    """
    progress = _Progress(len(plan.workloads) * plan.repetitions * len(plan.settings), say)
    plan.work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="state-", dir=plan.work) as state:
        return [_workload(plan, workload, Path(state), progress) for workload in plan.workloads]


def _workload(plan: Plan, workload: Workload, state: Path, progress: _Progress) -> Measured:
    files = build(plan.work, plan.sizes, workload, progress.say)
    rng = random.Random(f"{plan.seed} {workload.name}")
    settings = plan.engine_settings(state)
    server = _server(plan, files, settings)
    texts = [text(files, plan.prompt, plan.tokens, rng) for _ in range(plan.repetitions)]
    runs: list[Run] = []
    first_mb = 0.0
    progress.say(f"loading the pair of α = {workload.name}")
    with Runner(files.target, files.draft, settings, plan.rpc) as runner:
        warm = text(files, plan.prompt, plan.tokens, rng)
        runner.warm_up(warm)
        for repetition, sample in enumerate(texts):
            for setting in rng.sample(plan.settings, len(plan.settings)):
                if setting.server and server is not None:
                    run = _run_server(server, setting, sample, warm, repetition)
                else:
                    run = _run_ours(runner, setting, sample, repetition, plan.skip)
                runs.append(run)
                first_mb = first_mb or rss_mb()
                progress.done(workload, run)
        costs, last_mb = runner.costs(), rss_mb()
    acceptance = sum(sample.acceptance for sample in texts) / len(texts)
    return Measured(workload, acceptance, runs, costs, (first_mb, last_mb))


def _server(plan: Plan, files: Files, settings: EngineSettings) -> Server | None:
    if plan.server is None:
        return None
    return Server(
        plan.server,
        files.target,
        files.draft,
        context=settings.n_ctx,
        threads=settings.n_threads,
        gpu_layers=settings.n_gpu_layers,
        type_kv=settings.type_kv,
        extra=plan.server_arguments,
        drafts_with=_server_drafts(plan.sizes.heads),
    )


def _server_drafts(heads: Heads | None) -> str:
    """Return what llama-server's --spec-type calls the drafts."""
    if heads is None:
        return "draft-simple"
    return f"draft-{heads.removesuffix('2')}" if heads in LAYER_READERS else "draft-mtp"


def _run_ours(runner: Runner, setting: Setting, sample: Text, repetition: int, skip: int) -> Run:
    others = OtherProcesses()
    run = runner.run(setting, sample, repetition, skip)
    return replace(run, others=others.cores(()))


def _run_server(server: Server, setting: Setting, sample: Text, warm: Text, repetition: int) -> Run:
    with Running(server, setting) as running:
        running.warm_up(warm)
        others = OtherProcesses()
        run = running.run(sample, repetition)
        return replace(run, others=others.cores((running.pid,)))


class _Progress:
    """Lines for somebody who waits: what was measured, and how long the rest will take."""

    def __init__(self, total: int, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._total = total
        self._count = 0
        self._clock = clock
        self._start = clock()

    def done(self, workload: Workload, run: Run) -> None:
        self._count += 1
        left = (self._clock() - self._start) / self._count * (self._total - self._count)
        wrong = "" if run.correct else "  WRONG OUTPUT"
        self.say(
            f"[{self._count}/{self._total}, {left / 60:.0f} min left] α = {workload.name}, "
            f"{run.setting}: {run.speed:.1f} tokens/s{wrong}"
        )


def rss_mb() -> float:
    """Resident memory of this process in MB; its highest so far where /proc does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
