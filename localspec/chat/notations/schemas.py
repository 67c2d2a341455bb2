"""Read the types of values, and the parts of objects, from the JSON Schema of a tool's arguments."""

from __future__ import annotations

from typing import Any


def schema_types(schema: Any, root: dict[str, Any], depth: int = 20) -> set[str]:
    """Return the types that a schema within `root` allows, {"any"} if it does not say.

    An argument that can only be a string is written as plain text; one that cannot be a string is
    written as JSON.
    """
    if not isinstance(schema, dict) or not depth:
        return {"any"}
    if "$ref" in schema:
        return schema_types(_resolve_reference(schema["$ref"], root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(name) for name in kind}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types = {name for part in schema[key] for name in schema_types(part, root, depth - 1)}
            return {"any"} if "any" in types else types
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {json_type(value) for value in schema.get("enum", [schema.get("const")])}
    return {"any"}


def child_schema(schema: Any, key: str, root: dict[str, Any], depth: int = 20) -> Any:
    """Return the schema of a member of an object, or of the items of a list; None if there is none."""
    if not isinstance(schema, dict) or not depth:
        return None
    if "$ref" in schema:
        return child_schema(_resolve_reference(schema["$ref"], root), key, root, depth - 1)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name) or ()]
    children = (child_schema(part, key, root, depth - 1) for part in parts)
    inner = schema.get("items", schema.get("additionalProperties"))
    return next((child for child in children if child is not None), inner)


def json_type(value: object) -> str:
    """Return a value's type as JSON Schema names it; every number is a "number"."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def _resolve_reference(pointer: Any, root: dict[str, Any]) -> Any:
    """Return what a `$ref` within the schema refers to, or None."""
    node: Any = root
    for name in str(pointer).removeprefix("#").split("/")[1:]:
        node = node.get(name) if isinstance(node, dict) else None
    return node if str(pointer).startswith("#") else None
