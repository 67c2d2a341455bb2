"""A bench from the command line's wishes to a report."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import localspec
from localspec import machine
from localspec.cli.bench import distribution, learned, summary
from localspec.cli.bench import statistics as ratios
from localspec.cli.bench.asking import Ours
from localspec.cli.bench.report import Costs, Distribution, Machine, Report, Run, Workload
from localspec.cli.bench.running import Bench, Found, Now, Plan
from localspec.cli.bench.verdict import sentence
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, UsageError
from localspec.machine.quiet import NOISE, Others

Say = Callable[[str], None]
Watch = Callable[[Now, Callable[[], list[Workload]]], None]
_LOOK = 0.5  # seconds
_TIES = 8  # places where texts part that are looked at
_LEAST = 5.0  # seconds of answers, however long the load took
_DISTURBED = 0.2  # of all answers, so many beside another program's work are too many


def measure(plan: Plan, model: str, say: Say, watch: Watch) -> Report:
    """The daemon's pair of that name, or the configured one.

    Raises:
        LocalspecError: it does not load, or no prompt can be answered.
    """
    _check(model)
    with learned.beginning(model, keep=plan.apply) as said:
        report = _measured(plan, model, say, watch)
    report.notes += said
    return report


def _check(model: str) -> None:
    """Raises UsageError: another server answers for the pair, and drafts as it likes."""
    client = PairsClient()
    name = model or str(client.status()["pair"]["name"])
    if any(each["name"] == name and each["kind"] == "upstream" for each in client.pairs()["pairs"]):
        raise UsageError(
            f"'{name}' is served by another server, whose drafts cannot be switched off for one answer: "
            "there is nothing to compare. To have it beside a pair of this machine: localspec bench "
            "PAIR --against URL"
        )


def _measured(plan: Plan, model: str, say: Say, watch: Watch) -> Report:
    server = Ours(model)
    began, when = time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    say("Loading the pair …")
    first = Bench(server, plan, None, ())
    first.warm_up()
    status = server.status()
    if first.found.partial:
        pair = {**_UNKNOWN, "name": model or status["pair"]["name"]}
        return _report(plan, first.found, pair, when)
    notes, plan = _sampling(server, plan)
    pids = [status["pid"], *(each["pid"] for each in status["pairs"] if each["pid"])]
    notes += _busy(status, pids)
    if plan.seconds is not None:  # of which some went by
        plan = replace(plan, seconds=max(plan.seconds - (time.monotonic() - began), _LEAST))
    bench = Bench(server, plan, status["pair"]["n_ctx"], pids)
    found = bench.run(
        lambda now, found: watch(now, lambda: summary.workloads(plan.works, found, None))
    )
    report = _report(plan, found, status["pair"], when)
    report.notes[:0] = notes
    if not found.partial and plan.seconds is None:
        _ties(bench, report.workloads)
        report.distribution = _sampled(bench)
        report.partial = plan.stopping.when is not None
    report.seconds = time.monotonic() - began
    return report


# A pair of which an interrupt came before it was loaded.
_UNKNOWN = dict.fromkeys(("target", "draft", "n_ctx", "memory", "backend", "costs"))


def _report(plan: Plan, found: Found, pair: dict[str, Any], when: str) -> Report:
    """What the answers say, of a pair as the daemon's status has it."""
    costs = _costs(pair)
    told = summary.workloads(plan.works, found, costs)
    quiet, notes = _disturbed(found.runs)
    if found.their_end:
        notes.append(f"{found.their_end} It was not asked again.")
    return Report(
        pair=pair["name"],
        when=when,
        seconds=0.0,
        tokens=plan.tokens,
        partial=found.partial,
        quiet=quiet,
        machine=_machine(pair["backend"]),
        sentence=sentence(told),
        workloads=told,
        runs=found.runs,
        localspec=localspec.__version__,
        target=pair["target"],
        draft=pair["draft"],
        context=pair["n_ctx"],
        memory=pair["memory"],
        overall=_overall(plan, found.runs),
        costs=costs,
        against=plan.against.name if plan.against else None,
        theirs=summary.theirs(plan.works, found) if plan.against else [],
        their_runs=found.theirs,
        notes=[*filter(None, [found.ended]), *_undrafted(found.runs), *notes],
    )


