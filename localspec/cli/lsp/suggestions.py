"""The part of a completion that is shown, and its form for the editor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_BLANKS = " \t\n"
_MAX_LABEL_CHARACTERS = 60  # of a line in a menu
_WORD = re.compile(r"\w*$")


def fitting(text: str, after: str, below: Sequence[str]) -> str:
    """Return a completion without the text that already follows the cursor.

    Such text is removed both in the cursor's line and in the lines below, and blanks at the end as
    well. It is the same as `s:fitting` of localspec/editors/autoload/localspec/ghost.vim.
    """
    text = text.replace("\r", "").rstrip(_BLANKS)
    if after := after.strip():
        return text.partition("\n")[0].removesuffix(after)
    lines = text.split("\n")
    for number in range(min(len(below), len(lines) - 1), 0, -1):
        if lines[-number:] == [*below[:number]] and any(map(str.strip, below[:number])):
            return "\n".join(lines[:-number]).rstrip(_BLANKS)
    return text


class Item(NamedTuple):
    """A suggestion in a menu, including the word that it continues.

    Editors look for items that begin with that word.
    """

    label: str
    text: str
    back: str  # the part of the line before the cursor that it replaces


def item(text: str, before: str) -> Item:
    """Return the item for a suggestion that follows `before` in its line."""
    match = _WORD.search(before)
    word = match.group() if match else ""
    replacement = word + text
    first, *following = replacement.strip().split("\n")
    is_cut = len(first) > _MAX_LABEL_CHARACTERS or bool(following)
    return Item(first[:_MAX_LABEL_CHARACTERS] + ("…" if is_cut else ""), replacement, word)
