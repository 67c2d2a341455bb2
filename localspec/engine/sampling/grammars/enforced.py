"""JSON Schemas reduced to what the grammar library can enforce.

Annotations, unknown keywords and unknown formats ask nothing and are left out. A keyword that asks something
and cannot be enforced is left out too, and named with its path, so that the caller can say so or refuse. What
is left out only ever makes the language larger.

Some schemas are completed as people mean them: one with `properties` and without a `type` is an object, as in
llama-server; `nullable` is OpenAPI's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, TypeGuard

from llguidance import LLMatcher

from localspec.engine.sampling.grammars.disjoint import are_disjoint
from localspec.engine.sampling.grammars.formats import FORMATS, format_pattern
from localspec.engine.sampling.grammars.patterns import translate_pattern
from localspec.engine.sampling.grammars.pointers import Document
from localspec.engine.sampling.grammars.schemas import closed

Schema = dict[str, Any]

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAPS = ("properties", "patternProperties", "$defs")
_SCHEMAS = ("allOf", "anyOf", "prefixItems", "items", "additionalItems", "additionalProperties")
_COMBINATIONS = ("allOf", "anyOf", "oneOf", "$ref")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST = 2.0**63 - 1024  # the library's bounds are 64-bit integers,
_LARGEST_NUMBER = 1e18  # and those of other numbers have a digit less
_WITH_MULTIPLES = 1e15  # bound of numbers with `multipleOf`: else one may never reach a multiple
_SMALLEST_STEP = 1e-10  # of numbers without a `multipleOf` of their own, where they need one to end
_DECIMALS = 20  # of a bound; finer ones make expressions that the library refuses
_MAX_COEFFICIENT = 2**32 - 1  # of `multipleOf`
# What lets keys through that the parts of a `oneOf` beside it do not name.
_NAMING_KEYS = frozenset(
    "properties patternProperties additionalProperties unevaluatedProperties required allOf anyOf"
    " $ref".split()
)
# Parts of a conditional stay until objects are closed, because they name keys.
_CONDITIONAL = "then"
_SHOWN_KEYWORDS = 5
_SHOWN_PATH = 120


@dataclass(frozen=True, slots=True)
class Dropped:
    """A keyword that is not enforced, and where it stands, as a JSON pointer."""

    keyword: str
    path: str

    def __str__(self) -> str:
        return f"'{self.keyword}' at {_shortened(self.path)}"


@dataclass(frozen=True, slots=True)
class Enforced:
    """A schema with its objects closed, and what of the original it leaves out."""

    schema: Any
    dropped: tuple[Dropped, ...] = ()


def describe(dropped: tuple[Dropped, ...]) -> str:
    """Return the keywords and their paths for a person, the first few of many."""
    shown = ", ".join(map(str, dropped[:_SHOWN_KEYWORDS]))
    rest = len(dropped) - _SHOWN_KEYWORDS
    return f"{shown} and {rest} more" if rest > 0 else shown


def enforce(schema: Any) -> Enforced:
    """Reduce a schema and close its objects. The schema itself is not changed.

    Raises:
        RecursionError: the schema is nested too deeply.
        ValueError: a keyword's value is not valid, or its objects have too many parts.
    """
    if not isinstance(schema, dict):
        return Enforced(schema)
    reducer = _Reducer(schema)
    reduced = reducer.reduce()
    if isinstance(reduced, dict):
        reduced = _without_conditionals(closed(reduced))
    return Enforced(reduced, tuple(dict.fromkeys(reducer.dropped)))


def for_library(schema: Any) -> Any:
    """Return an enforced schema with its formats as expressions, which the library reads as JSON Schema."""
    if not isinstance(schema, dict):
        return {} if schema else {"enum": []}  # its options need an object
    return _rewritten(schema, _format_as_pattern)


def with_bounded_numbers(schema: Any) -> Any:
    """Return an enforced schema whose numbers have an end by their bounds alone.

    For calls that are not JSON, where quotes do not tell texts from numbers. Numbers there have no exponent.
    """

    def bound(one: Schema) -> Schema:
        kinds = one.get("type")
        names = kinds if isinstance(kinds, list) else [kinds]
        if not {"integer", "number"} & set(names) or "enum" in one or "const" in one:
            return dict(one)
        made = {"multipleOf": _SMALLEST_STEP, **one} if "number" in names else dict(one)
        if "exclusiveMinimum" not in made:
            made.setdefault("minimum", -_WITH_MULTIPLES)
        if "exclusiveMaximum" not in made:
            made.setdefault("maximum", _WITH_MULTIPLES)
        return made

    return _rewritten(schema, bound)


def _without_conditionals(schema: Any) -> Any:
    def strip(one: Schema) -> Schema:
        return {k: v for k, v in one.items() if k not in (_CONDITIONAL, "unevaluatedProperties")}

    return _rewritten(schema, strip)


def _rewritten(schema: Any, rewrite: Callable[[Schema], Schema]) -> Any:
    """Return a reduced schema with `rewrite` applied to it and to every schema in it."""
    if not isinstance(schema, dict):
        return schema
    made = rewrite(schema)
    for keyword, value in made.items():
        if keyword in _MAPS:
            made[keyword] = {key: _rewritten(part, rewrite) for key, part in value.items()}
        elif keyword in _SCHEMAS and isinstance(value, list):
            made[keyword] = [_rewritten(part, rewrite) for part in value]
        elif keyword in _SCHEMAS:
            made[keyword] = _rewritten(value, rewrite)
    return made


def _format_as_pattern(schema: Schema) -> Schema:
    made = dict(schema)
    name = made.get("format")
    if not isinstance(name, str):
        return made
    pattern = format_pattern(name, beside_a_pattern="pattern" in made)
    if pattern is None:
        return made
    del made["format"]
    if "pattern" in made:
        made["allOf"] = [*made.get("allOf", []), {"type": "string", "pattern": pattern}]
        if made.get("type") != "string":
            made["allOf"][-1].pop("type")
    else:
        made["pattern"] = pattern
    return made


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a schema stands. `typed`: a schema around it says the type of the same value. `part`: it is one
    of several schemas of the same value."""

    path: str
    typed: bool = False
    part: bool = False

    def at(self, *names: str | int) -> _Place:
        escaped = (str(name).replace("~", "~0").replace("/", "~1") for name in names)
        return _Place("/".join([self.path, *escaped]))

    def beside(self, typed: bool, *names: str | int) -> _Place:
        return _Place(self.at(*names).path, typed=self.typed or typed, part=True)


