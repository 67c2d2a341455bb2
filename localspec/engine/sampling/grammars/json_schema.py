"""Analysis of JSON Schemas for `enforced`: references, patterns, unions and open objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate, combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs")  # Keywords with a schema for each name.
# Keywords whose schemas describe another value than the enclosing schema.
_VALUES = (*_MAPS, "additionalProperties", "items", "prefixItems", "additionalItems")
# The keyword that holds the parts of a conditional until objects are closed, because the parts name keys.
CONDITIONAL = "then"
_MAX_REFERENCES = 20  # References to references that are followed.


def compiles(schema: Schema) -> bool:
    """Return whether llguidance accepts a schema."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={})
    return not LLMatcher.validate_grammar(source)


def rewrite_parts(
    schema: Schema, rewrite: Callable[[Any], Any], keywords: Iterable[str] = ()
) -> Schema:
    """Return a reduced schema with `rewrite` applied to the schemas of other values and of `keywords`."""
    result = dict(schema)
    for name in (*_VALUES, *keywords):
        value = schema.get(name)
        if isinstance(value, list):
            result[name] = [rewrite(part) for part in value]
        elif isinstance(value, dict) and name in _MAPS:
            result[name] = {key: rewrite(part) for key, part in value.items()}
        elif isinstance(value, dict):
            result[name] = rewrite(value)
    return result


class Document:
    """A JSON Schema document whose references can be resolved."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    def target(self, reference: str) -> Any:
        """Return the schema that a reference leads to, or None if the document does not have it."""
        base, _, fragment = reference.partition("#")
        node: Any = self.root
        if base and base != self.root.get("$id", self.root.get("id")):
            node = self._named[1].get(base)
        if node is not None and fragment and not fragment.startswith("/"):
            return self._named[0].get(unquote(fragment))
        for name in fragment.split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node if isinstance(node, dict | bool) else None

    def resolve(self, schema: Any) -> Any:
        """Return the schema that a schema refers to, or None if there are too many references."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            schema = self.target(schema["$ref"])
        return None

    @cached_property
    def _named(self) -> tuple[Schema, Schema]:
        """The schemas that have an anchor, and those that have an id."""
        anchored, identified = dict[str, Any](), dict[str, Any]()
        base = str(self.root.get("$id", "")).rpartition("/")[0]
        pending: list[Any] = [self.root]
        while pending:
            value = pending.pop()
            if isinstance(value, list):
                pending += value
            if not isinstance(value, dict):
                continue
            pending += value.values()
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = value.get(keyword)
                if isinstance(name, str) and (not keyword.endswith("id") or name.startswith("#")):
                    anchored.setdefault(name.removeprefix("#"), value)
            if isinstance(name := value.get("$id"), str):
                identified.setdefault(name, value)
                if base and name.startswith(f"{base}/"):
                    identified.setdefault(name.removeprefix(f"{base}/"), value)
        return anchored, identified


# Schemas are written for the regular expressions of JavaScript or Python. llguidance reads Rust's, without
# look-around. A leading look-ahead is equivalent to a second expression that must match as well. Any other
# assertion can only be removed, which allows more texts and never fewer.

