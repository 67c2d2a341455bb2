"""Judge whether speculation pays: a verdict for each kind of work, and a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.cli.bench.report import Acceptance, Estimate, Verdict, Workload

GAIN, LOSS = 1.03, 0.97  # an interval outside of these is more than noise
_FEW_PAIRS_FACTOR = (
    1.25  # with too few pairs for an interval, a factor above which the speed differs
)
_SAME_MARGIN = 0.07  # an interval, or a figure without one, this close to 1 is no difference
_MOSTLY_OFF_RATIO = (
    0.15  # drafted tokens per generated token below which speculation was mostly off
)
_TOO_FEW = "few"  # key of the phrase for a verdict that is unclear because there is no interval
_NAMES = {"code": "code", "text": "text"}


def verdict(estimate: Estimate | None, acceptance: Acceptance | None, tokens: int) -> Verdict:
    """Return the verdict on a speed-up. `tokens`: tokens generated with drafts."""
    if estimate is None:
        return "not measured"
    if _is_impossible(estimate, acceptance):
        return "unclear"
    low, high, gain, loss = estimate.low, estimate.high, GAIN, LOSS
    if low is None or high is None:
        low = high = estimate.value
        gain, loss = _FEW_PAIRS_FACTOR, 1 / _FEW_PAIRS_FACTOR
    if low > gain:
        return "faster"
    if high < loss:
        return "slower"
    is_near_one = low >= 1 - _SAME_MARGIN and high <= 1 + _SAME_MARGIN
    was_mostly_off = acceptance is not None and acceptance.drafted < _MOSTLY_OFF_RATIO * tokens
    # A pair that clearly gained or lost time is not called off, even with few drafts.
    if was_mostly_off and (is_near_one or low <= 1 <= high):
        return "off"
    if is_near_one:
        return "same"
    return "unclear"


def _is_impossible(estimate: Estimate, acceptance: Acceptance | None) -> bool:
    """Return whether a speed-up exceeds what its passes can give.

    A pass with drafts takes at least as long as one without, so the speed-up is at most the tokens
    per pass. If it is higher, something else changed during the measurement.
    """
    if acceptance is None or acceptance.tokens_per_pass is None or estimate.value <= GAIN:
        return False
    limit = acceptance.tokens_per_pass
    return limit <= GAIN or estimate.value > limit * _FEW_PAIRS_FACTOR


def sentence(workloads: Sequence[Workload]) -> str:
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
        (f"{_PHRASES[key]} {listed(by_verdict[key])}") for key in _PHRASES if key in by_verdict
    ]
    text = ", ".join(phrases)
    if "faster" not in by_verdict:
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


def listed(names: Sequence[str]) -> str:
    """Join names as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]
