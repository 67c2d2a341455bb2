"""Whether the schemas of a `oneOf` exclude one another, so that any of them is exactly one of them."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from localspec.engine.sampling.grammars.pointers import Document

_MAX_PAIRS = 2000
_MAX_DEPTH = 4  # of properties that are compared
_MAX_REFERENCES = 20
_OPENING = ("patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "then")


def are_disjoint(parts: list[Any], document: Document, alone: bool) -> bool:
    """Return whether it is certain that no value is valid under two of the parts.

    `alone`: nothing beside them describes the same object, so that each has only the keys that it names.
    """
    resolved = [_resolve(part, document) for part in parts]
    if _have_a_tag(resolved, document):
        return True
    pairs = len(parts) * (len(parts) - 1) // 2
    return pairs <= _MAX_PAIRS and all(
        (alone and _have_other_keys(one, other)) or _differ(one, other, document, _MAX_DEPTH)
        for one, other in combinations(resolved, 2)
    )


def _resolve(schema: Any, document: Document) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = document.target(schema["$ref"])
    return None


def _have_a_tag(parts: list[Any], document: Document) -> bool:
    """Return whether all have one required property that has other values in each."""
    if not parts or not all(isinstance(part, dict) and _required(part) for part in parts):
        return False
    for key in sorted(set.intersection(*(_required(part) for part in parts))):
        values = [_values(_property(part, key, document)) for part in parts]
        known = [each for each in values if each is not None]
        if len(known) == len(parts) and sum(map(len, known)) == len(set().union(*known)):
            return True
    return False


def _differ(one: Any, other: Any, document: Document, depth: int) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
        return False
    if not _types(one) & _types(other):
        return True
    first, second = _values(one), _values(other)
    if first is not None and second is not None:
        return not first & second
    if _types(one) | _types(other) != {"object"}:
        return False
    return any(
        _differ(_property(one, key, document), _property(other, key, document), document, depth - 1)
        for key in sorted(_required(one) & _required(other))
    )


def _have_other_keys(one: Any, other: Any) -> bool:
    """Return whether one of two objects requires a key that the other must not have."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if _types(one) | _types(other) != {"object"}:
        return False
    return _needs_another_key(one, other) or _needs_another_key(other, one)


def _needs_another_key(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `one` requires a key that `other`, which is closed, does not have."""
    named = other.get("properties")
    closed = other.get("additionalProperties", False) is False and isinstance(named, dict)
    if not closed or any(name in other for name in _OPENING):
        return False
    assert isinstance(named, dict)
    return bool(_required(one) - named.keys() - _required(other))


def _required(schema: dict[str, Any]) -> set[str]:
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
    """Return a text that is the same for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema's values; an integer is a number."""
    kinds = schema.get("type")
    every = {"null", "boolean", "number", "string", "array", "object"}
    if kinds is None:
        values = _values(schema)
        if values is not None:
            return {_type_of(json.loads(value)) for value in values}
        return {"object"} if "properties" in schema else every
    names = kinds if isinstance(kinds, list) else [kinds]
    found = {str(name).lower() for name in names}
    if schema.get("nullable") is True:
        found.add("null")
    return {"number" if name == "integer" else name for name in found}


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")
