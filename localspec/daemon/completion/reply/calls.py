"""Tool calls as models write them, read while they come so that they can be streamed.

JSON: an object with "name" and "arguments" (or "parameters"), or an array of such objects. Or what is
no plain JSON: Qwen Coder's tags, Mistral's [ARGS], Gemma 4's own notation.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

_ARGUMENTS = ("arguments", "parameters")
_ID = string.ascii_letters + string.digits

_TOKEN = re.compile(r'["{}\[\]:,]|\s+|[^\s"{}\[\]:,]+')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GEMMA_QUOTE = '<|"|>'


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


def reader_for(kind: str, tools: dict[str, Any], names: Collection[str] | None) -> Reader:
    """The reader for a format's calls; `names`, if given, are the only ones it takes."""
    match kind:
        case "hermes":
            return TaggedCall(tools)
        case "mistral":
            return ArgsCalls()
        case "gemma":
            return GemmaCall()
        case _:
            return JsonCalls(names.__contains__) if names is not None else JsonCalls()


# ---------------------------------------------------------------- JSON


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
    """`accepts` says which names are calls. With `call` the text is that call's arguments alone."""

    def __init__(
        self, accepts: Callable[[str], bool] = lambda _name: True, call: Call | None = None
    ) -> None:
        super().__init__()
        self._accepts = accepts
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


class _OrJson(Reader):
    """A notation beside which a model writes JSON too: `_json` reads that, after `_lead`."""

    def __init__(self) -> None:
        super().__init__()
        self._json: JsonCalls | None = None
        self._lead = ""

    def feed(self, text: str) -> Fed:
        if self._json is None:
            return self._own(text)
        result = self._json.feed(text)
        self.over, self.broken = self._json.over, self._json.broken
        self.raw = self._lead + self._json.raw
        return result

    def end(self) -> list[CallPiece]:
        if self._json is None:
            return self._own_end()
        pieces = self._json.end()
        self.broken = self._json.broken
        return pieces

    def _as_json(self, lead: str, text: str, call: Call | None = None) -> Fed:
        self._json, self._lead = JsonCalls(call=call), lead
        return self.feed(text)

    @abstractmethod
    def _own(self, text: str) -> Fed:
        """`feed`, while it may be the notation."""

    @abstractmethod
    def _own_end(self) -> list[CallPiece]: ...


# ---------------------------------------------------------------- Qwen Coder, Mistral


class TaggedCall(_OrJson):
    """<tool_call>'s inside: JSON, or <function=name><parameter=key>value</parameter></function>."""

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._named = False

    def _own(self, text: str) -> Fed:
        seen = len(self.raw)
        self.raw += text
        start = self.raw.lstrip()
        if not start:
            return [], ""
        if not start.startswith("<"):
            return self._as_json(self.raw.removesuffix(start), start)
        pieces: list[CallPiece] = []
        if not self._named and (name := _FUNCTION.search(self.raw)):
            self._named = True
            pieces.append(new_call(name[1].strip()))
        end = self.raw.find("</function>")
        if end < 0:
            self.broken = not "<function=".startswith(start[:10]) and not self._named
            return pieces, ""
        end += len("</function>")
        rest, self.raw = self.raw[max(end, seen) :], self.raw[:end]
        if not self._named:
            self.broken = True
            return [], rest
        self.over = True
        return [*pieces, Arguments(self._arguments())], rest

    def _own_end(self) -> list[CallPiece]:
        self.broken = not self._named
        return [Arguments(self._arguments())] if self._named and not self.over else []

    def _arguments(self) -> str:
        name = _FUNCTION.search(self.raw)
        schema = self._tools.get(name[1].strip(), {}) if name else {}
        known = schema.get("properties") or {}
        found = {key: _typed(value, known.get(key)) for key, value in _PARAMETER.findall(self.raw)}
        return json.dumps(found, ensure_ascii=False)


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as its schema wants it; text where that says nothing else."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        lowered = value.strip().lower()  # Python's True, as its templates write it
        return {"true": True, "false": False, "none": None}.get(lowered, value)


