"""Read tool calls while a model writes them, so that they can be streamed.

This module defines the pieces of a call, and reads calls in JSON: an object with "name" and "arguments"
(or "parameters"), or an array of such objects.
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

from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    GEMMA,
    GEMMA_QUOTE,
    TYPE_PLACEHOLDER,
    CallFormat,
    child_schema,
    json_type,
    schema_types,
)

_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_CHARS = string.ascii_letters + string.digits

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
# Models write line breaks and tabs in strings as they are, which is no JSON.
_CONTROL_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN = re.compile(r'["{}\[\]:,]|\s+|[^\s"{}\[\]:,]+')
_STRING_PART = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@dataclass(slots=True)
class Call:
    """The beginning of a call; `index` is its number in the answer."""

    id: str
    name: str
    index: int = 0


@dataclass(slots=True)
class Arguments:
    """More JSON of a call's arguments."""

    text: str
    index: int = 0


CallPiece = Call | Arguments
# The pieces that a text adds, and its remainder, which belongs to no call any more.
ReadResult = tuple[list[CallPiece], str]


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

    It stays a text if it may be a text and is not a value of any other of the types.
    """
    if types in ({"string"}, {"any"}):
        return text
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = _decode_python(text)
    kind = json_type(value)
    fits = kind in types or (kind == "number" and "integer" in types)
    return value if fits or "string" not in types else text


def _parse_scalar(text: str) -> Any:
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


def _entry(key: str, value: Any) -> str:
    """Return a member of a JSON object."""
    return f"{_json_text(key)}: {_json_text(value)}"


def _json_text(value: Any) -> str:
    """Return a value as JSON; half of a surrogate pair, which UTF-8 has no bytes for, as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


