"""Write Lark rules for a tool's arguments in notations that are not JSON.

A rule may accept fewer values than the schema, but never more. Keys come in any order, and keys that the
schema does not name are not allowed. A schema that cannot be expressed in a notation raises Unwritable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from localspec.chat.notations.schemas import schema_types
from localspec.protocol.calls import TYPE_PLACEHOLDER, CallFormat

Schema = dict[str, Any]

EMPTY = '""'
ANNOTATIONS = frozenset(
    "type title description default examples deprecated $schema $id $comment".split()
)
_OBJECT = ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_TEXT = ANNOTATIONS | {"enum", "const", "minLength", "maxLength", "pattern", "format"}
NUMBER = ANNOTATIONS | {
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
}
NUMBER |= {"multipleOf", "format"}
_ARRAY = ANNOTATIONS | {"items", "minItems", "maxItems"}
SCALARS = ("integer", "number", "boolean", "null")
_MAX_KEYS_IN_ANY_ORDER = 64  # bits of a rule's parameter
# Largest bound of a string's length, in characters. Larger bounds make large automata.
_MAX_LENGTH_BOUND = 2000
PYTHON_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}
_KEY = re.compile(r"[\w.-]+")
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-z0-9]{1,30}(\.[a-z0-9]{1,30})?@[a-z0-9]{1,30}\.[a-z]{2,10}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Unwritable(Exception):
    """Raised when a notation cannot express a schema."""


class Pair(NamedTuple):
    """The rule of a key with its value, and whether an object must have it."""

    rule: str
    is_required: bool = False


class JsonRule(Protocol):
    """Returns a Lark expression of the JSON that fits an enforced schema.

    blanks: what may stand between its parts. bounded: the bounds of each number limit its length.
    """

    def __call__(self, schema: Any, blanks: str = "", *, bounded: bool = False) -> str: ...


def lark_string(text: str) -> str:
    """Return a Lark string literal of `text`."""
    return json.dumps(text, ensure_ascii=False)


class Rules(dict[str, str]):
    """The rules of a grammar by their names, which begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def add(self, text: str, attributes: str = "") -> str:
        """Add a rule, and return its name; attributes: what stands behind that in the definition."""
        name = f"{self._prefix}{len(self)}"
        self[f"{name}{attributes}"] = text
        return name

    def add_terminal(self, text: str) -> str:
        """Add a terminal, and return its name."""
        name = f"{self._prefix.upper()}{len(self)}"
        self[name] = text
        return name

    def add_pairs(self, pairs: Sequence[Pair], separator: str = "", other: str = "") -> str:
        """Return the expression of pairs in any order, none of them twice; other: of any further pair.

        The rules have a parameter, with a bit for each pair that has been written.
        """
        if not 0 < len(pairs) <= _MAX_KEYS_IN_ANY_ORDER:
            return self.add_ordered_pairs(pairs, separator, other)
        pairs = sorted(pairs, key=lambda pair: not pair.is_required)
        n_required = sum(pair.is_required for pair in pairs)
        end = f'"" %if is_ones([0:{n_required}])' if n_required else EMPTY
        more = self.add("", "::_")
        ways = " | ".join(
            f"{pair.rule} {more}::set_bit({bit}) %if bit_clear({bit})"
            for bit, pair in enumerate(pairs)
        )
        if not separator:
            self[f"{more}::_"] = f"{end} | {ways}"
            return f"{more}::0x0"
        comma, named = lark_string(separator), self.add(ways, "::_")
        following = f"{end} | {comma} {named}::_ %if not(is_ones([0:{len(pairs)}]))"
        first = named
        if other:  # Such pairs are one list, which makes masks faster than a rule for each of them.
            behind = self.add(following, "::_")
            first = self.add(f"{named}::_ | {other} ({comma} {other})* {behind}::_", "::_")
            following = f"{end} | {comma} {first}::_"
        self[f"{more}::_"] = following
        return f"{first}::0x0" if n_required else f"{first}::0x0 | {EMPTY}"

    def add_ordered_pairs(self, pairs: Sequence[Pair], separator: str, other: str = "") -> str:
        """Return the expression of pairs in their order; other: of any further pair, behind them."""
        if other:
            pairs = [*pairs, Pair(self.add(f"{other} ({lark_string(separator)} {other})*"))]
        following = ""  # The rule of what may follow a pair.
        starts: list[str] = []  # The ways to begin with the current pair or a later one.
        for pair in reversed(pairs):
            sequence = f"{pair.rule} {following}".strip()
            starts = [sequence] if pair.is_required else [sequence, *starts]
            after = f"({lark_string(separator)} {sequence})"
            following = self.add(after if pair.is_required else f"{after} | {following or EMPTY}")
        if not any(pair.is_required for pair in pairs):
            starts.append(EMPTY)
        return " | ".join(starts) or EMPTY


