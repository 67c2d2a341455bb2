"""Draw Markdown on a terminal, line by line and while it is being generated.

`parse_inline` draws emphasis and code within a line, `wrapped` fits it into a window, `LineParser` tells what
a line is, `draw_table` and `Highlighter` draw tables and code, and `Screen` all of it.
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
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple

from localspec.cli.terminal import layout
from localspec.cli.terminal.fences import Fences, remove_indent

BOLD, ITALIC, CODE, DIM = "1", "3", "36", "2"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# A code span, a backslash that only keeps a mark from being one, or a run of marks.
_MARKS = re.compile(
    r"(?<!`)(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)|\\(?P<escaped>[*_`#~|])|\\.|"
    r"(?P<run>\*+|_+)"
)
_CJK = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff"
# `re` compiles these at their first use. That takes milliseconds, and most commands draw nothing.
_WORDS = rf" +|[{_CJK}]|[^ {_CJK}]+"
_IS_CJK = f"[{_CJK}]"
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
    drawn, runs, source_position = Text(), list[_Run](), 0
    for mark in _MARKS.finditer(source):
        if mark["run"]:
            neighbours = source[: mark.start()][-1:], source[mark.end() :][:1]
            roles = _drawn_roles(mark["run"], *neighbours)
            commonmark_roles = _commonmark_roles(mark["run"], *neighbours)
            place = len(drawn.plain) + mark.start() - source_position
            runs.append(_Run(place, mark["run"], *roles, *commonmark_roles))
            continue
        if mark["code"] and not os.environ.get("NO_COLOR"):
            code = mark["code"]
            if (
                code[0] == code[-1] == " " and code.strip()
            ):  # blanks that separate it from backticks
                code = code[1:-1]
            piece = styled(code, _join_styles(style, CODE))
        elif mark["escaped"]:
            piece = styled(mark["escaped"], style)
        else:
            continue
        drawn = drawn + styled(source[source_position : mark.start()], style) + piece
        source_position = mark.end()
    return _apply_emphasis(drawn + styled(source[source_position:], style), runs)


def _drawn_roles(run: str, before: str, after: str) -> tuple[bool, bool]:
    """Return whether a run of marks may open emphasis, and whether it may close it."""
    if len(run) > 3:
        return False, False
    opens = (
        bool(after.strip())
        and after != "/"
        and before not in tuple("/\\.)]}$@_")
        and not _continues_word(run, before)
        and not (_is_punctuation(after) and before.isalnum())
    )
    closes = (
        bool(before.strip())
        and before not in tuple("/\\")
        and not _continues_word(run, after)
        and not (_is_punctuation(before) and after.isalnum())
    )
    if len(run) == 1:
        opens = opens and (after.isalnum() or after in _SINGLE_OPENERS)
        closes = closes and before not in _NO_CLOSER_AFTER
    return opens, closes


def _commonmark_roles(run: str, before: str, after: str) -> tuple[bool, bool]:
    """Return the same as `_drawn_roles`, by the rules of CommonMark."""
    punctuation_before, punctuation_after = _is_punctuation(before), _is_punctuation(after)
    blank_before, blank_after = not before.strip(), not after.strip()
    left = not blank_after and (not punctuation_after or blank_before or punctuation_before)
    right = not blank_before and (not punctuation_before or blank_after or punctuation_after)
    if "*" in run:
        return left, right
    return left and (not right or punctuation_before), right and (not left or punctuation_after)


def _continues_word(run: str, neighbour: str) -> bool:
    """Return whether a neighbour of a run belongs to the same word.

    * may stand between characters of scripts that have no blanks between words.
    """
    return neighbour.isalnum() and ("_" in run or not re.match(_IS_CJK, neighbour))


def _is_punctuation(neighbour: str) -> bool:
    return bool(neighbour.strip()) and not neighbour.isalnum()


def _apply_emphasis(text: Text, runs: list[_Run]) -> Text:
    """Return the text with the emphasis that matching runs enclose, and without those runs."""
    marks: set[int] = set()  # positions of characters that are not drawn
    styles, open_runs, unmatched = text.styles, list[_Run](), list[_Run]()
    for run in runs:
        length = len(run.text)
        opener = next((other for other in reversed(open_runs) if other.text == run.text), None)
        if (
            run.closes
            and opener
            and _is_emphasis_text(text.plain[opener.at + length : run.at], run)
            and not _crosses_emphasis(unmatched, opener)
        ):
            del open_runs[open_runs.index(opener) :]
            unmatched.remove(opener)
            style = {1: ITALIC, 2: BOLD, 3: f"{BOLD};{ITALIC}"}[length]
            for position in range(opener.at, run.at):
                styles[position] = _join_styles(styles[position], style)
            marks |= {*range(opener.at, opener.at + length), *range(run.at, run.at + length)}
            continue
        unmatched.append(run)
        if run.opens:
            open_runs.append(run)
    kept = [position for position in range(len(text.plain)) if position not in marks]
    return Text("".join(text.plain[i] for i in kept), [styles[i] for i in kept])


def _crosses_emphasis(unmatched: list[_Run], opener: _Run) -> bool:
    """Return whether other emphasis begins before `opener` and ends after it.

    CommonMark sees no emphasis at `opener` then.
    """
    closing = {run.text[0] for run in unmatched if run.at > opener.at and run.might_close}
    return any(run.text[0] in closing for run in unmatched if run.at < opener.at and run.might_open)


def _is_emphasis_text(inside: str, run: _Run) -> bool:
    """Return whether the text between two runs may be emphasized.

    Names may not: __init__, or text from _private to snake_case_.
    """
    if "_" in run.text and ("_" in inside or (len(run.text) > 1 and inside.isidentifier())):
        return False
    return any(char.isalnum() for char in inside)


def _join_styles(*styles: str) -> str:
    return ";".join(filter(None, styles))


def paint(text: Text, start: int = 0, end: int | None = None) -> str:
    """Return characters `start` to `end` with their escape codes."""
    pieces = []
    characters = zip(text.plain[start:end], text.styles[start:end], strict=True)
    for style, group in groupby(characters, key=lambda each: each[1]):
        piece = "".join(char for char, _ in group)
        pieces.append(f"\x1b[{style}m{piece}\x1b[0m" if style else piece)
    return "".join(pieces)


def wrapped(text: Text, width: int, *, start: int = 0, hang: int = 0) -> list[str]:
    """Wrap text into rows of at most `width` columns.

    A wider word stays in one piece. The terminal breaks it, so that it can be copied. The first row begins
    at column `start`, and the others at column `hang`.
    """
    rows: list[str] = []
    # The column that the current row has reached, and its first and last character in the text.
    column, begin, end = start, 0, 0
    for word in re.finditer(_WORDS, text.plain):
        word_cells, is_blank = cells(word[0]), word[0].isspace()
        # A word that is too wide for any row goes to the beginning of a row.
        if not is_blank and column + word_cells > width and column > hang:
            rows.append(" " * hang * bool(rows) + paint(text, begin, end))
            column, begin = hang, word.start()
        column += word_cells
        if not is_blank or word.end() == len(text.plain):
            end = word.end()
    return [*rows, " " * hang * bool(rows) + paint(text, begin, end)]


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
    """A line-by-line parser of Markdown. `highlighter` colours the lines of the current code."""

    def __init__(self) -> None:
        self._fences = Fences()
        self._follows_blank = True  # the previous line was blank or code
        self._follows_code = False
        self.highlighter = Highlighter("")

    @property
    def in_code(self) -> bool:
        return self._fences.open

    def parse_next(self, line: str) -> Line:
        fences = self._fences
        kind = fences.classify_next(line)
        if kind == "code":
            return Line("code", fences.code(line))
        follows_code, self._follows_code = self._follows_code, kind == "close"
        self._follows_blank, follows_blank = (
            kind == "close" or not line.strip(),
            self._follows_blank,
        )
        plain = bool(os.environ.get("NO_COLOR"))  # without colours, fences mark the code
        if kind == "close":
            self.highlighter = Highlighter("")
            return Line("label" if plain else "none", "```", style=DIM)
        if kind == "open":
            self.highlighter = Highlighter(fences.info.partition(" ")[0].strip("{}."))
            # Colours show a language, whose name would read like a word of the text.
            is_shown = " " not in fences.info and self.highlighter.is_known
            return _make_label(
                fences, f"{'```' * plain}{'' if is_shown and not plain else fences.info}"
            )
        # Code by indentation follows an empty line and is in no list.
        code, expanded = remove_indent(line, _CODE_INDENT), line.expandtabs(_CODE_INDENT)
        is_indented = len(expanded) - len(code.expandtabs(_CODE_INDENT)) >= _CODE_INDENT
        parsed = _parse_text_line(expanded)
        if follows_blank and is_indented and line.strip() and not fences.in_list:
            self._follows_blank = True
            parsed = Line("code", code)
        return parsed._replace(apart=parsed.apart or follows_code)

    def parse_incomplete(self, line: str) -> Line:
        """Parse a line that is not complete yet, without changing the state."""
        copied_reader = copy.copy(self)
        copied_reader._fences = copy.copy(self._fences)
        return copied_reader.parse_next(line)


def _make_label(fences: Fences, label: str) -> Line:
    """Return the line above a code block: the text before the fence, and what is said of the block."""
    if not fences.before.strip():
        return Line("label" if label else "none", label, style=DIM, apart=True)
    item = _parse_text_line(f"{fences.before.expandtabs(_CODE_INDENT)}x")
    return Line("label", item.text[:-1] + label, item.first, item.hang, DIM)


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
    """Return the drawn rows for each line of a table, aligned if they fit and wrapped otherwise.

    No row is wider than `width` columns unless a single word is.
    """
    rows = [_split_cells(line) for line in lines]
    alignments = [cell.strip() for cell in rows.pop(1)]
    texts = [
        [parse_inline(cell.replace("\\|", "|").strip(), BOLD if index == 0 else "") for cell in row]
        for index, row in enumerate(rows)
    ]
    columns = zip_longest(*texts, fillvalue=Text())
    widths = [max(cells(text.plain) for text in column) for column in columns]
    if sum(widths) + len(_SEPARATOR) * (len(widths) - 1) <= width:
        rule = "─┼─".join("─" * column_width for column_width in widths)
        drawn_lines = [[paint(_align_row(row, widths, alignments))] for row in texts]
    else:
        rule = "─" * width
        drawn_lines = [wrapped(_join_cells(row), width, hang=_HANG_COLUMNS) for row in texts]
    return [drawn_lines[0], [f"\x1b[{DIM}m{rule}\x1b[0m"], *drawn_lines[1:]]


def _split_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    parts = [match[1] for match in _CELL.finditer(inner)]
    # The last bar ends the row, and the pattern also matches the end of the line.
    while len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return parts


def _align_row(row: list[Text], widths: list[int], alignments: list[str]) -> Text:
    parts = []
    for index, cell in enumerate(row):
        alignment = alignments[index] if index < len(alignments) else ""
        free = widths[index] - cells(cell.plain)
        left = 0
        if alignment.endswith(":"):
            left = free // 2 if alignment.startswith(":") else free
        # No blanks at the end of the line, because they would be copied with it.
        right = free - left if index < len(row) - 1 else 0
        parts.append(styled(" " * left) + cell + styled(" " * right))
    return _join_cells(parts)


def _join_cells(row: list[Text]) -> Text:
    joined = Text()
    for index, cell in enumerate(row):
        joined = joined + (styled(_SEPARATOR, DIM) if index else Text()) + cell
    return joined


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
        self._language, self._lines = language, list[str]()

    @cached_property
    def _lexer(self) -> Any:
        if not self._language:
            return None
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound

        try:
            return get_lexer_by_name(self._language)
        except ClassNotFound:
            return None

    @property
    def is_known(self) -> bool:
        """Whether the language has colours."""
        return self._lexer is not None

    def highlight_line(self, line: str) -> str:
        """Return the block's next complete line with escape codes."""
        if os.environ.get("NO_COLOR"):
            return line
        if self._lexer is None:
            return paint(styled(line, CODE))
        self._lines = [*self._lines[1 - _CONTEXT_LINES :], line]
        text = "\n".join(self._lines)
        line_start, styles = len(text) - len(line), [""] * len(line)
        for position, kind, value in self._lexer.get_tokens_unprocessed(f"{text}\n"):
            style = next((code for name, code in _STYLES.items() if str(kind).startswith(name)), "")
            start = max(position - line_start, 0)
            for index in range(start, min(position + len(value) - line_start, len(line))):
                styles[index] = style
        return paint(Text(line, styles))