class CallReader(ABC):
    """Reads what follows a marker: one or more calls.

    Feed it text until `is_finished`. `is_broken` means that this was not a call, and that `raw`, all that was
    read, is plain text.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self.is_broken = False
        self.raw = ""

    @abstractmethod
    def feed(self, text: str) -> ReadResult:
        """Consume the next text."""

    @abstractmethod
    def end(self) -> list[CallPiece]:
        """Return the remaining pieces of an answer that was cut off here."""


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
        self._at = 0  # how much of `raw` is read
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
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        return self._pieces, remaining

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
                self._open(token)
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

    def _open(self, token: str) -> None:
        self._depth += 1
        if token == "{" and not self._base:
            self._object, self._base = _Object(), self._depth
        elif not self._base and self._depth > 1:
            self.is_broken = True  # an array of arrays

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


# ------------------------------------------------------------------------ found
# Read calls in a notation that was discovered from a template: literals, and names and arguments between.


_NAME = re.compile(r"[\w.-]*", re.ASCII)
_CALL_ID = re.compile(r"[\w.:-]*", re.ASCII)
_PARTS = re.compile(rf"({CALL_ID_PLACEHOLDER}|\s+)")
_MAX_HEAD_CHARS = 400  # A longer text before a call's arguments means that it is not a call.
CDATA_MARKERS = "<![CDATA[", "]]>"
_INCOMPLETE, _MISMATCH = -1, -2  # returned instead of the end of a literal


def match_literal(literal: str, text: str, at: int) -> int:
    """Return where `literal` ends in `text` if it begins at `at`; its blanks match any blanks.

    Returns _INCOMPLETE if the text ends within the literal, and _MISMATCH if it differs.
    """
    for part in filter(None, _PARTS.split(literal)):
        actual = text[at : at + max(len(part), 1)]
        if part == CALL_ID_PLACEHOLDER:
            match = _CALL_ID.match(text, at)
            assert match is not None  # the expression also matches an empty text
            if match.end() == len(text):
                return _INCOMPLETE
            at = match.end()
        elif actual == part:
            at += len(part)
        elif part.startswith(actual) and at + len(actual) == len(text):
            return _INCOMPLETE
        elif part.isspace():
            at += len(text[at:]) - len(text[at:].lstrip())
        else:
            return _MISMATCH
    return at


class DialectCalls(CallReader):
    """Reads all calls that follow one marker, and what closes them.

    If the notation's arguments are not JSON, the whole call may still come as a JSON object.
    """

    def __init__(self, form: CallFormat, tools: dict[str, Any]) -> None:
        super().__init__()
        self._form = form
        self._tools = tools
        self._state: Literal["name", "json", "parameters", "behind"] = "name"
        self._before = form.lead  # the literal before the next name
        self._at = 0  # how much of `raw` is read
        self._json = JsonCalls()
        self._schema: dict[str, Any] = {}  # the schema of the tool that is being called
        self._written = 0  # number of parameters read so far
        self._calls = 0
        self._has_tags = bool(form.parameter or form.elements)
        separators = (re.escape(literal) for literal in form.parameter[1:3])
        self._separator = re.compile("|".join(separators).replace(TYPE_PLACEHOLDER, r"\w+"))

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        pieces: list[CallPiece] = []
        self._read(pieces, final=False)
        if not (self.is_finished or self.is_broken):
            return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        return pieces, remaining

    def end(self) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        self._read(pieces, final=True)
        if self._state == "json":
            pieces += self._json.end()
            self._calls += not self._json.is_broken
        elif self._state == "parameters":
            pieces.append(Arguments("}" if self._written else "{}"))
        self.is_broken = not self._calls
        return pieces

    def _read(self, pieces: list[CallPiece], *, final: bool) -> None:
        can_continue = True
        while can_continue and not (self.is_finished or self.is_broken):
            match self._state:
                case "name":
                    can_continue = self._read_name(pieces)
                case "json":
                    can_continue = self._read_arguments(pieces)
                case "parameters" if self._form.elements:
                    can_continue = self._read_element(pieces)
                case "parameters":
                    can_continue = self._read_parameter(pieces, final=final)
                case "behind":
                    can_continue = self._read_end(final=final)

    def _read_name(self, pieces: list[CallPiece]) -> bool:
        end = start = match_literal(self._before, self.raw, self._at)
        name = ""
        if start >= 0:
            if self._has_tags and self.raw.startswith("{", start):
                self._at, self._state, self._json = start, "json", JsonCalls()
                return True
            match = _NAME.match(self.raw, start)
            assert match is not None  # the expression also matches an empty text
            name = match[0]
            if match.end() == len(self.raw):  # the name may not be complete
                end = _INCOMPLETE
            else:
                end = match_literal(self._form.middle, self.raw, match.end()) if name else _MISMATCH
        if end == _MISMATCH or (end == _INCOMPLETE and len(self.raw) - self._at > _MAX_HEAD_CHARS):
            self.is_broken, self.is_finished = not self._calls, bool(self._calls)
        if end < 0:
            return False
        call = new_call(name)
        self._calls += 1
        self._at, self._schema, self._written = end, self._tools.get(name, {}), 0
        if self._has_tags:
            self._state = "parameters"
            pieces.append(call)
        else:
            self._state, self._json = "json", JsonCalls(call=call)
        return True

    def _read_arguments(self, pieces: list[CallPiece]) -> bool:
        call_pieces, remaining = self._json.feed(self.raw[self._at :])
        pieces += call_pieces
        self._at = len(self.raw) - len(remaining)
        if self._json.is_broken:
            self.is_broken, self.is_finished = not self._calls, bool(self._calls)
        elif self._json.is_finished:
            self._state = "behind"
            self._calls += self._has_tags
        return self._json.is_finished

    def _read_parameter(self, pieces: list[CallPiece], *, final: bool) -> bool:
        """Read the next parameter, or notice that there is none; return whether that was possible."""
        opening, text_separator, value_separator, _ = self._form.parameter
        start = match_literal(opening, self.raw, self._skip_blanks())
        if start == _MISMATCH:
            self._end_parameters(pieces)
            return True
        if start == _INCOMPLETE:
            return False
        separator = self._separator.search(self.raw, start)
        if separator is None:
            return False
        key = self.raw[start : separator.start()]
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = schema_types(schema, self._schema)
        if text_separator != value_separator:  # the notation itself tells texts from other values
            types = {"string"} if separator[0] == text_separator else {"object"}
        value = self._read_value(separator.end(), types, final=final)
        if value is None:
            return False
        self._add_entry(pieces, key, convert_value(value, types))
        return True

    def _read_element(self, pieces: list[CallPiece]) -> bool:
        """Read the next argument as an element, or notice that there is none; return as above."""
        position = self._skip_blanks()
        start = match_literal(f"{self._form.elements}<", self.raw, position)
        if start == _INCOMPLETE or start == len(self.raw):
            return False
        if start == _MISMATCH or self.raw[start] == "/":
            self._end_parameters(pieces)
            return True
        elements = _Elements(self.raw, self._form.elements, self._schema)
        try:
            key, value, self._at = elements.read(position, self._schema)
        except IndexError:  # it is not complete yet
            return False
        except (ValueError, RecursionError):
            self._end_parameters(pieces)
            return True
        self._add_entry(pieces, key, value)
        return True

    def _add_entry(self, pieces: list[CallPiece], key: str, value: Any) -> None:
        pieces.append(Arguments(("{", ", ")[self._written > 0] + _entry(key, value)))
        self._written += 1

    def _end_parameters(self, pieces: list[CallPiece]) -> None:
        pieces.append(Arguments("}" if self._written else "{}"))
        self._state = "behind"

    def _read_value(self, start: int, types: set[str], *, final: bool) -> str | None:
        """Return the text of a value; None if it is not complete yet.

        The closing literal may also occur inside JSON, or in a value that the model quotes as XML does.
        """
        close = self._form.parameter[3]
        core = close.strip()
        quote_open, quote_close = CDATA_MARKERS
        if (
            self.raw.startswith(quote_open, start)
            and (end := self.raw.find(quote_close + core, start)) >= 0
        ):
            self._at = end + len(quote_close + core)
            return self.raw[start + len(quote_open) : end]
        if quote_open.startswith(self.raw[start : start + len(quote_open)]) and not final:
            return None
        end = self.raw.find(core, start)
        if end >= 0 and not final and not types & {"string", "any"}:
            end = self._json_end(start, core)
        if end < 0:
            return None
        self._at = end + len(core)
        return self.raw[start:end].removesuffix(close[: close.index(core)])

    def _json_end(self, start: int, core: str) -> int:
        """Return the end of a JSON value that `core` closes, -1 if it is not complete yet."""
        text = self.raw[start:]
        blank_count = len(text) - len(text.lstrip())
        try:
            _, size = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
        except (ValueError, RecursionError):
            core_at = text.find(core)  # not JSON, or `core` is inside a string
            is_outside_string = re.sub(r"\\.", "", text[:core_at]).count('"') % 2 == 0
            return start + core_at if is_outside_string else -1
        end = start + blank_count + size
        end += len(self.raw[end:]) - len(self.raw[end:].lstrip())
        return end if self.raw.startswith(core, end) else self.raw.find(core, start)

    def _read_end(self, *, final: bool) -> bool:
        """Read what follows a call's arguments: another call, or the end."""
        position = self._skip_blanks()
        next_call = (
            match_literal(self._form.again, self.raw, position) if self._form.again else _MISMATCH
        )
        close = match_literal(self._form.close, self.raw, position)
        if next_call >= 0:
            self._state, self._before, self._at = "name", "", next_call
        elif final or _INCOMPLETE not in (next_call, close):
            self.is_finished = True
            self._at = close if close >= 0 else self._at
        return next_call >= 0

    def _skip_blanks(self) -> int:
        return self._at + len(self.raw[self._at :]) - len(self.raw[self._at :].lstrip())


