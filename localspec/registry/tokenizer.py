"""Do two models speak the same tokens? Decides whether one can draft for the other.

The floor is llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible): same
kind, same add_bos/add_eos and the ids they add, sizes within 128, texts equal from token 5 on. We
ask for more, because a pair that passes it can still be a silent failure: the same pre-tokenizer,
token types, merges, and begin and end tokens. What may differ without harm is named in the notes.
Two vocabularies of 150 000 tokens compare in milliseconds: as raw bytes first, one by one only to
find the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from localspec.registry.errors import BadGguf
from localspec.registry.gguf import Header, NumberArray, StringArray

MAX_SIZE_DIFFERENCE = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE
FIRST_COMPARED = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID
_CONTROL, _USER_DEFINED = 3, 4
_KINDS = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}
# Names llama.cpp maps to one and the same pre-tokenizer (llama-vocab.cpp).
_SAME_PRE = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
# Pre-tokenizers and kinds for which llama.cpp adds a begin token unless the file says otherwise.
_ADD_BOS_PRE = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "tekken", "chameleon",
    }
)  # fmt: skip
_ADD_BOS_KIND = frozenset({"llama", "bert"})
_ADD_EOS_KIND = frozenset({"t5"})
# Ids llama.cpp assumes where the file states none: (begin, end).
_DEFAULT_IDS = {"llama": (1, 2), "gpt2": (11, 11), "plamo2": (1, 2)}
_ENDS = ("eos", "eot", "eom")
_NOTED_IDS = ("unknown", "padding", "eot", "eom", "fim_pre", "fim_suf", "fim_mid")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the file states it, with llama.cpp's defaults filled in."""

    name: str
    kind: str
    pre: str
    tokens: StringArray
    types: NumberArray | None
    merges: StringArray | None
    ids: dict[str, int]  # stated special tokens: "bos" → id
    bos: int | None  # with defaults
    eos: int | None
    add_bos: bool
    add_eos: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two vocabularies match.

    `reason` is one sentence naming the first difference, empty when they match; `notes` are
    differences that do no harm.
    """

    matched: bool
    reason: str
    notes: tuple[str, ...] = ()


def read_vocabulary(header: Header) -> Vocabulary:
    """The tokenizer in a header.

    Raises:
        BadGguf: there is none, or one of its lists has the wrong type.
    """
    data = header.metadata
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre", "default")
    tokens = data.get("tokenizer.ggml.tokens")
    types, merges = data.get("tokenizer.ggml.token_type"), data.get("tokenizer.ggml.merges")
    if not isinstance(kind, str) or not isinstance(pre, str) or not isinstance(tokens, StringArray):
        raise BadGguf(f"{header.name} holds no tokenizer.")
    if not isinstance(types, NumberArray | None) or not isinstance(merges, StringArray | None):
        raise BadGguf(f"{header.name}: token types or merges are not lists of the right type.")
    if types is not None and types.count != tokens.count:
        raise BadGguf(f"{header.name} has {types.count} token types for {tokens.count} tokens.")
    ids = {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
        for key, value in data.items()
        if key.startswith("tokenizer.ggml.")
        and key.endswith("_token_id")
        and type(value) is int
        and 0 <= value < tokens.count
    }
    bos, eos = _DEFAULT_IDS.get(kind, (None, None))
    add_bos = data.get("tokenizer.ggml.add_bos_token", _default_add_bos(kind, pre))
    return Vocabulary(
        name=header.name,
        kind=kind,
        pre=_SAME_PRE.get(pre, pre),
        tokens=tokens,
        types=types,
        merges=merges,
        ids=ids,
        bos=ids.get("bos", bos),
        eos=ids.get("eos", eos),
        add_bos=bool(add_bos) or pre == "gemma4",  # llama.cpp overrides it for Gemma 4
        add_eos=bool(data.get("tokenizer.ggml.add_eos_token", kind in _ADD_EOS_KIND)),
    )


def _default_add_bos(kind: str, pre: str) -> bool:
    return kind in _ADD_BOS_KIND or (kind == "gpt2" and pre in _ADD_BOS_PRE)


def compare(target: Vocabulary, draft: Vocabulary) -> Verdict:
    """Can `draft` draft for `target`? Cheapest questions first; the first difference decides."""
    reason = next(_differences(target, draft), "")
    if reason:
        return Verdict(False, f"not a matched pair: {reason}")
    return Verdict(True, "", tuple(_notes(target, draft)))


def _differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """What forbids the pair, as clauses."""
    for what, ours, theirs in (
        ("the kind of tokenizer", target.kind, draft.kind),
        ("the pre-tokenizer", target.pre, draft.pre),
        ("add_bos_token", target.add_bos, draft.add_bos),
        ("add_eos_token", target.add_eos, draft.add_eos),
    ):
        if ours != theirs:
            yield f"{what} is {_shown(ours)} in the target and {_shown(theirs)} in the draft"
    ours_count, theirs_count = target.tokens.count, draft.tokens.count
    if abs(ours_count - theirs_count) > MAX_SIZE_DIFFERENCE:
        yield (
            f"the target has {ours_count} tokens and the draft {theirs_count}, and at most "
            f"{MAX_SIZE_DIFFERENCE} may differ"
        )
    yield from _end_differences(target, draft)
    first = first_text_difference(target.tokens, draft.tokens, FIRST_COMPARED)
    if first is not None:
        yield (
            f"token {first} is {_text(target.tokens, first)} in the target and "
            f"{_text(draft.tokens, first)} in the draft"
        )
    yield from _type_difference(target, draft)
    yield from _merge_difference(target.merges, draft.merges)


def _end_differences(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """Begin and end tokens. They must agree where both files state them or where they are added.

    A draft may end with another of the target's own end tokens (instruct against base files): the
    target decides when to stop.
    """
    if target.bos != draft.bos and (target.add_bos or ("bos" in target.ids and "bos" in draft.ids)):
        yield f"the begin token is {target.bos} in the target and {draft.bos} in the draft"
    ends = {target.ids[name] for name in _ENDS if name in target.ids}
    stated = "eos" in target.ids and "eos" in draft.ids and draft.eos not in ends
    if target.eos != draft.eos and (target.add_eos or stated):
        yield f"the end token is {target.eos} in the target and {draft.eos} in the draft"


def _type_difference(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """The first token whose type differs from token 5 on, converters' habits apart."""
    if target.types is None or draft.types is None:
        if target.types is not draft.types:
            yield "only one of the two files states the types of its tokens"
        return
    if target.types.raw == draft.types.raw:
        return
    pairs = enumerate(zip(target.types.values(), draft.types.values(), strict=False))
    for index, (ours, theirs) in islice(pairs, FIRST_COMPARED, None):
        # Converters of different dates write added tokens as control or as user-defined.
        if ours != theirs and {ours, theirs} != {_CONTROL, _USER_DEFINED}:
            yield (
                f"token {index} is of type {_kind(ours)} in the target and {_kind(theirs)} in the "
                "draft"
            )
            return


