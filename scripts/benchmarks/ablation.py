"""Replay the engine without one mechanism of the policy at a time: what each of them gains.

A case is a kind of drafts, a machine's recorded costs, a text and a number of sequences. Its pair writes
the text three times, then twice a text of the opposite acceptance, and then the first one again. So a
case has four answers: of a cold pair, of a known one, of one whose texts have changed, and of one that is
back at what it knew. A case is the mean of some draws. Everything is computed from recorded costs, the
time of decisions among them, so that a table is the same on every machine.

A mechanism is switched off by what replaces a function or a constant of the engine. Finished replays are
kept in a file, and only missing ones are computed, until the engine or this benchmark changes. "Heads"
are a draft model that costs as little as heads; they do not read states here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.command import positive, say
from benchmarks.device import bursts, device_profile, warm_start, without_draft
from benchmarks.measuring.report import table
from benchmarks.texts import replay as lookups
from benchmarks.texts.answers import Answered
from benchmarks.traces import replay as traces
from benchmarks.traces.copying import make_answer
from benchmarks.traces.trace import EXAMPLE_COSTS, Trace, cost_profile
from localspec.engine.pair.lane import Lane
from localspec.engine.speculation import acceptance, budget, controller, cost, depth
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import ChangeCost, CostProfile, CostTable
from localspec.engine.speculation.depth import PassCosts
from localspec.engine.speculation.drafters import draft_model, ngram
from localspec.engine.speculation.step import SequenceStep
from localspec.paths import default_paths
from localspec.protocol.frames import SpeculationSettings

TOKENS = 192  # of an answer
STATES = ("cold", "known", "changed", "returned")
DRAFT_DEPTHS, LOOKUP_DEPTHS = (1, 2, 3, 5, 7, 11, 15), (1, 3, 7, 15, 31, 63)
# What the engine's own arithmetic takes, in milliseconds: a search for drafts, and a decision.
SEARCH_MS, DECISION_MS = 0.02, 0.1
HEADS_SHARE = 0.3  # of a draft model's pass, that heads take
BUSY_FACTOR = (
    1.6  # how much dearer wide passes were where the machine was busy while they were measured
)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of drafts on one machine with one kind of text."""

    drafts: str
    machine: str
    text: str
    sequences: int

    @property
    def key(self) -> str:
        return f"{self.drafts} {self.machine} {self.text} x{self.sequences}"


RATES: dict[str, Callable[[int], Sequence[float]]] = {
    "0.9": lambda count: [0.9] * count,
    "0.6": lambda count: [0.6] * count,
    "0.4": lambda count: [0.4] * count,
    "0.0": lambda count: [0.0] * count,
    "bursts of 40": lambda count: bursts(0.95, 0.1, 40, count),
    "bursts of 80": lambda count: bursts(0.95, 0.1, 80, count),
    "0.8, busy": lambda count: [0.8] * count,
    "telling": lambda count: [0.7] * count,
}
LOOKED_UP = ("copies of 40", "copies of 150", "records", "edits", "prose", "edits, busy")
MACHINES = ("8B", "32B", "70B", "cpu", "cpu plain")
QUICK_MACHINES = ("8B", "cpu")
QUICK_TEXTS = ("0.6", "0.0", "bursts of 40", "telling", "copies of 40", "records", "edits")


def list_cases(quick: bool) -> list[Case]:
    """Return all cases, or a selection."""
    cases = []
    for machine in QUICK_MACHINES if quick else MACHINES:
        for sequences in (1, 4):
            for drafts, texts in (("draft", RATES), ("heads", RATES), ("ngram", LOOKED_UP)):
                cases += [Case(drafts, machine, text, sequences) for text in texts]
    busy = [case for case in cases if case.text.endswith("busy") and case.machine == "cpu"]
    return [case for case in cases if case.text in QUICK_TEXTS] + busy if quick else cases


