"""Log-probabilities, token ids and stop strings through every protocol, from the shipped pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, temporary_home

QUESTION = "What does shutil.copytree do?"
DEPTHS = (0, 1, 4, 8)
Tokens = list[tuple[str, float]]


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    """One daemon with the shipped pair."""
    with temporary_home() as home:
        daemon = RunningDaemon(home)
        yield home
        daemon.stop()


def events(home: Home, path: str, body: dict[str, Any]) -> list[Any]:
    found = home.request("POST", path, {**body, "stream": True})
    assert found.status == 200, found.body
    return [json.loads(each) for each in found.events if each != "[DONE]"]


def chat(home: Home, stream: bool, **asked: Any) -> tuple[str, Tokens]:
    path, messages = "/v1/chat/completions", [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "logprobs": True, **asked}
    if stream:
        choices = [c for each in events(home, path, body) for c in each["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        parts = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
        entries = [entry for part in parts for entry in part]
    else:
        choice = home.request("POST", path, body).json["choices"][0]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


def completions(home: Home, stream: bool, **asked: Any) -> tuple[str, Tokens]:
    path, body = "/v1/completions", {"prompt": "import os\nfor root, dirs, files in os.walk("}
    body |= {"logprobs": 1, **asked}
    if stream:
        choices = [c for each in events(home, path, body) for c in each["choices"]]
    else:
        choices = home.request("POST", path, body).json["choices"]
    text = "".join(choice["text"] for choice in choices)
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    tokens = [token for part in parts for token in part["tokens"]]
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset < len(text)
        assert "\ufffd" in token or (text[offset:] + token).startswith(token[: len(text) - offset])
    values = [value for part in parts for value in part["token_logprobs"]]
    return text, list(zip(tokens, values, strict=True))


def completion(home: Home, stream: bool, **asked: Any) -> tuple[str, Tokens]:
    path, body = "/completion", {"prompt": QUESTION, "n_probs": 1, "return_tokens": True, **asked}
    parts = events(home, path, body) if stream else [home.request("POST", path, body).json]
    text = "".join(part["content"] for part in parts)
    ids = [token for part in parts for token in part["tokens"]]
    assert len(ids) == parts[-1]["tokens_predicted"]  # all of them, also of a stop string
    entries = [entry for part in parts for entry in part.get("completion_probabilities", [])]
    assert [entry["id"] for entry in entries] == ids[: len(entries)]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


def responses(home: Home, stream: bool, **asked: Any) -> tuple[str, Tokens]:
    path = "/v1/responses"
    limit = asked.pop("max_tokens")
    include = ["message.output_text.logprobs"]
    body = {"input": QUESTION, "include": include, "store": False, "max_output_tokens": limit}
    body |= asked
    if stream:
        deltas = [e for e in events(home, path, body) if e["type"] == "response.output_text.delta"]
        text = "".join(delta["delta"] for delta in deltas)
        entries = [entry for delta in deltas for entry in delta["logprobs"]]
    else:
        part = home.request("POST", path, body).json["output"][0]["content"][0]
        text, entries = part["text"], part["logprobs"]
    return text, [(entry["token"], entry["logprob"]) for entry in entries]


PROTOCOLS = [chat, completions, completion, responses]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_tokens_told_are_the_same_with_any_drafts_streamed_or_whole(
    real: Home, protocol: Any
) -> None:
    shared = {"temperature": 0, "max_tokens": 24, "exact": True}
    text, _ = protocol(real, False, **shared)
    for stops in ([], [text[9:14]], [text[15:17], text[22:30]], [text[-3:]]):
        told = [
            protocol(real, stream, **shared, stop=stops, speculative={"depth": depth})
            for depth in DEPTHS
            for stream in (False, True)
        ]
        end = min((text.find(stop) for stop in stops), default=len(text))
        assert told[0][0] == text[:end]
        assert all(each == told[0] for each in told)
        assert "".join(token for token, _ in told[0][1]).startswith(text[:end])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_exact_too_the_tokens_told_are_those_that_begin_in_the_text(
    real: Home, protocol: Any
) -> None:
    for depth in DEPTHS:
        asked = {"temperature": 0, "max_tokens": 24, "speculative": {"depth": depth}}
        text, tokens = protocol(real, False, **asked)
        assert "".join(token for token, _ in tokens) == text
        cut, tokens = protocol(real, False, **asked, stop=[text[9:14]])
        assert cut == text[: text.find(text[9:14])]
        joined = "".join(token for token, _ in tokens)
        assert joined.startswith(cut)
    XX


def test_ollama_tells_the_same_tokens_streamed_and_whole(real: Home) -> None:
    for path, said in (
        ("/api/chat", {"messages": [{"role": "user", "content": QUESTION}]}),
        ("/api/generate", {"prompt": QUESTION}),
    ):
        body = {"model": "builtin", "logprobs": True, "stream": False, **said}
        body["options"] = {"temperature": 0, "num_predict": 24}
        whole = real.request("POST", path, body).json
        text = whole.get("response") or whole["message"]["content"]
        body["options"]["stop"] = [text[9:14]]
        whole = real.request("POST", path, body).json
        lines = real.request("POST", path, {**body, "stream": True}).body.decode().splitlines()
        streamed = [e for line in lines for e in json.loads(line).get("logprobs") or []]
        assert [e["token"] for e in streamed] == [e["token"] for e in whole["logprobs"]]
        cut = whole.get("response") or whole["message"]["content"]
        assert "".join(e["token"] for e in streamed).startswith(cut)
