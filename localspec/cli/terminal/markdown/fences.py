"""Which lines of a Markdown text are code: for the screen, `-x` and what is copied alike."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

_OPENS = re.compile(
    r"^(?P<before>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)"
    r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)$"
)
_CLOSES = re.compile(r"^(?P<before>[ \t]*)(?P<fence>`{3,}|~{3,})\s*$")
_ITEM = re.compile(r"^[ \t]*(?:[-*+]|\d{1,9}[.)])(?:[ \t]|$)")
_TAB = 4  # columns of indentation that a tab stands for
_DEEPEST = 3  # columns that a fence may be indented by; more is text, except in a list


class Fences:
    """Reads line by line. After a line that opened a block, `before` and `info` say what stood there."""

    def __init__(self) -> None:
        self.before = ""
        self.info = ""
        self.in_list = False
        self._fence = ""
        self._indent = 0

    @property
    def open(self) -> bool:
        return bool(self._fence)

    def take(self, line: str) -> Literal["open", "code", "close", "text"]:
        """What the next line is."""
        if self._fence:
            end = _CLOSES.match(line)
            if not end or not end["fence"].startswith(self._fence):
                return "code"
            if _width(end["before"]) > self._indent + _DEEPEST:
                return "code"
            self._fence = ""
            return "close"
        found = _OPENS.match(line)
        if found and (self.in_list or _width(_indent(line)) <= _DEEPEST):
            self.before, self.info = found["before"], found["info"].strip()
            self._fence, self._indent = found["fence"], _width(found["before"])
            self.in_list = self.in_list or bool(self.before.strip())
            return "open"
        if _ITEM.match(line):
            self.in_list = True
        elif line.strip() and not line[0].isspace():
            self.in_list = False
        return "text"

    def code(self, line: str) -> str:
        """A line of the block without the indentation that the fence has too."""
        return without(line, self._indent)


def without(line: str, indent: int) -> str:
    """`line` without up to `indent` columns of blanks at its beginning."""
    at = column = 0
    while column < indent and line[at : at + 1] in (" ", "\t"):
        column += _TAB - column % _TAB if line[at] == "\t" else 1
        at += 1
    return " " * (column - indent) + line[at:]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _width(text: str) -> int:
    return len(text.expandtabs(_TAB))


def blocks(text: str) -> list[str]:
    """The contents of every fenced block, as they are; one that is not closed ends with the text."""
    found: list[list[str]] = []
    fences = Fences()
    for line in text.removesuffix("\n").split("\n"):
        kind = fences.take(line)
        if kind == "open":
            found.append([])
        elif kind == "code":
            found[-1].append(fences.code(line))
    return ["\n".join(lines) for lines in found]
