"""Run a complete bench and return its report, and then reset what the pair has learned.

Every answer teaches a loaded pair the cost of its passes and the acceptance of its drafts, and a file saves
both for the next load. The prompts of a bench are not its user's work, and some answers draft deeper than
pays. So a bench begins with what the file contains, learns as any other requests would, and finally restores
the file.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import localspec
from localspec import files, machine, paths
from localspec.client.pairs import PairsClient
from localspec.errors import Conflict, LocalspecError, NoDaemon, UsageError
from localspec.extras.bench import distribution, summary
from localspec.extras.bench import statistics as ratios
from localspec.extras.bench.asking import DaemonServer
from localspec.extras.bench.report import Costs, Machine, Report, Run, Workload
from localspec.extras.bench.running import Bench, BenchAnswers, BenchPlan, BenchProgress
from localspec.extras.bench.summary import summarize_verdicts
from localspec.machine.host import MAX_NOISE_CORES, OtherProcesses

KEPT_NOTE = (
    "The pair keeps what it learned from these answers: costs of passes, and acceptance of drafts."
)
RESET_NOTE = "The pair's learned timings were reset, and it was unloaded; --apply keeps them."
_PATTERN = "profile-*.json"  # files of the engine, named by a key that only the engine knows
_UNLOAD_TIMEOUT_S = 5.0  # for an interrupted request to end
_POLL_INTERVAL_S = 0.05


@contextlib.contextmanager
def reset_afterwards(model: str, *, keep: bool) -> Iterator[list[str]]:
    """Begin with a newly loaded pair, and afterwards reset what it has learned.

    With `keep`, nothing is reset. It yields a list of notes, which is complete after the `with` block.
    """
    notes: list[str] = []
    if keep:
        yield notes
        notes.append(KEPT_NOTE)
        return
    client, folder = PairsClient(), paths.default_paths().state
    name = model or str(client.status()["pair"]["name"])
    with contextlib.suppress(Conflict):  # the pair is also answering someone else
        client.unload(name)  # this saves what the pair has learned to its file
    contents = {file: file.read_bytes() for file in folder.glob(_PATTERN)}
    try:
        yield notes
    finally:
        client.autostart = False  # a daemon that has stopped has no pair to unload
        stamps = _read_stamps(folder)
        if _unload(client, name):
            now = _read_stamps(folder)
            changed = [file for file, stamp in now.items() if stamps.get(file) != stamp]
            for file in changed:
                with contextlib.suppress(OSError):
                    if file in contents:
                        files.write_atomically(file, contents[file], sync=False)
                    else:
                        file.unlink()
            notes += [RESET_NOTE] * bool(changed)


def _unload(client: PairsClient, name: str) -> bool:
    """Unload the pair, unless it is answering others or the daemon has stopped."""
    deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
    while True:
        try:
            return bool(client.unload(name))
        except Conflict:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        except NoDaemon:
            return False


def _read_stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the inode and modification time of each file, which change when it is written."""
    stamps = {}
    for file in folder.glob(_PATTERN):
        with contextlib.suppress(OSError):
            status = file.stat()
            stamps[file] = (status.st_ino, status.st_mtime_ns)
    return stamps


ShowMessage = Callable[[str], None]
ShowProgress = Callable[[BenchProgress, Callable[[], list[Workload]]], None]
_BUSY_SAMPLE_S = 0.5  # time over which other programs' work is measured before the bench
_MAX_TIES = 8  # divergences of texts whose log-probabilities are requested
_MIN_ANSWER_S = 5.0  # time for answers, however long the load took
# Fraction of answers disturbed by other programs above which a warning is given.
_MAX_DISTURBED_RATIO = 0.2


def measure(plan: BenchPlan, model: str, say: ShowMessage, watch: ShowProgress) -> Report:
    """Measure the daemon's pair of that name, or the configured one.

    Raises:
        LocalspecError: the pair does not load, or no prompt can be answered.
    """
    client = PairsClient()
    name = model or str(client.status()["pair"]["name"])
    if any(pair["name"] == name and pair["kind"] == "upstream" for pair in client.pairs()["pairs"]):
        raise UsageError(  # it drafts as it likes
            f"'{name}' is served by another server, whose drafts cannot be switched off for one answer: "
            "there is nothing to compare. To have it beside a pair of this machine: localspec bench "
            "PAIR --against URL"
        )
    with reset_afterwards(model, keep=plan.apply) as learning_notes:
        report = _run_bench(plan, model, say, watch)
    report.notes += learning_notes
    return report


