"""Fields of a request that its struct does not declare are named, whatever they are called."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.extras.anthropic.request import chat_request
from localspec.extras.anthropic.wire import CountTokensRequest, MessagesRequest
from localspec.extras.ollama.wire import OllamaChatRequest, OllamaEmbedRequest
from localspec.extras.responses.wire import ResponsesRequest
from localspec.protocol.fields import (
    FULFILLED_FIELDS,
    MAX_NAMED,
    MAX_PATH,
    REFUSED,
    WITHOUT_EFFECT,
    IgnoredFields,
    find_ignored_fields,
    refuse_undeclared,
)
from localspec.protocol.reading import BadBody, decode_body
from localspec.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    InfillRequest,
    NativeCompletionRequest,
    RerankRequest,
    TemplateRequest,
    TokenizeRequest,
)

MESSAGES = [{"role": "user", "content": "x"}]
BASE: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 1},
    CountTokensRequest: {"messages": MESSAGES},
    OllamaChatRequest: {"messages": MESSAGES},
    OllamaEmbedRequest: {"input": "x"},
    EmbeddingRequest: {"input": "x"},
    RerankRequest: {"query": "x", "documents": ["x"]},
    NativeCompletionRequest: {"prompt": "x"},
    InfillRequest: {"prompt": "x"},
    TemplateRequest: {"messages": MESSAGES},
    TokenizeRequest: {"content": "x"},
}
KINDS = st.sampled_from(list(BASE))
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=150)
JSON = st.recursive(
    st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.text(st.characters(codec="ascii", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def list_ignored(kind: type[msgspec.Struct], body: dict[str, Any]) -> IgnoredFields:
    request, value = decode_body(json.dumps(body).encode(), kind)
    return find_ignored_fields(value, request)


def is_free(kind: type[msgspec.Struct], name: str) -> bool:
    """Return whether neither the tables nor the struct know this name."""
    declared = {field.encode_name for field in msgspec.structs.fields(kind)}
    return name not in declared and name not in REFUSED[getattr(kind, "refusal_table", "")]


@settings(max_examples=300)
@given(KINDS, st.dictionaries(NAMES, JSON, min_size=1, max_size=9))
def test_any_unknown_field_is_named(kind: type[msgspec.Struct], unknown: dict[str, Any]) -> None:
    unknown = {name: value for name, value in unknown.items() if is_free(kind, name)}
    ignored = list_ignored(kind, {**BASE[kind], **unknown})
    assert len(ignored) <= len(unknown)
    for name in unknown:
        assert any(path == name or path.rstrip("…") == name[: MAX_PATH - 1] for path in ignored)


@settings(max_examples=100)
@given(st.integers(1, 400))
def test_a_long_list_of_ignored_fields_is_cut_with_a_count(count: int) -> None:
    ignored = list_ignored(
        ChatRequest, {"messages": MESSAGES, **{f"x{n}": n for n in range(count)}}
    )
    assert len(ignored) == min(count, MAX_NAMED)
    if count > MAX_NAMED:
        assert ignored[-1] == f"and {count - MAX_NAMED + 1} more"
        assert ignored[-2] == f"x{MAX_NAMED - 2}"


@pytest.mark.parametrize(
    ("kind", "extra", "path"),
    [
        (ChatRequest, {"stream_options": {"x": 1}}, "stream_options.x"),
        (ChatRequest, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        (ChatRequest, {"speculative": {"x": 1}}, "speculative.x"),
        (ChatRequest, {"localspec": {"x": 1}}, "localspec.x"),
        (ChatRequest, {"messages": [*MESSAGES, {**MESSAGES[0], "x": 1}]}, "messages[1].x"),
        (ChatRequest, {"structured_outputs": {"x": 1}}, "structured_outputs.x"),
        (MessagesRequest, {"thinking": {"type": "adaptive", "x": 1}}, "thinking.x"),
        (MessagesRequest, {"output_config": {"x": 1}}, "output_config.x"),
        (MessagesRequest, {"tool_choice": {"type": "auto", "x": 1}}, "tool_choice.x"),
        (OllamaChatRequest, {"options": {"x": 1}}, "options.x"),
        (ResponsesRequest, {"reasoning": {"x": 1}}, "reasoning.x"),
        (ResponsesRequest, {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        (ChatRequest, {"messages[0].refusal": ""}, "messages[0].refusal"),
        (ChatRequest, {"response_format.json_schema.strict": True}, "response_format.json_schema.strict"),
    ],
)  # fmt: skip
def test_fields_of_inner_objects_are_named_by_their_path(
    kind: type[msgspec.Struct], extra: dict[str, Any], path: str
) -> None:
    assert list_ignored(kind, {**BASE[kind], **extra}) == [path]


@pytest.mark.parametrize(
    ("thread", "paths"),
    [
        ({"type": "create"}, []),
        ({"type": "continue", "previous_message_id": "msg_1"}, []),
        ({"type": "create", "previous_message_id": "msg_1"}, ["thread.previous_message_id"]),
        ({"previous_message_id": "msg_1", "x": 1, "type": "continue"}, ["thread.x"]),
    ],
)
def test_a_variant_is_recognised_by_its_tag(thread: dict[str, Any], paths: list[str]) -> None:
    assert list_ignored(MessagesRequest, {**BASE[MessagesRequest], "thread": thread}) == paths


def test_what_is_free_form_is_not_checked() -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"z": 1}},
    }
    function = {"name": "f", "parameters": {"y": {"z": 1}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": function}],
        "response_format": schema,
        "chat_template_kwargs": {"x": 1},
        "documents": [{"x": 1}],
    }
    assert list_ignored(ChatRequest, body) == []


PICTURE = "data:image/png;base64,aGk="
TEXT = {"type": "text", "text": "x"}
INPUT_TEXT = {"type": "input_text", "text": "x"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"index": 0, "name": "f", "arguments": {}}
OBJECT_CALL = {"id": "c", "type": "function", "function": CALLED}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


# Bodies with every kind of object that a request may have.
RICH: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (
        ChatRequest,
        {
            "messages": [
                {"role": "system", "content": [TEXT]},
                user(
                    {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}},
                    {"type": "file", "file": {"filename": "a", "file_data": "b"}},
                ),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": SCHEMA_FORMAT,
            "stream_options": {"include_usage": True},
            "prediction": {"type": "content", "content": [TEXT]},
            "speculative": {"enabled": True},
            "localspec": {"kind": "chat"},
            "structured_outputs": {"regex": "x"},
        },
    ),
    (TemplateRequest, {"messages": [user(TEXT)]}),
    (CompletionRequest, {"prompt": [{"prompt_string": "x"}, "y"]}),
    (CompletionRequest, {"prompt": {"prompt_string": "x"}}),
    (NativeCompletionRequest, {"prompt": [{"prompt_string": ["x", 1]}]}),
    (InfillRequest, {"input_extra": [{"text": "x", "filename": "y"}]}),
    (EmbeddingRequest, {"input": {"content": [TEXT]}}),
    (EmbeddingRequest, {"input": [{"prompt_string": "x"}]}),
    (RerankRequest, {"query": "x", "documents": [{"text": "x"}, "y"]}),
    (
        OllamaChatRequest,
        {
            "messages": [{"role": "assistant", "tool_calls": [OBJECT_CALL]}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "options": {"seed": 1},
        },
    ),
    (
        MessagesRequest,
        {
            "max_tokens": 9,
            "system": [{**TEXT, "citations": []}],
            "messages": [
                user(
                    {**TEXT, "cache_control": {"type": "ephemeral"}},
                    {"type": "document", "source": {"type": "content", "content": [TEXT]}},
                    {"type": "search_result", "source": "x", "title": "x", "content": [TEXT]},
                ),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {
                            **{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
                            "caller": {"type": "direct"},
                        },
                    ],
                },
                user({"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT]}),
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124"}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "thread": {"type": "create"},
        },
    ),
    (
        ResponsesRequest,
        {
            "input": [
                user(INPUT_TEXT, {"type": "input_image", "image_url": PICTURE, "detail": "auto"}),
                {
                    **{"type": "message", "role": "assistant", "status": "completed"},
                    "content": [
                        {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
                    ],
                },
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [INPUT_TEXT]},
                {
                    **{"type": "additional_tools", "role": "developer"},
                    "tools": [{"type": "custom", "name": "j"}],
                },
                {"type": "shell_call", "call_id": "d", "action": {"commands": []}},
                {"type": "shell_call_output", "call_id": "d", "output": [], "max_output_length": 9},
            ],
            "tools": [
                FUNCTION,
                {"type": "custom", "name": "g", "format": {"type": "text"}},
                {"type": "namespace", "name": "h", "tools": [{**FUNCTION, "name": "i"}]},
                {"type": "shell", "environment": {"type": "local"}},
            ],
            "tool_choice": {
                **{"type": "allowed_tools", "mode": "auto"},
                "tools": [{"type": "function", "name": "f"}],
            },
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        },
    ),
]
FREE_FORM = {"parameters", "schema", "arguments", "input_schema", "cache_control", "caller"}
FREE_FORM |= {"action", "environment"}


def find_objects(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the objects in a body that are not free-form, with their paths."""
    if isinstance(value, list):
        members = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        members = [
            (f"{path}.{name}" if path else name, member)
            for name, member in value.items()
            if name not in FREE_FORM and (name != "input" or isinstance(member, list) or member)
        ]
    else:
        return []
    own = [(path, value)] if isinstance(value, dict) else []
    return own + [found for inner, member in members for found in find_objects(member, inner)]


