"""Structured answers of the builtin pair to requests like those of the instructor client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from tests.support.daemons import Home

# pydantic's schema of a model with an enumeration, limits, and another model that may be left out
# (instructor 1.17): no object in it says `additionalProperties`.
PET: dict[str, Any] = {
    "$defs": {
        "Place": {
            "properties": {
                "floor": {"maximum": 9, "minimum": 0, "title": "Floor", "type": "integer"},
                "kind": {"enum": ["flat", "house"], "title": "Kind", "type": "string"},
            },
            "required": ["floor", "kind"],
            "title": "Place",
            "type": "object",
        }
    },
    "properties": {
        "kind": {"enum": ["cat", "dog"], "title": "Kind", "type": "string"},
        "age": {"maximum": 30, "minimum": 0, "title": "Age", "type": "integer"},
        "ok": {"title": "Ok", "type": "boolean"},
        "home": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None},
    },
    "required": ["age", "kind", "ok"],
    "type": "object",
}
FUNCTION = {"name": "Pet", "description": "A pet of somebody.", "parameters": PET}
CHOICE = {"type": "function", "function": {"name": "Pet"}}
WAYS: dict[str, dict[str, Any]] = {
    "TOOLS": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": CHOICE},
    "JSON_SCHEMA": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "Pet", "schema": {**PET, "title": "Pet"}},
        }
    },
    "JSON with a schema": {"response_format": {"type": "json_object", "schema": PET}},
    "llama-server's field": {"json_schema": PET},
}
MESSAGES = [
    {"role": "system", "content": "Extract."},
    {"role": "user", "content": "What is a cat of three years?"},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7}])
def test_the_answer_has_only_keys_of_the_schema(
    real: Home, way: str, sampling: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 400, **WAYS[way], **sampling}
    answer = real.request("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    if way == "TOOLS":
        [call] = choice["message"]["tool_calls"]
        assert (call["function"]["name"], choice["finish_reason"]) == ("Pet", "tool_calls")
        text = call["function"]["arguments"]
    else:
        assert choice["finish_reason"] == "stop"
        text = choice["message"]["content"]
    value = json.loads(text)
    jsonschema_rs.validate(PET, value)
    assert set(value) <= set(PET["properties"])
    assert set(value.get("home") or {}) <= {"floor", "kind"}


def test_a_completion_accepts_a_schema(real: Home) -> None:
    body = {"prompt": "A cat:", "json_schema": PET, "temperature": 0, "n_predict": 300}
    value = json.loads(real.request("POST", "/completion", body).json["content"])
    jsonschema_rs.validate(PET, value)
    assert set(value) <= set(PET["properties"])


def test_beside_tools_the_answer_is_a_call_or_an_object_of_the_schema(real: Home) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 400,
        "temperature": 0,
        "tools": WAYS["TOOLS"]["tools"],
        **WAYS["JSON_SCHEMA"],
    }
    [choice] = real.request("POST", "/v1/chat/completions", body).json["choices"]
    [*calls] = choice["message"].get("tool_calls") or []
    texts = [call["function"]["arguments"] for call in calls] or [choice["message"]["content"]]
    for text in texts[:1]:  # of several the last may be cut off
        jsonschema_rs.validate(PET, json.loads(text))


def test_an_unsupported_schema_is_noted_or_refused_if_strict(real: Home) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    function: dict[str, Any] = {"name": "odd", "parameters": odd}
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4}
    body["tools"] = [{"type": "function", "function": function}]
    response = real.request("POST", "/v1/chat/completions", body)
    assert response.status == 200
    assert "'odd'" in response.json["localspec"]["note"]
    function["strict"] = True
    refused = real.request("POST", "/v1/chat/completions", body)
    assert refused.status == 400
    assert refused.json["error"]["param"] == "tools"
    assert "strict" in refused.json["error"]["message"]
