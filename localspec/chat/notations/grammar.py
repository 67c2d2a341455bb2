"""Write the grammar of tool calls in llguidance's Lark.

The grammar describes a call from its marker on, or a whole answer that consists of calls. The name in a call
must be that of a tool, and its arguments must fit that tool's schema, which has been reduced to what can be
enforced. If a notation cannot express a schema, the tool's calls are JSON between the same markers, which
every parser of that notation accepts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from localspec.chat.notations.lark import (
    ElementValues,
    JsonRule,
    TagValues,
    Unwritable,
    lark_string,
)
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    OPTION_PLACEHOLDER,
    ToolSet,
    call_markers,
)

# Blanks that a model may write between the parts of a call. Bounded, because small models may write blanks
# forever.
LOOSE = r"( |\n{1,2}[ \t]{0,20})?"
_BLANKS = f"/{LOOSE}/"
_ANY_TEXT = "/(?s:.)*/"
_ID = "/[a-zA-Z0-9]{9}/"
_ANY_ID = "/[a-zA-Z0-9_-]{1,40}/"

# Errors of a schema that the notation cannot express, or whose keywords have values of the wrong type. The
# call is then written as JSON, and llguidance reports what is wrong with the schema.
SCHEMA_ERRORS = (Unwritable, AttributeError, IndexError, KeyError, TypeError, ValueError)


class Spelled(Protocol):
    """Returns the Lark expression of a marker in a vocabulary, as `GrammarTokens.lark_expression` does."""

    def __call__(self, text: str, *, plain: bool = False) -> str: ...


def write_marker(marker: str, spelled: Spelled) -> str:
    """Return a Lark expression that matches `marker` as special tokens or as plain text."""
    return f"({spelled(marker, plain=True)})"


def write_thoughts_end(marker: str, spelled: Spelled) -> str:
    """Return a Lark expression for the closing marker of thoughts and the line breaks after it.

    The expression is empty if there is no marker.
    """
    return f"{write_marker(marker, spelled)} /\\n{{0,2}}/" if marker else ""


class CallGrammar:
    """The Lark rules for the calls of one request.

    spelled: returns the Lark expression of a marker in this vocabulary. json_rule: that of JSON. free: names
    of tools whose arguments may be any object. compact: allow only the blanks that the model was trained to
    write.
    """

    def __init__(
        self,
        tools: ToolSet,
        spelled: Spelled,
        json_rule: JsonRule,
        free: Sequence[str] = (),
        *,
        compact: bool = False,
    ) -> None:
        self._json_rule = json_rule
        self._tools = tools
        self._format = tools.format
        self._spelled = spelled
        self._free = free
        self._compact = compact
        self._json_blanks = "" if compact else LOOSE
        self._blank = '""' if compact else "blank"
        self._rules = {"blank": _BLANKS}

    def write_opened(self, marker: str) -> str:
        """Return the grammar of what `marker` opens, including the marker.

        Without a marker, it is the grammar of an answer that is JSON from its first character, which may
        be something other than a call.
        """
        if marker:
            first = write_marker(marker, self._spelled)
            if self._format.recipient:  # the marker has the tool's name
                names = list(self._tools.schemas)
                at = call_markers(self._format, names).index(marker)
                return self._write_grammar(f"{first} {self._write_json_arguments(at, names[at])}")
            return self._write_grammar(f"{first} {self.write_calls()}")
        self._rules["OTHER"] = _NO_CALL
        return self._write_grammar(f"{self._write_json_calls('json')} | OTHER")

    def write_whole(self, answer: str = "", closing_marker: str = "") -> str:
        """Return the grammar of an answer that consists of calls, or that matches the rule `answer`.

        closing_marker: the closing marker of thoughts before the answer, if any.
        """
        format = self._format
        if format.bare:
            calls = self.write_calls()
        else:
            marker, first = self._spelled(format.opens[0]), self.write_calls()
            calls = f"{self._write_head()} {marker} {first}"
            if format.thoughts:
                return self._write_messages(calls, answer, closing_marker)
            if format.recipient:  # the prompt has the first marker
                calls = f"{first} ({calls})*" if self._tools.parallel else first
            elif self._tools.parallel and format.kind not in ("json", "mistral", "python", "found"):
                line_end = lark_string("\n") if format.lead.startswith("\n") else ""
                calls = f"{calls} ({line_end} {calls})*"
        if answer:
            self._rules["answer"] = answer
            calls = f"(({calls}) | answer)"
        return self._write_grammar(f"{write_thoughts_end(closing_marker, self._spelled)} ({calls})")

    def _write_messages(self, calls: str, answer: str, closing_marker: str = "") -> str:
        """Return the grammar of messages: thoughts, and then a call or the rule `answer`."""
        end = write_thoughts_end(closing_marker, self._spelled)
        ways = [calls] if self._tools.schemas else []
        if answer:
            self._rules["answer"] = answer
            ways.append(f"{self._spelled(self._format.answer)} answer")
        thoughts = self._write_thoughts(*self._format.thoughts)
        return self._write_grammar(f"{end} {thoughts}? ({' | '.join(f'({way})' for way in ways)})")

    def write_message(self, answer: str) -> str:
        """Return the grammar of an answer in messages that has no calls, and matches the rule `answer`."""
        return self._write_messages("", answer)

    def _write_head(self) -> str:
        """Return the expression of what stands before the marker of a message that is a call."""
        names = f"({' | '.join(map(lark_string, self._tools.schemas))})"
        parts = self._format.head.split(CALL_ID_PLACEHOLDER)
        return f" {names} ".join(self._spelled(part) for part in parts) if self._format.head else ""

    def _write_thoughts(self, opening: str, closing: str) -> str:
        """Return the rule of a message of thoughts, up to the head of the next message."""
        close = self._spelled(closing)
        if close.startswith('"'):  # plain text, which the thoughts must not contain
            stop, size = json.JSONDecoder().raw_decode(close)
            self._rules[f"thought[suffix={lark_string(stop)}]"], close = _ANY_TEXT, close[size:]
        else:  # a special token, which no text contains
            self._rules["thought"] = _ANY_TEXT
        self._rules["thoughts"] = f"{self._spelled(opening)} thought {close}"
        return "thoughts"

    def _write_grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{k}: {v}" for k, v in self._rules.items())])

    def write_calls(self) -> str:
        format = self._format
        close = self._spelled(format.close) if format.close else ""
        match format.kind:
            case "json" | "mistral":
                return f"{self._write_json_calls(format.kind)} {close}"
            case "hermes":
                call = self.write_call(self._write_object)
                return f"{self._write_lead()} {call} {self._write_lead()} {close}"
            case "named":
                return self.write_call(self._write_enclosed)
            case _:
                call = self.write_call(self._write_named)
                more = f"({self._write_literal(format.again)} {call})*" if format.again else ""
                more = more if self._tools.parallel else ""
                return f"{self._write_literal(format.lead)} {call} {more} {self._write_literal(format.close)}"

    def _write_lead(self) -> str:
        """Return the expression of what stands between a marker and JSON."""
        lead = self._format.lead
        return (lark_string(lead) if lead else "") if self._compact else "blank"

    def _write_json_calls(self, kind: str) -> str:
        call = self.write_call(self._write_object)
        if kind == "mistral" or not self._format.bare:
            more = f'({self._blank} "," {self._blank} {call})*' if self._tools.parallel else ""
            return f'{self._write_lead()} "[" {self._blank} {call} {more} {self._blank} "]"'
        more = f'({self._blank} ";" {self._blank} {call})*' if self._tools.parallel else ""
        return f"{self._write_lead()} {call} {more}"

    def write_call(self, write: Callable[[int, str], str]) -> str:
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
        self._rules[rule] = self._json_rule(self._schema(name), self._json_blanks)
        return rule

    def _schema(self, name: str) -> dict[str, Any]:
        if name in self._free:
            return {"type": "object"}
        schema: dict[str, Any] = self._tools.schemas[name]
        return schema

    def _write_options(self, text: str) -> str:
        """Return the expression of a literal with optional parts."""
        parts = text.split(OPTION_PLACEHOLDER)
        return " ".join(
            f"({self._write_literal(part)})?" if at % 2 else self._write_literal(part)
            for at, part in enumerate(parts)
        )

    def _write_literal(self, text: str) -> str:
        parts = [self._spelled(part) for part in text.split(CALL_ID_PLACEHOLDER)]
        return f" {_ANY_ID} ".join(parts)

    def _write_enclosed(self, index: int, name: str) -> str:
        """Return the expression of a call with what opens and closes it, behind its marker."""
        format = self._format
        try:
            call = self._write_arguments(index, name)
        except SCHEMA_ERRORS:
            blank = self._write_blanks("\n")
            close = self._spelled(format.close.split()[-1])
            return f"{blank} {self._write_object(index, name)} {blank} {close}"
        return f"{self._write_blanks(format.lead)} {call} {self._write_blanks(format.close)}"

    def _write_blanks(self, text: str) -> str:
        """Return the expression of a literal whose line ends a model may leave out, unless it is compact."""
        line_end = '"\\n"' if self._compact else "/\\n{0,2}/"
        return f" {line_end} ".join(self._spelled(part) for part in text.split("\n"))

    def _write_named(self, index: int, name: str) -> str:
        try:
            return self._write_arguments(index, name)
        except SCHEMA_ERRORS:
            return self._write_object(index, name)

    def _write_arguments(self, index: int, name: str) -> str:
        """Return the expression of a name and its arguments. Raises one of SCHEMA_ERRORS."""
        format, identity = self._format, ""
        if format.identity and not self._compact:
            identity = f"({self._spelled(format.identity)} {_ID})?"
        head = f"{lark_string(name)} {identity} {self._write_options(format.middle)}"
        if not format.parameter and not format.elements:
            return f"{head} {self._write_json_arguments(index, name)}"
        kind = ElementValues if format.elements else TagValues
        values = kind(
            self._schema(name),
            f"tag_{index}",
            self._json_rule,
            self._json_blanks,
            format,
            self._spelled,
        )
        parameters = values.arguments()
        self._rules.update(values.rules)
        return f"{head} {parameters}"


# The first key of a call may be its type, which Llama models sometimes write.
_HEAD_PATTERN = rf'\{{{LOOSE}("type"{LOOSE}:{LOOSE}"function"{LOOSE},{LOOSE})?"name"'
_HEAD = rf"/{_HEAD_PATTERN}{LOOSE}:{LOOSE}/"
# Text that begins like JSON and is not a call.
_NO_CALL = rf"/{LOOSE}\{{(?s:.)*/ & ~/{LOOSE}{_HEAD_PATTERN}(?s:.)*/"
