"""Reduce JSON Schemas to what llguidance can enforce.

Annotations, unknown keywords and unknown formats restrict nothing and are removed. A keyword that restricts
values but cannot be enforced is removed too, and reported with its path, so that the caller can warn or
refuse. Removing a keyword never rejects a value that the original schema accepts.

Some schemas are completed in the way their authors mean them. A schema with `properties` and without `type`
is an object, as in llama-server. `nullable` is read as in OpenAPI.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, TypeGuard

from llguidance import LLMatcher

from localspec.engine.sampling.grammars.json_schema import (
    FORMATS,
    Document,
    are_disjoint,
    close_objects,
    format_pattern,
    translate_pattern,
)

Schema = dict[str, Any]

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAPS = ("properties", "patternProperties", "$defs")
_SCHEMAS = ("allOf", "anyOf", "prefixItems", "items", "additionalItems", "additionalProperties")
_COMBINATIONS = ("allOf", "anyOf", "oneOf", "$ref")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_STRING_KEYWORDS = ("pattern", "minLength", "maxLength", "format")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_INTEGER_BOUND = 2.0**63 - 1024  # llguidance reads bounds of integers as 64-bit integers.
_MAX_NUMBER_BOUND = 1e18  # Its bounds of other numbers have one digit less.
# Bound of numbers with `multipleOf`. Without a bound, a number could have any length and never be a multiple.
_MULTIPLE_BOUND = 1e15
# Bound of integers without one. Ids have up to 19 digits, and llguidance fails with 64 bits on both sides.
_ID_BOUND = 9e18
# `multipleOf` for numbers that have none, where only that bounds their decimals.
_MIN_STEP = 1e-10
_MAX_BOUND_DECIMALS = 20  # A finer bound makes expressions that llguidance rejects.
_MAX_COEFFICIENT = 2**32 - 1  # Largest `multipleOf` without decimals that llguidance reads.
# Keywords beside a `oneOf` that may allow keys which its parts do not name.
_KEY_ALLOWING = frozenset(
    "properties patternProperties additionalProperties unevaluatedProperties required allOf anyOf"
    " $ref".split()
)
# The keyword that holds the parts of a conditional until objects are closed, because the parts name keys.
_CONDITIONAL = "then"
_MAX_SHOWN_KEYWORDS = 5
_MAX_SHOWN_PATH_CHARS = 120


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced, with the JSON pointer of its schema."""

    keyword: str
    path: str

    def __str__(self) -> str:
        return f"'{self.keyword}' at {_shortened(self.path)}"


@dataclass(frozen=True, slots=True)
class Enforced:
    """A reduced schema with closed objects, and the keywords of the original that it drops."""

    schema: Any
    dropped: tuple[Dropped, ...] = ()


def describe(dropped: tuple[Dropped, ...]) -> str:
    """Return a readable list of keywords and their paths, shortened if there are many."""
    shown = ", ".join(map(str, dropped[:_MAX_SHOWN_KEYWORDS]))
    n_hidden = len(dropped) - _MAX_SHOWN_KEYWORDS
    return f"{shown} and {n_hidden} more" if n_hidden > 0 else shown


def enforce(schema: Any) -> Enforced:
    """Reduce a schema and close its objects, without changing the original.

    Raises:
        RecursionError: the schema is nested too deeply.
        ValueError: a keyword has an invalid value, or an object has too many parts.
    """
    if not isinstance(schema, dict):
        return Enforced(schema)
    reducer = _Reducer(schema)
    reduced = reducer.reduce()
    if isinstance(reduced, dict):
        reduced = _without_conditionals(close_objects(reduced))
    return Enforced(reduced, tuple(dict.fromkeys(reducer.dropped)))


def for_library(schema: Any) -> Any:
    """Return an enforced schema in the form that llguidance reads, with formats as patterns."""
    if not isinstance(schema, dict):
        # The options of llguidance can only be added to an object.
        return {} if schema else {"enum": []}
    return _rewrite(schema, _format_as_pattern)


