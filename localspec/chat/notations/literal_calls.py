"""Read tool calls in a notation of literals, with names and arguments between them.

Many families have such a notation, and so has each that is discovered from a chat template.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from localspec.chat.notations.call_readers import (
    CallPiece,
    CallReader,
    JsonCalls,
    Members,
    ReadResult,
    convert_value,
    new_call,
    skip_blanks,
)
from localspec.chat.notations.schemas import child_schema, schema_types
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    TYPE_PLACEHOLDER,
    CallFormat,
)

_NAME = re.compile(r"[\w.-]*", re.ASCII)
_CALL_ID = re.compile(r"[\w.:-]*", re.ASCII)
# Blanks, and places between brackets, quotes and tags, where a model may write blanks of its own.
_PARTS = re.compile(rf"({CALL_ID_PLACEHOLDER}|\s+|(?<=[\[\]{{}}>,:\"])(?=[\[\]{{}}<,:\"`]))")
# A call, or an array of calls, of which only the bracket may have come.
_JSON_START = re.compile(r"\{|\[\s*(?:\{|\Z)")
_MAX_HEAD_CHARS = 400  # A longer text before a call's arguments means that it is not a call.
CDATA_MARKERS = "<![CDATA[", "]]>"
_INCOMPLETE, MISMATCH = -1, -2  # returned instead of the end of a literal


def match_literal(literal: str, text: str, at: int) -> int:
    """Return where `literal` ends in `text` if it begins at `at`; blanks may differ outside of its words.

    Returns _INCOMPLETE if the text ends within the literal, and MISMATCH if it differs.
    """
    parts = _PARTS.split(literal)
    if not parts[-1]:  # behind the last blanks, which may be followed by those of a value
        parts.pop()
    for number, part in enumerate(parts):
        actual = text[at : at + max(len(part), 1)]
        if part == CALL_ID_PLACEHOLDER:
            match = _CALL_ID.match(text, at)
            assert match is not None  # the expression also matches an empty text
            if match.end() == len(text):
                return _INCOMPLETE
            at = match.end()
        elif not part:
            at = skip_blanks(text, at) if number else at
        elif actual == part:
            at += len(part)
            if part.isspace() and number + 1 < len(parts):
                at = skip_blanks(text, at)
        elif part.startswith(actual) and at + len(actual) == len(text):
            return _INCOMPLETE
        elif part.isspace():
            at = skip_blanks(text, at)
        else:
            return MISMATCH
    return at


def closing_parts(form: CallFormat) -> list[str]:
    """Return the markers that end the calls of a format, of which a model may leave out the last."""
    return re.split(r"(?<=>)(?=<)|(?<=[\]}])(?=[\]}`]|<[|/])|\s+", form.close.strip())


def _loose_pattern(literal: str) -> str:
    """Return an expression of a literal whose blanks may differ, and whose last line end may be missing."""
    text = literal.removesuffix("\n")
    parts = (re.escape(part) if part.strip() else r"\s*" for part in _PARTS.split(text))
    return "".join(parts) + ("\n?" if text != literal else "")


class LiteralCalls(CallReader):
    """Reads all calls that follow one marker, and what closes them.

    A call may also come as a JSON object, or several as an array, where the notation has a marker for each
    call, or arguments that are not JSON.
    """

    def __init__(self, form: CallFormat, tools: dict[str, Any], *, is_opened: bool = False) -> None:
        """is_opened: the text begins with the first name, behind all that stands before it."""
        super().__init__()
        self._form = form
        self._tools = tools
        self._state: Literal["name", "json", "parameters", "behind"] = "name"
        self._before = "" if is_opened else form.lead  # the literal before the next name
        self._json = JsonCalls()
        self._schema: dict[str, Any] = {}  # the schema of the tool that is being called
        self._members = Members()  # the parameters read so far
        self._has_tags = bool(form.parameter or form.elements)
        self._value_end = form.parameter[3].strip()[-1] if form.parameter else ">"
        self._is_object = False  # the call that is being read is a JSON object with its name
        separators = (_loose_pattern(literal) for literal in form.parameter[1:3])
        self._separator = re.compile("|".join(separators).replace(TYPE_PLACEHOLDER, r"\w+"))
        # Line ends between tags may be missing.
        self._middle = (form.middle.rstrip() if self._has_tags else "") or form.middle
        self._next_tag: re.Pattern[str] | None = None
        parts = closing_parts(form)
        # The last part closes a call in JSON, and the first ones a call whose last marker is missing.
        shorter = ("".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        self._closers = [form.close, *([parts[-1]] if form.kind == "named" else []), *shorter]
        if form.kind == "named" and form.parameter:
            self._next_tag = re.compile(f"{re.escape(form.parameter[0])}|{re.escape(parts[0])}")

    @property
    def undecided(self) -> int:
        return len(self.raw) - self._at if self._state == "behind" else 0

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        pieces: list[CallPiece] = []
        # A long value is read only where what closes it may have come.
        waits = self._state == "parameters" and (self._form.elements or self.in_value)
        if waits and self._value_end not in text:
            return [], ""
        self._read(pieces, final=False)
        return pieces, self._take_remainder()

    def end(self) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        self._read(pieces, final=True)
        if self._state == "json":
            pieces += self._json.end()
            self._calls += not self._json.is_broken
        elif self._state == "parameters":
            pieces.append(self._members.close())
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
        start = match_literal(self._before, self.raw, skip_blanks(self.raw, self._at))
        end, name, call_id = start, "", ""
        if (json_start := self._find_json(start)) is not None:
            if json_start >= 0:
                self._at, self._state = json_start, "json"
                self._json, self._is_object = JsonCalls(), True
            return json_start >= 0
        if start >= 0:
            match = _NAME.match(self.raw, skip_blanks(self.raw, start))
            assert match is not None  # the expression also matches an empty text
            name, end = match[0], match.end()
            if end == len(self.raw):  # the name may not be complete
                end = _INCOMPLETE
            elif name:
                end, call_id = self._read_middle(end)
            else:
                end = MISMATCH
        if end == MISMATCH or (end == _INCOMPLETE and len(self.raw) - self._at > _MAX_HEAD_CHARS):
            self._fail()
        if end < 0:
            return False
        call = new_call(name)
        call.id = call_id or call.id
        self._calls += 1
        self._at, self._schema, self._members = end, self._tools.get(name, {}), Members()
        if self._has_tags:
            self._state = "parameters"
            pieces.append(call)
        else:
            self._state, self._json, self._is_object = "json", JsonCalls(call=call), False
        return True

    def _find_json(self, start: int) -> int | None:
        """Return where a call in JSON begins, _INCOMPLETE if one may, and None if none does.

        start: the end of the literal before a name.
        """
        is_allowed = self._form.kind == "named" or (self._has_tags and start >= 0)
        if start == _INCOMPLETE or not is_allowed:
            return None
        at = skip_blanks(self.raw, max(start, self._at))
        match = _JSON_START.match(self.raw, at)
        if match is None:
            return None
        return at if match[0].endswith("{") else _INCOMPLETE

    def _read_middle(self, at: int) -> tuple[int, str]:
        """Return where the literal behind a name ends, and the call's id, if one stands before it."""
        identity, middle = self._form.identity, self._middle
        if identity and (start := match_literal(identity, self.raw, at)) != MISMATCH:
            end = self.raw.find(middle, start) if start >= 0 else _INCOMPLETE
            return (end + len(middle), self.raw[start:end].strip()) if end >= 0 else (end, "")
        return match_literal(middle, self.raw, at), ""

    def _read_arguments(self, pieces: list[CallPiece]) -> bool:
        call_pieces, remaining = self._json.feed(self.raw[self._at :])
        pieces += call_pieces
        self._at = len(self.raw) - len(remaining)
        if self._json.is_broken:
            self._fail()
        elif self._json.is_finished:
            self._state = "behind"
            self._calls += self._is_object
        return self._json.is_finished

    def _read_parameter(self, pieces: list[CallPiece], *, final: bool) -> bool:
        """Read the next parameter, or notice that there is none; return whether that was possible."""
        opening, text_separator, value_separator, _ = self._form.parameter
        start = match_literal(opening, self.raw, skip_blanks(self.raw, self._at))
        if start == MISMATCH:
            return self._end_or_skip(pieces, opening, final=final)
        if start == _INCOMPLETE:
            return False
        separator = self._separator.search(self.raw, start)
        if separator is None or (separator.end() == len(self.raw) and not final):
            self.in_value = separator is not None
            return False
        key = self.raw[start : separator.start()]
        if self._next_tag is not None and (not key or "\n" in key):  # a tag that is not closed
            self._at = start
            return self._end_or_skip(pieces, opening, final=final)
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = schema_types(schema, self._schema)
        if text_separator != value_separator:  # the notation itself tells texts from other values
            is_text = "".join(separator[0].split()) == "".join(text_separator.split())
            types = {"string"} if is_text else {"object"}
        value = self._read_value(separator.end(), types, final=final)
        self.in_value = value is None
        if value is None:
            return False
        pieces += self._members.add(key, convert_value(value, types))
        return True

    def _end_or_skip(self, pieces: list[CallPiece], opening: str, *, final: bool) -> bool:
        """End the parameters, or pass over text before the next one; return whether that was possible."""
        tag = self._next_tag.search(self.raw, self._at) if self._next_tag is not None else None
        if tag is not None:
            self._at = tag.start()
        elif self._next_tag is not None and not final:
            return False
        if tag is None or tag[0] != opening:
            self._end_parameters(pieces)
        return True

    def _read_element(self, pieces: list[CallPiece]) -> bool:
        """Read the next argument as an element, or notice that there is none; return as above."""
        position = skip_blanks(self.raw, self._at)
        start = match_literal(f"{self._form.elements}<", self.raw, position)
        if start == _INCOMPLETE or start == len(self.raw):
            return False
        if start == MISMATCH or self.raw[start] == "/":
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
        pieces += self._members.add(key, value)
        return True

    def _end_parameters(self, pieces: list[CallPiece]) -> None:
        pieces.append(self._members.close())
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
            # It is not JSON, or `core` is inside a string.
            ends = (end.start() for end in re.finditer(re.escape(core), text))
            outside = (at for at in ends if re.sub(r"\\.", "", text[:at]).count('"') % 2 == 0)
            return start + next(outside, -1 - start)
        end = start + blank_count + size
        end = skip_blanks(self.raw, end)
        if core.startswith(self.raw[end : end + len(core)]):  # complete, or not yet
            return end if self.raw.startswith(core, end) else -1
        return self.raw.find(core, start)

    def _read_end(self, *, final: bool) -> bool:
        """Read what follows a call's arguments: another call, or the end."""
        position = skip_blanks(self.raw, self._at)
        next_call = (
            match_literal(self._form.again, self.raw, position) if self._form.again else MISMATCH
        )
        ends = [match_literal(closer, self.raw, position) for closer in self._closers]
        if next_call >= 0:
            self._state, self._before, self._at = "name", "", next_call
        elif final or _INCOMPLETE not in (next_call, *ends):
            self.is_finished = True
            self._at = next((end for end in ends if end >= 0), self._at)
        return next_call >= 0


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
        if children:
            is_list = "object" not in types or ("array" in types and len(dict(children)) == 1)
            is_list = is_list and all(key == "item" for key, _ in children)
            return [value for _, value in children] if is_list else dict(children)
        if not text.strip() and types & {"array", "object"}:
            return {} if "object" in types else []
        return convert_value(text, types)
