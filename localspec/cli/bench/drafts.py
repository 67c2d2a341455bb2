"""Several drafts for one target, each measured alike and ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.cli import inputs
from localspec.cli.bench.measured import Say, Watch, measure
from localspec.cli.bench.report import Ranked, Report
from localspec.cli.bench.running import Plan
from localspec.cli.bench.statistics import geometric
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoDaemon, UsageError

# Drafts that are no model of their own: `speculative` of a request.
_KINDS: dict[str, dict[str, Any]] = {
    "ngram": {"enabled": True, "kind": "ngram"},
    "heads": {"enabled": True, "kind": "mtp"},
}


def compare(plan: Plan, model: str, drafts: Sequence[str], say: Say, watch: Watch) -> Report:
    """The report of the best, with all of them ranked.

    drafts: files, names of pairs, whose draft is meant, "ngram" or "heads".

    Raises:
        UsageError: there is no such draft. LocalspecError: none could be measured.
    """
    client = PairsClient()
    with plan.stopping.waiting():  # files that nobody has seen before are read whole
        base = client.pair(model or client.status()["pair"]["name"])
        files = {name: _file(client, name) for name in drafts if name not in _KINDS}
    target = base["target"]["path"]
    reports: dict[str, Report] = {}
    failed: dict[str, LocalspecError] = {}
    for name in dict.fromkeys(drafts):
        asked = f"{target},{files[name]}" if name in files else base["name"]
        wanted = replace(plan, drafts=_KINDS.get(name, plan.drafts))
        say(f"Loading {name} …")
        try:
            reports[name] = measure(wanted, asked, say, watch)
        except LocalspecError as error:
            failed[name] = error
            if isinstance(error, NoDaemon):
                break
        if plan.stopping.when is not None or (name in reports and reports[name].partial):
            break
    if not reports:
        raise next(iter(failed.values()))
    ranked = [_ranked(name, each, target, files.get(name)) for name, each in reports.items()]
    ranked.sort(key=lambda each: -(each.overall.value if each.overall else 0.0))
    best = reports[ranked[0].draft]
    left = [name for name in dict.fromkeys(drafts) if name not in reports and name not in failed]
    best.drafts = [
        *ranked,
        *(Ranked(name, note=error.message) for name, error in failed.items()),
        *(Ranked(name, note="It was not measured.") for name in left),
    ]
    best.seconds = sum(each.seconds for each in reports.values())
    best.partial = bool(left) or any(each.partial for each in reports.values())
    return best


def _file(client: PairsClient, name: str) -> str:
    """Of a pair its draft's, or the model itself where it has none."""
    if inputs.is_path(name):
        if not Path(inputs.absolute(name)).is_file():
            raise UsageError(f"--drafts {name}: there is no such file.")
        return inputs.absolute(name)
    found = client.pair(name)
    return str((found["draft"] or found["target"])["path"])


def _ranked(name: str, report: Report, target: str, draft: str | None) -> Ranked:
    drafted = [each.acceptance for each in report.workloads if each.acceptance]
    tried = sum(each.drafted for each in drafted)
    return Ranked(
        name,
        report.overall,
        _mean(report, "code"),
        _mean(report, "text"),
        sum(each.accepted for each in drafted) / tried if tried else None,
        Path(draft).stat().st_size / Path(target).stat().st_size if draft else None,
        report.sentence,
    )


def _mean(report: Report, about: str) -> float | None:
    """Of the speed-ups of such work at temperature 0."""
    some = [each for each in report.workloads if each.about == about and each.sampling == "greedy"]
    values = [each.speed_up.value for each in some if each.speed_up]
    return geometric(values) if values else None
