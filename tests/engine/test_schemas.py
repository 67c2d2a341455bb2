"""Objects of a schema are closed as in llama-server, however the schema is composed."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from localspec.engine.sampling.grammars.json_schema import close_objects
from localspec.engine.sampling.grammars.sources import constraint_source
from localspec.errors import GrammarRejected
from localspec.protocol.frames import Constraint

TEXT = {"const": "s"}
EOS = 256


class Bytes:
    """A vocabulary of single bytes."""

    tokens = [*(bytes([value]) for value in range(256)), b"<eos>"]  # noqa: RUF012
    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = [EOS]  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def make_matcher(schema: Any) -> LLMatcher:
    matcher = LLMatcher(
        tokenizer(), constraint_source(Constraint("json_schema", json.dumps(schema))), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(schema: Any, value: Any) -> bool:
    """Return whether an answer may be `value`, with its keys in some order."""
    for text in list_spellings(value):
        walk = make_matcher(schema)
        data = list(text.encode())
        if walk.validate_tokens(data) == len(data):
            walk.consume_tokens(data)
            if walk.is_accepting():
                return True
    return False


def list_spellings(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [json.dumps(value)]
    texts = []
    for order in itertools.permutations(value.items()):
        keys = [json.dumps(key) for key, _ in order]
        for items in itertools.product(*(list_spellings(item) for _, item in order)):
            pairs = (f"{key}: {item}" for key, item in zip(keys, items, strict=True))
            texts.append("{" + ", ".join(pairs) + "}")
    return texts


def make_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A, B, BOTH = make_object(a=TEXT), make_object(b=TEXT), {"a": "s", "b": "s"}
NODE = make_object(v=TEXT, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (A, [{}, {"a": "s"}], [{"z": 1}, {"a": "s", "z": 1}]),
        ({"properties": {"a": TEXT}}, [{"a": "s"}], [{"z": 1}]),
        (make_object(), [{}], [{"z": 1}]),
        ({"type": "object"}, [{}, {"z": 1}], []),
        ({**A, "additionalProperties": True}, [{"a": "s", "z": 1}], []),
        ({**A, "additionalProperties": {"const": 1}}, [{"z": 1}], [{"z": 2}]),
        ({**A, "unevaluatedProperties": {"const": 1}}, [{"z": 1}], [{"z": 2}]),
        ({**A, "unevaluatedProperties": True}, [{"z": 1}], []),
        ({**A, "unevaluatedProperties": False}, [{"a": "s"}], [{"z": 1}]),
        ({**A, "patternProperties": {"^x": TEXT}}, [{"a": "s", "xy": "s"}], [{"z": 1}]),
        ({**A, "required": ["a", "x"]}, [{"a": "s", "x": 1}], [{"a": "s", "x": 1, "z": 1}]),
        ({"allOf": [A, B]}, [BOTH, {"b": "s"}], [{**BOTH, "z": 1}]),
        ({**A, "allOf": [B]}, [BOTH], [{**BOTH, "z": 1}]),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, [{**BOTH, "z": 1}], []),
        (
            {**make_object(k=TEXT), "anyOf": [A, B]},
            [{"k": "s", "a": "s"}, {"k": "s", "b": "s"}],
            [{"k": "s", **BOTH}, {"k": "s", "a": "s", "z": 1}],
        ),
        (
            {
                "oneOf": [
                    {**make_object(kind={"const": "x"}, a=TEXT), "required": ["kind"]},
                    {**make_object(kind={"const": "y"}, b=TEXT), "required": ["kind"]},
                ]
            },
            [{"kind": "x", "a": "s"}, {"kind": "y", "b": "s"}],
            [{"kind": "x", "b": "s"}],
        ),
        (
            {"$defs": {"A": A, "B": B}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            [BOTH],
            [{**BOTH, "z": 1}],
        ),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, [BOTH], [{**BOTH, "z": 1}]),
        (
            {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
            [{"v": "s", "next": {"v": "s", "next": None}}],
            [{"v": "s", "next": {"z": "s"}}],
        ),
        ({"type": "array", "items": A}, [[{"a": "s"}]], [[{"z": 1}]]),
        ({"type": "array", "prefixItems": [A]}, [[{"a": "s"}]], [[{"z": 1}]]),
        (
            make_object(o=make_object(i=A)),
            [{"o": {"i": {"a": "s"}}}],
            [{"o": {"i": {"z": 1}}}, {"o": {"z": 1}}],
        ),
        ({"additionalProperties": A}, [{"k": {"a": "s"}}], [{"k": {"z": 1}}]),
        (
            make_object(a={"type": ["object", "null"], "properties": {"b": TEXT}}),
            [{"a": None}],
            [{"z": 1}],
        ),
    ],
)
def test_only_keys_named_by_the_schema_are_accepted(
    schema: Any, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        assert accepts(schema, value), value
    for value in refused:
        assert not accepts(schema, value), value


def test_the_schema_itself_is_not_changed() -> None:
    schema = {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {**B, "items": [A]}]}
    original = json.dumps(schema)
    close_objects(schema)
    assert json.dumps(schema) == original


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {f"k{i}": {}}} for i in range(4000)]},
        {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}},
        {"$defs": {"A": {"$ref": "#/$defs/A", **A}}, "$ref": "#/$defs/A", **B},
    ],
)
def test_schema_that_explodes_is_closed_or_refused_at_once(schema: Any) -> None:
    try:
        result = close_objects(schema)
    except ValueError as error:
        result = {"refused": str(error)}
    assert len(json.dumps(result)) < 4_000_000


def test_schema_with_too_many_parts_is_refused() -> None:
    schema: dict[str, Any] = {"allOf": [{"properties": {f"k{i}": {}}} for i in range(4000)]}
    with pytest.raises(GrammarRejected, match="too many parts or keys"):
        constraint_source(Constraint("json_schema", json.dumps(schema)))


KEYS = ["a", "b", "c", "d"]
LEAVES: list[Any] = [TEXT, {"type": "null"}, {"enum": [0, 1]}]
leaves = st.sampled_from(LEAVES)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw objects whose contents are specified in several ways at once."""
    properties = st.dictionaries(st.sampled_from(KEYS), values, max_size=3)
    plain = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties},
        optional={"additionalProperties": st.sampled_from([True, False, {"const": "s"}])},
    )
    reference = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}])
    parts = st.lists(plain | reference, min_size=1, max_size=2)
    return plain | st.fixed_dictionaries(
        {"properties": properties},
        optional={"allOf": parts, "anyOf": parts, "$ref": st.just("#/$defs/one")},
    )


