"""Resolve the references within a JSON Schema document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher


class Document:
    """A JSON Schema document whose references can be resolved."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    def target(self, reference: str) -> Any:
        """Return the schema that a reference leads to, or None if the document does not have it."""
        base, _, fragment = reference.partition("#")
        start: Any = self.root
        if base and base != self.root.get("$id", self.root.get("id")):
            start = self._identified.get(base)
        if start is None:
            return None
        if not fragment.startswith("/"):
            return start if not fragment else self._anchored.get(unquote(fragment))
        node = start
        for name in fragment.split("/")[1:]:
            node = _child(node, unquote(name).replace("~1", "/").replace("~0", "~"))
        return node if isinstance(node, dict | bool) else None

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        """Every JSON object of the document."""
        objects, pending = [], [self.root]
        while pending:
            value: Any = pending.pop()
            if isinstance(value, dict):
                objects.append(value)
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return objects

    @cached_property
    def _anchored(self) -> dict[str, Any]:
        anchors: dict[str, Any] = {}
        for schema in self._objects:
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = schema.get(keyword)
                if isinstance(name, str) and (not keyword.endswith("id") or name.startswith("#")):
                    anchors.setdefault(name.removeprefix("#"), schema)
        return anchors

    @cached_property
    def _identified(self) -> dict[str, Any]:
        schemas: dict[str, Any] = {}
        base = str(self.root.get("$id", "")).rpartition("/")[0]
        for schema in self._objects:
            name = schema.get("$id")
            if isinstance(name, str):
                schemas.setdefault(name, schema)
                if base and name.startswith(f"{base}/"):
                    schemas.setdefault(name.removeprefix(f"{base}/"), schema)
        return schemas


def _child(node: Any, name: str) -> Any:
    """Return the child of a JSON value under a key or index, or None."""
    if isinstance(node, dict):
        return node.get(name)
    if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
        return node[int(name)]
    return None


# ------------------------------------------------------------------------ formats
# Regular expressions for the string formats that are enforced, with texts of bounded length.
#
# llguidance's own expressions allow a fraction of a second, the numbers of a duration or an address to be of
# any length, and small models never end them. Formats that are not listed here are not enforced. The JSON
# Schema standard treats a format as an annotation.


# Formats for which llguidance's own expressions are used. Their texts are bounded, or as open as any string.
_NATIVE = frozenset({"date", "uuid", "ipv4", "ipv6", "uri", "hostname"})
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-9])))"
)
_FRACTION = r"(\.[0-9]{1,9})?"
_ZONE = "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60){_FRACTION}{_ZONE})"
# Times without zone or seconds, which a `pattern` beside the format may require.
_ANY_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9](:([0-5][0-9]|60){_FRACTION})?{_ZONE}?)"
_DIGITS = "[0-9]{1,9}"
_SECONDS = rf"{_DIGITS}(\.{_DIGITS})?S"
_CLOCK = f"(T({_DIGITS}H({_DIGITS}M({_SECONDS})?)?|{_DIGITS}M({_SECONDS})?|{_SECONDS}))"
_DATE_DURATION = (
    f"({_DIGITS}W|({_DIGITS}Y({_DIGITS}M({_DIGITS}D)?)?|{_DIGITS}M({_DIGITS}D)?|{_DIGITS}D)"
)
_DURATION = f"(P{_DATE_DURATION}{_CLOCK}?|{_CLOCK}))"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_EMAIL = rf"({_ATOM}(\.{_ATOM}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,4}})"

_BOUNDED = {
    "time": _TIME,
    "date-time": f"({_DATE}[tT]{_TIME})",
    "duration": _DURATION,
    "email": _EMAIL,
}
_BESIDE_A_PATTERN = {"time": _ANY_TIME, "date-time": f"({_DATE}[tT ]{_ANY_TIME})"}

FORMATS = _NATIVE | _BOUNDED.keys()


def format_pattern(name: str, *, beside_a_pattern: bool) -> str | None:
    """Return the expression of a format, or None if llguidance's own is used.

    beside_a_pattern: whether the schema has a `pattern` as well, which may need a wider format.
    """
    pattern = _BOUNDED.get(name)
    if beside_a_pattern:
        pattern = _BESIDE_A_PATTERN.get(name, pattern)
    return None if pattern is None else f"^{pattern}$"


