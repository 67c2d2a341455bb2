"""Measure several drafts for one target in the same way and rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from localspec.cli import inputs
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoDaemon, UsageError
from localspec.extras.bench.measure import ShowMessage, ShowProgress, measure
from localspec.extras.bench.report import Ranked, Report
from localspec.extras.bench.running import BenchPlan

# Drafts that are not a model of their own, by their name for `bench --drafts`, with the field
# `speculative` of a request for them.
_MODEL_FREE_DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"enabled": True, "kind": "ngram"},
    "heads": {"enabled": True, "kind": "mtp"},
}


def compare_drafts(
    plan: BenchPlan, model: str, drafts: Sequence[str], say: ShowMessage, watch: ShowProgress
) -> Report:
    """Return the report of the best draft, with a ranking of all of them.

    drafts: files, names of pairs whose draft is meant, "ngram" or "heads".

    Raises:
        UsageError: there is no such draft.
        LocalspecError: none could be measured.
    """
    client = PairsClient()
    with plan.stopping.waiting():  # the daemon hashes files that are new to it, which takes time
        base = client.pair(model or client.status()["pair"]["name"])
        named = [name for name in drafts if name not in _MODEL_FREE_DRAFTS]
        files = {name: _find_draft_file(client, name) for name in named}
    target = base["target"]["path"]
    reports: dict[str, Report] = {}
    failed: dict[str, LocalspecError] = {}
    for name in dict.fromkeys(drafts):
        pair_name = f"{target},{files[name]}" if name in files else base["name"]
        draft_plan = replace(plan, drafts=_MODEL_FREE_DRAFTS.get(name, plan.drafts))
        say(f"Loading {name} …")
        try:
            reports[name] = measure(draft_plan, pair_name, say, watch)
        except LocalspecError as error:
            failed[name] = error
            if isinstance(error, NoDaemon):
                break
        if plan.stopping.when is not None or (name in reports and reports[name].partial):
            break
    if not reports:
        raise next(iter(failed.values()))
    ranked = [_rank(name, report, target, files.get(name)) for name, report in reports.items()]
    ranked.sort(key=lambda report: -(report.overall.value if report.overall else 0.0))
    best = reports[ranked[0].draft]
    unmeasured = [name for name in dict.fromkeys(drafts) if name not in {**reports, **failed}]
    best.drafts = [
        *ranked,
        *(Ranked(name, note=error.message) for name, error in failed.items()),
        *(Ranked(name, note="It was not measured.") for name in unmeasured),
    ]
    best.seconds = sum(report.seconds for report in reports.values())
    best.partial = bool(unmeasured) or any(report.partial for report in reports.values())
    return best


def _find_draft_file(client: PairsClient, name: str) -> str:
    """Return the path of a pair's draft, or of its target if it has no draft."""
    if inputs.is_path(name):
        if not Path(inputs.absolute(name)).is_file():
            raise UsageError(f"--drafts {name}: there is no such file.")
        return inputs.absolute(name)
    pair = client.pair(name)
    return str((pair["draft"] or pair["target"])["path"])


def _rank(name: str, report: Report, target: str, draft: str | None) -> Ranked:
    acceptances = [work.acceptance for work in report.workloads if work.acceptance]
    drafted = sum(acceptance.drafted for acceptance in acceptances)
    accepted = sum(acceptance.accepted for acceptance in acceptances)
    greedy = [work for work in report.workloads if work.sampling == "greedy"]

    def mean_speed_up(kind: str) -> float | None:
        values = [work.speed_up.value for work in greedy if work.about == kind and work.speed_up]
        return geometric_mean(values) if values else None

    return Ranked(
        name,
        report.overall,
        mean_speed_up("code"),
        mean_speed_up("text"),
        accepted / drafted if drafted else None,
        Path(draft).stat().st_size / Path(target).stat().st_size if draft else None,
        report.sentence,
    )