def write_list(item: str, low: int, high: int | None) -> str:
    """Return the expression of a list in brackets with `low` to `high` items."""
    if high == 0 and not low:
        return '"[" "]"'
    more = f'("," {item}){bounds(max(low, 1) - 1, None if high is None else high - 1)}'
    more = "" if high == 1 else more
    return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'


def bounds(low: int, high: int | None) -> str:
    """Return the quantifier of a repetition. Raises Unwritable if no count is within the bounds."""
    if high is not None and low > high:
        raise Unwritable
    return f"{{{low},{'' if high is None else high}}}"


def text_terminal(schema: Schema, never: Sequence[str]) -> str:
    """Return the terminal of a string that fits the schema and contains none of the markers `never`.

    Raises:
        Unwritable: a keyword cannot be expressed as a regular expression.
    """
    require_known_keywords(schema, _TEXT)
    parts = [f"({part})" for part in _text_parts(schema, never)]
    return " & ".join([*(parts or [r"/(?s:.)*/"]), *(_without(marker) for marker in never)])


def _text_parts(schema: Schema, never: Sequence[str]) -> Iterator[str]:
    """Yield the expressions that a string must all match."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(marker in text for text in texts for marker in never):
            raise Unwritable
        yield " | ".join(map(lark_string, texts))
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength")
    if max(min_length, max_length or 0) > _MAX_LENGTH_BOUND:
        raise Unwritable
    if min_length or max_length is not None:
        yield rf"/(?s:.){{{int(min_length)},{'' if max_length is None else int(max_length)}}}/"
    if "pattern" in schema:
        yield f"/{_pattern(schema['pattern'])}/"
    if schema.get("format") in _FORMATS:
        yield f"/{_FORMATS[schema['format']]}/"


def _without(marker: str) -> str:
    """Return an expression that matches texts without `marker`."""
    escaped = re.escape(marker).replace("/", r"\/").replace("\n", "n")
    return rf"~/(?s:.)*{escaped}(?s:.)*/"


# Constructs of patterns that Lark's expressions do not support.
_UNSUPPORTED = re.compile(r"\(\?|\\[bBAzZ1-9kpP]|[/\n]")


def _pattern(pattern: str) -> str:
    """Return a schema's pattern as an expression that matches the whole text.

    JSON Schema searches for a pattern anywhere in the text.
    """
    inner = pattern.removeprefix("^")
    closed = inner.endswith("$") and not inner.endswith(r"\$")
    inner = inner[:-1] if closed else inner
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner)
    if _UNSUPPORTED.search(inner) or set(bare) & set("^$|"):
        raise Unwritable
    prefix = "" if pattern.startswith("^") else "(?s:.)*"
    return f"{prefix}({inner}){'' if closed else '(?s:.)*'}"


def require_known_keywords(schema: Schema, known: frozenset[str]) -> None:
    if not schema.keys() <= known:
        raise Unwritable


class Values:
    """The base of writers for the arguments of one tool; `rules` are the rules written so far."""

    def __init__(self, schema: Schema, prefix: str, json_rule: JsonRule) -> None:
        self.rules = Rules(f"{prefix}_")
        self._json_rule = json_rule
        self._root = schema

    def _target(self, schema: Any) -> Schema:
        """Return the schema that a reference leads to, or the schema itself if it is none."""
        n_followed = 0
        while isinstance(schema, dict) and "$ref" in schema:
            require_known_keywords(schema, ANNOTATIONS | {"$ref"})
            kind, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
            n_followed += 1
            definitions = self._root.get(kind) if kind in ("$defs", "definitions") else None
            if not isinstance(definitions, dict) or name not in definitions:
                raise Unwritable
            if n_followed > len(definitions) + 1:  # The references form a cycle.
                raise Unwritable
            schema = definitions[name]
        if not isinstance(schema, dict):
            raise Unwritable
        return schema

    def _object(self, schema: Schema) -> tuple[dict[str, Any], list[str]]:
        """Return the properties of an object schema in their order, and the required keys."""
        require_known_keywords(schema, _OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            raise Unwritable
        if not properties and schema.get("additionalProperties", True) is not False:
            raise Unwritable  # The object may have any keys.
        if not all(map(_KEY.fullmatch, properties)):
            raise Unwritable
        return properties, required

    def _pairs(self, schema: Schema, write: Callable[[str, Any], str]) -> list[Pair]:
        """Return the members of an object schema; `write` returns the expression of one."""
        properties, required = self._object(schema)
        return [
            Pair(self.rules.add(write(key, {} if member is True else member)), key in required)
            for key, member in properties.items()
        ]

    def _alternatives(self, schema: Schema) -> list[Schema] | None:
        """Return the schemas of which one must match, or None if the schema has no alternatives."""
        for key in ("anyOf", "oneOf"):
            if key in schema:
                require_known_keywords(schema, ANNOTATIONS - {"type"} | {key})
                return [self._target(part) for part in schema[key]]
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [{**schema, "type": kind} for kind in kinds]
        return None

    def _item_counts(self, schema: Schema) -> tuple[int, int | None]:
        """Return the bounds of a list's length."""
        require_known_keywords(schema, _ARRAY)
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if max(minimum, maximum or 0) > 100:
            raise Unwritable
        return minimum, maximum

    def _kinds(self, schema: Schema) -> set[str]:
        return schema_types(schema, self._root)