# ------------------------------------------------------------------------ patterns
# Translate the regular expressions of JSON Schemas to llguidance's dialect.
#
# Schemas are written for the dialects of JavaScript or Python. llguidance reads Rust's, without look-
# around. A
# leading look-ahead is equivalent to a second expression that must match as well. Any other assertion can
# only be removed, which allows more texts and never fewer.


# Expressions with look-around that widely used libraries write for their types, and their equivalents.
_EQUIVALENT = {
    # Zod 4: z.iso.duration()
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d{1,9}W|\d{1,9}Y(\d{1,9}M)?(\d{1,9}D)?T_|\d{1,9}M(\d{1,9}D)?T_|\d{1,9}DT_|T!)$".replace(
            "T_", "(T!)?"
        ).replace(
            "T!",
            r"T(\d{1,9}H(\d{1,9}M)?(S!)?|\d{1,9}M(S!)?|S!)".replace(
                "S!", r"\d{1,9}([.,]\d{1,9})?S"
            ),
        )
    ),
    # Zod 3 and early Zod 4: z.email()
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # pydantic 2: Decimal as text
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})$",
}
_ANCHORS = {r"\A": "^", r"\Z": "$", r"\z": "$"}  # Python's anchors.
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The expressions that a text must all match. exact: whether they are equivalent to the original."""

    expressions: tuple[str, ...]
    exact: bool = True


@lru_cache(maxsize=1024)
def translate_pattern(pattern: str) -> Pattern:
    """Translate a schema's expression. The result has no expressions if none can be enforced."""
    parts = _split_lookaheads(_EQUIVALENT.get(pattern, pattern))
    if all(map(_compiles, parts)):
        return Pattern(tuple(parts))
    relaxed = [part for part in map(_without_assertions, parts) if _compiles(part)]
    return Pattern(tuple(relaxed), exact=False)


def _compiles(pattern: str) -> bool:
    source = LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "string", "pattern": pattern}), overrides={}
    )
    return not LLMatcher.validate_grammar(source)


def _split_lookaheads(pattern: str) -> list[str]:
    """Split `^(?=A)B` into `^A` and `^B`, in Rust's dialect."""
    tokens = _tokens(pattern)
    lookaheads: list[str] = []
    alternatives = _at_top_level(tokens, "|")
    while tokens[:1] == ["^"] and tokens[1:2] == ["(?="] and not alternatives:
        end = _find_closing(tokens, 1)
        lookaheads.append("^(" + "".join(tokens[2:end]) + ")")
        tokens = ["^", *tokens[end + 1 :]]
    return [*lookaheads, "".join(tokens)]


def _without_assertions(pattern: str) -> str:
    tokens, remaining, index = _tokens(pattern), [], 0
    while index < len(tokens):
        if tokens[index] in _LOOKAROUND:
            index = _find_closing(tokens, index)
        elif tokens[index] not in (r"\b", r"\B"):
            remaining.append(tokens[index])
        index += 1
    return "".join(remaining)


def _at_top_level(tokens: list[str], symbol: str) -> bool:
    """Return whether `symbol` occurs outside of all groups."""
    depth = 0
    for token in tokens:
        depth += token.startswith("(") - (token == ")")
        if token == symbol and not depth:
            return True
    return False


def _find_closing(tokens: list[str], start: int) -> int:
    """Return the index at which the group that opens at `start` closes, or the end if it does not."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += tokens[index].startswith("(") - (tokens[index] == ")")
        if not depth:
            return index
    return len(tokens)


_TOKEN = re.compile(r"\\.|\(\?(?:<?[=!]|:)|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _tokens(pattern: str) -> list[str]:
    """Split an expression into escapes, classes, openings of groups and characters, in Rust's dialect."""
    return [_in_rust(token) for token in _TOKEN.findall(pattern)]


def _in_rust(token: str) -> str:
    if token in ("[^]", "[^]]"):
        return r"[\s\S]" + token[3:]
    if len(token) > 2 and token[0] == "[":
        # Rust has nested classes, intersections and differences. JavaScript takes their signs literally.
        head = "[^" if token[1] == "^" else "["
        members = re.findall(r"\\.|.", token[len(head) : -1], re.DOTALL)
        return head + "".join("\\" + char if char in "[&~" else char for char in members) + "]"
    return _ANCHORS.get(token, token)


# ------------------------------------------------------------------------ disjoint
# Decide whether the schemas of a `oneOf` exclude each other, so that `anyOf` means the same.


