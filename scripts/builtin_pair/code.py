"""Source files of the standard library, and holes in them to fill.

Licence: PSF.  A file is kept out of training when its name hashes into the held-out tenth, so the
split is the same on every machine.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
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
"""Shortest and longest stretch of code in one training row; 1 100 characters are about 350 tokens."""


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
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or path.stat().st_size < 1500:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found.append(SourceFile(relative.as_posix(), tuple(text.splitlines(keepends=True))))
    return found


def _is_well_known(name: str) -> bool:
    parts = name.removesuffix(".py").split("/")
    return any(".".join(parts[: n + 1]) in MODULES for n in range(len(parts)))


class Code:
    """An endless, seeded source of code windows and holes."""

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        self.files = [source for source in sources if not is_held_out(source.name)]
        self._weights = [
            len(source.lines) * (4.0 if _is_well_known(source.name) else 1.0)
            for source in self.files
        ]

    def window(self, rng: random.Random) -> list[str]:
        """Some consecutive lines of one file."""
        lines = rng.choices(self.files, self._weights)[0].lines
        budget = rng.randint(*WINDOW_CHARACTERS)
        start = rng.randrange(max(1, len(lines) - 8))
        window: list[str] = []
        for line in lines[start:]:
            if window and budget < len(line):
                break
            window.append(line[:300])
            budget -= len(line)
        return window

    def hole(self, rng: random.Random) -> Hole:
        """A gap as editors leave it: most often the rest of one line."""
        lines = self.window(rng)
        filled = [i for i, line in enumerate(lines) if line.strip()] or [0]
        at = rng.choice(filled)
        kind = rng.random()
        if kind < 0.72 or len(lines) < 6:
            return line_hole(lines, at, rng)
        if kind < 0.9:
            end = min(len(lines), at + rng.randint(1, 4))
            return Hole("".join(lines[:at]), "".join(lines[at:end]), "".join(lines[end:]))
        text = "".join(lines)
        start = rng.randrange(len(text))
        end = min(len(text), start + rng.randint(1, 80))
        return Hole(text[:start], text[start:end], text[end:])


def line_hole(lines: Sequence[str], at: int, rng: random.Random | None = None) -> Hole:
    """The rest of line `at`, from its first letter, or (with `rng`) sometimes from its middle."""
    line = lines[at]
    body = line.rstrip("\n")
    cut = len(body) - len(body.lstrip())
    if rng is not None and rng.random() < 0.35 and len(body) > cut + 1:
        cut = rng.randrange(cut, len(body))
    prefix = "".join(lines[:at]) + body[:cut]
    return Hole(prefix, body[cut:], line[len(body) :] + "".join(lines[at + 1 :]))
