"""Read tool calls that are not plain JSON: Qwen Coder's tags, Mistral's [ARGS], Gemma 4's own notation."""

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

_FUNCTION_TAG = re.compile(r"<function=([^>\n]+)>")
_NEXT_TAG = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_PARAMETER_CLOSE = "</parameter>"
# Match up to the marker that ends a JSON value. Inside of a string the marker does not count.
_JSON_VALUE = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!/parameter>))*', re.DOTALL)
_JSON_OBJECT = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!tool_call\|>))*', re.DOTALL)


def reader_for(form: CallFormat, tools: dict[str, Any], names: Collection[str] | None) -> Reader:
    """Return the reader for a format's calls; it accepts only `names`, if they are given."""
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


class _NotationOrJson(Reader):
    """Base of readers for a notation whose models sometimes write JSON instead.

    In that case `_json` reads the text, and `_lead` is the text before the JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self._json: JsonCalls | None = None
        self._lead = ""

    def feed(self, text: str) -> Fed:
        if self._json is None:
            return self._feed_notation(text)
        result = self._json.feed(text)
        self.over, self.broken = self._json.over, self._json.broken
        self.raw = self._lead + self._json.raw
        return result

    def end(self) -> list[CallPiece]:
        if self._json is None:
            return self._end_notation()
        pieces = self._json.end()
        self.broken = self._json.broken
        return pieces

    def _switch_to_json(self, lead: str, text: str, call: Call | None = None) -> Fed:
        self._json, self._lead = JsonCalls(call=call), lead
        return self.feed(text)

    @abstractmethod
    def _feed_notation(self, text: str) -> Fed:
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

    def _feed_notation(self, text: str) -> Fed:
        self.raw += text
        start = self.raw.lstrip()
        if start and not start.startswith("<"):
            return self._switch_to_json(self.raw.removesuffix(start), start)
        pieces: list[CallPiece] = []
        if self._schema is None and (name := _FUNCTION_TAG.search(self.raw)):
            self._schema, self._at = self._tools.get(name[1].strip(), {}), name.end()
            pieces.append(new_call(name[1].strip()))
        if self._schema is None:
            self.broken = not "<function=".startswith(start[:10])
            return [], ""
        while not self.over and (tag := _NEXT_TAG.search(self.raw, self._at)):
            if not self._read_tag(tag, pieces, final=False):
                return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        if not self.over:
            self.raw, remaining = self.raw + remaining, ""
        return pieces, remaining

    def _read_tag(self, tag: re.Match[str], pieces: list[CallPiece], *, final: bool) -> bool:
        """Read what `tag` begins, a parameter or the end; return False if it is not complete yet."""
        if tag[1] is None:
            pieces.append(Arguments("}" if self._written else "{}"))
            self.over, self._at = True, tag.end()
            return True
        schema = self._schema or {}
        properties = schema.get("properties")
        types = types_of(properties.get(tag[1]) if isinstance(properties, dict) else None, schema)
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
        entry = f"{json.dumps(tag[1])}: {json.dumps(typed(value, types), ensure_ascii=False)}"
        pieces.append(Arguments((", " if self._written else "{") + entry))
        self._written, self._at = self._written + 1, close + len(_PARAMETER_CLOSE)
        return True

    def _end_notation(self) -> list[CallPiece]:
        self.broken = self._schema is None
        pieces: list[CallPiece] = []
        while not self.broken and not self.over:
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

    def _feed_notation(self, text: str) -> Fed:
        self.raw += text
        start = self.raw.lstrip()
        if start.startswith("{") or (re.match(r"\[\s*(\{|$)", start) and start != "["):
            return self._switch_to_json("", start)
        head, separator, arguments = start.partition(self._middle)
        if not separator:
            self.broken = "\n" in start or len(start) > self._MAX_HEAD_CHARS
            return [], ""
        name, _, call_id = head.partition("[CALL_ID]")
        call = new_call(name.strip())
        call.id = call_id.strip() or call.id
        return self._switch_to_json(head + separator, arguments, call)

    def _end_notation(self) -> list[CallPiece]:
        self.broken = True
        return []


# ---------------------------------------------------------------- Gemma 4


class GemmaCall(Reader):
    """Reads the inside of <|tool_call>: call:name{key:<|"|>text<|"|>,other:1}, or an object with a name."""

    def feed(self, text: str) -> Fed:
        self.raw += text
        end = self._end()
        if end < 0:
            return [], ""
        remaining, self.raw = self.raw[end:], self.raw[:end]
        return self._read(), remaining

    def _end(self) -> int:
        """Return where the call ends, -1 if it is not complete; JSON may contain the marker in a string."""
        if not self.raw.lstrip().startswith("{"):
            return self.raw.find("<tool_call|>")
        value = _JSON_OBJECT.match(self.raw)
        assert value is not None  # the expression also matches an empty text
        return value.end() if self.raw.startswith("<tool_call|>", value.end()) else -1

    def _read(self) -> list[CallPiece]:
        text = self.raw.strip()
        if text.startswith("{"):
            inner = JsonCalls()
            pieces, _ = inner.feed(text)
            if not (inner.over or inner.broken):
                pieces += inner.end()  # the part of a call that was cut off
            self.over, self.broken = not inner.broken, inner.broken
            return [] if inner.broken else pieces
        name, brace, inside = text.removeprefix("call:").partition("{")
        try:
            arguments, _ = _GemmaValues("{" + inside).value(0)
        except (ValueError, IndexError, RecursionError):
            brace = ""
        if not brace or not name.strip():
            self.broken = True
            return []
        self.over = True
        return [new_call(name.strip()), Arguments(json.dumps(arguments, ensure_ascii=False))]

    def end(self) -> list[CallPiece]:
        return [] if self.over else self._read()


class _GemmaValues:
    """Gemma 4's values: like JSON, with bare keys and <|"|> around text."""

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
        scalar = self._SCALAR.match(self._text, at)
        if scalar is None:
            raise ValueError("no value")
        return json.loads(scalar[0].strip(), parse_float=finite), scalar.end()

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
            if self._text.startswith(GEMMA_QUOTE, at):
                key, at = self._quoted(at)
                at = self._text.index(":", at) + 1
            else:
                colon = self._text.index(":", at)
                key, at = self._text[at:colon].strip().strip('"'), colon + 1
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