_MAX_PAIRS = 2000  # Schemas are compared in pairs, which takes quadratic time.
_MAX_DEPTH = 4  # Nesting depth of the properties that are compared.
_MAX_REFERENCES = 20  # References to references that are followed.
# Keywords that may allow keys b than those in `properties`.
_KEY_ALLOWING = (
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "then",
)


def are_disjoint(parts: list[Any], document: Document, alone: bool) -> bool:
    """Return whether it is certain that no value is valid under two of the parts.

    alone: whether no schema beside the `oneOf` describes the same object. Each part then allows only the
    keys that it names.
    """
    resolved = [_resolve(part, document) for part in parts]
    if _have_a_tag(resolved, document):
        return True
    pairs = len(parts) * (len(parts) - 1) // 2
    return pairs <= _MAX_PAIRS and all(
        (alone and _require_different_keys(a, b)) or _differ(a, b, document, _MAX_DEPTH)
        for a, b in combinations(resolved, 2)
    )


def _resolve(schema: Any, document: Document) -> Any:
    """Return the schema that a reference leads to, or None if there are too many references."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = document.target(schema["$ref"])
    return None


def _have_a_tag(parts: list[Any], document: Document) -> bool:
    """Return whether all parts require a property whose listed values differ between all of them."""
    if not parts or not all(isinstance(part, dict) and _required_names(part) for part in parts):
        return False
    for key in sorted(set.intersection(*(_required_names(part) for part in parts))):
        values = [_values(_property(part, key, document)) for part in parts]
        known = [listed for listed in values if listed is not None]
        if len(known) == len(parts) and sum(map(len, known)) == len(set().union(*known)):
            return True
    return False


def _differ(a: Any, b: Any, document: Document, depth: int) -> bool:
    """Return whether it is certain that no value is valid under both schemas."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or not depth:
        return False
    if not _types(a) & _types(b):
        return True
    first, second = _values(a), _values(b)
    if first is not None and second is not None:
        return not first & second
    if _types(a) | _types(b) != {"object"}:
        return False
    return any(
        _differ(_property(a, key, document), _property(b, key, document), document, depth - 1)
        for key in sorted(_required_names(a) & _required_names(b))
    )


def _require_different_keys(a: Any, b: Any) -> bool:
    """Return whether one of two object schemas requires a key that the other does not allow."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    if _types(a) | _types(b) != {"object"}:
        return False
    return _requires_forbidden_key(a, b) or _requires_forbidden_key(b, a)


def _requires_forbidden_key(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether schema `a` requires a key that schema `b` does not allow."""
    named = b.get("properties")
    closed = b.get("additionalProperties", False) is False and isinstance(named, dict)
    if not closed or any(name in b for name in _KEY_ALLOWING):
        return False
    assert isinstance(named, dict)
    return bool(_required_names(a) - named.keys() - _required_names(b))


def _required_names(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _property(schema: dict[str, Any], key: str, document: Document) -> Any:
    properties = schema.get("properties")
    return _resolve(properties.get(key), document) if isinstance(properties, dict) else None


def _values(schema: Any) -> set[str] | None:
    """Return the values that a schema lists, as JSON; None if it lists none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {_as_json(schema["const"])}
    values = schema.get("enum")
    if not isinstance(values, list):
        return None
    return {_as_json(value) for value in values}


def _as_json(value: Any) -> str:
    """Return JSON text that is the same for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema's values; integers count as numbers."""
    types = schema.get("type")
    every_type = {"null", "boolean", "number", "string", "array", "object"}
    if types is None:
        values = _values(schema)
        if values is not None:
            return {_type_of(json.loads(value)) for value in values}
        return {"object"} if "properties" in schema else every_type
    names = {str(name).lower() for name in (types if isinstance(types, list) else [types])}
    if schema.get("nullable") is True:
        names.add("null")
    return {"number" if name == "integer" else name for name in names}


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


# ------------------------------------------------------------------------ schemas
# Close the objects of a JSON Schema: allow only the keys that it names, unless it explicitly allows more.
#
# In JSON Schema, an object without `additionalProperties` is open, and a small model then invents keys
# until it
# runs out of tokens. As in llama-server, an object that names properties may have only those.
# `additionalProperties` (true or a schema), `unevaluatedProperties` and `patternProperties` allow more, and
# an
# object that names no properties is open. Schemas in an `allOf`, beside an `anyOf` or beside a `$ref`
# describe
# the same object, so each part must also allow the keys of the others.


Schema = dict[str, Any]

# Keywords whose schemas describe another value than the enclosing schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = (
    "additionalProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
)
# Keywords whose schemas describe the same value. `if` and `not` only test it and are not changed.
_BRANCHES = ("anyOf", "oneOf")
_DEFINITION_PREFIX = "localspec-closed-"  # Name of an added definition; a number follows.
# Limit of the work, in schemas visited and keys copied. The parts of one object need each other's keys, which
# takes quadratic time. A schema of the largest accepted length needs some ten thousand steps otherwise.
_MAX_STEPS = 200_000