def list_all_ignored(kind: type[msgspec.Struct], body: dict[str, Any]) -> list[str]:
    """Return the ignored fields, also those that a protocol names when it translates a request."""
    request, value = decode_body(json.dumps(body).encode(), kind)
    ignored = find_ignored_fields(value, request)
    if isinstance(request, MessagesRequest):
        chat_request(request, ignored)
    return ignored


@pytest.mark.parametrize(("kind", "body"), RICH)
def test_a_known_field_is_not_named(kind: type[msgspec.Struct], body: dict[str, Any]) -> None:
    assert list_all_ignored(kind, body) == []


@settings(max_examples=300)
@given(st.sampled_from(RICH), st.data())
def test_an_unknown_field_of_any_object_is_named(
    rich: tuple[type[msgspec.Struct], dict[str, Any]], data: st.DataObject
) -> None:
    kind, body = rich[0], json.loads(json.dumps(rich[1]))
    path, found = data.draw(st.sampled_from(find_objects(body)))
    name = data.draw(NAMES.filter(lambda name: name not in found and is_free(kind, name)))
    found[f"x{name}"] = data.draw(JSON)
    expected = f"{path}.x{name}" if path else f"x{name}"
    shown = expected if len(expected) <= MAX_PATH else f"{expected[: MAX_PATH - 1]}…"
    assert list_all_ignored(kind, body) == [shown]