class ArgsCalls(_OrJson):
    """[TOOL_CALLS]'s inside: an array of calls, or name[ARGS]{…}, or name[CALL_ID]id[ARGS]{…}."""

    _LONGEST = 200  # characters of a name and an id; what is longer is text

    def _own(self, text: str) -> Fed:
        self.raw += text
        start = self.raw.lstrip()
        if start.startswith(("[{", "{")) or (start.startswith("[") and start[1:].isspace()):
            return self._as_json("", start)
        head, found, rest = start.partition("[ARGS]")
        if not found:
            self.broken = "\n" in start or len(start) > self._LONGEST
            return [], ""
        name, _, own = head.partition("[CALL_ID]")
        call = new_call(name.strip())
        call.id = own.strip() or call.id
        return self._as_json(head + found, rest, call)

    def _own_end(self) -> list[CallPiece]:
        self.broken = True
        return []


# ---------------------------------------------------------------- Gemma 4


class GemmaCall(Reader):
    """<|tool_call>'s inside: call:name{key:<|"|>text<|"|>,other:1}, or an object with a name."""

    def feed(self, text: str) -> Fed:
        self.raw += text
        end = self.raw.find("<tool_call|>")
        if end < 0:
            return [], ""
        rest, self.raw = self.raw[end:], self.raw[:end]
        return self._read(), rest

    def _read(self) -> list[CallPiece]:
        text = self.raw.strip()
        if text.startswith("{"):
            inner = JsonCalls()
            pieces, _ = inner.feed(text)
            if not inner.over:
                pieces += inner.end()  # of a call that is cut off, what came
            self.over, self.broken = not inner.broken, inner.broken
            return [] if inner.broken else pieces
        name, brace, inside = text.removeprefix("call:").partition("{")
        try:
            arguments, _ = _Notation("{" + inside).value(0)
        except (ValueError, IndexError, RecursionError):
            brace = ""
        if not brace or not name.strip():
            self.broken = True
            return []
        self.over = True
        return [new_call(name.strip()), Arguments(json.dumps(arguments, ensure_ascii=False))]

    def end(self) -> list[CallPiece]:
        return [] if self.over else self._read()


class _Notation:
    """Gemma 4's values: like JSON, with bare keys and <|"|> around text."""

    _SCALAR = re.compile(r"[^,}\]]+")

    def __init__(self, text: str) -> None:
        self._text = text

    def value(self, at: int) -> tuple[Any, int]:
        """The value at `at`, and where it ends. Raises ValueError or IndexError."""
        at = self._skip(at)
        if self._text.startswith(_GEMMA_QUOTE, at):
            return self._quoted(at)
        if self._text[at] == "{":
            return self._object(at + 1)
        if self._text[at] == "[":
            return self._array(at + 1)
        if self._text[at] == '"':
            value, end = json.JSONDecoder(strict=False).raw_decode(self._text, at)
            return value, end
        scalar = self._SCALAR.match(self._text, at)
        if scalar is None:
            raise ValueError("no value")
        return json.loads(scalar[0].strip()), scalar.end()

    def _skip(self, at: int) -> int:
        while self._text[at].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(_GEMMA_QUOTE)
        end = self._text.index(_GEMMA_QUOTE, start)
        return self._text[start:end], end + len(_GEMMA_QUOTE)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while self._text[at := self._skip(at)] != "}":
            if self._text.startswith(_GEMMA_QUOTE, at):
                key, at = self._quoted(at)
                at = self._text.index(":", at) + 1
            else:
                colon = self._text.index(":", at)
                key, at = self._text[at:colon].strip().strip('"'), colon + 1
            found[key], at = self.value(at)
            at = self._comma(at)
        return found, at + 1

    def _array(self, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while self._text[at := self._skip(at)] != "]":
            item, at = self.value(at)
            found.append(item)
            at = self._comma(at)
        return found, at + 1

    def _comma(self, at: int) -> int:
        at = self._skip(at)
        return at + 1 if self._text[at] == "," else at
