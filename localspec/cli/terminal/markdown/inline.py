"""Emphasis and code within a line, and lines that fit a window.

Emphasis is what CommonMark sees, and of that only what stands around words: 2**3, src/**/*.py, *.c,
__init__ and f(*args) keep what they are written with.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

BOLD, ITALIC, CODE, DIM = "1", "3", "36", "2"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# A code span, a backslash that only keeps a mark from being one, or a run of marks.
_MARKS = re.compile(
    r"(?<!`)(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)|\\(?P<escaped>[*_`#~|])|\\.|"
    r"(?P<run>\*+|_+)"
)
_CJK = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff"
_WORDS = re.compile(rf" +|[{_CJK}]|[^ {_CJK}]+")
_IS_CJK = re.compile(f"[{_CJK}]")
_OPENS_SINGLE = "\"'“‘«([{<`$"  # *"so"* is emphasis, *.c is a pattern
_STOP = 8  # columns from one tab stop to the next
_NO_WORD_ENDS_SO = "/_-"  # test_* and lib/* neither


@dataclass(frozen=True, slots=True)
class Text:
    """What is drawn, and the style (parameters of an SGR code) of each character."""

    plain: str = ""
    styles: list[str] = field(default_factory=list)

    def __add__(self, other: Text) -> Text:
        return Text(self.plain + other.plain, self.styles + other.styles)

    def stripped(self) -> Text:
        """Without the blanks at its end."""
        kept = len(self.plain.rstrip(" "))
        return Text(self.plain[:kept], self.styles[:kept])


def styled(text: str, style: str = "") -> Text:
    """`text` as it is, in one style."""
    return Text(text, [style] * len(text))


class _Run(NamedTuple):
    """Marks of one kind: where in the drawn text they stand, and what they may do."""

    at: int
    text: str
    opens: bool
    closes: bool
    might_open: bool  # by CommonMark, which sees emphasis in more than is drawn so
    might_close: bool


def read(source: str, style: str = "") -> Text:
    """`source`, a line's text, without the marks that are drawn; `style` is that of all of it."""
    parts: list[Text] = []
    runs: list[_Run] = []
    at = done = 0  # in the drawn text; in the source
    for mark in _MARKS.finditer(source):
        if mark["run"]:
            before, after = source[: mark.start()][-1:], source[mark.end() :][:1]
            place = at + mark.start() - done
            may, might = _may(mark["run"], before, after), _might(mark["run"], before, after)
            runs.append(_Run(place, mark["run"], *may, *might))
            continue
        if mark["code"] and not os.environ.get("NO_COLOR"):
            drawn = styled(_code(mark["code"]), _joined(style, CODE))
        elif mark["escaped"]:
            drawn = styled(mark["escaped"], style)
        else:
            continue
        parts += [styled(source[done : mark.start()], style), drawn]
        at += mark.start() - done + len(drawn.plain)
        done = mark.end()
    parts.append(styled(source[done:], style))
    plain = "".join(part.plain for part in parts)
    styles = [each for part in parts for each in part.styles]
    return _emphasized(Text(plain, styles), runs)


def _code(inside: str) -> str:
    """As CommonMark has it: one blank on each side keeps backticks apart."""
    if inside[0] == inside[-1] == " " and inside.strip():
        return inside[1:-1]
    return inside


def _may(run: str, before: str, after: str) -> tuple[bool, bool]:
    """Whether a run of marks may open emphasis, and whether it may close it."""
    if len(run) > 3:
        return False, False
    opens = bool(after.strip()) and not _glued(run, before) and before not in tuple("/\\.)]}$@_")
    closes = bool(before.strip()) and not _glued(run, after) and before not in tuple("/\\")
    if _punctuation(after) and before.isalnum():
        opens = False
    if _punctuation(before) and after.isalnum():
        closes = False
    if len(run) == 1:
        opens = opens and (after.isalnum() or after in _OPENS_SINGLE)
        closes = closes and before not in _NO_WORD_ENDS_SO
    return opens and after != "/", closes


def _might(run: str, before: str, after: str) -> tuple[bool, bool]:
    """The same by CommonMark."""
    blank_before, blank_after = not before.strip(), not after.strip()
    left = not blank_after and (not _punctuation(after) or blank_before or _punctuation(before))
    right = not blank_before and (not _punctuation(before) or blank_after or _punctuation(after))
    if "*" in run:
        return left, right
    return left and (not right or _punctuation(before)), right and (not left or _punctuation(after))


def _glued(run: str, neighbour: str) -> bool:
    """Whether a word goes on there; * may stand in scripts that have no blanks between words."""
    return neighbour.isalnum() and ("_" in run or not _IS_CJK.match(neighbour))


