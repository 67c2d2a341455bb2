"""Reduce JSON Schemas to what llguidance can enforce.

Annotations, unknown keywords and unknown formats restrict nothing and are removed. A keyword that restricts
values but cannot be enforced is removed too, and reported with its path, so that the caller can warn or
refuse. Removing a keyword never rejects a value that the original schema accepts.

Some schemas are completed in the way their authors mean them. A schema with `properties` and without `type`
is an object, as in llama-server. `nullable` is read as in OpenAPI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from localspec.engine.sampling.grammars.json_schema import (
    CONDITIONAL,
    Document,
    Schema,
    are_disjoint,
    close_objects,
    compiles,
    rewrite_parts,
    translate_pattern,
)

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
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
# The types of these keywords' values. Any other value is an error.
_VALUE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum", "prefixItems"), list),
    "required": list | bool,  # Draft 3 has a boolean in each property, which is ignored.
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), bool | dict),
    **{"properties": dict, "patternProperties": dict, "items": list | bool | dict, "pattern": str},
}
_RESTRICTING = frozenset(
    "$dynamicRef contains dependencies dependentRequired dependentSchemas if not uniqueItems".split()
)
_MAX_SHOWN_KEYWORDS = 5
_MAX_SHOWN_PATH_CHARS = 120

# llguidance's own expressions allow a fraction of a second, the numbers of a duration or an address to be of
# any length, and small models never end them. Formats that are not listed here are not enforced: the standard
# treats a format as an annotation.

_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-9])))"
)
_FRACTION = r"(\.[0-9]{1,9})?"
_ZONE = "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60){_FRACTION}{_ZONE})"
_ANY_TIME = f"(([01][0-9]|2[0-3]):[0-5][0-9](:([0-5][0-9]|60){_FRACTION})?{_ZONE}?)"
_N = "[0-9]{1,9}"
_SECONDS = rf"{_N}(\.{_N})?S"
_CLOCK = f"(T({_N}H({_N}M({_SECONDS})?)?|{_N}M({_SECONDS})?|{_SECONDS}))"
_DATE_DURATION = f"({_N}W|({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# The expressions of formats. Those without one are llguidance's: bounded, or as open as any string.
_FORMATS = {
    **dict.fromkeys(("date", "uuid", "ipv4", "ipv6", "uri", "hostname")),
    "time": f"^{_TIME}$",
    "date-time": f"^({_DATE}[tT]{_TIME})$",
    "duration": f"^(P{_DATE_DURATION}{_CLOCK}?|{_CLOCK}))$",
    "email": rf"^({_ATOM}(\.{_ATOM}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,4}})$",
}
# Times without zone or seconds, which a `pattern` beside the format may require.
_BESIDE_A_PATTERN = {"time": f"^{_ANY_TIME}$", "date-time": f"^({_DATE}[tT ]{_ANY_TIME})$"}


class Dropped(NamedTuple):
    """A keyword that is not enforced, with the JSON pointer of its schema."""

    keyword: str
    path: str

    def __str__(self) -> str:
        return f"'{self.keyword}' at {_shorten(self.path)}"


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
        reduced = close_objects(reduced)
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
    return _rewrite(schema, _bound_number)


def _rewrite(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Return a reduced schema with `rewrite` applied to it and to every schema in it."""
    if not isinstance(schema, dict):
        return schema
    return rewrite_parts(rewrite(schema), partial(_rewrite, rewrite=rewrite), ("allOf", "anyOf"))


def _bound_number(schema: Schema) -> Schema:
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if not {"integer", "number"} & set(names) or "enum" in schema or "const" in schema:
        return schema
    reduced = {"multipleOf": _MIN_STEP, **schema} if "number" in names else dict(schema)
    bound = _MULTIPLE_BOUND if "multipleOf" in reduced else _ID_BOUND
    if "exclusiveMinimum" not in reduced:
        reduced.setdefault("minimum", -bound)
    if "exclusiveMaximum" not in reduced:
        reduced.setdefault("maximum", bound)
    return reduced


def _format_as_pattern(schema: Schema) -> Schema:
    """Replace a `format` by an equivalent `pattern`, where that is needed."""
    name = schema.get("format", "")
    pattern = _FORMATS.get(name)
    if pattern is None:
        return schema
    reduced = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in reduced:
        return {**reduced, "pattern": pattern}
    part = {"type": "string"} if reduced.get("type") == "string" else {}
    part["pattern"] = _BESIDE_A_PATTERN.get(name, pattern)
    return {**reduced, "allOf": [*reduced.get("allOf", []), part]}


