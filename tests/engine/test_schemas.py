"""Objects of a schema are closed as llama-server closes them, whatever the schema is put together from."""

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


def matcher(schema: Any) -> LLMatcher:
    made = LLMatcher(
        tokenizer(), constraint_source(Constraint("json_schema", json.dumps(schema))), log_level=0
    )
    assert not made.is_error(), made.get_error()
    return made


def accepts(schema: Any, value: Any) -> bool:
    """Whether an answer may be `value`, its keys in some order."""
    for text in written(value):
        walk = matcher(schema)
        data = list(text.encode())
        if walk.validate_tokens(data) == len(data):
            walk.consume_tokens(data)
            if walk.is_accepting():
                return True
    return False


def written(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [json.dumps(value)]
    texts = []
    for order in itertools.permutations(value.items()):
        keys = [json.dumps(key) for key, _ in order]
        for items in itertools.product(*(written(item) for _, item in order)):
            pairs = (f"{key}: {item}" for key, item in zip(keys, items, strict=True))
            texts.append("{" + ", ".join(pairs) + "}")
    return texts


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A, B, BOTH = of(a=TEXT), of(b=TEXT), {"a": "s", "b": "s"}
NODE = of(v=TEXT, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})


@pytest.mark.parametrize(
    ("schema", "welcome", "invented"),
    [
        (A, [{}, {"a": "s"}], [{"z": 1}, {"a": "s", "z": 1}]),
        ({"properties": {"a": TEXT}}, [{"a": "s"}], [{"z": 1}]),
        (of(), [{}], [{"z": 1}]),
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
            {**of(k=TEXT), "anyOf": [A, B]},
            [{"k": "s", "a": "s"}, {"k": "s", "b": "s"}],
            [{"k": "s", **BOTH}, {"k": "s", "a": "s", "z": 1}],
        ),
        (
            {
                "oneOf": [
                    {**of(kind={"const": "x"}, a=TEXT), "required": ["kind"]},
                    {**of(kind={"const": "y"}, b=TEXT), "required": ["kind"]},
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
        (of(o=of(i=A)), [{"o": {"i": {"a": "s"}}}], [{"o": {"i": {"z": 1}}}, {"o": {"z": 1}}]),
        ({"additionalProperties": A}, [{"k": {"a": "s"}}], [{"k": {"z": 1}}]),
        (of(a={"type": ["object", "null"], "properties": {"b": TEXT}}), [{"a": None}], [{"z": 1}]),
    ],
)
def test_only_keys_that_the_schema_names_are_let_through(
    schema: Any, welcome: list[Any], invented: list[Any]
) -> None:
    for value in welcome:
        assert accepts(schema, value), value
    for value in invented:
        assert not accepts(schema, value), value


def test_the_schema_itself_is_not_changed() -> None:
    schema = {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {**B, "items": [A]}]}
    before = json.dumps(schema)
    close_objects(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {f"k{i}": {}}} for i in range(4000)]},
        {"$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}},
        {"$defs": {"A": {"$ref": "#/$defs/A", **A}}, "$ref": "#/$defs/A", **B},
    ],
)
def test_a_schema_made_to_grow_is_closed_or_refused_at_once(schema: Any) -> None:
    try:
        made = close_objects(schema)
    except ValueError as error:
        made = {"refused": str(error)}
    assert len(json.dumps(made)) < 4_000_000


def test_one_that_grows_too_far_is_refused_in_words() -> None:
    schema: dict[str, Any] = {"allOf": [{"properties": {f"k{i}": {}}} for i in range(4000)]}
    with pytest.raises(GrammarRejected, match="too many parts or keys"):
        constraint_source(Constraint("json_schema", json.dumps(schema)))


# ------------------------------------------------------------------ at random

