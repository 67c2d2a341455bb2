"""Which of the models on this disk could draft for a target, best first."""

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

Call = Callable[[str, Path], str]  # a file of this name at this path


def rank_drafts(
    target: Path,
    models: Iterable[Found],
    measure: Callable[[Path, Path], Trial] | None = None,
    call: Call = lambda name, path: str(path),
) -> Drafts:
    """All of `models` judged as drafts for `target`: those that match first.

    Among them the ones that gain most where they were measured, else the smallest: a draft's speed
    matters more than its quality. `call`: what `add` takes for each.

    Raises:
        BadGguf: the target itself cannot be read.
    """
    ours = read_local_model(target)
    same = target.resolve()
    judged = [_judge(ours, found, call) for found in models if found.path.resolve() != same]
    if measure is None:
        return Drafts(str(target), drafts=sorted(judged, key=_order))
    trials: dict[str, Trial] = {}
    for each in judged:
        if each.matched:
            try:
                trials[each.path] = measure(target, Path(each.path))
            except LocalspecError as error:  # one that cannot even be measured does not match
                each.matched, each.reason = False, error.message
    gains = weigh(trials)
    for each in judged:
        each.gain = gains.get(each.path)
    judged.sort(key=_order)
    for before, each in pairwise(judged):
        each.tied = bool(before.gain and each.gain and alike(before.gain, each.gain))
    return Drafts(str(target), plain=plain_speed(trials), drafts=judged)


def _order(each: DraftView) -> tuple[bool, float, int, str]:
    gain = each.gain.speed_up if each.gain else 0.0
    return not each.matched, -gain, each.size, each.name


def _judge(target: Model, found: Found, call: Call) -> DraftView:
    path = str(found.path)
    view = DraftView(found.name, path, found.origin, 0, 0.0, matched=False, reason="")
    view.file = call(found.name, found.path)
    try:
        draft = read_local_model(found.path, as_draft=True)
    except LocalspecError as error:
        view.reason = error.message
        return view
    view.size, view.ratio = draft.weights, target.weights / max(1, draft.weights)
    if draft.weights >= target.weights:
        view.reason = f"it is not smaller than the target ({draft.weights} bytes of weights)."
    elif draft.rollback == "none":
        view.reason = rollback_sentence(found.name, draft.architecture, draft.rollback) + "."
    else:
        judged = verdict(target, draft)
        view.matched, view.notes = judged.matched, judged.notes
        view.reason = "" if judged.matched else f"{judged.reason}."
    return view
