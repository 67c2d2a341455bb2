"""From tokens' bytes to the text that is shown: no UTF-8 character and no stop string is ever cut, and
a completion for an editor ends by llama-server's two rules about lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Text that may be shown, and the (start, end) spans of it that came from the draft."""

    text: str
    drafted: list[tuple[int, int]]


class TextStream:
    """Collects pieces of tokens; `push` returns what can be shown so far.

    Bytes of an unfinished character wait for the rest of it; text that could be the beginning of a
    stop string waits until it is known not to be. `stopped` holds the stop string that was met.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._marks = ""  # one character per character of _text: "d" drafted, "t" the target's own
        self.stopped: str | None = None

    def push(self, piece: bytes, drafted: bool = False) -> Chunk:
        if self.stopped is not None:
            return Chunk("", [])
        text = self._decoder.decode(piece)
        self._text += text
        self._marks += ("d" if drafted else "t") * len(text)
        return self._take(self._ready())

    def flush(self) -> Chunk:
        """What is left at the end; half a character becomes U+FFFD."""
        if self.stopped is not None:
            return Chunk("", [])
        text = self._decoder.decode(b"", True)
        self._text += text
        self._marks += "t" * len(text)
        self._ready()  # the last character may complete a stop string
        return self._take(len(self._text))

    def _ready(self) -> int:
        """How many characters can be shown; cuts the text at the first stop string."""
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._text.find(stop)
            if at >= 0 and (first is None or (at, len(stop)) < first[:2]):
                first = (at, len(stop), stop)
        if first is not None:
            self.stopped = first[2]
            self._text = self._text[: first[0]]
            return first[0]
        return len(self._text) - self._held()

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _take(self, count: int) -> Chunk:
        text, self._text = self._text[:count], self._text[count:]
        marks, self._marks = self._marks[:count], self._marks[count:]
        return Chunk(text, _spans(marks))


def _spans(marks: str) -> list[tuple[int, int]]:
    spans = []
    start = marks.find("d")
    while start >= 0:
        end = marks.find("t", start)
        end = len(marks) if end < 0 else end
        spans.append((start, end))
        start = marks.find("d", end)
    return spans


class LineRules:
    """Ends an answer at a line that is indented too little, or at a newline after its time is over.

    indent: each line after the first must begin with so many blanks (an empty line has none).
    max_ms: once this time is over, the next newline is the end; the line that is being written is
    always finished, because half a line is of no use.
    """

    def __init__(self, indent: int | None, max_ms: int | None) -> None:
        self._indent = indent or 0
        self._max_ms = max_ms or 0
        self._blanks: int | None = None  # blanks so far at the beginning of a line; None: inside it

    @property
    def active(self) -> bool:
        return self._indent > 0 or self._max_ms > 0

    def cut(self, text: str, spent_ms: float) -> int | None:
        """Where in `text`, the newest piece, the answer ends; None: it goes on."""
        late = self._max_ms > 0 and spent_ms > self._max_ms
        for at, char in enumerate(text):
            if self._blanks is not None and char not in " \t":
                if self._blanks < self._indent:
                    return at
                self._blanks = None
            if char == "\n":
                if late:
                    return at + 1
                self._blanks = 0
            elif self._blanks is not None:
                self._blanks += 1
        return None
