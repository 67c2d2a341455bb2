"""Lay out text for a terminal of any width: wrap it between words, and align it in columns.

Nothing here prints. `max_cells` is the width of a terminal in cells, or None for a pipe, where lines are not
wrapped because programs read them.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import compress, groupby
from typing import TextIO

_GAP = "  "  # between two columns
_BELOW = "    "  # indentation of a line that continues a row below it
_COMMAND = re.compile(r"localspec |eval |\S.*\| localspec ")
_COMMENT = re.compile(r" +# (?=[^'\"]*$)")  # a shell comment after a command
_QUOTED = re.compile(r""" "[^"]*"|'[^']*' """.strip())
_LINE_CONTINUATION = " \\"  # in a shell
_CJK_PIECE = r"[^\u1100-\U0010ffff]+|."  # compiled at its first use: that takes milliseconds
_GLUE = "\0"  # replaces blanks at which no line may end; printed text never contains it
# A longer text is not wrapped into a narrower column, but goes below its row.
_MIN_COLUMN_CELLS = 24
# Words that stay in one piece for copying: code between backquotes, and a command that ends a line.
_WORD = re.compile(
    r"(?:(?<=: )|(?<=→ )|^)localspec [^;\n]+$|[^\s`]*(?:`[^`\n]+`[^\s`]*)+|\S+", re.MULTILINE
)


def width(stream: TextIO) -> int | None:
    """Return the width of the terminal `stream` in cells, or None if it is no terminal."""
    if not stream.isatty():
        return None
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or 80
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def cells(text: str) -> int:
    """Return the number of cells that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_char_cells, text))


# wcwidth knows more scripts and joined emoji, but takes 50 ms to import, on the way of an answer.
@lru_cache(4096)
def _char_cells(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrap(
    text: str, max_cells: int | None, first_prefix: str = "", other_prefix: str = ""
) -> list[str]:
    """Return `text` as lines, beginning with `first_prefix`, or `other_prefix` after the first one.

    Lines of `text` stay separate and keep their indentation. A word that is wider than a line stays in one
    piece, so that the terminal breaks it and it can be copied. It gets less indentation if it fits then. A
    command on an indented line stays one command when it is copied, and its comment goes above it.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        words = line.lstrip(" ")
        indent = line[: len(line) - len(words)]
        prefix, other = (other_prefix if lines else first_prefix) + indent, other_prefix + indent
        if max_cells is None or not indent or not _COMMAND.match(words):
            lines += _wrap_line(words, max_cells, prefix, other)
            continue
        if cells(prefix) + cells(words) > max_cells and (comment := _COMMENT.search(words)):
            comment_text, words = words[comment.end() :], words[: comment.start()]
            lines += _wrap_line(f"# {comment_text}", max_cells, prefix, f"{other}# ")
            prefix = other
        glued_words = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _GLUE), words)
        line_cells = max_cells - len(_LINE_CONTINUATION)
        *head, tail = _wrap_line(glued_words, line_cells, prefix, f"{other}{_BELOW}")
        parts = [*(f"{part}{_LINE_CONTINUATION}" for part in head), tail]
        lines += [part.replace(_GLUE, " ") for part in parts]
    return lines


def _wrap_line(text: str, max_cells: int | None, first_prefix: str, other_prefix: str) -> list[str]:
    if max_cells is None or cells(first_prefix) + cells(text) <= max_cells:
        return [f"{first_prefix}{text}".rstrip()]
    lines, line, has_words = [], first_prefix, False
    for gap, word in _split_words(text, max_cells - cells(other_prefix)):
        if has_words and cells(line) + len(gap) + cells(word) > max_cells:
            lines.append(line)
            line, has_words = other_prefix, False
        if not has_words and cells(line) + cells(word) > max_cells:
            if line.strip():  # a label may stand on a line of its own
                lines.append(line)
            indents = (cells(other_prefix), len(_BELOW), 0)
            line = " " * next((n for n in indents if n <= max_cells - cells(word)), 0)
        line += f"{gap if has_words else ''}{word}"
        has_words = True
    return [finished_line.rstrip() for finished_line in (*lines, line)]


def _split_words(text: str, max_cells: int) -> Iterator[tuple[str, str]]:
    """Yield the words between which a line may be broken, with the blanks before each of them."""
    end = 0
    for match in _WORD.finditer(text):
        gap, word, end = text[end : match.start()], match[0], match.end()
        parts = [word] if cells(word) <= max_cells or " " not in word else re.split(" +", word)
        for part in parts:
            # Chinese and Japanese may be broken after any character.
            for piece in re.findall(_CJK_PIECE, part) if cells(part) > max_cells else [part]:
                yield gap, piece
                gap = ""
            gap = " "


