"""Whether it pays, in a word for each kind of work and in a sentence for a person. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.cli.bench.report import Acceptance, Estimate, Verdict, Workload

GAIN, LOSS = 1.03, 0.97  # an interval beyond is more than noise
_BAND = 1.25  # of pairs too few for an interval: so many times faster or slower is taken for a difference
_NEAR = 0.07  # an interval, or a figure alone, so close to 1 is no difference
_HARDLY = 0.15  # drafted tokens for each that was written: speculation was mostly off
_FEW = "few"  # unclear, because there is no interval
_NAMES = {"code": "code", "text": "text"}


def verdict(found: Estimate | None, acceptance: Acceptance | None, tokens: int) -> Verdict:
    """tokens: that were written with drafts."""
    if found is None:
        return "not measured"
    if _impossible(found, acceptance):
        return "unclear"
    low, high, gain, loss = found.low, found.high, GAIN, LOSS
    if low is None or high is None:
        low = high = found.value
        gain, loss = _BAND, 1 / _BAND
    if low > gain:
        return "faster"
    if high < loss:
        return "slower"
    near = low >= 1 - _NEAR and high <= 1 + _NEAR
    hardly = acceptance is not None and acceptance.drafted < _HARDLY * tokens
    if hardly and (near or low <= 1 <= high):  # else it cost something, off as it was
        return "off"
    if near:
        return "same"
    return "unclear"


def _impossible(found: Estimate, acceptance: Acceptance | None) -> bool:
    """Is it called faster by more than its passes can give? Then something else changed meanwhile.

    A pass with drafts takes at least as long as one without, so the speed-up is at most the tokens of a
    pass.
    """
    if acceptance is None or acceptance.tokens_per_pass is None or found.value <= GAIN:
        return False
    most = acceptance.tokens_per_pass
    return most <= GAIN or found.value > most * _BAND


def sentence(workloads: Sequence[Workload]) -> str:
    """As in "Worth it for code (2.31×), off by itself for text."."""
    said = [_said([each for each in workloads if each.sampling == "greedy"])]
    own = [each for each in workloads if each.sampling == "own"]
    if own:
        said.append(f"With the pair's own sampling: {_lower(_said(own))}")
    return " ".join(said)


def _said(workloads: Sequence[Workload]) -> str:
    measured = [each for each in workloads if each.verdict != "not measured"]
    if not measured:
        return "Nothing was measured."
    by_verdict: dict[str, list[str]] = {}
    for name, word, about in _named(measured):
        by_verdict.setdefault(word, []).append(f"{name}{about}")
    phrases = [
        (f"{_PHRASES[word]} {listed(by_verdict[word])}") for word in _PHRASES if word in by_verdict
    ]
    whole = ", ".join(phrases)
    if "faster" not in by_verdict:
        whole = f"not worth it here: {whole}"
    return f"{whole[0].upper()}{whole[1:]}."


_PHRASES: dict[str, str] = {
    "faster": "worth it for",
    "off": "off by itself for",
    "same": "no gain and no loss for",
    "unclear": "not clear for",
    _FEW: "too few answers to be sure for",
    "slower": "slower for",
}


def _word(workload: Workload) -> str:
    """Return the key of the phrase for a verdict."""
    estimate = workload.speed_up or workload.latency
    if workload.verdict == "unclear" and estimate and estimate.low is None:
        return _FEW
    return workload.verdict


def _named(workloads: Sequence[Workload]) -> list[tuple[str, str, str]]:
    """A whole group where all of it is alike, else each by its name; with figures in brackets."""
    found = []
    for about, name in _NAMES.items():
        group = [each for each in workloads if each.about == about]
        words = {_word(each) for each in group}
        if len(words) == 1 and len(group) > 1:
            found.append((name, _word(group[0]), _bracket(group)))
        else:
            found += [(each.name, _word(each), _bracket([each])) for each in group]
    return found


def _bracket(group: Sequence[Workload]) -> str:
    """The speed-ups of a group, where its verdict does not say them."""
    values = sorted(found.value for each in group if (found := each.speed_up or each.latency))
    if group[0].verdict in ("off", "same") or not values:
        return ""
    low, high = f"{values[0]:.1f}", f"{values[-1]:.1f}"
    if group[0].verdict in ("slower", "unclear"):
        low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return f" ({low}×)" if low == high else f" ({low} to {high}×)"


def listed(names: Sequence[str]) -> str:
    """As in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
