"""Arguments of a call reach the client of each protocol as they were meant, whatever escapes they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemons import Home, scripted_home

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# The text of a string in JSON, and what it means. Half of a surrogate pair is U+FFFD in an object.
SPELLINGS = {
    r"M\u00e1laga": "Málaga",
    r"\u5317\u4EAC": "北京",
    r"\ud83d\ude00": "😀",
    r"https:\/\/a\/b": "https://a/b",
    r"\"\\\b\f\n\r\t\u001b[0m": '"\\\b\f\n\r\t\x1b[0m',
    r"half \ud83d": "half \ud83d",
    r"\ude00 half": "\ude00 half",
}
NAMED = {"name": "weather", "parameters": SCHEMA}
WEATHER = {"type": "function", "function": NAMED}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"tools": [WEATHER]}),
    "responses": ("/v1/responses", {"tools": [{"type": "function", **NAMED}]}),
    "anthropic": (
        "/v1/messages",
        {"tools": [{"name": "weather", "input_schema": SCHEMA}], "max_tokens": 500},
    ),
    "ollama": ("/api/chat", {"tools": [WEATHER]}),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with scripted_home("--template", "{% if tools %}<tool_call>{% endif %}") as home:
        yield home


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("protocol", BODIES)
def test_arguments_with_escapes_are_exact(served: Home, protocol: str, spelling: str) -> None:
    path, body = BODIES[protocol]
    call = (
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{spelling}"}}}}\n</tool_call>'
    )
    question = f"raw {call}"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    asked = {"input": question} if protocol == "responses" else asked
    whole = served.request("POST", path, {**asked, **body, "stream": False})
    assert whole.status == 200, whole.body
    meant = {"city": SPELLINGS[spelling]}
    decoded = {"city": re.sub("[\ud800-\udfff]", "\ufffd", SPELLINGS[spelling])}
    expected = decoded if protocol in ("anthropic", "ollama") else meant
    assert read_arguments(protocol, json.loads(whole.body)) == expected
    streamed = served.request("POST", path, {**asked, **body, "stream": True})
    assert streamed.status == 200, streamed.body
    expected = decoded if protocol == "ollama" else meant
    assert read_streamed(protocol, streamed.body.decode()) == expected


def read_arguments(protocol: str, answer: Any) -> Any:
    match protocol:
        case "openai":
            [call] = answer["choices"][0]["message"]["tool_calls"]
            return json.loads(call["function"]["arguments"])
        case "responses":
            [item] = [item for item in answer["output"] if item["type"] == "function_call"]
            return json.loads(item["arguments"])
        case "anthropic":
            [block] = [block for block in answer["content"] if block["type"] == "tool_use"]
            return block["input"]
        case _:
            [call] = answer["message"]["tool_calls"]
            return call["function"]["arguments"]


def read_streamed(protocol: str, body: str) -> Any:
    lines = [line.removeprefix("data: ") for line in body.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if protocol == "ollama":
        [calls] = [e["message"]["tool_calls"] for e in events if e["message"].get("tool_calls")]
        return calls[0]["function"]["arguments"]
    parts: list[str] = []
    for event in events:
        if protocol == "openai":
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    parts.append(call["function"].get("arguments") or "")
        elif protocol == "responses" and event["type"] == "response.function_call_arguments.delta":
            parts.append(event["delta"])
        elif protocol == "anthropic" and event["type"] == "content_block_delta":
            parts.append(event["delta"].get("partial_json", ""))
    return json.loads("".join(parts))
