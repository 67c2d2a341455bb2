"""Requests to vLLM, whose field names and defaults differ from OpenAI's, and its answers."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from localspec.errors import InvalidRequest, UpstreamError
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.extras.upstream.asking import (
    CHAT,
    ask,
    encode_text,
    list_deltas,
    run_request,
    send_bytes,
    send_json,
    state,
)
from tests.support.upstreams import ReceivedRequest, encode_event, encode_stream, scripted_server

TEXT = frames.TextPrompt("x")


@pytest.mark.parametrize("stated", [{}, {"upstream_model": "tiny", "upstream_kind": "vllm"}])
@pytest.mark.parametrize(
    ("prompt", "tokens"), [(TEXT, 3), (frames.TokenPrompt([1, 2]), 2), (TEXT, 5000)]
)
def test_a_text_without_a_limit_may_fill_the_context(
    stated: dict[str, Any], prompt: frames.Prompt, tokens: int
) -> None:
    """Without max_tokens vLLM writes 16 tokens, and it refuses more than the context has room for."""

    def answer(seen: ReceivedRequest, connection: socket.socket) -> None:
        tokenized = send_json(tokens=[1] * tokens)
        written = send_bytes(encode_stream(encode_text("a")))
        (tokenized if seen.path == "/tokenize" else written)(seen, connection)

    with scripted_server(answer=answer, context=4096) as remote:
        run_request(Upstream(upstream=remote.url, **stated), frames.Generate(0, prompt))
    request_body = remote.requests[-1].body
    assert request_body.get("max_tokens") == (4096 - tokens if tokens < 4096 else None)


def test_other_servers_note_that_a_text_without_a_limit_may_be_cut() -> None:
    for kind in ("openai", "sglang", "tensorrt-llm"):
        request = build_request(frames.Generate(0, TEXT), KINDS[kind], "m")
        assert "max_tokens" not in request.body
        assert "'max_tokens'" in request.note
        assert not build_request(frames.Generate(0, TEXT, max_tokens=5), KINDS[kind], "m").note
        assert not build_request(frames.Generate(0, CHAT), KINDS[kind], "m").note


def test_a_refusal_inside_the_stream_is_an_invalid_request() -> None:
    """vLLM 0.32 reports an invalid grammar in this form."""
    error = {"message": "Invalid grammar", "type": "BadRequestError", "param": None}
    for code, kind, words in (
        (400, InvalidRequest, r"'big'.*Invalid grammar"),
        (500, UpstreamError, "failed: Invalid grammar"),
    ):
        with (
            scripted_server(stream=encode_event({"error": {**error, "code": code}})) as remote,
            pytest.raises(kind, match=words),
        ):
            run_request(Upstream(upstream=remote.url))


@pytest.mark.parametrize("prompt", [TEXT, CHAT])
def test_token_ids_are_returned(prompt: frames.Prompt) -> None:
    first = encode_event(
        {"choices": [{"text": "a", "delta": {"content": "a"}, "token_ids": [7, 8]}]}
    )
    with scripted_server(stream=first + encode_text("", delta={}, token_ids=[])) as remote:
        request = frames.Generate(0, prompt, max_tokens=9, return_tokens=True)
        events = run_request(Upstream(upstream=remote.url), request)
    assert [token_id for delta in list_deltas(events) for token_id in delta.ids] == [7, 8]
    assert remote.requests[-1].body["return_token_ids"] is True


def send_requests(*requests: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Send small requests; return the answers and the bodies that the server received."""
    with scripted_server(answer=send_json(tokens=[1, 2, 3], prompt="x", count=3)) as remote:
        answers = ask(state(remote), *requests)
    assert {request.path for request in remote.requests} <= {"/tokenize", "/detokenize"}
    return answers, [request.body for request in remote.requests]


def test_tokens_of_a_chat_are_counted_with_its_tools() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = frames.ChatPrompt(CHAT.messages, tools=[tool], template_kwargs={"a": 1})
    answers, bodies = send_requests(frames.CountTokens(0, prompt))
    assert answers == [{"tokens": 3}]
    assert bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (bodies[0]["tools"], bodies[0]["chat_template_kwargs"]) == ([tool], {"a": 1})


def test_unsupported_token_requests_are_refused_by_name() -> None:
    """vLLM always parses markers, and gives pieces as its tokenizer has them: "Ġadd" for " add"."""
    answers, _ = send_requests(frames.Tokenize(0, "x", pieces=False))
    assert answers[0]["tokens"] == [1, 2, 3]
    refused: list[tuple[str, Any]] = [
        ("parse_special", frames.Tokenize(0, "x", parse_special=False, pieces=False)),
        ("with_pieces", frames.Tokenize(0, "x")),
        ("messages", frames.ApplyTemplate(0, CHAT)),
    ]
    for name, request in refused:
        with pytest.raises(InvalidRequest) as caught:
            send_requests(request)
        assert caught.value.param == name


def test_infill_uses_the_markers_of_the_model() -> None:
    """The model's root is looked up once, even if the model and the kind are stated."""
    request = frames.Generate(0, frames.InfillPrompt("before", "after"), max_tokens=4)
    for kind, model in (("auto", ""), ("vllm", "coder")):
        with scripted_server(
            stream=encode_text("a", "length"), models=["coder"], root="/models/Qwen2.5-Coder-7B"
        ) as remote:
            run_request(state(remote, kind, model), request, request)
        filled = [request.body["prompt"] for request in remote.requests if request.body]
        assert filled == ["<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"] * 2
        assert [request.path for request in remote.requests].count("/v1/models") == 1
