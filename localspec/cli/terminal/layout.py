"""Text on a terminal of any width: wrapped between words, and in columns where they fit.

Nothing here prints; `room` is a terminal's width in cells, None where there is none: in a pipe a line
stays a line, for programs read it.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TextIO

_GAP = "  "  # between two columns
_BELOW = "    "  # before what stands below its row
_COMMAND = re.compile(r"localspec |eval |\S.*\| localspec ")
_COMMENT = re.compile(r" +# (?=[^'\"]*$)")  # of a shell, behind a command
_QUOTED = re.compile(r""" "[^"]*"|'[^']*' """.strip())
_GOES_ON = " \\"  # a shell's sign that a command goes on in the next line
_GLUE = "\0"  # instead of a blank where no line is to end; no text that is shown has it
_COLUMN = 24  # cells; a text is not squeezed into less, it goes below its row
# What is better copied in one piece: code between backquotes, and a command that ends a line.
_WORD = re.compile(
    r"(?:(?<=: )|(?<=→ )|^)localspec [^;\n]+$|[^\s`]*(?:`[^`\n]+`[^\s`]*)+|\S+", re.MULTILINE
)


def width(stream: TextIO) -> int | None:
    """The cells of a line of the terminal that `stream` is; None where it is none."""
    if not stream.isatty():
        return None
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or 80
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def cells(text: str) -> int:
    """How wide a terminal shows a text."""
    if text.isascii():
        return len(text)
    return sum(map(_cell, text))


def _cell(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrapped(text: str, room: int | None, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines, the first of which begins with `first` and every other with `rest`.

    Lines of `text` stay apart and keep their indentation. A word that is wider than a line is left whole,
    for the terminal to break and a mouse to copy; one that fits with less indentation gets less. An
    indented line that is a command stays one for whoever copies it, and its comment goes above it.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        words = line.lstrip(" ")
        indent = line[: len(line) - len(words)]
        begin = (rest if lines else first) + indent
        if room is not None and indent and _COMMAND.match(words):
            if cells(begin) + cells(words) > room and (comment := _COMMENT.search(words)):
                said, words = words[comment.end() :], words[: comment.start()]
                lines += _wrapped(f"# {said}", room, begin, f"{rest}{indent}# ")
                begin = rest + indent
            glued = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _GLUE), words)
            *some, last = _wrapped(glued, room - len(_GOES_ON), begin, f"{rest}{indent}{_BELOW}")
            parts = [*(f"{each}{_GOES_ON}" for each in some), last]
            lines += [each.replace(_GLUE, " ") for each in parts]
        else:
            lines += _wrapped(words, room, begin, rest + indent)
    return lines


def _wrapped(text: str, room: int | None, first: str, rest: str) -> list[str]:
    if room is None or cells(first) + cells(text) <= room:
        return [f"{first}{text}".rstrip()]
    lines, line, begun = [], first, False
    for gap, word in _words(text, room - cells(rest)):
        if begun and cells(line) + len(gap) + cells(word) > room:
            lines.append(line)
            line, begun = rest, False
        if not begun and cells(line) + cells(word) > room:
            if line.strip():  # a label, which needs no text beside it
                lines.append(line)
            beside = room - cells(word)
            line = next((" " * each for each in (cells(rest), len(_BELOW)) if each <= beside), "")
        line += f"{gap if begun else ''}{word}"
        begun = True
    return [each.rstrip() for each in (*lines, line)]


def _words(text: str, room: int) -> Iterator[tuple[str, str]]:
    """What a line may be broken between, each with the blanks before it."""
    end = 0
    for found in _WORD.finditer(text):
        gap, word, end = text[end : found.start()], found[0], found.end()
        parts = [word] if cells(word) <= room or " " not in word else re.split(" +", word)
        for part in parts:
            for piece in _pieces(part) if cells(part) > room else [part]:
                yield gap, piece
                gap = ""
            gap = " "


def _pieces(word: str) -> list[str]:
    """Chinese and Japanese are broken between any two characters."""
    return re.findall(r"[^\u1100-\U0010ffff]+|.", word)


