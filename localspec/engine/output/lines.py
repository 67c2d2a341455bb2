"""Where a completion for an editor ends: llama-server's two rules about lines."""

from __future__ import annotations


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
