"""Which of the models on this disk could draft for a target, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.registry.architectures import rollback_sentence
from localspec.registry.found import Found
from localspec.registry.model import Model, read_local_model
from localspec.registry.pairing import verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible draft. `reason` is why not, empty when it matches; `ratio` is target / draft in
    bytes of weights; `speed` is tokens per second with this target, where it was measured."""

    found: Found
    size: int
    ratio: float
    matched: bool
    reason: str
    notes: tuple[str, ...] = ()
    speed: float | None = None


def rank_drafts(
    target: Path,
    models: Iterable[Found],
    measure: Callable[[Path, Path], float] | None = None,
) -> list[Candidate]:
    """All of `models` judged as drafts for `target`: those that match first.

    Among them the fastest measured first, else the smallest: a draft's speed matters more than its
    quality.

    Raises:
        BadGguf: the target itself cannot be read.
    """
    ours = read_local_model(target)
    same = target.resolve()
    judged = [_judge(ours, found) for found in models if found.path.resolve() != same]
    if measure:
        judged = [_measured(target, each, measure) if each.matched else each for each in judged]
    return sorted(judged, key=_order)


def _order(each: Candidate) -> tuple[bool, float, int, str]:
    return not each.matched, -(each.speed or 0.0), each.size, each.found.name


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


def _measured(target: Path, each: Candidate, measure: Callable[[Path, Path], float]) -> Candidate:
    """The candidate with its speed; one that cannot even be measured does not match."""
    try:
        return replace(each, speed=measure(target, each.found.path))
    except LocalspecError as error:
        return replace(each, matched=False, reason=error.message)
