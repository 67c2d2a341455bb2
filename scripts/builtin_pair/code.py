"""Source files of the standard library, and holes in them to fill.

Licence: PSF.  A file is kept out of training when its name hashes into the held-out tenth, so the
split is the same on every machine.
"""

from __future__ import annotations

import hashlib
import io
import random
import sysconfig
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .popular import MODULES

SKIPPED_FOLDERS = frozenset(
    """__pycache__ test tests idlelib lib2to3 site-packages dist-packages turtledemo encodings pydoc_data
    config ensurepip tkinter distutils lib-dynload msilib""".split()
)
HELD_OUT_SHARE = 10
"""One file in this many is held out."""
WINDOW_CHARACTERS = (350, 1100)
"""Shortest and longest stretch of plain code in one row; 1 100 characters are about 320 tokens."""
BEFORE_CHARACTERS = (80, 560)
AFTER_CHARACTERS = (40, 340)
"""Least and most context around a hole; short ones are drawn more often, so that more holes fit a row."""
LINES_OF_HOLE = (2, 8)
FILE_POWER = 0.1
"""A file weighs its lines of code to this power: nearly evenly, as holes are chosen (`holes.choose`).

With 0.5 the smaller half of the files, a tenth of the lines, had a quarter of the tokens; now it has 43 %.
"""
WELL_KNOWN = 2.0
"""What a module that people ask about weighs more."""
LINE_SHARE, LINES_SHARE = 0.83, 0.13
"""Holes that are one line, and several lines; the rest are any stretch of characters."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """Path below the standard library, with forward slashes."""
    lines: tuple[str, ...]
    """With their line ends."""


@dataclass(frozen=True)
class Hole:
    """Code with a gap: the file reads prefix + middle + suffix."""

    prefix: str
    middle: str
    suffix: str


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(root: Path) -> list[SourceFile]:
    """Every Python file below `root` that people read, in a fixed order."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or path.stat().st_size < 1500:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        sources.append(SourceFile(relative.as_posix(), tuple(text.splitlines(keepends=True))))
    return sources


def _is_well_known(name: str) -> bool:
    parts = name.removesuffix(".py").split("/")
    return any(".".join(parts[: n + 1]) in MODULES for n in range(len(parts)))


def code_rows(source: SourceFile) -> list[int]:
    """Lines, counted from 0, that hold code and not only a comment or a piece of a longer string."""
    strings: set[int] = set()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO("".join(source.lines)).readline):
        if token.type == tokenize.STRING and token.start[0] != token.end[0]:
            strings.update(range(token.start[0] - 1, token.end[0]))
        elif token.type in {tokenize.NAME, tokenize.OP, tokenize.NUMBER}:
            code.add(token.start[0] - 1)
    return sorted(code - strings)


def lines_within(lines: Sequence[str], characters: int) -> int:
    """How many of the first `lines` fit in `characters`."""
    count = 0
    while count < len(lines) and characters >= len(lines[count]):
        characters -= len(lines[count])
        count += 1
    return count


def _skewed(rng: random.Random, least: int, most: int) -> int:
    """From `least` to `most`, half of the draws in the lowest quarter."""
    return least + round((most - least) * rng.random() ** 2)


class Code:
    """An endless, seeded source of code windows and holes."""

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        training = [
            (s, rows) for s in sources if not is_held_out(s.name) and (rows := code_rows(s))
        ]
        self.files = [source for source, _ in training]
        self._rows = [rows for _, rows in training]
        self._weights = [
            len(rows) ** FILE_POWER * (WELL_KNOWN if _is_well_known(source.name) else 1.0)
            for source, rows in training
        ]

    def _place(self, rng: random.Random) -> tuple[tuple[str, ...], int]:
        """Return a file's lines and one of its lines of code."""
        (number,) = rng.choices(range(len(self.files)), self._weights)
        return self.files[number].lines, rng.choice(self._rows[number])

    def window(self, rng: random.Random) -> list[str]:
        """Return some consecutive lines of one file."""
        lines, at = self._place(rng)
        count = max(1, lines_within(lines[at:], rng.randint(*WINDOW_CHARACTERS)))
        return [line[:300] for line in lines[at : at + count]]

    def hole(self, rng: random.Random, reach: float = 1.0) -> Hole:
        """Return a gap as editors leave it: most often the rest of one line.

        `reach` widens the most context there is around it.
        """
        (least_before, most_before), (least_after, most_after) = BEFORE_CHARACTERS, AFTER_CHARACTERS
        before = _skewed(rng, least_before, round(most_before * reach))
        after = _skewed(rng, least_after, round(most_after * reach))
        lines, at = self._place(rng)
        kind = rng.random()
        several = LINE_SHARE <= kind < LINE_SHARE + LINES_SHARE
        end = min(len(lines), at + (rng.randint(*LINES_OF_HOLE) if several else 1))
        first = at - lines_within(lines[:at][::-1], before)
        last = end + lines_within(lines[end:], after)
        if several or kind < LINE_SHARE:
            return line_hole(lines[first:last], at - first, end - at, None if several else rng)
        text = "".join(lines[first:last])
        start = rng.randrange(len(text))
        end = min(len(text), start + rng.randint(1, 80))
        return Hole(text[:start], text[start:end], text[end:])


def line_hole(
    lines: Sequence[str], at: int, count: int = 1, rng: random.Random | None = None
) -> Hole:
    """`count` lines from `at` on, from the first letter, or (with `rng`) sometimes from the middle."""
    body = "".join(lines[at : at + count]).rstrip("\n")
    cut = len(body) - len(body.lstrip())
    if rng is not None and rng.random() < 0.25 and len(body) > cut + 1:
        cut = rng.randrange(cut, len(body))
    prefix = "".join(lines[:at]) + body[:cut]
    return Hole(prefix, body[cut:], "".join(lines[at:])[len(body) :])