def find_costs(case: Case) -> CostProfile:
    """Return what passes cost in a case."""
    if case.machine.startswith("cpu"):
        if case.drafts == "ngram":
            table = CostTable(lookups.COSTS)
            return CostProfile(table, None, lookups.OVERHEAD_MS)
        profile = cost_profile(
            EXAMPLE_COSTS["plain" if case.machine == "cpu plain" else "repacked"]
        )
    else:
        profile = device_profile(case.machine)
    if case.drafts == "ngram":
        return without_draft(case.machine)
    assert profile.draft is not None
    if case.drafts == "heads":
        cheap = {width: ms * HEADS_SHARE for width, ms in profile.draft.as_dict().items()}
        change = ChangeCost(*(ms * HEADS_SHARE for ms in profile.draft.change))
        return CostProfile(profile.target, CostTable(cheap, change=change), profile.overhead_ms)
    return profile


def find_measured(costs: CostTable, case: Case) -> CostTable:
    """Return what was measured of the target's passes when the pair was loaded."""
    if not case.text.endswith("busy"):
        return costs
    known = costs.as_dict()
    dear = {width: ms * (BUSY_FACTOR if width > 4 else 1) for width, ms in known.items()}
    return CostTable(dear, change=costs.change)


def make_trace(case: Case, seed: int, *, opposite: bool = False) -> Trace:
    """Return a text of a case, or one in which the draft is right where it was wrong."""
    count = TOKENS * case.sequences
    rates = list(RATES[case.text](count))
    buckets = [9] * count
    if case.text == "telling":
        shares = [0.15, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.1, 0.15, 0.3]
        drawn = np.random.default_rng(seed + 1).choice(10, size=count, p=shares)
        buckets, rates = drawn.tolist(), ((drawn + 0.5) / 10).tolist()
    if opposite:
        rates = [0.95 - rate for rate in rates]
    return Trace.draw("", rates, buckets, {}, seed)


