"""Tests of the decoding of requests: what is refused, and with which message."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import openapi
from localspec.protocol import pairs, requests
from localspec.protocol.reading import BadBody, decode
from localspec.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    InfillRequest,
    NativeCompletionRequest,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def read_refusal(fields: dict[str, Any] | bytes) -> BadBody:
    body = fields if isinstance(fields, bytes) else json.dumps({"messages": MESSAGES, **fields})
    with pytest.raises(BadBody) as caught:
        decode(body if isinstance(body, bytes) else body.encode(), ChatRequest)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "must be a number, not a string"),
        ("temperature", -0.1, "must be at least 0"),
        ("temperature", 1e9, "must be at most 100"),
        ("top_k", 2**40, "must be at most 2147483647"),
        ("top_k", 1.5, "must be a whole number, not a number with a fraction"),
        ("top_p", 1.01, "must be at most 1"),
        ("min_p", -1, "must be at least 0"),
        ("max_tokens", -3, "must be at least -2"),
        ("n_predict", -3, "must be at least -2"),
        ("frequency_penalty", 3, "must be at most 2"),
        ("repeat_penalty", 0, "must be at least 0.001"),
        ("repeat_penalty", 1e-300, "must be at least 0.001"),
        ("n", 5, "must be at most 4"),
        ("n", True, "must be a whole number, not true or false"),
        ("seed", 2**64, "must be at most 9223372036854775807"),
        ("stream", 1, "must be true or false, not a whole number"),
        ("stop", 5, "must be a string or a list, not a whole number"),
        ("stop", ["x"] * 17, "must have at most 16 items"),
        ("top_logprobs", 21, "must be at most 20"),
    ],
)
def test_a_field_of_the_wrong_type_or_size_is_named_with_its_limit(
    field: str, value: Any, message: str
) -> None:
    error = read_refusal({field: value})
    assert error.param == field
    assert error.message == f"'{field}' {message}."


def test_a_stop_string_has_a_maximal_length() -> None:
    error = read_refusal({"stop": ["x" * 1024, "x" * 1025]})
    assert error.param == "stop[1]"
    assert "at most 1024 characters" in error.message


MINIMAL_BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {
        "messages": MESSAGES,
        "stream_options": {},
        "response_format": {"type": "json_schema", "json_schema": {}},
        "tools": [{"function": {"name": "f"}}],
        "tool_choice": {"function": {"name": "f"}},
        "prediction": {"content": "x"},
        "speculative": {},
        "localspec": {},
    },
    CompletionRequest: {"prompt": "x"},
    requests.PromptObject: {"prompt_string": "x"},
    InfillRequest: {"input_extra": [{"text": "x"}]},
    NativeCompletionRequest: {"prompt": "x"},
    requests.LoadRequest: {},
    requests.TokenizeRequest: {"content": "x"},
    requests.ControlRequest: {"id": "chatcmpl-1", "action": "reasoning_end"},
    requests.StreamLookup: {"conversation_ids": ["conv-1"]},
    requests.DetokenizeRequest: {"tokens": [1]},
    requests.TemplateRequest: {"messages": MESSAGES, "tools": [{"function": {"name": "f"}}]},
    pairs.PullRequest: {"name": "x"},
    pairs.AddRequest: {"name": "x", "target": "/x"},
    pairs.CollectRequest: {},
    pairs.DraftsRequest: {"target": "x"},
    pairs.DiskRequest: {},
}


def smallest_value(kind: msgspec.inspect.Type) -> Any:
    """Return the smallest value that `kind` allows."""
    match kind:
        case msgspec.inspect.StructType(fields=fields):
            return {
                field.encode_name: smallest_value(field.type) for field in fields if field.required
            }
        case msgspec.inspect.ListType(item_type=item, min_length=count):
            return [smallest_value(item) for _ in range(count or 0)]
        case msgspec.inspect.UnionType(types=[first, *_]) | msgspec.inspect.Metadata(type=first):
            return smallest_value(first)
        case msgspec.inspect.LiteralType(values=[first, *_]):
            return first
        case msgspec.inspect.StrType():
            return "x"
        case msgspec.inspect.IntType(ge=low):
            return low or 0
    return {}


# Requests of other protocols, with their required fields.
MINIMAL_BODIES |= {
    kind: smallest_value(msgspec.inspect.type_info(kind))
    for kind in openapi.REQUESTS
    if kind not in MINIMAL_BODIES
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, field.encode_name)
        for kind, body in MINIMAL_BODIES.items()
        for field in msgspec.structs.fields(kind)
        if field.required
    ],
)
def test_null_in_a_required_field_means_missing(kind: type[msgspec.Struct], name: str) -> None:
    errors = []
    for body in (
        {**MINIMAL_BODIES[kind], name: None},
        {k: v for k, v in MINIMAL_BODIES[kind].items() if k != name},
    ):
        with pytest.raises(BadBody) as caught:
            decode(json.dumps(body).encode(), kind)
        errors.append((caught.value.message, caught.value.param))
    assert errors == [(f"'{name}' is missing.", name)] * 2


def optional_paths(kind: Any, body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field that `body`, a `kind`, may omit, however deep."""
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next((k for k in kind.types if isinstance(k, CONTAINERS)), None)
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.ListType) and isinstance(body, list):
        for index, item in enumerate(body):
            yield from optional_paths(kind.item_type, item, (*path, index))
    elif isinstance(kind, msgspec.inspect.StructType) and isinstance(body, dict):
        for field in kind.fields:
            if not field.required:
                yield (*path, field.encode_name)
            if field.encode_name in body:
                yield from optional_paths(
                    field.type, body[field.encode_name], (*path, field.encode_name)
                )


