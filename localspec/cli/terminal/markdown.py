"""Parse emphasis and code within a line, and wrap lines to the width of a window.

Emphasis follows CommonMark, but only around words: 2**3, src/**/*.py, *.c, __init__ and f(*args) keep
their marks.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from localspec.cli.terminal import layout

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
    return layout.cells(bare_text(text))


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
        char_cells = tab_width(column, columns) if char == "\t" else layout.cells(char)
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


# ------------------------------------------------------------------------ lines
# Classify a line of Markdown, depending on the lines before it.


_RULE = re.compile(r"^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
_HEADING = re.compile(r"^ {0,3}(?P<marks>#{1,6})[ \t]+(?P<text>.*?\S)(?:[ \t]+#+)?[ \t]*$")
_ITEM = re.compile(r"^(?P<indent> *)(?P<mark>[-*+]|\d{1,9}[.)])(?P<blank> +|$)(?P<text>.*)$")
_QUOTE = re.compile(r"^ {0,3}(?:> ?)+")
_CODE_INDENT = 4  # columns of indentation that make a line code
_UNDERLINED = f"{BOLD};4"


class Line(NamedTuple):
    """A line to draw.

    `first` is drawn before `text`, later rows begin at column `hang`, and both have the style. A line of kind
    "none" is not drawn. A line that is "apart" has an empty line before it.
    """

    kind: Literal["text", "code", "label", "rule", "blank", "none"]
    text: str = ""
    first: str = ""
    hang: int = 0
    style: str = ""
    apart: bool = False


class LineParser:
    """A line-by-line parser of Markdown."""

    def __init__(self) -> None:
        self._fences = Fences()
        self._follows_blank = True  # the previous line was blank or code
        self._follows_code = False

    @property
    def in_code(self) -> bool:
        return self._fences.open

    @property
    def language(self) -> str:
        """The language of the block that was opened last."""
        return self._fences.info.partition(" ")[0].strip("{}.")

    def parse_next(self, line: str) -> Line:
        """Parse the next line."""
        kind = self._fences.classify_next(line)
        if kind == "code":
            return Line("code", self._fences.code(line))
        follows_code, self._follows_code = self._follows_code, kind == "close"
        self._follows_blank, follows_blank = not line.strip(), self._follows_blank
        if kind == "close":
            self._follows_blank = True
            return Line("none")
        if kind == "open":
            return _make_label(self._fences)
        parsed = self._parse_indented_code(line, follows_blank) or _parse_text_line(
            line.expandtabs(_CODE_INDENT)
        )
        return parsed._replace(apart=parsed.apart or follows_code)

    def parse_incomplete(self, line: str) -> Line:
        """Parse a line that is not complete yet, without changing the state."""
        copied_reader = copy.copy(self)
        copied_reader._fences = copy.copy(self._fences)
        return copied_reader.parse_next(line)

    def _parse_indented_code(self, line: str, follows_blank: bool) -> Line | None:
        """Return code by indentation, which follows an empty line and is in no list, or None."""
        code = remove_indent(line, _CODE_INDENT)
        is_indented = (
            len(line.expandtabs(_CODE_INDENT)) - len(code.expandtabs(_CODE_INDENT)) >= _CODE_INDENT
        )
        if not (follows_blank and is_indented and line.strip()) or self._fences.in_list:
            return None
        self._follows_blank = True
        return Line("code", code)


def _make_label(fences: Fences) -> Line:
    """Return the line above a code block: the text before the fence, and the language."""
    if not fences.before.strip() and not fences.info:
        return Line("none", apart=True)
    if not fences.before.strip():
        return Line("label", fences.info, style=DIM, apart=True)
    item = _parse_text_line(f"{fences.before.expandtabs(_CODE_INDENT)}x")
    return Line("label", item.text[:-1] + fences.info, item.first, item.hang, DIM)


def _parse_text_line(line: str) -> Line:
    """Return a line outside of code. An incomplete line may still become a different kind."""
    if not line.strip():
        return Line("blank")
    if _RULE.match(line):
        return Line("rule", line.strip(), style=DIM)
    if match := _HEADING.match(line):
        return Line("text", match["text"], style=_UNDERLINED if match["marks"] == "#" else BOLD)
    if match := _ITEM.match(line):
        mark = match["mark"] if match["mark"][0].isdigit() else "•"
        first = f"{match['indent']}{mark}{match['blank'][:_CODE_INDENT]}"
        return Line("text", match["text"], first, len(first))
    if match := _QUOTE.match(line):
        return Line("text", line[match.end() :], match[0], match.end())
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    return Line("text", text, " " * indent, indent)


# ------------------------------------------------------------------------ tables
# Draw the rows of a table, aligned if they fit and wrapped otherwise. No cell is left out.


_DELIMITER = re.compile(r"^\s*\|(?:\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*$")
_CELL = re.compile(r"((?:(`+)(?!`).*?(?<!`)\2(?!`)|\\.|[^|])*)(?:\||$)", re.DOTALL)
_SEPARATOR = " │ "
_HANG_COLUMNS = 2  # indentation of wrapped rows


def may_be_row(line: str) -> bool:
    return line.lstrip().startswith("|")


def is_table(lines: list[str]) -> bool:
    """Return whether the second line is a delimiter row, which makes these lines a table."""
    return len(lines) > 1 and bool(_DELIMITER.match(lines[1]))


def draw_table(lines: list[str], width: int) -> list[list[str]]:
    """Return the drawn rows for each line of a table.

    No row is wider than `width` columns unless a single word is.
    """
    rows = [_split_cells(line) for line in lines]
    alignments = [cell.strip() for cell in rows[1]]
    texts = [
        [parse_inline(cell.replace("\\|", "|").strip(), BOLD if index == 0 else "") for cell in row]
        for index, row in enumerate(rows)
    ]
    del texts[1]
    count = max(map(len, texts))
    widths = [
        max((cells(row[index].plain) for row in texts if index < len(row)), default=0)
        for index in range(count)
    ]
    if sum(widths) + len(_SEPARATOR) * (count - 1) <= width:
        rule = "─┼─".join("─" * column_width for column_width in widths)
        drawn_lines = [[paint(_align_row(row, widths, alignments))] for row in texts]
    else:
        rule = "─" * width
        drawn_lines = [wrapped(_join_cells(row), width, hang=_HANG_COLUMNS) for row in texts]
    drawn_lines.insert(1, [f"\x1b[{DIM}m{rule}\x1b[0m"])
    return drawn_lines


def _split_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    parts = [match[1] for match in _CELL.finditer(inner)]
    # The last bar ends the row, and the pattern also matches the end of the line.
    while len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return parts


def _align_row(row: list[Text], widths: list[int], alignments: list[str]) -> Text:
    parts = []
    for index, (cell, width) in enumerate(zip(row, widths, strict=False)):
        alignment = alignments[index] if index < len(alignments) else ""
        free_columns = width - cells(cell.plain)
        left_padding = free_columns if alignment.endswith(":") else 0
        if alignment.endswith(":") and alignment.startswith(":"):
            left_padding = free_columns // 2
        # No blanks at the end of the line, because they would be copied with it.
        right_padding = free_columns - left_padding if index < len(row) - 1 else 0
        parts.append(styled(" " * left_padding) + cell + styled(" " * right_padding))
    return _join_cells(parts)


def _join_cells(row: list[Text]) -> Text:
    joined = Text()
    for index, cell in enumerate(row):
        joined = joined + (styled(_SEPARATOR, DIM) if index else Text()) + cell
    return joined


# ------------------------------------------------------------------------ fences
# Find the lines of a Markdown text that are code, for the screen, for `-x` and for copying.


TYPE_CHECKING = False
if TYPE_CHECKING:
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
        """Return what the next line is."""
        if self._fence:
            closing = _CLOSES.match(line)
            if not closing or not closing["fence"].startswith(self._fence):
                return "code"
            if _columns(closing["before"]) > self._indent + _MAX_FENCE_INDENT:
                return "code"
            self._fence = ""
            return "close"
        opening = _OPENS.match(line)
        if opening and (self.in_list or _columns(_indent(line)) <= _MAX_FENCE_INDENT):
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


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


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


# ------------------------------------------------------------------------ highlight
# Colour code line by line while it is being generated.


# Lines before a new one that are parsed again with it, because its colours depend on them (for example in
# a multi-line string).
_CONTEXT_LINES = 200
# Prefixes of token types of Pygments, with colours that are readable on light and dark terminals.
_STYLES = {
    "Token.Comment": DIM,
    "Token.Keyword": "35",
    "Token.Literal.Number": "36",
    "Token.Literal.String": "32",
    "Token.Name.Builtin": "36",
    "Token.Name.Class": "34",
    "Token.Name.Decorator": "33",
    "Token.Name.Exception": "33",
    "Token.Name.Function": "34",
    "Token.Name.Tag": "34",
    "Token.Operator.Word": "35",
}


class Highlighter:
    """Colours the lines of one block. `language` is the name after its fence."""

    def __init__(self, language: str) -> None:
        self._lines: list[str] = []
        self._plain = os.environ.get("NO_COLOR")
        self._lexer = None if self._plain else _lexer(language)

    def highlight_line(self, line: str) -> str:
        """Return the block's next complete line with escape codes."""
        if self._plain:
            return line
        if self._lexer is None:
            return paint(styled(line, CODE))
        self._lines = [*self._lines[1 - _CONTEXT_LINES :], line]
        return paint(self._coloured(line))

    def _coloured(self, line: str) -> Text:
        text = "\n".join(self._lines)
        line_start, styles = len(text) - len(line), [""] * len(line)
        tokens: Any = self._lexer.get_tokens_unprocessed(f"{text}\n") if self._lexer else ()
        for position, kind, value in tokens:
            style = next((code for name, code in _STYLES.items() if str(kind).startswith(name)), "")
            for index in range(
                max(position - line_start, 0), min(position + len(value) - line_start, len(line))
            ):
                styles[index] = style
        return Text(line, styles)


