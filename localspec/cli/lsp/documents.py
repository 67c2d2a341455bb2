"""The editor's texts, as lines, and places in them. A place comes in units of UTF-8, UTF-16 or UTF-32."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

Encoding = Literal["utf-8", "utf-16", "utf-32"]

# The protocol's three line ends; str.splitlines knows many more.
_ENDED = re.compile(r"[^\r\n]*(?:\r\n?|\n)")
_ENDS = "\r\n"


def _utf8(char: str) -> int:
    code = ord(char)
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


_UNITS: dict[Encoding, Callable[[str], int]] = {
    "utf-8": _utf8,
    "utf-16": lambda char: 2 if ord(char) > 0xFFFF else 1,
    "utf-32": lambda _: 1,
}


class Place(NamedTuple):
    """A line, and characters before the place in it; both from 0."""

    line: int
    column: int


def split(text: str) -> list[str]:
    """Its lines with their ends; the last one has none and may be empty."""
    lines = _ENDED.findall(text)
    return [*lines, text[sum(map(len, lines)) :]]


class Document:
    """A text that an editor has open, as it is there now."""

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
        """What its lines end with."""
        first = self.lines[0]
        return first[len(first.rstrip(_ENDS)) :] or "\n"

    def content(self, line: int) -> str:
        """A line without its end; nothing of one that is not there."""
        return self.lines[line].rstrip(_ENDS) if 0 <= line < len(self.lines) else ""

    def place(self, line: int, units: int) -> Place:
        """The editor's position as ours: no further than the line's end, and at a whole character."""
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
        """Ours as the editor's: units before it in its line."""
        return sum(map(self._units, self.content(place.line)[: place.column]))

    def replace(self, start: Place, end: Place, text: str) -> None:
        """Put a text between two places, which are `place`'s."""
        first, before = start.line, self.lines[start.line][: start.column]
        if first and not before and self.lines[first - 1].endswith("\r"):
            first -= 1  # a \n that comes behind it is a part of its end
            before = self.lines[first]
        lines = split(before + text + self.lines[end.line][end.column :])
        if end.line + 1 < len(self.lines):
            lines.pop()  # empty: the text goes on with the next line
        self.lines[first : end.line + 1] = lines

    def replace_all(self, text: str) -> None:
        self.lines = split(text)
