"""From answers to what is said of each kind of work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from localspec.cli.bench import statistics, theory
from localspec.cli.bench.prompts.workloads import Work
from localspec.cli.bench.report import (
    Acceptance,
    Costs,
    Difference,
    Mode,
    Round,
    Run,
    Sampling,
    Side,
    Theirs,
    Theory,
    Workload,
)
from localspec.cli.bench.running import PROBES, Found
from localspec.cli.bench.statistics import Pair
from localspec.cli.bench.verdict import verdict

LATE = "There was no time for it."
_SHOWN = 24  # characters of a text behind the place where it parts from the other


def workloads(works: Sequence[Work], found: Found, costs: Costs | None) -> list[Workload]:
    """Each kind of work at temperature 0, then those at the pair's own sampling."""
    told = []
    for sampling in ("greedy", "own"):
        runs = [run for run in found.runs if run.sampling == sampling]
        if sampling == "greedy" or runs:
            told += [_workload(work, sampling, runs, found, costs) for work in works]
    return told


def _workload(
    work: Work, sampling: Sampling, runs: Sequence[Run], found: Found, costs: Costs | None
) -> Workload:
    own = [run for run in runs if run.workload == work.name]
    plain, drafted = ([run for run in own if run.mode == mode] for mode in ("plain", "speculative"))
    told = Workload(work.name, work.about, sampling, "not measured")
    if not plain or not drafted:
        told.note = found.failed.get(work.name, LATE)
        told.plain = side(plain) if plain else None
        told.speculative = side(drafted) if drafted else None
        return told
    told.plain, told.speculative = side(plain), side(drafted)
    together = pairs(own)
    told.speed_up = statistics.speed_up([rates for rates, _ in together])
    told.latency = statistics.speed_up([times for _, times in together])
    told.acceptance = acceptance(drafted)
    told.verdict = verdict(told.speed_up or told.latency, told.acceptance, told.speculative.tokens)
    if sampling == "greedy":
        told.differences = differences(work.name, found.texts)
        told.identical = all(a.digest == b.digest for a, b in _matched(own))
        deep, shallow = (
            [run for run in found.probes[depth] if run.workload == work.name] for depth in PROBES
        )
        told.theory = of_theory(told.acceptance, plain, drafted, (deep, shallow), costs)
    return told


def side(runs: Sequence[Run]) -> Side:
    """Of one mode."""
    timed = [run for run in runs if run.rate]
    seconds = sum(run.write_ms for run in timed) / 1e3
    counted = [run for run in runs if run.joules is not None]
    energy = sum(run.joules or 0.0 for run in counted)
    written = sum(run.tokens for run in counted)
    return Side(
        answers=len(runs),
        tokens=sum(run.tokens for run in runs),
        rate=sum(run.tokens - 1 for run in timed) / seconds if seconds else None,
        first_ms=statistics.median([run.first_ms for run in runs]),
        total_ms=statistics.median([run.total_ms for run in runs]),
        joules_per_token=energy / written if written else None,
    )


