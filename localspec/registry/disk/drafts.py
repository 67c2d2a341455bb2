"""Which of the models on this disk could draft for a target, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.registry.disk.discovery import Found
from localspec.registry.disk.gain import Gain, Trial, weigh
from localspec.registry.header.architectures import rollback_sentence
from localspec.registry.header.model import Model, read_local_model
from localspec.registry.header.pairing import verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible draft. `reason` is why not, empty when it matches; `ratio` is target / draft in
    bytes of weights; `gain` is what it is worth with this target, where it was measured. `tied`: it
    cannot be told apart from the one before it in the list."""

    found: Found
    size: int
    ratio: float
    matched: bool
    reason: str
    notes: tuple[str, ...] = ()
    gain: Gain | None = None
    tied: bool = False


def rank_drafts(
    target: Path, models: Iterable[Found], measure: Callable[[Path, Path], Trial] | None = None
) -> list[Candidate]:
    """All of `models` judged as drafts for `target`: those that match first.

    Among them the ones that gain most where they were measured, else the smallest: a draft's speed
    matters more than its quality.

    Raises:
        BadGguf: the target itself cannot be read.
    """
    ours = read_local_model(target)
    same = target.resolve()
    judged = [_judge(ours, found) for found in models if found.path.resolve() != same]
    if measure is None:
        return sorted(judged, key=_order)
    trials: dict[Path, Trial] = {}
    for at, each in enumerate(judged):
        if each.matched:
            try:
                trials[each.found.path] = measure(target, each.found.path)
            except LocalspecError as error:  # one that cannot even be measured does not match
                judged[at] = replace(each, matched=False, reason=error.message)
    gains = weigh(trials)
    ranked = sorted((replace(each, gain=gains.get(each.found.path)) for each in judged), key=_order)
    return [
        replace(each, tied=bool(before and each.gain and each.gain.like(before)))
        for each, before in zip(ranked, [None, *(each.gain for each in ranked)], strict=False)
    ]


def _order(each: Candidate) -> tuple[bool, float, int, str]:
    gain = each.gain.speed_up if each.gain else 0.0
    return not each.matched, -gain, each.size, each.found.name


def _judge(target: Model, found: Found) -> Candidate:
    try:
        draft = read_local_model(found.path)
    except LocalspecError as error:
        return Candidate(found, 0, 0.0, False, error.message)
    ratio = target.weights / max(1, draft.weights)
    notes: tuple[str, ...] = ()
    if draft.weights >= target.weights:
        reason = f"it is not smaller than the target ({draft.weights} bytes of weights)."
    elif draft.rollback == "none":
        reason = rollback_sentence(found.name, draft.architecture, draft.rollback) + "."
    else:
        judged = verdict(target, draft)
        notes = judged.notes
        reason = "" if judged.matched else f"{judged.reason}."
    return Candidate(found, draft.weights, ratio, not reason, reason, notes)