class _Reducer:
    def __init__(self, root: Schema) -> None:
        self.dropped: list[Dropped] = []
        self._document = Document(root)
        self._names: dict[int, str] = {}  # of the targets of references, by identity
        self._pending: list[tuple[str, Any, _Place]] = []

    def reduce(self) -> Any:
        made = self._schema(self._document.root, _Place("#"))
        definitions: dict[str, Any] = {}
        while self._pending:
            name, target, place = self._pending.pop(0)
            definitions[name] = self._schema(target, place)
        if definitions and isinstance(made, dict):
            made["$defs"] = definitions
        return made

    def _drop(self, keyword: str, place: _Place) -> None:
        self.dropped.append(Dropped(keyword, place.path))

    def _schema(self, schema: Any, place: _Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{_shortened(place.path)} is not a schema.")
        if schema.get("not") == {} or schema.get("not") is True:
            return False
        made: Schema = {}
        typed = any(name in schema for name in ("type", "enum", "const", "$ref"))
        for keyword, value in schema.items():
            if value is not None or keyword == "const":  # null is what some write for nothing
                self._keyword(keyword, value, schema, made, place, typed)
        self._conditional(schema, made, place)
        self._property_names(schema, made, place)
        self._property_counts(made, place)
        self._numbers(made)
        if not typed and not place.typed:
            self._imply_type(made, place)
        if schema.get("nullable") is True and made:
            return {"anyOf": [made, {"type": "null"}]}
        return made

    def _keyword(
        self, keyword: str, value: Any, schema: Schema, made: Schema, place: _Place, typed: bool
    ) -> None:
        """Take over one keyword, or drop it."""
        match keyword:
            case "type":
                self._type(value, made, place)
            case "const":
                made["const"] = value
            case "enum" if isinstance(value, list):
                made["enum"] = value
            case "allOf" | "anyOf" | "oneOf" if isinstance(value, list):
                parts = [
                    self._schema(part, place.beside("type" in schema, keyword, index))
                    for index, part in enumerate(value)
                ]
                self._combine(keyword, parts, schema, made, place)
            case "$ref" | "$recursiveRef":
                self._reference(keyword, value, made, place)
            case "properties" | "patternProperties" if isinstance(value, dict) or value == []:
                self._maps(keyword, value or {}, made, place)
            case "required" if _is_list_of_strings(value):
                made["required"] = list(dict.fromkeys(value))
            case "pattern" if isinstance(value, str):
                self._pattern(value, made, place)
            case "format":
                if isinstance(value, str) and value in FORMATS:
                    made["format"] = value
            case _ if keyword in _COUNTS:
                self._count(keyword, value, made, place)
            case _ if keyword in _BOUNDS:
                self._bound(keyword, value, made, place)
            case "multipleOf":
                self._multiple(value, made, place)
            case _ if self._children(keyword, value, schema, made, place):
                pass
            case _ if keyword in _CHECKED:
                # draft 3 marks each property that is required
                if keyword != "required" or not isinstance(value, bool):
                    raise _invalid(keyword, place)
            case _ if _asks(keyword, value, schema):
                self._drop(keyword, place)

    def _children(
        self, keyword: str, value: Any, schema: Schema, made: Schema, place: _Place
    ) -> bool:
        """Take over a keyword of an object's or an array's parts. Returns whether it was one."""
        match keyword:
            case "additionalProperties" if isinstance(value, bool | dict):
                if "additionalProperties" not in made:
                    made[keyword] = self._schema(value, place.at(keyword))
            case "unevaluatedProperties" if isinstance(value, bool | dict):
                self._unevaluated_properties(value, schema, made, place)
            case "items" | "prefixItems" if isinstance(value, list):
                made[keyword] = self._list(keyword, value, place)
            case "items" if isinstance(value, bool | dict):
                made[keyword] = self._schema(value, place.at(keyword))
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    made[keyword] = self._schema(value, place.at(keyword))
            case "unevaluatedItems":
                self._unevaluated_items(value, schema, made, place)
            case _:
                return False
        return True

    # ------------------------------------------------------------------------ types and combinations

    def _type(self, value: Any, made: Schema, place: _Place) -> None:
        """Take over the types. Gemini's are in capitals."""
        names = value if isinstance(value, list) else [value]
        known = [name.lower() for name in names if isinstance(name, str) and name.lower() in TYPES]
        if value == "TYPE_UNSPECIFIED":
            return
        if not known or len(known) < len(names):
            raise _invalid("type", place)
        made["type"] = known if isinstance(value, list) else known[0]

    def _combine(
        self, keyword: str, parts: list[Any], schema: Schema, made: Schema, place: _Place
    ) -> None:
        """Take over allOf and anyOf; oneOf becomes anyOf, which is the same where its parts are disjoint."""
        if keyword == "oneOf":
            discriminated = isinstance(schema.get("discriminator"), dict)
            alone = not place.part and not schema.keys() & _NAMING_KEYS
            if not discriminated and not are_disjoint(schema["oneOf"], self._document, alone):
                self._drop("oneOf", place)
            keyword = "anyOf"
            if "anyOf" in schema:
                keyword, parts = "allOf", [{"anyOf": parts}]
        made[keyword] = [*made.get(keyword, []), *parts]

    def _reference(self, keyword: str, value: Any, made: Schema, place: _Place) -> None:
        found = self._document.target(value) if isinstance(value, str) else None
        if found is None or (keyword == "$recursiveRef" and value != "#"):
            self._drop(keyword, place)
            made["unevaluatedProperties"] = True  # its keys are not known
            return
        if found is self._document.root:
            made["$ref"] = "#"
            return
        if id(found) not in self._names:
            name = self._names[id(found)] = f"d{len(self._names)}"
            pointer = value if value.startswith("#/") else f"#{value.rpartition('#')[2]}"
            self._pending.append((name, found, _Place(pointer)))
        made["$ref"] = f"#/$defs/{self._names[id(found)]}"

    def _conditional(self, schema: Schema, made: Schema, place: _Place) -> None:
        """Keep the parts of a conditional for the keys that they name. They are stripped in the end."""
        parts = [schema[name] for name in ("then", "else") if name in schema]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(schema.get(name), dict):
                parts += [part for part in schema[name].values() if not isinstance(part, list)]
        if parts:
            count = len(self.dropped)
            reduced = [self._schema(part, _Place(place.path, True, True)) for part in parts]
            made[_CONDITIONAL] = {"allOf": reduced}
            del self.dropped[count:]  # the conditional as a whole is named

    # ------------------------------------------------------------------------ objects

    def _maps(self, keyword: str, value: Schema, made: Schema, place: _Place) -> None:
        if keyword == "properties":
            made[keyword] = {k: self._schema(v, place.at(keyword, k)) for k, v in value.items()}
            return
        translated = {key: translate_pattern(key) for key in value}
        usable = all(each.exact and len(each.expressions) == 1 for each in translated.values())
        if not usable or not _compiles({"type": "object", keyword: dict.fromkeys(value, True)}):
            self._drop(keyword, place)
            self._open(made)
            return
        made[keyword] = {
            translated[key].expressions[0]: self._schema(part, place.at(keyword, key))
            for key, part in value.items()
        }

    @staticmethod
    def _open(made: Schema) -> None:
        """Let every key through, of an object some of whose keys are not known."""
        made["additionalProperties"] = True

    def _unevaluated_properties(
        self, value: Any, schema: Schema, made: Schema, place: _Place
    ) -> None:
        if isinstance(value, dict) and any(name in schema for name in _COMBINATIONS):
            self._drop("unevaluatedProperties", place)
            value = True
        made["unevaluatedProperties"] = self._schema(value, place.at("unevaluatedProperties"))

    def _property_names(self, schema: Schema, made: Schema, place: _Place) -> None:
        """Turn what `propertyNames` asks into properties or a pattern of keys, where that is the same."""
        names = schema.get("propertyNames")
        while isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = self._document.target(names["$ref"])
        if not isinstance(names, dict) or not _asks_of_names(names):
            return
        asked = {key: value for key, value in names.items() if key in _ASKED_OF_NAMES}
        others = made.get("additionalProperties", True)
        if not made.get("properties") and not made.get("patternProperties"):
            values = asked.get("enum", [asked["const"]] if "const" in asked else None)
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                made["properties"] = dict.fromkeys(values, others)
                made["additionalProperties"] = False
                return
            pattern = _pattern_of_names(asked)
            if pattern is not None:
                made["patternProperties"] = {pattern: others}
                made["additionalProperties"] = False
                return
        self._drop("propertyNames", place)

    def _property_counts(self, made: Schema, place: _Place) -> None:
        """Keep minProperties and maxProperties where the library knows them."""
        named, required = made.get("properties", {}), made.get("required", [])
        simple = not place.part and not any(name in made for name in _COMBINATIONS)
        simple = simple and set(named) <= set(required) and "patternProperties" not in made
        for keyword in ("minProperties", "maxProperties"):
            if keyword not in made or simple:
                continue
            needed = made[keyword] > len(required) if keyword == "minProperties" else True
            del made[keyword]
            if needed:
                self._drop(keyword, place)

    # ------------------------------------------------------------------------ arrays

    def _list(self, keyword: str, value: list[Any], place: _Place) -> list[Any]:
        return [self._schema(part, place.at(keyword, index)) for index, part in enumerate(value)]

    def _unevaluated_items(self, value: Any, schema: Schema, made: Schema, place: _Place) -> None:
        if value is True:
            return
        if any(name in schema for name in (*_COMBINATIONS, "items", "if", "contains")):
            self._drop("unevaluatedItems", place)
        else:
            made["items"] = self._schema(value, place.at("unevaluatedItems"))

    # ------------------------------------------------------------------------ texts and numbers

    def _pattern(self, value: str, made: Schema, place: _Place) -> None:
        pattern = translate_pattern(value)
        if not pattern.exact:
            self._drop("pattern", place)
        for expression in pattern.expressions:
            if "pattern" in made:
                made["allOf"] = [*made.get("allOf", []), {"pattern": expression}]
            else:
                made["pattern"] = expression

    @staticmethod
    def _count(keyword: str, value: Any, made: Schema, place: _Place) -> None:
        if _is_number(value) and value >= 0 and value == int(value):
            made[keyword] = int(value)
        else:
            raise _invalid(keyword, place)

    def _bound(self, keyword: str, value: Any, made: Schema, place: _Place) -> None:
        exclusive = keyword.startswith("exclusive")
        if exclusive and isinstance(value, bool):  # draft 4
            made[keyword] = value
        elif not _is_number(value):
            raise _invalid(keyword, place)
        elif abs(value) <= _LARGEST:
            made[keyword] = _rounded(value, up=keyword.lower().endswith("maximum"))
        elif (value > 0) == keyword.lower().endswith("maximum"):
            made[keyword] = _LARGEST if value > 0 else -_LARGEST  # longer numbers are not written
        else:
            self._drop(keyword, place)

    def _multiple(self, value: Any, made: Schema, place: _Place) -> None:
        if not _is_number(value) or value <= 0:
            raise _invalid("multipleOf", place)
        coefficient = float(value)
        while coefficient % 1 and coefficient <= _MAX_COEFFICIENT:  # as the library counts
            coefficient *= 10
        if coefficient <= _MAX_COEFFICIENT:
            made["multipleOf"] = value
        else:
            self._drop("multipleOf", place)

    @staticmethod
    def _numbers(made: Schema) -> None:
        """Bound numbers that must be multiples of another, and shorten bounds to what the library reads."""
        if "multipleOf" in made:
            if "minimum" not in made and "exclusiveMinimum" not in made:
                made["minimum"] = -_WITH_MULTIPLES
            if "maximum" not in made and "exclusiveMaximum" not in made:
                made["maximum"] = _WITH_MULTIPLES
        for keyword in _BOUNDS if made.get("type") != "integer" else ():
            if _is_number(made.get(keyword)):
                made[keyword] = max(-_LARGEST_NUMBER, min(made[keyword], _LARGEST_NUMBER))

    def _imply_type(self, made: Schema, place: _Place) -> None:
        """Give a schema the type that its keywords are about, as llama-server does."""
        keys = ("properties", "patternProperties", "required")
        branches = [part for name in ("anyOf", "allOf") for part in made.get(name, [])]
        if any(_excludes_objects(part) for part in branches):
            return
        if any(name in made for name in keys) or made.get("additionalProperties", True) is not True:
            made["type"] = "object"
        elif "items" in made or "prefixItems" in made:
            made["type"] = "array"
        elif not (branches or place.part) and not made.keys().isdisjoint(_OF_TEXTS):
            made["type"] = "string"


# ---------------------------------------------------------------------------- what a keyword asks

_ASKED_OF_NAMES = ("enum", "const", "pattern", "minLength", "maxLength")
_ASKING = frozenset(
    "$dynamicRef contains dependencies dependentRequired dependentSchemas if not uniqueItems".split()
)
# These are taken over wherever their value is of the right type.
_CHECKED = frozenset(
    "additionalProperties allOf anyOf enum items oneOf pattern patternProperties prefixItems properties"
    " required unevaluatedProperties".split()
)


def _invalid(keyword: str, place: _Place) -> ValueError:
    return ValueError(f"'{keyword}' at {_shortened(place.path)} has a value that is not valid.")


def _shortened(path: str) -> str:
    if len(path) <= _SHOWN_PATH:
        return path
    return f"{path[: _SHOWN_PATH // 2]}…{path[-_SHOWN_PATH // 2 :]}"


def _asks(keyword: str, value: Any, schema: Schema) -> bool:
    """Return whether a keyword that is not taken over restricts anything."""
    match keyword:
        case "uniqueItems":
            few = schema.get("maxItems")
            return value is not False and not (_is_number(few) and few <= 1)
        case "not":
            return value is not False
        case "if":
            return "then" in schema or "else" in schema
        case "contains":
            return value is not None and (schema.get("minContains") != 0 or "maxContains" in schema)
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value)
    return keyword in _ASKING


