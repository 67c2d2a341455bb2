"""An editing session, key by key, as llama.vim asks for it: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.api.shared import sources

LINES = 600  # of the file
ABOVE, BELOW = 256, 64  # lines around the cursor that are sent
CHUNK = 64  # lines of a chunk of context
ROTATES = 25  # keys after which the ring takes up another chunk
KEY, NEW_LINE, DELETED, SCREEN, JUMP, RING = (
    "key", "new line", "deleted above", "screen", "jump", "ring",
)  # fmt: skip
FIRST, WARM_UP = "first", "warm-up"  # of these nobody waits for the answer, or only once
KINDS = (KEY, NEW_LINE, DELETED, SCREEN, JUMP, RING)
_TYPED = """\
    def helper(self, value: int, other: str = '') -> dict[str, int]:
        result = {key: value for key in self._names}
        for name, count in sorted(result.items()):
            if count > value and name.startswith(other):
                self._found.append(name)
        return result
"""
# Sent when the ring has changed, so that the next key finds it read.
_SILENT: Mapping[str, Any] = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0}


@dataclass(frozen=True, slots=True)
class Step:
    """One request. kind: what led to it; fields: of /infill."""

    kind: str
    fields: Mapping[str, Any]


def session(keystrokes: int, ring: int, rng: random.Random, warm_ups: bool = True) -> list[Step]:
    """Return the requests of so many keystrokes, with a ring of so many chunks of context.

    warm_ups: llama.vim's request without an answer, each time the ring has changed.
    """
    editor = _Editor(rng)
    steps = [editor.step(FIRST)]
    for key in range(1, keystrokes + 1):
        rotated = ring > 0 and key % ROTATES == 0
        if rotated:
            editor.rotate(ring)
            if warm_ups:
                steps.append(Step(WARM_UP, {**_SILENT, "input_extra": editor.extra()}))
        kind = editor.edit()
        steps.append(editor.step(RING if rotated and kind == KEY else kind))
    return steps


def typed(count: int) -> str:
    """So many characters as somebody types them."""
    return (_TYPED * -(-count // len(_TYPED)))[:count]


def typing(count: int, rng: random.Random) -> list[Step]:
    """Return the requests of one who opens a file and types so many characters, nothing else."""
    editor = _Editor(rng)
    return [editor.step(FIRST), *(editor.step(editor.type()) for _ in range(count))]


class _Editor:
    """A file of LINES lines, a cursor, and what else was looked at."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        lines = "".join(sources()).split("\n")
        at = rng.randrange(len(lines) - LINES)
        self._lines = lines[at : at + LINES]
        self._others = [lines[i : i + CHUNK] for i in range(0, len(lines) - CHUNK, CHUNK)]
        self._ring: list[dict[str, str]] = []
        self._count = 0
        self._typed = 0
        self._row, self._column = LINES // 2, 0
        self._lines.insert(self._row, "")

    def step(self, kind: str) -> Step:
        row, column = self._row, self._column
        line = self._lines[row]
        below = "".join(text_line + "\n" for text_line in self._lines[row + 1 : row + 1 + BELOW])
        fields = {
            "input_prefix": "".join(
                f"{text_line}\n" for text_line in self._lines[max(0, row - ABOVE) : row]
            ),
            "prompt": line[:column],
            "input_suffix": f"{line[column:]}\n{below}",
            "input_extra": self.extra(),
        }
        return Step(kind, fields)

    def extra(self) -> Sequence[Mapping[str, str]]:
        return [*self._ring]

    def rotate(self, size: int) -> None:
        """Take up a chunk into the ring, and drop its oldest where it is full."""
        self._count += 1
        text = "\n".join(self._rng.choice(self._others)) + "\n"
        self._ring = [*self._ring, {"text": text, "filename": f"other{self._count}.py"}][-size:]

    def edit(self) -> str:
        """Of a hundred, ninety type; the others delete, scroll or go elsewhere. Says which it was."""
        chance = self._rng.random()
        if chance < 0.90:
            return self.type()
        if chance < 0.94 and self._row > 20:
            del self._lines[self._row - self._rng.randrange(5, 20)]
            self._row -= 1
            return DELETED
        if chance < 0.97:
            self._go(self._row + self._rng.choice((-30, 30, -8, 8)))
            return SCREEN
        self._go(self._rng.randrange(len(self._lines)))
        return JUMP

    def type(self) -> str:
        character = _TYPED[self._typed % len(_TYPED)]
        self._typed += 1
        line = self._lines[self._row]
        before, after = line[: self._column], line[self._column :]
        if character != "\n":
            self._lines[self._row] = before + character + after
            self._column += 1
            return KEY
        self._lines[self._row : self._row + 1] = [before, after]
        self._row, self._column = self._row + 1, 0
        return NEW_LINE

    def _go(self, row: int) -> None:
        self._row = max(5, min(len(self._lines) - 5, row))
        self._column = len(self._lines[self._row])