class _Elements:
    """Nested elements, each named by its key, with `prefix` before every tag; `root` is the whole schema."""

    def __init__(self, text: str, prefix: str, root: dict[str, Any]) -> None:
        self._text = text
        self._prefix = prefix
        self._root = root

    def read(self, at: int, parent: Any) -> tuple[str, Any, int]:
        """Return the key and the value of the element at `at`, and where it ends.

        parent: the schema of the element's parent.

        Raises:
            IndexError: the text ends within the element.
            ValueError: the element is not closed by its own tag.
        """
        start = at + len(self._prefix) + 1
        key_end = self._find(">", start)
        key = self._text[start:key_end]
        schema = child_schema(parent, key, self._root)
        children: list[tuple[str, Any]] = []
        end = first_tag = self._find(self._prefix, key_end)
        while not self._text.startswith(f"{self._prefix}</", end):
            self._text[end + len(self._prefix) + 1]  # a tag may be incomplete
            child, value, end = self.read(end, schema)
            children.append((child, value))
            end = self._find(self._prefix, end)
        close = f"{self._prefix}</{key}>"
        if not self._text.startswith(close, end):
            self._text[end + len(close) - 1]
            raise ValueError("closed by another tag")
        value = self._value(self._text[key_end + 1 : first_tag], children, schema)
        return key, value, end + len(close)

    def _find(self, marker: str, at: int) -> int:
        found = self._text.find(marker, at)
        if found < 0:
            raise IndexError
        return found

    def _value(self, text: str, children: list[tuple[str, Any]], schema: Any) -> Any:
        types = schema_types(schema, self._root)
        is_list = "object" not in types and all(key == "item" for key, _ in children)
        if children:
            return [value for _, value in children] if is_list else dict(children)
        if not text.strip() and types & {"array", "object"}:
            return [] if is_list and "array" in types else {}
        return convert_value(text, types)


