"""Draw the rows of a table, aligned if they fit and wrapped otherwise. No cell is left out."""

from __future__ import annotations

import re

from localspec.cli.terminal.markdown.inline import (
    BOLD,
    DIM,
    Text,
    cells,
    paint,
    parse_inline,
    styled,
)
from localspec.cli.terminal.markdown.inline import wrapped as wrap

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
        drawn_lines = [wrap(_join_cells(row), width, hang=_HANG_COLUMNS) for row in texts]
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