_N, _SECONDS = r"\d{1,9}", r"\d{1,9}([.,]\d{1,9})?S"
_CLOCK = rf"T({_N}H({_N}M)?({_SECONDS})?|{_N}M({_SECONDS})?|{_SECONDS})"
# Expressions with look-around that widely used libraries write for their types, and their equivalents.
_EQUIVALENT = {
    # Zod 4: z.iso.duration()
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P({_N}W|{_N}Y({_N}M)?({_N}D)?({_CLOCK})?|{_N}M({_N}D)?({_CLOCK})?|{_N}D({_CLOCK})?|{_CLOCK})$"
    ),
    # Zod 3 and early Zod 4: z.email()
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # pydantic 2: Decimal as text
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})$",
}
# Python's anchors, and JavaScript's class of every character.
_IN_RUST = {r"\A": "^", r"\Z": "$", r"\z": "$", "[^]": r"[\s\S]", "[^]]": r"[\s\S]]"}
_TOKEN = re.compile(r"\\.|\(\?(?:<?[=!]|:)|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class Pattern(NamedTuple):
    """The expressions that a text must all match. exact: whether they are equivalent to the original."""

    expressions: tuple[str, ...]
    exact: bool = True


@lru_cache(maxsize=1024)
def translate_pattern(pattern: str) -> Pattern:
    """Translate a schema's expression. The result has no expressions if none can be enforced."""
    tokens = _tokens(_EQUIVALENT.get(pattern, pattern))
    parts: list[str] = []
    alternatives = ("|", 0) in zip(tokens, _depths(tokens), strict=True)
    while tokens[:2] == ["^", "(?="] and not alternatives:  # `^(?=A)B` is `^(A)` and `^B`.
        end = _find_closing(tokens, 1)
        parts.append("^(" + "".join(tokens[2:end]) + ")")
        tokens = ["^", *tokens[end + 1 :]]
    parts.append("".join(tokens))
    if all(map(_is_expression, parts)):
        return Pattern(tuple(parts))
    return Pattern(tuple(filter(_is_expression, map(_without_assertions, parts))), exact=False)


def _is_expression(pattern: str) -> bool:
    return compiles({"type": "string", "pattern": pattern})


def _without_assertions(pattern: str) -> str:
    tokens, remaining, index = _tokens(pattern), list[str](), 0
    while index < len(tokens):
        if tokens[index] in ("(?=", "(?!", "(?<=", "(?<!"):
            index = _find_closing(tokens, index)
        elif tokens[index] not in (r"\b", r"\B"):
            remaining.append(tokens[index])
        index += 1
    return "".join(remaining)


def _depths(tokens: list[str]) -> Iterator[int]:
    """Yield the number of groups that are open after each token."""
    return accumulate(token.startswith("(") - (token == ")") for token in tokens)


def _find_closing(tokens: list[str], start: int) -> int:
    """Return the index at which the group that opens at `start` closes, or the end if it does not."""
    depths = enumerate(_depths(tokens[start:]), start)
    return next((index for index, depth in depths if not depth), len(tokens))


def _tokens(pattern: str) -> list[str]:
    """Split an expression into escapes, classes, openings of groups and characters, in Rust's dialect."""
    return [_IN_RUST.get(token) or _in_rust(token) for token in _TOKEN.findall(pattern)]


def _in_rust(token: str) -> str:
    if len(token) < 3 or token[0] != "[":
        return token
    # Rust has nested classes, intersections and differences. JavaScript takes their signs literally.
    head = "[^" if token[1] == "^" else "["
    members = re.findall(r"\\.|.", token[len(head) : -1], re.DOTALL)
    return head + "".join("\\" + char if char in "[&~" else char for char in members) + "]"


# A `oneOf` means the same as an `anyOf` if its schemas exclude each other.

_MAX_PAIRS = 2000  # Schemas are compared in pairs, which takes quadratic time.
_MAX_DEPTH = 4  # Nesting depth of the properties that are compared.
# Keywords that may allow keys besides those in `properties`.
_KEY_ALLOWING = frozenset(
    "patternProperties unevaluatedProperties allOf anyOf oneOf $ref then".split()
)
_ALL_TYPES = {"null", "boolean", "number", "string", "array", "object"}
_TYPE_NAMES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


def are_disjoint(parts: list[Any], document: Document, alone: bool) -> bool:
    """Return whether it is certain that no value is valid under two of the parts.

    alone: whether no schema beside the `oneOf` describes the same object. Each part then allows only the
    keys that it names.
    """
    resolved = [document.resolve(part) for part in parts]
    if _have_a_tag(resolved, document):
        return True
    pairs = len(parts) * (len(parts) - 1) // 2
    return pairs <= _MAX_PAIRS and all(
        (alone and (_requires_forbidden_key(a, b) or _requires_forbidden_key(b, a)))
        or _differ(a, b, document, _MAX_DEPTH)
        for a, b in combinations(resolved, 2)
    )


def _have_a_tag(parts: list[Any], document: Document) -> bool:
    """Return whether all parts require a property whose listed values differ between all of them."""
    if not parts or not all(isinstance(part, dict) for part in parts):
        return False
    for key in sorted(frozenset.intersection(*map(_required, parts))):
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
    return _types(a) | _types(b) == {"object"} and any(
        _differ(_property(a, key, document), _property(b, key, document), document, depth - 1)
        for key in sorted(_required(a) & _required(b))
    )


def _requires_forbidden_key(a: Any, b: Any) -> bool:
    """Return whether object schema `a` requires a key that object schema `b` does not allow."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    named = b.get("properties")
    if b.get("additionalProperties", False) is not False or not isinstance(named, dict):
        return False
    if _types(a) | _types(b) != {"object"} or not _KEY_ALLOWING.isdisjoint(b):
        return False
    return bool(_required(a) - named.keys() - _required(b))


def _property(schema: Schema, key: str, document: Document) -> Any:
    properties = schema.get("properties")
    return document.resolve(properties.get(key)) if isinstance(properties, dict) else None


def _values(schema: Any) -> set[str] | None:
    """Return the values that a schema lists, as JSON that is the same for equal ones, or None."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {
        json.dumps(
            int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True
        )
        for value in values
    }


