"""What of a completion is shown, and as what the editor gets it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_BLANK = " \t\n"
_LABEL = 60  # characters of a line in a menu
_WORD = re.compile(r"\w*$")


def fitting(text: str, after: str, below: Sequence[str]) -> str:
    """It without what stands behind the cursor already, in its line and in those below, and without blanks at
    its end. As `s:fitting` of localspec/editors/autoload/localspec/ghost.vim."""
    text = text.replace("\r", "").rstrip(_BLANK)
    if after := after.strip():
        return text.partition("\n")[0].removesuffix(after)
    lines = text.split("\n")
    for number in range(min(len(below), len(lines) - 1), 0, -1):
        if lines[-number:] == [*below[:number]] and any(map(str.strip, below[:number])):
            return "\n".join(lines[:-number]).rstrip(_BLANK)
    return text


class Item(NamedTuple):
    """A suggestion in a menu: with the word that it goes on with, for editors look for what begins so."""

    label: str
    text: str
    back: str  # what of the line it takes the place of


def item(text: str, before: str) -> Item:
    """A suggestion behind `before` in its line."""
    found = _WORD.search(before)
    word = found.group() if found else ""
    whole = word + text
    first, *more = whole.strip().split("\n")
    cut = len(first) > _LABEL or bool(more)
    return Item(first[:_LABEL] + ("…" if cut else ""), whole, word)
