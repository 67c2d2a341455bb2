"""Decide whether two models may be a pair. Only this module rejects one.

localspec/compatibility.py decides whether a difference between tokens prevents drafting. The other
differences in a header are judged here: the pre-tokenizer, token types and merges. They determine how text
becomes tokens. Only the target tokenizes, so in a draft they cause a note and no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from localspec.compatibility import FIRST_COMPARED_ID, Compatibility, compare_tokenizers
from localspec.errors import BadGguf, CannotRollBack, NotMatched
from localspec.model_traits import (
    explain_unreadable_layers,
    explain_wrong_sidecar,
    explain_wrong_trunk,
)
from localspec.registry.header.architectures import cache_layouts, describe_rollback
from localspec.registry.header.model import ModelInfo
from localspec.registry.header.vocabulary import Vocabulary, read_vocabulary

_TOKEN_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}
_COMPARED_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_suf", "fim_mid")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing two vocabularies.

    reason: the first difference as one sentence, empty if they match. notes: harmless differences.
    """

    matched: bool
    reason: str
    notes: tuple[str, ...] = ()


def judge_pair(target: ModelInfo, draft: ModelInfo) -> Verdict:
    """Return whether the draft can draft for the target.

    They must use the same tokens, and MTP heads in a separate file must belong to this target. A file
    without a tokenizer does not match.
    """
    if draft.sidecar and (reason := _explain_wrong_sidecar(target, draft)):
        return Verdict(False, f"not a matched pair: {reason}")
    try:
        return judge_vocabularies(read_vocabulary(target.header), read_vocabulary(draft.header))
    except BadGguf as error:
        return Verdict(False, error.message.rstrip("."))


def check_pair(target: ModelInfo, draft: ModelInfo | None) -> tuple[str, ...]:
    """Return sentences that the user should know about the pair.

    A target alone is always allowed. It is decoded without drafts, or with drafts that need no model.

    Raises:
        NotMatched: the message names the first difference.
        CannotRollBack: the message names the architecture.
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
        sentence = describe_rollback(model.name, model.architecture, model.rollback)
        if sentence and model.rollback == "none" and draft:
            raise CannotRollBack(f"{sentence}; use the target without a draft.")
        if sentence:
            notes.append(f"{sentence}.")
    if draft:
        judgement = judge_pair(target, draft)
        if not judgement.matched:
            raise NotMatched(f"{target.name} and {draft.name}: {judgement.reason}.")
        notes += [f"{note[:1].upper()}{note[1:]}." for note in judgement.notes]
    return tuple(notes)


def _explain_wrong_sidecar(target: ModelInfo, draft: ModelInfo) -> str:
    """Return why a sidecar cannot read the target's states, layers or cache, as a clause, or ""."""
    if draft.sidecar != "mtp":
        key = f"{draft.architecture}.target_hidden_size"
        width = draft.header.metadata.get(key, draft.width)
        return explain_unreadable_layers(
            target.architecture,
            target.trunk_layers,
            target.width,
            draft.target_layers,
            width if isinstance(width, int) else 0,
        )
    if reason := explain_wrong_sidecar(draft.architecture, target.architecture):
        return reason
    metadata = draft.header.metadata
    state_length = metadata.get(f"{draft.architecture}.embedding_length_out", draft.width)
    if state_length != target.width:
        return f"the draft reads states of {state_length} numbers, and the target's have {target.width}"
    if not draft.reads_target_cache:
        return draft.unusable_heads_reason or explain_wrong_trunk(
            draft.trunk_layers, target.trunk_layers
        )
    draft_layouts, target_layouts = (
        cache_layouts(model.header, model.architecture, model.kv_heads, model.key_length)
        for model in (draft, target)
    )
    is_part = draft_layouts <= target_layouts
    return "" if is_part else "the draft reads other attention heads than the target has"


def judge_vocabularies(target: Vocabulary, draft: Vocabulary) -> Verdict:
    """Return whether the draft's vocabulary can be used with the target's, with notes."""
    compatibility = compare_tokenizers(target.tokenizer, draft.tokenizer)
    if not compatibility.usable:
        return Verdict(False, f"not a matched pair: {compatibility.reason}")
    return Verdict(True, "", tuple(_list_differences(target, draft, compatibility)))


def _list_differences(
    target: Vocabulary, draft: Vocabulary, compatibility: Compatibility
) -> Iterator[str]:
    """Yield harmless differences as clauses."""
    if compatibility.note:
        yield compatibility.note
    if target.pre != draft.pre:
        yield f"the pre-tokenizer is '{target.pre}' in the target and '{draft.pre}' in the draft"
    yield from _find_type_difference(target, draft)
    if (target.merges is None) != (draft.merges is None):
        yield "only one of the two files lists merges"
    elif target.merges != draft.merges:
        yield "the merges of the two tokenizers differ"
    for name in _COMPARED_IDS:
        target_id, draft_id = target.ids.get(name), draft.ids.get(name)
        if target_id is not None and draft_id is not None and target_id != draft_id:
            yield f"the {name} token is {target_id} in the target and {draft_id} in the draft"


def _find_type_difference(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """Yield the first difference between token types.

    Different versions of the converter disagree about many tokens, so one example is enough.
    """
    if target.types is None or draft.types is None:
        if target.types is not draft.types:
            yield "only one of the two files declares the types of its tokens"
        return
    if target.types.raw == draft.types.raw:
        return
    pairs = enumerate(zip(target.types.values(), draft.types.values(), strict=False))
    for index, (target_type, draft_type) in islice(pairs, FIRST_COMPARED_ID, None):
        if target_type != draft_type:
            target_name, draft_name = (
                _TOKEN_TYPES.get(int(number), str(number)) for number in (target_type, draft_type)
            )
            yield f"token {index} is of type {target_name} in the target and {draft_name} in the draft"
            return