def _merge_difference(ours: StringArray | None, theirs: StringArray | None) -> Iterator[str]:
    if ours is None or theirs is None:
        if ours is not theirs:
            yield "only one of the two files lists merges"
        return
    if ours.raw == theirs.raw:
        return
    first = first_text_difference(ours, theirs, 0)
    if first is None:
        yield f"the target has {ours.count} merges and the draft {theirs.count}"
    else:
        yield (
            f"merge {first} is {_text(ours, first)} in the target and {_text(theirs, first)} in "
            "the draft"
        )


def _notes(target: Vocabulary, draft: Vocabulary) -> Iterator[str]:
    """Differences that do no harm."""
    ours, theirs = target.tokens.count, draft.tokens.count
    if ours != theirs:
        yield f"the target has {ours} tokens and the draft {theirs}; the others never match"
    for index, (one, other) in enumerate(
        islice(zip(target.tokens, draft.tokens, strict=False), FIRST_COMPARED)
    ):
        if one != other:
            yield f"token {index} differs, which llama.cpp's rule allows below {FIRST_COMPARED}"
    if target.eos != draft.eos:
        yield f"the end token is {target.eos} in the target and {draft.eos} in the draft"
    for name in _NOTED_IDS:
        one_id, other_id = target.ids.get(name), draft.ids.get(name)
        if one_id is not None and other_id is not None and one_id != other_id:
            yield f"the {name} token is {one_id} in the target and {other_id} in the draft"


def first_text_difference(ours: StringArray, theirs: StringArray, start: int) -> int | None:
    """The first index from `start` at which two lists differ, as far as both go."""
    short = min(len(ours.raw), len(theirs.raw))
    if memoryview(ours.raw)[:short] == memoryview(theirs.raw)[:short]:
        return None  # equal bytes from the beginning: the shorter list is a prefix of the longer
    pairs = enumerate(zip(ours, theirs, strict=False))
    for index, (one, other) in islice(pairs, start, None):
        if one != other:
            return index
    return None


def _text(strings: StringArray, index: int) -> str:
    """A token for a message: short, printable, quoted."""
    text = next(islice(strings, index, None)).decode("utf-8", "replace")
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _shown(value: str | bool) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def _kind(value: int | float | bool) -> str:
    return _KINDS.get(int(value), str(value))
