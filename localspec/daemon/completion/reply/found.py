"""Read calls in a notation that was discovered from a template: literals, and names and arguments between."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from localspec.daemon.completion.reply.calls import (
    Arguments,
    CallPiece,
    Fed,
    JsonCalls,
    Reader,
    new_call,
    typed,
)
from localspec.protocol.calls import ID, CallFormat, types_of

_NAME = re.compile(r"[\w.-]*", re.ASCII)
_ID = re.compile(r"[\w.:-]*", re.ASCII)
_PARTS = re.compile(rf"({ID}|\s+)")
_MAX_HEAD_CHARS = 400  # A longer text before a call's arguments means that it is not a call.
QUOTE = "<![CDATA[", "]]>"
_INCOMPLETE, _MISMATCH = -1, -2  # returned instead of the end of a literal


def after(literal: str, text: str, at: int) -> int:
    """Return where `literal` ends in `text` if it begins at `at`; its blanks match any blanks.

    Returns _INCOMPLETE if the text ends within the literal, and _MISMATCH if it differs.
    """
    for part in filter(None, _PARTS.split(literal)):
        actual = text[at : at + max(len(part), 1)]
        if part == ID:
            match = _ID.match(text, at)
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


class FoundCalls(Reader):
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

    def feed(self, text: str) -> Fed:
        self.raw += text
        pieces: list[CallPiece] = []
        self._read(pieces, final=False)
        if not (self.over or self.broken):
            return pieces, ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        return pieces, remaining

    def end(self) -> list[CallPiece]:
        pieces: list[CallPiece] = []
        self._read(pieces, final=True)
        if self._state == "json":
            pieces += self._json.end()
            self._calls += not self._json.broken
        elif self._state == "parameters":
            pieces.append(Arguments("}" if self._written else "{}"))
        self.broken = not self._calls
        return pieces

    def _read(self, pieces: list[CallPiece], *, final: bool) -> None:
        can_continue = True
        while can_continue and not (self.over or self.broken):
            match self._state:
                case "name":
                    can_continue = self._read_name(pieces)
                case "json":
                    can_continue = self._read_arguments(pieces)
                case "parameters":
                    can_continue = self._read_parameter(pieces, final=final)
                case "behind":
                    can_continue = self._read_end(final=final)

    def _read_name(self, pieces: list[CallPiece]) -> bool:
        end = start = after(self._before, self.raw, self._at)
        name = ""
        if start >= 0:
            if self._form.parameter and self.raw.startswith("{", start):
                self._at, self._state, self._json = start, "json", JsonCalls()
                return True
            match = _NAME.match(self.raw, start)
            assert match is not None  # the expression also matches an empty text
            name = match[0]
            if match.end() == len(self.raw):  # the name may not be complete
                end = _INCOMPLETE
            else:
                end = after(self._form.middle, self.raw, match.end()) if name else _MISMATCH
        if end == _MISMATCH or (end == _INCOMPLETE and len(self.raw) - self._at > _MAX_HEAD_CHARS):
            self.broken, self.over = not self._calls, bool(self._calls)
        if end < 0:
            return False
        call = new_call(name)
        self._calls += 1
        self._at, self._schema, self._written = end, self._tools.get(name, {}), 0
        if self._form.parameter:
            self._state = "parameters"
            pieces.append(call)
        else:
            self._state, self._json = "json", JsonCalls(call=call)
        return True

    def _read_arguments(self, pieces: list[CallPiece]) -> bool:
        call_pieces, remaining = self._json.feed(self.raw[self._at :])
        pieces += call_pieces
        self._at = len(self.raw) - len(remaining)
        if self._json.broken:
            self.broken, self.over = not self._calls, bool(self._calls)
        elif self._json.over:
            self._state = "behind"
            self._calls += bool(self._form.parameter)
        return self._json.over

    def _read_parameter(self, pieces: list[CallPiece], *, final: bool) -> bool:
        """Read the next parameter, or notice that there is none; return whether that was possible."""
        opening, text_separator, value_separator, _ = self._form.parameter
        start = after(opening, self.raw, self._skip_blanks())
        if start == _MISMATCH:
            pieces.append(Arguments("}" if self._written else "{}"))
            self._state = "behind"
            return True
        if start == _INCOMPLETE:
            return False
        ends = [(text_separator, self.raw.find(text_separator, start))]
        ends.append((value_separator, self.raw.find(value_separator, start)))
        candidates = [(position, len(separator)) for separator, position in ends if position >= 0]
        if not candidates:
            return False
        key_end, separator_length = min(candidates)
        key = self.raw[start:key_end]
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = types_of(schema, self._schema)
        if text_separator != value_separator:  # the notation itself tells texts from other values
            types = {"string"} if self.raw.startswith(text_separator, key_end) else {"object"}
        value = self._read_value(key_end + separator_length, types, final=final)
        if value is None:
            return False
        entry = f"{json.dumps(key)}: {json.dumps(typed(value, types), ensure_ascii=False)}"
        pieces.append(Arguments((", " if self._written else "{") + entry))
        self._written += 1
        return True

    def _read_value(self, start: int, types: set[str], *, final: bool) -> str | None:
        """Return the text of a value; None if it is not complete yet.

        The closing literal may also occur inside JSON, or in a value that the model quotes as XML does.
        """
        close = self._form.parameter[3]
        core = close.strip()
        quote_open, quote_close = QUOTE
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
        next_call = after(self._form.again, self.raw, position) if self._form.again else _MISMATCH
        close = after(self._form.close, self.raw, position)
        if next_call >= 0:
            self._state, self._before, self._at = "name", "", next_call
        elif final or _INCOMPLETE not in (next_call, close):
            self.over = True
            self._at = close if close >= 0 else self._at
        return next_call >= 0

    def _skip_blanks(self) -> int:
        return self._at + len(self.raw[self._at :]) - len(self.raw[self._at :].lstrip())
