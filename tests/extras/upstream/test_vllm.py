"""Requests to vLLM, whose field names and defaults differ from OpenAI's, and its answers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from localspec.errors import InvalidRequest, UpstreamError
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.support.upstreams import (
    ReceivedRequest,
    encode_event,
    encode_response,
    encode_stream,
    scripted_server,
)

TEXT = frames.TextPrompt("x")
CHAT = frames.ChatPrompt([frames.Message("user", "hi")])


@pytest.mark.parametrize("stated", [{}, {"upstream_model": "tiny", "upstream_kind": "vllm"}])
@pytest.mark.parametrize(
    ("prompt", "tokens"), [(TEXT, 3), (frames.TokenPrompt([1, 2]), 2), (TEXT, 5000)]
)
def test_a_text_without_a_limit_may_fill_the_context(
    stated: dict[str, Any], prompt: frames.Prompt, tokens: int
) -> None:
    """Without max_tokens vLLM writes 16 tokens, and it refuses more than the context has room for."""

    def answer(seen: ReceivedRequest, connection: socket.socket) -> None:
        if seen.path == "/tokenize":
            body = {"tokens": [1] * tokens}
            connection.sendall(encode_response(body, headers="connection: close\r\n"))
        else:
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            connection.sendall(
                encode_stream(encode_event({"choices": [choice]}) + encode_event(b"[DONE]"))
            )

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=remote.url, **stated))
        [event async for event in server.events(frames.Generate(0, prompt))]
        await server.close()

    with scripted_server(answer=answer, context=4096) as remote:
        asyncio.run(main())
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
    error = {"message": "Invalid grammar", "type": "BadRequestError", "param": None, "code": 400}

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=remote.url))
        try:
            [event async for event in server.events(frames.Generate(0, CHAT))]
        finally:
            await server.close()

    with scripted_server(stream=encode_event({"error": error})) as remote:
        with pytest.raises(InvalidRequest, match=r"'big'.*Invalid grammar"):
            asyncio.run(main())
        remote.stream = encode_event({"error": {**error, "code": 500}})
        with pytest.raises(UpstreamError, match="failed: Invalid grammar"):
            asyncio.run(main())


@pytest.mark.parametrize("prompt", [TEXT, CHAT])
def test_token_ids_are_returned(prompt: frames.Prompt) -> None:
    chunk = {"index": 0, "text": "a", "delta": {"content": "a"}, "token_ids": [7, 8]}
    stream = encode_event({"choices": [chunk]}) + encode_event(
        {"choices": [{**chunk, "text": "", "delta": {}, "token_ids": [], "finish_reason": "stop"}]}
    )

    async def main() -> list[int]:
        server = UpstreamServer("big", Upstream(upstream=remote.url))
        request = frames.Generate(0, prompt, max_tokens=9, return_tokens=True)
        events = [event async for event in server.events(request)]
        await server.close()
        return [
            token_id
            for delta in events
            if isinstance(delta, frames.Delta)
            for token_id in delta.ids
        ]

    with scripted_server(stream=stream + encode_event(b"[DONE]")) as remote:
        assert asyncio.run(main()) == [7, 8]
        assert remote.requests[-1].body["return_token_ids"] is True


def send_requests(*requests: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Send small requests; return the answers and the bodies that the server received."""

    def answer(seen: ReceivedRequest, connection: socket.socket) -> None:
        body = {"tokens": [1, 2, 3], "prompt": "x", "count": 3}
        connection.sendall(encode_response(body, headers="connection: close\r\n"))

    async def main() -> list[dict[str, Any]]:
        stated = Upstream(upstream=remote.url, upstream_model="m", upstream_kind="vllm")
        server = UpstreamServer("big", stated)
        try:
            return [await server.ask(request) for request in requests]
        finally:
            await server.close()

    with scripted_server(answer=answer) as remote:
        answers = asyncio.run(main())
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

    async def main(**stated: str) -> None:
        server = UpstreamServer("big", Upstream(upstream=remote.url, **stated))  # type: ignore[arg-type]
        for _ in range(2):
            request = frames.Generate(0, frames.InfillPrompt("before", "after"), max_tokens=4)
            [event async for event in server.events(request)]
        await server.close()

    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    stream = encode_event({"choices": [choice]}) + encode_event(b"[DONE]")
    for stated in ({}, {"upstream_model": "coder", "upstream_kind": "vllm"}):
        with scripted_server(
            stream=stream, models=["coder"], root="/models/Qwen2.5-Coder-7B"
        ) as remote:
            asyncio.run(main(**stated))
        filled = [request.body["prompt"] for request in remote.requests if request.body]
        assert filled == ["<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"] * 2
        assert [request.path for request in remote.requests].count("/v1/models") == 1