class Flow:
    """Text that is being written, in lines that end between words; code stays as it is.

    Each call returns what is to be shown next. A word is held back until it is whole.
    """

    def __init__(self, room: int | None) -> None:
        self._room = room
        self._column = 0  # cells that are shown of the line
        self._line = ""  # as it was written
        self._fenced = False
        self._gap: list[tuple[str, str]] = []  # before the word, with its style
        self._word: list[tuple[str, str]] = []

    def text(self, piece: str, style: str = "") -> str:
        """`style`: the number of an escape code."""
        shown = []
        for part in re.findall(r"\n| +|[^ \n\u1100-\U0010ffff]+|.", piece):
            if part == "\n":
                shown.append(f"{self.word()}\n")
                self._fenced ^= self._line.lstrip().startswith(("```", "~~~"))
                self._line, self._column = "", 0
                continue
            if self._word and (part.isspace() or part >= "\u1100"):
                shown.append(self.word())
            (self._gap if part.isspace() else self._word).append((part, style))
            self._line += part
        return "".join(shown)

    def word(self) -> str:
        """What was held back."""
        gap, word = self._gap, self._word
        wide, before = (sum(cells(part) for part, _ in each) for each in (word, gap))
        verbatim = self._fenced or self._line.startswith((_BELOW, "```", "~~~"))
        room = 0 if verbatim else self._room
        if room and self._column and self._column + before + wide > room >= wide:
            self._column, before, gap = 0, 0, [("\n", "")]
        self._column += before + wide
        if self._room and self._column > self._room:  # the terminal has broken it
            self._column = (self._column - 1) % self._room + 1
        self._gap, self._word = [], []
        return "".join(
            f"\x1b[{style}m{text}\x1b[0m" if style else text
            for style, parts in groupby([*gap, *word], key=lambda each: each[1])
            for text in ["".join(part for part, _ in parts)]
        )


def table(rows: Sequence[Sequence[str]], room: int | None) -> list[str]:
    """Columns under the headings of the first row; those that are empty but for it are left out.

    Where a row is too long for a line, the last column is wrapped in its place; where that is too narrow,
    it goes below. Where the others do not fit either, the first one goes above them; and where they still do
    not, they follow one another with their headings.
    """
    full = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:] or rows)]
    rows = [[row[at] for at in full] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    if room is None or before + widths[-1] <= room:
        return [_row(row, widths) for row in rows]
    longest = max(cells(word) for row in rows for word in row[-1].split() or [""])
    if len(widths) > 1 and room - before >= max(min(_COLUMN, widths[-1]), longest):
        return [line for row in rows for line in _beside(row, widths, room, before)]
    if len(widths) > 1 and widths[-1] > _COLUMN // 2 and before - len(_GAP) <= room:
        return [line for row in rows for line in _below(row, widths, room)]
    if len(widths) > 2 and len(_BELOW) + sum(widths[1:]) + len(_GAP) * (len(widths) - 2) <= room:
        return [line for row in rows for line in _above(row, widths, room)]
    return [line for row in rows[1:] for line in _block(rows[0], row, room)]


def _row(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell + " " * (wide - cells(cell)) for cell, wide in zip(row, widths, strict=True)]
    return _GAP.join(padded).rstrip()


def _beside(row: Sequence[str], widths: Sequence[int], room: int, before: int) -> list[str]:
    first = _row([*row[:-1], "."], [*widths[:-1], 1]).removesuffix(".")
    return wrapped(row[-1], room, first, " " * before)


def _below(row: Sequence[str], widths: Sequence[int], room: int) -> list[str]:
    lines = [_row(row[:-1], widths[:-1])]
    return [*lines, *wrapped(row[-1], room, _BELOW, _BELOW)] if row[-1] else lines


def _above(row: Sequence[str], widths: Sequence[int], room: int) -> list[str]:
    return [*wrapped(row[0], room), _BELOW + _row(row[1:], widths[1:])]


def _block(heads: Sequence[str], row: Sequence[str], room: int) -> list[str]:
    named = [
        f"{head.lower().rstrip('?')} {cell}"
        for at, (head, cell) in enumerate(zip(heads, row, strict=True))
        if cell and 0 < at < (len(row) - _is_text(row[-1]))
    ]
    lines = wrapped(row[0], room)
    if about := ", ".join(each.replace(" ", _GLUE) for each in named):
        lines += [each.replace(_GLUE, " ") for each in wrapped(about, room, _BELOW, _BELOW)]
    if len(row) > 1 and _is_text(row[-1]):
        lines += wrapped(row[-1], room, _BELOW, _BELOW)
    return lines


def _is_text(cell: str) -> bool:
    """Whether it is understood without its heading."""
    return cells(cell) > _COLUMN // 2


def fields(rows: Sequence[tuple[str, str]], room: int | None) -> list[str]:
    """Names in a column of their own, their texts wrapped beside it."""
    wide = max((cells(name) for name, _ in rows), default=0) + 1
    indent = " " * (wide + 1)
    return [
        line
        for name, text in rows
        for line in wrapped(text, room, name + indent[cells(name) :], indent)
    ]


def fitting(parts: Sequence[str], room: int, gap: str = _GAP) -> str:
    """As many of the parts, with `gap` between, as a line holds; of the first its beginning at least."""
    line = parts[0]
    for part in parts[1:]:
        if cells(line) + len(gap) + cells(part) > room:
            break
        line += f"{gap}{part}"
    while cells(line) > room:
        line = line[:-1]
    return line