def close_objects(schema: Schema) -> Schema:
    """Return `schema` with its objects closed, without changing the original.

    Raises:
        RecursionError: the schema is nested too deeply.
        ValueError: an object has too many parts, or the value of a keyword has the wrong type.
    """
    try:
        return _Closer(schema).close()
    except (AttributeError, TypeError):
        raise ValueError("one of its keywords has a value of the wrong type.") from None


@dataclass(frozen=True)
class _AllowedKeys:
    """The keys and key patterns that schemas of one object allow, and whether one of them is open."""

    keys: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False

    def __or__(self, other: _AllowedKeys) -> _AllowedKeys:
        return _AllowedKeys(
            self.keys | other.keys, self.patterns | other.patterns, self.open or other.open
        )


_NO_KEYS = _AllowedKeys()


class _Closer:
    """A walk through one schema that closes its objects."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS
        self._keys_of_target: dict[str, _AllowedKeys] = {}  # By the reference to the target.
        self._definition_names: dict[tuple[str, _AllowedKeys], str] = {}
        self._definitions: dict[str, Any] = {}

    def close(self) -> Schema:
        """Return the whole schema with its objects closed."""
        closed_root = self._close(self._root, _NO_KEYS)
        assert isinstance(closed_root, dict)
        if self._definitions:
            closed_root["$defs"] = {**closed_root.get("$defs", {}), **self._definitions}
        return closed_root

    def _close(self, schema: Any, outer: _AllowedKeys) -> Any:
        """Return a schema with its objects closed; outer: keys from other schemas of the same object."""
        if not isinstance(schema, dict):
            return schema
        self._spend(1)
        result = dict(schema)
        for name in _MAPS:
            if isinstance(schema.get(name), dict):
                result[name] = {k: self._close(v, _NO_KEYS) for k, v in schema[name].items()}
        for name in _VALUES:
            value = schema.get(name)
            if isinstance(value, list):
                result[name] = [self._close(item, _NO_KEYS) for item in value]
            elif isinstance(value, dict):
                result[name] = self._close(value, _NO_KEYS)
        self._close_parts(schema, result, outer)
        self._close_keys(schema, result, outer | self._keys_of_parts(schema))
        return result

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ValueError("its objects have too many parts or keys")

    def _close_parts(self, schema: Schema, result: Schema, outer: _AllowedKeys) -> None:
        """Close the schemas within `schema` that describe the same object, with each other's keys."""
        base = outer | _own_keys(schema)
        groups = list(_groups(schema))
        allowed = {name: [self._all_keys(part) for part in parts] for name, parts in groups}
        for name, parts in groups:
            others = self._union(
                [base, *(keys for kind in allowed if kind != name for keys in allowed[kind])]
            )
            if name == "$ref":
                result[name] = self._reference(schema[name], others)
            elif name == "allOf":
                siblings = self._union_of_others(allowed[name])
                result[name] = [
                    self._close(part, self._union([others, keys]))
                    for part, keys in zip(parts, siblings, strict=True)
                ]
            elif name in _BRANCHES:
                result[name] = [self._close(part, others) for part in parts]
            else:  # "then" or "else", which have one schema.
                result[name] = self._close(parts[0], others)

    def _union_of_others(self, allowed: list[_AllowedKeys]) -> Iterator[_AllowedKeys]:
        """Yield, for each entry of `allowed`, the union of all other entries."""
        suffixes = [_NO_KEYS]
        for keys in reversed(allowed):
            suffixes.append(self._union([keys, suffixes[-1]]))
        prefix = _NO_KEYS
        for keys, suffix in zip(allowed, suffixes[-2::-1], strict=True):
            yield self._union([prefix, suffix])
            prefix = self._union([prefix, keys])

    def _union(self, parts: Iterable[_AllowedKeys]) -> _AllowedKeys:
        keys: set[str] = set()
        patterns: set[str] = set()
        open = False
        for part in parts:
            self._spend(len(part.keys))
            keys |= part.keys
            patterns |= part.patterns
            open = open or part.open
        return _AllowedKeys(frozenset(keys), frozenset(patterns), open)

    def _close_keys(self, schema: Schema, result: Schema, others: _AllowedKeys) -> None:
        """Close the object that `schema` itself describes, if it names its keys."""
        unevaluated = schema.get("unevaluatedProperties")
        if isinstance(unevaluated, dict) and any(_groups(schema)):
            return
        if isinstance(unevaluated, dict):  # Without other parts, both keywords mean the same.
            result.setdefault("additionalProperties", self._close(unevaluated, _NO_KEYS))
        result.pop("unevaluatedProperties", None)  # False is equivalent to closing the object.
        if "additionalProperties" in result or unevaluated is True or others.open:
            return
        if unevaluated is None and "properties" not in schema and "patternProperties" not in schema:
            return
        named = others.keys | _required(schema)
        for name, allowed in (("properties", named), ("patternProperties", others.patterns)):
            # The schema's own keys come first, because keys are generated in this order.
            own_entries = result.get(name) or {}
            if missing := sorted(allowed - own_entries.keys()):
                result[name] = {**own_entries, **dict.fromkeys(missing, True)}
                self._spend(len(missing))
        result["additionalProperties"] = False

    def _reference(self, pointer: str, outer: _AllowedKeys) -> str:
        """Return a reference to the closed target, with a definition of its own if `outer` has keys."""
        target = self._target(pointer)
        if outer == _NO_KEYS or target is None:
            return pointer
        key = (pointer, outer)
        if key not in self._definition_names:
            name = f"{_DEFINITION_PREFIX}{len(self._definition_names)}"
            # The name is stored before closing the target, which may refer to itself.
            self._definition_names[key] = name
            self._definitions[name] = self._close(target, outer)
        return f"#/$defs/{self._definition_names[key]}"

    # ------------------------------------------------------------------ allowed keys

    def _keys_of_parts(self, schema: Schema) -> _AllowedKeys:
        return self._union(self._all_keys(part) for _, parts in _groups(schema) for part in parts)

    def _all_keys(self, schema: Any) -> _AllowedKeys:
        """Return the keys that `schema` and all its parts allow."""
        self._spend(1)
        if not isinstance(schema, dict):
            return _NO_KEYS
        if not _is_reference(schema):
            return _own_keys(schema) | self._keys_of_parts(schema)
        pointer = schema["$ref"]
        if pointer not in self._keys_of_target:
            # A target that refers to itself finds this entry and ends the recursion.
            self._keys_of_target[pointer] = _NO_KEYS
            self._keys_of_target[pointer] = self._all_keys(self._target(pointer))
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        sibling_keys = self._all_keys(siblings) if siblings else _NO_KEYS
        return self._keys_of_target[pointer] | sibling_keys

    def _target(self, pointer: str) -> Any:
        """Return the target of a reference within the document, or None if there is none."""
        if not pointer.startswith("#"):
            return None
        node: Any = self._root
        for name in pointer[1:].split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node


def _groups(schema: Schema) -> Iterator[tuple[str, list[Any]]]:
    """Yield the schemas within `schema` that describe the same object, by keyword."""
    for name in ("allOf", *_BRANCHES):
        if isinstance(schema.get(name), list):
            yield name, schema[name]
    for name in ("then", "else"):
        if isinstance(schema.get(name), dict):
            yield name, [schema[name]]
    if _is_reference(schema):
        yield "$ref", [{"$ref": schema["$ref"]}]


def _is_reference(schema: Schema) -> bool:
    return isinstance(schema.get("$ref"), str)


def _own_keys(schema: Schema) -> _AllowedKeys:
    """Return the keys that a schema allows, without those of its parts."""
    keys = _required(schema) | _names(schema, "properties")
    other = schema.get("additionalProperties", False), schema.get("unevaluatedProperties", False)
    is_open = any(value is not False for value in other)
    return _AllowedKeys(keys, _names(schema, "patternProperties"), is_open)


def _required(schema: Schema) -> frozenset[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def _names(schema: Schema, keyword: str) -> frozenset[str]:
    value = schema.get(keyword)
    return frozenset(value) if isinstance(value, dict) else frozenset()
