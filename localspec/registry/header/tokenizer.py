"""The tokenizer that a header states, with llama.cpp's defaults, and what two of them differ in.

Whether a difference keeps a draft from drafting is decided in one place, localspec/compatibility.py.
Here is what a header says beyond what that rule reads: the pre-tokenizer, token types and merges. They
decide how text becomes tokens, which only the target does, so in a draft they are worth a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from localspec.compatibility import FIRST_COMPARED, Compatibility, Tokenizer, compare
from localspec.errors import BadGguf
from localspec.registry.header.gguf import Header, NumberArray, StringArray

_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user-defined", 5: "unused", 6: "byte"}
# tokenizer.ggml.model → llama.cpp's kind of vocabulary (llama_vocab::impl::load)
_KINDS = {
    "llama": "spm", "bert": "wpm", "gpt2": "bpe", "hybriddna": "bpe", "whitespace": "bpe",
    "gemma4": "bpe", "t5": "ugm", "rwkv": "rwkv", "plamo2": "plamo2",
}  # fmt: skip
# Names that llama.cpp maps to one and the same pre-tokenizer (llama_vocab::impl::load), by its first.
_PRE_TOKENIZERS = (
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano"),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0",
     "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4"),
    ("gemma4", "granite-embed-multi-311m"),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    ("chatglm-bpe", "glm4", "glm5"),
    ("gpt-4o", "llama4", "kanana2", "talkie"),
    ("tiny_aya", "cohere2moe"),
    ("bailingmoe", "bailingmoe2", "llada-moe"),
)  # fmt: skip
_SAME_PRE = {name: names[0] for names in _PRE_TOKENIZERS for name in names}
# Pre-tokenizers, and models of a tokenizer, for which llama.cpp adds a begin token, or assumes other
# ids for begin and end, unless the file says otherwise.
_ADD_BOS_PRE = frozenset({"llama-bpe", "tekken", "chameleon"})
_NO_BOS_PRE = frozenset({"chatglm-bpe"})
_ADD_BOS = frozenset({"llama", "bert"})
_ADD_EOS = frozenset({"t5"})
_DEFAULT_IDS = {
    "llama": (1, 2), "bert": (101, None), "gpt2": (11, 11), "hybriddna": (11, 11),
    "whitespace": (11, 11), "t5": (None, 1), "plamo2": (1, 2),
}  # fmt: skip
_NOTED_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_suf", "fim_mid")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the file states it, with llama.cpp's defaults filled in."""

    name: str
    tokenizer: Tokenizer
    pre: str
    tokens: StringArray
    types: NumberArray | None
    merges: StringArray | None
    ids: dict[str, int]  # stated special tokens: "bos" → id


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
    if kind == "gemma4":
        pre = kind
    pre = _SAME_PRE.get(pre, pre) if _KINDS.get(kind) == "bpe" else ""  # only these have one
    bos, eos = _DEFAULT_IDS.get(kind, (None, None))
    add_bos = data.get("tokenizer.ggml.add_bos_token", kind in _ADD_BOS or pre in _ADD_BOS_PRE)
    return Vocabulary(
        name=header.name,
        tokenizer=Tokenizer(
            kind=_KINDS.get(kind, kind),
            texts=tokens,
            bos=ids.get("bos", None if pre in _NO_BOS_PRE else bos),
            eos=ids.get("eos", eos),
            add_bos=bool(add_bos) or pre == "gemma4",  # llama.cpp overrides it for Gemma 4
            add_eos=bool(data.get("tokenizer.ggml.add_eos_token", kind in _ADD_EOS)),
        ),
        pre=pre,
        tokens=tokens,
        types=types,
        merges=merges,
        ids=ids,
    )


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
            yield "only one of the two files states the types of its tokens"
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
