"""Write Lark rules for a tool's arguments in notations that are not JSON.

A rule may accept fewer values than the schema, but never more. Keys come in the schema's order, and keys that
it does not name are not allowed. A schema that cannot be expressed in a notation raises Unwritable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from localspec.engine.sampling.grammars.enforced import for_library, with_bounded_numbers
from localspec.engine.sampling.grammars.json_values import (
    Unwritable,
    json_expression,
    write_list,
    write_sequence,
)
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    OPTION_PLACEHOLDER,
    TYPE_PLACEHOLDER,
    ToolSet,
    call_markers,
    schema_types,
)

Schema = dict[str, Any]

_ANNOTATIONS = frozenset(
    "type title description default examples deprecated $schema $id $comment".split()
)
_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_TEXT = _ANNOTATIONS | {"enum", "const", "minLength", "maxLength", "pattern", "format"}
_NUMBER = _ANNOTATIONS | {
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
}
_NUMBER |= {"multipleOf", "format"}
_ARRAY = _ANNOTATIONS | {"items", "minItems", "maxItems"}
_SCALARS = ("integer", "number", "boolean", "null")
# Largest bound of a string's length, in characters. Larger bounds make large automata.
_MAX_LENGTH_BOUND = 2000
_PYTHON_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}
_KEY = re.compile(r"[\w.-]+")
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-z0-9]{1,30}(\.[a-z0-9]{1,30})?@[a-z0-9]{1,30}\.[a-z]{2,10}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ------------------------------------------------------------------------ text


def text_terminal(schema: Schema, never: Sequence[str]) -> str:
    """Return the terminal of a string that fits the schema and contains none of the markers `never`.

    Raises:
        Unwritable: a keyword cannot be expressed as a regular expression.
    """
    _require_known_keywords(schema, _TEXT)
    parts = [f"({part})" for part in _text_parts(schema, never)]
    return " & ".join([*(parts or [r"/(?s:.)*/"]), *(_without(marker) for marker in never)])


def _text_parts(schema: Schema, never: Sequence[str]) -> Iterator[str]:
    """Yield the expressions that a string must all match."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(marker in text for text in texts for marker in never):
            raise Unwritable
        yield " | ".join(map(_literal, texts))
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


# ------------------------------------------------------------------------ schemas


def _require_known_keywords(schema: Schema, known: frozenset[str]) -> None:
    if not schema.keys() <= known:
        raise Unwritable


