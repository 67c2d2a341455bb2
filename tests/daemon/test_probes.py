"""What clients ask before they ask a question, and names under which some ask it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.daemons import Home


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "say x"}]}),
        ("completions", {"prompt": "say x"}),
        ("responses", {"input": "say x"}),
    ],
)
def test_the_same_is_served_without_the_prefix(api: Home, path: str, body: Any) -> None:
    one, other = (api.request("POST", each, body) for each in (f"/v1/{path}", f"/{path}"))
    assert one.status == other.status == 200
    assert one.json.keys() == other.json.keys()
    for known, probed in (("/v1/models", "/models"), ("/health", "/v1/health")):
        assert api.request("GET", known).json == api.request("GET", probed).json


def test_a_model_is_told_alone_with_its_context_and_what_it_can_do(api: Home) -> None:
    listed = api.request("GET", "/v1/models").json["data"]
    assert [api.request("GET", f"/v1/models/{each['id']}").json for each in listed] == listed
    builtin = next(each for each in listed if each["id"] == "builtin")
    assert builtin["context_length"] == builtin["meta"]["n_ctx"] <= builtin["meta"]["n_ctx_train"]
    assert "completion" in builtin["capabilities"]
    missing = api.request("GET", "/v1/models/no-such-pair")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("say x", "say xx"), ([115, 97, 121], "say115 97 121"), (["say x", "say y"], "say xx")],
)
def test_an_answer_may_begin_with_its_prompt(api: Home, prompt: Any, text: str) -> None:
    answer = api.request("POST", "/v1/completions", {"prompt": prompt, "echo": True})
    assert answer.json["choices"][0]["text"] == text
    stream = api.request(
        "POST", "/v1/completions", {"prompt": prompt, "echo": True, "stream": True}
    )
    chunks = [json.loads(event) for event in stream.events[:-1]]
    said = [choice["text"] for c in chunks for choice in c["choices"] if choice["index"] == 0]
    assert "".join(said) == text
    refused = api.request(
        "POST", "/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 1, "suffix": "y"}
    )
    assert (refused.status, refused.error["param"]) == (400, "suffix")


def test_several_completions_by_llama_servers_name(api: Home) -> None:
    found = api.request("POST", "/completion", {"prompt": "say x", "n_cmpl": 3}).json
    assert [each["content"] for each in found] == ["x"] * 3
    body = {
        "input_prefix": "!echo",
        "prompt": "!echo",
        "samplers": ["top_k", "infill"],
        "n_cmpl": 3,
    }
    sent = [json.loads(each["content"]) for each in api.request("POST", "/infill", body).json]
    assert [each["sampling"]["temperature"] for each in sent] == [0.0, 1.0, 1.0]
