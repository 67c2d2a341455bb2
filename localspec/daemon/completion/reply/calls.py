"""Tool calls as models write them, read while they come so that they can be streamed: those in JSON, an
object with "name" and "arguments" (or "parameters"), or an array of such objects.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import copysign, isfinite
from sys import float_info
from typing import Any, Literal

from localspec.protocol.calls import type_of

_ARGUMENTS = ("arguments", "parameters")
_ID = string.ascii_letters + string.digits

_TOKEN = re.compile(r'["{}\[\]:,]|\s+|[^\s"{}\[\]:,]+')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


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
Fed = tuple[list[CallPiece], str]  # what text adds, and its rest, which belongs to no call any more


def new_call(name: str) -> Call:
    # Nine letters and digits: Mistral's templates refuse every other id.
    return Call("".join(secrets.choice(_ID) for _ in range(9)), name)


def finite(text: str) -> float:
    """JSON's numbers have no end, and what is beyond Python's is not written as JSON again."""
    value = float(text)
    return value if isfinite(value) else copysign(float_info.max, value)


def typed(text: str, types: set[str]) -> Any:
    """A parameter's text as a value of these types; text where it can be, and is none of the others."""
    if types in ({"string"}, {"any"}):
        return text
    try:
        value = json.loads(text, parse_float=finite)
    except (ValueError, RecursionError):
        return _python(text)
    kind = type_of(value)
    fits = kind in types or (kind == "number" and "integer" in types)
    return value if fits or "string" not in types else text


def _python(text: str) -> Any:
    """What templates write without `tojson`: Python's True, or a list; the text where it is neither."""
    lowered = text.strip().lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False}.get(lowered)
    if lowered[:1] not in ("{", "["):
        return text
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)  # no sets, no bytes
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


class Reader(ABC):
    """Reads what follows a marker: one or more calls. Feed it text until `over`; `broken` means that
    this was no call and `raw`, what it has read, is plain text.
    """

    def __init__(self) -> None:
        self.over = False
        self.broken = False
        self.raw = ""

    @abstractmethod
    def feed(self, text: str) -> Fed:
        """What comes next."""

    @abstractmethod
    def end(self) -> list[CallPiece]:
        """The answer was cut off here."""


@dataclass(slots=True)
class _Object:
    """A call's object as far as it is read."""

    name: str = ""
    key: str = ""
    colon: bool = False  # the key's colon has come, its value has not ended
    arguments: Literal["", "open", "closed"] = ""
    held: bool = False  # the arguments are shown when they are whole
    pending: str = ""  # arguments that cannot be shown yet