class _Values:
    """The base of writers for the arguments of one tool; `rules` are the rules written so far."""

    def __init__(self, schema: Schema, prefix: str) -> None:
        self.rules: dict[str, str] = {}
        self._root = schema
        self._prefix = prefix

    def _add_rule(self, text: str) -> str:
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules[name] = text
        return name

    def _add_terminal(self, text: str) -> str:
        name = f"{self._prefix.upper()}_{len(self.rules)}"
        self.rules[name] = text
        return name

    def _target(self, schema: Any) -> Schema:
        """Return the schema that a reference leads to, or the schema itself if it is none."""
        n_followed = 0
        while isinstance(schema, dict) and "$ref" in schema:
            _require_known_keywords(schema, _ANNOTATIONS | {"$ref"})
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
        _require_known_keywords(schema, _OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            raise Unwritable
        if not properties and schema.get("additionalProperties", True) is not False:
            raise Unwritable  # The object may have any keys.
        if not all(map(_KEY.fullmatch, properties)):
            raise Unwritable
        return properties, required

    def _alternatives(self, schema: Schema) -> list[Schema] | None:
        """Return the schemas of which one must match, or None if the schema has no alternatives."""
        for key in ("anyOf", "oneOf"):
            if key in schema:
                _require_known_keywords(schema, _ANNOTATIONS - {"type"} | {key})
                return [self._target(part) for part in schema[key]]
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [{**schema, "type": kind} for kind in kinds]
        return None

    def _item_counts(self, schema: Schema) -> tuple[int, int | None]:
        """Return the bounds of a list's length."""
        _require_known_keywords(schema, _ARRAY)
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if max(minimum, maximum or 0) > 100:
            raise Unwritable
        return minimum, maximum

    def _kinds(self, schema: Schema) -> set[str]:
        return schema_types(schema, self._root)


# ------------------------------------------------------------------------ one pair of tags per parameter

# Qwen Coder's literals before a key, before a string value, before any other value, and after the value.
TAGS = "<parameter=", ">\n", ">\n", "\n</parameter>\n"
# A string must not match these where other types are possible, because a parser reads them as such.
_SCALARS_AS_TEXT = {
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "boolean": "true|false",
    "null": "null|none",
}
_SCALARS_AS_TEXT["integer"] = _SCALARS_AS_TEXT["number"]


class _TextValues(_Values):
    """The base of writers for values that are plain text if they are strings, and JSON if they are not.

    spelled: returns the Lark expression of a literal in this vocabulary.
    """

    def __init__(
        self,
        schema: Schema,
        prefix: str,
        blanks: str,
        spelled: Callable[[str], str] = _literal,
    ) -> None:
        super().__init__(schema, prefix)
        self._json_blanks = blanks
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

    def _write_end(self) -> str:
        return _literal(self._after_close) if self._after_close else ""

    def _write_value(self, schema: Any) -> str:
        """Return the expression of a value and what closes it."""
        target = self._target(schema)
        kinds = self._kinds(target)
        if kinds == {"string"}:
            return self._text(self._strings(target))
        if kinds == {"any"}:
            _require_known_keywords(target, _ANNOTATIONS)
            return self._text(text_terminal({}, self._never))
        if "string" in kinds:
            return self._text(self._mixed(target, kinds))
        blanks = _literal(self._blanks) if self._blanks else ""
        return f"{self._write_json(schema)} {blanks} {self._close}"

    def _write_json(self, schema: Schema) -> str:
        definitions: Schema = {
            k: self._root[k] for k in ("$defs", "definitions") if k in self._root
        }
        bounded = with_bounded_numbers(for_library({**schema, **definitions}))
        ways = [json_expression(bounded, self._json_blanks)]
        target = self._target(schema)
        kinds = self._kinds(target)
        if kinds <= _PYTHON_CONSTANTS.keys() and not target.keys() & {"const", "enum"}:
            # Templates write these without `tojson`, so models do as well.
            ways += [_PYTHON_CONSTANTS[kind] for kind in sorted(kinds)]
        return self._add_rule(" | ".join(ways))

    def _text(self, terminal: str) -> str:
        value = self._add_terminal(terminal)
        line = self._add_terminal(f"{value} {_literal(self._blanks)}") if self._blanks else value
        if not self._stop:
            return f"{line} {self._close}"
        rule = f"{self._prefix}_{len(self.rules)}[suffix={_literal(self._stop)}]"
        self.rules[rule] = line
        return f"{rule.partition('[')[0]} {self._close_tail}"

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
            _require_known_keywords(schema, _ANNOTATIONS | {"enum"})
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
            return _literal(json.dumps(schema["const"]))
        _require_known_keywords(schema, _ANNOTATIONS)
        terminals = {
            "null": f'"null" | {_PYTHON_CONSTANTS["null"]}',
            "boolean": f'"true" | "false" | {_PYTHON_CONSTANTS["boolean"]}',
            "integer": "/-?(0|[1-9][0-9]{0,17})/",
            "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
        }
        if kind not in terminals:
            raise Unwritable
        return terminals[kind]


class TagValues(_TextValues):
    """Rules for parameters between tags. parameter: the literals around keys and values, as in CallFormat."""

    def __init__(
        self,
        schema: Schema,
        prefix: str,
        blanks: str,
        parameter: Sequence[str] = TAGS,
        spelled: Callable[[str], str] = _literal,
    ) -> None:
        super().__init__(schema, prefix, blanks, spelled)
        self._open, self._before_text, self._before_other, close = parameter
        self._close_with(close)

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        properties, required = self._object(self._root)
        pairs = []
        for key, schema in properties.items():
            rule = self._add_rule(self._write_pair(key, {} if schema is True else schema))
            pairs.append(rule if key in required else f"{rule}?")
        return " ".join(pairs)

    def _write_pair(self, key: str, schema: Any) -> str:
        target = self._target(schema)
        kinds = self._kinds(target)
        has_types = TYPE_PLACEHOLDER in self._before_other
        differs = self._before_text != self._before_other and "string" in kinds
        if len(kinds) > 1 and (differs or has_types):
            # The type decides between two notations before the value.
            if (parts := self._alternatives(target)) is None:
                raise Unwritable
            return " | ".join(self._write_pair(key, part) for part in parts)
        separator = self._before_text if kinds & {"string", "any"} else self._before_other
        [kind, *_] = kinds
        separator = separator.replace(TYPE_PLACEHOLDER, "number" if kind == "integer" else kind)
        head = self._spelled(f"{self._open}{key}{separator}")
        return f"{head} {self._write_value(schema)} {self._write_end()}"


# ------------------------------------------------------------------------ elements, Python

_MAX_ELEMENT_DEPTH = 20  # of elements in elements, which a schema may nest without end


class ElementValues(_TextValues):
    """Rules for arguments as nested elements. mark: the text before each tag, as in CallFormat."""

    def __init__(
        self,
        schema: Schema,
        prefix: str,
        blanks: str,
        mark: str,
        spelled: Callable[[str], str],
    ) -> None:
        super().__init__(schema, prefix, blanks, spelled)
        self._mark = mark

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        return self._write_members(self._root, 0)

    def _write_members(self, schema: Schema, depth: int) -> str:
        properties, required = self._object(schema)
        members = []
        for key, member in properties.items():
            rule = self._add_rule(self._write_element(key, {} if member is True else member, depth))
            members.append(rule if key in required else f"{rule}?")
        return " ".join(members)

    def _write_items(self, schema: Schema, depth: int) -> str:
        minimum, maximum = self._item_counts(schema)
        item = self._add_rule(self._write_element("item", schema.get("items", {}), depth))
        return f"{item}{{{minimum},{'' if maximum is None else maximum}}}"

    def _write_element(self, key: str, schema: Any, depth: int) -> str:
        if depth > _MAX_ELEMENT_DEPTH:
            raise Unwritable
        target = self._target(schema)
        kinds = self._kinds(target)
        opening, close = self._spelled(f"{self._mark}<{key}>"), f"{self._mark}</{key}>"
        if kinds == {"object"}:
            return f"{opening} {self._write_members(target, depth + 1)} {self._spelled(close)}"
        if kinds == {"array"}:
            return f"{opening} {self._write_items(target, depth + 1)} {self._spelled(close)}"
        if kinds & {"object", "array"}:
            raise Unwritable
        self._close_with(close)
        return f"{opening} {self._write_value(schema)}"


class PythonValues(_TextValues):
    """Rules for arguments as Python writes them in calls, key=value, with values in JSON.

    Texts may also stand in single quotes, where nothing is escaped.
    """

    @property
    def _never(self) -> list[str]:
        return ["'", "\\"]

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        properties, required = self._object(self._root)
        pairs = [
            (
                f"{_literal(key + '=')} {self._write_python({} if schema is True else schema)}",
                key in required,
            )
            for key, schema in properties.items()
        ]
        return f"({write_sequence(pairs, ', ', self._add_rule)})"

    def _write_python(self, schema: Any) -> str:
        target = self._target(schema)
        if (parts := self._alternatives(target)) is not None:
            return self._add_rule(" | ".join(map(self._write_python, parts)))
        ways = [self._write_json(schema)]
        if self._kinds(target) in ({"string"}, {"any"}):
            with suppress(Unwritable):
                ways.append(f'"\'" {self._add_terminal(self._strings(target))} "\'"')
        return self._add_rule(" | ".join(ways))


# ------------------------------------------------------------------------ Gemma 4

_QUOTE = '<|"|>'


class GemmaValues(_Values):
    """Rules for Gemma 4's notation, which is JSON with bare keys and <|"|> around strings."""

    def __init__(self, schema: Schema, prefix: str, spelled: Callable[[str], str]) -> None:
        super().__init__(schema, prefix)
        self._quote = spelled(_QUOTE)
        self._rule_of_reference: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the expression of all arguments, and add the rules that it needs."""
        return self._value(self._root)

    def _value(self, schema: Any) -> str:
        if isinstance(schema, dict) and "$ref" in schema:
            pointer = schema["$ref"]
            target = self._target(schema)
            if pointer not in self._rule_of_reference:
                self._rule_of_reference[pointer] = rule = self._add_rule("")
                self.rules[rule] = self._value(target)
            return self._rule_of_reference[pointer]
        if not isinstance(schema, dict):
            raise Unwritable
        parts = self._alternatives(schema)
        if parts is not None:
            return self._add_rule(" | ".join(self._value(part) for part in parts))
        kinds = self._kinds(schema)
        if len(kinds) > 1:
            _require_known_keywords(schema, _ANNOTATIONS | {"enum"})
            return self._add_rule(" | ".join(self._value({"const": v}) for v in schema["enum"]))
        [kind] = kinds
        if kind == "object":
            return self._braces(schema)
        if kind == "array":
            return self._brackets(schema)
        if kind == "string":
            return self._text(schema)
        if kind == "any":
            _require_known_keywords(schema, _ANNOTATIONS)
            return self._value({"type": ["string", "number", "boolean", "null"]})
        if kind in _SCALARS:
            _require_known_keywords(schema, _NUMBER)
            bounded = with_bounded_numbers(schema)
            ways = [json_expression(bounded)]
            if kind == "null":  # as the template writes it inside of lists and objects
                ways.append(_PYTHON_CONSTANTS[kind])
            return self._add_rule(" | ".join(ways))
        raise Unwritable

    def _text(self, schema: Schema) -> str:
        value = self._add_terminal(text_terminal(schema, [_QUOTE]))
        if self._quote.startswith("<["):  # A special token, which no string contains.
            return f"{self._quote} {value} {self._quote}"
        rule = f"{self._prefix}_{len(self.rules)}[suffix={_literal(_QUOTE)}]"
        self.rules[rule] = value
        return f"{self._quote} {rule.partition('[')[0]}"

    def _braces(self, schema: Schema) -> str:
        """Return the expression of an object, with sorted keys and commas between them."""
        properties, required = self._object(schema)
        pairs = [
            (f"{_literal(key + ':')} {self._value(value)}", key in required)
            # Gemma's template sorts the keys, so its models do as well.
            for key, value in sorted(properties.items(), key=lambda member: member[0].lower())
        ]
        return f'"{{" ({write_sequence(pairs, ",", self._add_rule)}) "}}"'

    def _brackets(self, schema: Schema) -> str:
        min_items, max_items = self._item_counts(schema)
        item = "" if max_items == 0 else self._value(schema.get("items"))
        return write_list(item, min_items, max_items)


# ------------------------------------------------------------------------ calls
# Write the grammar of tool calls in llguidance's Lark.
#
# The grammar describes write_marker a call from its marker on, or a whole answer that consists of calls. The
# name in a call must be that of a tool, and its arguments must fit that tool's schema, which has been
# reduced
# to what can be enforced. If a notation cannot express a schema, the tool's calls are JSON between the same
# markers, which every parser of that notation accepts.


# Blanks that a model may write between the parts of a call. Bounded, because small models may write blanks
# forever.
_BLANKS = r"/( |\n{1,2}[ \t]{0,20})?/"
LOOSE = r"( |\n{1,2}[ \t]{0,20})?"
_ANY_TEXT = "/(?s:.)*/"
_ID = "/[a-zA-Z0-9]{9}/"
_ANY_ID = "/[a-zA-Z0-9_-]{1,40}/"

# Errors of a schema that the notation cannot express, or whose keywords have values of the wrong type. The
# call is then written as JSON, and llguidance reports what is wrong with the schema.
_SCHEMA_ERRORS = (Unwritable, AttributeError, IndexError, KeyError, TypeError, ValueError)


class Spelled(Protocol):
    """Returns the Lark expression of a marker in a vocabulary, as `GrammarTokens.lark_expression` does."""

    def __call__(self, text: str, *, plain: bool = False) -> str: ...


def lark_string(value: str) -> str:
    """Return a Lark string literal of `value`."""
    return json.dumps(value, ensure_ascii=False)


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

    spelled: returns the Lark expression of a marker in this vocabulary. free: names of tools whose
    arguments may be any object. compact: allow only the blanks that the model was trained to write.
    """

    def __init__(
        self, tools: ToolSet, spelled: Spelled, free: Sequence[str] = (), *, compact: bool = False
    ) -> None:
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
            first = self._write_marker(marker)
            if self._format.recipient:  # the marker has the tool's name
                names = list(self._tools.schemas)
                at = call_markers(self._format, names).index(marker)
                return self._write_grammar(f"{first} {self._write_json_arguments(at, names[at])}")
            return self._write_grammar(f"{first} {self._write_calls()}")
        self._rules["OTHER"] = _NO_CALL
        return self._write_grammar(f"{self._write_json_calls('json')} | OTHER")

    def write_whole(self, answer: str = "", closing_marker: str = "") -> str:
        """Return the grammar of an answer that consists of calls, or that matches the rule `answer`.

        closing_marker: the closing marker of thoughts closing_marker the answer, if any.
        """
        format = self._format
        if format.bare:
            calls = self._write_calls()
        else:
            marker, first = self._spelled(format.opens[0]), self._write_calls()
            calls = f"{self._write_head()} {marker} {first}"
            if format.thoughts:
                calls = f"{self._write_thoughts(*format.thoughts)}? {calls}"
            elif format.recipient:  # the prompt has the first marker
                calls = f"{first} ({calls})*" if self._tools.parallel else first
            elif self._tools.parallel and format.kind not in ("json", "mistral", "python", "found"):
                more = f"({lark_string(format.lead) if format.lead else ''} {calls})*"
                calls = f"{calls} {more}"
        if answer:
            self._rules["answer"] = answer
            calls = f"(({calls}) | answer)"
        return self._write_grammar(f"{write_thoughts_end(closing_marker, self._spelled)} ({calls})")

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
            case "python":
                call = self._write_call(self._write_python)
                more = f'(", " {call})*' if self._tools.parallel else ""
                return f'"[" {call} {more} "]" {close}'
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
        self._rules[rule] = json_expression(for_library(self._schema(name)), self._json_blanks)
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
        middle = self._write_options(self._format.middle)
        arguments = self._write_json_arguments(index, name)
        return f"{lark_string(name)} {identity} {middle} {arguments}"

    def _write_options(self, text: str) -> str:
        """Return the expression of a literal with optional parts."""
        parts = text.split(OPTION_PLACEHOLDER)
        return " ".join(
            f"({self._spelled(part)})?" if at % 2 else self._spelled(part)
            for at, part in enumerate(parts)
        )

    def _write_literal(self, text: str) -> str:
        parts = [self._spelled(part) for part in text.split(CALL_ID_PLACEHOLDER)]
        return f" {_ANY_ID} ".join(parts)

    def _write_detected(self, index: int, name: str) -> str:
        format = self._format
        head = f"{lark_string(name)} {self._write_literal(format.middle)}"
        if not format.parameter and not format.elements:
            return f"{head} {self._write_json_arguments(index, name)}"
        place = self._schema(name), f"tag_{index}", self._json_blanks
        values: TagValues | ElementValues
        if format.elements:
            values = ElementValues(*place, format.elements, self._spelled)
        else:
            values = TagValues(*place, format.parameter, self._spelled)
        try:
            parameters = values.arguments()
        except _SCHEMA_ERRORS:
            return self._write_object(index, name)
        self._rules.update(values.rules)
        return f"{head} {parameters}"

    def _write_tagged(self, index: int, name: str) -> str:
        blank = '"\\n"' if self._compact else "/\\n{0,2}/"
        try:
            values = TagValues(self._schema(name), f"tag_{index}", self._json_blanks)
            parameters = values.arguments()
        except _SCHEMA_ERRORS:
            return f"{blank} {self._write_object(index, name)} {blank}"
        self._rules.update(values.rules)
        return (
            f'{blank} {lark_string(f"<function={name}>")} "\\n" {parameters} "</function>" {blank}'
        )

    def _write_python(self, index: int, name: str) -> str:
        values = PythonValues(self._schema(name), f"value_{index}", self._json_blanks)
        try:
            arguments = values.arguments()
        except _SCHEMA_ERRORS:
            arguments = f'"**" {self._write_json_arguments(index, name)}'
        else:
            self._rules.update(values.rules)
        return f'{lark_string(f"{name}(")} {arguments} ")"'

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