KEYS = ["a", "b", "c", "d"]
LEAVES: list[Any] = [TEXT, {"type": "null"}, {"enum": [0, 1]}]
leaves = st.sampled_from(LEAVES)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with some of the ways to say what is in them, one beside the other."""
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
schemas = st.builds(
    lambda root, one, two: {**root, "$defs": {"one": one, "two": two}},
    nested,
    st.builds(lambda p: of(**p), st.dictionaries(st.sampled_from(KEYS), leaves, max_size=2)),
    st.builds(lambda p: of(**p), st.dictionaries(st.sampled_from(KEYS), leaves, max_size=2)),
)
scalars = st.sampled_from(["s", None, 0, 1])
small = st.dictionaries(st.sampled_from([*KEYS, "z"]), scalars, max_size=2)
instances = st.dictionaries(st.sampled_from([*KEYS, "z"]), scalars | small, max_size=3)


def by_the_standard(schema: Any) -> Any:
    """The same closing in JSON Schema's own words: `unevaluatedProperties` sees through all parts.

    It is said once for each value, and not where one of the parts says what else may come.
    """
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in ("properties", "$defs"):
        if name in schema:
            made[name] = {key: by_the_standard(value) for key, value in schema[name].items()}
    for name in ("allOf", "anyOf"):
        if name in schema:
            made[name] = [inside(part) for part in schema[name]]
    if "properties" in schema or "allOf" in schema or "anyOf" in schema:
        made["unevaluatedProperties"] = False
    return made


def inside(part: Any) -> Any:
    """A part of an object: the values in it are closed, it is not, and a definition's own text."""
    made = dict(part)
    if "properties" in part:
        made["properties"] = {key: by_the_standard(v) for key, v in part["properties"].items()}
    return made


def opened(schema: Any, definitions: Any) -> Any:
    """References of parts replaced by what they lead to, so that closing a definition is one thing."""
    if isinstance(schema, list):
        return [opened(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: opened(value, definitions) for key, value in schema.items() if key != "$ref"}
    if isinstance(schema.get("$ref"), str):
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        made["allOf"] = [*made.get("allOf", []), target]
    return made


def standard(schema: Any) -> jsonschema_rs.Draft202012Validator:
    definitions = schema["$defs"]
    root = {key: value for key, value in schema.items() if key != "$defs"}
    return jsonschema_rs.Draft202012Validator(by_the_standard(opened(root, definitions)))


def completed(schema: Any) -> Any:
    """An object with properties is an object, whether its schema says so or not."""
    if isinstance(schema, list):
        return [completed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: completed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.keys() & {"type", "$ref"}:
        made["type"] = "object"
    return made


def mixed(schema: Any) -> bool:
    """Some parts of one object say what else may come and others do not: there is no one reading."""
    text = json.dumps(opened(schema, schema["$defs"]))
    return "additionalProperties" in text and ("allOf" in text or "anyOf" in text)


@settings(max_examples=300, deadline=None)
@given(schemas, st.lists(instances, min_size=1, max_size=8))
def test_closing_means_what_the_standard_calls_unevaluated(schema: Any, values: list[Any]) -> None:
    if mixed(schema):
        return
    ours = jsonschema_rs.Draft202012Validator(close_objects(schema))
    theirs = standard(schema)
    for value in values:
        assert ours.is_valid(value) == theirs.is_valid(value), value


@settings(max_examples=120, deadline=None)
@given(schemas, st.lists(instances, min_size=1, max_size=4))
def test_the_masks_let_through_what_is_valid_and_nothing_else(
    schema: Any, values: list[Any]
) -> None:
    validator = jsonschema_rs.Draft202012Validator(close_objects(completed(schema)))
    for value in values:
        assert accepts(schema, value) == validator.is_valid(value), value


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_what_any_model_could_write_is_valid(schema: Any, seed: int) -> None:
    """A walk along the masks, at random: keys are tried that nobody named."""
    text = walked(schema, random.Random(seed))
    if text is not None:
        validator = jsonschema_rs.Draft202012Validator(close_objects(completed(schema)))
        assert validator.is_valid(json.loads(text)), text


def walked(schema: Any, draw: random.Random) -> str | None:
    walk, data = matcher(schema), bytearray()
    while len(data) < 200:
        bias = walk.compute_logit_bias()
        allowed = [token for token in range(EOS + 1) if bias[token]]
        ends = [token for token in allowed if token in (EOS, ord("}"), ord('"'))]
        plain = [token for token in allowed if token == EOS or 32 < token < 127]
        token = draw.choice(ends if ends and draw.random() < 0.5 else plain or allowed)
        if token == EOS:
            return data.decode("utf-8", "replace")
        data.append(token)
        walk.consume_token(token)
    return None  # a free object goes on for ever