class JsonCalls(Reader):
    """`accepts` says which names are calls. With `call` the text is that call's arguments alone. With `names`
    and `keys`, an object is no call as soon as it has another name or key.
    """

    def __init__(
        self,
        accepts: Callable[[str], bool] = lambda _name: True,
        call: Call | None = None,
        *,
        names: Collection[str] | None = None,
        keys: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.all_have_arguments = True
        self._accepts = accepts
        self._names = names
        self._keys = keys
        self._call = call
        self._pieces: list[CallPiece] = []
        self._at = 0  # how much of `raw` is read
        self._quote: int | None = None  # where in `raw` the string that is being read begins
        self._escaped = False
        self._depth = 0
        self._base = 0  # the depth inside the present call's object; 0 between objects
        self._object = _Object()
        if call is not None:  # as if {"name": …, "arguments": had been read
            self._depth = self._base = 1
            self._object = _Object(call.name, "arguments", colon=True)

    def feed(self, text: str) -> Fed:
        self._pieces = [self._call] if self._call is not None and not self.raw and text else []
        self.raw += text
        while self._at < len(self.raw) and not (self.over or self.broken):
            if self._quote is None:
                self._token()
            else:
                self._in_string(self._quote)
        if self._object.name and not self.broken:
            self._show()
        rest, self.raw = self.raw[self._at :], self.raw[: self._at]
        return self._pieces, rest

    def end(self) -> list[CallPiece]:
        self._pieces = []
        if self._object.arguments == "open" and self._object.name and self._object.pending:
            self._pieces.append(Arguments(self._object.pending))
        self.broken = not self._object.name and not self.over
        return self._pieces

    def _token(self) -> None:
        found = _TOKEN.match(self.raw, self._at)
        assert found is not None
        token, self._at = found[0], found.end()
        read, here = self._object, self._depth == self._base
        value = here and self._base and read.colon and not token.isspace()
        if self._names is not None and self._is_no_call(token, value=bool(value)):
            self.broken = True
            return
        if value and read.key in _ARGUMENTS and not read.arguments:
            read.arguments, read.held = "open", token != "{"  # JSON in a string, or null
        if read.arguments == "open" and not (here and token in (":", ",", "}", "]")):
            read.pending += token
        match token:
            case '"':
                self._quote = found.start()
            case "{" | "[":
                self._open(token)
            case "}" | "]":
                self._close()
            case ":" if here:
                read.colon = True
            case "," if here:
                self._end_arguments()
                read.colon, read.key = False, ""
            case _ if self._depth == 0 and not token.isspace():
                self._at = found.start() + 1
                self.broken = True

    def _in_string(self, quote: int) -> None:
        found = _IN_STRING.match(self.raw, self._at + self._escaped)
        assert found is not None  # it matches nothing, too
        end = found.end()
        last = self.raw[end : end + 1]  # nothing, the closing quote, or a backslash without more
        self._escaped = last == "\\"
        if self._object.arguments == "open":
            self._object.pending += self.raw[self._at : end] + last
        self._at = end + len(last)
        if last == '"':
            self._quote = None
            if self._depth == self._base:
                self._string(self.raw[quote : self._at])
        elif self._names is not None and self._depth == self._base:
            self.broken = not self._may_be_a_call(self.raw[quote + 1 : self._at])

    def _is_no_call(self, token: str, *, value: bool) -> bool:
        """Return whether a token stands where no call has it."""
        if not self._base:
            return token not in ("{", "[", "]", ",") and not token.isspace()
        if not value:
            return False
        return (self._object.key in _ARGUMENTS and not self._object.arguments and token != "{") or (
            self._object.key == "name" and not self._object.name and token != '"'
        )

    def _may_be_a_call(self, begun: str) -> bool:
        """Return whether a string that has begun may be a key or a name that a call has."""
        read = self._object
        if read.arguments == "open":
            return False  # a text in place of the arguments
        if not read.colon:
            wanted = self._keys
        elif read.key == "name":
            wanted = self._names
        else:
            return True
        return any(name.startswith(begun) for name in wanted or ())

    def _string(self, text: str) -> None:
        """A key of the object, or its value."""
        read = self._object
        if read.arguments == "open":
            self._end_arguments()
            return
        value = self._decoded(text)
        if self.broken:
            return
        if not read.colon:
            read.key = value
            self.broken = self._keys is not None and value not in self._keys
        elif read.key == "name" and not read.name:
            read.name = value
            self.broken = not self._accepts(value)
            if not self.broken:
                self._pieces.append(new_call(value))
                self._show()

    def _decoded(self, text: str) -> str:
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            self.broken = True
            return ""

    def _open(self, token: str) -> None:
        self._depth += 1
        if token == "{" and not self._base:
            self._object, self._base = _Object(), self._depth
        elif not self._base and self._depth > 1:
            self.broken = True  # an array of arrays

    def _close(self) -> None:
        self._depth -= 1
        if self._depth <= self._base:
            self._end_arguments()
        if self._base and self._depth < self._base:
            self._base = 0
            if not self._object.name:
                self.broken = True
                return
            if not self._object.arguments:
                self.all_have_arguments = False
                self._pieces.append(Arguments("{}"))
        self.over = self.over or self._depth <= 0

    def _end_arguments(self) -> None:
        if self._object.arguments == "open":
            self._object.arguments = "closed"
            if self._object.name:
                self._show()
            self.over = self.over or self._call is not None

    def _show(self) -> None:
        """What has come of the arguments; held ones when they are whole."""
        read = self._object
        if read.held and read.arguments == "open":
            return
        text, read.pending = read.pending, ""
        if read.held:
            text = text.strip()
            text = self._decoded(text) if text.startswith('"') else text
            text = "{}" if text == "null" else text
        if text:
            self._pieces.append(Arguments(text))
