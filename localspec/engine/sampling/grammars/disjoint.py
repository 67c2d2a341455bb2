"""Decide whether the schemas of a `oneOf` exclude each other, so that `anyOf` means the same."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from localspec.engine.sampling.grammars.pointers import Document

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
    if not parts or not all(isinstance(part, dict) and _required(part) for part in parts):
        return False
    for key in sorted(set.intersection(*(_required(part) for part in parts))):
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
        for key in sorted(_required(a) & _required(b))
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
    return bool(_required(a) - named.keys() - _required(b))


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
