"""Turn answers into the figures of each kind of work, and judge whether speculation pays for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from localspec.extras.bench import statistics, theory
from localspec.extras.bench.prompts import Work
from localspec.extras.bench.report import (
    Acceptance,
    Costs,
    Difference,
    Estimate,
    Mode,
    Round,
    Run,
    Sampling,
    Side,
    Theirs,
    Theory,
    Verdict,
    Workload,
)
from localspec.extras.bench.running import PROBES, BenchAnswers
from localspec.extras.bench.statistics import PairedAnswers

MIN_GAIN_RATIO, MAX_LOSS_RATIO = 1.03, 0.97  # an interval outside of these is more than noise
_IMPOSSIBLE_FACTOR = 1.25  # of the tokens per pass; a speed-up above that has another cause
_SAME_MARGIN = 0.07  # an interval this close to 1 is no difference
# Drafted tokens per generated token below which speculation was mostly off.
_MOSTLY_OFF_RATIO = 0.15
_TOO_FEW = "few"  # key of the phrase for a verdict that is unclear because there is no interval


def judge(estimate: Estimate | None, acceptance: Acceptance | None, tokens: int) -> Verdict:
    """Return the verdict on a speed-up. `tokens`: tokens generated with drafts.

    Without an interval nothing is said of the speed, because another program may have made any difference.
    """
    if estimate is None:
        return "not measured"
    # A pass with drafts takes at least as long as one without, so the speed-up is at most the tokens per
    # pass. If it is higher, something else changed during the measurement.
    limit = acceptance.tokens_per_pass if acceptance else None
    if limit is not None:
        limit = limit * _IMPOSSIBLE_FACTOR if limit > MIN_GAIN_RATIO else MIN_GAIN_RATIO
        if estimate.value > limit:
            return "unclear"
    has_interval = estimate.low is not None and estimate.high is not None
    low, high = estimate.low or estimate.value, estimate.high or estimate.value
    if has_interval and low > MIN_GAIN_RATIO:
        return "faster"
    if has_interval and high < MAX_LOSS_RATIO:
        return "slower"
    is_near_one = low >= 1 - _SAME_MARGIN and high <= 1 + _SAME_MARGIN
    was_mostly_off = acceptance is not None and acceptance.drafted < _MOSTLY_OFF_RATIO * tokens
    # A pair that clearly gained or lost time is not called off, even with few drafts.
    if was_mostly_off and (is_near_one or low <= 1 <= high):
        return "off"
    return "same" if has_interval and is_near_one else "unclear"


def summarize_verdicts(workloads: Sequence[Workload]) -> str:
    """Return the sentence for people.

    An example is "Worth it for code (2.31×), off by itself for text."
    """
    sentences = [_summarize([work for work in workloads if work.sampling == "greedy"])]
    if own_sampling := [work for work in workloads if work.sampling == "own"]:
        summary = _summarize(own_sampling)
        sentences.append(f"With the pair's own sampling: {summary[0].lower()}{summary[1:]}")
    return " ".join(sentences)


_PHRASES = {
    "faster": "worth it for",
    "off": "off by itself for",
    "same": "no gain and no loss for",
    "unclear": "not clear for",
    _TOO_FEW: "too few answers to be sure for",
    "slower": "slower for",
}


def _summarize(workloads: Sequence[Workload]) -> str:
    measured = [work for work in workloads if work.verdict != "not measured"]
    if not measured:
        return "Nothing was measured."
    by_phrase: dict[str, list[str]] = {}
    for about in ("code", "text"):
        group = [work for work in measured if work.about == about]
        entries = [(work.name, [work]) for work in group]
        if len({_phrase_key(work) for work in group}) == 1 and len(group) > 1:
            entries = [(about, group)]  # a group whose verdicts are all equal is one entry
        for name, works in entries:
            names = by_phrase.setdefault(_phrase_key(works[0]), [])
            names.append(f"{name}{_format_range(works)}")
    text = ", ".join(
        f"{phrase} {join_names(by_phrase[key])}"
        for key, phrase in _PHRASES.items()
        if key in by_phrase
    )
    if not by_phrase.keys() & {"faster", "unclear", _TOO_FEW}:
        text = f"not worth it here: {text}"
    return f"{text[0].upper()}{text[1:]}."


def _phrase_key(workload: Workload) -> str:
    estimate = workload.speed_up or workload.latency
    if workload.verdict == "unclear" and estimate and estimate.low is None:
        return _TOO_FEW
    return workload.verdict


def _format_range(group: Sequence[Workload]) -> str:
    """Return the speed-ups of a group in brackets, unless its verdict says enough."""
    values = sorted(estimate.value for work in group if (estimate := work.speed_up or work.latency))
    if _phrase_key(group[0]) in ("off", "same", _TOO_FEW) or not values:
        return ""
    digits = 2 if group[0].verdict in ("slower", "unclear") else 1
    low, high = (f"{value:.{digits}f}" for value in (values[0], values[-1]))
    return f" ({low}×)" if low == high else f" ({low} to {high}×)"


def join_names(names: Sequence[str]) -> str:
    """Join names as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


