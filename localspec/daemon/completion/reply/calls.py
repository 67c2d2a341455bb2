"""Tool calls that a model writes as JSON, read character by character so that they can be streamed.

An object with "name" and "arguments" (or "parameters"), or an array of such objects.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_ID = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """A call begins; `index` counts the calls of an answer."""

    id: str
    name: str
    index: int = 0


@dataclass(slots=True)
class Arguments:
    """More of its arguments' JSON."""

    text: str
    index: int = 0


CallPiece = Call | Arguments


def new_call(name: str) -> Call:
    # Nine letters and digits: Mistral's templates refuse every other id.
    return Call("".join(secrets.choice(_ID) for _ in range(9)), name)


class JsonCalls:
    """Feed it text until `over`; `broken` means that this was no call and `raw` is plain text.

    `accepts` says which names are calls. With `call` the text is that call's arguments alone.
    """

    def __init__(
        self, accepts: Callable[[str], bool] = lambda _name: True, call: Call | None = None
    ) -> None:
        self._accepts = accepts
        self._call = call
        self.over = False
        self.broken = False
        self.raw = ""
        self._pieces: list[CallPiece] = []
        self._depth = 0
        self._base = 0  # the depth inside the present call's object; 0 between objects
        self._string: str | None = None  # the string that is being read
        self._escaped = False
        self._begin_object()
        if call is not None:  # as if {"name": …, "arguments": had been read
            self._depth = self._base = 1
            self._name, self._key, self._after_colon = call.name, "arguments", True

    def _begin_object(self) -> None:
        self._key = ""
        self._after_colon = False
        self._name = ""
        self._capturing = False
        self._captured = False
        self._held = False  # these arguments are shown when they are whole
        self._pending = ""  # arguments that cannot be shown yet

    def feed(self, text: str) -> tuple[list[CallPiece], str]:
        """What `text` adds, and the rest of it that belongs to no call any more."""
        self._pieces = []
        if self._call is not None and not self.raw and text:
            self._pieces.append(self._call)
        for at, char in enumerate(text):
            self.raw += char
            self._char(char)
            if self.over or self.broken:
                return self._pieces, text[at + 1 :]
        return self._pieces, ""

    def end(self) -> list[CallPiece]:
        """The answer was cut off here."""
        self._pieces = []
        if self._capturing and self._name and self._pending:
            self._emit(self._pending)
        self.broken = not self._name and not self.over
        return self._pieces

    def _char(self, char: str) -> None:
        if self._string is not None:
            self._in_string(char)
            return
        if self._starts_arguments(char):
            self._capturing = self._captured = True
            self._held = char != "{"  # JSON in a string, or null
        if char == '"':
            self._string = char
            self._take(char)
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == self._base and char == ":":
            self._after_colon = True
        elif self._depth == self._base and char == ",":
            self._end_capture()
            self._after_colon, self._key = False, ""
        elif self._capturing:
            self._take(char)
        elif self._depth == 0 and not char.isspace():
            self.broken = True

    def _starts_arguments(self, char: str) -> bool:
        here = self._base and self._depth == self._base and self._after_colon
        return bool(here and self._key in _ARGUMENTS and not self._captured and not char.isspace())

    def _in_string(self, char: str) -> None:
        assert self._string is not None
        self._string += char
        self._take(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            whole, self._string = self._string, None
            if self._depth == self._base:
                self._string_ended(whole)

    def _string_ended(self, whole: str) -> None:
        if self._capturing:
            self._end_capture()
            return
        try:
            value = json.loads(whole, strict=False)
        except ValueError:
            self.broken = True
            return
        if not self._after_colon:
            self._key = value
        elif self._key == "name" and not self._name:
            self._name = value
            self.broken = not self._accepts(value)
            if not self.broken:
                self._pieces.append(new_call(value))
                if self._captured:
                    self._show_pending()

    def _open(self, char: str) -> None:
        if self._capturing:
            self._take(char)
        elif char == "{" and not self._base:
            self._begin_object()
            self._base = self._depth + 1
        self._depth += 1
        if not self._base and self._depth > 1:
            self.broken = True  # an array of arrays

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth < self._base:
            self._end_capture()
        else:
            self._take(char)
            if self._depth == self._base:
                self._end_capture()
        if self._base and self._depth < self._base:
            self._base = 0
            if not self._name:
                self.broken = True
                return
            if not self._captured:
                self._emit("{}")
        self.over = self.over or self._depth <= 0

    def _take(self, char: str) -> None:
        if not self._capturing:
            return
        if self._name and not self._held:
            self._emit(char)
        else:
            self._pending += char

    def _end_capture(self) -> None:
        if not self._capturing:
            return
        self._capturing = False
        if self._name:
            self._show_pending()
        self.over = self.over or self._call is not None

    def _show_pending(self) -> None:
        text, self._pending = self._pending.strip(), ""
        if text.startswith('"'):
            try:
                text = str(json.loads(text, strict=False))
            except ValueError:
                self.broken = True
                return
        self._emit("{}" if text == "null" else text)

    def _emit(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Arguments):
            last.text += text
        else:
            self._pieces.append(Arguments(text))