CONTAINERS = (msgspec.inspect.StructType, msgspec.inspect.ListType, msgspec.inspect.Metadata)
NULLABLE = [
    (kind, path)
    for kind, body in MINIMAL_BODIES.items()
    for path in optional_paths(msgspec.inspect.type_info(kind), body)
]


def test_null_in_an_optional_field_means_absent(subtests: pytest.Subtests) -> None:
    for kind, path in NULLABLE:
        with subtests.test(kind=str(kind), path=str(path)):
            *above, name = path
            requests_read = []
            for change in ({name: None}, {}):
                whole = body = json.loads(json.dumps(MINIMAL_BODIES[kind]))
                for step in above:
                    body = body[step]
                body.pop(name, None)
                body.update(change)
                requests_read.append(decode(json.dumps(whole).encode(), kind))
            assert requests_read[0] == requests_read[1]


def test_every_optional_field_is_tested_with_null() -> None:
    assert len(NULLABLE) > 150
    assert (ChatRequest, ("tools", 0, "function", "description")) in NULLABLE
    assert (ChatRequest, ("speculative", "depth")) in NULLABLE


def integer_paths(kind: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the path of every integer field of a request, with a valid value."""
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    match kind:
        case msgspec.inspect.IntType(ge=low, le=high):
            yield path, min(max(low or 0, 2), high or 2)
        case msgspec.inspect.UnionType(types=types) if not any(
            isinstance(member, msgspec.inspect.FloatType) for member in types
        ):
            for member in types:
                yield from integer_paths(member, path)
        case msgspec.inspect.ListType(item_type=item):
            yield from integer_paths(item, (*path, 0))
        case msgspec.inspect.StructType(fields=fields) if len(path) < 6:
            for field in fields:
                yield from integer_paths(field.type, (*path, field.encode_name))


def with_value(kind: type[msgspec.Struct], path: tuple[Any, ...], value: object) -> bytes:
    """Return a request with `value` at this path, and with the required fields beside it."""
    body = json.loads(json.dumps(MINIMAL_BODIES[kind]))
    inside = body
    for name, deeper in zip(path, [*path[1:], None], strict=True):
        child: Any = value if deeper is None else [] if deeper == 0 else {}
        if isinstance(inside, list):
            inside[:] = [child]
            inside = child
        elif isinstance(inside.get(name), type(child)) and deeper is not None:
            inside = inside[name]
        else:
            inside[name] = inside = child
    return json.dumps(body).encode()


def is_valid(body: bytes, kind: type[msgspec.Struct]) -> bool:
    with contextlib.suppress(BadBody):
        return bool(decode(body, kind)) or True
    return False


# Only paths that give a valid request: others are in an object with more required fields.
INTEGERS = [
    (kind, path, value)
    for kind in MINIMAL_BODIES
    for path, value in integer_paths(msgspec.inspect.type_info(kind))
    if is_valid(with_value(kind, path, value), kind)
]


def test_every_integer_field_is_tested_with_a_float() -> None:
    assert len(INTEGERS) > 100
    tried = {(kind, path) for kind, path, _ in INTEGERS}
    assert {(ChatRequest, ("seed",)), (ChatRequest, ("max_tokens",))} < tried
    assert (requests.DetokenizeRequest, ("tokens", 0)) in tried


def test_an_integer_may_be_written_as_a_float(subtests: pytest.Subtests) -> None:
    for kind, path, value in INTEGERS:
        with subtests.test(kind=str(kind), path=str(path), value=str(value)):
            expected = decode(with_value(kind, path, value), kind)
            assert decode(with_value(kind, path, float(value)), kind) == expected
            with pytest.raises(BadBody):
                decode(with_value(kind, path, value + 0.5), kind)


def test_many_integers_may_be_written_as_floats_in_one_request() -> None:
    body = {"prompt": [1.0, 2, 3e0], "max_tokens": 5.0, "seed": 7.0, "top_k": 1e2, "n": 1.0}
    body |= {"n_probs": 3.0, "repeat_last_n": -1.0, "logit_bias": [[5.0, 1.0], [6, -1.0]]}
    request = decode(json.dumps(body).encode(), NativeCompletionRequest)
    assert (request.prompt, request.max_tokens) == ([1, 2, 3], 5)
    assert (request.seed, request.top_k) == (7, 100)
    assert (request.n_probs, request.repeat_last_n) == (3, -1)
    assert request.logit_bias == [(5, 1.0), (6, -1.0)]
    for wrong in ("1", 1.5, 2.0**60, True, None):
        with pytest.raises(BadBody):
            decode(json.dumps({"tokens": [1.0, wrong]}).encode(), requests.DetokenizeRequest)


def test_the_schema_of_a_tool_stays_unchanged() -> None:
    parameters = {"type": "object", "properties": {"x": {"minimum": 1.0, "default": 2.0}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 3.0}
    request = decode(json.dumps(body).encode(), ChatRequest)
    assert request.tools is not None
    shown = request.tools[0].template_object()["function"]["parameters"]
    assert json.dumps(shown) == json.dumps(parameters)


def number_limits(kind: type) -> dict[str, list[tuple[Any, Any]]]:
    """Return the limits of every field of a request that takes one or more numbers."""
    limits: dict[str, list[tuple[Any, Any]]] = {}
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        kinds = [field.type]
        while kinds:
            inner = kinds.pop()
            if isinstance(inner, msgspec.inspect.Metadata):
                kinds.append(inner.type)
            elif isinstance(inner, msgspec.inspect.UnionType):
                kinds += inner.types
            elif isinstance(inner, msgspec.inspect.DictType):
                kinds.append(inner.value_type)  # a list of pairs has the same limits
            elif isinstance(inner, msgspec.inspect.IntType | msgspec.inspect.FloatType):
                limits.setdefault(field.name, []).append((inner.ge, inner.le))
    return limits


REQUESTS = [ChatRequest, CompletionRequest, NativeCompletionRequest, InfillRequest]


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_number_has_limits_and_is_refused_beyond_them(kind: type) -> None:
    fields = number_limits(kind)
    assert {"temperature", "repeat_penalty", "dry_base", "logit_bias", "seed"} <= set(fields)
    base = {"messages": MESSAGES, "prompt": "x"}
    for name, limits in fields.items():
        assert None not in [limit for pair in limits for limit in pair], name
        ((low, high),) = limits
        below = low - 1 if isinstance(low, int) else math.nextafter(low, -math.inf)
        above = high + 1 if isinstance(high, int) else math.nextafter(high, math.inf)
        for value in (low, high):
            field_value = {"7": value} if name == "logit_bias" else value
            decode(json.dumps({**base, name: field_value}).encode(), kind)
        for value, word in ((below, low), (above, high)):
            field_value = {"7": value} if name == "logit_bias" else value
            with pytest.raises(BadBody) as caught:
                decode(json.dumps({**base, name: field_value}).encode(), kind)
            assert (caught.value.param or "").startswith(name)
            message = caught.value.message
            assert str(word).removesuffix(".0") in message or "finite" in message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"messages": [{"role": 5}]}', "messages[0].role", "must be a string"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role", "is missing"),
        (b'{"temperature": 1}', "messages", "is missing"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 4}]}]}',
            "messages[0].content[0].text",
            "must be a string",
        ),
        (b'{"response_format": {"type": "yaml"}}', "response_format.type", "'yaml'"),
        (b'{"speculative": {"depth": "deep"}}', "speculative.depth", "'deep'"),
        (b'{"speculative": {"depth": 65}}', "speculative.depth", "at most 64"),
        (b'{"logit_bias": {"4": 1, "5": 101}}', 'logit_bias["5"]', "at most 100"),
    ],
)
def test_fields_inside_other_fields_are_named_by_their_path(
    body: bytes, param: str, message: str
) -> None:
    error = read_refusal(body)
    assert error.param == param
    assert message in error.message
    assert error.message.startswith(f"'{param}'")


@given(st.binary(max_size=8), st.integers(0, 2))
def test_a_refused_field_may_stand_beside_anything(junk: bytes, deep: int) -> None:
    """The decoder skips it, and so does the search for the key of the refused field."""
    # No field begins with "~".
    neighbour = json.dumps(f"~{junk.decode('latin-1')}", ensure_ascii=False).encode("latin-1")
    neighbour += b": " + b"[" * (500 * deep) + b"]" * (500 * deep) if deep else b": 1"
    error = read_refusal(b'{"messages": [], ' + neighbour + b', "logit_bias": {"5": 101}}')
    assert error.param is None or error.param.startswith("logit_bias[")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_refused_by_name(value: str) -> None:
    error = read_refusal(f'{{"dry_base": 1, "temperature": {value}}}'.encode())
    assert error.param == "temperature"
    assert "must be a finite number" in error.message


def test_a_nested_nan_is_refused_by_path() -> None:
    assert read_refusal(b'{"logit_bias": {"7": NaN}}').param == "logit_bias.7"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (rb'{"messages": [{"role": "user", "content": "a\ud800b"}]}', "messages[0].content", "sur"),
        (rb'{"messages": [{"role": "user", "content": "a\u0000b"}]}', "messages[0].content", "NUL"),
        (rb'{"messages": [{"role": "user", "content": ""}], "x\ud800": 1}', "x?", "surrogate"),
        (b'{"model": "\xff"}', None, "not valid UTF-8"),
        (b'{"x": ' + b'{"a":' * 10_000 + b"}" * 10_001, None, "nested too deeply"),
        (b'{"unknown": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, "nested too deeply"),
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b"[]", None, "must be an object, not a list"),
        (json.dumps({"messages": MESSAGES}).encode() + b" x", None, "not valid JSON"),
    ],
)
def test_invalid_text_and_invalid_json_are_refused(
    body: bytes, param: str | None, message: str
) -> None:
    error = read_refusal(body)
    assert error.param == param
    assert message in error.message


def test_a_backslash_before_u0000_is_text() -> None:
    body = rb'{"messages": [{"role": "user", "content": "the escape \\u0000"}]}'
    assert decode(body, ChatRequest).messages[0].content == "the escape \\u0000"


def test_unknown_fields_are_ignored() -> None:
    body = json.dumps({"messages": MESSAGES, "user": 5, "metadata": {"a": [1]}}).encode()
    assert decode(body, ChatRequest).messages[0].role == "user"


@pytest.mark.parametrize(
    "prompt", ["text", ["a", "b"], [1, 2], [[1], [2]], [1, "a", 2], [[1, "a"], "b"]]
)
def test_a_completion_accepts_every_form_of_prompt(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    assert decode(body, CompletionRequest).prompt == prompt


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
FIELDS = st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__) | st.text(), JSON)


@settings(max_examples=50)
@given(FIELDS)
def test_any_json_is_accepted_or_refused_with_a_sentence(fields: dict[str, Any]) -> None:
    try:
        decode(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatRequest)
    except BadBody as error:
        message = error.message
    else:
        message = "."
    assert message.encode().endswith(b".")


# The fields before `options` are invalid, too.
REFUSED = b'{"system": 1, "prompt": 1, "messages": 1, "options": '


@given(
    st.binary(),
    st.sampled_from([b"", REFUSED]),
    JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["num_predict", "top_k", "seed", "temperature", "stop"]),
        st.floats() | st.integers() | st.integers().map(float),
    ).map(lambda options: json.dumps(options).encode()),
    st.sampled_from([b"", b"}"]),
)
def test_any_bytes_are_accepted_or_refused_with_a_sentence(
    body: bytes, begun: bytes, value: bytes, end: bytes
) -> None:
    for kind in openapi.REQUESTS:
        for tried in (body, begun + body, begun + value + end, b'{"options": ' + value + end):
            with contextlib.suppress(BadBody):
                decode(tried, kind)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 100),
            "top_k": st.integers(-1, 2**31 - 1),
            "top_p": st.floats(0, 1),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.text(st.characters(exclude_characters="\0", codec="utf-8")),
            "max_tokens": st.integers(0, 2**31 - 1),
        },
    )
)
def test_values_within_their_limits_arrive_unchanged(fields: dict[str, Any]) -> None:
    request = decode(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatRequest)
    assert {name: getattr(request, name) for name in fields} == fields


def test_every_request_can_be_encoded_again() -> None:
    request = decode(json.dumps({"messages": MESSAGES}).encode(), ChatRequest)
    assert msgspec.json.decode(msgspec.json.encode(request))["messages"][0]["role"] == "user"
