"""What a header says of its model beyond the numbers: quantization, licence, chat template, abilities."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from localspec import quantization
from localspec.protocol.pairs import TemplateView
from localspec.registry.header.gguf import TENSOR_TYPES, Header, StringArray

# The tokens around a cursor: keys that name them, and texts that llama.cpp finds without a key
# (llama_vocab::impl::load). All three are needed.
_FIM = (
    (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
         "<|code_prefix|>", "<|prefix|>"),
    ),
    (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
         "<|code_suffix|>", "<|suffix|>"),
    ),
    (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
         "<|code_middle|>", "<|middle|>"),
    ),
)  # fmt: skip
_NO_SYSTEM = re.compile(r"[Ss]ystem (role|message)s? (is |are )?not supported")
_WRITES_ROLES = re.compile(r"\{\{[^}]*\brole\b")


@dataclass(frozen=True, slots=True)
class Traits:
    """`types`: bytes of weights by tensor type, the most first. `heads`: layers that predict further
    tokens (MTP). `licence`: as stated, "" where nothing is.
    """

    quantization: str
    types: dict[str, int]
    licence: str
    template: TemplateView | None
    fim: bool
    heads: int


def traits(headers: Iterable[Header]) -> Traits:
    """Of a model's files, the first of which has the metadata."""
    every = list(headers)
    types: Counter[str] = Counter()
    for header in every:
        for tensor in header.tensors:
            types[TENSOR_TYPES[tensor.kind][0]] += tensor.size
    by_size = dict(types.most_common())
    first = every[0].metadata
    heads = first.get(f"{first.get('general.architecture')}.nextn_predict_layers", 0)
    return Traits(
        quantization=_quantization(first.get("general.file_type"), by_size),
        types=by_size,
        licence=_licence(every[0]),
        template=_template(first.get("tokenizer.chat_template")),
        fim=_fills_in(every[0]),
        heads=heads if type(heads) is int else 0,
    )


def _quantization(stated: object, types: dict[str, int]) -> str:
    """By its name; where the file states none, the type that most of it is of."""
    name = quantization.name(stated) if type(stated) is int else ""
    return name or next(iter(types), "")


def _licence(header: Header) -> str:
    """As in "apache-2.0, Apache License 2.0, https://…"."""
    keys = ("general.license", "general.license.name", "general.license.link")
    stated = [header.metadata.get(key) for key in keys]
    return ", ".join(dict.fromkeys(each for each in stated if isinstance(each, str) and each))


def _template(text: object) -> TemplateView | None:
    if not isinstance(text, str) or not text:
        return None
    system = not _NO_SYSTEM.search(text) and ("system" in text or bool(_WRITES_ROLES.search(text)))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return TemplateView(sha256, len(text), "tools" in text, system, text)


def _fills_in(header: Header) -> bool:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return False

    def has(text: str) -> bool:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data in tokens.raw

    return all(
        any(f"tokenizer.ggml.{key}_token_id" in header.metadata for key in keys)
        or any(map(has, texts))
        for keys, texts in _FIM
    )
