"""Find the pairs that are the same model as one that Ollama names ("qwen2.5-coder:7b")."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIBRARY_PREFIX = re.compile(r"^(registry\.ollama\.ai/)?library/")
# Suffixes of a tag that mark a chat model. The names of pairs usually omit them.
_CHAT_SUFFIX = re.compile(r"[-_](instruct|it|chat)$")


def is_ollama_name(name: str) -> bool:
    """Return whether a name has the form of Ollama's library, MODEL:TAG."""
    model, colon, tag = _LIBRARY_PREFIX.sub("", name.strip()).partition(":")
    return bool(model and colon and tag) and not re.search(r"[/,\s~:]|\.gguf$", model + tag)


def find_same_model(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that mean Ollama's model `name`.

    The model and its tag must each match, ignoring punctuation: "llama3.1:8b" matches "llama31-8b" and
    "llama3:18b" does not. The tag "latest" counts as no tag.
    """
    model, tag = _split_name(name)
    if not tag:
        return [pair for pair in names if _plain(pair) == model]
    tags = {_plain(tag), _plain(_CHAT_SUFFIX.sub("", tag))}
    return [
        pair
        for pair in names
        if any(prefix == model and suffix in tags for prefix, suffix in _splits(pair))
    ]


def find_same_family(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that begin like Ollama's model `name`, in any size."""
    model, _ = _split_name(name)
    return [pair for pair in names if any(prefix == model for prefix, _ in _splits(pair))]


def _split_name(name: str) -> tuple[str, str]:
    """Return the model without its punctuation, and the tag."""
    model, _, tag = _LIBRARY_PREFIX.sub("", name.strip().lower()).partition(":")
    return _plain(model), "" if tag == "latest" else tag


def _splits(pair: str) -> list[tuple[str, str]]:
    """Return all ways to split a pair's name into a model and a tag, without their punctuation."""
    dashes = re.finditer("-", pair)
    return [(_plain(pair[: dash.start()]), _plain(pair[dash.end() :])) for dash in dashes]


def _plain(text: str) -> str:
    return re.sub(r"[-._]", "", text)
