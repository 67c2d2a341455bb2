"""OpenAI's older form of tools: functions, function_call and messages of the role "function"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localspec.chat.tools import convert_functions
from localspec.errors import InvalidRequest
from localspec.protocol.reading import decode
from localspec.protocol.requests import ChatRequest, ToolChoice
from tests.support.daemons import Home, scripted_home

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = 'raw <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    """Run a daemon whose template marks the calls of Hermes."""
    with scripted_home("--template", "{% if tools %}<tool_call>{% endif %}") as home:
        yield home


def translate(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest)
    convert_functions(request)
    return request


def test_a_call_is_returned_in_the_form_of_the_request(api: Home) -> None:
    answer = api.chat(CALL, functions=[FUNCTION]).json["choices"][0]
    assert answer["finish_reason"] == "function_call"
    assert answer["message"]["function_call"]["name"] == "f"
    assert json.loads(answer["message"]["function_call"]["arguments"]) == {"a": 1}
    assert "tool_calls" not in answer["message"]
    newer = api.chat(CALL, tools=[{"type": "function", "function": FUNCTION}]).json["choices"][0]
    assert newer["finish_reason"] == "tool_calls"
    assert newer["message"]["tool_calls"][0]["function"] == answer["message"]["function_call"]


def test_a_stream_has_the_older_form_too(api: Home) -> None:
    events = api.chat(CALL, functions=[FUNCTION], stream=True).events
    choices = [json.loads(event)["choices"] for event in events if event != "[DONE]"]
    deltas = [choice[0]["delta"] for choice in choices if choice]
    assert not any("tool_calls" in delta for delta in deltas)
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls[0]["name"] == "f"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": 1}
    assert [choice[0]["finish_reason"] for choice in choices if choice][-1] == "function_call"


@pytest.mark.parametrize(
    ("choice", "expected"), [(None, None), ("auto", None), ("none", "none"), ({"name": "f"}, "f")]
)
def test_function_call_becomes_tool_choice(choice: Any, expected: str | None) -> None:
    request = translate(functions=[FUNCTION], function_call=choice)
    tool_choice = request.tool_choice
    assert (
        tool_choice.function.name if isinstance(tool_choice, ToolChoice) else tool_choice
    ) == expected
    assert [tool.function.name for tool in request.tools or []] == ["f"]


def test_a_history_in_the_older_form_is_converted() -> None:
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "12"},
        {"role": "assistant", "function_call": {"name": "g", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "g", "content": "13"},
    ]
    messages = translate(messages=history).messages
    assert [message.role for message in messages] == "user assistant tool assistant tool".split()
    calls = [message.tool_calls[0] for message in messages if message.tool_calls]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert [call["id"] for call in calls] == [
        message.tool_call_id for message in messages if message.role == "tool"
    ]
    assert all(len(call["id"]) == 9 for call in calls)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [FUNCTION], "tools": [{"function": FUNCTION}]}, "functions"),
        (
            {"functions": [FUNCTION], "function_call": "auto", "tool_choice": "auto"},
            "function_call",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "function_call": {"name": "f"},
                        "tool_calls": [{"function": FUNCTION}],
                    }
                ]
            },
            "messages[0].function_call",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        translate(**fields)
    assert refused.value.param == param
