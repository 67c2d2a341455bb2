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
    tags = {tag, _CHAT_SUFFIX.sub("", tag)}
    return [
        pair_name for pair_name in names if any(_is_model(pair_name, model, tag) for tag in tags)
    ]


def find_same_family(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that begin like Ollama's model `name`, in any size."""
    model, _ = _split_name(name)
    return [
        pair_name
        for pair_name in names
        if any(
            _strip_punctuation(prefix) == _strip_punctuation(model)
            for prefix, _ in _splits(pair_name)
        )
    ]


def _split_name(name: str) -> tuple[str, str]:
    model, _, tag = _LIBRARY_PREFIX.sub("", name.strip().lower()).partition(":")
    return model, "" if tag == "latest" else tag


def _is_model(pair: str, model: str, tag: str) -> bool:
    if not tag:
        return _strip_punctuation(pair) == _strip_punctuation(model)
    return any(
        _strip_punctuation(prefix) == _strip_punctuation(model)
        and _strip_punctuation(suffix) == _strip_punctuation(tag)
        for prefix, suffix in _splits(pair)
    )


def _splits(pair: str) -> list[tuple[str, str]]:
    """Return all ways to split a pair's name into a model and a tag."""
    return [(pair[: dash.start()], pair[dash.end() :]) for dash in re.finditer("-", pair)]


def _strip_punctuation(text: str) -> str:
    return re.sub(r"[-._]", "", text)
