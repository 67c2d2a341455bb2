"""What a header says of its model beyond the numbers: quantization, licence, chat template, abilities."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from localspec.protocol.pairs import TemplateView
from localspec.registry.header.gguf import TENSOR_TYPES, Header, StringArray

# general.file_type → name (enum llama_ftype), as quantized files are called.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED, a flag
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
    name = _FILE_TYPES.get(stated & ~_GUESSED) if type(stated) is int else None
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