@dataclass(slots=True)
class _Node:
    """A schema that is being reduced, with its JSON pointer.

    typed: whether an enclosing schema gives the type of the same value. part: whether it is one of several
    schemas of the same value.
    """

    schema: Schema
    path: str
    typed: bool = False
    part: bool = False
    reduced: Schema = field(default_factory=dict)

    def below(self, *names: str | int) -> str:
        """Return the JSON pointer of a schema below this one."""
        escaped = (str(name).replace("~", "~0").replace("/", "~1") for name in names)
        return "/".join([self.path, *escaped])


class _Reducer:
    """A walk through one document that reduces its schemas and collects the dropped keywords."""

    def __init__(self, root: Schema) -> None:
        self.dropped: list[Dropped] = []
        self._document = Document(root)
        # Names of the targets of references, by the identity of the target.
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, str]] = []

    def reduce(self) -> Any:
        """Return the reduced document, with the targets of its references in `$defs`."""
        reduced = self._schema(self._document.root, "#")
        definitions: Schema = {}
        while self._pending:
            name, target, path = self._pending.pop(0)
            definitions[name] = self._schema(target, path)
        if definitions and isinstance(reduced, dict):
            reduced["$defs"] = definitions
        return reduced

    def _drop(self, keyword: str, node: _Node) -> None:
        self.dropped.append(Dropped(keyword, node.path))

    def _schema(self, schema: Any, path: str, typed: bool = False, part: bool = False) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{_shorten(path)} is not a schema.")
        if schema.get("not") == {} or schema.get("not") is True:
            return False
        node = _Node(schema, path, typed, part)
        for keyword, value in schema.items():
            # Some clients write null for a keyword that is not set.
            if value is not None or keyword == "const":
                self._keyword(keyword, value, node)
        self._conditional(node)
        self._property_names(node)
        self._property_counts(node)
        _limit_numbers(node.reduced)
        if not typed and not any(name in schema for name in ("type", "enum", "const", "$ref")):
            _imply_type(node)
        if schema.get("nullable") is True and node.reduced:
            return {"anyOf": [node.reduced, {"type": "null"}]}
        return node.reduced

    def _child(self, schema: Any, node: _Node, *names: str | int) -> Any:
        """Reduce a schema of another value, below `node`."""
        return self._schema(schema, node.below(*names))

    def _keyword(self, keyword: str, value: Any, node: _Node) -> None:
        """Copy one keyword to the reduced schema, or drop it."""
        reduced = node.reduced
        if not _is_of_type(keyword, value):
            raise _invalid(keyword, node)
        match keyword:
            case "type":
                self._type(value, node)
            case "const" | "enum":
                reduced[keyword] = value
            case "allOf" | "anyOf" | "oneOf":
                self._combine(keyword, value, node)
            case "$ref" | "$recursiveRef":
                self._reference(keyword, value, node)
            case "properties":
                entries = dict(value).items()
                reduced[keyword] = {k: self._child(v, node, keyword, k) for k, v in entries}
            case "patternProperties":
                self._patterned_properties(dict(value), node)
            case "required":
                if isinstance(value, list):
                    reduced[keyword] = list(dict.fromkeys(value))
            case "pattern":
                self._pattern(value, node)
            case "format":
                if isinstance(value, str) and value in _FORMATS:
                    reduced[keyword] = value
            case "multipleOf":
                self._multiple(value, node)
            case "additionalProperties" if keyword in reduced:
                pass  # It was set for `patternProperties` that are not enforced.
            case "items" | "prefixItems" if isinstance(value, list):
                parts = enumerate(value)
                reduced[keyword] = [self._child(part, node, keyword, i) for i, part in parts]
            case "items" | "additionalProperties":
                reduced[keyword] = self._child(value, node, keyword)
            case "additionalItems":
                if isinstance(node.schema.get("items"), list):
                    reduced[keyword] = self._child(value, node, keyword)
            case "unevaluatedProperties" | "unevaluatedItems":
                self._unevaluated(keyword, value, node)
            case _ if keyword in _COUNTS:
                if not (_is_number(value) and value >= 0 and value == int(value)):
                    raise _invalid(keyword, node)
                reduced[keyword] = int(value)
            case _ if keyword in _BOUNDS:
                self._bound(keyword, value, node)
            case _ if _restricts(keyword, value, node.schema):
                self._drop(keyword, node)

    def _type(self, value: Any, node: _Node) -> None:
        """Copy the types in lower case, because Gemini's schemas have them in capitals."""
        names = value if isinstance(value, list) else [value]
        known = [name.lower() for name in names if isinstance(name, str) and name.lower() in TYPES]
        if value == "TYPE_UNSPECIFIED":
            return
        if not known or len(known) < len(names):
            raise _invalid("type", node)
        node.reduced["type"] = known if isinstance(value, list) else known[0]

    def _combine(self, keyword: str, value: list[Any], node: _Node) -> None:
        """Copy allOf and anyOf. A oneOf becomes anyOf, which is the same if its parts are disjoint."""
        schema, reduced = node.schema, node.reduced
        typed = node.typed or "type" in schema
        parts = [
            self._schema(part, node.below(keyword, index), typed, part=True)
            for index, part in enumerate(value)
        ]
        if keyword == "oneOf":
            discriminated = isinstance(schema.get("discriminator"), dict)
            alone = not node.part and not schema.keys() & _KEY_ALLOWING
            if not discriminated and not are_disjoint(value, self._document, alone):
                self._drop("oneOf", node)
            keyword = "anyOf"
            if "anyOf" in schema:
                keyword, parts = "allOf", [{"anyOf": parts}]
        reduced[keyword] = [*reduced.get(keyword, []), *parts]

    def _reference(self, keyword: str, value: Any, node: _Node) -> None:
        target = self._document.target(value) if isinstance(value, str) else None
        if target is None or (keyword == "$recursiveRef" and value != "#"):
            self._drop(keyword, node)
            node.reduced["unevaluatedProperties"] = (
                True  # The keys of an unknown schema are not known.
            )
        elif target is self._document.root:
            node.reduced["$ref"] = "#"
        else:
            if id(target) not in self._names:
                name = self._names[id(target)] = f"d{len(self._names)}"
                path = value if value.startswith("#/") else f"#{value.rpartition('#')[2]}"
                self._pending.append((name, target, path))
            node.reduced["$ref"] = f"#/$defs/{self._names[id(target)]}"

    def _conditional(self, node: _Node) -> None:
        """Keep the parts of a conditional for the keys that they name, until objects are closed."""
        parts = [node.schema[name] for name in ("then", "else") if name in node.schema]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(dependent := node.schema.get(name), dict):
                parts += [part for part in dependent.values() if not isinstance(part, list)]
        if parts:
            count = len(self.dropped)
            branches = [self._schema(part, node.path, typed=True, part=True) for part in parts]
            node.reduced[CONDITIONAL] = {"allOf": branches}
            del self.dropped[count:]  # The conditional itself is reported instead.

    def _patterned_properties(self, value: Schema, node: _Node) -> None:
        keyword = "patternProperties"
        patterns = {key: _exact_expression(key) for key in value}
        if None in patterns.values() or not compiles(
            {"type": "object", keyword: dict.fromkeys(value, True)}
        ):
            self._drop(keyword, node)
            node.reduced["additionalProperties"] = True  # Some of the object's keys are not known.
            return
        node.reduced[keyword] = {
            patterns[key]: self._child(part, node, keyword, key) for key, part in value.items()
        }

    def _unevaluated(self, keyword: str, value: Any, node: _Node) -> None:
        combined = any(name in node.schema for name in _COMBINATIONS)
        if keyword == "unevaluatedProperties":
            if isinstance(value, dict) and combined:
                self._drop(keyword, node)
                value = True
            node.reduced[keyword] = self._child(value, node, keyword)
        elif value is not True:
            if combined or any(name in node.schema for name in ("items", "if", "contains")):
                self._drop(keyword, node)
            else:
                node.reduced["items"] = self._child(value, node, keyword)

    def _property_names(self, node: _Node) -> None:
        """Replace `propertyNames` by properties or a pattern of keys, where that is equivalent."""
        names, reduced = node.schema.get("propertyNames"), node.reduced
        while isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = self._document.target(names["$ref"])
        if not isinstance(names, dict) or not _restricts_names(names):
            return
        value_schema = reduced.get("additionalProperties", True)
        if not reduced.get("properties") and not reduced.get("patternProperties"):
            const = [names["const"]] if "const" in names else None
            values = names.get("enum", const)
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                reduced["properties"] = dict.fromkeys(values, value_schema)
                reduced["additionalProperties"] = False
                return
            pattern = _pattern_of_names(names)
            if pattern is not None:
                reduced["patternProperties"] = {pattern: value_schema}
                reduced["additionalProperties"] = False
                return
        self._drop("propertyNames", node)

    def _property_counts(self, node: _Node) -> None:
        """Drop minProperties and maxProperties where llguidance cannot enforce them."""
        reduced = node.reduced
        required = reduced.get("required", [])
        simple = not node.part and set(reduced.get("properties", {})) <= set(required)
        others = (*_COMBINATIONS, CONDITIONAL, "patternProperties")
        if simple and not any(name in reduced for name in others):
            return
        if reduced.pop("minProperties", 0) > len(required):
            self._drop("minProperties", node)
        if reduced.pop("maxProperties", None) is not None:
            self._drop("maxProperties", node)

    def _pattern(self, value: str, node: _Node) -> None:
        pattern, reduced = translate_pattern(value), node.reduced
        if not pattern.exact:
            self._drop("pattern", node)
        for expression in pattern.expressions:
            if "pattern" in reduced:
                reduced["allOf"] = [*reduced.get("allOf", []), {"pattern": expression}]
            else:
                reduced["pattern"] = expression

    def _bound(self, keyword: str, value: Any, node: _Node) -> None:
        is_upper = keyword.lower().endswith("maximum")
        if keyword.startswith("exclusive") and isinstance(value, bool):
            node.reduced[keyword] = value  # In draft 4 it is a flag beside `minimum`.
        elif not _is_number(value):
            raise _invalid(keyword, node)
        elif abs(value) <= _MAX_INTEGER_BOUND:
            node.reduced[keyword] = _round_bound(value, up=is_upper)
        elif (value > 0) == is_upper:  # No longer number is generated.
            node.reduced[keyword] = _MAX_INTEGER_BOUND if value > 0 else -_MAX_INTEGER_BOUND
        else:
            self._drop(keyword, node)

    def _multiple(self, value: Any, node: _Node) -> None:
        if not _is_number(value) or value <= 0:
            raise _invalid("multipleOf", node)
        coefficient = float(value)
        while coefficient % 1 and coefficient <= _MAX_COEFFICIENT:  # llguidance scales it likewise.
            coefficient *= 10
        if coefficient <= _MAX_COEFFICIENT:
            node.reduced["multipleOf"] = value
        else:
            self._drop("multipleOf", node)