# ------------------------------------------------------------------------ notations
# Read tool calls that are not plain JSON: Qwen Coder's tags, Mistral's [ARGS], Gemma 4's own notation.


_FUNCTION_TAG = re.compile(r"<function=([^>\n]+)>")
_NEXT_TAG = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_PARAMETER_CLOSE = "</parameter>"
# Match up to the marker that ends a JSON value. Inside of a string the marker does not count.
_JSON_VALUE = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!/parameter>))*', re.DOTALL)
_JSON_OBJECT = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!tool_call\|>))*', re.DOTALL)


def reader_for(
    form: CallFormat, tools: dict[str, Any], names: Collection[str] | None
) -> CallReader:
    """Return the reader for a format's calls; it accepts only `names`, if they are given."""
    match form.kind:
        case "hermes" | "tags":
            return TaggedCall(tools)
        case "mistral" | "named":
            return ArgsCalls(form.middle or "[ARGS]")
        case "gemma":
            return GemmaCall()
        case "python":
            return PythonCalls()
        case "found":
            return DialectCalls(form, tools)
        case _:
            return JsonCalls(names.__contains__) if names is not None else JsonCalls()


class _NotationOrJson(CallReader):
    """Base of readers for a notation whose models sometimes write JSON instead.

    In that case `_json` reads the text, and `_lead` is the text before the JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self._json: JsonCalls | None = None
        self._lead = ""

    def feed(self, text: str) -> ReadResult:
        if self._json is None:
            return self._feed_notation(text)
        result = self._json.feed(text)
        self.is_finished, self.is_broken = self._json.is_finished, self._json.is_broken
        self.raw = self._lead + self._json.raw
        return result

    def end(self) -> list[CallPiece]:
        if self._json is None:
            return self._end_notation()
        pieces = self._json.end()
        self.is_broken = self._json.is_broken
        return pieces

    def _switch_to_json(self, lead: str, text: str, call: Call | None = None) -> ReadResult:
        self._json, self._lead = JsonCalls(call=call), lead
        return self.feed(text)

    @abstractmethod
    def _feed_notation(self, text: str) -> ReadResult:
        """Consume text while it may be the notation."""

    @abstractmethod
    def _end_notation(self) -> list[CallPiece]: ...


# ---------------------------------------------------------------- Qwen Coder, Mistral


class TaggedCall(_NotationOrJson):
    """Reads the inside of <tool_call>.

    It is JSON, or <function=name><parameter=key>value</parameter></function>. A value may contain any
    marker but the one that ends it; JSON may contain that one as well.
    """

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._schema: dict[str, Any] | None = None  # of the function, once its name is read
        self._at = 0  # how much of `raw` is read
        self._written = 0  # number of parameters read so far

    def _feed_notation(self, text: str) -> ReadResult:
        self.raw += text
        start = self.raw.lstrip()
        if start and not start.startswith("<"):
            return self._switch_to_json(self.raw.removesuffix(start), start)
        pieces: list[CallPiece] = []
        if self._schema is None and (name := _FUNCTION_TAG.search(self.raw)):
            self._schema, self._at = self._tools.get(name[1].strip(), {}), name.end()
            pieces.append(new_call(name[1].strip()))
        if self._schema is None:
            self.is_broken = not "<function=".startswith(start[:10])
            return [], ""
        while not self.is_finished and (tag := _NEXT_TAG.search(self.raw, self._at)):
            if not self._read_tag(tag, pieces, final=False):
                return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        if not self.is_finished:
            self.raw, remaining = self.raw + remaining, ""
        return pieces, remaining

    def _read_tag(self, tag: re.Match[str], pieces: list[CallPiece], *, final: bool) -> bool:
        """Read what `tag` begins, a parameter or the end; return False if it is not complete yet."""
        if tag[1] is None:
            pieces.append(Arguments("}" if self._written else "{}"))
            self.is_finished, self._at = True, tag.end()
            return True
        schema = self._schema or {}
        properties = schema.get("properties")
        types = schema_types(
            properties.get(tag[1]) if isinstance(properties, dict) else None, schema
        )
        close = self.raw.find(_PARAMETER_CLOSE, tag.end())
        if close >= 0 and not final and not types & {"string", "any"}:
            value_match = _JSON_VALUE.match(self.raw, tag.end())
            assert value_match is not None  # the expression also matches an empty text
            close = (
                value_match.end()
                if self.raw.startswith(_PARAMETER_CLOSE, value_match.end())
                else -1
            )
        if close < 0:
            return False
        value = self.raw[tag.end() : close].removesuffix("\n")
        entry = _entry(tag[1], convert_value(value, types))
        pieces.append(Arguments((", " if self._written else "{") + entry))
        self._written, self._at = self._written + 1, close + len(_PARAMETER_CLOSE)
        return True

    def _end_notation(self) -> list[CallPiece]:
        self.is_broken = self._schema is None
        pieces: list[CallPiece] = []
        while not self.is_broken and not self.is_finished:
            tag = _NEXT_TAG.search(self.raw, self._at)
            if tag is None or not self._read_tag(tag, pieces, final=True):
                pieces.append(Arguments("}" if self._written else "{}"))
                break
        return pieces


class ArgsCalls(_NotationOrJson):
    """Reads the inside of [TOOL_CALLS]: an array of calls, name[ARGS]{…}, or name[CALL_ID]id[ARGS]{…}."""

    _MAX_HEAD_CHARS = 200  # a longer name and id means that it is not a call

    def __init__(self, middle: str) -> None:
        super().__init__()
        self._middle = middle

    def _feed_notation(self, text: str) -> ReadResult:
        self.raw += text
        start = self.raw.lstrip()
        if start.startswith("{") or (re.match(r"\[\s*(\{|$)", start) and start != "["):
            return self._switch_to_json("", start)
        head, separator, arguments = start.partition(self._middle)
        if not separator:
            self.is_broken = "\n" in start or len(start) > self._MAX_HEAD_CHARS
            return [], ""
        name, _, call_id = head.partition("[CALL_ID]")
        call = new_call(name.strip())
        call.id = call_id.strip() or call.id
        return self._switch_to_json(head + separator, arguments, call)

    def _end_notation(self) -> list[CallPiece]:
        self.is_broken = True
        return []


# ---------------------------------------------------------------- Gemma 4


class GemmaCall(CallReader):
    """Reads the inside of <|tool_call>: call:name{key:<|"|>text<|"|>,other:1}, or an object with a name."""

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        end = self._end()
        if end < 0:
            return [], ""
        remaining, self.raw = self.raw[end:], self.raw[:end]
        return self._read(), remaining

    def _end(self) -> int:
        """Return where the call ends, -1 if it is not complete; a text may contain the marker."""
        if not self.raw.lstrip().startswith("{"):
            return _find_outside_quotes(self.raw, GEMMA.close)
        value = _JSON_OBJECT.match(self.raw)
        assert value is not None  # the expression also matches an empty text
        return value.end() if self.raw.startswith(GEMMA.close, value.end()) else -1

    def _read(self) -> list[CallPiece]:
        text = self.raw.strip()
        if text.startswith("{"):
            inner = JsonCalls()
            pieces, _ = inner.feed(text)
            if not (inner.is_finished or inner.is_broken):
                pieces += inner.end()  # the part of a call that was cut off
            self.is_finished, self.is_broken = not inner.is_broken, inner.is_broken
            return [] if inner.is_broken else pieces
        name, brace, inside = text.removeprefix("call:").partition("{")
        try:
            arguments, _ = _LooseValues("{" + inside).value(0)
        except (ValueError, IndexError, RecursionError):
            brace = ""
        if not brace or not name.strip():
            self.is_broken = True
            return []
        self.is_finished = True
        return [new_call(name.strip()), Arguments(_json_text(arguments))]

    def end(self) -> list[CallPiece]:
        return [] if self.is_finished else self._read()


def _find_outside_quotes(text: str, marker: str) -> int:
    """Return the position of `marker` outside Gemma's quotes, -1 if there is none."""
    at = 0
    while at >= 0:
        found, quote = text.find(marker, at), text.find(GEMMA_QUOTE, at)
        if quote < 0 or 0 <= found < quote:
            return found
        end = text.find(GEMMA_QUOTE, quote + len(GEMMA_QUOTE))
        at = end + len(GEMMA_QUOTE) if end >= 0 else -1
    return -1


