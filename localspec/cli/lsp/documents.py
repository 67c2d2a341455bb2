"""The editor's texts as lines, and positions in units of UTF-8, UTF-16 or UTF-32."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

Encoding = Literal["utf-8", "utf-16", "utf-32"]

# The protocol has these three line ends. str.splitlines splits at many others, too.
_ENDED_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)")
_LINE_END_CHARACTERS = "\r\n"


def _count_utf8_bytes(char: str) -> int:
    code = ord(char)
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


_UNITS: dict[Encoding, Callable[[str], int]] = {
    "utf-8": _count_utf8_bytes,
    "utf-16": lambda char: 2 if ord(char) > 0xFFFF else 1,
    "utf-32": lambda _: 1,
}


class Place(NamedTuple):
    """A position: a line, and the number of characters before it in that line, both from 0."""

    line: int
    column: int


def split(text: str) -> list[str]:
    """Return the lines with their ends. The last one has none and may be empty."""
    lines = _ENDED_LINE.findall(text)
    return [*lines, text[sum(map(len, lines)) :]]


class Document:
    """A text that is open in the editor, in its current state."""

    def __init__(
        self, uri: str, text: str, encoding: Encoding, language: str = "", version: int = 0
    ) -> None:
        self.uri = uri
        self.language = language
        self.version = version
        self.lines = split(text)
        self._units = _UNITS[encoding]

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def end(self) -> str:
        """The line end of the text."""
        first = self.lines[0]
        return first[len(first.rstrip(_LINE_END_CHARACTERS)) :] or "\n"

    def content(self, line: int) -> str:
        """Return a line without its end; empty if there is no such line."""
        return self.lines[line].rstrip(_LINE_END_CHARACTERS) if 0 <= line < len(self.lines) else ""

    def place(self, line: int, units: int) -> Place:
        """Convert the editor's position: at most the line's end, and never inside a character."""
        if line >= len(self.lines):
            return Place(len(self.lines) - 1, len(self.lines[-1]))
        content = self.content(line)
        if content.isascii():
            return Place(line, min(units, len(content)))
        for column, char in enumerate(content):
            units -= self._units(char)
            if units < 0:
                return Place(line, column)
        return Place(line, len(content))

    def units(self, place: Place) -> int:
        """Convert a position to the editor's units before it in its line."""
        return sum(map(self._units, self.content(place.line)[: place.column]))

    def replace(self, start: Place, end: Place, text: str) -> None:
        """Replace the text between two positions."""
        first, beginning = start.line, self.lines[start.line][: start.column]
        if first and not beginning and self.lines[first - 1].endswith("\r"):
            first -= 1  # a \n inserted here would become a part of the previous line's end
            beginning = self.lines[first]
        lines = split(beginning + text + self.lines[end.line][end.column :])
        if end.line + 1 < len(self.lines):
            lines.pop()  # it is empty, since the text continues with the next line
        self.lines[first : end.line + 1] = lines

    def replace_all(self, text: str) -> None:
        self.lines = split(text)