# A string must not match these where other types are possible, because a parser reads them as such.
_SCALARS_AS_TEXT = {
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "boolean": "true|false",
    "null": "null|none",
}
_SCALARS_AS_TEXT["integer"] = _SCALARS_AS_TEXT["number"]


class TextValues(Values):
    """The base of writers for values that are plain text if they are strings, and JSON if they are not.

    format: has the literals around the arguments. spelled: returns the Lark expression of a literal in this
    vocabulary.
    """

    def __init__(
        self,
        schema: Schema,
        prefix: str,
        json_rule: JsonRule,
        blanks: str,
        format: CallFormat,
        spelled: Callable[[str], str] = lark_string,
    ) -> None:
        super().__init__(schema, prefix, json_rule)
        self._json_blanks = blanks
        self._format = format
        self._spelled = spelled

    def _close_with(self, close: str) -> None:
        """Set the literal behind the values that are written next."""
        core = close.strip()
        self._blanks, self._after_close = close.split(core)
        # A string value ends before the closing literal. If that begins with plain text (`_stop`), the value
        # must not contain this text. A special token cannot occur in the value.
        self._close = self._spelled(core)
        self._stop, self._close_tail = "", self._close
        if self._close.startswith('"'):
            self._stop, size = json.JSONDecoder().raw_decode(self._close)
            self._close_tail = self._close[size:]

    @property
    def _never(self) -> list[str]:
        return [self._stop] if self._stop else []

    def _write_value(self, schema: Any) -> str:
        """Return the expression of a value and what closes it."""
        target = self._target(schema)
        kinds = self._kinds(target)
        if kinds == {"string"}:
            return self._text(self._strings(target))
        if kinds == {"any"}:
            require_known_keywords(target, ANNOTATIONS)
            return self._text(text_terminal({}, self._never))
        if "string" in kinds:
            return self._text(self._mixed(target, kinds))
        blanks = lark_string(self._blanks) if self._blanks else ""
        return f"{self._write_json(schema)} {blanks} {self._close}"

    def _write_json(self, schema: Schema) -> str:
        definitions: Schema = {
            k: self._root[k] for k in ("$defs", "definitions") if k in self._root
        }
        ways = [self._json_rule({**schema, **definitions}, self._json_blanks, bounded=True)]
        target = self._target(schema)
        kinds = self._kinds(target)
        if kinds <= PYTHON_CONSTANTS.keys() and not target.keys() & {"const", "enum"}:
            # Templates write these without `tojson`, so models do as well.
            ways += [PYTHON_CONSTANTS[kind] for kind in sorted(kinds)]
        return self.rules.add(" | ".join(ways))

    def _text(self, terminal: str) -> str:
        value = self.rules.add_terminal(terminal)
        line = (
            self.rules.add_terminal(f"{value} {lark_string(self._blanks)}")
            if self._blanks
            else value
        )
        if not self._stop:
            return f"{line} {self._close}"
        rule = self.rules.add(line, f"[suffix={lark_string(self._stop)}]")
        return f"{rule} {self._close_tail}"

    def _strings(self, schema: Schema) -> str:
        parts = self._alternatives(schema)
        if parts is None:
            return text_terminal(schema, self._never)
        return " | ".join(f"({self._strings(self._target(part))})" for part in parts)

    def _mixed(self, schema: Schema, kinds: set[str]) -> str:
        """Return the terminal of a string or a scalar of these kinds.

        It is one lexeme, because strings and scalars may begin with the same characters.
        """
        parts = self._alternatives(schema)
        if parts is None:  # The schema is an enumeration of values of several types.
            values = schema.get("enum", [])
            require_known_keywords(schema, ANNOTATIONS | {"enum"})
            parts = [{"const": value} for value in values]
        return " | ".join(f"({self._simple(self._target(part), kinds)})" for part in parts)

    def _simple(self, schema: Schema, kinds: set[str]) -> str:
        if self._alternatives(schema) is not None:
            return self._mixed(schema, kinds)
        [kind] = self._kinds(schema)
        if kind == "string":
            scalars = "|".join(_SCALARS_AS_TEXT[name] for name in sorted(kinds - {"string"}))
            unlike = rf" & ~/[ \n\t\r]*(?i:{scalars})[ \n\t\r]*/" if scalars else ""
            return f"{text_terminal(schema, self._never)}{unlike}"
        if "const" in schema and kind in ("boolean", "null", "number"):
            return lark_string(json.dumps(schema["const"]))
        require_known_keywords(schema, ANNOTATIONS)
        terminals = {
            "null": f'"null" | {PYTHON_CONSTANTS["null"]}',
            "boolean": f'"true" | "false" | {PYTHON_CONSTANTS["boolean"]}',
            "integer": "/-?(0|[1-9][0-9]{0,17})/",
            "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
        }
        if kind not in terminals:
            raise Unwritable
        return terminals[kind]


