"""Calls in a notation that was found from a template: its literals, and between them names and arguments."""

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
_LONGEST = 400  # characters of what stands before a call's arguments; what is longer is text
QUOTE = "<![CDATA[", "]]>"
_MORE, _OTHER = -1, -2  # in place of where a literal ends


def after(literal: str, text: str, at: int) -> int:
    """Where `literal` ends in `text`, that begins at `at`; blanks may be others. _MORE: it may still come;
    _OTHER: something else stands there.
    """
    for part in filter(None, _PARTS.split(literal)):
        rest = text[at : at + max(len(part), 1)]
        if part == ID:
            found = _ID.match(text, at)
            assert found is not None  # it matches nothing, too
            if found.end() == len(text):
                return _MORE
            at = found.end()
        elif rest == part:
            at += len(part)
        elif part.startswith(rest) and at + len(rest) == len(text):
            return _MORE
        elif part.isspace():
            at += len(text[at:]) - len(text[at:].lstrip())
        else:
            return _OTHER
    return at


class FoundCalls(Reader):
    """All calls that follow one marker, with what closes them. In place of a name whose arguments are no
    JSON may stand the whole call as an object.
    """

    def __init__(self, form: CallFormat, tools: dict[str, Any]) -> None:
        super().__init__()
        self._form = form
        self._tools = tools
        self._state: Literal["name", "json", "parameters", "behind"] = "name"
        self._before = form.lead  # what stands before the next name
        self._at = 0  # how much of `raw` is read
        self._json = JsonCalls()
        self._schema: dict[str, Any] = {}  # of the tool that is being called
        self._written = 0  # its parameters
        self._calls = 0

    def feed(self, text: str) -> Fed:
        self.raw += text
        pieces: list[CallPiece] = []
        self._read(pieces, final=False)
        if not (self.over or self.broken):
            return pieces, ""
        rest, self.raw = self.raw[self._at :], self.raw[: self._at]
        return pieces, rest

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
        goes_on = True
        while goes_on and not (self.over or self.broken):
            match self._state:
                case "name":
                    goes_on = self._name(pieces)
                case "json":
                    goes_on = self._arguments(pieces)
                case "parameters":
                    goes_on = self._parameter(pieces, final=final)
                case "behind":
                    goes_on = self._behind(final=final)

    def _name(self, pieces: list[CallPiece]) -> bool:
        end = start = after(self._before, self.raw, self._at)
        name = ""
        if start >= 0:
            if self._form.parameter and self.raw.startswith("{", start):
                self._at, self._state, self._json = start, "json", JsonCalls()
                return True
            found = _NAME.match(self.raw, start)
            assert found is not None  # it matches nothing, too
            name = found[0]
            if found.end() == len(self.raw):  # more of it may come
                end = _MORE
            else:
                end = after(self._form.middle, self.raw, found.end()) if name else _OTHER
        if end == _OTHER or (end == _MORE and len(self.raw) - self._at > _LONGEST):
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

    def _arguments(self, pieces: list[CallPiece]) -> bool:
        found, rest = self._json.feed(self.raw[self._at :])
        pieces += found
        self._at = len(self.raw) - len(rest)
        if self._json.broken:
            self.broken, self.over = not self._calls, bool(self._calls)
        elif self._json.over:
            self._state = "behind"
            self._calls += bool(self._form.parameter)
        return self._json.over

    def _parameter(self, pieces: list[CallPiece], *, final: bool) -> bool:
        """Read the next one, or that there is none."""
        opening, before_text, before_other, _ = self._form.parameter
        start = after(opening, self.raw, self._blanks())
        if start == _OTHER:
            pieces.append(Arguments("}" if self._written else "{}"))
            self._state = "behind"
            return True
        if start == _MORE:
            return False
        ends = [(before_text, self.raw.find(before_text, start))]
        ends.append((before_other, self.raw.find(before_other, start)))
        known = [(at, len(between)) for between, at in ends if at >= 0]
        if not known:
            return False
        key_end, size = min(known)
        key = self.raw[start:key_end]
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = types_of(schema, self._schema)
        if before_text != before_other:  # the notation says it
            types = {"string"} if self.raw.startswith(before_text, key_end) else {"object"}
        value = self._value(key_end + size, types, final=final)
        if value is None:
            return False
        written = f"{json.dumps(key)}: {json.dumps(typed(value, types), ensure_ascii=False)}"
        pieces.append(Arguments((", " if self._written else "{") + written))
        self._written += 1
        return True

    def _value(self, start: int, types: set[str], *, final: bool) -> str | None:
        """The text of a value; None: it is not whole yet. JSON may have in it what ends it, and so may what
        a model quotes as XML does.
        """
        close = self._form.parameter[3]
        core = close.strip()
        begun, over = QUOTE
        if self.raw.startswith(begun, start) and (end := self.raw.find(over + core, start)) >= 0:
            self._at = end + len(over + core)
            return self.raw[start + len(begun) : end]
        if begun.startswith(self.raw[start : start + len(begun)]) and not final:
            return None
        end = self.raw.find(core, start)
        if end >= 0 and not final and not types & {"string", "any"}:
            end = self._json_end(start, core)
        if end < 0:
            return None
        self._at = end + len(core)
        return self.raw[start:end].removesuffix(close[: close.index(core)])

    def _json_end(self, start: int, core: str) -> int:
        text = self.raw[start:]
        blanks = len(text) - len(text.lstrip())
        try:
            _, size = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
        except (ValueError, RecursionError):
            first = text.find(core)  # no JSON, unless this one stands in a string
            whole = re.sub(r"\\.", "", text[:first]).count('"') % 2 == 0
            return start + first if whole else -1
        behind = start + blanks + size
        behind += len(self.raw[behind:]) - len(self.raw[behind:].lstrip())
        return behind if self.raw.startswith(core, behind) else self.raw.find(core, start)

    def _behind(self, *, final: bool) -> bool:
        """After a call's arguments: another, or the end."""
        at = self._blanks()
        again = after(self._form.again, self.raw, at) if self._form.again else _OTHER
        close = after(self._form.close, self.raw, at)
        if again >= 0:
            self._state, self._before, self._at = "name", "", again
        elif final or _MORE not in (again, close):
            self.over = True
            self._at = close if close >= 0 else self._at
        return again >= 0

    def _blanks(self) -> int:
        return self._at + len(self.raw[self._at :]) - len(self.raw[self._at :].lstrip())