def test_a_field_of_every_message_is_named_once() -> None:
    messages = [{"role": "user", "content": "x", "weight": 1, "refusal": None}] * 500
    assert list_ignored(ChatRequest, {"messages": messages}) == ["messages[0].weight"]


def test_a_field_is_named_where_it_asks_for_something() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": detail}}
        for detail in ("auto", "high", "low")
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert list_ignored(ChatRequest, body) == ["messages[0].content[1].image_url.detail"]


CASES = [
    (kind, name, rule)
    for kind in BASE
    for name, rule in REFUSED[getattr(kind, "refusal_table", "")].items()
    if name not in {field.encode_name for field in msgspec.structs.fields(kind)}
]


def test_every_rule_refuses_by_name_and_accepts_neutral_values(subtests: pytest.Subtests) -> None:
    for kind, name, rule in CASES:
        with subtests.test(kind=str(kind), name=str(name), rule=str(rule)):
            with pytest.raises(BadBody) as refused:
                list_ignored(kind, {**BASE[kind], name: [{"anything": 0.5}]})
            assert refused.value.message == f"'{name}' is not supported: {rule.reason}."
            assert refused.value.param == name
            for value in (*rule.neutral, None):
                assert list_ignored(kind, {**BASE[kind], name: value}) == []


def test_the_tables_name_existing_fields_and_requests() -> None:
    kinds = {kind.__name__: kind for kind in BASE}
    for name, rules in WITHOUT_EFFECT.items():
        assert set(rules) <= set(kinds[name].__struct_fields__)
    assert all(rule.reason for table in REFUSED.values() for rule in table.values())
    assert all(rule.reason for table in FULFILLED_FIELDS.values() for rule in table.values())


def test_an_unknown_name_with_a_surrogate_is_refused() -> None:
    body = b'{"content": "x", "\\ud800": 1}'
    with pytest.raises(BadBody):
        decode_body(body, TokenizeRequest)


@given(NAMES.filter(lambda name: is_free(TokenizeRequest, name)), JSON)
def test_requests_that_change_something_refuse_unknown_fields(name: str, value: Any) -> None:
    data = json.dumps({"content": "x", name: value}).encode()
    with pytest.raises(BadBody, match="is not a field of this request"):
        refuse_undeclared(json.loads(data), TokenizeRequest("x"))
