"""Read calls that a model writes as plain JSON though its template has another notation.

They come in a fenced block or as the whole answer. Qwen2.5-Coder does this by habit. Only what can be
nothing else is a call: objects with the name of an offered tool and an object of arguments, and no other
text in the block. The text is held back until this is certain or impossible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from localspec.chat.notations.call_readers import (
    CallPiece,
    CallReader,
    JsonCalls,
    ReadResult,
)
from localspec.protocol.pieces import Arguments

FENCE = "```"
_INFO_STRINGS = ("json", "tool_call", "tool_calls", "")  # words that may follow the fence
_INFO_PATTERN = re.compile(r"[ \t]*(\w*)\s*", re.ASCII)
_MAX_HELD_CHARS = 1 << 17  # a longer text is not a call
_ALLOWED_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class JsonBlock(CallReader):
    """Reads what follows a fence, up to the next fence; with `fenced` False, an answer to its end."""

    def __init__(self, names: Collection[str], *, fenced: bool = False, close: str = "") -> None:
        """names: those of the offered tools. close: a marker that may follow the JSON of a whole answer."""
        super().__init__()
        self._names = names
        self._fenced = fenced
        self._end = FENCE if fenced else close
        self._json: JsonCalls | None = None
        self._pieces: list[CallPiece] = []
        self._complete = False  # a call is complete, and nothing else has arrived since

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        can_continue = True
        while can_continue and not (self.is_finished or self.is_broken):
            if self._json is not None:
                can_continue = self._read_json(self._json)
            elif self._complete:
                can_continue = self._read_after_object()
            else:
                can_continue = self._read_head()
        if len(self.raw) > _MAX_HELD_CHARS:
            self.is_broken = self.is_broken or not self.is_finished
        return (
            self._pieces if self.is_finished and not self.is_broken else [],
            self._take_remainder(),
        )

    def end(self) -> list[CallPiece]:
        self.is_broken = not self._complete
        return [] if self.is_broken else self._pieces

    def _read_head(self) -> bool:
        """Read the text before the JSON; return whether it is complete."""
        if self._fenced:
            match = _INFO_PATTERN.match(self.raw)
            assert match is not None  # the expression also matches an empty text
            word, self._at = match[1].lower(), match.end()
            if self._at == len(self.raw):
                self.is_broken = not any(info.startswith(word) for info in _INFO_STRINGS)
                return False
            self.is_broken = word not in _INFO_STRINGS
        self._begin()
        return True

    def _begin(self) -> None:
        if self.raw[self._at] in "{[":
            self._json = JsonCalls(self._names.__contains__, names=self._names, keys=_ALLOWED_KEYS)
        else:
            self.is_broken = True

    def _read_json(self, reader: JsonCalls) -> bool:
        pieces, remaining = reader.feed(self.raw[self._at :])
        self._pieces += pieces
        self._at = len(self.raw) - len(remaining)
        self.is_broken = reader.is_broken
        if reader.is_finished and not reader.is_broken:
            self._json, self._complete = None, True
            has_calls = bool(self._pieces) and _are_objects(self._pieces)
            self.is_broken = not has_calls or not reader.all_have_arguments
        return reader.is_finished

    def _read_after_object(self) -> bool:
        """Read what follows an object: the fence, another object, or something else."""
        while self._at < len(self.raw) and self.raw[self._at] in " \t\r\n,;":
            self._at += 1
        following = self.raw[self._at : self._at + max(len(self._end), 1)]
        if not following or (following != self._end and self._end.startswith(following)):
            return False
        if following == self._end:
            self._at += len(following)
            self.is_finished = True
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
