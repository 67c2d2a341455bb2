"""May these two models be a pair? The one place that says no.

Whether a difference of tokens keeps a draft from drafting is decided in localspec/compatibility.py.
Here is what a header says beyond what that rule reads: the pre-tokenizer, token types and merges. They
decide how text becomes tokens, which only the target does, so in a draft they are worth a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from localspec.compatibility import FIRST_COMPARED, Compatibility, compare
from localspec.errors import BadGguf, CannotRollBack, NotMatched
from localspec.purpose import not_its_sidecar
from localspec.registry.header.architectures import rollback_sentence
from localspec.registry.header.gguf import StringArray
from localspec.registry.header.kept import cells
from localspec.registry.header.model import Model
from localspec.registry.header.vocabulary import Vocabulary, read_vocabulary

_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}
_NOTED_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_suf", "fim_mid")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two vocabularies match.

    `reason` is one sentence naming the first difference, empty when they match; `notes` are
    differences that do no harm.
    """

    matched: bool
    reason: str
    notes: tuple[str, ...] = ()


def verdict(target: Model, draft: Model) -> Verdict:
    """Whether the two speak the same tokens, and of heads in a file of their own whether this is their
    target; a file without a tokenizer does not match.
    """
    if draft.sidecar and (reason := _not_its_sidecar(target, draft)):
        return Verdict(False, f"not a matched pair: {reason}")
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
    if target.pooling:
        if draft:
            raise NotMatched(
                f"{target.name} turns texts into numbers and writes none, so nothing can draft for it; "
                "leave out the draft."
            )
        return ()
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


def _not_its_sidecar(target: Model, draft: Model) -> str:
    """Why heads in a file of their own cannot read the target's states and cache, as a clause."""
    if reason := not_its_sidecar(draft.architecture, target.architecture):
        return reason
    states = draft.header.metadata.get(f"{draft.architecture}.embedding_length_out")
    if states != target.width:
        return f"the draft reads states of {states} numbers, and the target's have {target.width}"
    theirs, ours = (
        cells(each.header, each.architecture, each.kv_heads, each.key_length)
        for each in (draft, target)
    )
    return "" if theirs <= ours else "the draft reads other attention heads than the target has"


def judge(target: Vocabulary, draft: Vocabulary) -> Verdict:
    """Can `draft` draft for `target`, and what is to be known of the two?"""
    found = compare(target.tokenizer, draft.tokenizer)
    if not found.usable:
        return Verdict(False, f"not a matched pair: {found.reason}")
    return Verdict(True, "", tuple(_notes(target, draft, found)))


def _notes(target: Vocabulary, draft: Vocabulary, found: Compatibility) -> Iterator[str]:
    """Differences that do no harm, as clauses."""
    if found.note:
        yield found.note
    if target.pre != draft.pre:
        yield f"the pre-tokenizer is '{target.pre}' in the target and '{draft.pre}' in the draft"
    yield from _type_difference(target, draft)
    yield from _merge_difference(target.merges, draft.merges)
    for name in _NOTED_IDS:
        one, other = target.ids.get(name), draft.ids.get(name)
        if one is not None and other is not None and one != other:
            yield f"the {name} token is {one} in the target and {other} in the draft"


def _type_difference(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """The first token whose type differs. Converters of different dates disagree about many."""
    if target.types is None or draft.types is None:
        if target.types is not draft.types:
            yield "only one of the two files declares the types of its tokens"
        return
    if target.types.raw == draft.types.raw:
        return
    pairs = enumerate(zip(target.types.values(), draft.types.values(), strict=False))
    for index, (ours, theirs) in islice(pairs, FIRST_COMPARED, None):
        if ours != theirs:
            one, other = (_TYPES.get(int(each), str(each)) for each in (ours, theirs))
            yield f"token {index} is of type {one} in the target and {other} in the draft"
            return


def _merge_difference(ours: StringArray | None, theirs: StringArray | None) -> Iterator[str]:
    if ours is None or theirs is None:
        if ours is not theirs:
            yield "only one of the two files lists merges"
    elif ours != theirs:
        yield "the merges of the two tokenizers differ"
