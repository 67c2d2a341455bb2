"""Turn answers into the figures of each kind of work, and judge whether speculation pays for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
_MOSTLY_OFF_RATIO = (
    0.15  # drafted tokens per generated token below which speculation was mostly off
)
_TOO_FEW = "few"  # key of the phrase for a verdict that is unclear because there is no interval
_NAMES = {"code": "code", "text": "text"}


def judge(estimate: Estimate | None, acceptance: Acceptance | None, tokens: int) -> Verdict:
    """Return the verdict on a speed-up. `tokens`: tokens generated with drafts.

    Without an interval nothing is said of the speed, because another program may have made any difference.
    """
    if estimate is None:
        return "not measured"
    if _is_impossible(estimate, acceptance):
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
    if has_interval and is_near_one:
        return "same"
    return "unclear"


def _is_impossible(estimate: Estimate, acceptance: Acceptance | None) -> bool:
    """Return whether a speed-up exceeds what its passes can give.

    A pass with drafts takes at least as long as one without, so the speed-up is at most the tokens
    per pass. If it is higher, something else changed during the measurement.
    """
    if acceptance is None or acceptance.tokens_per_pass is None or estimate.value <= MIN_GAIN_RATIO:
        return False
    limit = acceptance.tokens_per_pass
    return limit <= MIN_GAIN_RATIO or estimate.value > limit * _IMPOSSIBLE_FACTOR


def summarize_verdicts(workloads: Sequence[Workload]) -> str:
    """Return the sentence for people.

    An example is "Worth it for code (2.31×), off by itself for text."
    """
    sentences = [_summarize([work for work in workloads if work.sampling == "greedy"])]
    own_sampling = [work for work in workloads if work.sampling == "own"]
    if own_sampling:
        summary = _lower_first(_summarize(own_sampling))
        sentences.append(f"With the pair's own sampling: {summary}")
    return " ".join(sentences)


def _summarize(workloads: Sequence[Workload]) -> str:
    measured = [work for work in workloads if work.verdict != "not measured"]
    if not measured:
        return "Nothing was measured."
    by_verdict: dict[str, list[str]] = {}
    for name, key, figures in _group_works(measured):
        by_verdict.setdefault(key, []).append(f"{name}{figures}")
    phrases = [
        (f"{_PHRASES[key]} {join_names(by_verdict[key])}") for key in _PHRASES if key in by_verdict
    ]
    text = ", ".join(phrases)
    if not by_verdict.keys() & {"faster", "unclear", _TOO_FEW}:
        text = f"not worth it here: {text}"
    return f"{text[0].upper()}{text[1:]}."


_PHRASES: dict[str, str] = {
    "faster": "worth it for",
    "off": "off by itself for",
    "same": "no gain and no loss for",
    "unclear": "not clear for",
    _TOO_FEW: "too few answers to be sure for",
    "slower": "slower for",
}


def _phrase_key(workload: Workload) -> str:
    """Return the key of the phrase for a verdict."""
    estimate = workload.speed_up or workload.latency
    if workload.verdict == "unclear" and estimate and estimate.low is None:
        return _TOO_FEW
    return workload.verdict


def _group_works(workloads: Sequence[Workload]) -> list[tuple[str, str, str]]:
    """Return name, phrase key and figures of each kind of work.

    A group whose verdicts are all equal is one entry.
    """
    entries = []
    for about, name in _NAMES.items():
        group = [work for work in workloads if work.about == about]
        keys = {_phrase_key(work) for work in group}
        if len(keys) == 1 and len(group) > 1:
            entries.append((name, _phrase_key(group[0]), _format_range(group)))
        else:
            entries += [(work.name, _phrase_key(work), _format_range([work])) for work in group]
    return entries


def _format_range(group: Sequence[Workload]) -> str:
    """Return the speed-ups of a group in brackets, unless its verdict says enough."""
    values = sorted(estimate.value for work in group if (estimate := work.speed_up or work.latency))
    if group[0].verdict in ("off", "same") or not values:
        return ""
    low, high = f"{values[0]:.1f}", f"{values[-1]:.1f}"
    if group[0].verdict in ("slower", "unclear"):
        low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return f" ({low}×)" if low == high else f" ({low} to {high}×)"


def join_names(names: Sequence[str]) -> str:
    """Join names as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]


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
    if not plain or not speculative:
        summary.note = results.failed.get(work.name, NO_TIME_NOTE)
        summary.plain = summarize_mode(plain) if plain else None
        summary.speculative = summarize_mode(speculative) if speculative else None
        return summary
    summary.plain, summary.speculative = summarize_mode(plain), summarize_mode(speculative)
    paired = pair_answers(work_runs)
    summary.speed_up = statistics.estimate_speed_up([rates for rates, _ in paired])
    summary.latency = statistics.estimate_speed_up([times for _, times in paired])
    summary.acceptance = measure_acceptance(speculative)
    summary.verdict = judge(
        summary.speed_up or summary.latency, summary.acceptance, summary.speculative.tokens
    )
    if sampling == "greedy":
        summary.differences = find_differences(work.name, results.texts)
        summary.identical = all(
            first.digest == second.digest for first, second in _match_runs(work_runs)
        )
        deep, shallow = (
            [run for run in results.probes[depth] if run.workload == work.name] for depth in PROBES
        )
        summary.theory = predict(summary.acceptance, plain, speculative, (deep, shallow), costs)
    return summary