def _punctuation(neighbour: str) -> bool:
    return bool(neighbour.strip()) and not neighbour.isalnum()


def _emphasized(text: Text, runs: list[_Run]) -> Text:
    """Without the runs that belong together, and what stands between them emphasized."""
    marks: set[int] = set()  # characters that are not drawn
    styles = text.styles
    opened: list[_Run] = []
    alone: list[_Run] = []  # those without another
    for run in runs:
        match = next((each for each in reversed(opened) if each.text == run.text), None)
        inside = text.plain[match.at + len(run.text) : run.at] if match else ""
        if run.closes and match and _is_text(inside, run) and not _crossed(alone, match):
            del opened[opened.index(match) :]
            alone.remove(match)
            style = {1: ITALIC, 2: BOLD, 3: f"{BOLD};{ITALIC}"}[len(run.text)]
            for at in range(match.at, run.at):
                styles[at] = _joined(styles[at], style)
            for each in (match, run):
                marks.update(range(each.at, each.at + len(each.text)))
            continue
        alone.append(run)
        if run.opens:
            opened.append(run)
    if not marks:
        return text
    kept = [at for at in range(len(text.plain)) if at not in marks]
    return Text("".join(text.plain[at] for at in kept), [styles[at] for at in kept])


def _crossed(alone: list[_Run], match: _Run) -> bool:
    """Whether other emphasis that begins before `match` ends after it: then CommonMark sees none here."""
    ended = {each.text[0] for each in alone if each.at > match.at and each.might_close}
    return any(each.text[0] in ended for each in alone if each.at < match.at and each.might_open)


def _is_text(inside: str, run: _Run) -> bool:
    """Names are no emphasis: __init__, nor what begins with _private and ends with snake_case_."""
    if "_" in run.text and ("_" in inside or (len(run.text) > 1 and inside.isidentifier())):
        return False
    return any(char.isalnum() for char in inside)


def _joined(*styles: str) -> str:
    return ";".join(filter(None, styles))


# ---------------------------------------------------------------------------- rows


def painted(text: Text, start: int = 0, end: int | None = None) -> str:
    """Characters `start` to `end` with their escape codes."""
    end = len(text.plain) if end is None else end
    out = []
    while start < end:
        style, stop = text.styles[start], start + 1
        while stop < end and text.styles[stop] == style:
            stop += 1
        piece = text.plain[start:stop]
        out.append(f"\x1b[{style}m{piece}\x1b[0m" if style else piece)
        start = stop
    return "".join(out)


def wrapped(text: Text, width: int, *, start: int = 0, hang: int = 0) -> list[str]:
    """Rows of whole words, at most `width` columns wide, except for a word that is wider: the terminal
    breaks that, so that it can be copied. The first row begins at column `start`, others at `hang`."""
    rows: list[str] = []
    column, begin, end = start, 0, 0  # of the row: its columns, from and to which character
    for word in _WORDS.finditer(text.plain):
        wide = cells(word[0])
        # a word that is too wide has no better place than the beginning of a row
        if not word[0].isspace() and column + wide > width and column > hang:
            rows.append(painted(text, begin, end))
            column, begin = hang, word.start()
        column += wide
        if not word[0].isspace() or word.end() == len(text.plain):
            end = word.end()
    rows.append(painted(text, begin, end))
    return [rows[0], *(" " * hang + row for row in rows[1:])]


def cells(text: str) -> int:
    """Columns that `text` takes on a terminal; escape codes take none."""
    bare = bare_text(text)
    return len(bare) if bare.isascii() else sum(map(_cell, bare))


def bare_text(text: str) -> str:
    """Without escape codes."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def laid(text: str, columns: int, start: int = 0) -> tuple[int, int]:
    """Where a terminal's cursor is after `text`, which it breaks where a row ends: rows down, column.

    Column `columns` is that of a cursor that waits for the next character, to go on below.
    """
    rows, column = 0, start
    for char in bare_text(text):
        wide = tab_width(column, columns) if char == "\t" else _cell(char)
        if column + wide > columns:
            rows, column = rows + 1, 0
        column += wide
    return rows, column


def tab_width(column: int, columns: int) -> int:
    """Columns to the next stop; 1 where the row has none, and a blank stands for the tab."""
    stop = (column // _STOP + 1) * _STOP
    return stop - column if stop < columns else 1


def tabs(text: str, columns: int) -> str:
    """`text` with blanks for the tabs that a terminal would lose, which are those at a row's end."""
    if "\t" not in text:
        return text
    out, column = "", 0
    for char in text:
        blank = char == "\t" and tab_width(column, columns) == 1
        out += " " if blank else char
        _, column = laid(char, columns, column)
    return out


@lru_cache(4096)
def _cell(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
