"""Write the JSON of a schema as a Lark grammar in which strings may have every spelling.

llguidance's own compiler of schemas knows no `\\/`, and its escapes `\\uXXXX` stand for control characters
only. A model that copies "M\\u00e1laga" from its prompt may then write `\\u00`, but no `e` after it, and is
led into a wrong character. The rules here allow every escape in strings that are free or have a length.

A value of an enumeration and a named key have one spelling, with as few escapes as possible, so that their
tokens are known in advance. Where a schema has a `pattern`, or combines schemas, llguidance's compiler writes
that part, without `\\u` if that could lead into a wrong character: the model then writes the letter itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from localspec.chat.notations.lark import Pair, Rules, Unwritable, bounds, write_list

Schema = dict[str, Any]

_HEX = "[0-9a-fA-F]"
# One character of a string. The escapes of a surrogate pair are one character, and none stands alone.
_CHARACTER = (
    r'([^"\\\x00-\x1F\x7F]|\\(["\\\/bfnrt]|u('
    rf"[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})))"
)
_INTEGER = "-?(0|[1-9][0-9]*)"
_TERMINALS = {
    "STRING": f'/"{_CHARACTER}*"/',
    "INTEGER": f"/{_INTEGER}/",
    "NUMBER": rf"/{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "BOOLEAN": "/true|false/",
    "NULL": '"null"',
}
# Keywords of each type that are written here. Those of other types do not concern its values.
_KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": set[str](),
}
_NUMBER_KEYWORDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OTHER_KEYWORDS = {
    "string": {"pattern", "format"},
    "integer": _NUMBER_KEYWORDS,
    "number": _NUMBER_KEYWORDS,
    "array": {"prefixItems", "additionalItems"},
    "object": {"patternProperties", "minProperties", "maxProperties"},
}
_KEYWORDS_AND_TYPE = {"type"}.union(*_KEYWORDS.values(), *_OTHER_KEYWORDS.values())
_PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", type(None): "null"}


def json_grammar(schema: Schema, blanks: str = "", *, any_order: bool = False) -> str:
    """Return the Lark grammar of the values of a schema that `for_library` has returned.

    blanks: a regular expression of the blanks that may stand between two parts of JSON. any_order: the keys
    of an object may come in any order, where llguidance's compiler does not write it.
    """
    whole = f"start: {_write_by_library(schema, blanks)}"
    try:
        rules = _Writer(schema, blanks, any_order).write()
    except Unwritable:
        return whole
    ignored = ['%llguidance {"ignore_once": true}', f"%ignore /{blanks}/"] if blanks else []
    grammar = "\n".join([*ignored, *(f"{name}: {text}" for name, text in rules.items())])
    # A part without valid values is an error by itself, but not within a whole that can do without it.
    if "%json" in grammar and LLMatcher.validate_grammar(str(LLMatcher.grammar_from_lark(grammar))):
        return whole
    return grammar


def json_expression(schema: Schema, blanks: str = "") -> str:
    """Return the grammar of a tool's arguments as an expression within another grammar."""
    return f"%lark {{\n{json_grammar(schema, blanks, any_order=True)}\n}}"


def _write_by_library(schema: Schema, blanks: str) -> str:
    """Return the expression by which llguidance compiles a schema itself."""
    options: Schema = {"json_allow_general_unicode_escapes": True, "whitespace_flexible": False}
    if blanks:
        options["whitespace_pattern"] = blanks
    if _has_patterns(schema):
        options["json_allowed_escapes"] = 'nrbtf\\"'  # All but u.
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _has_patterns(value: Any) -> bool:
    if isinstance(value, dict):
        names = value.keys() & {"pattern", "patternProperties"}
        return bool(names) or any(map(_has_patterns, value.values()))
    return isinstance(value, list) and any(map(_has_patterns, value))


