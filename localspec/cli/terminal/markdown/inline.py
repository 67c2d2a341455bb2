"""Parse emphasis and code within a line, and wrap lines to the width of a window.

Emphasis follows CommonMark, but only around words: 2**3, src/**/*.py, *.c, __init__ and f(*args) keep
their marks.
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
_SINGLE_OPENERS = "\"'“‘«([{<`$"  # *"so"* is emphasis, *.c is a pattern
_TAB_STOP = 8  # columns from one tab stop to the next
_NO_CLOSER_AFTER = "/_-"  # test_* and lib/* are patterns too


@dataclass(frozen=True, slots=True)
class Text:
    """Drawn text with the style of each character, as parameters of an SGR escape code."""

    plain: str = ""
    styles: list[str] = field(default_factory=list)

    def __add__(self, other: Text) -> Text:
        return Text(self.plain + other.plain, self.styles + other.styles)

    def stripped(self) -> Text:
        """Return the text without trailing blanks."""
        length = len(self.plain.rstrip(" "))
        return Text(self.plain[:length], self.styles[:length])


def styled(text: str, style: str = "") -> Text:
    """Return `text` in one style."""
    return Text(text, [style] * len(text))


class _Run(NamedTuple):
    """A run of equal marks: its position in the drawn text, and whether it may open or close emphasis.

    `might_open` and `might_close` follow CommonMark, which sees emphasis in more places than are drawn.
    """

    at: int
    text: str
    opens: bool
    closes: bool
    might_open: bool
    might_close: bool


def parse_inline(source: str, style: str = "") -> Text:
    """Return the drawn text of a source line, without the marks that are drawn as styles.

    `style` applies to all of it.
    """
    parts: list[Text] = []
    runs: list[_Run] = []
    drawn_position = source_position = 0
    for mark in _MARKS.finditer(source):
        if mark["run"]:
            previous_char, next_char = source[: mark.start()][-1:], source[mark.end() :][:1]
            place = drawn_position + mark.start() - source_position
            roles, commonmark_roles = (
                _drawn_roles(mark["run"], previous_char, next_char),
                _commonmark_roles(mark["run"], previous_char, next_char),
            )
            runs.append(_Run(place, mark["run"], *roles, *commonmark_roles))
            continue
        if mark["code"] and not os.environ.get("NO_COLOR"):
            drawn = styled(_strip_code(mark["code"]), _join_styles(style, CODE))
        elif mark["escaped"]:
            drawn = styled(mark["escaped"], style)
        else:
            continue
        parts += [styled(source[source_position : mark.start()], style), drawn]
        drawn_position += mark.start() - source_position + len(drawn.plain)
        source_position = mark.end()
    parts.append(styled(source[source_position:], style))
    plain = "".join(part.plain for part in parts)
    styles = [char_style for part in parts for char_style in part.styles]
    return _apply_emphasis(Text(plain, styles), runs)


def _strip_code(inside: str) -> str:
    """Return the text of a code span without one blank on each side, which separates backticks from it."""
    if inside[0] == inside[-1] == " " and inside.strip():
        return inside[1:-1]
    return inside


def _drawn_roles(run: str, previous_char: str, next_char: str) -> tuple[bool, bool]:
    """Return whether a run of marks may open emphasis, and whether it may close it."""
    if len(run) > 3:
        return False, False
    opens = (
        bool(next_char.strip())
        and not _continues_word(run, previous_char)
        and previous_char not in tuple("/\\.)]}$@_")
    )
    closes = (
        bool(previous_char.strip())
        and not _continues_word(run, next_char)
        and previous_char not in tuple("/\\")
    )
    if _is_punctuation(next_char) and previous_char.isalnum():
        opens = False
    if _is_punctuation(previous_char) and next_char.isalnum():
        closes = False
    if len(run) == 1:
        opens = opens and (next_char.isalnum() or next_char in _SINGLE_OPENERS)
        closes = closes and previous_char not in _NO_CLOSER_AFTER
    return opens and next_char != "/", closes


def _commonmark_roles(run: str, previous_char: str, next_char: str) -> tuple[bool, bool]:
    """Return the same as `_drawn_roles`, by the rules of CommonMark."""
    blank_before, blank_after = not previous_char.strip(), not next_char.strip()
    left_flanking = not blank_after and (
        not _is_punctuation(next_char) or blank_before or _is_punctuation(previous_char)
    )
    right_flanking = not blank_before and (
        not _is_punctuation(previous_char) or blank_after or _is_punctuation(next_char)
    )
    if "*" in run:
        return left_flanking, right_flanking
    return (
        left_flanking and (not right_flanking or _is_punctuation(previous_char)),
        right_flanking and (not left_flanking or _is_punctuation(next_char)),
    )


def _continues_word(run: str, neighbour: str) -> bool:
    """Return whether a neighbour of a run belongs to the same word.

    * may stand between characters of scripts that have no blanks between words.
    """
    return neighbour.isalnum() and ("_" in run or not _IS_CJK.match(neighbour))


def _is_punctuation(neighbour: str) -> bool:
    return bool(neighbour.strip()) and not neighbour.isalnum()


def _apply_emphasis(text: Text, runs: list[_Run]) -> Text:
    """Return the text with the emphasis that matching runs enclose, and without those runs."""
    marks: set[int] = set()  # positions of characters that are not drawn
    styles = text.styles
    open_runs: list[_Run] = []
    unmatched: list[_Run] = []  # runs without a counterpart
    for run in runs:
        opener = next(
            (mark_run for mark_run in reversed(open_runs) if mark_run.text == run.text), None
        )
        inside = text.plain[opener.at + len(run.text) : run.at] if opener else ""
        if (
            run.closes
            and opener
            and _is_emphasis_text(inside, run)
            and not _crosses_emphasis(unmatched, opener)
        ):
            del open_runs[open_runs.index(opener) :]
            unmatched.remove(opener)
            style = {1: ITALIC, 2: BOLD, 3: f"{BOLD};{ITALIC}"}[len(run.text)]
            for position in range(opener.at, run.at):
                styles[position] = _join_styles(styles[position], style)
            for mark_run in (opener, run):
                marks.update(range(mark_run.at, mark_run.at + len(mark_run.text)))
            continue
        unmatched.append(run)
        if run.opens:
            open_runs.append(run)
    if not marks:
        return text
    kept_positions = [position for position in range(len(text.plain)) if position not in marks]
    return Text(
        "".join(text.plain[position] for position in kept_positions),
        [styles[position] for position in kept_positions],
    )


def _crosses_emphasis(unmatched: list[_Run], opener: _Run) -> bool:
    """Return whether other emphasis begins before `opener` and ends after it.

    CommonMark sees no emphasis at `opener` then.
    """
    closing_marks = {run.text[0] for run in unmatched if run.at > opener.at and run.might_close}
    return any(
        run.text[0] in closing_marks for run in unmatched if run.at < opener.at and run.might_open
    )


def _is_emphasis_text(inside: str, run: _Run) -> bool:
    """Return whether the text between two runs may be emphasized.

    Names may not: __init__, or text from _private to snake_case_.
    """
    if "_" in run.text and ("_" in inside or (len(run.text) > 1 and inside.isidentifier())):
        return False
    return any(char.isalnum() for char in inside)


def _join_styles(*styles: str) -> str:
    return ";".join(filter(None, styles))


# ---------------------------------------------------------------------------- rows


def paint(text: Text, start: int = 0, end: int | None = None) -> str:
    """Return characters `start` to `end` with their escape codes."""
    end = len(text.plain) if end is None else end
    pieces = []
    while start < end:
        style, stop = text.styles[start], start + 1
        while stop < end and text.styles[stop] == style:
            stop += 1
        piece = text.plain[start:stop]
        pieces.append(f"\x1b[{style}m{piece}\x1b[0m" if style else piece)
        start = stop
    return "".join(pieces)


def wrapped(text: Text, width: int, *, start: int = 0, hang: int = 0) -> list[str]:
    """Wrap text into rows of at most `width` columns.

    A wider word stays in one piece. The terminal breaks it, so that it can be copied. The first row begins
    at column `start`, and the others at column `hang`.
    """
    rows: list[str] = []
    # The column that the current row has reached, and its first and last character in the text.
    column, begin, end = start, 0, 0
    for word in _WORDS.finditer(text.plain):
        word_cells = cells(word[0])
        # A word that is too wide for any row goes to the beginning of a row.
        if not word[0].isspace() and column + word_cells > width and column > hang:
            rows.append(paint(text, begin, end))
            column, begin = hang, word.start()
        column += word_cells
        if not word[0].isspace() or word.end() == len(text.plain):
            end = word.end()
    rows.append(paint(text, begin, end))
    return [rows[0], *(" " * hang + row for row in rows[1:])]


def cells(text: str) -> int:
    """Return the columns that `text` takes on a terminal, where escape codes take none."""
    plain_text = bare_text(text)
    return len(plain_text) if plain_text.isascii() else sum(map(_char_cells, plain_text))


def bare_text(text: str) -> str:
    """Return `text` without escape codes."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def cursor_after(text: str, columns: int, start: int = 0) -> tuple[int, int]:
    """Return where a terminal's cursor is after `text`: the number of rows down, and the column.

    The terminal wraps the text at `columns`. A cursor in column `columns` waits for the next character
    before it moves to the next row.
    """
    rows, column = 0, start
    for char in bare_text(text):
        char_cells = tab_width(column, columns) if char == "\t" else _char_cells(char)
        if column + char_cells > columns:
            rows, column = rows + 1, 0
        column += char_cells
    return rows, column


def tab_width(column: int, columns: int) -> int:
    """Return the columns to the next tab stop.

    The result is 1 if the row has no further stop. Then a blank replaces the tab.
    """
    stop = (column // _TAB_STOP + 1) * _TAB_STOP
    return stop - column if stop < columns else 1


def replace_lost_tabs(text: str, columns: int) -> str:
    """Return `text` with blanks for those tabs that a terminal would lose, at the end of a row."""
    if "\t" not in text:
        return text
    result, column = "", 0
    for char in text:
        is_lost = char == "\t" and tab_width(column, columns) == 1
        result += " " if is_lost else char
        _, column = cursor_after(char, columns, column)
    return result


@lru_cache(4096)
def _char_cells(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