def _limit_numbers(reduced: Schema) -> None:
    """Bound numbers that have a `multipleOf`, and limit bounds to what llguidance reads."""
    if "multipleOf" in reduced:
        if "minimum" not in reduced and "exclusiveMinimum" not in reduced:
            reduced["minimum"] = -_MULTIPLE_BOUND
        if "maximum" not in reduced and "exclusiveMaximum" not in reduced:
            reduced["maximum"] = _MULTIPLE_BOUND
    for keyword in _BOUNDS if reduced.get("type") != "integer" else ():
        if _is_number(reduced.get(keyword)):
            reduced[keyword] = max(-_MAX_NUMBER_BOUND, min(reduced[keyword], _MAX_NUMBER_BOUND))


def _imply_type(node: _Node) -> None:
    """Add the type to which the keywords of a schema apply, as llama-server does."""
    reduced = node.reduced
    branches = [part for name in ("anyOf", "allOf") for part in reduced.get(name, [])]
    if any(map(_excludes_objects, branches)):
        return
    names_keys = any(name in reduced for name in ("properties", "patternProperties", "required"))
    if names_keys or reduced.get("additionalProperties", True) is not True:
        reduced["type"] = "object"
    elif "items" in reduced or "prefixItems" in reduced:
        reduced["type"] = "array"
    elif not (branches or node.part) and not reduced.keys().isdisjoint(_STRING_KEYWORDS):
        reduced["type"] = "string"