class TagValues(TextValues):
    """Rules for parameters between tags."""

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        self._close_with(self._format.parameter[3])
        return self.rules.add_pairs(self._pairs(self._root, self._write_pair))

    def _write_pair(self, key: str, schema: Any) -> str:
        opening, before_text, before_other, _ = self._format.parameter
        target = self._target(schema)
        kinds = self._kinds(target)
        has_types = TYPE_PLACEHOLDER in before_other
        differs = before_text != before_other and "string" in kinds
        if len(kinds) > 1 and (differs or has_types):
            # The type decides between two notations before the value.
            if (parts := self._alternatives(target)) is None:
                raise Unwritable
            return " | ".join(self._write_pair(key, part) for part in parts)
        separator = before_text if kinds & {"string", "any"} else before_other
        [kind, *_] = kinds
        separator = separator.replace(TYPE_PLACEHOLDER, "number" if kind == "integer" else kind)
        head = self._spelled(f"{opening}{key}{separator}")
        end = lark_string(self._after_close) if self._after_close else ""
        return f"{head} {self._write_value(schema)} {end}"


_MAX_ELEMENT_DEPTH = 20  # of elements in elements, which a schema may nest without end


class ElementValues(TextValues):
    """Rules for arguments as nested elements."""

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        return self._write_elements(self._root, 0)

    def _write_elements(self, schema: Schema, depth: int) -> str:
        return self.rules.add_pairs(self._pairs(schema, partial(self._write_element, depth=depth)))

    def _write_items(self, schema: Schema, depth: int) -> str:
        minimum, maximum = self._item_counts(schema)
        item = self.rules.add(self._write_element("item", schema.get("items", {}), depth))
        return f"{item}{{{minimum},{'' if maximum is None else maximum}}}"

    def _write_element(self, key: str, schema: Any, depth: int) -> str:
        if depth > _MAX_ELEMENT_DEPTH:
            raise Unwritable
        target = self._target(schema)
        kinds = self._kinds(target)
        mark = self._format.elements
        opening, close = self._spelled(f"{mark}<{key}>"), f"{mark}</{key}>"
        if kinds == {"object"}:
            return f"{opening} {self._write_elements(target, depth + 1)} {self._spelled(close)}"
        if kinds == {"array"}:
            return f"{opening} {self._write_items(target, depth + 1)} {self._spelled(close)}"
        if kinds & {"object", "array"}:
            raise Unwritable
        self._close_with(close)
        return f"{opening} {self._write_value(schema)}"