def _undrafted(runs: Sequence[Run]) -> list[str]:
    """Why nothing was drafted at all, if so."""
    drafted = [run for run in runs if run.mode == "speculative"]
    reasons = [run.reason for run in drafted if run.reason]
    if not reasons or any(run.drafted for run in drafted):
        return []
    return [f"No tokens were drafted: {statistics.mode(reasons)}."]


def _ties(bench: Bench, told: Sequence[Workload]) -> None:
    """How near to a tie the target was where texts part."""
    works = {each.name: each for each in bench.plan.works}
    parted = [(works[each.name], one) for each in told for one in each.differences]
    for work, one in parted[:_TIES]:
        with contextlib.suppress(LocalspecError, KeyboardInterrupt):
            one.gap = bench.lead(work, one.prompt, one.at, one.speculative)


def _sampled(bench: Bench) -> Distribution | None:
    """Whether sampling gives the same both ways, where that was measured."""
    if not bench.plan.own:
        return None
    with contextlib.suppress(LocalspecError, KeyboardInterrupt), bench.plan.stopping.waiting():
        return distribution.check(bench.server, bench.room, bench.plan.drafts)
    return None


def _machine(backend: str | None) -> Machine:
    host = machine.Host.here()
    return Machine(
        f"{host.system} {host.arch}", machine.cpu(host).model, os.cpu_count() or 1, backend
    )


def _overall(plan: Plan, runs: Sequence[Run]) -> Any:
    greedy = [run for run in runs if run.sampling == "greedy"]
    groups = [[run for run in greedy if run.workload == work.name] for work in plan.works]
    return ratios.overall([[rates for rates, _ in summary.pairs(group)] for group in groups])


def _sampling(server: Ours, plan: Plan) -> tuple[list[str], Plan]:
    """Where the pair samples greedily by itself, its own sampling is temperature 0."""
    if not plan.own or server.sampling().get("temperature", 0.8):
        return [], plan
    note = "By itself this pair samples at temperature 0, so that nothing else was measured."
    return [note], replace(plan, own=False)


def _costs(pair: dict[str, Any]) -> Costs | None:
    found = pair.get("costs")
    if not found:
        return None
    return Costs(_table(found["target_ms"]), _table(found["draft_ms"]), found["overhead_ms"])


def _table(found: dict[str, float]) -> dict[int, float]:
    return {int(width): ms for width, ms in found.items()}


def _busy(status: dict[str, Any], pids: Sequence[int]) -> list[str]:
    """What works on this machine beside the daemon before anything is measured."""
    if status["running"] or status["waiting"]:
        return [
            "The daemon was answering other requests when this began, so figures may be too low."
        ]
    others = Others()
    time.sleep(_LOOK)
    cores = others.cores(pids)
    if cores is None or cores <= NOISE:
        return []
    names = ", ".join(name for name, _ in others.busiest())
    by = f" ({names})" if names else ""
    return [f"The machine was busy when this began: other programs{by} used {cores:.1f} cores."]


def _disturbed(runs: Sequence[Run]) -> tuple[bool | None, list[str]]:
    """Whether it was quiet, None where nobody knows; and what is said if not."""
    known = [run.others for run in runs if run.others is not None]
    if not known:
        return None, []
    loud = [each for each in known if each > NOISE]
    if len(loud) <= _DISTURBED * len(known):
        return True, []
    cores = statistics.median(loud)
    return False, [
        f"During {len(loud)} of {len(known)} answers other programs used {cores:.1f} cores (median); close "
        "them and measure again."
    ]
