"""Read tool calls while a model writes them, so that they can be streamed.

This module has the base of all readers, and reads calls in JSON: an object with "name" and "arguments"
(or "parameters"), or an array of such objects. `literal_calls` reads notations that are described by
literals, and `families` has the readers of other notations.
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

from localspec.chat.notations.schemas import json_type
from localspec.protocol.pieces import Arguments, Call

_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_CHARS = string.ascii_letters + string.digits

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
# Models write line breaks and tabs in strings as they are, which is no JSON.
_CONTROL_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_SURROGATE = re.compile("[\ud800-\udfff]")
# Escapes of JSON that are whole, or half of a surrogate pair, which is the group.
_ESCAPED_HALF = re.compile(
    r"\\\\|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})"
)
_TOKEN = re.compile(r'["{}\[\]:,]|\s+|[^\s"{}\[\]:,]+')
_STRING_PART = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


CallPiece = Call | Arguments
# The pieces that a text adds, and its remainder, which belongs to no call any more.
ReadResult = tuple[list[CallPiece], str]


_BLANKS = re.compile(r"\s*")


def skip_blanks(text: str, at: int) -> int:
    """Return where the blanks at `at` end."""
    match = _BLANKS.match(text, at)
    assert match is not None  # the expression also matches an empty text
    return match.end()


def new_call(name: str) -> Call:
    """Return a call with a random id."""
    # Mistral's templates refuse ids that are not nine letters and digits.
    return Call("".join(secrets.choice(_ID_CHARS) for _ in range(9)), name)


def parse_finite(text: str) -> float:
    """Parse a number of JSON, and limit it to Python's largest float, because infinity is not valid JSON."""
    value = float(text)
    return value if isfinite(value) else copysign(float_info.max, value)


def parse_json(text: str) -> Any:
    """Parse JSON with finite numbers. Raises ValueError, or RecursionError for one that is too deep."""
    return json.loads(text, parse_float=parse_finite, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(
        f"{name} is not JSON"
    )  # Python's module reads NaN and Infinity, and writes them


def convert_value(text: str, types: set[str]) -> Any:
    """Return a parameter's text as a value of one of `types`.

    It stays as it is if it may be a text and is not a value of any other of the types.
    """
    if types in ({"string"}, {"any"}):
        return text
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = _decode_python(text)
    kind = json_type(value)
    if "string" not in types:
        return value
    is_other = kind != "string" and (kind in types or (kind == "number" and "integer" in types))
    return value if is_other else text


def parse_scalar(text: str) -> Any:
    """Return a number, a boolean or null, in JSON's notation or in Python's. Raises ValueError."""
    return _PYTHON_CONSTANTS[text] if text in _PYTHON_CONSTANTS else parse_json(text)


def _decode_python(text: str) -> Any:
    """Decode what templates write without `tojson`, such as True or a list; return other text as it is."""
    lowered = text.strip().lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False}.get(lowered)
    if lowered[:1] not in ("{", "["):
        return text
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)  # raises TypeError for sets and bytes
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


class Members:
    """Writes the arguments of a call as a JSON object. Of several with the same key, the first one counts."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def add(self, key: str, value: Any) -> list[Arguments]:
        """Return the pieces that an argument adds."""
        if key in self._keys:
            return []
        text = f"{', ' if self._keys else '{'}{write_json(key)}: {write_json(value)}"
        self._keys.add(key)
        return [Arguments(text)]

    def close(self) -> Arguments:
        """Return the end of the object."""
        return Arguments("}" if self._keys else "{}")


def write_json(value: Any) -> str:
    """Return a value as JSON; half of a surrogate pair, which UTF-8 has no bytes for, as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def replace_halves(text: str) -> str:
    """Return JSON with U+FFFD for each half of a surrogate pair, for which UTF-8 has no bytes."""
    return _ESCAPED_HALF.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)


class CallReader(ABC):
    """Reads what follows a marker: one or more calls.

    Feed it text until `is_finished`. `is_broken` means that this was not a call, and that `raw`, all that was
    read, is plain text. `in_value` means that a value in tags has begun, which may contain markers.
    """

    in_value = False

    def __init__(self) -> None:
        self.is_finished = False
        self.is_broken = False
        self.raw = ""
        self._at = 0  # how much of `raw` is read
        self._calls = 0

    @abstractmethod
    def feed(self, text: str) -> ReadResult:
        """Consume the next text."""

    @abstractmethod
    def end(self) -> list[CallPiece]:
        """Return the remaining pieces of an answer that was cut off here."""

    @property
    def undecided(self) -> int:
        """How many characters at the end of certain calls may still be text."""
        return 0

    def _fail(self) -> None:
        """End where no call goes on like this: there are those before it, or none at all."""
        self.is_broken, self.is_finished = not self._calls, bool(self._calls)

    def _take_remainder(self) -> str:
        """Return the text behind all calls, which is not read; "" as long as there may be more."""
        if not (self.is_finished or self.is_broken):
            return ""
        remainder, self.raw = self.raw[self._at :], self.raw[: self._at]
        return remainder


@dataclass(slots=True)
class _Object:
    """The object of a call as far as it is read."""

    name: str = ""
    key: str = ""
    colon: bool = False  # the key's colon is read, and its value has not ended
    arguments: Literal["", "open", "closed"] = ""
    held: bool = False  # the arguments are emitted only when they are complete
    pending: str = ""  # arguments that cannot be emitted yet


