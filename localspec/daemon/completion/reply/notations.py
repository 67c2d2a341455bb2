"""Tool calls that are no plain JSON: Qwen Coder's tags, Mistral's [ARGS], Gemma 4's own notation."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection
from typing import Any

from localspec.daemon.completion.reply.calls import (
    Arguments,
    Call,
    CallPiece,
    Fed,
    JsonCalls,
    Reader,
    finite,
    new_call,
    typed,
)
from localspec.daemon.completion.reply.found import FoundCalls
from localspec.daemon.completion.reply.tools import GEMMA_QUOTE
from localspec.protocol.calls import CallFormat, types_of

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_NEXT = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_CLOSE = "</parameter>"
# Up to the marker that ends a value of JSON, which may have that marker in a string.
_JSON_VALUE = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!/parameter>))*', re.DOTALL)
_JSON_OBJECT = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!tool_call\|>))*', re.DOTALL)


def reader_for(form: CallFormat, tools: dict[str, Any], names: Collection[str] | None) -> Reader:
    """The reader for a format's calls; `names`, if given, are the only ones it takes."""
    match form.kind:
        case "hermes" | "tags":
            return TaggedCall(tools)
        case "mistral" | "named":
            return ArgsCalls(form.middle or "[ARGS]")
        case "gemma":
            return GemmaCall()
        case "found":
            return FoundCalls(form, tools)
        case _:
            return JsonCalls(names.__contains__) if names is not None else JsonCalls()


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
    """<tool_call>'s inside: JSON, or <function=name><parameter=key>value</parameter></function>.

    A value may have any marker in it but the one that ends it, and JSON that one too.
    """

    def __init__(self, tools: dict[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._schema: dict[str, Any] | None = None  # of the function, once it is named
        self._at = 0  # how much of `raw` is read
        self._written = 0  # parameters

    def _own(self, text: str) -> Fed:
        self.raw += text
        start = self.raw.lstrip()
        if start and not start.startswith("<"):
            return self._as_json(self.raw.removesuffix(start), start)
        pieces: list[CallPiece] = []
        if self._schema is None and (name := _FUNCTION.search(self.raw)):
            self._schema, self._at = self._tools.get(name[1].strip(), {}), name.end()
            pieces.append(new_call(name[1].strip()))
        if self._schema is None:
            self.broken = not "<function=".startswith(start[:10])
            return [], ""
        while not self.over and (found := _NEXT.search(self.raw, self._at)):
            if not self._parameter(found, pieces, final=False):
                return pieces, ""
        rest, self.raw = self.raw[self._at :], self.raw[: self._at]
        if not self.over:
            self.raw, rest = self.raw + rest, ""
        return pieces, rest

    def _parameter(self, found: re.Match[str], pieces: list[CallPiece], *, final: bool) -> bool:
        """Read what is found: a parameter, or the end. False: it is not whole yet."""
        if found[1] is None:
            pieces.append(Arguments("}" if self._written else "{}"))
            self.over, self._at = True, found.end()
            return True
        schema = self._schema or {}
        known = schema.get("properties")
        types = types_of(known.get(found[1]) if isinstance(known, dict) else None, schema)
        close = self.raw.find(_CLOSE, found.end())
        if close >= 0 and not final and not types & {"string", "any"}:
            read = _JSON_VALUE.match(self.raw, found.end())
            assert read is not None  # it matches nothing, too
            close = read.end() if self.raw.startswith(_CLOSE, read.end()) else -1
        if close < 0:
            return False
        value = self.raw[found.end() : close].removesuffix("\n")
        written = f"{json.dumps(found[1])}: {json.dumps(typed(value, types), ensure_ascii=False)}"
        pieces.append(Arguments((", " if self._written else "{") + written))
        self._written, self._at = self._written + 1, close + len(_CLOSE)
        return True

    def _own_end(self) -> list[CallPiece]:
        self.broken = self._schema is None
        pieces: list[CallPiece] = []
        while not self.broken and not self.over:
            found = _NEXT.search(self.raw, self._at)
            if found is None or not self._parameter(found, pieces, final=True):
                pieces.append(Arguments("}" if self._written else "{}"))
                break
        return pieces


class ArgsCalls(_OrJson):
    """[TOOL_CALLS]'s inside: an array of calls, or name[ARGS]{…}, or name[CALL_ID]id[ARGS]{…}."""

    _LONGEST = 200  # characters of a name and an id; what is longer is text

    def __init__(self, middle: str) -> None:
        super().__init__()
        self._middle = middle

    def _own(self, text: str) -> Fed:
        self.raw += text
        start = self.raw.lstrip()
        if start.startswith("{") or (re.match(r"\[\s*(\{|$)", start) and start != "["):
            return self._as_json("", start)
        head, found, rest = start.partition(self._middle)
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
        end = self._end()
        if end < 0:
            return [], ""
        rest, self.raw = self.raw[end:], self.raw[:end]
        return self._read(), rest

    def _end(self) -> int:
        """Where the call is over; JSON may have the marker in a string. -1: it is not, so far."""
        if not self.raw.lstrip().startswith("{"):
            return self.raw.find("<tool_call|>")
        value = _JSON_OBJECT.match(self.raw)
        assert value is not None  # it matches nothing, too
        return value.end() if self.raw.startswith("<tool_call|>", value.end()) else -1

    def _read(self) -> list[CallPiece]:
        text = self.raw.strip()
        if text.startswith("{"):
            inner = JsonCalls()
            pieces, _ = inner.feed(text)
            if not (inner.over or inner.broken):
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
        if self._text.startswith(GEMMA_QUOTE, at):
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
        return json.loads(scalar[0].strip(), parse_float=finite), scalar.end()

    def _skip(self, at: int) -> int:
        while self._text[at].isspace():
            at += 1
        return at

    def _quoted(self, at: int) -> tuple[str, int]:
        start = at + len(GEMMA_QUOTE)
        end = self._text.index(GEMMA_QUOTE, start)
        return self._text[start:end], end + len(GEMMA_QUOTE)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while self._text[at := self._skip(at)] != "}":
            if self._text.startswith(GEMMA_QUOTE, at):
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