NO_TIME_NOTE = "There was no time for it."
_EXCERPT_CHARACTERS = 24  # of each text, from the place where two texts diverge


def summarize_workloads(
    works: Sequence[Work], results: BenchAnswers, costs: Costs | None
) -> list[Workload]:
    """Return each kind of work at temperature 0, then those with the pair's own sampling."""
    summaries = []
    for sampling in ("greedy", "own"):
        runs = [run for run in results.runs if run.sampling == sampling]
        if sampling == "greedy" or runs:
            summaries += [_summarize_work(work, sampling, runs, results, costs) for work in works]
    return summaries


def _summarize_work(
    work: Work, sampling: Sampling, runs: Sequence[Run], results: BenchAnswers, costs: Costs | None
) -> Workload:
    work_runs = [run for run in runs if run.workload == work.name]
    plain, speculative = (
        [run for run in work_runs if run.mode == mode] for mode in ("plain", "speculative")
    )
    summary = Workload(work.name, work.about, sampling, "not measured")
    summary.plain = summarize_mode(plain) if plain else None
    summary.speculative = summarize_mode(speculative) if speculative else None
    if summary.plain is None or summary.speculative is None:
        summary.note = results.failed.get(work.name, NO_TIME_NOTE)
        return summary
    paired = pair_answers(work_runs)
    summary.speed_up = statistics.estimate_speed_up([rates for rates, _ in paired])
    summary.latency = statistics.estimate_speed_up([times for _, times in paired])
    summary.acceptance = measure_acceptance(speculative)
    estimate, tokens = summary.speed_up or summary.latency, summary.speculative.tokens
    summary.verdict = judge(estimate, summary.acceptance, tokens)
    if sampling == "greedy":
        summary.differences = find_differences(work.name, results.texts)
        summary.identical = all(a.digest == b.digest for a, b in _match_runs(plain, speculative))
        deep, shallow = (
            [run for run in results.probes[depth] if run.workload == work.name] for depth in PROBES
        )
        summary.theory = predict(summary.acceptance, plain, speculative, (deep, shallow), costs)
    return summary


def summarize_mode(runs: Sequence[Run]) -> Side:
    timed = [run for run in runs if run.rate]
    seconds = sum(run.write_ms for run in timed) / 1e3
    metered = [run for run in runs if run.joules is not None]
    energy = sum(run.joules or 0.0 for run in metered)
    metered_tokens = sum(run.tokens for run in metered)
    return Side(
        answers=len(runs),
        tokens=sum(run.tokens for run in runs),
        rate=sum(run.tokens - 1 for run in timed) / seconds if seconds else None,
        first_ms=median(run.first_ms for run in runs),
        total_ms=median(run.total_ms for run in runs),
        joules_per_token=energy / metered_tokens if metered_tokens else None,
    )


def _match_runs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return answers to the same prompt in the same repetition."""
    known = {(run.prompt, run.repetition): run for run in first}
    matched = ((known.get((run.prompt, run.repetition)), run) for run in second)
    return [(run, other) for run, other in matched if run]


def pair_answers(runs: Sequence[Run]) -> list[tuple[PairedAnswers, PairedAnswers]]:
    """Return the rates and the latencies of each prompt that was answered both ways.

    Rates have the tokens after the first in their time; latencies have all tokens in the whole time.
    """
    plain, speculative = (
        [run for run in runs if run.mode == mode] for mode in ("plain", "speculative")
    )
    return [
        (
            _pair_rates(one, other),
            PairedAnswers(one.tokens, one.total_ms / 1e3, other.tokens, other.total_ms / 1e3),
        )
        for one, other in _match_runs(plain, speculative)
    ]


def _pair_rates(one: Run, other: Run) -> PairedAnswers:
    return PairedAnswers(
        _timed_tokens(one), one.write_ms / 1e3, _timed_tokens(other), other.write_ms / 1e3
    )


def _timed_tokens(run: Run) -> int:
    """Return the number of tokens after the first; 0 if the answer is too short for a rate."""
    return run.tokens - 1 if run.rate else 0


def summarize_other_server(works: Sequence[Work], results: BenchAnswers) -> list[Theirs]:
    """Return another server's figures for each kind of work, beside ours."""
    default_note = "It was not asked." if results.their_end else NO_TIME_NOTE
    summaries = []
    for work in works:
        runs = [run for run in results.theirs if run.workload == work.name]
        if not runs:
            note = results.their_failed.get(work.name, default_note)
            summaries.append(Theirs(work.name, note=note))
            continue
        speculative, plain = (
            [
                run
                for run in results.runs
                if (run.workload, run.sampling, run.mode) == (work.name, "greedy", mode)
            ]
            for mode in ("speculative", "plain")
        )
        note = results.their_failed.get(work.name, "")
        summary = Theirs(work.name, summarize_mode(runs), note=note)
        matched = _match_runs(speculative, runs)
        rates = [_pair_rates(theirs, ours) for ours, theirs in matched]
        summary.ours = statistics.estimate_speed_up(rates)
        if any(run.drafted for run in runs):
            summary.drafted = sum(run.drafted for run in runs)
            summary.accepted = sum(run.accepted for run in runs)
        sizes = [(a.prompt_tokens, b.prompt_tokens) for a, b in matched if b.prompt_tokens]
        summary.same_prompts = all(ours == theirs for ours, theirs in sizes) if sizes else None
        digests = [(a.digest, b.digest) for a, b in _match_runs(plain, runs)]
        summary.identical = all(ours == theirs for ours, theirs in digests) if digests else None
        summaries.append(summary)
    return summaries


