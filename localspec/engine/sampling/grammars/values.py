"""A tool's arguments in notations that are no JSON, as rules for llguidance's Lark.

What a rule lets in may be less than the schema does, and is never more: keys come in the schema's order, and
keys that it does not name are left out. What cannot be said so raises Unwritable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localspec.engine.sampling.grammars.enforced import for_library, with_bounded_numbers
from localspec.protocol.calls import types_of

Schema = dict[str, Any]

_SAID = frozenset("type title description default examples deprecated $schema $id $comment".split())
_OBJECT = _SAID | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_TEXT = _SAID | {"enum", "const", "minLength", "maxLength", "pattern", "format"}
_NUMBER = _SAID | {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_NUMBER |= {"multipleOf", "format"}
_ARRAY = _SAID | {"items", "minItems", "maxItems"}
_SCALARS = ("integer", "number", "boolean", "null")
_LONGEST = 2000  # characters that a text may be bounded by; more make a large automaton
_KEY = re.compile(r"[\w.-]+", re.ASCII)
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-z0-9]{1,30}(\.[a-z0-9]{1,30})?@[a-z0-9]{1,30}\.[a-z]{2,10}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Unwritable(Exception):
    """The notation has no rule for this schema."""


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Schema) -> str:
    return f"%json {json.dumps(schema)}"


# ------------------------------------------------------------------------ text


def text_terminal(schema: Schema, never: Sequence[str]) -> str:
    """A terminal's expression for a text as the schema has it, without the markers `never`.

    Raises:
        Unwritable: it has parts that are no regular language, or none that is found here.
    """
    _only(schema, _TEXT)
    parts = [f"({part})" for part in _text_parts(schema, never)]
    return " & ".join([*(parts or [r"/(?s:.)*/"]), *(_without(each) for each in never)])


def _text_parts(schema: Schema, never: Sequence[str]) -> Iterator[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [each for each in values if isinstance(each, str)]
        if not texts or any(mark in each for each in texts for mark in never):
            raise Unwritable
        yield " | ".join(map(_literal, texts))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > _LONGEST:
        raise Unwritable
    if least or most is not None:
        yield rf"/(?s:.){{{int(least)},{'' if most is None else int(most)}}}/"
    if "pattern" in schema:
        yield f"/{_pattern(schema['pattern'])}/"
    if schema.get("format") in _FORMATS:
        yield f"/{_FORMATS[schema['format']]}/"


def _without(mark: str) -> str:
    quoted = re.escape(mark).replace("/", r"\/").replace("\n", "n")
    return rf"~/(?s:.)*{quoted}(?s:.)*/"


_ODD = re.compile(r"\(\?|\\[bBAzZ1-9kpP]|[/\n]")


def _pattern(pattern: str) -> str:
    """A schema's pattern, which is searched for, as one of the whole text."""
    inner = pattern.removeprefix("^")
    closed = inner.endswith("$") and not inner.endswith(r"\$")
    inner = inner[:-1] if closed else inner
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner)
    if _ODD.search(inner) or set(bare) & set("^$|"):
        raise Unwritable
    before = "" if pattern.startswith("^") else "(?s:.)*"
    return f"{before}({inner}){'' if closed else '(?s:.)*'}"


# ------------------------------------------------------------------------ what a schema says


def _only(schema: Schema, known: frozenset[str]) -> None:
    if not schema.keys() <= known:
        raise Unwritable


