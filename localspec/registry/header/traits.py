"""Read what a header states besides numbers: quantization, licence, chat template and abilities."""

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

# The tokens for filling in the middle, all three of which are needed: the metadata keys that name them, and
# the texts by which llama.cpp finds them without a key (llama_vocab::impl::load).
_FIM_TOKENS = (
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
_SYSTEM_REFUSAL = re.compile(r"[Ss]ystem (role|message)s? (is |are )?not supported")
_ROLE_OUTPUT = re.compile(r"\{\{[^}]*\brole\b")


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a model that are not numbers.

    types: bytes of weights by tensor type, the largest first. licence: as stated, or "". heads: the number
    of layers that predict further tokens (MTP).
    """

    quantization: str
    types: dict[str, int]
    licence: str
    template: TemplateView | None
    fim: bool
    heads: int


def read_traits(headers: Iterable[Header]) -> Traits:
    """Return the properties of a model from the headers of its files, the first of which has the metadata."""
    header_list = list(headers)
    types: Counter[str] = Counter()
    for header in header_list:
        for tensor in header.tensors:
            types[TENSOR_TYPES[tensor.kind][0]] += tensor.size
    by_size = dict(types.most_common())
    first = header_list[0].metadata
    heads = first.get(f"{first.get('general.architecture')}.nextn_predict_layers", 0)
    return Traits(
        quantization=_name_quantization(first.get("general.file_type"), by_size),
        types=by_size,
        licence=_read_licence(header_list[0]),
        template=_describe_template(first.get("tokenizer.chat_template")),
        fim=_has_fim_tokens(header_list[0]),
        heads=heads if type(heads) is int else 0,
    )


def _name_quantization(stated: object, types: dict[str, int]) -> str:
    """Return the stated name, or else the type of most weights."""
    name = quantization.name(stated) if type(stated) is int else ""
    return name or next(iter(types), "")


def _read_licence(header: Header) -> str:
    """Return the licence as in "apache-2.0, Apache License 2.0, https://…"."""
    keys = ("general.license", "general.license.name", "general.license.link")
    stated = [header.metadata.get(key) for key in keys]
    return ", ".join(dict.fromkeys(value for value in stated if isinstance(value, str) and value))


def _describe_template(text: object) -> TemplateView | None:
    if not isinstance(text, str) or not text:
        return None
    supports_system = not _SYSTEM_REFUSAL.search(text) and (
        "system" in text or bool(_ROLE_OUTPUT.search(text))
    )
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return TemplateView(sha256, len(text), "tools" in text, supports_system, text)


def _has_fim_tokens(header: Header) -> bool:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return False

    def has(text: str) -> bool:
        data = text.encode()
        return struct.pack("<Q", len(data)) + data in tokens.raw

    return all(
        any(f"tokenizer.ggml.{key}_token_id" in header.metadata for key in keys)
        or any(map(has, texts))
        for keys, texts in _FIM_TOKENS
    )
