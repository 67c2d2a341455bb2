"""May these two models be a pair? The one place that says no."""

from __future__ import annotations

from localspec.errors import BadGguf, CannotRollBack, NotMatched
from localspec.registry.header.architectures import rollback_sentence
from localspec.registry.header.model import Model
from localspec.registry.header.tokenizer import Verdict, judge, read_vocabulary


def verdict(target: Model, draft: Model) -> Verdict:
    """Whether the two speak the same tokens; a file without a tokenizer does not match."""
    try:
        return judge(read_vocabulary(target.header), read_vocabulary(draft.header))
    except BadGguf as error:
        return Verdict(False, error.message.rstrip("."))


def check_pair(target: Model, draft: Model | None) -> tuple[str, ...]:
    """Sentences a person should know about the pair.

    A target alone is always allowed: it is decoded plainly, or with drafts that need no model.

    Raises:
        NotMatched: naming the first difference. CannotRollBack: naming the architecture.
    """
    notes: list[str] = []
    for model in (target, draft) if draft else (target,):
        sentence = rollback_sentence(model.name, model.architecture, model.rollback)
        if sentence and model.rollback == "none" and draft:
            raise CannotRollBack(f"{sentence}; use the target without a draft.")
        if sentence:
            notes.append(f"{sentence}.")
    if draft:
        found = verdict(target, draft)
        if not found.matched:
            raise NotMatched(f"{target.name} and {draft.name}: {found.reason}.")
        notes += [f"{note[:1].upper()}{note[1:]}." for note in found.notes]
    return tuple(notes)