def _matched(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Plain and speculative answers of the same prompt and repetition."""
    plain = {(run.prompt, run.repetition): run for run in runs if run.mode == "plain"}
    return [
        (plain[run.prompt, run.repetition], run)
        for run in runs
        if run.mode == "speculative" and (run.prompt, run.repetition) in plain
    ]


def pairs(runs: Sequence[Run]) -> list[tuple[Pair, Pair]]:
    """Of each prompt answered both ways: tokens after the first in their time, and all in the whole time."""
    return [
        (
            Pair(_after(a), a.write_ms / 1e3, _after(b), b.write_ms / 1e3),
            Pair(a.tokens, a.total_ms / 1e3, b.tokens, b.total_ms / 1e3),
        )
        for a, b in _matched(runs)
    ]


def _after(run: Run) -> int:
    """Tokens after the first; 0 where they are too few for a rate."""
    return run.tokens - 1 if run.rate else 0


def theirs(works: Sequence[Work], found: Found) -> list[Theirs]:
    """Another server's answers, each kind of work beside ours."""
    return [_theirs(work, found) for work in works]


def _theirs(work: Work, found: Found) -> Theirs:
    runs = [run for run in found.theirs if run.workload == work.name]
    if not runs:
        late = "It was not asked." if found.their_end else LATE
        return Theirs(work.name, note=found.their_failed.get(work.name, late))
    own = [run for run in found.runs if run.workload == work.name and run.sampling == "greedy"]
    drafted, plain = (
        {(run.prompt, run.repetition): run for run in own if run.mode == mode}
        for mode in ("speculative", "plain")
    )
    told = Theirs(work.name, side(runs), note=found.their_failed.get(work.name, ""))
    both = [(run, drafted[at]) for run in runs if (at := (run.prompt, run.repetition)) in drafted]
    told.ours = statistics.speed_up(
        [Pair(_after(a), a.write_ms / 1e3, _after(b), b.write_ms / 1e3) for a, b in both]
    )
    if any(run.drafted for run in runs):
        told.drafted, told.accepted = (
            sum(run.drafted for run in runs),
            sum(run.accepted for run in runs),
        )
    asked = [(a.prompt_tokens, b.prompt_tokens) for a, b in both if a.prompt_tokens]
    told.same_prompts = all(a == b for a, b in asked) if asked else None
    beside = [(run, plain[at]) for run in runs if (at := (run.prompt, run.repetition)) in plain]
    told.identical = all(a.digest == b.digest for a, b in beside) if beside else None
    return told


def acceptance(runs: Sequence[Run]) -> Acceptance:
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    tokens, passes = sum(run.tokens for run in runs), sum(run.passes for run in runs)
    first = sum(run.tokens > 0 for run in runs)  # tokens that came with a prompt
    # What several rounds brought together does not say which of them was rejected.
    single = [each for run in runs for each in run.rounds if each.tokens - each.accepted == 1]
    tried = [each for each in single if each.drafted]
    kept = sum(each.accepted for each in tried)
    rejections = sum(each.accepted < each.drafted for each in tried)
    sources: dict[str, tuple[int, int]] = {}
    for run in runs:
        for each in run.rounds:
            if each.drafted:
                kind = each.kind or run.source or "unknown"
                before = sources.get(kind, (0, 0))
                sources[kind] = (before[0] + each.drafted, before[1] + each.accepted)
    return Acceptance(
        drafted,
        accepted,
        drafted - accepted,
        accepted / drafted if drafted else None,
        accepted / tokens if tokens else None,
        kept / (kept + rejections) if kept + rejections else None,
        kept / len(tried) if tried else None,
        (tokens - first) / passes if passes else None,
        survival(tried),
        sources,
    )


def survival(rounds: Sequence[Round], least: int = 1) -> list[float]:
    """The share of first, second, … drafts that were accepted, of rounds that had one there; as far as so
    many had.
    """
    had: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for each in rounds:
        had.update(range(each.drafted))
        kept.update(range(each.accepted))
    places = sum(count >= least for count in had.values())  # a deeper one is never had more often
    return [kept[at] / had[at] for at in range(places)]


def differences(work: str, texts: Mapping[tuple[str, int, Mode], str]) -> list[Difference]:
    """Where texts part, by prompt."""
    found = []
    for (name, prompt, mode), plain in texts.items():
        other = texts.get((work, prompt, "speculative"))
        if name != work or mode != "plain" or other is None or other == plain:
            continue
        at = parts_at(plain, other)
        found.append(Difference(prompt, at, plain[at : at + _SHOWN], other[at : at + _SHOWN]))
    return found


def parts_at(one: str, other: str) -> int:
    """How many characters are the same at the beginning."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same


def of_theory(
    told: Acceptance,
    plain: Sequence[Run],
    runs: Sequence[Run],
    probes: tuple[Sequence[Run], Sequence[Run]],
    costs: Costs | None,
) -> Theory | None:
    """Of a pair whose costs are known. probes: answers at the depths of PROBES."""
    rounds = [each for run in runs for each in run.rounds]
    count = sum(max(each.tokens - each.accepted, 1) for each in rounds)
    own_ms = _per_token(runs)
    if costs is None or not costs.target_ms or not count or own_ms is None:
        return None
    depth = sum(each.drafted for each in rounds) / count
    prices = theory.Prices(costs, _per_token(plain))
    # No looks at what drafts would be are in the probes, and they drafted also where none paid otherwise.
    deep, shallow = ([(run.rounds, run.write_ms) for run in each] for each in probes)
    if any(run.drafted for each in probes for run in each):
        prices.learn(deep, shallow)
    else:
        prices.learn([(run.rounds, run.write_ms) for run in runs])
    said = theory.by_formula(told, depth, prices)
    return theory.replay(said, [run.rounds for run in probes[0]], own_ms, prices)


def _per_token(runs: Sequence[Run]) -> float | None:
    """Milliseconds; None where answers are too short to tell."""
    timed = [run for run in runs if run.rate]
    tokens = sum(map(_after, timed))
    return sum(run.write_ms for run in timed) / tokens if tokens else None
