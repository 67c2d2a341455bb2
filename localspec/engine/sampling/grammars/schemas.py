"""Close the objects of a JSON Schema: allow only the keys that it names, unless it explicitly allows more.

In JSON Schema, an object without `additionalProperties` is open, and a small model then invents keys until it
runs out of tokens. As in llama-server, an object that names properties may have only those.
`additionalProperties` (true or a schema), `unevaluatedProperties` and `patternProperties` allow more, and an
object that names no properties is open. Schemas in an `allOf`, beside an `anyOf` or beside a `$ref` describe
the same object, so each part must also allow the keys of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

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


def closed(schema: Schema) -> Schema:
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