def _types(schema: Schema) -> set[str]:
    """Return the types of a schema's values; integers count as numbers."""
    types = schema.get("type")
    if types is None and (values := _values(schema)) is not None:
        return {_type_of(json.loads(value)) for value in values}
    if types is None:
        return {"object"} if "properties" in schema else _ALL_TYPES
    names = {str(name).lower() for name in (types if isinstance(types, list) else [types])}
    if schema.get("nullable") is True:
        names.add("null")
    return {"number" if name == "integer" else name for name in names}


def _type_of(value: Any) -> str:
    return "null" if value is None else _TYPE_NAMES.get(type(value), "object")


# In JSON Schema, an object without `additionalProperties` is open, and a small model then invents keys until
# it runs out of tokens. As in llama-server, an object that names properties may have only those.
# `additionalProperties` (true or a schema), `unevaluatedProperties` and `patternProperties` allow more, and
# an object that names no properties is open. Schemas in an `allOf`, beside an `anyOf` or beside a `$ref`
# describe the same object, so each part must also allow the keys of the others.

# Limit of the work, in schemas visited and keys copied. The parts of one object need each other's keys, which
# takes quadratic time. A schema of the largest accepted length needs some ten thousand steps otherwise.
_MAX_STEPS = 200_000


def close_objects(schema: Schema) -> Schema:
    """Return a reduced schema with its objects closed, without changing the original.

    Raises:
        RecursionError: the schema is nested too deeply.
        ValueError: an object has too many parts.
    """
    closer = _Closer(schema)
    closed: Schema = closer.close(schema)
    if closer.definitions:
        closed["$defs"] = {**closed.get("$defs", {}), **closer.definitions}
    return closed


class _Keys(NamedTuple):
    """The keys and key patterns that schemas of one object allow, and whether one of them is open."""

    keys: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False


_NO_KEYS = _Keys()