nested = objects(leaves | objects(leaves) | st.just({"type": "object"}))
definitions = st.dictionaries(st.sampled_from(KEYS), leaves, max_size=2).map(
    lambda properties: make_object(**properties)
)
schemas = st.builds(
    lambda root, first, second: {**root, "$defs": {"one": first, "two": second}},
    nested,
    definitions,
    definitions,
)
scalars = st.sampled_from(["s", None, 0, 1])
small = st.dictionaries(st.sampled_from([*KEYS, "z"]), scalars, max_size=2)
instances = st.dictionaries(st.sampled_from([*KEYS, "z"]), scalars | small, max_size=3)


def close_by_standard(schema: Any) -> Any:
    """Close a schema by `unevaluatedProperties`, which sees through all parts.

    It is set once for each value, and not if a part specifies additional properties.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in ("properties", "$defs"):
        if name in schema:
            result[name] = {key: close_by_standard(value) for key, value in schema[name].items()}
    for name in ("allOf", "anyOf"):
        if name in schema:
            result[name] = [close_part(part) for part in schema[name]]
    if "properties" in schema or "allOf" in schema or "anyOf" in schema:
        result["unevaluatedProperties"] = False
    return result


def close_part(part: Any) -> Any:
    """Close the values in a part of an object, but not the part itself."""
    result = dict(part)
    if "properties" in part:
        result["properties"] = {key: close_by_standard(v) for key, v in part["properties"].items()}
    return result


def expand_references(schema: Any, definitions: Any) -> Any:
    """Replace the references of parts by their targets, so that definitions are closed once."""
    if isinstance(schema, list):
        return [expand_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: expand_references(value, definitions) for key, value in schema.items() if key != "$ref"
    }
    if isinstance(schema.get("$ref"), str):
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        result["allOf"] = [*result.get("allOf", []), target]
    return result


def make_standard_validator(schema: Any) -> jsonschema_rs.Draft202012Validator:
    definitions = schema["$defs"]
    root = {key: value for key, value in schema.items() if key != "$defs"}
    return jsonschema_rs.Draft202012Validator(
        close_by_standard(expand_references(root, definitions))
    )


def add_object_types(schema: Any) -> Any:
    """Add the type to every object that has properties."""
    if isinstance(schema, list):
        return [add_object_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: add_object_types(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.keys() & {"type", "$ref"}:
        result["type"] = "object"
    return result


def has_mixed_parts(schema: Any) -> bool:
    """Return whether only some parts of an object specify additional properties, which is ambiguous."""
    text = json.dumps(expand_references(schema, schema["$defs"]))
    return "additionalProperties" in text and ("allOf" in text or "anyOf" in text)


@settings(max_examples=300, deadline=None)
@given(schemas, st.lists(instances, min_size=1, max_size=8))
def test_closing_agrees_with_unevaluated_properties(schema: Any, values: list[Any]) -> None:
    if has_mixed_parts(schema):
        return
    ours = jsonschema_rs.Draft202012Validator(close_objects(schema))
    theirs = make_standard_validator(schema)
    for value in values:
        assert ours.is_valid(value) == theirs.is_valid(value), value


@settings(max_examples=120, deadline=None)
@given(schemas, st.lists(instances, min_size=1, max_size=4))
def test_masks_accept_exactly_the_valid_values(schema: Any, values: list[Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator(close_objects(add_object_types(schema)))
    for value in values:
        assert accepts(schema, value) == validator.is_valid(value), value


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_random_answers_are_valid(schema: Any, seed: int) -> None:
    """A random walk along the masks also tries keys that the schema does not name."""
    text = walk_masks(schema, random.Random(seed))
    if text is not None:
        validator = jsonschema_rs.Draft202012Validator(close_objects(add_object_types(schema)))
        assert validator.is_valid(json.loads(text)), text


def walk_masks(schema: Any, rng: random.Random) -> str | None:
    walk, data = make_matcher(schema), bytearray()
    while len(data) < 200:
        bias = walk.compute_logit_bias()
        allowed = [token for token in range(EOS + 1) if bias[token]]
        ends = [token for token in allowed if token in (EOS, ord("}"), ord('"'))]
        plain = [token for token in allowed if token == EOS or 32 < token < 127]
        token = rng.choice(ends if ends and rng.random() < 0.5 else plain or allowed)
        if token == EOS:
            return data.decode("utf-8", "replace")
        data.append(token)
        walk.consume_token(token)
    return None  # a free object may never end
