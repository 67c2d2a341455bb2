"""Read tool calls in the notations of model families: Qwen Coder, Mistral, Gemma 4 and LFM2."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Literal

from localspec.chat.call_readers import (
    Arguments,
    Call,
    CallPiece,
    CallReader,
    JsonCalls,
    ReadResult,
    convert_value,
    new_call,
    parse_scalar,
    write_json,
    write_member,
)
from localspec.chat.found_calls import DialectCalls
from localspec.protocol.calls import GEMMA, GEMMA_QUOTE, CallFormat, schema_types

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
        entry = write_member(tag[1], convert_value(value, types))
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
        return [new_call(name.strip()), Arguments(write_json(arguments))]

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
        return parse_scalar(scalar[0].strip()), scalar.end()

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

_BLANKS = re.compile(r"\s*")
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
        self._quote = ""  # the quote before a string that is not complete
        self._may_be_closed = False  # whether the text so far ends with that quote

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        pieces: list[CallPiece] = []
        # A long argument is searched for its end only where that may have come.
        ends = (self._quote,) if self._quote else (",", ")")
        can_continue = self._state != "arguments" or self._may_be_closed
        can_continue = can_continue or any(end in text for end in ends)
        while can_continue and not (self.is_finished or self.is_broken):
            blanks = _BLANKS.match(self.raw, self._at)
            assert blanks is not None  # the expression also matches an empty text
            at = blanks.end()
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
        end, self._quote = _python_value_end(self.raw, start)
        # What follows a quote decides whether it closes the string.
        self._may_be_closed = bool(self._quote) and self.raw.rstrip().endswith(self._quote)
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
            pieces.append(Arguments(("{", ", ")[self._written > 0] + write_member(key, member)))
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


def _python_value_end(text: str, at: int) -> tuple[int, str]:
    """Return where the value at `at` ends, before a comma or a bracket.

    If that has not come yet, return -1, and the quote of a string that is not complete.
    """
    depth = 0
    while at < len(text):
        char = text[at]
        if char in "\"'":
            at = _string_end(text, at)
            if at < 0:
                return -1, char
            continue
        if char in ",)]}" and not depth:
            return at, ""
        depth += (char in "([{") - (char in ")]}")
        at += 1
    return -1, ""


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
