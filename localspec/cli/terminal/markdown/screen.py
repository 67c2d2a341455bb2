"""Pieces of Markdown → the terminal.

The line that is being written (or the table) is drawn again as it grows: only the rows that changed,
and only while they are all on the screen. What has scrolled away stays as it is, and the rest goes on
after it. A whole line is drawn once and left alone.
"""

from __future__ import annotations

import shutil
import sys
import time

from localspec.cli.terminal.markdown import tables
from localspec.cli.terminal.markdown.highlight import Highlighter
from localspec.cli.terminal.markdown.inline import laid, painted, read, styled, tabs, wrapped
from localspec.cli.terminal.markdown.lines import Line, Reader

WIDEST = 100  # columns; longer lines are hard to read
_REDRAW = 0.05  # seconds between two drawings of the same line
_FENCE = ("```", "~~~")


class Screen:
    """What is drawn so far; `close` ends it."""

    def __init__(self, begun: str = "") -> None:
        """`begun` is what was written before, and is not drawn: the text goes on in its last line."""
        self._reader = Reader()
        self._code = Highlighter("")
        self._line = ""  # the one that is being written
        self._table: list[str] = []  # lines that are a table, or may turn out to be one
        self._rows: list[str] = []  # of the line or table, as they stand on the screen
        self._column = 0  # where the first of them begins
        self._shown = 0  # how much of the line (characters) or table (lines) they show
        self._before = 0  # how much stands before them, and can no more be drawn again
        self._empty = True  # nothing is on the screen
        self._gap = False  # an empty line comes next
        self._came = False  # something to draw
        self._drawn = 0.0
        *whole, self._line = begun.split("\n")
        for line in whole:
            self._reader.take(line)
        if self._reader.in_code:
            self._code = Highlighter(self._reader.language)
        if self._line:
            self._before = len(self._reader.seen(self._line).text)

    def text(self, piece: str) -> None:
        """A piece that holds nothing harmful to a terminal."""
        self._came = True
        *whole, self._line = (self._line + piece).split("\n")
        for line in whole:
            self._whole(line)
        now = time.monotonic()
        if now - self._drawn >= _REDRAW and not self._held():
            self._end_table()
            self._draw_line(self._reader.seen(self._line), whole=False)
            self._drawn = now
        sys.stdout.flush()

    def close(self) -> None:
        if self._line and self._came:
            self._whole(self._line)
        self._line = ""
        self._end_table()
        if not self._empty:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _held(self) -> bool:
        """Whether the line may become something quite different with its next characters."""
        start = self._line.lstrip()
        if not start.strip("`~ "):
            return True
        return not self._reader.in_code and (start.startswith(_FENCE) or tables.may_be_row(start))

    def _whole(self, line: str) -> None:
        if not self._reader.in_code and tables.may_be_row(line):
            self._table.append(line)
            if tables.is_table(self._table):
                self._draw_table()
            elif len(self._table) > 1:
                self._plain(self._table.pop(0))
        else:
            self._end_table()
            self._plain(line)

    def _plain(self, line: str) -> None:
        """A whole line that belongs to no table."""
        inside = self._reader.in_code
        found = self._reader.take(line)
        if inside != self._reader.in_code:
            self._code = Highlighter("" if inside else self._reader.language)
        self._draw_line(found, whole=True)
        self._settle()

    # ------------------------------------------------------------------ lines and tables

    def _draw_line(self, line: Line, *, whole: bool) -> None:
        if line.kind in ("blank", "none"):
            self._gap = self._gap or line.apart or line.kind == "blank"
            return
        self._gap = self._gap or (line.apart and not self._rows and not self._before)
        if not self._draw(self._line_rows(line, whole=whole)):
            self._go_on()
            self._draw(self._line_rows(line, whole=whole))
        self._shown = len(line.text)

    def _line_rows(self, line: Line, *, whole: bool) -> list[str]:
        text, width = line.text[self._before :], self._width()
        if line.kind == "code":
            text = tabs(text, shutil.get_terminal_size().columns)
            return [self._code.whole(text) if whole else text]
        if line.kind == "rule":
            return [painted(styled("─" * width, line.style))]
        hang = min(line.hang, width // 2)
        found = styled(text, line.style) if line.kind == "label" else read(text, line.style)
        if not self._before:
            deep = line.first.lstrip(" ")
            found = styled(deep.rjust(min(len(line.first), max(hang, len(deep))))) + found
        found = found.stripped() if whole else found
        return wrapped(found, width, start=self._column, hang=hang)

    def _draw_table(self) -> None:
        def rows() -> list[str]:
            found = tables.drawn(self._table, shutil.get_terminal_size().columns - 1)
            return [row for line in found[self._before :] for row in line]

        if not self._draw(rows()):
            self._go_on()
            self._column = 0
            sys.stdout.write("\n")
            self._draw(rows())
        self._shown = len(self._table)

    def _end_table(self) -> None:
        """What follows is no row."""
        lines, self._table = self._table, []
        if tables.is_table(lines):
            self._settle()
            self._gap = True
        else:
            for line in lines:
                self._plain(line)

    def _width(self) -> int:
        return max(min(shutil.get_terminal_size().columns - 1, WIDEST), 10)

    # ------------------------------------------------------------------ rows

    def _settle(self) -> None:
        """What is drawn is left alone from now on."""
        self._rows = []
        self._column = self._shown = self._before = 0

    def _go_on(self) -> None:
        """Leave alone what is drawn of the line, and draw the rest where the cursor is."""
        start = self._column if len(self._rows) == 1 else 0
        _, self._column = laid(self._rows[-1], shutil.get_terminal_size().columns, start)
        self._rows = []
        self._before = self._shown

    def _draw(self, rows: list[str]) -> bool:
        """Bring the screen from `self._rows` to `rows`; False where that has scrolled away."""
        old = self._rows
        if not old:
            if not self._before:
                sys.stdout.write("" if self._empty else "\n\n" if self._gap else "\n")
            sys.stdout.write("\n".join(rows))
            self._empty = self._gap = False
            self._rows = rows
            return True
        same = 0
        while same < min(len(rows), len(old)) and rows[same] == old[same]:
            same += 1
        if 0 < same == len(rows) < len(old):
            same -= 1  # the cursor belongs at the end of the last row
        if same < len(old):
            if same == len(old) - 1 and same < len(rows) and rows[same].startswith(old[same]):
                sys.stdout.write(rows[same][len(old[same]) :])
            elif not self._erase(same):
                return False
            else:
                sys.stdout.write(rows[same])
            same += 1
        sys.stdout.write("".join(f"\n{row}" for row in rows[same:]))
        self._rows = rows
        return True

    def _erase(self, first: int) -> bool:
        """Erase from row `first` on; False where it is on the screen no more."""
        size = shutil.get_terminal_size()
        starts = [self._column, *[0] * (len(self._rows) - 1)]
        placed = zip(self._rows[first:], starts[first:], strict=True)
        up = sum(laid(row, size.columns, start)[0] + 1 for row, start in placed) - 1
        if up >= size.lines - 1:
            return False
        right = starts[first]
        moves = (f"\x1b[{up}A" if up else "") + (f"\x1b[{right}C" if right else "")
        sys.stdout.write(f"\r{moves}\x1b[J")
        return True