class _LooseValues:
    """Values like JSON, with bare keys, <|"|> or single quotes around text, and Python's constants."""

    _SCALAR = re.compile(r"[^,}\]]+")

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, at: int) -> tuple[Any, int]:
        """Return the value at `at`, and where it ends.

        Raises:
            ValueError: there is no valid value.
            IndexError: the text ends within the value.
        """
        at = self._skip_blanks(at)
        if self._text.startswith(GEMMA_QUOTE, at):
            return self._quoted(at)
        if self._text[at] == "{":
            return self._object(at + 1)
        if self._text[at] == "[":
            return self._array(at + 1)
        if self._text[at] == '"':
            value, end = json.JSONDecoder(strict=False).raw_decode(self._text, at)
            return value, end
        if self._text[at] == "'":
            end = _string_end(self._text, at)
            if end < 0:
                raise ValueError("no closing quote")
            return _unquote(self._text[at + 1 : end - 1]), end
        scalar = self._SCALAR.match(self._text, at)
        if scalar is None:
            raise ValueError("no value")
        return _parse_scalar(scalar[0].strip()), scalar.end()

    def _skip_blanks(self, at: int) -> int:
        while self._text[at].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(GEMMA_QUOTE)
        end = self._text.index(GEMMA_QUOTE, start)
        return self._text[start:end], end + len(GEMMA_QUOTE)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        while self._text[at := self._skip_blanks(at)] != "}":
            if self._text.startswith((GEMMA_QUOTE, "'", '"'), at):
                key, at = self.value(at)
                at = self._text.index(":", at) + 1
            else:
                colon = self._text.index(":", at)
                key, at = self._text[at:colon].strip(), colon + 1
            members[key], at = self.value(at)
            at = self._skip_comma(at)
        return members, at + 1

    def _array(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while self._text[at := self._skip_blanks(at)] != "]":
            item, at = self.value(at)
            items.append(item)
            at = self._skip_comma(at)
        return items, at + 1

    def _skip_comma(self, at: int) -> int:
        at = self._skip_blanks(at)
        return at + 1 if self._text[at] == "," else at


# ---------------------------------------------------------------- LFM2

_CALL_HEAD = re.compile(r"[\s,]*([\w.-]+)\s*\(", re.ASCII)
_KEYWORD = re.compile(r"([^\s=,()\[\]{}\"']+)\s*=|\*\*")
# A text in double quotes, which JSON escapes. In single quotes, templates escape nothing: a quote within the
# text is one that nothing follows which could follow a value.
_PYTHON_STRING = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.|'(?!\s*[,)\]}:]))*'(?=\s*[,)\]}:])""", re.DOTALL
)


class PythonCalls(CallReader):
    """Reads calls as Python writes them: [name(key=value, …), …]; **{…} stands for several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["start", "head", "arguments", "behind"] = "start"
        self._is_list = False
        self._at = 0  # how much of `raw` is read
        self._calls = 0
        self._written = 0  # number of arguments read so far

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        pieces: list[CallPiece] = []
        can_continue = True
        while can_continue and not (self.is_finished or self.is_broken):
            at = self._at + len(self.raw[self._at :]) - len(self.raw[self._at :].lstrip())
            if at == len(self.raw):
                break
            match self._state:
                case "start":
                    self._is_list = self.raw[at] == "["
                    self._at, self._state = at + self._is_list, "head"
                case "head":
                    can_continue = self._read_head(pieces)
                case "arguments":
                    can_continue = self._read_argument(pieces, at)
                case "behind":
                    self._read_behind(at)
        if not (self.is_finished or self.is_broken):
            return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        return pieces, remaining

    def end(self) -> list[CallPiece]:
        self.is_broken = not self._calls
        return [self._closing()] if self._state == "arguments" else []

    def _closing(self) -> Arguments:
        return Arguments("}" if self._written else "{}")

    def _fail(self) -> None:
        self.is_broken, self.is_finished = not self._calls, bool(self._calls)

    def _read_head(self, pieces: list[CallPiece]) -> bool:
        head = _CALL_HEAD.match(self.raw, self._at)
        if head is None:
            if not re.fullmatch(r"[\s,]*[\w.-]*\s*", self.raw[self._at :], re.ASCII):
                self._fail()
            return False
        pieces.append(new_call(head[1]))
        self._at, self._state = head.end(), "arguments"
        self._calls, self._written = self._calls + 1, 0
        return True

    def _read_argument(self, pieces: list[CallPiece], at: int) -> bool:
        """Read what is at `at`: a comma, an argument or the end; return whether it is complete."""
        if self.raw[at] == ",":
            self._at = at + 1
            return True
        if self.raw[at] == ")":
            pieces.append(self._closing())
            self._at, self._state = at + 1, "behind"
            return True
        start = keyword.end() if (keyword := _KEYWORD.match(self.raw, at)) else at
        end = _python_value_end(self.raw, start)
        if end < 0:
            return False
        try:
            if keyword is None:
                raise ValueError("no key")
            value, _ = _LooseValues(self.raw[start:end] + ",").value(0)
            members = {keyword[1]: value} if keyword[1] else dict(value)
        except (ValueError, TypeError, IndexError, RecursionError):
            pieces.append(self._closing())
            self._fail()
            return False
        for key, member in members.items():
            pieces.append(Arguments(("{", ", ")[self._written > 0] + _entry(key, member)))
            self._written += 1
        self._at = end
        return True

    def _read_behind(self, at: int) -> None:
        """Read what follows a call: the end of the list, or another call."""
        self._state = "head"
        if not self._is_list:
            self.is_finished = True
        elif self.raw[at] == "]":
            self._at, self.is_finished = at + 1, True
        elif self.raw[at] != ",":
            self._fail()