def measure_acceptance(runs: Sequence[Run]) -> Acceptance:
    """Return the acceptance of drafts in these answers."""
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    tokens, passes = sum(run.tokens for run in runs), sum(run.passes for run in runs)
    prefill_tokens = sum(run.tokens > 0 for run in runs)  # tokens produced by prefill passes
    # If several passes are reported together, it is not known which of them had a rejection.
    rounds = [round_ for run in runs for round_ in run.rounds]
    single = [each for each in rounds if each.tokens - each.accepted == 1 and each.drafted]
    hits = sum(each.accepted for each in single)
    tried = hits + sum(each.accepted < each.drafted for each in single)
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
        of_drafted=accepted / drafted if drafted else None,
        of_answer=accepted / tokens if tokens else None,
        conditional=hits / tried if tried else None,
        mean_length=hits / len(single) if single else None,
        tokens_per_pass=(tokens - prefill_tokens) / passes if passes else None,
        by_position=acceptance_by_position(single),
        sources=sources,
    )


def acceptance_by_position(rounds: Sequence[Round], least: int = 1) -> list[float]:
    """Return the fraction of first, second, … drafts that were accepted.

    Only rounds that had a draft at that position count. Positions with fewer than `least` drafts
    are left out.
    """
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for round_ in rounds:
        drafted.update(range(round_.drafted))
        accepted.update(range(round_.accepted))
    # No position has more drafts than the one before it, so the counts are in descending order.
    positions = sum(count >= least for count in drafted.values())
    return [accepted[position] / drafted[position] for position in range(positions)]


def find_differences(work: str, texts: Mapping[tuple[str, int, Mode], str]) -> list[Difference]:
    """Return where the texts of a kind of work diverge, by prompt."""
    differences = []
    for (name, prompt, mode), plain in texts.items():
        speculative = texts.get((work, prompt, "speculative"))
        if name == work and mode == "plain" and speculative not in (None, plain):
            at = common_prefix_length(plain, speculative)
            one, other = (text[at : at + _EXCERPT_CHARACTERS] for text in (plain, speculative))
            differences.append(Difference(prompt, at, one, other))
    return differences


def common_prefix_length(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def predict(
    measured: Acceptance,
    plain: Sequence[Run],
    runs: Sequence[Run],
    probes: tuple[Sequence[Run], Sequence[Run]],
    costs: Costs | None,
) -> Theory | None:
    """Return the predictions for a pair whose costs are known; None for others.

    probes: answers at the depths of PROBES.
    """
    rounds = [round_ for run in runs for round_ in run.rounds]
    count = sum(max(round_.tokens - round_.accepted, 1) for round_ in rounds)
    own_ms = _ms_per_token(runs)
    if costs is None or not costs.target_ms or not count or own_ms is None:
        return None
    depth = sum(round_.drafted for round_ in rounds) / count
    prices = theory.RoundCosts(costs, _ms_per_token(plain))
    # Probes are the better data: they always draft, even where it does not pay, and no time goes into
    # trying out whether drafts would pay.
    deep, shallow = ([(run.rounds, run.write_ms) for run in answers] for answers in probes)
    if any(run.drafted for answers in probes for run in answers):
        prices.learn(deep, shallow)
    else:
        prices.learn([(run.rounds, run.write_ms) for run in runs])
    predicted = theory.predict_by_formula(measured, depth, prices)
    return theory.predict_by_replay(predicted, [run.rounds for run in probes[0]], own_ms, prices)


def _ms_per_token(runs: Sequence[Run]) -> float | None:
    """Return the milliseconds per token; None if the answers are too short."""
    timed = [run for run in runs if run.rate]
    tokens = sum(map(_timed_tokens, timed))
    return sum(run.write_ms for run in timed) / tokens if tokens else None