class _Closer:
    """A walk through one schema that closes its objects.

    definitions: closed targets of references that allow other keys as well, to be added to the schema.
    """

    def __init__(self, root: Schema) -> None:
        self.definitions: Schema = {}
        self._root = root
        self._steps_left = _MAX_STEPS
        self._keys_of_target: dict[str, _Keys] = {}  # By the reference to the target.
        self._definition_names: dict[tuple[str, _Keys], str] = {}

    def close(self, schema: Any, outer: _Keys = _NO_KEYS) -> Any:
        """Return a schema with its objects closed; outer: keys from other schemas of the same object."""
        if not isinstance(schema, dict):
            return schema
        self._spend(1)
        result = rewrite_parts(schema, self.close)
        self._close_parts(schema, result, outer)
        self._close_keys(schema, result, _merge([outer, self._keys_of_parts(schema)]))
        for keyword in (CONDITIONAL, "unevaluatedProperties"):  # They only served to close it.
            result.pop(keyword, None)
        return result

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise ValueError("its objects have too many parts or keys")

    def _union(self, *parts: _Keys) -> _Keys:
        self._spend(sum(len(part.keys) for part in parts))
        return _merge(parts)

    def _close_parts(self, schema: Schema, result: Schema, outer: _Keys) -> None:
        """Close the schemas within `schema` that describe the same object, with each other's keys."""
        base = _merge([outer, _own_keys(schema)])
        groups = dict(_groups(schema))
        allowed = {name: [self._all_keys(part) for part in parts] for name, parts in groups.items()}
        for name, parts in groups.items():
            others = self._union(
                base, *(keys for kind in allowed if kind != name for keys in allowed[kind])
            )
            if name == "$ref":
                result[name] = self._reference(schema[name], others)
                continue
            keys = [others] * len(parts)
            if name == "allOf":
                before = accumulate(allowed[name], self._union, initial=_NO_KEYS)
                after = [*accumulate(allowed[name][::-1], self._union, initial=_NO_KEYS)][-2::-1]
                siblings = [self._union(*pair) for pair in zip(before, after, strict=False)]
                keys = [self._union(others, those) for those in siblings]
            closed = [self.close(*pair) for pair in zip(parts, keys, strict=True)]
            result[name] = closed if isinstance(schema[name], list) else closed[0]

    def _close_keys(self, schema: Schema, result: Schema, others: _Keys) -> None:
        """Close the object that `schema` itself describes, if it names its keys."""
        unevaluated = schema.get("unevaluatedProperties")
        if isinstance(unevaluated, dict):
            if any(_groups(schema)):
                return
            # Without other parts, both keywords mean the same.
            result.setdefault("additionalProperties", self.close(unevaluated))
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

    def _reference(self, pointer: str, outer: _Keys) -> str:
        """Return a reference to the closed target, with a definition of its own if `outer` has keys."""
        target = self._target(pointer)
        if outer == _NO_KEYS or target is None:
            return pointer
        key = (pointer, outer)
        if key not in self._definition_names:
            # The name is stored before closing the target, which may refer to itself.
            name = self._definition_names[key] = f"localspec-closed-{len(self._definition_names)}"
            self.definitions[name] = self.close(target, outer)
        return f"#/$defs/{self._definition_names[key]}"

    def _keys_of_parts(self, schema: Schema) -> _Keys:
        return self._union(
            *(self._all_keys(part) for _, parts in _groups(schema) for part in parts)
        )

    def _all_keys(self, schema: Any) -> _Keys:
        """Return the keys that `schema` and all its parts allow."""
        self._spend(1)
        if not isinstance(schema, dict):
            return _NO_KEYS
        pointer = schema.get("$ref")
        if not isinstance(pointer, str):
            return _merge([_own_keys(schema), self._keys_of_parts(schema)])
        if pointer not in self._keys_of_target:
            # A target that refers to itself finds this entry and ends the recursion.
            self._keys_of_target[pointer] = _NO_KEYS
            self._keys_of_target[pointer] = self._all_keys(self._target(pointer))
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        sibling_keys = self._all_keys(siblings) if siblings else _NO_KEYS
        return _merge([self._keys_of_target[pointer], sibling_keys])

    def _target(self, pointer: str) -> Any:
        if pointer == "#":
            return self._root
        return self._root.get("$defs", {}).get(pointer.removeprefix("#/$defs/"))


def _merge(parts: Iterable[_Keys]) -> _Keys:
    keys, patterns, opened = zip(_NO_KEYS, *parts, strict=True)
    return _Keys(frozenset().union(*keys), frozenset().union(*patterns), any(opened))


def _groups(schema: Schema) -> Iterator[tuple[str, list[Any]]]:
    """Yield the schemas within `schema` that describe the same object, by keyword."""
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            yield name, schema[name]
    if CONDITIONAL in schema:
        yield CONDITIONAL, [schema[CONDITIONAL]]
    if isinstance(schema.get("$ref"), str):
        yield "$ref", [{"$ref": schema["$ref"]}]


def _own_keys(schema: Schema) -> _Keys:
    """Return the keys that a schema allows, without those of its parts."""
    other = schema.get("additionalProperties", False), schema.get("unevaluatedProperties", False)
    return _Keys(
        _required(schema) | frozenset(schema.get("properties") or ()),
        frozenset(schema.get("patternProperties") or ()),
        any(value is not False for value in other),
    )


def _required(schema: Schema) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(
        name for name in (names if isinstance(names, list) else ()) if isinstance(name, str)
    )
