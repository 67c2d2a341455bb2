"""Fields of a request that its struct does not declare are named, whatever they are called."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from localspec.protocol.reading import BadBody, decode
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
    data = json.dumps(body).encode()
    return find_ignored_fields(data, decode(data, kind))


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


def test_objects_passed_on_to_the_model_are_not_checked() -> None:
    tool = {"type": "function", "x": 1, "function": {"name": "f", "y": 1}}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"z": 1}},
    }
    body = {"messages": MESSAGES, "tools": [tool], "response_format": schema}
    assert list_ignored(ChatRequest, {**body, "chat_template_kwargs": {"x": 1}}) == []


def test_a_field_of_every_message_is_named_once() -> None:
    messages = [{"role": "user", "content": "x", "weight": 1, "refusal": None}] * 500
    assert list_ignored(ChatRequest, {"messages": messages}) == ["messages[0].weight"]


CASES = [
    (kind, name, rule)
    for kind in BASE
    for name, rule in REFUSED[getattr(kind, "refusal_table", "")].items()
    if name not in {field.encode_name for field in msgspec.structs.fields(kind)}
]


def test_every_rule_refuses_by_name_and_accepts_neutral_values(
    subtests: pytest.Subtests,
) -> None:
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
    assert all(rule.reason for rule in FULFILLED_FIELDS.values())


def test_an_unknown_name_with_a_surrogate_is_refused() -> None:
    body = b'{"content": "x", "\\ud800": 1}'
    with pytest.raises(BadBody):
        find_ignored_fields(body, TokenizeRequest("x"))


@given(NAMES.filter(lambda name: is_free(TokenizeRequest, name)), JSON)
def test_requests_that_change_something_refuse_unknown_fields(name: str, value: Any) -> None:
    data = json.dumps({"content": "x", name: value}).encode()
    with pytest.raises(BadBody, match="is not a field of this request"):
        refuse_undeclared(data, decode(data, TokenizeRequest))