def _excludes_objects(part: Any) -> bool:
    types = part.get("type", "object") if isinstance(part, dict) else "object"
    return "object" not in ([types] if isinstance(types, str) else types)


def _is_of_type(keyword: str, value: Any) -> bool:
    if keyword == "required" and isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    no_properties = value == [] and keyword in (
        "properties",
        "patternProperties",
    )  # as PHP writes it
    return no_properties or isinstance(value, _VALUE_TYPES.get(keyword, object))


def _invalid(keyword: str, node: _Node) -> ValueError:
    return ValueError(f"'{keyword}' at {_shorten(node.path)} has a value that is not valid.")


def _shorten(path: str) -> str:
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
            return schema.get("minContains") != 0 or "maxContains" in schema
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value)
    return keyword in _RESTRICTING


def _restricts_names(names: Schema) -> bool:
    """Return whether a schema of keys demands more than that they are strings."""
    others = {"const", "minLength", "maxLength", "$ref", *_RESTRICTING, *_VALUE_TYPES}
    return names.get("type", "string") not in ("string", ["string"]) or bool(names.keys() & others)


def _pattern_of_names(names: Schema) -> str | None:
    """Return an expression that matches exactly the allowed keys, or None if there is none."""
    keywords = names.keys() & {"enum", "const", "pattern", "minLength", "maxLength"}
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        return _exact_expression(names["pattern"])
    if keywords and keywords <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _exact_expression(pattern: str) -> str | None:
    """Return the one expression that is equivalent to a schema's, or None if there is none."""
    translated = translate_pattern(pattern)
    is_exact = translated.exact and len(translated.expressions) == 1
    return translated.expressions[0] if is_exact else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _round_bound(value: float, *, up: bool) -> float:
    """Round a bound outwards to the decimals that llguidance reads."""
    exact = Decimal(repr(value))
    exponent = exact.as_tuple().exponent
    if not isinstance(exponent, int) or exponent >= -_MAX_BOUND_DECIMALS:
        return value
    digit = Decimal(1).scaleb(-_MAX_BOUND_DECIMALS)
    return float(exact.quantize(digit, ROUND_CEILING if up else ROUND_FLOOR))