def summarize_mode(runs: Sequence[Run]) -> Side:
    """Return the figures of one mode."""
    timed = [run for run in runs if run.rate]
    seconds = sum(run.write_ms for run in timed) / 1e3
    metered = [run for run in runs if run.joules is not None]
    energy = sum(run.joules or 0.0 for run in metered)
    metered_tokens = sum(run.tokens for run in metered)
    return Side(
        answers=len(runs),
        tokens=sum(run.tokens for run in runs),
        rate=sum(run.tokens - 1 for run in timed) / seconds if seconds else None,
        first_ms=statistics.median([run.first_ms for run in runs]),
        total_ms=statistics.median([run.total_ms for run in runs]),
        joules_per_token=energy / metered_tokens if metered_tokens else None,
    )


def _match_runs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return plain and speculative answers to the same prompt in the same repetition."""
    plain = {(run.prompt, run.repetition): run for run in runs if run.mode == "plain"}
    return [
        (plain[run.prompt, run.repetition], run)
        for run in runs
        if run.mode == "speculative" and (run.prompt, run.repetition) in plain
    ]


def pair_answers(runs: Sequence[Run]) -> list[tuple[PairedAnswers, PairedAnswers]]:
    """Return the rates and the latencies of each prompt that was answered both ways.

    Rates have the tokens after the first in their time; latencies have all tokens in the whole
    time.
    """
    return [
        (
            PairedAnswers(
                _timed_tokens(plain),
                plain.write_ms / 1e3,
                _timed_tokens(speculative),
                speculative.write_ms / 1e3,
            ),
            PairedAnswers(
                plain.tokens, plain.total_ms / 1e3, speculative.tokens, speculative.total_ms / 1e3
            ),
        )
        for plain, speculative in _match_runs(runs)
    ]


def _timed_tokens(run: Run) -> int:
    """Return the number of tokens after the first; 0 if the answer is too short for a rate."""
    return run.tokens - 1 if run.rate else 0


def summarize_other_server(works: Sequence[Work], results: BenchAnswers) -> list[Theirs]:
    """Return another server's figures for each kind of work, beside ours."""
    return [_summarize_theirs(work, results) for work in works]


def _summarize_theirs(work: Work, results: BenchAnswers) -> Theirs:
    runs = [run for run in results.theirs if run.workload == work.name]
    if not runs:
        default_note = "It was not asked." if results.their_end else NO_TIME_NOTE
        return Theirs(work.name, note=results.their_failed.get(work.name, default_note))
    our_runs = [
        run for run in results.runs if run.workload == work.name and run.sampling == "greedy"
    ]
    speculative, plain = (
        {(run.prompt, run.repetition): run for run in our_runs if run.mode == mode}
        for mode in ("speculative", "plain")
    )
    summary = Theirs(work.name, summarize_mode(runs), note=results.their_failed.get(work.name, ""))
    matched = [
        (run, speculative[at])
        for run in runs
        if (at := (run.prompt, run.repetition)) in speculative
    ]
    summary.ours = statistics.estimate_speed_up(
        [
            PairedAnswers(
                _timed_tokens(theirs),
                theirs.write_ms / 1e3,
                _timed_tokens(ours),
                ours.write_ms / 1e3,
            )
            for theirs, ours in matched
        ]
    )
    if any(run.drafted for run in runs):
        summary.drafted, summary.accepted = (
            sum(run.drafted for run in runs),
            sum(run.accepted for run in runs),
        )
    prompt_sizes = [
        (theirs.prompt_tokens, ours.prompt_tokens)
        for theirs, ours in matched
        if theirs.prompt_tokens
    ]
    summary.same_prompts = (
        all(theirs == ours for theirs, ours in prompt_sizes) if prompt_sizes else None
    )
    compared = [(run, plain[at]) for run in runs if (at := (run.prompt, run.repetition)) in plain]
    summary.identical = (
        all(theirs.digest == ours.digest for theirs, ours in compared) if compared else None
    )
    return summary


def measure_acceptance(runs: Sequence[Run]) -> Acceptance:
    """Return the acceptance of drafts in these answers."""
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    tokens, passes = sum(run.tokens for run in runs), sum(run.passes for run in runs)
    prefill_tokens = sum(run.tokens > 0 for run in runs)  # tokens produced by prefill passes
    # If several passes are reported together, it is not known which of them had a rejection.
    single = [
        round_ for run in runs for round_ in run.rounds if round_.tokens - round_.accepted == 1
    ]
    with_drafts = [round_ for round_ in single if round_.drafted]
    accepted_in_single = sum(round_.accepted for round_ in with_drafts)
    rejections = sum(round_.accepted < round_.drafted for round_ in with_drafts)
    sources: dict[str, tuple[int, int]] = {}
    for run in runs:
        for round_ in run.rounds:
            if round_.drafted:
                kind = round_.kind or run.source or "unknown"
                counts = sources.get(kind, (0, 0))
                sources[kind] = (counts[0] + round_.drafted, counts[1] + round_.accepted)
    return Acceptance(
        drafted,
        accepted,
        drafted - accepted,
        accepted / drafted if drafted else None,
        accepted / tokens if tokens else None,
        accepted_in_single / (accepted_in_single + rejections)
        if accepted_in_single + rejections
        else None,
        accepted_in_single / len(with_drafts) if with_drafts else None,
        (tokens - prefill_tokens) / passes if passes else None,
        acceptance_by_position(with_drafts),
        sources,
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
        if name != work or mode != "plain" or speculative is None or speculative == plain:
            continue
        position = common_prefix_length(plain, speculative)
        differences.append(
            Difference(
                prompt,
                position,
                plain[position : position + _EXCERPT_CHARACTERS],
                speculative[position : position + _EXCERPT_CHARACTERS],
            )
        )
    return differences


def common_prefix_length(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


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