Change = tuple[Any, str, Any]  # an object, the name of what it has, and what replaces that
MODEL, LOOKUP = frozenset(("draft", "heads")), frozenset(("ngram",))
ALL = MODEL | LOOKUP


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One mechanism, and what switches it off.

    drafts: the kinds of drafts that it may matter for. sequences: how many at least.
    cold: a load compares the draft with no text. idle: idle time is not used.
    """

    changes: Sequence[Change] = ()
    drafts: frozenset[str] = ALL
    sequences: int = 1
    cold: bool = False
    idle: bool = True


def _draft_to_depth(
    self: Any, step: SequenceStep, pass_ms: acceptance.Floats, rate: float
) -> Callable[[Any], bool]:
    del self, pass_ms, rate
    return lambda drafts: len(drafts.tokens) < max(step.drafts.depth, 1)


def _keep_rows(self: CostTable, rows: int, used: cost.UsedWidth) -> int:
    del self, used
    return rows


def _without_switches(make: Callable[..., PassCosts]) -> Callable[..., PassCosts]:
    """Return a function that makes the same costs, but says nothing of what a change really costs."""
    return lambda *args: replace(make(*args), switch_ms=None, round_trip_ms=0.0)


def _affords_all(self: Any, cost_ms: acceptance.Floats) -> int:
    del self
    return len(cost_ms) - 1


MECHANISMS: dict[str, Mechanism] = {
    "early stop of drafting": Mechanism(
        [(controller.Controller, "_make_continue", _draft_to_depth)], MODEL
    ),
    "price of a change of width": Mechanism(
        [(cost.WidthHistory, "used", property(lambda self: cost.NO_WIDTH))]
    ),
    "price that grows with the width": Mechanism(
        [(cost.UsedWidth, "price_ms", lambda self, rows: self.change_ms * (rows != self.rows))]
    ),
    "known change of a pass (switch_ms)": Mechanism(
        [(Lane, "make_pass_costs", _without_switches(Lane.make_pass_costs))]
    ),
    "padding": Mechanism([(CostTable, "_find_cheapest", _keep_rows)]),
    "retries of narrow passes": Mechanism([(cost, "RETRY_INTERVAL_PASSES", 1 << 30)]),
    "costs follow rounds": Mechanism([(CostTable, "observe", lambda self, width, ms: None)]),
    "tables by sequences": Mechanism(
        [(CostTable, "for_sequences", lambda self, count: self)], sequences=4
    ),
    "wide exploration": Mechanism([(controller.Controller, "_explore_wider", lambda self, *_: 0)]),
    "decision backoff": Mechanism(
        [(budget, "DECISION_BACKOFFS", (0,)), (controller, "DECISION_BACKOFFS", (0,))], MODEL
    ),
    "search backoff": Mechanism([(budget, "SEARCH_BACKOFFS", (0,))], LOOKUP),
    "probes": Mechanism(
        [(draft_model.ModelDrafter, "probe", lambda self, slot, left: False)], MODEL
    ),
    "budget of probes": Mechanism([(budget.ProbeBudget, "pay", lambda self, cost_ms: True)], MODEL),
    "margin": Mechanism([(depth, "MARGIN", 1.0)]),
    "limit of first attempts": Mechanism(
        [(controller, "_limit_first_attempts", lambda steps, depths, dear: depths)], MODEL
    ),
    "budget of the draft model": Mechanism(
        [(controller, "_limit_to_budget", lambda steps, costs, rows: None)], MODEL
    ),
    "budget of known tokens": Mechanism([(budget.Balance, "affords", _affords_all)], LOOKUP),
    "first part of known tokens": Mechanism(
        [(controller, "choose_first_count", lambda c, ms, r: len(ms) - 1)], LOOKUP
    ),
    "order by depth": Mechanism(
        [(depth, "_list_orders", lambda candidates, equal: (equal,))], MODEL, 4
    ),
    "belief returns to the prior": Mechanism([(acceptance, "CHANGE_RATE", 0.0)]),
    "calibration learns": Mechanism([(Calibration, "learn", lambda self, *_: None)]),
    "warm start": Mechanism(drafts=MODEL, cold=True),
    "hindsight": Mechanism(drafts=MODEL, idle=False),
    "single reads of the draft": Mechanism(
        [(draft_model.DraftModel, "_read_singly", lambda self, requests: 0)], MODEL
    ),
    "certain drafts teach less": Mechanism([(ngram.NgramDrafter, "certain", False)], LOOKUP),
    "calibration of n-grams": Mechanism([(ngram.NgramDrafter, "learned", None)], LOOKUP),
    "changes of a text": Mechanism([(ngram, "MAX_CHANGES", 0)], LOOKUP),
    "departures": Mechanism([(ngram, "MAX_DEPARTURE_TOKENS", 0)], LOOKUP),
    "margin of disputed matches": Mechanism([(ngram, "DISPUTE_MARGIN_TOKENS", 0)], LOOKUP),
}
ALL_ON = "all"
FIXED = "fixed"  # every fixed depth


def _spending(work: Callable[..., Any], ms: float) -> Callable[..., Any]:
    """Return a function of the controller that takes so long on its clock."""

    def spend(self: Any, *args: Any) -> Any:
        self._clock.spend(ms)
        return work(self, *args)

    return spend


def switched(mechanism: Mechanism) -> ExitStack:
    """Switch a mechanism off until the stack is closed, and have decisions take time."""
    stack, policy = ExitStack(), controller.Controller
    for name, ms in (("_choose_drafter", SEARCH_MS), ("_decide_and_propose", DECISION_MS)):
        stack.enter_context(patch.object(policy, name, _spending(getattr(policy, name), ms)))
    for owner, name, replacement in mechanism.changes:
        stack.enter_context(patch.object(owner, name, replacement))
    return stack


def replay_drafts(case: Case, seed: int, mechanism: Mechanism) -> list[float]:
    """Return milliseconds per token of each state."""
    text, other = (make_trace(case, seed, opposite=opposite) for opposite in (False, True))
    costs = find_costs(case)
    believed = CostProfile(find_measured(costs.target, case), costs.draft, costs.overhead_ms)
    calibration = Calibration() if mechanism.cold else warm_start(text)

    def write(trace: Trace) -> float:
        replay = traces.Replay(trace, costs, calibration, None, case.sequences, believed=believed)
        ms = replay.run_together()
        while mechanism.idle and replay.engine.has_idle_work:
            replay.engine.use_idle_time()
        return ms

    times = [write(trace) for trace in (text, text, text, other, other, text)]
    return _by_state(times)


def _by_state(times: Sequence[float]) -> list[float]:
    """Return the time of each state, from those of the six texts that a pair writes."""
    return [times[0], times[2], fmean(times[3:5]), times[5]]


def fixed_drafts(case: Case, seed: int) -> list[list[float]]:
    """Return milliseconds per token of each state, plain and with the best fixed depth."""
    costs = find_costs(case)

    def both(trace: Trace) -> list[float]:
        times = [
            traces.Replay(trace, costs, Calibration(), k, case.sequences).run_together()
            for k in (0, *DRAFT_DEPTHS)
        ]
        return [times[0], min(times)]

    text, other = (both(make_trace(case, seed, opposite=opposite)) for opposite in (False, True))
    return [list(column) for column in zip(text, text, other, text, strict=True)]


def _answers(case: Case, seed: int, number: int, text: str | None = None) -> list[Answered]:
    """Return the answers that the sequences write at once."""
    first = 1000 * seed + 100 * number
    return [make_answer(text or case.text, TOKENS, first + at) for at in range(case.sequences)]


def _list_lookups(case: Case, seed: int) -> list[list[Answered]]:
    opposite = "prose" if case.text != "prose" else "copies of 150"
    texts = (None, None, None, opposite, opposite, None)
    return [_answers(case, seed, number, text) for number, text in enumerate(texts)]


def replay_lookups(case: Case, seed: int, mechanism: Mechanism) -> list[float]:
    """Return milliseconds per token of each state, of drafts that are looked up."""
    del mechanism
    costs = find_costs(case)
    measured = find_measured(costs.target, case).as_dict()
    replay = lookups.Replay(costs, measured, case.sequences)
    return _by_state([replay.write_together(answers) for answers in _list_lookups(case, seed)])


def fixed_lookups(case: Case, seed: int) -> list[list[float]]:
    """Return milliseconds per token of each state, plain and with the best fixed depth."""
    answers, rows = _list_lookups(case, seed), []
    for k in (0, *LOOKUP_DEPTHS):
        settings = SpeculationSettings(k > 0, k or None)
        replay = lookups.Replay(find_costs(case), None, case.sequences)
        rows.append(_by_state([replay.write_together(each, settings) for each in answers]))
    return [rows[0], [min(column) for column in zip(*rows, strict=True)]]


@dataclass(frozen=True, slots=True)
class Job:
    """A case without a mechanism, or with every fixed depth."""

    case: Case
    name: str
    draws: int

    @property
    def key(self) -> str:
        return f"{self.name} | {self.case.key} | {self.draws}"


def run(job: Job) -> tuple[str, list[Any]]:
    """Return the job's key, and for each draw what its replays took."""
    is_lookup = job.case.drafts == "ngram"
    if job.name == FIXED:
        fixed = fixed_lookups if is_lookup else fixed_drafts
        return job.key, [fixed(job.case, 1 + draw) for draw in range(job.draws)]
    mechanism = MECHANISMS.get(job.name, Mechanism())
    replay = replay_lookups if is_lookup else replay_drafts
    with switched(mechanism):
        return job.key, [replay(job.case, 1 + draw, mechanism) for draw in range(job.draws)]