class _Writer:
    """A writer of the rules of one document, each of which is written once for equal schemas."""

    def __init__(self, root: Schema, blanks: str, any_order: bool) -> None:
        self._root = root
        self._blanks = blanks
        self._any_order = any_order
        self._definitions: Schema = root.get("$defs", {})
        self._rules = Rules("r")
        self._names: dict[str, str] = {}  # The rule of each schema, by its JSON.

    def write(self) -> dict[str, str]:
        """Return all rules by their names.

        Raises:
            Unwritable: llguidance's compiler must write the whole document.
        """
        return {"start": self._value(self._root), **self._rules}

    def _add_terminal(self, text: str) -> str:
        return self._named(text, f"T{len(self._rules)}", lambda: text)

    def _named(self, key: str, name: str, write: Callable[[], str]) -> str:
        """Return the name of the rule of `key`. A rule that refers to itself finds its name here."""
        if key not in self._names:
            self._names[key] = name
            self._rules[name] = ""
            self._rules[name] = write()
        return self._names[key]

    def _value(self, schema: Any) -> str:
        if schema is False:
            raise Unwritable  # No value is valid, which llguidance looks at as a whole.
        schema = {} if schema is True else schema
        return self._named(json.dumps(schema), f"v{len(self._rules)}", lambda: self._write(schema))

    def _write(self, schema: Schema) -> str:
        schema = {key: value for key, value in schema.items() if key != "$defs"}
        kinds = schema.get("type")
        if not schema:
            kinds = [kind for kind in _KEYWORDS if kind != "integer"]
            return " | ".join(self._value({"type": kind}) for kind in kinds)
        if schema.keys() == {"$ref"}:
            return self._value(self._target(schema))
        for keyword in ("anyOf", "allOf"):
            if schema.keys() == {keyword} and (keyword == "anyOf" or len(schema[keyword]) == 1):
                return _checked(" | ".join(map(self._value, schema[keyword])))
        if "enum" in schema or "const" in schema:
            return self._listed(schema)
        if isinstance(kinds, list) and schema.keys() <= _KEYWORDS_AND_TYPE:
            return " | ".join(self._value(_about(schema, kind)) for kind in kinds)
        if isinstance(kinds, str) and schema.keys() <= _KEYWORDS_AND_TYPE:
            schema = _about(schema, kinds)
            is_tuple = isinstance(schema.get("items"), list)
            if schema.keys() <= _KEYWORDS[kinds] | {"type"} and not is_tuple:
                return self._of_type(kinds, schema)
        return self._leave_to_library(schema)

    def _target(self, schema: Schema) -> Schema:
        """Return what a reference leads to. Raises Unwritable if it leads only to itself."""
        for _ in range(len(self._definitions) + 2):
            if schema.keys() - {"$defs"} != {"$ref"}:
                return schema
            name = schema["$ref"].removeprefix("#/$defs/")
            target = self._root if name == "#" else self._definitions[name]
            if not isinstance(target, dict):
                return {} if target else {"enum": []}
            schema = target
        raise Unwritable

    def _leave_to_library(self, schema: Schema) -> str:
        if '"$ref"' in json.dumps(schema):
            if '"$ref": "#"' in json.dumps([schema, self._definitions]):
                raise Unwritable  # This part would need the whole document.
            schema = {**schema, "$defs": self._definitions}
        return _write_by_library(schema, self._blanks)

    def _of_type(self, kind: str, schema: Schema) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems")
            return write_list(self._value(schema.get("items", True)), low, high)
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if kind == "string" and (low or high is not None):
            return self._add_terminal(f'/"{_CHARACTER}{bounds(low, high)}"/')
        return self._terminal(kind.upper())

    def _terminal(self, name: str) -> str:
        return self._named(name, name, lambda: _TERMINALS[name])

    def _listed(self, schema: Schema) -> str:
        """Return the expression of the values that a schema lists."""
        values = schema.get("enum", [schema.get("const")])
        kinds = schema.get("type", list(_KEYWORDS))
        allowed = {kinds} if isinstance(kinds, str) else set(kinds)
        names = {_PYTHON_TYPES.get(type(value), "") for value in values}
        if "number" in allowed:
            names.discard("integer")
        if len(schema.keys() - {"type"}) > 1 or not names <= allowed:
            return self._leave_to_library(schema)
        return self._add_terminal(_checked(" | ".join(map(_literal, values))))

    def _object(self, schema: Schema) -> str:
        """Return the expression of an object."""
        properties = schema.get("properties", {})
        required, others = schema.get("required", []), schema.get("additionalProperties", True)
        if not properties.keys() >= set(required):
            return self._leave_to_library(schema)
        pairs = [
            Pair(self._rules.add(f'{_literal(key)} ":" {self._value(value)}'), key in required)
            for key, value in properties.items()
        ]
        other = ""
        if others is not False:
            other_key = self._terminal("STRING")
            if properties:  # It is none of the named keys, in whatever spelling.
                spellings = "|".join("".join(map(_spellings, key)) for key in properties)
                other_key = self._add_terminal(f'{other_key} & ~/"({spellings})"/')
            other = self._rules.add(f'{other_key} ":" {self._value(others)}')
        write = self._rules.add_pairs if self._any_order else self._rules.add_ordered_pairs
        return f'"{{" ({write(pairs, ",", other)}) "}}"'


def _checked(alternatives: str) -> str:
    """Return an expression. Raises Unwritable if there are no alternatives."""
    if not alternatives:
        raise Unwritable
    return alternatives


def _about(schema: Schema, kind: str) -> Schema:
    """Return the keywords of a schema that concern values of one type."""
    keywords = _KEYWORDS[kind] | _OTHER_KEYWORDS.get(kind, set())
    return {"type": kind, **{key: value for key, value in schema.items() if key in keywords}}


def _literal(value: str | int | None) -> str:
    """Return the Lark literal of a value in JSON, with as few escapes as possible."""
    return json.dumps(json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f"))


_SHORT = {'"': '"', "\\": r"\\", "/": r"\/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def _spellings(char: str) -> str:
    """Return the expression of all spellings of a character within a string."""
    units = char.encode("utf-16-be").hex()
    escape = "".join(rf"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    ways = [re.sub("[a-f]", lambda digit: f"[{digit[0]}{digit[0].upper()}]", escape)]
    if char in _SHORT:
        ways.append(rf"\\{_SHORT[char]}")
    if char not in '"\\' and char >= " ":
        ways.append(rf"\x{{{ord(char):X}}}")
    return f"({'|'.join(ways)})"
