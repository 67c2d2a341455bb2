"""A vocabulary llama.cpp can live with.

It aborts on a token that appears twice, when it is to add a begin token that does not exist, and on
a byte token that names no byte; it goes on without a word when an end token does not exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from localspec.errors import UnsafeModel
from localspec.registry.header.gguf import Header, NumberArray, StringArray, Tensor
from localspec.registry.header.tokenizer import Vocabulary, read_vocabulary

_ABSENT_IDS = (0xFFFFFFFF, -1)  # how converters write "no such token"
_BYTE = 6
_BYTE_TEXT = re.compile(rb"<0x[0-9A-Fa-f]{2}>")


# llama.cpp splits the spaces apart and then asserts that no token to be merged has one.
_DEADLY = ("whitespace",)


def check_vocabulary(header: Header, width: int, tensors: Mapping[str, Tensor]) -> int:
    """The number of tokens: the list, its types, the embedding rows and the special ids agree.

    Raises:
        UnsafeModel: naming what does not.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens.count:
        raise UnsafeModel(f"{header.name} holds no list of tokens.")
    shape = tensors["token_embd.weight"].shape
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
    if header.metadata.get("tokenizer.ggml.pre") in _DEADLY:
        raise UnsafeModel(
            f"{header.name} cuts texts as '{header.metadata['tokenizer.ggml.pre']}', on which "
            "llama.cpp ends at two spaces in a row; it is known of embedding models alone."
        )
    _check_special_ids(header, tokens.count)
    _check_texts(read_vocabulary(header))
    return tokens.count


def _check_special_ids(header: Header, count: int) -> None:
    for key, value in header.metadata.items():
        if not key.startswith("tokenizer.ggml.") or not key.endswith("_token_id"):
            continue
        if type(value) is not int or not (0 <= value < count or value in _ABSENT_IDS):
            raise UnsafeModel(f"{header.name}: '{key}' is {value} and there are {count} tokens.")


def _check_texts(vocabulary: Vocabulary) -> None:
    name, count = vocabulary.name, vocabulary.tokens.count
    tokenizer = vocabulary.tokenizer
    # llama.cpp reads a text up to its first NUL.
    read = (text.partition(b"\0")[0] for text in vocabulary.tokens)
    texts = [text or b"[EMPTY_%d]" % index for index, text in enumerate(read)]
    if len(set(texts)) != count:  # empty ones get these names in llama.cpp too
        twice = Counter(texts).most_common(1)[0][0]
        raise UnsafeModel(f"{name} lists the token {twice[:40]!r} twice.")
    for what, add, token in (
        ("begin", tokenizer.add_bos, tokenizer.bos),
        ("end", tokenizer.add_eos, tokenizer.eos),
    ):
        if add and (token is None or token >= count):
            raise UnsafeModel(f"{name} is to add a token for the {what} of a text and has none.")
    kinds = vocabulary.types.values() if vocabulary.types else ()
    if _BYTE not in kinds:
        return
    for text, kind in zip(texts, kinds, strict=True):
        if kind == _BYTE and not _BYTE_TEXT.fullmatch(text):
            raise UnsafeModel(f"{name}: the byte token {text[:40]!r} names no byte.")