class _Values:
    """Rules for the arguments of one tool; `rules` are what they need."""

    def __init__(self, schema: Schema, prefix: str) -> None:
        self.rules: dict[str, str] = {}
        self._root = schema
        self._prefix = prefix

    def _rule(self, text: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules[name] = text
        return name

    def _terminal(self, text: str) -> str:
        name = f"{self._prefix.upper()}_{len(self.rules)}"
        self.rules[name] = text
        return name

    def _target(self, schema: Any) -> Schema:
        """The schema itself, or what it is a reference to."""
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema:
            _only(schema, _SAID | {"$ref"})
            kind, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
            seen += 1
            found = self._root.get(kind) if kind in ("$defs", "definitions") else None
            if not isinstance(found, dict) or name not in found or seen > len(found) + 1:
                raise Unwritable
            schema = found[name]
        if not isinstance(schema, dict):
            raise Unwritable
        return schema

    def _object(self, schema: Schema) -> tuple[dict[str, Any], list[str]]:
        """Its keys in order, and those that must be there."""
        _only(schema, _OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            raise Unwritable
        if not properties and schema.get("additionalProperties", True) is not False:
            raise Unwritable  # any keys at all
        if not all(map(_KEY.fullmatch, properties)):
            raise Unwritable
        return properties, required

    def _alternatives(self, schema: Schema) -> list[Schema] | None:
        for key in ("anyOf", "oneOf"):
            if key in schema:
                _only(schema, _SAID - {"type"} | {key})
                return [self._target(each) for each in schema[key]]
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [{**schema, "type": kind} for kind in kinds]
        return None

    def _kinds(self, schema: Schema) -> set[str]:
        return types_of(schema, self._root)


# ------------------------------------------------------------------------ a parameter in tags each

# Qwen Coder's: what stands before a key, before a text, before another value, and behind it.
TAGS = "<parameter=", ">\n", ">\n", "\n</parameter>\n"
# What a reader takes for JSON; a text beside other types must not look like it.
_LIKE_JSON = (
    r"~/[ \n\t\r]*[-0-9\[{\"](?s:.)*/ & "
    r"~/[ \n\t\r]*(?i:true|false|none|null|nan|-?infinity)[ \n\t\r]*/"
)


class TagValues(_Values):
    """A key, its value, and what ends it: text as it is, everything else as JSON.

    parameter: the literals around them, as in CallFormat. spelled: a literal as the vocabulary writes it.
    """

    def __init__(
        self,
        schema: Schema,
        prefix: str,
        options: dict[str, Any],
        parameter: Sequence[str] = TAGS,
        spelled: Callable[[str], str] = _literal,
    ) -> None:
        super().__init__(schema, prefix)
        self._options = options
        self._open, self._before_text, self._before_other, close = parameter
        self._spelled = spelled
        core = close.strip()
        self._blanks, self._behind = close.split(core)
        # A text ends with the first part of what closes it that no text has: a token of its own, or letters.
        self._close = spelled(core)
        self._mark, self._rest = "", self._close
        if self._close.startswith('"'):
            self._mark, size = json.JSONDecoder().raw_decode(self._close)
            self._rest = self._close[size:]

    def arguments(self) -> str:
        properties, required = self._object(self._root)
        written = []
        for key, schema in properties.items():
            rule = self._rule(self._pair(key, schema))
            written.append(rule if key in required else f"{rule}?")
        return " ".join(written)

    @property
    def _never(self) -> list[str]:
        return [self._mark] if self._mark else []

    def _ended(self) -> str:
        return _literal(self._behind) if self._behind else ""

    def _pair(self, key: str, schema: Any) -> str:
        schema = {} if schema is True else schema
        target = self._target(schema)
        kinds = self._kinds(target)
        before = self._before_text
        if kinds == {"string"}:
            value = self._text(self._strings(target))
        elif kinds == {"any"}:
            _only(target, _SAID)
            value = self._text(text_terminal({}, self._never))
        elif "string" not in kinds:
            before = self._before_other
            definitions: Schema = {
                k: self._root[k] for k in ("$defs", "definitions") if k in self._root
            }
            whole = with_bounded_numbers(for_library({**schema, **definitions}))
            json_rule = self._rule(_json({**whole, "x-guidance": self._options}))
            blanks = _literal(self._blanks) if self._blanks else ""
            value = f"{json_rule} {blanks} {self._close}"
        elif self._before_text != self._before_other:
            raise Unwritable  # which of two notations it is in
        else:
            value = self._text(self._mixed(target))
        return f"{self._spelled(f'{self._open}{key}{before}')} {value} {self._ended()}"

    def _text(self, terminal: str) -> str:
        value = self._terminal(terminal)
        line = self._terminal(f"{value} {_literal(self._blanks)}") if self._blanks else value
        if not self._mark:
            return f"{line} {self._close}"
        rule = f"{self._prefix}_{len(self.rules)}[suffix={_literal(self._mark)}]"
        self.rules[rule] = line
        return f"{rule.partition('[')[0]} {self._rest}"

    def _strings(self, schema: Schema) -> str:
        parts = self._alternatives(schema)
        if parts is None:
            return text_terminal(schema, self._never)
        return " | ".join(f"({self._strings(self._target(part))})" for part in parts)

    def _mixed(self, schema: Schema) -> str:
        """Text or a value of a simple kind: one lexeme, for what begins alike must be told apart late."""
        parts = self._alternatives(schema)
        if parts is None:  # an enumeration of several kinds
            values = schema.get("enum", [])
            _only(schema, _SAID | {"enum"})
            parts = [{"const": value} for value in values]
        return " | ".join(f"({self._simple(self._target(part))})" for part in parts)

    def _simple(self, schema: Schema) -> str:
        if self._alternatives(schema) is not None:
            return self._mixed(schema)
        [kind] = self._kinds(schema)
        if kind == "string":
            return f"{text_terminal(schema, self._never)} & {_LIKE_JSON}"
        if "const" in schema and kind in ("boolean", "null", "number"):
            return _literal(json.dumps(schema["const"]))
        _only(schema, _SAID)
        plain = {
            "null": '"null"',
            "boolean": '"true" | "false"',
            "integer": "/-?(0|[1-9][0-9]{0,17})/",
            "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
        }
        if kind not in plain:
            raise Unwritable
        return plain[kind]


# ------------------------------------------------------------------------ Gemma 4

_QUOTE = '<|"|>'


class GemmaValues(_Values):
    """Like JSON, with bare keys and <|"|> around text."""

    def __init__(self, schema: Schema, prefix: str, spelled: Callable[[str], str]) -> None:
        super().__init__(schema, prefix)
        self._quote = spelled(_QUOTE)
        self._known: dict[str, str] = {}

    def arguments(self) -> str:
        return self._value(self._root)

    def _value(self, schema: Any) -> str:
        if isinstance(schema, dict) and "$ref" in schema:
            pointer = schema["$ref"]
            target = self._target(schema)
            if pointer not in self._known:
                self._known[pointer] = rule = self._rule("")
                self.rules[rule] = self._value(target)
            return self._known[pointer]
        if not isinstance(schema, dict):
            raise Unwritable
        parts = self._alternatives(schema)
        if parts is not None:
            return self._rule(" | ".join(self._value(part) for part in parts))
        kinds = self._kinds(schema)
        if len(kinds) > 1:
            _only(schema, _SAID | {"enum"})
            return self._rule(" | ".join(self._value({"const": v}) for v in schema["enum"]))
        [kind] = kinds
        if kind == "object":
            return self._braces(schema)
        if kind == "array":
            return self._brackets(schema)
        if kind == "string":
            return self._text(schema)
        if kind in _SCALARS:
            _only(schema, _NUMBER)
            whole = with_bounded_numbers(schema)
            return self._rule(_json({**whole, "x-guidance": {"whitespace_flexible": False}}))
        raise Unwritable

    def _text(self, schema: Schema) -> str:
        never = [_QUOTE, "<tool_call|>"]
        value = self._terminal(text_terminal(schema, never))
        if self._quote.startswith("<["):  # a token of its own, which no text has
            return f"{self._quote} {value} {self._quote}"
        rule = f"{self._prefix}_{len(self.rules)}[suffix={_literal(_QUOTE)}]"
        self.rules[rule] = value
        return f"{self._quote} {rule.partition('[')[0]}"

    def _braces(self, schema: Schema) -> str:
        """The keys in their order; a comma stands before each but the first that is there."""
        properties, required = self._object(schema)
        pairs = [
            (f"{_literal(key + ':')} {self._value(value)}", key in required)
            for key, value in properties.items()
        ]
        rest = ""  # what may follow a pair
        begins: list[str] = []  # ways to begin with the pair at hand, or one after it
        for pair, needed in reversed(pairs):
            here = f"{pair} {rest}".strip()
            begins = [here] if needed else [here, *begins]
            rest = self._rule(f'("," {here})' if needed else self._optional(here, rest))
        if not any(needed for _, needed in pairs):
            begins.append('""')
        inside = " | ".join(begins) or '""'
        return f'"{{" ({inside}) "}}"'

    @staticmethod
    def _optional(here: str, rest: str) -> str:
        return f'("," {here}) | {rest or chr(34) * 2}'

    def _brackets(self, schema: Schema) -> str:
        _only(schema, _ARRAY)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > 100:
            raise Unwritable
        if most == 0:
            return '"[" "]"'
        item = self._value(schema.get("items"))
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        some = f"{item} {more}"
        return f'"[" ({some}) "]"' if least else f'"[" ({some})? "]"'
