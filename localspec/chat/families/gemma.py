"""Gemma 4's calls: call:name{key:value}, which is JSON with bare keys and other quotes."""

from __future__ import annotations

import re
from typing import Any

from localspec.chat.notations.call_readers import (
    CallPiece,
    CallReader,
    JsonCalls,
    ReadResult,
    new_call,
    write_json,
)
from localspec.chat.notations.family import Family
from localspec.chat.notations.grammar import SCHEMA_ERRORS, CallGrammar, Spelled
from localspec.chat.notations.lark import (
    ANNOTATIONS,
    NUMBER,
    PYTHON_CONSTANTS,
    SCALARS,
    JsonRule,
    Schema,
    Unwritable,
    Values,
    lark_string,
    require_known_keywords,
    text_terminal,
    write_list,
)
from localspec.chat.notations.loose_values import GEMMA_QUOTE, LooseValues
from localspec.protocol.calls import CallFormat
from localspec.protocol.pieces import Arguments

GEMMA = CallFormat("gemma", ("<|tool_call>",), "<tool_call|>", quote=GEMMA_QUOTE)

_JSON_OBJECT = re.compile(r'(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!tool_call\|>))*', re.DOTALL)


class GemmaCall(CallReader):
    """Reads the inside of <|tool_call>: call:name{key:<|"|>text<|"|>,other:1}, or an object with a name."""

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        self._at = self._end()
        pieces = self._read(self.raw[: self._at]) if self._at >= 0 else []
        return pieces, self._take_remainder()

    def _end(self) -> int:
        """Return where the call ends, -1 if it is not complete; a text may contain the marker."""
        if not self.raw.lstrip().startswith("{"):
            marks = (GEMMA.close, GEMMA.opens[0])  # the next call ends one that nothing closes
            ends = (_find_outside_quotes(self.raw, mark) for mark in marks)
            return min((end for end in ends if end >= 0), default=-1)
        value = _JSON_OBJECT.match(self.raw)
        assert value is not None  # the expression also matches an empty text
        return value.end() if self.raw.startswith(GEMMA.close, value.end()) else -1

    def _read(self, text: str) -> list[CallPiece]:
        text = text.strip()
        if text.startswith("{"):
            inner = JsonCalls()
            pieces, _ = inner.feed(text)
            if not (inner.is_finished or inner.is_broken):
                pieces += inner.end()  # the part of a call that was cut off
            self.is_finished, self.is_broken = not inner.is_broken, inner.is_broken
            return [] if inner.is_broken else pieces
        name, brace, inside = text.removeprefix("call:").partition("{")
        try:
            arguments, _ = LooseValues("{" + inside).value(0)
        except (ValueError, IndexError, RecursionError):
            brace = ""
        if not brace or not name.strip():
            self.is_broken = True
            return []
        self.is_finished = True
        return [new_call(name.strip()), Arguments(write_json(arguments))]

    def end(self) -> list[CallPiece]:
        return [] if self.is_finished else self._read(self.raw)


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


class GemmaValues(Values):
    """Rules for Gemma 4's notation, which is JSON with bare keys and <|"|> around strings."""

    def __init__(self, schema: Schema, prefix: str, json_rule: JsonRule, spelled: Spelled) -> None:
        super().__init__(schema, prefix, json_rule)
        self._quote = spelled(GEMMA_QUOTE)
        self._rule_of_reference: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        return self._value(self._root)

    def _value(self, schema: Any) -> str:
        if isinstance(schema, dict) and "$ref" in schema:
            pointer = schema["$ref"]
            target = self._target(schema)
            if pointer not in self._rule_of_reference:
                self._rule_of_reference[pointer] = rule = self.rules.add("")
                self.rules[rule] = self._value(target)
            return self._rule_of_reference[pointer]
        if not isinstance(schema, dict):
            raise Unwritable
        parts = self._alternatives(schema)
        if parts is not None:
            return self.rules.add(" | ".join(self._value(part) for part in parts))
        kinds = self._kinds(schema)
        if len(kinds) > 1:
            require_known_keywords(schema, ANNOTATIONS | {"enum"})
            return self.rules.add(" | ".join(self._value({"const": v}) for v in schema["enum"]))
        [kind] = kinds
        if kind == "object":
            return self._braces(schema)
        if kind == "array":
            return self._brackets(schema)
        if kind == "string":
            return self._text(schema)
        if kind == "any":
            require_known_keywords(schema, ANNOTATIONS)
            return self._value({"type": ["string", "number", "boolean", "null"]})
        if kind in SCALARS:
            require_known_keywords(schema, NUMBER)
            ways = [self._json_rule(schema, bounded=True)]
            if kind == "null":  # as the template writes it inside of lists and objects
                ways.append(PYTHON_CONSTANTS[kind])
            return self.rules.add(" | ".join(ways))
        raise Unwritable

    def _text(self, schema: Schema) -> str:
        value = self.rules.add_terminal(text_terminal(schema, [GEMMA_QUOTE]))
        if self._quote.startswith("<["):  # A special token, which no string contains.
            return f"{self._quote} {value} {self._quote}"
        rule = self.rules.add(value, f"[suffix={lark_string(GEMMA_QUOTE)}]")
        return f"{self._quote} {rule}"

    def _braces(self, schema: Schema) -> str:
        """Return the expression of an object, with commas between its members."""
        pairs = self._pairs(
            schema, lambda key, value: f"{lark_string(key + ':')} {self._value(value)}"
        )
        return f'"{{" ({self.rules.add_pairs(pairs, ",")}) "}}"'

    def _brackets(self, schema: Schema) -> str:
        min_items, max_items = self._item_counts(schema)
        item = "" if max_items == 0 else self._value(schema.get("items"))
        return write_list(item, min_items, max_items)


class GemmaGrammar(CallGrammar):
    """The grammar of Gemma 4's calls."""

    def write_calls(self) -> str:
        """Return the expression of what follows a marker."""
        return f"{self.write_call(self._write_gemma)} {self._spelled(self._format.close)}"

    def _write_gemma(self, index: int, name: str) -> str:
        try:
            values = GemmaValues(
                self._schema(name), f"value_{index}", self._json_rule, self._spelled
            )
            arguments = values.arguments()
        except SCHEMA_ERRORS:
            return self._write_object(index, name)
        self._rules.update(values.rules)
        return f"{lark_string(f'call:{name}')} {arguments}"


FAMILY = Family("Gemma 4", GEMMA, r"<\|tool_call>", lambda *_: GemmaCall(), GemmaGrammar)
