"""Read the tokenizer from a header, with llama.cpp's defaults, and check that llama.cpp can use it.

llama.cpp aborts on a token that appears twice, on a begin token to add that does not exist, and on a byte
token that does not name a byte. It accepts an end token that does not exist without an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from localspec.compatibility import Tokenizer
from localspec.errors import BadGguf, UnsafeModel
from localspec.registry.header.gguf import Header, NumberArray, StringArray, Tensor

# tokenizer.ggml.model → llama.cpp's kind of vocabulary (llama_vocab::impl::load)
_KINDS = {
    "llama": "spm", "bert": "wpm", "gpt2": "bpe", "hybriddna": "bpe", "whitespace": "bpe",
    "gemma4": "bpe", "t5": "ugm", "rwkv": "rwkv", "plamo2": "plamo2",
}  # fmt: skip
# Names of the same pre-tokenizer (llama_vocab::impl::load); the first of them stands for all.
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
# Pre-tokenizers and tokenizer models for which llama.cpp adds a begin token, or has other default ids of the
# begin and end tokens, unless the file states them.
_ADD_BOS_PRE = frozenset({"llama-bpe", "tekken", "chameleon"})
_NO_BOS_PRE = frozenset({"chatglm-bpe"})
_ADD_BOS = frozenset({"llama", "bert"})
_ADD_EOS = frozenset({"t5"})
_DEFAULT_IDS = {
    "llama": (1, 2), "bert": (101, None), "gpt2": (11, 11), "hybriddna": (11, 11),
    "whitespace": (11, 11), "t5": (None, 1), "plamo2": (1, 2),
}  # fmt: skip
_ABSENT_IDS = (0xFFFFFFFF, -1)  # converters write these for a token that does not exist
_BYTE_TYPE = 6  # the token type of single bytes
_BYTE_TEXT = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
# llama.cpp splits off the spaces and then asserts that no token to merge contains one.
_CRASHING_PRE = ("whitespace",)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the file states it, with llama.cpp's defaults filled in.

    ids: the stated special tokens by name ("bos", …).
    """

    name: str
    tokenizer: Tokenizer
    pre: str
    tokens: StringArray
    types: NumberArray | None
    merges: StringArray | None
    ids: dict[str, int]


def read_vocabulary(header: Header) -> Vocabulary:
    """Return the tokenizer in a header.

    Raises:
        BadGguf: there is none, or one of its lists has the wrong type.
    """
    data = header.metadata
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre", "default")
    tokens = data.get("tokenizer.ggml.tokens")
    types, merges = data.get("tokenizer.ggml.token_type"), data.get("tokenizer.ggml.merges")
    if not isinstance(kind, str) or not isinstance(pre, str) or not isinstance(tokens, StringArray):
        raise BadGguf(f"{header.name} contains no tokenizer.")
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
    # Other kinds have no pre-tokenizer.
    pre = _SAME_PRE.get(pre, pre) if _KINDS.get(kind) == "bpe" else ""
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


def check_vocabulary(header: Header, width: int, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of tokens after checking that all numbers about them agree.

    These are the token list, the token types, the rows of the embedding, and the special ids.

    Raises:
        UnsafeModel: the message names what does not agree.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens.count:
        raise UnsafeModel(f"{header.name} contains no list of tokens.")
    embedding = tensors.get("token_embd.weight")  # a sidecar may use that of its target
    shape = embedding.shape if embedding else (width, tokens.count)
    if shape != (width, tokens.count):
        raise UnsafeModel(
            f"{header.name} lists {tokens.count} tokens of width {width}, and its embedding has "
            f"the shape {shape}."
        )
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        value = header.metadata.get(key)
        if value is not None and (
            not isinstance(value, NumberArray) or value.count != tokens.count
        ):
            raise UnsafeModel(f"{header.name}: '{key}' does not have one entry per token.")
    if header.metadata.get("tokenizer.ggml.pre") in _CRASHING_PRE:
        raise UnsafeModel(
            f"{header.name} uses the pre-tokenizer '{header.metadata['tokenizer.ggml.pre']}', "
            "with which llama.cpp crashes on two spaces in a row; only embedding models use "
            "it."
        )
    for key, value in header.metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        is_valid = type(value) is int and (0 <= value < tokens.count or value in _ABSENT_IDS)
        if is_id and not is_valid:
            raise UnsafeModel(
                f"{header.name}: '{key}' is {value} and there are {tokens.count} tokens."
            )
    _check_texts(read_vocabulary(header))
    return tokens.count


def _check_texts(vocabulary: Vocabulary) -> None:
    name, count = vocabulary.name, vocabulary.tokens.count
    tokenizer = vocabulary.tokenizer
    # llama.cpp reads each text up to its first NUL, and gives empty texts these names.
    terminated = (text.partition(b"\0")[0] for text in vocabulary.tokens)
    texts = [text or b"[EMPTY_%d]" % index for index, text in enumerate(terminated)]
    if len(set(texts)) != count:
        duplicate = Counter(texts).most_common(1)[0][0]
        raise UnsafeModel(f"{name} lists the token {duplicate[:40]!r} twice.")
    for place, is_added, token in (
        ("begin", tokenizer.add_bos, tokenizer.bos),
        ("end", tokenizer.add_eos, tokenizer.eos),
    ):
        if is_added and (token is None or token >= count):
            raise UnsafeModel(f"{name} should add a token for the {place} of a text but has none.")
    kinds = vocabulary.types.values() if vocabulary.types else ()
    if _BYTE_TYPE not in kinds:
        return
    for text, kind in zip(texts, kinds, strict=True):
        if kind == _BYTE_TYPE and not _BYTE_TEXT.fullmatch(text):
            raise UnsafeModel(f"{name}: the byte token {text[:40]!r} is not a byte.")