def _run_bench(plan: BenchPlan, model: str, say: ShowMessage, watch: ShowProgress) -> Report:
    server = DaemonServer(model)
    start, started_at = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    others = sum(server.status()[state] for state in ("running", "waiting"))
    beside = f" beside {others} other request{'s' * (others > 1)}, which takes longer" * bool(
        others
    )
    say(f"Loading the pair{beside} …")
    warm_up = Bench(server, plan, None, ())
    warm_up.warm_up()
    status = server.status()
    if warm_up.answers.partial:
        pair = {**_UNLOADED_PAIR, "name": model or status["pair"]["name"]}
        return _build_report(plan, warm_up.answers, pair, started_at)
    notes = []
    # The pair's own sampling is left out if that is temperature 0 as well.
    if plan.own and not server.sampling().get("temperature", 0.8):
        note = "By itself this pair samples at temperature 0, so that nothing else was measured."
        notes, plan = [note], replace(plan, own=False)
    pids = [status["pid"], *(pair["pid"] for pair in status["pairs"] if pair["pid"])]
    notes += _warn_if_busy(status, pids)
    if plan.seconds is not None:  # the load has used some of them
        plan = replace(plan, seconds=max(plan.seconds - (time.monotonic() - start), _MIN_ANSWER_S))
    bench = Bench(server, plan, status["pair"]["n_ctx"], pids)
    results = bench.run(
        lambda progress, results: watch(
            progress, lambda: summary.summarize_workloads(plan.works, results, None)
        )
    )
    report = _build_report(plan, results, status["pair"], started_at)
    report.notes[:0] = notes
    if not results.partial and plan.seconds is None:
        _add_gaps(bench, report.workloads)
        if plan.own:
            with contextlib.suppress(LocalspecError, KeyboardInterrupt), plan.stopping.waiting():
                report.distribution = distribution.compare_distributions(
                    server, bench.question_tokens, plan.drafts
                )
        report.partial = plan.stopping.when is not None
    report.seconds = time.monotonic() - start
    return report


# The status of a pair that was not loaded when the bench was interrupted.
_UNLOADED_PAIR = dict.fromkeys(("target", "draft", "n_ctx", "memory", "backend", "costs"))


def _build_report(
    plan: BenchPlan, results: BenchAnswers, pair: dict[str, Any], started_at: str
) -> Report:
    """Return the report of the answers of a pair. `pair` is its status as the daemon reports it."""
    costs = None
    if reported := pair.get("costs"):
        target, draft = (
            {int(width): ms for width, ms in reported[name].items()}
            for name in ("target_ms", "draft_ms")
        )
        costs = Costs(target, draft, reported["overhead_ms"])
    works = summary.summarize_workloads(plan.works, results, costs)
    greedy = [run for run in results.runs if run.sampling == "greedy"]
    groups = [[run for run in greedy if run.workload == work.name] for work in plan.works]
    rates = [[rate for rate, _ in summary.pair_answers(group)] for group in groups]
    host, drafted = machine.Host.current(), [r for r in results.runs if r.mode == "speculative"]
    quiet, notes = _check_quiet(results.runs)
    reasons = [run.reason for run in drafted if run.reason]
    if reasons and not any(run.drafted for run in drafted):
        notes.insert(0, f"No tokens were drafted: {statistics.mode(reasons)}.")
    if results.their_end:
        notes.append(f"{results.their_end} It was not asked again.")
    return Report(
        pair=pair["name"],
        when=started_at,
        seconds=0.0,
        tokens=plan.tokens,
        partial=results.partial,
        quiet=quiet,
        machine=Machine(
            f"{host.system} {host.arch}",
            machine.detect_cpu(host).model,
            os.cpu_count() or 1,
            pair["backend"],
        ),
        sentence=summarize_verdicts(works),
        workloads=works,
        runs=results.runs,
        localspec=localspec.__version__,
        target=pair["target"],
        draft=pair["draft"],
        context=pair["n_ctx"],
        memory=pair["memory"],
        overall=ratios.estimate_overall(rates),
        costs=costs,
        against=plan.against.name if plan.against else None,
        theirs=summary.summarize_other_server(plan.works, results) if plan.against else [],
        their_runs=results.theirs,
        notes=[*filter(None, [results.ended]), *notes],
    )


def _add_gaps(bench: Bench, summaries: Sequence[Workload]) -> None:
    """Add to each difference how close to a tie the target was."""
    works = {work.name: work for work in bench.plan.works}
    differences = [(works[work.name], each) for work in summaries for each in work.differences]
    for work, each in differences[:_MAX_TIES]:
        with contextlib.suppress(LocalspecError, KeyboardInterrupt):
            each.gap = bench.token_lead(work, each.prompt, each.at, each.speculative)


def _warn_if_busy(status: dict[str, Any], pids: Sequence[int]) -> list[str]:
    """Return a warning if the machine is busy before the measurement."""
    if status["running"] or status["waiting"]:
        return [
            "The daemon was answering other requests when this began, so figures may be too low."
        ]
    other_programs = OtherProcesses()
    time.sleep(_BUSY_SAMPLE_S)
    cores = other_programs.cores(pids)
    if cores is None or cores <= MAX_NOISE_CORES:
        return []
    names = ", ".join(name for name, _ in other_programs.busiest())
    by_whom = f" ({names})" if names else ""
    return [
        f"The machine was busy when this began: other programs{by_whom} used {cores:.1f} cores."
    ]


def _check_quiet(runs: Sequence[Run]) -> tuple[bool | None, list[str]]:
    """Return whether the machine was quiet, None if that is not known, and a warning if it was not."""
    cores_by_answer = [run.others for run in runs if run.others is not None]
    if not cores_by_answer:
        return None, []
    disturbed = [cores for cores in cores_by_answer if cores > MAX_NOISE_CORES]
    if len(disturbed) <= _MAX_DISTURBED_RATIO * len(cores_by_answer):
        return True, []
    cores = statistics.median(disturbed)
    return False, [
        f"During {len(disturbed)} of {len(cores_by_answer)} answers other programs used "
        f"{cores:.1f} cores (median); close them and measure again."
    ]