def list_jobs(cases: Iterable[Case], names: Iterable[str], draws: int) -> list[Job]:
    """Return all jobs, in the order in which they are of use."""
    cases = list(cases)
    jobs = [Job(case, ALL_ON, draws) for case in cases]
    for name in names:
        mechanism = MECHANISMS[name]
        jobs += [
            Job(case, name, draws)
            for case in cases
            if case.drafts in mechanism.drafts and case.sequences >= mechanism.sequences
        ]
    return jobs + [Job(case, FIXED, draws) for case in cases]


@dataclass
class Results:
    """What is finished, by the keys of the jobs, in a file that belongs to one state of the engine."""

    path: Path
    finished: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, digest: str) -> Results:
        """Read what was finished with the same engine, and begin an empty file otherwise."""
        results = cls(path)
        try:
            first, *lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            first, lines = "", []
        if first == digest:
            for line in lines:
                try:
                    key, times = json.loads(line)
                except ValueError:
                    break  # the last one was interrupted
                results.finished[key] = times
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [digest, *map(json.dumps, results.finished.items())]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return results

    def add(self, key: str, times: list[Any]) -> None:
        self.finished[key] = times
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps((key, times))}\n")


def hash_sources() -> str:
    """Return a hash of all that the figures depend on."""
    root, content = Path(__file__).resolve().parents[2], hashlib.sha256()
    files = [
        *(root / "localspec/engine").rglob("*.py"),
        *(root / "scripts/benchmarks").rglob("*.py"),
    ]
    for file in sorted(files):
        content.update(file.read_bytes())
    return content.hexdigest()