def _python_value_end(text: str, at: int) -> int:
    """Return where the value at `at` ends, before a comma or a bracket; -1 if that has not come yet."""
    depth = 0
    while 0 <= at < len(text):
        char = text[at]
        if char in "\"'":
            at = _string_end(text, at)
            continue
        if char in ",)]}" and not depth:
            return at
        depth += (char in "([{") - (char in ")]}")
        at += 1
    return -1


def _string_end(text: str, at: int) -> int:
    """Return the end of the string in quotes at `at`; -1 if it is not complete."""
    match = _PYTHON_STRING.match(text, at)
    return -1 if match is None else match.end()


_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\U([0-9a-fA-F]{8})|\\.|\"", re.DOTALL)


def _unquote(text: str) -> str:
    """Return the text between single quotes, with its escapes decoded if they are valid."""
    try:
        return str(json.loads(f'"{_ESCAPE.sub(_json_escape, text)}"', strict=False))
    except ValueError:
        return text


def _json_escape(escape: re.Match[str]) -> str:
    """Return one of Python's escapes, or a double quote, as JSON has it."""
    if code := escape[1] or escape[2]:
        return json.dumps(chr(int(code, 16)))[1:-1]
    return {"\\'": "'", '"': '\\"'}.get(escape[0], escape[0])
