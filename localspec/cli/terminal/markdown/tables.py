"""Rows of a table: aligned where they fit, else one below the other. No cell is left out."""

from __future__ import annotations

import re

from localspec.cli.terminal.markdown.inline import BOLD, DIM, Text, cells, painted, read, styled
from localspec.cli.terminal.markdown.inline import wrapped as wrap

_DELIMITER = re.compile(r"^\s*\|(?:\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*$")
_CELL = re.compile(r"((?:(`+)(?!`).*?(?<!`)\2(?!`)|\\.|[^|])*)(?:\||$)", re.DOTALL)
_BETWEEN = " │ "
_HANG = 2


def may_be_row(line: str) -> bool:
    return line.lstrip().startswith("|")


def is_table(lines: list[str]) -> bool:
    """Whether the second line says that these are rows of a table."""
    return len(lines) > 1 and bool(_DELIMITER.match(lines[1]))


def drawn(lines: list[str], width: int) -> list[list[str]]:
    """What each line of a table is drawn as, no row wider than `width` columns if words allow it."""
    rows = [_cells(line) for line in lines]
    sides = [cell.strip() for cell in rows[1]]
    texts = [
        [read(cell.replace("\\|", "|").strip(), BOLD if at == 0 else "") for cell in row]
        for at, row in enumerate(rows)
    ]
    del texts[1]
    count = max(map(len, texts))
    widths = [
        max((cells(row[at].plain) for row in texts if at < len(row)), default=0)
        for at in range(count)
    ]
    if sum(widths) + len(_BETWEEN) * (count - 1) <= width:
        rule = "─┼─".join("─" * each for each in widths)
        shown = [[painted(_aligned(row, widths, sides))] for row in texts]
    else:
        rule = "─" * width
        shown = [wrap(_joined(row), width, hang=_HANG) for row in texts]
    shown.insert(1, [f"\x1b[{DIM}m{rule}\x1b[0m"])
    return shown


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    found = [match[1] for match in _CELL.finditer(inner)]
    # a row's last bar ends it, and the end of the line is a match as well
    while len(found) > 1 and not found[-1].strip():
        found.pop()
    return found


def _aligned(row: list[Text], widths: list[int], sides: list[str]) -> Text:
    parts = []
    for at, (cell, width) in enumerate(zip(row, widths, strict=False)):
        side = sides[at] if at < len(sides) else ""
        free = width - cells(cell.plain)
        left = free if side.endswith(":") else 0
        if side.endswith(":") and side.startswith(":"):
            left = free // 2
        # nothing at the end of a line that one would copy
        right = free - left if at < len(row) - 1 else 0
        parts.append(styled(" " * left) + cell + styled(" " * right))
    return _joined(parts)


def _joined(row: list[Text]) -> Text:
    found = Text()
    for at, cell in enumerate(row):
        found = found + (styled(_BETWEEN, DIM) if at else Text()) + cell
    return found
