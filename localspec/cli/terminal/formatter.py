"""Lay out click's help in lines that fit a terminal of any width."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import click

from localspec.cli.terminal import layout

_MAX_CELLS = 80  # longer lines are hard to read
_MIN_CELLS = 20


class Formatter(click.HelpFormatter):
    """A formatter that puts options beside their descriptions, or above them where a line is too short."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        columns = width or min(layout.width(sys.stdout) or _MAX_CELLS, max_width or _MAX_CELLS)
        super().__init__(indent_increment, max(columns, _MIN_CELLS))

    def write_text(self, text: str) -> None:
        """Write paragraphs. One whose first line is only \\b keeps its line breaks."""
        paragraphs = []
        indent = " " * self.current_indent
        for paragraph in re.split(r"\n\s*\n", text):
            begin, _, lines = paragraph.partition("\n")
            paragraph_text = lines if begin.strip() == "\b" else " ".join(paragraph.split())
            paragraphs.append("\n".join(layout.wrap(paragraph_text, self.width, indent, indent)))
        self.write("\n\n".join(paragraphs) + "\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write rows of a name and its description."""
        rows = list(rows)
        indent = " " * self.current_indent
        max_name_cells = min(col_max, self.width * 2 // 5)
        column_cells = min(max(len(name) for name, _ in rows), max_name_cells) + col_spacing
        margin = indent + " " * column_cells
        for name, text in rows:
            prefix = f"{indent}{name:{column_cells}}"
            if len(name) > column_cells - col_spacing:
                self.write("\n".join(layout.wrap(name, self.width, indent, margin)) + "\n")
                prefix = margin
            description = " ".join(text.split())
            self.write("\n".join(layout.wrap(description, self.width, prefix, margin)) + "\n")
