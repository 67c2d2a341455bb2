"""Objects of a JSON Schema closed: only the keys that it names, unless it says that more are welcome.

JSON Schema leaves an object open where `additionalProperties` is missing, and a small model then invents
keys until it may write no more. As in llama-server, an object that names properties has those alone;
`additionalProperties` (true or a schema), `unevaluatedProperties` and `patternProperties` open it as they
say, and an object that names none is free. What stands together in `allOf`, beside `anyOf` or beside a
`$ref` describes one object, so each part lets the keys of the others through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# Where schemas stand that describe another value than the one around them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = (
    "additionalProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
)
# Where they describe the same value. `if` and `not` only ask about it and stay as they are.
_SOME = ("anyOf", "oneOf")
_MADE = "localspec-closed-"  # definitions made here; a number follows
# Steps and keys. Parts that must know each other's keys grow as the square of their number; a schema as
# long as we take one has some ten thousand steps of its own.
_ROOM = 200_000


def closed(schema: Schema) -> Schema:
    """`schema` with its objects closed. It is not changed itself.

    Raises:
        RecursionError: it is nested too deeply.
        ValueError: its objects have too many parts, or a keyword has a value of another type than it may.
    """
    try:
        return _Closing(schema).whole()
    except (AttributeError, TypeError):
        raise ValueError("one of its keywords has a value of the wrong type.") from None


@dataclass(frozen=True)
class _Around:
    """What the other parts of the same object say: their keys, and whether one of them is open."""

    keys: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    open: bool = False

    def __or__(self, other: _Around) -> _Around:
        return _Around(
            self.keys | other.keys, self.patterns | other.patterns, self.open or other.open
        )


_ALONE = _Around()


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._room = _ROOM
        self._known: dict[str, _Around] = {}  # what the targets of references say
        self._made: dict[tuple[str, _Around], str] = {}
        self._definitions: dict[str, Any] = {}

    def whole(self) -> Schema:
        found = self._close(self._root, _ALONE)
        assert isinstance(found, dict)
        if self._definitions:
            found["$defs"] = {**found.get("$defs", {}), **self._definitions}
        return found

    def _close(self, schema: Any, around: _Around) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._spend(1)
        made = dict(schema)
        for name in _MAPS:
            if isinstance(schema.get(name), dict):
                made[name] = {k: self._close(v, _ALONE) for k, v in schema[name].items()}
        for name in _VALUES:
            value = schema.get(name)
            if isinstance(value, list):
                made[name] = [self._close(each, _ALONE) for each in value]
            elif isinstance(value, dict):
                made[name] = self._close(value, _ALONE)
        self._parts(schema, made, around)
        self._keys(schema, made, around | self._said_by_parts(schema))
        return made

    def _spend(self, steps: int) -> None:
        self._room -= steps
        if self._room < 0:
            raise ValueError("its objects have too many parts or keys")

    def _parts(self, schema: Schema, made: Schema, around: _Around) -> None:
        """The parts of the same object, each knowing of the others."""
        here = around | _own(schema)
        groups = list(_groups(schema))
        said = {name: [self._said(part) for part in parts] for name, parts in groups}
        for name, parts in groups:
            others = self._sum(
                [here, *(each for kind in said if kind != name for each in said[kind])]
            )
            if name == "$ref":
                made[name] = self._reference(schema[name], others)
            elif name == "allOf":
                beside = self._beside(said[name])
                made[name] = [
                    self._close(part, self._sum([others, rest]))
                    for part, rest in zip(parts, beside, strict=True)
                ]
            elif name in _SOME:
                made[name] = [self._close(part, others) for part in parts]
            else:  # then, else
                made[name] = self._close(parts[0], others)

    def _beside(self, said: list[_Around]) -> Iterator[_Around]:
        """For each what the others say."""
        after = [_ALONE]
        for each in reversed(said):
            after.append(self._sum([each, after[-1]]))
        before = _ALONE
        for each, rest in zip(said, after[-2::-1], strict=True):
            yield self._sum([before, rest])
            before = self._sum([before, each])

    def _sum(self, parts: Iterable[_Around]) -> _Around:
        keys: set[str] = set()
        patterns: set[str] = set()
        open = False
        for each in parts:
            self._spend(len(each.keys))
            keys |= each.keys
            patterns |= each.patterns
            open = open or each.open
        return _Around(frozenset(keys), frozenset(patterns), open)

    def _keys(self, schema: Schema, made: Schema, others: _Around) -> None:
        """Close the object itself, if it is one that names its keys."""
        more = schema.get("unevaluatedProperties")
        if isinstance(more, dict) and any(_groups(schema)):
            return
        if isinstance(more, dict):  # without other parts the two keywords mean the same
            made.setdefault("additionalProperties", self._close(more, _ALONE))
        made.pop("unevaluatedProperties", None)  # false is what closing means
        if "additionalProperties" in made or more is True or others.open:
            return
        if more is None and "properties" not in schema and "patternProperties" not in schema:
            return
        named = others.keys | _required(schema)
        for name, welcome in (("properties", named), ("patternProperties", others.patterns)):
            own = made.get(name) or {}  # first: keys are written in this order
            if missing := sorted(welcome - own.keys()):
                made[name] = {**own, **dict.fromkeys(missing, True)}
                self._spend(len(missing))
        made["additionalProperties"] = False

    def _reference(self, pointer: str, around: _Around) -> str:
        """Where the target is one part of an object among others, a definition of its own."""
        target = self._target(pointer)
        if around == _ALONE or target is None:
            return pointer
        key = (pointer, around)
        if key not in self._made:
            name = f"{_MADE}{len(self._made)}"
            self._made[key] = name  # first, for a definition that refers to itself
            self._definitions[name] = self._close(target, around)
        return f"#/$defs/{self._made[key]}"

    # ------------------------------------------------------------------ what a schema says

    def _said_by_parts(self, schema: Schema) -> _Around:
        return self._sum(self._said(part) for _, parts in _groups(schema) for part in parts)

    def _said(self, schema: Any) -> _Around:
        """The keys that `schema` and all its parts name."""
        self._spend(1)
        if not isinstance(schema, dict):
            return _ALONE
        if not _is_reference(schema):
            return _own(schema) | self._said_by_parts(schema)
        pointer = schema["$ref"]
        if pointer not in self._known:
            self._known[pointer] = _ALONE  # first, for one that leads to itself
            self._known[pointer] = self._said(self._target(pointer))
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return self._known[pointer] | (self._said(rest) if rest else _ALONE)

    def _target(self, pointer: str) -> Any:
        """What a reference within the document leads to; None if nothing."""
        if not pointer.startswith("#"):
            return None
        found: Any = self._root
        for name in pointer[1:].split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def _groups(schema: Schema) -> Iterator[tuple[str, list[Any]]]:
    """The parts of the same object by the keyword that holds them."""
    for name in ("allOf", *_SOME):
        if isinstance(schema.get(name), list):
            yield name, schema[name]
    for name in ("then", "else"):
        if isinstance(schema.get(name), dict):
            yield name, [schema[name]]
    if _is_reference(schema):
        yield "$ref", [{"$ref": schema["$ref"]}]


def _is_reference(schema: Schema) -> bool:
    return isinstance(schema.get("$ref"), str)


def _own(schema: Schema) -> _Around:
    """What the schema says itself, without its parts."""
    keys = _required(schema) | _names(schema, "properties")
    more = schema.get("additionalProperties", False), schema.get("unevaluatedProperties", False)
    return _Around(keys, _names(schema, "patternProperties"), any(x is not False for x in more))


def _required(schema: Schema) -> frozenset[str]:
    found = schema.get("required")
    names = found if isinstance(found, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def _names(schema: Schema, keyword: str) -> frozenset[str]:
    found = schema.get(keyword)
    return frozenset(found) if isinstance(found, dict) else frozenset()
