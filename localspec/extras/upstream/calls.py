"""Put the tool calls together that a server sends in parts, however it numbers them.

OpenAI numbers the calls of an answer by `index`, and gives the name and the id of each in its first part.
Other servers leave the index out, give every call the same one, or repeat names and ids. A part that can
belong to one call only is read as that. Any other is an error, because arguments would end up in the wrong
call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.chat.notations.call_readers import new_call
from localspec.errors import UpstreamError
from localspec.extras.upstream.dialects import parse_count
from localspec.protocol.pieces import Arguments, Call

_MAX_CALLS = 1024
_MAX_NAME_CHARACTERS = 1024  # of a call's name, and of its id
_JSON_STRUCTURE = re.compile(r'[\\"{}\[\]]')


@dataclass(slots=True, eq=False)
class _StreamedCall:
    """One call. `is_complete`: its arguments are a whole object, so no more of them can follow."""

    index: int | None
    id: str
    name: str = ""
    is_complete: bool = False
    has_arguments: bool = False
    unsent: list[str] = field(default_factory=list)
    _depth: int = 0
    _in_string: bool = False
    _escaped_at: int = -1  # offset in the next part of a character that follows a backslash

    @property
    def is_begun(self) -> bool:
        """Whether a part of its arguments is here, and not all of them."""
        return self.has_arguments and not self.is_complete

    def may_have(self, index: int | None) -> bool:
        """Return whether a part with this index may belong to it."""
        return index is None or self.index is None or self.index == index

    def add(self, arguments: str) -> None:
        """Add a part of the arguments. Each character is scanned once, however many parts there are."""
        if not arguments:
            return
        self.unsent.append(arguments)
        self.has_arguments = self.has_arguments or bool(arguments.strip())
        escaped_at = self._escaped_at
        for match in _JSON_STRUCTURE.finditer(arguments):
            at, character = match.start(), match.group()
            if at == escaped_at:
                continue
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                escaped_at = at + 1 if character == "\\" else escaped_at
            elif character != "\\":
                self._depth += 1 if character in "{[" else -1
                self.is_complete = self.is_complete or self._depth <= 0
        self._escaped_at = 0 if escaped_at == len(arguments) else -1


@dataclass(slots=True)
class StreamedCalls:
    """The calls of one answer so far. `invalid` returns the error that a reason is put into."""

    invalid: Callable[[str], UpstreamError]
    _calls: list[_StreamedCall] = field(default_factory=list)
    _begun: int = 0  # calls whose name was taken
    _taken: int = 0  # calls that were taken to their end
    _ids: set[str] = field(default_factory=set)

    def add(self, parts: object) -> None:
        """Add the calls of one chunk. Raises UpstreamError if a part is invalid or ambiguous."""
        if not isinstance(parts, list):
            raise self.invalid("'tool_calls' is not a list")
        seen: list[_StreamedCall] = []
        for part in parts:
            function = part.get("function") if isinstance(part, dict) else ""
            if not isinstance(function, dict | None):
                raise self.invalid("a call is not an object")
            index = part.get("index")
            if index is not None and (index := parse_count(index)) is None:
                raise self.invalid("the 'index' of a call is not a number")
            call_id, name = self._text(part, "id"), self._text(function or {}, "name")
            arguments = self._arguments(function or {})
            call = self._find(index, call_id, name, bool(arguments.strip()), seen)
            if call is None:
                call = self._begin(index)
            seen.append(call)
            call.id, call.name = call.id or call_id, call.name or name
            call.index = index if call.index is None else call.index
            if call.is_complete and arguments.strip():
                raise self.invalid("the arguments of a call go on after their end")
            if call.has_arguments or arguments.strip() != "null":  # which means that there are none
                call.add(arguments)

    def take(self) -> Iterator[Call | Arguments]:
        """Yield what can be passed on: one call after the other, because clients cannot read them mixed."""
        while self._taken < len(self._calls):
            call = self._calls[self._taken]
            if not call.name:
                return
            if self._begun == self._taken:
                self._begun += 1
                # An id that another call has would mix up their results. Without one, ours is used.
                call_id = "" if call.id in self._ids else call.id
                self._ids.add(call_id)
                yield Call(call_id or new_call(call.name).id, call.name, self._taken)
            if arguments := "".join(call.unsent):
                yield Arguments(arguments, self._taken)
            call.unsent.clear()
            if not call.is_complete:
                return
            self._taken += 1

    def end(self, *, cut: bool) -> Iterator[Call | Arguments]:
        """Yield the rest. A call without arguments gets an empty object, unless the answer was `cut`."""
        for call in self._calls:
            if not call.name:
                raise self.invalid("a call has no name")
            if not (call.has_arguments or cut):
                call.unsent = ["{}"]
            call.is_complete = True
        yield from self.take()

    def _begin(self, index: int | None) -> _StreamedCall:
        if len(self._calls) >= _MAX_CALLS:
            raise self.invalid(f"it has more than {_MAX_CALLS} calls")
        call = _StreamedCall(index, "")
        self._calls.append(call)
        return call

    def _find(
        self,
        index: int | None,
        call_id: str,
        name: str,
        has_arguments: bool,
        seen: list[_StreamedCall],
    ) -> _StreamedCall | None:
        """Return the call that a part continues, or None if it begins one.

        `seen` are the calls of the parts before it in the same list, where two names are two calls.
        """
        same_id = [call for call in self._calls if call_id and call.id == call_id]
        known = next((call for call in reversed(same_id) if call.may_have(index)), None)
        call = known or (same_id[-1] if same_id else self._latest(index, call_id))
        if call is None:
            return None
        can_begin, problem = bool(name) and (call.is_complete or call in seen), ""
        if same_id and not known:
            problem = "two calls have the same id"
        elif call_id and call.id and not known:
            can_begin, problem = bool(name) or not has_arguments, "a call changes its id"
        elif name and call.name and name != call.name:
            problem = "a call changes its name"
        if problem and can_begin:
            return None
        if problem:
            raise self.invalid(problem)
        if name and call.name:
            is_listed = index is None and call in seen
            if call.is_complete and has_arguments and (is_listed or not known):
                return None
            if index is None and not (call.id or call.is_begun):  # nothing else tells them apart
                if is_listed:
                    return None
                raise self.invalid("a name comes twice, which may be one call or two")
        elif not call_id and any(
            other.is_begun and other.may_have(index) for other in self._calls if other is not call
        ):
            raise self.invalid("a part of a call does not say which call it belongs to")
        return call

    def _latest(self, index: int | None, call_id: str) -> _StreamedCall | None:
        """Return the last call under an index, or else one that may get it now."""
        recent = [*reversed(self._calls)]
        exact = (call for call in recent if index is None or call.index == index)
        unnumbered = (call for call in recent if call.index is None and not call_id)
        return next(exact, None) or next(unnumbered, None)

    def _text(self, fields: dict[str, Any], key: str) -> str:
        value = fields.get(key)
        if value is not None and not isinstance(value, str):
            raise self.invalid(f"the '{key}' of a call is not a text")
        if len(value or "") > _MAX_NAME_CHARACTERS:
            raise self.invalid(f"the '{key}' of a call is longer than {_MAX_NAME_CHARACTERS}")
        return value or ""

    def _arguments(self, function: dict[str, Any]) -> str:
        """Return the arguments as text, from a text or an object. An empty object stands for none so far."""
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            return msgspec.json.encode(arguments).decode() if arguments else ""
        if arguments is not None and not isinstance(arguments, str):
            raise self.invalid("the 'arguments' of a call are neither a text nor an object")
        return arguments or ""