def _means(times: Sequence[Any]) -> list[float]:
    """Return the mean of the draws, by state."""
    return [fmean(column) for column in zip(*times, strict=True)]


def speed_ratios(
    results: Mapping[str, list[Any]], jobs: Iterable[Job], over: Callable[[Job], list[float]]
) -> dict[tuple[str, str], float]:
    """Return how fast each answer of the jobs was beside `over`, by case and state."""
    ratios = {}
    for job in jobs:
        own = _means(results[job.key])
        for state, reference, ms in zip(STATES, over(job), own, strict=True):
            ratios[job.case.key, state] = reference / ms
    return ratios


def markdown(results: Mapping[str, list[Any]], jobs: Sequence[Job]) -> str:
    """Return the table of the mechanisms whose jobs are finished."""

    def with_all(job: Job) -> list[float]:
        return _means(results[Job(job.case, ALL_ON, job.draws).key])

    def beside(column: int) -> Callable[[Job], list[float]]:
        def fixed(job: Job) -> list[float]:
            draws = results[Job(job.case, FIXED, job.draws).key]
            return _means([draw[column] for draw in draws])

        return fixed

    rows = []
    for name in (ALL_ON, *MECHANISMS):
        own = [job for job in jobs if job.name == name]
        if not own or any(job.key not in results for job in own):
            continue
        changes = speed_ratios(results, own, with_all)
        plain, fixed = (speed_ratios(results, own, beside(column)) for column in (0, 1))
        means = [geometric_mean(list(changes.values()))]
        means += [
            geometric_mean([ratio for (_, s), ratio in changes.items() if s == state])
            for state in STATES
        ]
        worst = min(changes, key=lambda key: changes[key])
        figures = [*means, changes[worst], max(changes.values())]
        shown = [f"{100 * ratio - 100:+.1f} %" for ratio in figures]
        beside_others = [min(plain.values()), geometric_mean(list(fixed.values()))]
        shown += [f"{ratio:.3f}" for ratio in beside_others]
        rows.append([name, *shown, ", ".join(worst)])
    header = ["without", "mean", *STATES, "worst", "best", "÷ plain, worst", "÷ best fixed"]
    return table([*header, "worst answer"], rows)


def main(arguments: list[str]) -> int:
    """Compute what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        "scripts/bench ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="some machines and texts only")
    add("--only", nargs="+", metavar="NAME", help="beginnings of the mechanisms' names")
    add("--draws", type=positive, default=3, help="texts of each kind (3)")
    add("--processes", type=positive, default=os.cpu_count() or 1, help="one per processor")
    add("--file", type=Path, help="of finished replays (in the cache folder)")
    options = parser.parse_args(arguments)
    beginnings = tuple(options.only or ("",))
    names = [name for name in MECHANISMS if name.startswith(beginnings)]
    if not names:
        parser.error(f"no mechanism is called {' or '.join(beginnings)}")
    results = Results.load(options.file or default_paths().cache / "ablation.jsonl", hash_sources())
    jobs = list_jobs(list_cases(options.quick), names, options.draws)
    missing = [job for job in jobs if job.key not in results.finished]
    say(f"{len(jobs)} replays, of which {len(missing)} are missing")
    with multiprocessing.get_context("spawn").Pool(options.processes, os.nice, (10,)) as pool:
        tenth = math.ceil(len(missing) / 10)
        for count, (key, times) in enumerate(pool.imap(run, missing, chunksize=1), 1):
            results.add(key, times)
            if count % tenth == 0:
                say(f"{count} of {len(missing)}")
    sys.stdout.write(markdown(results.finished, jobs))
    return 0
