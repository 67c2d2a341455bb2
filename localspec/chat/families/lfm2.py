"""LFM2's calls, as Python writes them: [name(key=value), …]."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

from localspec.chat.notations.call_readers import (
    CallPiece,
    CallReader,
    Members,
    ReadResult,
    new_call,
    skip_blanks,
)
from localspec.chat.notations.family import Family
from localspec.chat.notations.grammar import SCHEMA_ERRORS, CallGrammar
from localspec.chat.notations.lark import TextValues, Unwritable, lark_string
from localspec.chat.notations.loose_values import LooseValues, string_end
from localspec.protocol.calls import CallFormat

LFM2 = CallFormat("python", ("<|tool_call_start|>",), "<|tool_call_end|>")

_CALL_HEAD = re.compile(r"[\s,]*([\w.-]+)\s*\(", re.ASCII)
_KEYWORD = re.compile(r"([^\s=,()\[\]{}\"']+)\s*=|\*\*")


class PythonCalls(CallReader):
    """Reads calls as Python writes them: [name(key=value, …), …]; **{…} stands for several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["start", "head", "arguments", "behind"] = "start"
        self._is_list = False
        self._members = Members()  # the arguments read so far
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
            at = skip_blanks(self.raw, self._at)
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
        return pieces, self._take_remainder()

    def end(self) -> list[CallPiece]:
        self.is_broken = not self._calls
        return [self._members.close()] if self._state == "arguments" else []

    def _read_head(self, pieces: list[CallPiece]) -> bool:
        head = _CALL_HEAD.match(self.raw, self._at)
        if head is None:
            if not re.fullmatch(r"[\s,]*[\w.-]*\s*", self.raw[self._at :], re.ASCII):
                self._fail()
            return False
        pieces.append(new_call(head[1]))
        self._at, self._state = head.end(), "arguments"
        self._calls, self._members = self._calls + 1, Members()
        return True

    def _read_argument(self, pieces: list[CallPiece], at: int) -> bool:
        """Read what is at `at`: a comma, an argument or the end; return whether it is complete."""
        if self.raw[at] == ",":
            self._at = at + 1
            return True
        if self.raw[at] == ")":
            pieces.append(self._members.close())
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
            value, _ = LooseValues(self.raw[start:end] + ",").value(0)
            members = {keyword[1]: value} if keyword[1] else dict(value)
        except (ValueError, TypeError, IndexError, RecursionError):
            pieces.append(self._members.close())
            self._fail()
            return False
        for key, member in members.items():
            pieces += self._members.add(key, member)
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
            at = string_end(text, at)
            if at < 0:
                return -1, char
            continue
        if char in ",)]}" and not depth:
            return at, ""
        depth += (char in "([{") - (char in ")]}")
        at += 1
    return -1, ""


class PythonValues(TextValues):
    """Rules for arguments as Python writes them in calls, key=value, with values in JSON.

    Texts may also stand in single quotes, where nothing is escaped.
    """

    @property
    def _never(self) -> list[str]:
        return ["'", "\\"]

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        return f"({self.rules.add_pairs(self._pairs(self._root, self._write_pair), ', ')})"

    def _write_pair(self, key: str, schema: Any) -> str:
        return f"{lark_string(key + '=')} {self._write_python(schema)}"

    def _write_python(self, schema: Any) -> str:
        target = self._target(schema)
        if (parts := self._alternatives(target)) is not None:
            return self.rules.add(" | ".join(map(self._write_python, parts)))
        ways = [self._write_json(schema)]
        if self._kinds(target) in ({"string"}, {"any"}):
            with suppress(Unwritable):
                ways.append(f'"\'" {self.rules.add_terminal(self._strings(target))} "\'"')
        return self.rules.add(" | ".join(ways))


class PythonGrammar(CallGrammar):
    """The grammar of calls as Python writes them."""

    def write_calls(self) -> str:
        """Return the expression of what follows a marker."""
        call = self.write_call(self._write_python)
        more = f'(", " {call})*' if self._tools.parallel else ""
        return f'"[" {call} {more} "]" {self._spelled(self._format.close)}'

    def _write_python(self, index: int, name: str) -> str:
        values = PythonValues(
            self._schema(name), f"value_{index}", self._json_rule, self._json_blanks, self._format
        )
        try:
            arguments = values.arguments()
        except SCHEMA_ERRORS:
            arguments = f'"**" {self._write_json_arguments(index, name)}'
        else:
            self._rules.update(values.rules)
        return f'{lark_string(f"{name}(")} {arguments} ")"'


def write_calls(calls: Iterable[dict[str, Any]]) -> str:
    """Return calls as text, as some templates of LFM2 expect them."""
    written = ", ".join(_write_call(call.get("function") or {}) for call in calls)
    return f"{LFM2.opens[0]}[{written}]{LFM2.close}"


def _write_call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return f"{function.get('name')}(**{arguments or {}})"
    entries = [
        f"{key}={value!r}"  # a constant of Python
        if value is None or isinstance(value, bool)
        else f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    ]
    return f"{function.get('name')}({', '.join(entries)})"


# Some templates of LFM2 only list the tools.
FAMILY = Family(
    "LFM2",
    LFM2,
    r"<\|tool_(call|list)_start\|>|List of tools: \[",
    lambda *_: PythonCalls(),
    PythonGrammar,
    as_text=write_calls,
)
