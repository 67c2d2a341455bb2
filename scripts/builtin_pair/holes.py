"""Which lines of the standard library the evaluation blanks out; fixed in a file, found by seed."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .code import (
    Hole,
    SourceFile,
    code_rows,
    is_held_out,
    line_hole,
    lines_within,
    read_sources,
    standard_library,
)

BEFORE, AFTER = 500, 300
"""Characters of context around a hole; together about as many tokens as a row of training holds."""


@dataclass(frozen=True)
class Gap:
    """One line of one file."""

    file: str
    line: int
    """Counted from 1."""
    text: str
    """The line without indentation and line end: what should come back."""


def code_lines(source: SourceFile) -> Iterator[Gap]:
    """Lines that hold code, not only a comment or a piece of a longer string."""
    for row in code_rows(source):
        text = source.lines[row].strip()
        number = row + 1
        if 4 <= len(text) <= 90 and number > 5:
            yield Gap(source.name, number, text)


def choose(held_out: bool, count: int, seed: int) -> list[Gap]:
    """`count` lines, at most two of any file."""
    rng = random.Random(f"{seed}/{held_out}")
    sources = [s for s in read_sources(standard_library()) if is_held_out(s.name) == held_out]
    gaps: list[Gap] = []
    while len(gaps) < count:
        rng.shuffle(sources)
        for source in sources[: count - len(gaps)]:
            lines = list(code_lines(source))
            if lines:
                gaps.append(rng.choice(lines))
    return sorted(gaps, key=lambda gap: (gap.file, gap.line))


def load_gap(gap: Gap, root: Path, reach: float = 1.0) -> tuple[list[str], Hole] | None:
    """Return the file's lines and the hole, or None where this Python has other text on that line.

    `reach` widens the context around the hole.
    """
    try:
        lines = (root / gap.file).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return None
    at = gap.line - 1
    if at >= len(lines) or lines[at].strip() != gap.text:
        return None
    first = at - lines_within(lines[:at][::-1], round(BEFORE * reach))
    last = at + 1 + lines_within(lines[at + 1 :], round(AFTER * reach))
    return lines, line_hole(lines[first:last], at - first)


def parses(lines: list[str], at: int, filled: str) -> bool:
    """Whether the whole file still is Python with line `at` (from 0) replaced by `filled`."""
    line = lines[at]
    indentation = line[: len(line) - len(line.lstrip())]
    text = "".join([*lines[:at], indentation + filled + "\n", *lines[at + 1 :]])
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