class JsonCalls(CallReader):
    """Reads calls in JSON.

    `accepts` decides which names are calls. With `call`, the text is only the arguments of that call. With
    `names` and `keys`, an object is not a call as soon as it has another name or key.
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
        self._quote: int | None = None  # start of the current string in `raw`
        self._escaped = False
        self._depth = 0
        self._base = 0  # the depth inside the current call's object; 0 between objects
        self._object = _Object()
        if call is not None:  # continue as after {"name": …, "arguments":
            self._depth = self._base = 1
            self._object = _Object(call.name, "arguments", colon=True)

    def feed(self, text: str) -> ReadResult:
        self._pieces = [self._call] if self._call is not None and not self.raw and text else []
        self.raw += text
        while self._at < len(self.raw) and not (self.is_finished or self.is_broken):
            if self._quote is None:
                self._read_token()
            else:
                self._read_string_part(self._quote)
        if self._object.name and not self.is_broken:
            self._emit_arguments()
        return self._pieces, self._take_remainder()

    def end(self) -> list[CallPiece]:
        self._pieces = []
        if self._object.arguments == "open" and self._object.name and self._object.pending:
            self._pieces.append(Arguments(self._object.pending))
        self.is_broken = not self._object.name and not self.is_finished
        return self._pieces

    def _read_token(self) -> None:
        match = _TOKEN.match(self.raw, self._at)
        assert match is not None
        token, self._at = match[0], match.end()
        call_object, is_top_level = self._object, self._depth == self._base
        is_value = is_top_level and self._base and call_object.colon and not token.isspace()
        if self._names is not None and self._is_no_call(token, is_value=bool(is_value)):
            self.is_broken = True
            return
        if is_value and call_object.key in _ARGUMENT_KEYS and not call_object.arguments:
            # JSON in a string, or null, can only be converted when it is complete.
            call_object.arguments, call_object.held = "open", token != "{"
        if call_object.arguments == "open" and not (is_top_level and token in (":", ",", "}", "]")):
            call_object.pending += token
        match token:
            case '"':
                self._quote = match.start()
            case "{" | "[":
                self._depth += 1
                if token == "{" and not self._base:
                    self._object, self._base = _Object(), self._depth
                elif not self._base and self._depth > 1:
                    self.is_broken = True  # an array of arrays
            case "}" | "]":
                self._close()
            case ":" if is_top_level:
                call_object.colon = True
            case "," if is_top_level:
                self._end_arguments()
                call_object.colon, call_object.key = False, ""
            case _ if self._depth == 0 and not token.isspace():
                self._at = match.start() + 1
                self.is_broken = True

    def _read_string_part(self, quote: int) -> None:
        match = _STRING_PART.match(self.raw, self._at + self._escaped)
        assert match is not None  # the expression also matches an empty text
        end = match.end()
        # The closing quote, a backslash at the end of the text, or "".
        last = self.raw[end : end + 1]
        self._escaped = last == "\\"
        if self._object.arguments == "open":
            self._object.pending += self.raw[self._at : end].translate(_CONTROL_ESCAPES) + last
        self._at = end + len(last)
        if last == '"':
            self._quote = None
            if self._depth == self._base:
                self._end_string(self.raw[quote : self._at])
        elif self._names is not None and self._depth == self._base:
            self.is_broken = not self._may_be_a_call(self.raw[quote + 1 : self._at])

    def _is_no_call(self, token: str, *, is_value: bool) -> bool:
        """Return whether no call can have this token here."""
        if not self._base:
            return token not in ("{", "[", "]", ",") and not token.isspace()
        if not is_value:
            return False
        return (
            self._object.key in _ARGUMENT_KEYS and not self._object.arguments and token != "{"
        ) or (self._object.key == "name" and not self._object.name and token != '"')

    def _may_be_a_call(self, prefix: str) -> bool:
        """Return whether a string that begins like this can be a key or name of a call."""
        call_object = self._object
        if call_object.arguments == "open":
            return False  # the arguments are a string
        if not call_object.colon:
            names = self._keys
        elif call_object.key == "name":
            names = self._names
        else:
            return True
        return any(name.startswith(prefix) for name in names or ())

    def _end_string(self, text: str) -> None:
        """Handle a complete string, which is a key of the object or its value."""
        call_object = self._object
        if call_object.arguments == "open":
            self._end_arguments()
            return
        value = self._decode_string(text)
        if self.is_broken:
            return
        if not call_object.colon:
            call_object.key = value
            self.is_broken = self._keys is not None and value not in self._keys
        elif call_object.key == "name" and not call_object.name:
            call_object.name = value
            self.is_broken = not self._accepts(value)
            if not self.is_broken:
                self._pieces.append(new_call(value))
                self._emit_arguments()

    def _decode_string(self, text: str) -> str:
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            self.is_broken = True
            return ""

    def _close(self) -> None:
        self._depth -= 1
        if self._depth <= self._base:
            self._end_arguments()
        if self._base and self._depth < self._base:
            self._base = 0
            if not self._object.name:
                self.is_broken = True
                return
            if not self._object.arguments:
                self.all_have_arguments = False
                self._pieces.append(Arguments("{}"))
        self.is_finished = self.is_finished or self._depth <= 0

    def _end_arguments(self) -> None:
        if self._object.arguments == "open":
            self._object.arguments = "closed"
            if self._object.name:
                self._emit_arguments()
            self.is_finished = self.is_finished or self._call is not None

    def _emit_arguments(self) -> None:
        """Emit the arguments that are certain; if they are held, only when they are complete."""
        call_object = self._object
        if call_object.held and call_object.arguments == "open":
            return
        text, call_object.pending = call_object.pending, ""
        if call_object.held:
            text = text.strip()
            text = self._decode_string(text) if text.startswith('"') else text
            text = "{}" if text == "null" else text
        if text:
            self._pieces.append(Arguments(text))