MAX_COLUMNS = 100  # columns; longer lines are hard to read
_REDRAW_INTERVAL_S = 0.05  # between two drawings of the same line
_FENCE = ("```", "~~~")


class Screen:
    """The terminal with the text that was drawn so far. `close` ends the text.

    The line or table that is being generated is redrawn as it grows. Only rows that changed are redrawn, and
    only while all of them are on the screen. Rows that have scrolled away stay as they are, and the text
    continues after them. A complete line is drawn once and not changed again.
    """

    def __init__(self, beginning: str = "") -> None:
        """Create a screen. `beginning` is earlier text, which is not drawn, but whose last line continues."""
        self._reader = LineParser()
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
        self._draw_line(self._reader.parse_next(line), complete=True)
        self._reset_rows()

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
        text, columns = line.text[self._n_fixed :], shutil.get_terminal_size().columns
        width = max(min(columns - 1, MAX_COLUMNS), 10)
        if line.kind == "code":
            text = replace_lost_tabs(text, columns)
            return [self._reader.highlighter.highlight_line(text) if complete else text]
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
        lines, self._table = self._table, []
        if is_table(lines):
            self._reset_rows()
            self._needs_gap = True
        else:
            for line in lines:
                self._add_text_line(line)

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
        old_rows, n_same = self._rows, 0
        if not old_rows:
            if not self._n_fixed:
                sys.stdout.write("" if self._is_empty else "\n\n" if self._needs_gap else "\n")
            sys.stdout.write("\n".join(rows))
            self._is_empty = self._needs_gap = False
            self._rows = rows
            return True
        while n_same < min(len(rows), len(old_rows)) and rows[n_same] == old_rows[n_same]:
            n_same += 1
        if 0 < n_same == len(rows) < len(old_rows):
            n_same -= 1  # the cursor belongs at the end of the last row
        if n_same < len(old_rows):
            is_last = n_same == len(old_rows) - 1
            if is_last and n_same < len(rows) and rows[n_same].startswith(old_rows[n_same]):
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
        starts = [self._column, *[0] * (len(self._rows) - 1)][first:]
        places = zip(self._rows[first:], starts, strict=True)
        rows_up = sum(cursor_after(row, size.columns, start)[0] + 1 for row, start in places) - 1
        if rows_up >= size.lines - 1:
            return False
        up, right = f"\x1b[{rows_up}A" if rows_up else "", f"\x1b[{starts[0]}C" if starts[0] else ""
        sys.stdout.write(f"\r{up}{right}\x1b[J")
        return True
