"""The grammar of tool calls, in llguidance's Lark: a call from its marker on, or an answer of calls alone.

A call's name is one of the tools', and its arguments are in that tool's schema. Schemas are reduced to what
can be enforced before they come here. Where a notation cannot say what a schema asks, the tool's calls are
JSON between the same markers, which every reader of that notation understands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from localspec.engine.sampling.grammars.enforced import for_library
from localspec.engine.sampling.grammars.values import GemmaValues, TagValues, Unwritable
from localspec.protocol.calls import ID, Tools

# Blanks that a model may write of its own accord: bounded, for a small one goes on with them forever.
_BLANKS = r"/( |\n{1,2}[ \t]{0,20})?/"
LOOSE = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_COMPACT = {"whitespace_flexible": False}
_ID = "/[a-zA-Z0-9]{9}/"
_ANY_ID = "/[a-zA-Z0-9_-]{1,40}/"

# Written as JSON instead, where llguidance judges a schema whose keywords have values of other types.
_NOT_SO = (Unwritable, AttributeError, IndexError, KeyError, TypeError, ValueError)

Spelled = Callable[[str], str]


def quoted(value: str) -> str:
    """Text as it is, for Lark."""
    return json.dumps(value, ensure_ascii=False)


def either(marker: str, spelled: Spelled) -> str:
    """A marker, whether it is a token of its own or spelled out."""
    return f"({' | '.join(dict.fromkeys([spelled(marker), quoted(marker)]))})"


def after(marker: str, spelled: Spelled) -> str:
    """What an answer follows: the closing marker of thoughts, and the lines behind it."""
    return f"{either(marker, spelled)} /\\n{{0,2}}/" if marker else ""


class CallGrammar:
    """Rules for the calls of one request.

    spelled: a marker as the vocabulary writes it, for Lark. free: tools whose arguments are any object. A
    compact one has no blank that a model was not taught.
    """

    def __init__(
        self, tools: Tools, spelled: Spelled, free: Sequence[str] = (), *, compact: bool = False
    ) -> None:
        self._tools = tools
        self._format = tools.format
        self._spelled = spelled
        self._free = free
        self._compact = compact
        self._options = _COMPACT if compact else LOOSE
        self._blank = '""' if compact else "blank"
        self._rules = {"blank": _BLANKS}

    def opened(self, marker: str) -> str:
        """What one marker opens, the marker included; without one, an answer that is JSON from its first
        character, which may be no call at all.
        """
        if marker:
            first = self._either(marker)
            return self._grammar(f"{first} {self._after_marker()}")
        self._rules["OTHER"] = _NO_CALL
        return self._grammar(f"{self._json_calls('json')} | OTHER")

    def whole(self, answer: str = "", before: str = "") -> str:
        """An answer of calls and nothing else; or one of the rule `answer`. before: what it follows."""
        format = self._format
        if format.bare:
            calls = self._after_marker()
        else:
            marker = self._spelled(format.opens[0])
            calls = f"{marker} {self._after_marker()}"
            if self._tools.parallel and format.kind not in ("json", "mistral", "found"):
                again = f"({quoted(format.lead) if format.lead else ''} {calls})*"
                calls = f"{calls} {again}"
        if answer:
            self._rules["answer"] = answer
            calls = f"(({calls}) | answer)"
        return self._grammar(f"{after(before, self._spelled)} ({calls})")

    def _either(self, marker: str) -> str:
        return either(marker, self._spelled)

    def _grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{k}: {v}" for k, v in self._rules.items())])

    # ------------------------------------------------------------------------ after the marker

    def _after_marker(self) -> str:
        format = self._format
        close = self._spelled(format.close) if format.close else ""
        match format.kind:
            case "json" | "mistral":
                return f"{self._json_calls(format.kind)} {close}"
            case "hermes":
                return f"{self._between()} {self._one_of(self._object)} {self._between()} {close}"
            case "tags":
                return f"{self._one_of(self._tagged)} {close}"
            case "named":
                return f"{self._one_of(self._named)} {close}"
            case "gemma":
                return f"{self._one_of(self._gemma)} {close}"
            case "found":
                call = self._one_of(self._found)
                more = f"({self._literal(format.again)} {call})*" if format.again else ""
                more = more if self._tools.parallel else ""
                return f"{self._literal(format.lead)} {call} {more} {self._literal(format.close)}"

    def _between(self) -> str:
        """Between a marker and JSON."""
        lead = self._format.lead
        return (quoted(lead) if lead else "") if self._compact else "blank"

    def _json_calls(self, kind: str) -> str:
        one = self._one_of(self._object)
        if kind == "mistral" or not self._format.bare:
            more = f'({self._blank} "," {self._blank} {one})*' if self._tools.parallel else ""
            return f'{self._between()} "[" {self._blank} {one} {more} {self._blank} "]"'
        more = f'({self._blank} ";" {self._blank} {one})*' if self._tools.parallel else ""
        return f"{self._between()} {one} {more}"

    def _one_of(self, written: Callable[[int, str], str]) -> str:
        """One call of one of the tools, as `written` has it."""
        if "call" not in self._rules:
            self._rules["call"] = ""
            each = [written(at, name) for at, name in enumerate(self._tools.schemas)]
            self._rules["call"] = " | ".join(each)
        return "call"

    def _object(self, at: int, name: str) -> str:
        key, blank = self._format.arguments, self._blank
        if self._compact:
            # piece by piece, as in the JSON of an answer that may stand here too
            head, middle = '"{" "\\"name\\"" ":"', f'"," {quoted(json.dumps(key))} ":"'
        else:
            head, middle = (
                _HEAD,
                f'{blank} "," {blank} {quoted(json.dumps(key))} {blank} ":" {blank}',
            )
        identity = ""
        if self._format.kind == "mistral" and not self._compact:
            identity = f'({blank} "," {blank} "\\"id\\"" {blank} ":" {blank} /"[a-zA-Z0-9]{{9}}"/)?'
        named = quoted(json.dumps(name))
        return f'{head} {named} {middle} {self._json(at, name)} {identity} {blank} "}}"'

    def _json(self, at: int, name: str) -> str:
        """A rule for a tool's arguments as JSON."""
        rule = f"arguments_{at}"
        schema = {**for_library(self._schema(name)), "x-guidance": self._options}
        self._rules[rule] = f"%json {json.dumps(schema)}"
        return rule

    def _schema(self, name: str) -> dict[str, Any]:
        if name in self._free:
            return {"type": "object"}
        schema: dict[str, Any] = self._tools.schemas[name]
        return schema

    def _named(self, at: int, name: str) -> str:
        identity = ""
        if self._format.identity and not self._compact:
            identity = f"({self._spelled(self._format.identity)} {_ID})?"
        return (
            f"{quoted(name)} {identity} {self._spelled(self._format.middle)} {self._json(at, name)}"
        )

    def _literal(self, text: str) -> str:
        parts = [self._spelled(part) for part in text.split(ID)]
        return f" {_ANY_ID} ".join(parts)

    def _found(self, at: int, name: str) -> str:
        format = self._format
        head = f"{quoted(name)} {self._literal(format.middle)}"
        if not format.parameter:
            return f"{head} {self._json(at, name)}"
        notation = format.parameter, self._spelled
        try:
            values = TagValues(self._schema(name), f"tag_{at}", self._options, *notation)
            parameters = values.arguments()
        except _NOT_SO:
            return self._object(at, name)
        self._rules.update(values.rules)
        return f"{head} {parameters}"

    def _tagged(self, at: int, name: str) -> str:
        blank = '"\\n"' if self._compact else "/\\n{0,2}/"
        try:
            values = TagValues(self._schema(name), f"tag_{at}", self._options)
            parameters = values.arguments()
        except _NOT_SO:
            return f"{blank} {self._object(at, name)} {blank}"
        self._rules.update(values.rules)
        return f'{blank} {quoted(f"<function={name}>")} "\\n" {parameters} "</function>" {blank}'

    def _gemma(self, at: int, name: str) -> str:
        try:
            values = GemmaValues(self._schema(name), f"value_{at}", self._spelled)
            arguments = values.arguments()
        except _NOT_SO:
            return self._object(at, name)
        self._rules.update(values.rules)
        return f"{quoted(f'call:{name}')} {arguments}"


# The first key of a call may be its type, as Llama writes it now and then.
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
_HEAD_PATTERN = rf'\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"'
_HEAD = rf"/{_HEAD_PATTERN}{_SPACE}:{_SPACE}/"
# Text that begins like JSON and is no call.
_NO_CALL = rf"/{_SPACE}\{{(?s:.)*/ & ~/{_SPACE}{_HEAD_PATTERN}(?s:.)*/"
