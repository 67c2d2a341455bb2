"""Ollama's names of models ("qwen2.5-coder:7b"), and the pairs that are the same model."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIBRARY = re.compile(r"^(registry\.ollama\.ai/)?library/")
# What a tag may say of a chat model that the name of a pair usually leaves out.
_CHAT = re.compile(r"[-_](instruct|it|chat)$")


def is_ollama_name(name: str) -> bool:
    """Return whether a name has the form of one in Ollama's library, which is MODEL:TAG."""
    model, colon, tag = _LIBRARY.sub("", name.strip()).partition(":")
    return bool(model and colon and tag) and not re.search(r"[/,\s~:]|\.gguf$", model + tag)


def same_model(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are called like Ollama's model `name`.

    The model and its tag must agree each by itself, whatever the punctuation: "llama3.1:8b" is
    "llama31-8b", and "llama3:18b" is not. The tag "latest" stands for no tag.
    """
    model, tag = _parts(name)
    tags = {tag, _CHAT.sub("", tag)}
    return [each for each in names if any(_is(each, model, tag) for tag in tags)]


def same_family(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that begin like Ollama's model `name`, of any size."""
    model, _ = _parts(name)
    return [each for each in names if any(_bare(left) == _bare(model) for left, _ in _splits(each))]


def _parts(name: str) -> tuple[str, str]:
    model, _, tag = _LIBRARY.sub("", name.strip().lower()).partition(":")
    return model, "" if tag == "latest" else tag


def _is(pair: str, model: str, tag: str) -> bool:
    if not tag:
        return _bare(pair) == _bare(model)
    return any(
        _bare(left) == _bare(model) and _bare(right) == _bare(tag) for left, right in _splits(pair)
    )


def _splits(pair: str) -> list[tuple[str, str]]:
    """Return the ways to read a pair's name as a model and a tag."""
    return [(pair[: at.start()], pair[at.end() :]) for at in re.finditer("-", pair)]


def _bare(text: str) -> str:
    return re.sub(r"[-._]", "", text)
