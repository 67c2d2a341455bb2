"""Find the code blocks of Markdown, without anything that draws them."""

from __future__ import annotations

import re
from typing import Literal

_OPENS = re.compile(
    r"^(?P<before>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)"
    r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)$"
)
_CLOSES = re.compile(r"^(?P<before>[ \t]*)(?P<fence>`{3,}|~{3,})\s*$")
_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*+]|\d{1,9}[.)])(?:[ \t]|$)")
_TAB_COLUMNS = 4
_MAX_FENCE_INDENT = 3  # columns; a fence with more indentation is text, except in a list


class Fences:
    """A line-by-line parser of code blocks.

    After a line that opened a block, `before` and `info` are the texts before and after the fence.
    """

    def __init__(self) -> None:
        self.before = ""
        self.info = ""
        self.in_list = False
        self._fence = ""
        self._indent = 0

    @property
    def open(self) -> bool:
        return bool(self._fence)

    def classify_next(self, line: str) -> Literal["open", "code", "close", "text"]:
        if self._fence:
            closing = _CLOSES.match(line)
            if not closing or not closing["fence"].startswith(self._fence):
                return "code"
            if _columns(closing["before"]) > self._indent + _MAX_FENCE_INDENT:
                return "code"
            self._fence = ""
            return "close"
        opening = _OPENS.match(line)
        indent = line[: len(line) - len(line.lstrip(" \t"))]
        if opening and (self.in_list or _columns(indent) <= _MAX_FENCE_INDENT):
            self.before, self.info = opening["before"], opening["info"].strip()
            self._fence, self._indent = opening["fence"], _columns(opening["before"])
            self.in_list = self.in_list or bool(self.before.strip())
            return "open"
        if _LIST_ITEM.match(line):
            self.in_list = True
        elif line.strip() and not line[0].isspace():
            self.in_list = False
        return "text"

    def code(self, line: str) -> str:
        """Return a line of the block without the indentation of its fence."""
        return remove_indent(line, self._indent)


def remove_indent(line: str, indent: int) -> str:
    """Return `line` without up to `indent` columns of blanks at its beginning."""
    index = column = 0
    while column < indent and line[index : index + 1] in (" ", "\t"):
        column += _TAB_COLUMNS - column % _TAB_COLUMNS if line[index] == "\t" else 1
        index += 1
    return " " * (column - indent) + line[index:]


def _columns(text: str) -> int:
    return len(text.expandtabs(_TAB_COLUMNS))


def blocks(text: str) -> list[str]:
    """Return the contents of every fenced block. A block that is not closed ends with the text."""
    lines_of_blocks: list[list[str]] = []
    fences = Fences()
    for line in text.removesuffix("\n").split("\n"):
        kind = fences.classify_next(line)
        if kind == "open":
            lines_of_blocks.append([])
        elif kind == "code":
            lines_of_blocks[-1].append(fences.code(line))
    return ["\n".join(lines) for lines in lines_of_blocks]
