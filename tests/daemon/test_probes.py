"""Requests with which clients probe a server, and alternative paths of endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.daemons import Home
from tests.support.extras import needs


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "say x"}]}),
        ("completions", {"prompt": "say x"}),
        pytest.param("responses", {"input": "say x"}, marks=needs("responses")),
    ],
)
def test_paths_work_without_the_v1_prefix(api: Home, path: str, body: Any) -> None:
    with_prefix, without_prefix = (
        api.request("POST", target, body) for target in (f"/v1/{path}", f"/{path}")
    )
    assert with_prefix.status == without_prefix.status == 200
    assert with_prefix.json.keys() == without_prefix.json.keys()
    for known_path, alias in (("/v1/models", "/models"), ("/health", "/v1/health")):
        assert api.request("GET", known_path).json == api.request("GET", alias).json


def test_a_single_model_is_returned_with_its_capabilities(api: Home) -> None:
    listed = api.request("GET", "/v1/models").json["data"]
    assert [api.request("GET", f"/v1/models/{model['id']}").json for model in listed] == listed
    builtin = next(model for model in listed if model["id"] == "builtin")
    assert builtin["context_length"] == builtin["meta"]["n_ctx"] <= builtin["meta"]["n_ctx_train"]
    assert "completion" in builtin["capabilities"]
    missing = api.request("GET", "/v1/models/no-such-pair")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("say x", "say xx"), ([115, 97, 121], "say115 97 121"), (["say x", "say y"], "say xx")],
)
def test_echo_prepends_the_prompt(api: Home, prompt: Any, text: str) -> None:
    answer = api.request("POST", "/v1/completions", {"prompt": prompt, "echo": True})
    assert answer.json["choices"][0]["text"] == text
    stream = api.request(
        "POST", "/v1/completions", {"prompt": prompt, "echo": True, "stream": True}
    )
    chunks = [json.loads(event) for event in stream.events[:-1]]
    texts = [choice["text"] for c in chunks for choice in c["choices"] if choice["index"] == 0]
    assert "".join(texts) == text
    refused = api.request(
        "POST", "/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 1, "suffix": "y"}
    )
    assert (refused.status, refused.error["param"]) == (400, "suffix")


def test_n_cmpl_gives_several_completions(api: Home) -> None:
    answers = api.request("POST", "/completion", {"prompt": "say x", "n_cmpl": 3}).json
    assert [answer["content"] for answer in answers] == ["x"] * 3
    body = {
        "input_prefix": "!echo",
        "prompt": "!echo",
        "samplers": ["top_k", "infill"],
        "n_cmpl": 3,
    }
    frames = [json.loads(answer["content"]) for answer in api.request("POST", "/infill", body).json]
    assert [frame["sampling"]["temperature"] for frame in frames] == [0.0, 1.0, 1.0]