def with_bounded_numbers(schema: Any) -> Any:
    """Return an enforced schema in which the bounds of each number limit its length.

    This is for calls that are not JSON, where no quotes distinguish strings from numbers, so that
    `BoundedNumbers` cannot find the numbers. They have no exponent there.
    """

    def bound(node: Schema) -> Schema:
        types = node.get("type")
        names = types if isinstance(types, list) else [types]
        if not {"integer", "number"} & set(names) or "enum" in node or "const" in node:
            return dict(node)
        reduced = {"multipleOf": _MIN_STEP, **node} if "number" in names else dict(node)
        bound = _MULTIPLE_BOUND if "multipleOf" in reduced else _ID_BOUND
        if "exclusiveMinimum" not in reduced:
            reduced.setdefault("minimum", -bound)
        if "exclusiveMaximum" not in reduced:
            reduced.setdefault("maximum", bound)
        return reduced

    return _rewrite(schema, bound)


def _without_conditionals(schema: Any) -> Any:
    """Return the schema without keywords that only served to close objects."""

    def strip(node: Schema) -> Schema:
        return {k: v for k, v in node.items() if k not in (_CONDITIONAL, "unevaluatedProperties")}

    return _rewrite(schema, strip)


def _rewrite(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Return a reduced schema with `rewrite` applied to it and to every schema in it."""
    if not isinstance(schema, dict):
        return schema
    reduced = rewrite(schema)
    for keyword, value in reduced.items():
        if keyword in _MAPS:
            reduced[keyword] = {key: _rewrite(part, rewrite) for key, part in value.items()}
        elif keyword in _SCHEMAS and isinstance(value, list):
            reduced[keyword] = [_rewrite(part, rewrite) for part in value]
        elif keyword in _SCHEMAS:
            reduced[keyword] = _rewrite(value, rewrite)
    return reduced


def _format_as_pattern(schema: Schema) -> Schema:
    """Return a schema whose `format` is replaced by an equivalent `pattern`, where that is needed."""
    reduced = dict(schema)
    name = reduced.get("format")
    if not isinstance(name, str):
        return reduced
    pattern = format_pattern(name, beside_a_pattern="pattern" in reduced)
    if pattern is None:
        return reduced
    del reduced["format"]
    if "pattern" in reduced:
        reduced["allOf"] = [*reduced.get("allOf", []), {"type": "string", "pattern": pattern}]
        if reduced.get("type") != "string":
            reduced["allOf"][-1].pop("type")
    else:
        reduced["pattern"] = pattern
    return reduced


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a schema in the document.

    path: its JSON pointer. typed: whether an enclosing schema gives the type of the same value. part:
    whether it is one of several schemas of the same value.
    """

    path: str
    typed: bool = False
    part: bool = False

    def at(self, *names: str | int) -> _Place:
        """Return the place of a schema of another value, below this one."""
        escaped = (str(name).replace("~", "~0").replace("/", "~1") for name in names)
        return _Place("/".join([self.path, *escaped]))

    def beside(self, typed: bool, *names: str | int) -> _Place:
        """Return the place of a schema of the same value, below this one."""
        return _Place(self.at(*names).path, typed=self.typed or typed, part=True)


class _Reducer:
    """A walk through one document that reduces its schemas and collects the dropped keywords."""

    def __init__(self, root: Schema) -> None:
        self.dropped: list[Dropped] = []
        self._document = Document(root)
        # Names of the targets of references, by the identity of the target.
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, _Place]] = []

    def reduce(self) -> Any:
        """Return the reduced document, with the targets of its references in `$defs`."""
        reduced = self._schema(self._document.root, _Place("#"))
        definitions: dict[str, Any] = {}
        while self._pending:
            name, target, place = self._pending.pop(0)
            definitions[name] = self._schema(target, place)
        if definitions and isinstance(reduced, dict):
            reduced["$defs"] = definitions
        return reduced

    def _drop(self, keyword: str, place: _Place) -> None:
        self.dropped.append(Dropped(keyword, place.path))

    def _schema(self, schema: Any, place: _Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{_shortened(place.path)} is not a schema.")
        if schema.get("not") == {} or schema.get("not") is True:
            return False
        reduced: Schema = {}
        typed = any(name in schema for name in ("type", "enum", "const", "$ref"))
        for keyword, value in schema.items():
            # Some clients write null for a keyword that is not set.
            if value is not None or keyword == "const":
                self._keyword(keyword, value, schema, reduced, place, typed)
        self._conditional(schema, reduced, place)
        self._property_names(schema, reduced, place)
        self._property_counts(reduced, place)
        self._numbers(reduced)
        if not typed and not place.typed:
            self._imply_type(reduced, place)
        if schema.get("nullable") is True and reduced:
            return {"anyOf": [reduced, {"type": "null"}]}
        return reduced

    def _keyword(
        self, keyword: str, value: Any, schema: Schema, reduced: Schema, place: _Place, typed: bool
    ) -> None:
        """Copy one keyword to `reduced`, or drop it."""
        match keyword:
            case "type":
                self._type(value, reduced, place)
            case "const":
                reduced["const"] = value
            case "enum" if isinstance(value, list):
                reduced["enum"] = value
            case "allOf" | "anyOf" | "oneOf" if isinstance(value, list):
                parts = [
                    self._schema(part, place.beside("type" in schema, keyword, index))
                    for index, part in enumerate(value)
                ]
                self._combine(keyword, parts, schema, reduced, place)
            case "$ref" | "$recursiveRef":
                self._reference(keyword, value, reduced, place)
            case "properties" | "patternProperties" if isinstance(value, dict) or value == []:
                self._maps(keyword, value or {}, reduced, place)
            case "required" if _is_list_of_strings(value):
                reduced["required"] = list(dict.fromkeys(value))
            case "pattern" if isinstance(value, str):
                self._pattern(value, reduced, place)
            case "format":
                if isinstance(value, str) and value in FORMATS:
                    reduced["format"] = value
            case _ if keyword in _COUNTS:
                self._count(keyword, value, reduced, place)
            case _ if keyword in _BOUNDS:
                self._bound(keyword, value, reduced, place)
            case "multipleOf":
                self._multiple(value, reduced, place)
            case _ if self._children(keyword, value, schema, reduced, place):
                pass
            case _ if keyword in _CHECKED:
                # Draft 3 has a boolean `required` in each property, which is ignored.
                if keyword != "required" or not isinstance(value, bool):
                    raise _invalid(keyword, place)
            case _ if _restricts(keyword, value, schema):
                self._drop(keyword, place)

    def _children(
        self, keyword: str, value: Any, schema: Schema, reduced: Schema, place: _Place
    ) -> bool:
        """Copy a keyword about the children of an object or array. Returns whether it was one."""
        match keyword:
            case "additionalProperties" if isinstance(value, bool | dict):
                if "additionalProperties" not in reduced:
                    reduced[keyword] = self._schema(value, place.at(keyword))
            case "unevaluatedProperties" if isinstance(value, bool | dict):
                self._unevaluated_properties(value, schema, reduced, place)
            case "items" | "prefixItems" if isinstance(value, list):
                reduced[keyword] = self._list(keyword, value, place)
            case "items" if isinstance(value, bool | dict):
                reduced[keyword] = self._schema(value, place.at(keyword))
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    reduced[keyword] = self._schema(value, place.at(keyword))
            case "unevaluatedItems":
                self._unevaluated_items(value, schema, reduced, place)
            case _:
                return False
        return True

    # ------------------------------------------------------------------------ types and combinations

    def _type(self, value: Any, reduced: Schema, place: _Place) -> None:
        """Copy the types in lower case, because Gemini's schemas have them in capitals."""
        names = value if isinstance(value, list) else [value]
        known = [name.lower() for name in names if isinstance(name, str) and name.lower() in TYPES]
        if value == "TYPE_UNSPECIFIED":
            return
        if not known or len(known) < len(names):
            raise _invalid("type", place)
        reduced["type"] = known if isinstance(value, list) else known[0]

    def _combine(
        self, keyword: str, parts: list[Any], schema: Schema, reduced: Schema, place: _Place
    ) -> None:
        """Copy allOf and anyOf. A oneOf becomes anyOf, which is the same if its parts are disjoint."""
        if keyword == "oneOf":
            discriminated = isinstance(schema.get("discriminator"), dict)
            alone = not place.part and not schema.keys() & _KEY_ALLOWING
            if not discriminated and not are_disjoint(schema["oneOf"], self._document, alone):
                self._drop("oneOf", place)
            keyword = "anyOf"
            if "anyOf" in schema:
                keyword, parts = "allOf", [{"anyOf": parts}]
        reduced[keyword] = [*reduced.get(keyword, []), *parts]

    def _reference(self, keyword: str, value: Any, reduced: Schema, place: _Place) -> None:
        target = self._document.target(value) if isinstance(value, str) else None
        if target is None or (keyword == "$recursiveRef" and value != "#"):
            self._drop(keyword, place)
            reduced["unevaluatedProperties"] = True  # The keys of an unknown schema are not known.
            return
        if target is self._document.root:
            reduced["$ref"] = "#"
            return
        if id(target) not in self._names:
            name = self._names[id(target)] = f"d{len(self._names)}"
            pointer = value if value.startswith("#/") else f"#{value.rpartition('#')[2]}"
            self._pending.append((name, target, _Place(pointer)))
        reduced["$ref"] = f"#/$defs/{self._names[id(target)]}"

    def _conditional(self, schema: Schema, reduced: Schema, place: _Place) -> None:
        """Keep the parts of a conditional for the keys that they name, until objects are closed."""
        parts = [schema[name] for name in ("then", "else") if name in schema]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(schema.get(name), dict):
                parts += [part for part in schema[name].values() if not isinstance(part, list)]
        if parts:
            count = len(self.dropped)
            branches = [self._schema(part, _Place(place.path, True, True)) for part in parts]
            reduced[_CONDITIONAL] = {"allOf": branches}
            del self.dropped[count:]  # The conditional itself is reported instead.

    # ------------------------------------------------------------------------ objects

    def _maps(self, keyword: str, value: Schema, reduced: Schema, place: _Place) -> None:
        if keyword == "properties":
            reduced[keyword] = {k: self._schema(v, place.at(keyword, k)) for k, v in value.items()}
            return
        translated = {key: translate_pattern(key) for key in value}
        usable = all(
            pattern.exact and len(pattern.expressions) == 1 for pattern in translated.values()
        )
        if not usable or not _compiles({"type": "object", keyword: dict.fromkeys(value, True)}):
            self._drop(keyword, place)
            self._allow_any_key(reduced)
            return
        reduced[keyword] = {
            translated[key].expressions[0]: self._schema(part, place.at(keyword, key))
            for key, part in value.items()
        }

    @staticmethod
    def _allow_any_key(reduced: Schema) -> None:
        """Allow every key in an object some of whose keys are not known."""
        reduced["additionalProperties"] = True

    def _unevaluated_properties(
        self, value: Any, schema: Schema, reduced: Schema, place: _Place
    ) -> None:
        if isinstance(value, dict) and any(name in schema for name in _COMBINATIONS):
            self._drop("unevaluatedProperties", place)
            value = True
        reduced["unevaluatedProperties"] = self._schema(value, place.at("unevaluatedProperties"))

    def _property_names(self, schema: Schema, reduced: Schema, place: _Place) -> None:
        """Replace `propertyNames` by properties or a pattern of keys, where that is equivalent."""
        names = schema.get("propertyNames")
        while isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = self._document.target(names["$ref"])
        if not isinstance(names, dict) or not _restricts_names(names):
            return
        constraints = {key: value for key, value in names.items() if key in _NAME_KEYWORDS}
        value_schema = reduced.get("additionalProperties", True)
        if not reduced.get("properties") and not reduced.get("patternProperties"):
            const = [constraints["const"]] if "const" in constraints else None
            values = constraints.get("enum", const)
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                reduced["properties"] = dict.fromkeys(values, value_schema)
                reduced["additionalProperties"] = False
                return
            pattern = _pattern_of_names(constraints)
            if pattern is not None:
                reduced["patternProperties"] = {pattern: value_schema}
                reduced["additionalProperties"] = False
                return
        self._drop("propertyNames", place)

    def _property_counts(self, reduced: Schema, place: _Place) -> None:
        """Drop minProperties and maxProperties where llguidance cannot enforce them."""
        named, required = reduced.get("properties", {}), reduced.get("required", [])
        combined = any(name in reduced for name in (*_COMBINATIONS, _CONDITIONAL))
        simple = not place.part and not combined
        simple = simple and set(named) <= set(required) and "patternProperties" not in reduced
        for keyword in ("minProperties", "maxProperties"):
            if keyword not in reduced or simple:
                continue
            needed = reduced[keyword] > len(required) if keyword == "minProperties" else True
            del reduced[keyword]
            if needed:
                self._drop(keyword, place)

    # ------------------------------------------------------------------------ arrays

    def _list(self, keyword: str, value: list[Any], place: _Place) -> list[Any]:
        return [self._schema(part, place.at(keyword, index)) for index, part in enumerate(value)]

    def _unevaluated_items(
        self, value: Any, schema: Schema, reduced: Schema, place: _Place
    ) -> None:
        if value is True:
            return
        if any(name in schema for name in (*_COMBINATIONS, "items", "if", "contains")):
            self._drop("unevaluatedItems", place)
        else:
            reduced["items"] = self._schema(value, place.at("unevaluatedItems"))

    # ------------------------------------------------------------------------ texts and numbers

    def _pattern(self, value: str, reduced: Schema, place: _Place) -> None:
        pattern = translate_pattern(value)
        if not pattern.exact:
            self._drop("pattern", place)
        for expression in pattern.expressions:
            if "pattern" in reduced:
                reduced["allOf"] = [*reduced.get("allOf", []), {"pattern": expression}]
            else:
                reduced["pattern"] = expression

    @staticmethod
    def _count(keyword: str, value: Any, reduced: Schema, place: _Place) -> None:
        if _is_number(value) and value >= 0 and value == int(value):
            reduced[keyword] = int(value)
        else:
            raise _invalid(keyword, place)

    def _bound(self, keyword: str, value: Any, reduced: Schema, place: _Place) -> None:
        exclusive = keyword.startswith("exclusive")
        if exclusive and isinstance(value, bool):  # In draft 4 it is a flag beside `minimum`.
            reduced[keyword] = value
        elif not _is_number(value):
            raise _invalid(keyword, place)
        elif abs(value) <= _MAX_INTEGER_BOUND:
            reduced[keyword] = _round_bound(value, up=keyword.lower().endswith("maximum"))
        elif (value > 0) == keyword.lower().endswith("maximum"):
            # No longer number is generated.
            reduced[keyword] = _MAX_INTEGER_BOUND if value > 0 else -_MAX_INTEGER_BOUND
        else:
            self._drop(keyword, place)

    def _multiple(self, value: Any, reduced: Schema, place: _Place) -> None:
        if not _is_number(value) or value <= 0:
            raise _invalid("multipleOf", place)
        coefficient = float(value)
        while coefficient % 1 and coefficient <= _MAX_COEFFICIENT:  # llguidance scales it likewise.
            coefficient *= 10
        if coefficient <= _MAX_COEFFICIENT:
            reduced["multipleOf"] = value
        else:
            self._drop("multipleOf", place)

    @staticmethod
    def _numbers(reduced: Schema) -> None:
        """Bound numbers that have a `multipleOf`, and limit bounds to what llguidance reads."""
        if "multipleOf" in reduced:
            if "minimum" not in reduced and "exclusiveMinimum" not in reduced:
                reduced["minimum"] = -_MULTIPLE_BOUND
            if "maximum" not in reduced and "exclusiveMaximum" not in reduced:
                reduced["maximum"] = _MULTIPLE_BOUND
        for keyword in _BOUNDS if reduced.get("type") != "integer" else ():
            if _is_number(reduced.get(keyword)):
                reduced[keyword] = max(-_MAX_NUMBER_BOUND, min(reduced[keyword], _MAX_NUMBER_BOUND))

    def _imply_type(self, reduced: Schema, place: _Place) -> None:
        """Add the type to which the keywords of a schema apply, as llama-server does."""
        keys = ("properties", "patternProperties", "required")
        branches = [part for name in ("anyOf", "allOf") for part in reduced.get(name, [])]
        if any(_excludes_objects(part) for part in branches):
            return
        if (
            any(name in reduced for name in keys)
            or reduced.get("additionalProperties", True) is not True
        ):
            reduced["type"] = "object"
        elif "items" in reduced or "prefixItems" in reduced:
            reduced["type"] = "array"
        elif not (branches or place.part) and not reduced.keys().isdisjoint(_STRING_KEYWORDS):
            reduced["type"] = "string"


# ---------------------------------------------------------------------------- what a keyword restricts

_NAME_KEYWORDS = ("enum", "const", "pattern", "minLength", "maxLength")
_RESTRICTING = frozenset(
    "$dynamicRef contains dependencies dependentRequired dependentSchemas if not uniqueItems".split()
)
# Keywords that are copied if their value is of the right type. Any other value is an error.
_CHECKED = frozenset(
    "additionalProperties allOf anyOf enum items oneOf pattern patternProperties prefixItems properties"
    " required unevaluatedProperties".split()
)


def _invalid(keyword: str, place: _Place) -> ValueError:
    return ValueError(f"'{keyword}' at {_shortened(place.path)} has a value that is not valid.")


def _shortened(path: str) -> str:
    if len(path) <= _MAX_SHOWN_PATH_CHARS:
        return path
    return f"{path[: _MAX_SHOWN_PATH_CHARS // 2]}…{path[-_MAX_SHOWN_PATH_CHARS // 2 :]}"


def _restricts(keyword: str, value: Any, schema: Schema) -> bool:
    """Return whether a keyword that is not copied restricts any value."""
    match keyword:
        case "uniqueItems":
            max_items = schema.get("maxItems")
            return value is not False and not (_is_number(max_items) and max_items <= 1)
        case "not":
            return value is not False
        case "if":
            return "then" in schema or "else" in schema
        case "contains":
            return value is not None and (schema.get("minContains") != 0 or "maxContains" in schema)
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value)
    return keyword in _RESTRICTING


