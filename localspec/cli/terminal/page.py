"""A whole page of Markdown as rows, for a pager or for a terminal that nothing else is drawn on.

The lines of a paragraph are joined before they are wrapped: the author of a page did not know how wide the
reader's terminal is.
"""

from __future__ import annotations

import re

from localspec.cli.terminal import markdown
from localspec.cli.terminal.fences import Fences
from localspec.cli.terminal.markdown import (
    Highlighter,
    Line,
    LineParser,
    paint,
    parse_inline,
    replace_lost_tabs,
    styled,
    wrapped,
)

WIDEST = 100  # columns; longer lines of prose are hard to read
_BEGINS_A_BLOCK = re.compile(r"^ *([-*+] |\d{1,9}[.)] |#{1,6} |\||>|$)")


def joined(text: str) -> list[str]:
    """Return the lines of a page, with each paragraph and each list item on one line."""
    lines: list[str] = []
    fences, may_continue = Fences(), False
    for line in text.splitlines():
        is_text = fences.classify_next(line) == "text"
        if is_text and may_continue and not _BEGINS_A_BLOCK.match(line):
            lines[-1] += f" {line.strip()}"
            continue
        start = line.lstrip()
        may_continue = is_text and bool(start) and not start.startswith(("#", "|"))
        lines.append(line)
    return lines


def rows(text: str, columns: int) -> list[str]:
    """Return the rows that a terminal of so many columns shows for a page, with their escape codes.

    Only code, and a word that is wider than the terminal, may exceed `columns`.
    """
    width = max(min(columns - 1, WIDEST), 10)
    parser, shown, table = LineParser(), list[str](), list[str]()
    for line in [*joined(text), ""]:
        if not parser.in_code and markdown.may_be_row(line):
            table.append(line)
            continue
        if markdown.is_table(table):
            shown += [row for rows in markdown.draw_table(table, columns - 1) for row in rows]
        else:  # lines that only look like a table
            shown += table
        table = []
        shown += _rows(parser.parse_next(line), parser.highlighter, width, columns)
    while shown and not shown[-1]:
        shown.pop()
    return shown


def _rows(line: Line, code: Highlighter, width: int, columns: int) -> list[str]:
    if line.kind == "blank":
        return [""]
    if line.kind in ("none", "label"):  # the fences of code, which has blank lines around it
        return []
    if line.kind == "code":
        return [f"    {code.highlight_line(replace_lost_tabs(line.text, columns))}".rstrip()]
    if line.kind == "rule":
        return [paint(styled("─" * width, line.style))]
    hang = min(line.hang, width // 2)
    first = styled(line.first.lstrip(" ").rjust(min(len(line.first), hang)))
    return wrapped(first + parse_inline(line.text, line.style).stripped(), width, hang=hang)