def _asks_of_names(names: Schema) -> bool:
    """Return whether a schema of keys asks more than that they are strings."""
    quiet = names.get("type", "string") in ("string", ["string"]) and not names.keys() & (
        _ASKING | _CHECKED | {"const", "minLength", "maxLength", "$ref"}
    )
    return not quiet


def _pattern_of_names(asked: Schema) -> str | None:
    """Return an expression of all keys that are let through; None if there is none that says the same."""
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        pattern = translate_pattern(asked["pattern"])
        expressions = pattern.expressions
        return expressions[0] if pattern.exact and len(expressions) == 1 else None
    if asked and asked.keys() <= {"minLength", "maxLength"}:
        least, most = asked.get("minLength", 0), asked.get("maxLength", "")
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _excludes_objects(part: Any) -> bool:
    types = part.get("type", "object") if isinstance(part, dict) else "object"
    return "object" not in ([types] if isinstance(types, str) else types)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _rounded(value: float, *, up: bool) -> float:
    """Round a bound to the digits that the library reads, outwards."""
    exact = Decimal(repr(value))
    exponent = exact.as_tuple().exponent
    if not isinstance(exponent, int) or exponent >= -_DECIMALS:
        return value
    digit = Decimal(1).scaleb(-_DECIMALS)
    return float(exact.quantize(digit, ROUND_CEILING if up else ROUND_FLOOR))


def _compiles(schema: Schema) -> bool:
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={})
    return not LLMatcher.validate_grammar(source)