def _restricts_names(names: Schema) -> bool:
    """Return whether a schema of keys demands more than that they are strings."""
    any_string = names.get("type", "string") in ("string", ["string"]) and not names.keys() & (
        _RESTRICTING | _CHECKED | {"const", "minLength", "maxLength", "$ref"}
    )
    return not any_string


def _pattern_of_names(constraints: Schema) -> str | None:
    """Return an expression that matches exactly the allowed keys, or None if there is none."""
    if constraints.keys() == {"pattern"} and isinstance(constraints["pattern"], str):
        pattern = translate_pattern(constraints["pattern"])
        expressions = pattern.expressions
        return expressions[0] if pattern.exact and len(expressions) == 1 else None
    if constraints and constraints.keys() <= {"minLength", "maxLength"}:
        min_length, max_length = constraints.get("minLength", 0), constraints.get("maxLength", "")
        return rf"^[\s\S]{{{min_length},{max_length}}}$"
    return None


def _excludes_objects(part: Any) -> bool:
    types = part.get("type", "object") if isinstance(part, dict) else "object"
    return "object" not in ([types] if isinstance(types, str) else types)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _round_bound(value: float, *, up: bool) -> float:
    """Round a bound outwards to the decimals that llguidance reads."""
    exact = Decimal(repr(value))
    exponent = exact.as_tuple().exponent
    if not isinstance(exponent, int) or exponent >= -_MAX_BOUND_DECIMALS:
        return value
    digit = Decimal(1).scaleb(-_MAX_BOUND_DECIMALS)
    return float(exact.quantize(digit, ROUND_CEILING if up else ROUND_FLOOR))


def _compiles(schema: Schema) -> bool:
    """Return whether llguidance accepts a schema."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={})
    return not LLMatcher.validate_grammar(source)
