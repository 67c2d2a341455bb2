"""A terminal's screen, with the commands that our output uses: what it shows, and what is copied from it.

It breaks long lines itself and knows which rows it broke, as terminals do: copying joins those.
Anything unknown is an error.
"""

from __future__ import annotations

import re

from wcwidth import wcwidth

_CODES = re.compile(r"\x1b\[[0-9;]*m|\x1b\[(\d*)([A-Z])")


class Row:
    def __init__(self) -> None:
        self.cells: list[str] = []  # a wide character has an empty cell after it
        self.goes_on = False  # the terminal broke the line here

    def put(self, column: int, text: str) -> None:
        self.cells += [" "] * (column + 1 - len(self.cells))
        self.cells[column] = text


class Screen:
    """A screen; rows that have scrolled away cannot be changed any more, but can be read."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.lines = lines
        self.rows = [Row()]
        self.row = 0
        self.column = 0  # `columns`: the next character goes to the next row

    def feed(self, output: str) -> Screen:
        at = 0
        while at < len(output):
            if output[at] == "\x1b":
                code = _CODES.match(output, at)
                assert code, repr(output[at : at + 12])
                if code[2]:  # and no colour
                    self._command(code[2], int(code[1] or 1))
                at = code.end()
            else:
                self._character(output[at])
                at += 1
        return self

    @property
    def top(self) -> int:
        """Return the first row that is on the screen."""
        return max(0, len(self.rows) - self.lines)

    def _command(self, letter: str, count: int) -> None:
        if letter == "A":
            self.row = max(self.top, self.row - count)
        elif letter == "C":
            self.column = min(self.columns - 1, self.column + count)
        elif letter in "JK":
            del self.rows[self.row].cells[self.column :]
            self.rows[self.row].goes_on = False
            if letter == "J":
                # The rows below become empty, but remain.
                for row in self.rows[self.row + 1 :]:
                    row.cells, row.goes_on = [], False
        else:
            raise AssertionError(f"unknown command {letter}")

    def _character(self, char: str) -> None:
        if char == "\n":
            self._down()
            self.column = 0
        elif char == "\r":
            self.column = 0
        elif char == "\t":
            # The end of a row is the last stop, and a pending wrap is cancelled.
            stop = (self.column // 8 + 1) * 8
            self.column = max(self.column, min(stop, self.columns - 1))
        else:
            self._put(char)

    def _put(self, char: str) -> None:
        width = wcwidth(char)
        assert width >= 0, f"{char!r} commands a terminal"
        row = self.rows[self.row]
        if width == 0:
            index = max(0, min(self.column, len(row.cells)) - 1)
            while index and not row.cells[index]:
                index -= 1
            row.put(index, (row.cells[index] if row.cells else "") + char)
            return
        if self.column + width > self.columns:
            row.goes_on = True
            self._down()
            self.column = 0
            row = self.rows[self.row]
        row.put(self.column, char)
        if width == 2:
            row.put(self.column + 1, "")
        self.column += width

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append(Row())

    @property
    def shown(self) -> list[str]:
        """Return each row as a person sees it."""
        return ["".join(row.cells).rstrip() for row in self.rows]

    @property
    def copied(self) -> str:
        """Return everything as selected with the mouse: rows that the terminal broke are one line."""
        return "".join("".join(row.cells) + "\n" * (not row.goes_on) for row in self.rows)
