"""Markdown on a terminal while it is being written.

Text comes in pieces; a block (paragraph, list, code) that is complete is drawn once and left alone,
the one being written is drawn again with every piece: only the lines that changed, and only as far up
as the screen goes. Lines that have scrolled away stay as they were.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
from typing import TYPE_CHECKING, ClassVar

from localspec.cli.terminal.extract import FENCE
from localspec.errors import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDEST = 100  # columns; longer lines are hard to read
_REDRAW = 0.05  # seconds between two drawings of the same block
_BEFORE_END = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """What is drawn so far; `close` ends it."""

    def __init__(self) -> None:
        self._block = ""
        self._lines: list[str] = []  # of the block, as they stand on the screen
        self._first = True
        self._drawn = 0.0

    def text(self, piece: str) -> None:
        """A piece that holds nothing harmful to a terminal."""
        self._block += piece
        finished, self._block = split(self._block)
        for block in finished:
            self._finish(block)
        now = time.monotonic()
        if self._block.strip() and now - self._drawn >= _REDRAW:
            self._draw(self._block)
            self._drawn = now

    def close(self) -> None:
        if self._block.strip():
            self._finish(self._block)
        self._block = ""
        sys.stdout.flush()

    def _finish(self, block: str) -> None:
        self._draw(block)
        sys.stdout.write("\n")
        self._lines = []
        self._first = False

    def _draw(self, block: str) -> None:
        """Bring the screen from `self._lines` to the lines of `block`."""
        size = shutil.get_terminal_size()
        lines = drawn(block, min(size.columns - 1, WIDEST))
        if not self._first:
            lines.insert(0, "")
        same = 0
        while same < min(len(lines), len(self._lines)) and lines[same] == self._lines[same]:
            same += 1
        old = self._lines
        rows = [_rows(line, size.columns) for line in old]
        while same < len(old) and sum(rows[same:]) > size.lines - 1:
            same += 1  # it has scrolled away
        if 0 < same == len(lines) < len(old):
            same -= 1  # the cursor belongs at the end of the last line
        out = []
        if old and same < len(old):
            up = sum(rows[same:]) - 1
            out.append("\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J")
        elif old and same < len(lines):
            out.append("\n")
        out.append("\n".join(lines[same:]))
        sys.stdout.write("".join(out))
        sys.stdout.flush()
        self._lines = lines if same <= len(lines) else old


def _rows(line: str, columns: int) -> int:
    """How many rows of the screen a line takes, also after the window became narrower."""
    from rich.cells import cell_len

    return max(1, -(-cell_len(_ESCAPES.sub("", line)) // columns))


def split(text: str) -> tuple[list[str], str]:
    """The blocks that nothing can change any more, and the rest.

    A block ends at a blank line outside a fence, once a line follows that is not indented: an
    indented one goes on with a list.
    """
    blocks: list[str] = []
    current: list[str] = []
    fence = ""
    blank = False
    lines = text.split("\n")
    for line in lines[:-1]:
        if blank and line.strip() and not line[0].isspace():
            blocks.append("\n".join(current))
            current = []
        match = FENCE.match(line)
        if match and not fence:
            fence = match["fence"]
        elif match and fence and match["fence"].startswith(fence) and not match["info"].strip():
            fence = ""
        blank = not fence and not line.strip()
        if line.strip() or current:
            current.append(line)
    return blocks, "\n".join([*current, lines[-1]])


_console: Console | None = None
_buffer = io.StringIO()


def drawn(block: str, width: int) -> list[str]:
    """The lines of a block, with escape codes, none wider than `width`."""
    console = _make_console()
    console.width = max(width, 10)
    from rich.markdown import Heading, Markdown

    class LeftHeading(Heading):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            self.text.justify = "left"
            yield self.text

    class Document(Markdown):
        elements: ClassVar = {**Markdown.elements, "heading_open": LeftHeading}

    _buffer.seek(0)
    _buffer.truncate()
    console.print(Document(block, code_theme="ansi_dark", hyperlinks=False))
    lines = [_trimmed(_harmless(line)) for line in _buffer.getvalue().split("\n")]
    while lines and not _ESCAPES.sub("", lines[-1]):
        lines.pop()
    return lines or [""]


def _harmless(line: str) -> str:
    """Markdown has names for characters (&#8238;); what stands between our escape codes is ours."""
    parts = _ESCAPES.split(line)
    codes = [*_ESCAPES.findall(line), ""]
    return "".join(visible(part) + code for part, code in zip(parts, codes, strict=True))


def _trimmed(line: str) -> str:
    """Without the blanks that fill a line: copied text should not have them."""
    short = _BEFORE_END.sub("", line)
    return f"{short}\x1b[0m" if "\x1b" in short else short


def _make_console() -> Console:
    global _console
    if _console is None:
        from rich.console import Console
        from rich.theme import Theme

        _console = Console(
            file=_buffer,
            force_terminal=True,
            no_color=bool(os.environ.get("NO_COLOR")),
            highlight=False,
            legacy_windows=False,
            # rich paints black behind code, which is a bar on a light terminal
            theme=Theme({"markdown.code": "cyan", "markdown.code_block": "cyan"}),
        )
    return _console