def _lexer(language: str) -> Any:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


# ------------------------------------------------------------------------ screen
# Draw pieces of Markdown on the terminal.
#
# The line or table that is being generated is redrawn as it grows. Only rows that changed are redrawn, and
# only while all of them are on the screen. Rows that have scrolled away stay as they are, and the text
# continues after them. A complete line is drawn once and not changed again.


MAX_COLUMNS = 100  # columns; longer lines are hard to read
_REDRAW_INTERVAL_S = 0.05  # between two drawings of the same line
_FENCE = ("```", "~~~")


class Screen:
    """The terminal with the text that was drawn so far. `close` ends the text."""

    def __init__(self, beginning: str = "") -> None:
        """Create a screen. `beginning` is earlier text, which is not drawn, but whose last line continues."""
        self._reader = LineParser()
        self._highlighter = Highlighter("")
        self._line = ""  # the line that is being generated
        self._table: list[str] = []  # lines that are a table, or may become one
        self._rows: list[str] = []  # rows of the line or table, as they are on the screen
        self._column = 0  # where the first of these rows begins
        self._n_shown = 0  # characters of the line, or lines of the table, that the rows show
        self._n_fixed = 0  # the same for earlier rows, which cannot be redrawn any more
        self._is_empty = True  # nothing has been drawn yet
        self._needs_gap = False  # an empty line precedes the next line
        self._has_text = False  # some text has arrived
        self._last_draw = 0.0
        *complete_lines, self._line = beginning.split("\n")
        for line in complete_lines:
            self._reader.parse_next(line)
        if self._reader.in_code:
            self._highlighter = Highlighter(self._reader.language)
        if self._line:
            self._n_fixed = len(self._reader.parse_incomplete(self._line).text)

    def text(self, piece: str) -> None:
        """Draw a piece of text, which must be harmless for a terminal."""
        self._has_text = True
        *complete_lines, self._line = (self._line + piece).split("\n")
        for line in complete_lines:
            self._add_line(line)
        now = time.monotonic()
        if now - self._last_draw >= _REDRAW_INTERVAL_S and not self._is_ambiguous():
            self._finish_table()
            self._draw_line(self._reader.parse_incomplete(self._line), complete=False)
            self._last_draw = now
        sys.stdout.flush()

    def close(self) -> None:
        if self._line and self._has_text:
            self._add_line(self._line)
        self._line = ""
        self._finish_table()
        if not self._is_empty:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _is_ambiguous(self) -> bool:
        """Return whether the next characters may turn the line into something quite different."""
        start = self._line.lstrip()
        if not start.strip("`~ "):
            return True
        return not self._reader.in_code and (start.startswith(_FENCE) or may_be_row(start))

    def _add_line(self, line: str) -> None:
        if not self._reader.in_code and may_be_row(line):
            self._table.append(line)
            if is_table(self._table):
                self._draw_table()
            elif len(self._table) > 1:
                self._add_text_line(self._table.pop(0))
        else:
            self._finish_table()
            self._add_text_line(line)

    def _add_text_line(self, line: str) -> None:
        """Draw a complete line that belongs to no table."""
        was_in_code = self._reader.in_code
        parsed = self._reader.parse_next(line)
        if was_in_code != self._reader.in_code:
            self._highlighter = Highlighter("" if was_in_code else self._reader.language)
        self._draw_line(parsed, complete=True)
        self._reset_rows()

    # ------------------------------------------------------------------ lines and tables

    def _draw_line(self, line: Line, *, complete: bool) -> None:
        if line.kind in ("blank", "none"):
            self._needs_gap = self._needs_gap or line.apart or line.kind == "blank"
            return
        self._needs_gap = self._needs_gap or (line.apart and not self._rows and not self._n_fixed)
        if not self._draw(self._line_rows(line, complete=complete)):
            self._continue_below()
            self._draw(self._line_rows(line, complete=complete))
        self._n_shown = len(line.text)

    def _line_rows(self, line: Line, *, complete: bool) -> list[str]:
        text, width = line.text[self._n_fixed :], self._max_columns()
        if line.kind == "code":
            text = replace_lost_tabs(text, shutil.get_terminal_size().columns)
            return [self._highlighter.highlight_line(text) if complete else text]
        if line.kind == "rule":
            return [paint(styled("─" * width, line.style))]
        hang = min(line.hang, width // 2)
        drawn = styled(text, line.style) if line.kind == "label" else parse_inline(text, line.style)
        if not self._n_fixed:
            mark = line.first.lstrip(" ")
            drawn = styled(mark.rjust(min(len(line.first), max(hang, len(mark))))) + drawn
        drawn = drawn.stripped() if complete else drawn
        return wrapped(drawn, width, start=self._column, hang=hang)

    def _draw_table(self) -> None:
        def rows() -> list[str]:
            table_rows = draw_table(self._table, shutil.get_terminal_size().columns - 1)
            return [row for line in table_rows[self._n_fixed :] for row in line]

        if not self._draw(rows()):
            self._continue_below()
            self._column = 0
            sys.stdout.write("\n")
            self._draw(rows())
        self._n_shown = len(self._table)

    def _finish_table(self) -> None:
        """End a table, because the next line is no row of it."""
        lines, self._table = self._table, []
        if is_table(lines):
            self._reset_rows()
            self._needs_gap = True
        else:
            for line in lines:
                self._add_text_line(line)

    def _max_columns(self) -> int:
        return max(min(shutil.get_terminal_size().columns - 1, MAX_COLUMNS), 10)

    # ------------------------------------------------------------------ rows

    def _reset_rows(self) -> None:
        """Leave the drawn rows unchanged from now on."""
        self._rows = []
        self._column = self._n_shown = self._n_fixed = 0

    def _continue_below(self) -> None:
        """Leave the drawn rows of the line unchanged, and draw its remainder at the cursor."""
        start = self._column if len(self._rows) == 1 else 0
        _, self._column = cursor_after(self._rows[-1], shutil.get_terminal_size().columns, start)
        self._rows = []
        self._n_fixed = self._n_shown

    def _draw(self, rows: list[str]) -> bool:
        """Replace the rows on the screen by `rows`. Returns False if they have scrolled away."""
        old_rows = self._rows
        if not old_rows:
            if not self._n_fixed:
                sys.stdout.write("" if self._is_empty else "\n\n" if self._needs_gap else "\n")
            sys.stdout.write("\n".join(rows))
            self._is_empty = self._needs_gap = False
            self._rows = rows
            return True
        n_same = 0
        while n_same < min(len(rows), len(old_rows)) and rows[n_same] == old_rows[n_same]:
            n_same += 1
        if 0 < n_same == len(rows) < len(old_rows):
            n_same -= 1  # the cursor belongs at the end of the last row
        if n_same < len(old_rows):
            if (
                n_same == len(old_rows) - 1
                and n_same < len(rows)
                and rows[n_same].startswith(old_rows[n_same])
            ):
                sys.stdout.write(rows[n_same][len(old_rows[n_same]) :])
            elif not self._erase_from(n_same):
                return False
            else:
                sys.stdout.write(rows[n_same])
            n_same += 1
        sys.stdout.write("".join(f"\n{row}" for row in rows[n_same:]))
        self._rows = rows
        return True

    def _erase_from(self, first: int) -> bool:
        """Erase all rows from `first` on. Returns False if that row is no longer on the screen."""
        size = shutil.get_terminal_size()
        starts = [self._column, *[0] * (len(self._rows) - 1)]
        rows_and_starts = zip(self._rows[first:], starts[first:], strict=True)
        rows_up = (
            sum(cursor_after(row, size.columns, start)[0] + 1 for row, start in rows_and_starts) - 1
        )
        if rows_up >= size.lines - 1:
            return False
        columns_right = starts[first]
        moves = (f"\x1b[{rows_up}A" if rows_up else "") + (
            f"\x1b[{columns_right}C" if columns_right else ""
        )
        sys.stdout.write(f"\r{moves}\x1b[J")
        return True
