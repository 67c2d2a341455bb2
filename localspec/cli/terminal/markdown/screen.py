"""Draw pieces of Markdown on the terminal.

The line or table that is being generated is redrawn as it grows. Only rows that changed are redrawn, and
only while all of them are on the screen. Rows that have scrolled away stay as they are, and the text
continues after them. A complete line is drawn once and not changed again.
"""

from __future__ import annotations

import shutil
import sys
import time

from localspec.cli.terminal.markdown import tables
from localspec.cli.terminal.markdown.highlight import Highlighter
from localspec.cli.terminal.markdown.inline import (
    cursor_after,
    paint,
    parse_inline,
    replace_lost_tabs,
    styled,
    wrapped,
)
from localspec.cli.terminal.markdown.lines import Line, LineParser

WIDEST = 100  # columns; longer lines are hard to read
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
            self._reader.take(line)
        if self._reader.in_code:
            self._highlighter = Highlighter(self._reader.language)
        if self._line:
            self._n_fixed = len(self._reader.seen(self._line).text)

    def text(self, piece: str) -> None:
        """Draw a piece of text, which must be harmless for a terminal."""
        self._has_text = True
        *complete_lines, self._line = (self._line + piece).split("\n")
        for line in complete_lines:
            self._add_line(line)
        now = time.monotonic()
        if now - self._last_draw >= _REDRAW_INTERVAL_S and not self._is_ambiguous():
            self._finish_table()
            self._draw_line(self._reader.seen(self._line), complete=False)
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
        return not self._reader.in_code and (start.startswith(_FENCE) or tables.may_be_row(start))

    def _add_line(self, line: str) -> None:
        if not self._reader.in_code and tables.may_be_row(line):
            self._table.append(line)
            if tables.is_table(self._table):
                self._draw_table()
            elif len(self._table) > 1:
                self._add_text_line(self._table.pop(0))
        else:
            self._finish_table()
            self._add_text_line(line)

    def _add_text_line(self, line: str) -> None:
        """Draw a complete line that belongs to no table."""
        was_in_code = self._reader.in_code
        parsed = self._reader.take(line)
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
            return [self._highlighter.whole(text) if complete else text]
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
            table_rows = tables.draw_table(self._table, shutil.get_terminal_size().columns - 1)
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
        if tables.is_table(lines):
            self._reset_rows()
            self._needs_gap = True
        else:
            for line in lines:
                self._add_text_line(line)

    def _max_columns(self) -> int:
        return max(min(shutil.get_terminal_size().columns - 1, WIDEST), 10)

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
