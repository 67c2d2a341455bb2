"""A search for many texts at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_END = ""  # key of a node of the trie where a text ends


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of `texts` wherever one begins, or never where there are
    none. It is a trie: the cost of a search hardly depends on how many texts there are."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        if text:
            node[_END] = {}
    return re.compile(_alternatives(trie) or r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    branches = [re.escape(c) + _alternatives(after) for c, after in node.items() if c != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
