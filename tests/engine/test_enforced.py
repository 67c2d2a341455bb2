"""Schema keywords are enforced, or dropped and named, and every number, time and address ends."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from localspec.engine.sampling.grammars.enforced import describe, enforce
from localspec.engine.sampling.grammars.json_schema import close_objects, translate_pattern
from localspec.engine.sampling.grammars.matcher import (
    MAX_DIGITS,
    MAX_EXPONENT_DIGITS,
    BoundedNumbers,
    Numerals,
    WholeMatcher,
)
from localspec.engine.sampling.grammars.sources import constraint_source, enforced_tools, note_of
from localspec.errors import GrammarRejected
from localspec.protocol.calls import CallFormat, ToolSet
from localspec.protocol.frames import Constraint
from tests.engine.test_schemas import accepts, add_object_types, tokenizer

TEXT = {"type": "string"}


def make_constraint(schema: Any, *, strict: bool = False) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), param="response_format", strict=strict)


@pytest.mark.parametrize(
    "more",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"title": "t", "description": "d", "$comment": "c", "examples": [1], "default": 1},
        {"deprecated": True, "readOnly": True, "writeOnly": True},
        {"x-order": 1, "xml": {"name": "n"}, "externalDocs": {}, "example": {}},
        {"propertyOrdering": ["a"], "contentMediaType": "text/plain"},
        {"$schema": "https://example.com/unknown", "$id": "https://example.com/s"},
        {"$schema": "http://json-schema.org/schema#"},
        {"uniqueItems": False, "minContains": 1, "then": {}, "else": {}},
        {"dependentRequired": {}, "unevaluatedProperties": False},
        {"not": False},
        {"nullable": False},
        {"enum": None, "pattern": None, "required": None},
    ],
)
def test_keywords_without_effect_are_ignored(more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {**TEXT, **more}}, **more}
    assert note_of(make_constraint(schema)) == ""
    constraint_source(make_constraint(schema, strict=True))
    assert accepts(schema, {"a": "x"})
    assert not accepts(schema, {"a": 1})


@pytest.mark.parametrize(
    "name", ["path", "uuid4", "int32", "binary", "password", "uri-reference", "x", "regex", ""]
)
def test_unknown_formats_are_ignored(name: str) -> None:
    for schema in ({**TEXT, "format": name}, {"type": "integer", "format": name}):
        constraint_source(make_constraint(schema, strict=True))
        assert note_of(make_constraint(schema)) == ""
        assert accepts(schema, "x" if schema["type"] == "string" else 3)


UNSUPPORTED: dict[str, Any] = {
    "uniqueItems": True,
    "contains": {"const": 1},
    "not": {"type": "string"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "if": {"required": ["a"]},
    "unevaluatedItems": {"type": "null"},
    "propertyNames": {"not": {"const": "q"}},
    "pattern": "(?<=a)b",
    "$ref": "https://example.com/elsewhere.json",
    "multipleOf": 1e-20,
    "$dynamicRef": "#node",
    "oneOf": [{"type": "number"}, {"type": "integer"}],
    "minProperties": 1,
}


# What a keyword needs beside it to restrict anything.
BESIDE: dict[str, Any] = {
    "if": {"then": {"required": ["b"]}},
    "unevaluatedItems": {"items": [{}]},
    "minProperties": {"type": "object", "properties": {"a": TEXT}},
}
WRAPPINGS: dict[str, Any] = {
    "/properties/k~1~0": lambda inner: {"type": "object", "properties": {"k/~": inner}},
    "/items": lambda inner: {"type": "array", "items": inner},
    "/anyOf/1": lambda inner: {"anyOf": [{"type": "null"}, inner]},
    "/additionalProperties": lambda inner: {"type": "object", "additionalProperties": inner},
    "/prefixItems/0": lambda inner: {"type": "array", "prefixItems": [inner]},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@given(path=st.lists(st.sampled_from(list(WRAPPINGS)), max_size=4))
@settings(max_examples=15, deadline=None)
def test_unsupported_keyword_is_dropped_alone_and_named(keyword: str, path: list[str]) -> None:
    schema = {keyword: UNSUPPORTED[keyword], **BESIDE.get(keyword, {})}
    for step in reversed(path):
        schema = WRAPPINGS[step](schema)
    schema = {"type": "object", "properties": {"o": schema, "n": {"const": 1}}, "required": ["n"]}
    place = f"'{keyword}' at #/properties/o{''.join(path)}"
    note = note_of(make_constraint(schema))
    assert place in note
    assert accepts(schema, {"n": 1})
    assert not accepts(schema, {"n": 2})
    with pytest.raises(GrammarRejected, match="strict") as refused:
        constraint_source(make_constraint(schema, strict=True))
    assert place in refused.value.message
    assert refused.value.param == "response_format"
    assert not re.search("x-guidance|coerce|lenient|llguidance", note + refused.value.message)
    tools = ToolSet(CallFormat("json"), {"f": schema})
    enforced, invalid, tool_note = enforced_tools(tools)
    assert place in tool_note
    assert not invalid
    assert enforced.schemas["f"]["required"] == ["n"]
    with pytest.raises(GrammarRejected, match=re.escape(place)):
        enforced_tools(ToolSet(CallFormat("json"), {"f": schema}, strict=["f"]))


def test_a_note_is_short_whatever_the_schema() -> None:
    properties = {f"k{i}" * 200: {"type": "array", "uniqueItems": True} for i in range(300)}
    assert len(note_of(make_constraint({"type": "object", "properties": properties}))) < 1200


KEYS = ["a", "b"]
scalars = st.sampled_from(["", "a", "ab", "abc", "b1", 0, 1, 2, 7, -3, 2.5, None, True])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)
    ),
    max_leaves=4,
)
strings = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(2, 3),
        "pattern": st.sampled_from(["^a", "b$", "^(?!b)", "a|b", r"^\w+\d?$", "(?=a)a"]),
    },
)
numbers = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.integers(-3, 1),
        "exclusiveMaximum": st.sampled_from([3, 8, 1e30]),
        "multipleOf": st.sampled_from([1, 0.5, 7, 1e-15]),
    },
)
leaves = strings | numbers | st.sampled_from([{"enum": ["a", 1, None]}, {"type": "null"}, {}])


def compose(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    alternatives = st.lists(inner, min_size=1, max_size=2)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "maxItems": st.integers(1, 2),
            "uniqueItems": st.booleans(),
            "contains": inner,
        },
    )
    properties = st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties},
        optional={
            "not": inner,
            "if": inner,
            "then": st.builds(lambda p: {"properties": p}, properties),
            "else": inner,
            "minProperties": st.integers(0, 1),
            "maxProperties": st.integers(1, 2),
            "dependentRequired": st.just({"a": ["b"]}),
            "dependentSchemas": st.builds(lambda p: {"a": {"properties": p}}, properties),
            "propertyNames": st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a"]}, {"not": {}}]),
            "patternProperties": st.sampled_from([{"^(?=b)": {}}, {"^b": {}}]),
            "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
        },
    )
    joined = st.builds(
        lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "oneOf"]), alternatives
    )
    return arrays | objects | joined | st.builds(lambda part: {"not": part}, inner)


schemas = st.recursive(leaves, compose, max_leaves=5)


def is_possible(schema: Any, value: Any) -> bool | None:
    """Return whether an answer may be a value; None where the library finds a contradiction in the schema."""
    matcher = LLMatcher(tokenizer(), constraint_source(make_constraint(schema)), log_level=0)
    if matcher.is_error():
        assert "nsatisfiable" in matcher.get_error()
        return None
    return accepts(schema, value)


@settings(max_examples=120, deadline=None)
@given(schemas, st.lists(values, min_size=1, max_size=6))
@example(
    {
        "type": "object",
        "properties": {},
        "maxProperties": 2,
        "then": {"properties": {"a": {"type": "string"}}},
    },
    [{}],
)
def test_valid_values_stay_possible_when_keywords_are_dropped(
    schema: Any, candidates: list[Any]
) -> None:
    validator = jsonschema_rs.Draft202012Validator(close_objects(add_object_types(schema)))
    for value in filter(validator.is_valid, candidates):
        assert is_possible(schema, value) is not False, value


@settings(max_examples=120, deadline=None)
@given(schemas, st.lists(values, min_size=1, max_size=6))
def test_possible_values_are_valid_if_nothing_is_dropped(
    schema: Any, candidates: list[Any]
) -> None:
    validator = jsonschema_rs.Draft202012Validator(schema)
    for value in candidates if not enforce(schema).dropped else []:
        assert not is_possible(schema, value) or validator.is_valid(value), value


def cat(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": "cat"}, **more}}


@pytest.mark.parametrize(
    ("parts", "exact"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"enum": [2, "a"]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"type": "string"}, {"const": "a"}], False),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
        ([{"properties": {"x": {}}, "required": ["x"]}, {"properties": {"y": {}}}], True),
        ([{"properties": {"x": {}}}, {"properties": {"y": {}}}], False),
        ([{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}], False),
    ],
)
def test_one_of_is_enforced_if_its_parts_are_disjoint(parts: Any, exact: bool) -> None:
    kinds = {
        name: {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
        for name in "ab"
    }
    schema = {"oneOf": parts, "$defs": kinds}
    assert bool(enforce(schema).dropped) != exact
    tagged = {**schema, "discriminator": {"propertyName": "k"}}
    assert not enforce(tagged).dropped


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"a": 3}, 3),
        ({"required": ["a"]}, {"a": 3}, 3),
        ({"additionalProperties": {"type": "integer"}}, {"q": 3}, 3),
        ({"patternProperties": {"^a": {"type": "integer"}}}, {"ab": 3}, 3),
        ({"properties": {"o": {"properties": {"a": {}}}}}, {"o": {"a": 1}}, {"o": 3}),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1}, 3),
        ({"items": {"type": "integer"}}, [1], 1),
        ({"prefixItems": [{"type": "integer"}]}, [1], 1),
        ({"pattern": "^a"}, "ab", 1),
        ({"type": "STRING", "nullable": True}, None, 1),
        ({"type": "string", "enum": ["a"], "nullable": True}, None, "b"),
        ({"type": ["object", "null"], "allOf": [{"required": ["a"]}]}, None, {}),
        ({"type": "object", "properties": []}, {}, 1),
        ({"type": "object", "properties": {"a": {"required": True}}}, {"a": 1}, 1),
        ({"type": "string", "maxLength": 2.0}, "ab", "abc"),
        ({"type": "array", "items": [{"const": 1}], "unevaluatedItems": False}, [1], [2]),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, "a", 1),
        ({"$ref": "#/components/s", "components": {"s": {"items": {}}}}, [1], 1),
        ({"$ref": "#n", "x": {"$anchor": "n", "properties": {}}}, {}, 1),
        ({"$id": "http://a/b", "$ref": "http://a/b#/$defs/c", "$defs": {"c": {"type": "null"}}}, None, 1),
        ({"propertyNames": {"enum": ["a"]}, "type": "object"}, {"a": 1}, {"b": 1}),
        ({"propertyNames": {"pattern": "^a$"}, "type": "object"}, {"a": 1}, {"b": 1}),
        ({"propertyNames": {"maxLength": 1}, "type": "object"}, {"a": 1}, {"bb": 1}),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, 1.5, "a"),
        ({"type": "integer", "maximum": 9223372036854775807}, 5, "a"),
        ({"type": "number", "exclusiveMinimum": 5e-324}, 0.5, -0.5),
    ],
)  # fmt: skip
def test_schemas_have_their_intended_meaning(schema: Any, accepted: Any, refused: Any) -> None:
    assert accepts(schema, accepted)
    assert not accepts(schema, refused)


@pytest.mark.parametrize(
    "schema",
    [{"type": "colour"}, {"type": []}, {"properties": 3}, {"maxLength": -1}, {"minimum": "a"},
     {"pattern": 3}, {"anyOf": {}}, {"required": [1]}, {"multipleOf": 0}, {"items": 3}],
)  # fmt: skip
def test_invalid_keyword_value_is_refused_with_its_path(schema: Any) -> None:
    [keyword] = schema
    with pytest.raises(
        GrammarRejected, match=f"'{keyword}' at #/properties/a|#/properties/a/items"
    ):
        constraint_source(make_constraint({"properties": {"a": schema}}))


PATTERNS = [
    "^a+$", "a", "^(a|b)*$", r"^\d{2}$", r"^[^[]$", r"^[a&&b]+$", r"^a\Z", r"^(?=a)[ab]{2}$",
    r"^(?=.{1,2}$)[ab]*$", r"^(?=a.*)(?=.*b$).*$", "^$|^a", r"[\[\]]", "^[a~-]$", r"^(?:ab)?$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
]  # fmt: skip
RELAXED = [r"^(?!a)", r"a(?=b)", r"\ba\b", r"(?<=a)b", r"^(a(?!b)|b)$"]


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")  # from Python's own classes
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATTERNS + RELAXED), st.text("ab01[]&~-+.", max_size=4))
def test_patterns_match_as_in_python(pattern: str, text: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    matches = re.search(pattern, text) is not None
    assert translate_pattern(pattern).exact == (pattern in PATTERNS)
    accepted = accepts(schema, text)
    assert accepted == matches if pattern in PATTERNS else accepted or not matches


class Tokens:
    """A vocabulary of bytes, and of tokens with several digits."""

    more = (b"00", b"000", b"33", b"3333333333", b"0.", b".5", b"e1", b"1" * 25, b'"3', b'3"')
    tokens = (*(bytes([value]) for value in range(256)), *more, b"<eos>")
    eos_token_id = len(tokens) - 1
    bos_token_id = None
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


VOCAB = LLTokenizer(TokenizerWrapper(Tokens()))
NUMERALS = Numerals([*Tokens.tokens[:-1], b""])


def make_guide(schema: Any) -> BoundedNumbers:
    matcher = LLMatcher(VOCAB, constraint_source(make_constraint(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return BoundedNumbers(WholeMatcher(matcher, len(Tokens.tokens)), NUMERALS)


ENDLESS: list[Any] = [
    {"type": "number"}, {"type": "integer"}, {}, {"type": "number", "minimum": 0},
    {"type": "number", "maximum": 10}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 5}, {"type": "integer", "multipleOf": 13},
    {"type": "number", "multipleOf": 0.01}, {"const": 1e30}, {"enum": [10**40, 3]},
    {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    {"type": "string", "format": "time"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "duration"}, {"type": "string", "format": "email"},
    {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT[\d:]+(\.\d+)?Z$"},
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(ENDLESS), st.sampled_from(b"0123456789"), st.integers(0, 2**32))
def test_model_that_prefers_digits_comes_to_an_end(schema: Any, digit: int, seed: int) -> None:
    """The model repeats a digit as long as it is allowed, and otherwise closes what is open."""
    walk, rng, data = make_guide(schema), random.Random(seed), b""
    for _ in range(900):
        mask = walk.mask()
        allowed = [t for t in range(len(Tokens.tokens)) if mask[t]]
        assert allowed
        if mask[Tokens.eos_token_id] and rng.random() < 0.5:
            break
        digits = [t for t in allowed if Tokens.tokens[t].startswith(bytes([digit]))]
        plain = [t for t in allowed if t < 256 and 32 < t < 127] or allowed
        closing = [t for t in plain if chr(t) in '.eE"}],:-']
        token = rng.choice(digits or closing or plain)
        if token == Tokens.eos_token_id:
            break
        assert walk.count_valid([token]) == 1
        data += Tokens.tokens[token]
        walk.consume(token)
    else:
        raise AssertionError(data)
    if schema.get("type") in ("number", "integer"):
        for run in re.findall(rb"(?<![eE\d])\d+", data):
            assert len(run) <= MAX_DIGITS + 25, data


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([{"type": kind} for kind in ("number", "object", "array", "string")]),
    st.integers(0, 2**32),
)
def test_drafts_are_valid_as_far_as_the_masks_allow_them(schema: Any, seed: int) -> None:
    rng, walk, history = random.Random(seed), make_guide(schema), list[int]()
    likely = [*b"0123456789", *b'".,[]{}:ae-', *range(256, 256 + len(Tokens.more))]
    for _ in range(12):
        drafts = [rng.choice(likely) for _ in range(6)]
        count, stepped = walk.count_valid(drafts), make_guide(schema)
        for token in history:
            stepped.consume(token)
        by_masks = 0
        while by_masks < len(drafts) and stepped.mask()[drafts[by_masks]]:
            stepped.consume(drafts[by_masks])
            by_masks += 1
        assert count == by_masks
        mask = walk.mask()
        allowed = [t for t in likely if mask[t]]
        if not allowed:
            return
        token = rng.choice(allowed)
        history.append(token)
        walk.consume(token)


def test_digits_in_texts_are_not_counted() -> None:
    walk = make_guide({"type": "object", "properties": {"a": TEXT, "n": {"type": "number"}}})
    text = '{"a": "' + "3" * 100 + '\\"' + "4" * 100 + '", "n": 1.5e-' + "9" * MAX_EXPONENT_DIGITS
    for token in (text + "}").encode():
        assert walk.mask()[token]
        walk.consume(token)
    walk.take_back(1)
    assert not walk.mask()[ord("9")]
    assert walk.ended is False


def test_dropped_keywords_are_described_in_one_line() -> None:
    enforced = enforce({"type": "array", "uniqueItems": True, "contains": {}})
    assert describe(enforced.dropped) == "'uniqueItems' at #, 'contains' at #"