class Flow:
    """Wraps text between words while it is being generated. Code stays as it is.

    Every call returns what is to be shown next. A word is held back until it is complete.
    """

    def __init__(self, max_cells: int | None) -> None:
        self._max_cells = max_cells
        self._column = 0  # cells of the current line that are shown
        self._line = ""  # the current line as it was generated
        self._fenced = False
        # Blanks before the held word, as pairs of text and style.
        self._gap: list[tuple[str, str]] = []
        self._word: list[tuple[str, str]] = []

    def text(self, piece: str, style: str = "") -> str:
        """Return the text to show for the next piece. `style` is the number of an escape code."""
        output = []
        for part in re.findall(r"\n| +|[^ \n\u1100-\U0010ffff]+|.", piece):
            if part == "\n":
                output.append(f"{self.release_word()}\n")
                self._fenced ^= self._line.lstrip().startswith(("```", "~~~"))
                self._line, self._column = "", 0
                continue
            if self._word and (part.isspace() or part >= "\u1100"):
                output.append(self.release_word())
            (self._gap if part.isspace() else self._word).append((part, style))
            self._line += part
        return "".join(output)

    def release_word(self) -> str:
        """Return the word that was held back."""
        gap, word = self._gap, self._word
        word_cells, gap_cells = (sum(cells(part) for part, _ in parts) for parts in (word, gap))
        verbatim = self._fenced or self._line.startswith((_BELOW, "```", "~~~"))
        max_cells = 0 if verbatim else self._max_cells or 0
        if self._column and self._column + gap_cells + word_cells > max_cells >= max(word_cells, 1):
            self._column, gap_cells, gap = 0, 0, [("\n", "")]
        self._column += gap_cells + word_cells
        if self._max_cells and self._column > self._max_cells:  # the terminal has wrapped the line
            self._column = (self._column - 1) % self._max_cells + 1
        self._gap, self._word = [], []
        return "".join(
            f"\x1b[{style}m{text}\x1b[0m" if style else text
            for style, parts in groupby([*gap, *word], key=lambda part: part[1])
            for text in ["".join(part for part, _ in parts)]
        )


def table(rows: Sequence[Sequence[str]], max_cells: int | None) -> list[str]:
    """Return rows as lines with aligned columns. The first row has the headings.

    Columns without any text below the heading are left out. If a row is too long, the last column is wrapped
    in its place, or goes below the row if its place is too narrow. If the other columns do not fit either,
    the first one goes above them. If they still do not fit, they follow one another with their headings.
    """
    filled = [any(row[index] for row in rows[1:] or rows) for index in range(len(rows[0]))]
    rows = [list(compress(row, filled)) for row in rows]
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    gaps = len(_GAP) * (len(widths) - 1)
    others = sum(widths[:-1]) + gaps
    if max_cells is None or others + widths[-1] <= max_cells:
        return [_align_row(row, widths) for row in rows]
    longest_word = max(cells(word) for row in rows for word in row[-1].split() or [""])
    last_cells = max(min(_MIN_COLUMN_CELLS, widths[-1]), longest_word)
    lines: list[str] = []
    for row in rows:
        if len(widths) > 1 and max_cells - others >= last_cells:
            prefix = _align_row([*row[:-1], "."], [*widths[:-1], 1]).removesuffix(".")
            lines += wrap(row[-1], max_cells, prefix, " " * others)
        elif _needs_no_heading(widths[-1]) and 0 <= others - len(_GAP) <= max_cells:
            lines.append(_align_row(row[:-1], widths[:-1]))
            lines += wrap(row[-1], max_cells, _BELOW, _BELOW) if row[-1] else []
        elif len(widths) > 2 and len(_BELOW) + sum(widths[1:]) + gaps - len(_GAP) <= max_cells:
            lines += [*wrap(row[0], max_cells), _BELOW + _align_row(row[1:], widths[1:])]
        elif row is not rows[0]:
            lines += _make_block(rows[0], row, max_cells)
    return lines


def _align_row(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True))
    return _GAP.join(padded).rstrip()


def _make_block(heads: Sequence[str], row: Sequence[str], max_cells: int) -> list[str]:
    last = row[-1] if len(row) > 1 and _needs_no_heading(cells(row[-1])) else ""
    described = zip(heads[1:], row[1 : -1 if last else None], strict=False)
    labelled_cells = [f"{head.lower().rstrip('?')} {cell}" for head, cell in described if cell]
    lines = wrap(row[0], max_cells)
    if details := ", ".join(part.replace(" ", _GLUE) for part in labelled_cells):
        lines += [part.replace(_GLUE, " ") for part in wrap(details, max_cells, _BELOW, _BELOW)]
    return lines + (wrap(last, max_cells, _BELOW, _BELOW) if last else [])


def _needs_no_heading(text_cells: int) -> bool:
    """Return whether a text of this length can be understood without its heading."""
    return text_cells > _MIN_COLUMN_CELLS // 2


def fields(rows: Sequence[tuple[str, str]], max_cells: int | None) -> list[str]:
    """Return pairs of a name and a text as lines, with the names in a column of their own."""
    indent = " " * (max((cells(name) for name, _ in rows), default=0) + 2)
    prefixes = ((name + indent[cells(name) :], text) for name, text in rows)
    return [line for prefix, text in prefixes for line in wrap(text, max_cells, prefix, indent)]


def join_fitting(parts: Sequence[str], max_cells: int, gap: str = _GAP) -> str:
    """Return the parts that fit into `max_cells` cells, joined by `gap`; at least a part of the first one."""
    line = parts[0]
    for part in parts[1:]:
        if cells(line) + len(gap) + cells(part) > max_cells:
            break
        line += f"{gap}{part}"
    while cells(line) > max_cells:
        line = line[:-1]
    return line
