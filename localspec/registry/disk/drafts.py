"""Rank the models on this disk as drafts for a target, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.protocol.disk import Drafts, DraftView
from localspec.registry.disk.discovery import Found
from localspec.registry.disk.gain import Trial, alike, plain_speed, weigh
from localspec.registry.header.architectures import rollback_sentence
from localspec.registry.header.model import Model, read_local_model
from localspec.registry.header.pairing import verdict

Call = Callable[[str, Path], str]  # (name, path) → what `localspec add` accepts for the file


def rank_drafts(
    target: Path,
    models: Iterable[Found],
    measure: Callable[[Path, Path], Trial] | None = None,
    call: Call = lambda name, path: str(path),
) -> Drafts:
    """Return all `models` judged as drafts for `target`, those that match first.

    If `measure` is given, the matching ones are ordered by their measured gain, else by size, the smallest
    first: a draft's speed matters more than its quality. call: returns what `localspec add` accepts for a
    file.

    Raises:
        BadGguf: the target itself cannot be read.
    """
    target_model = read_local_model(target)
    target_path = target.resolve()
    views = [
        _judge_draft(target_model, model, call)
        for model in models
        if model.path.resolve() != target_path
    ]
    if measure is None:
        return Drafts(str(target), drafts=sorted(views, key=_sort_key))
    trials: dict[str, Trial] = {}
    for view in views:
        if view.matched:
            try:
                trials[view.path] = measure(target, Path(view.path))
            except LocalspecError as error:  # a draft that cannot be measured cannot be used
                view.matched, view.reason = False, error.message
    gains = weigh(trials)
    for view in views:
        view.gain = gains.get(view.path)
    views.sort(key=_sort_key)
    for previous, view in pairwise(views):
        view.tied = bool(previous.gain and view.gain and alike(previous.gain, view.gain))
    return Drafts(str(target), plain=plain_speed(trials), drafts=views)


def _sort_key(view: DraftView) -> tuple[bool, float, int, str]:
    gain = view.gain.speed_up if view.gain else 0.0
    return not view.matched, -gain, view.size, view.name


def _judge_draft(target: Model, candidate: Found, call: Call) -> DraftView:
    path = str(candidate.path)
    view = DraftView(candidate.name, path, candidate.origin, 0, 0.0, matched=False, reason="")
    view.file = call(candidate.name, candidate.path)
    try:
        draft = read_local_model(candidate.path, as_draft=True)
    except LocalspecError as error:
        view.reason = error.message
        return view
    view.size, view.ratio = draft.weights, target.weights / max(1, draft.weights)
    if draft.weights >= target.weights:
        view.reason = f"it is not smaller than the target ({draft.weights} bytes of weights)."
    elif draft.rollback == "none":
        view.reason = rollback_sentence(candidate.name, draft.architecture, draft.rollback) + "."
    else:
        judgement = verdict(target, draft)
        view.matched, view.notes = judgement.matched, judgement.notes
        view.reason = "" if judgement.matched else f"{judgement.reason}."
    return view
