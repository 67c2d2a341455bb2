"""Search for many texts at once. The process that renders templates imports this, so it stays light."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_END = ""  # Key in a node of the trie that marks the end of a text.


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of `texts` at each position, or nothing if there are none.

    The pattern is built as a trie, so that the cost of a search hardly depends on the number of texts.
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        if text:
            node[_END] = {}
    return re.compile(_alternatives(trie) or r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    """Return the expression of a node of the trie."""
    branches = [re.escape(c) + _alternatives(child) for c, child in node.items() if c != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
