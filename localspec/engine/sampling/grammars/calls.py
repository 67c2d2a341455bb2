"""Write the grammar of tool calls in llguidance's Lark.

The grammar describes write_marker a call from its marker on, or a whole answer that consists of calls. The
name in a call must be that of a tool, and its arguments must fit that tool's schema, which has been reduced
to what can be enforced. If a notation cannot express a schema, the tool's calls are JSON between the same
markers, which every parser of that notation accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from localspec.engine.sampling.grammars.enforced import for_library
from localspec.engine.sampling.grammars.values import GemmaValues, TagValues, Unwritable
from localspec.protocol.calls import ID, Tools

# Blanks that a model may write between the parts of a call. Bounded, because small models may write blanks
# forever.
_BLANKS = r"/( |\n{1,2}[ \t]{0,20})?/"
LOOSE = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_COMPACT = {"whitespace_flexible": False}
_ID = "/[a-zA-Z0-9]{9}/"
_ANY_ID = "/[a-zA-Z0-9_-]{1,40}/"

# Errors of a schema that the notation cannot express, or whose keywords have values of the wrong type. The
# call is then written as JSON, and llguidance reports what is wrong with the schema.
_SCHEMA_ERRORS = (Unwritable, AttributeError, IndexError, KeyError, TypeError, ValueError)

Spelled = Callable[[str], str]


def lark_string(value: str) -> str:
    """Return a Lark string literal of `value`."""
    return json.dumps(value, ensure_ascii=False)


def write_marker(marker: str, spelled: Spelled) -> str:
    """Return a Lark expression that matches `marker` as one special token or as plain text."""
    return f"({' | '.join(dict.fromkeys([spelled(marker), lark_string(marker)]))})"


def write_thoughts_end(marker: str, spelled: Spelled) -> str:
    """Return a Lark expression for the closing marker of thoughts and the line breaks after it.

    The expression is empty if there is no marker.
    """
    return f"{write_marker(marker, spelled)} /\\n{{0,2}}/" if marker else ""


class CallGrammar:
    """The Lark rules for the calls of one request.

    spelled: returns the Lark expression of a marker in this vocabulary. free: names of tools whose
    arguments may be any object. compact: allow only the blanks that the model was trained to write.
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
        """Return the grammar of what `marker` opens, including the marker.

        Without a marker, it is the grammar of an answer that is JSON from its first character, which may
        be something other than a call.
        """
        if marker:
            first = self._write_marker(marker)
            return self._write_grammar(f"{first} {self._write_calls()}")
        self._rules["OTHER"] = _NO_CALL
        return self._write_grammar(f"{self._write_json_calls('json')} | OTHER")

    def whole(self, answer: str = "", closing_marker: str = "") -> str:
        """Return the grammar of an answer that consists of calls, or that matches the rule `answer`.

        closing_marker: the closing marker of thoughts closing_marker the answer, if any.
        """
        format = self._format
        if format.bare:
            calls = self._write_calls()
        else:
            marker = self._spelled(format.opens[0])
            calls = f"{marker} {self._write_calls()}"
            if self._tools.parallel and format.kind not in ("json", "mistral", "found"):
                more = f"({lark_string(format.lead) if format.lead else ''} {calls})*"
                calls = f"{calls} {more}"
        if answer:
            self._rules["answer"] = answer
            calls = f"(({calls}) | answer)"
        return self._write_grammar(f"{write_thoughts_end(closing_marker, self._spelled)} ({calls})")

    def _write_marker(self, marker: str) -> str:
        return write_marker(marker, self._spelled)

    def _write_grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{k}: {v}" for k, v in self._rules.items())])

    # ------------------------------------------------------------------------ after the marker

    def _write_calls(self) -> str:
        format = self._format
        close = self._spelled(format.close) if format.close else ""
        match format.kind:
            case "json" | "mistral":
                return f"{self._write_json_calls(format.kind)} {close}"
            case "hermes":
                call = self._write_call(self._write_object)
                return f"{self._write_lead()} {call} {self._write_lead()} {close}"
            case "tags":
                return f"{self._write_call(self._write_tagged)} {close}"
            case "named":
                return f"{self._write_call(self._write_named)} {close}"
            case "gemma":
                return f"{self._write_call(self._write_gemma)} {close}"
            case "found":
                call = self._write_call(self._write_detected)
                more = f"({self._write_literal(format.again)} {call})*" if format.again else ""
                more = more if self._tools.parallel else ""
                return f"{self._write_literal(format.lead)} {call} {more} {self._write_literal(format.close)}"

    def _write_lead(self) -> str:
        """Return the expression of what stands between a marker and JSON."""
        lead = self._format.lead
        return (lark_string(lead) if lead else "") if self._compact else "blank"

    def _write_json_calls(self, kind: str) -> str:
        call = self._write_call(self._write_object)
        if kind == "mistral" or not self._format.bare:
            more = f'({self._blank} "," {self._blank} {call})*' if self._tools.parallel else ""
            return f'{self._write_lead()} "[" {self._blank} {call} {more} {self._blank} "]"'
        more = f'({self._blank} ";" {self._blank} {call})*' if self._tools.parallel else ""
        return f"{self._write_lead()} {call} {more}"

    def _write_call(self, write: Callable[[int, str], str]) -> str:
        """Return the rule of one call of any tool; write: returns the expression of one tool's call."""
        if "call" not in self._rules:
            self._rules["call"] = ""  # Keeps its place before the rules that `write` adds.
            calls = [write(index, name) for index, name in enumerate(self._tools.schemas)]
            self._rules["call"] = " | ".join(calls)
        return "call"

    def _write_object(self, index: int, name: str) -> str:
        key, blank = self._format.arguments, self._blank
        if self._compact:
            # Uses the same literals as the JSON of an answer, which may be an alternative at this place.
            head, middle = '"{" "\\"name\\"" ":"', f'"," {lark_string(json.dumps(key))} ":"'
        else:
            head, middle = (
                _HEAD,
                f'{blank} "," {blank} {lark_string(json.dumps(key))} {blank} ":" {blank}',
            )
        identity = ""
        if self._format.kind == "mistral" and not self._compact:
            identity = f'({blank} "," {blank} "\\"id\\"" {blank} ":" {blank} /"[a-zA-Z0-9]{{9}}"/)?'
        named = lark_string(json.dumps(name))
        return f'{head} {named} {middle} {self._write_json_arguments(index, name)} {identity} {blank} "}}"'

    def _write_json_arguments(self, index: int, name: str) -> str:
        """Add a rule for a tool's arguments as JSON, and return its name."""
        rule = f"arguments_{index}"
        schema = {**for_library(self._schema(name)), "x-guidance": self._options}
        self._rules[rule] = f"%json {json.dumps(schema)}"
        return rule

    def _schema(self, name: str) -> dict[str, Any]:
        if name in self._free:
            return {"type": "object"}
        schema: dict[str, Any] = self._tools.schemas[name]
        return schema

    def _write_named(self, index: int, name: str) -> str:
        identity = ""
        if self._format.identity and not self._compact:
            identity = f"({self._spelled(self._format.identity)} {_ID})?"
        middle = self._spelled(self._format.middle)
        arguments = self._write_json_arguments(index, name)
        return f"{lark_string(name)} {identity} {middle} {arguments}"

    def _write_literal(self, text: str) -> str:
        parts = [self._spelled(part) for part in text.split(ID)]
        return f" {_ANY_ID} ".join(parts)

    def _write_detected(self, index: int, name: str) -> str:
        format = self._format
        head = f"{lark_string(name)} {self._write_literal(format.middle)}"
        if not format.parameter:
            return f"{head} {self._write_json_arguments(index, name)}"
        notation = format.parameter, self._spelled
        try:
            values = TagValues(self._schema(name), f"tag_{index}", self._options, *notation)
            parameters = values.arguments()
        except _SCHEMA_ERRORS:
            return self._write_object(index, name)
        self._rules.update(values.rules)
        return f"{head} {parameters}"

    def _write_tagged(self, index: int, name: str) -> str:
        blank = '"\\n"' if self._compact else "/\\n{0,2}/"
        try:
            values = TagValues(self._schema(name), f"tag_{index}", self._options)
            parameters = values.arguments()
        except _SCHEMA_ERRORS:
            return f"{blank} {self._write_object(index, name)} {blank}"
        self._rules.update(values.rules)
        return (
            f'{blank} {lark_string(f"<function={name}>")} "\\n" {parameters} "</function>" {blank}'
        )

    def _write_gemma(self, index: int, name: str) -> str:
        try:
            values = GemmaValues(self._schema(name), f"value_{index}", self._spelled)
            arguments = values.arguments()
        except _SCHEMA_ERRORS:
            return self._write_object(index, name)
        self._rules.update(values.rules)
        return f"{lark_string(f'call:{name}')} {arguments}"


# The first key of a call may be its type, which Llama models sometimes write.
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
_HEAD_PATTERN = rf'\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"'
_HEAD = rf"/{_HEAD_PATTERN}{_SPACE}:{_SPACE}/"
# Text that begins like JSON and is not a call.
_NO_CALL = rf"/{_SPACE}\{{(?s:.)*/ & ~/{_SPACE}{_HEAD_PATTERN}(?s:.)*/"
