"""Help as click writes it, in lines that fit a terminal of any width."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import click

from localspec.cli.terminal import layout

_WIDEST = 80  # cells; longer lines are hard to read
_NARROWEST = 20


class Formatter(click.HelpFormatter):
    """Options stand beside what they do, or above it where a line has no room for both."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        room = width or min(layout.width(sys.stdout) or _WIDEST, max_width or _WIDEST)
        super().__init__(indent_increment, max(room, _NARROWEST))

    def write_text(self, text: str) -> None:
        """Paragraphs; one that begins with a line of \\b alone keeps its lines."""
        written = []
        indent = " " * self.current_indent
        for paragraph in re.split(r"\n\s*\n", text):
            begin, _, lines = paragraph.partition("\n")
            shown = lines if begin.strip() == "\b" else " ".join(paragraph.split())
            written.append("\n".join(layout.wrapped(shown, self.width, indent, indent)))
        self.write("\n\n".join(written) + "\n")

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        rows = list(rows)
        indent = " " * self.current_indent
        most = min(col_max, self.width * 2 // 5)
        wide = min(max(len(name) for name, _ in rows), most) + col_spacing
        beside = indent + " " * wide
        for name, text in rows:
            first = f"{indent}{name:{wide}}"
            if len(name) > wide - col_spacing:
                self.write("\n".join(layout.wrapped(name, self.width, indent, beside)) + "\n")
                first = beside
            shown = " ".join(text.split())
            self.write("\n".join(layout.wrapped(shown, self.width, first, beside)) + "\n")
