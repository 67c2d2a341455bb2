"""Calls that a model writes as plain JSON, in a fenced block or as its whole answer, though its template has
another notation. Qwen2.5-Coder does so by habit.

Only what can be nothing else is a call: objects with the name of a tool that is offered and an object of
arguments, and no other text in the block. What is read is held back until that is certain or impossible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from localspec.daemon.completion.reply.calls import (
    Arguments,
    CallPiece,
    Fed,
    JsonCalls,
    Reader,
)

FENCE = "```"
_INFO = ("json", "tool_call", "tool_calls", "")  # what may stand behind the fence
_WORD = re.compile(r"[ \t]*(\w*)\s*", re.ASCII)
_MAX_LENGTH = 1 << 17  # characters that are held back
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class JsonBlock(Reader):
    """Reads what follows a fence, up to the next one; without `fenced`, an answer to its end."""

    def __init__(self, names: Collection[str], *, fenced: bool) -> None:
        super().__init__()
        self._names = names
        self._fenced = fenced
        self._at = 0  # how much of `raw` is read
        self._json: JsonCalls | None = None
        self._pieces: list[CallPiece] = []
        self._complete = False  # a call is whole, and nothing else has come since

    def feed(self, text: str) -> Fed:
        self.raw += text
        goes_on = True
        while goes_on and not (self.over or self.broken):
            if self._json is not None:
                goes_on = self._read_json(self._json)
            elif self._complete:
                goes_on = self._read_behind()
            else:
                goes_on = self._read_head()
        if len(self.raw) > _MAX_LENGTH:
            self.broken = self.broken or not self.over
        if not self.over or self.broken:
            return [], ""
        rest, self.raw = self.raw[self._at :], self.raw[: self._at]
        return self._pieces, rest

    def end(self) -> list[CallPiece]:
        self.broken = not self._complete
        return [] if self.broken else self._pieces

    def _read_head(self) -> bool:
        """Read what stands before the JSON."""
        if self._fenced:
            found = _WORD.match(self.raw)
            assert found is not None  # it matches nothing, too
            word, self._at = found[1].lower(), found.end()
            if self._at == len(self.raw):
                self.broken = not any(info.startswith(word) for info in _INFO)
                return False
            self.broken = word not in _INFO
        self._begin()
        return True

    def _begin(self) -> None:
        if self.raw[self._at] in "{[":
            self._json = JsonCalls(self._names.__contains__, names=self._names, keys=_KEYS)
        else:
            self.broken = True

    def _read_json(self, reader: JsonCalls) -> bool:
        pieces, rest = reader.feed(self.raw[self._at :])
        self._pieces += pieces
        self._at = len(self.raw) - len(rest)
        self.broken = reader.broken
        if reader.over and not reader.broken:
            self._json, self._complete = None, True
            self.broken = not _are_objects(self._pieces) or not reader.all_have_arguments
        return reader.over

    def _read_behind(self) -> bool:
        """Read what follows an object: the fence, another object, or something else."""
        while self._at < len(self.raw) and self.raw[self._at] in " \t\r\n,;":
            self._at += 1
        rest = self.raw[self._at : self._at + len(FENCE)]
        if not rest or (self._fenced and rest != FENCE and FENCE.startswith(rest)):
            return False
        if self._fenced and rest == FENCE:
            self._at += len(FENCE)
            self.over = True
        else:
            self._complete = False
            self._begin()
        return True


def _are_objects(pieces: list[CallPiece]) -> bool:
    """Return whether the arguments of every call are a JSON object."""
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, Arguments):
            texts[-1] += piece.text
        else:
            texts.append("")
    try:
        return all(isinstance(json.loads(text, strict=False), dict) for text in texts)
    except (ValueError, RecursionError):
        return False
