"""vLLM, whose own words and defaults are not OpenAI's: what it is asked, and what it answers."""

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
from tests.support.upstreams import Seen, event, scripted_server, streamed, whole

TEXT = frames.TextPrompt("x")
CHAT = frames.ChatPrompt([frames.Message("user", "hi")])


@pytest.mark.parametrize("stated", [{}, {"upstream_model": "tiny", "upstream_kind": "vllm"}])
@pytest.mark.parametrize(
    ("prompt", "tokens"), [(TEXT, 3), (frames.TokenPrompt([1, 2]), 2), (TEXT, 5000)]
)
def test_a_text_without_a_limit_may_fill_the_context(
    stated: dict[str, Any], prompt: frames.Prompt, tokens: int
) -> None:
    """Where none is said it writes 16 tokens, and it refuses more than there is room for."""

    def answer(seen: Seen, connection: socket.socket) -> None:
        if seen.path == "/tokenize":
            body = {"tokens": [1] * tokens}
            connection.sendall(whole(body, headers="connection: close\r\n"))
        else:
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            connection.sendall(streamed(event({"choices": [choice]}) + event(b"[DONE]")))

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=there.url, **stated))
        [each async for each in server.events(frames.Generate(0, prompt))]
        await server.close()

    with scripted_server(answer=answer, context=4096) as there:
        asyncio.run(main())
    sent = there.seen[-1].body
    assert sent.get("max_tokens") == (4096 - tokens if tokens < 4096 else None)


def test_elsewhere_nobody_knows_where_a_text_without_a_limit_ends() -> None:
    for kind in ("openai", "sglang", "tensorrt-llm"):
        sent = build_request(frames.Generate(0, TEXT), KINDS[kind], "m")
        assert "max_tokens" not in sent.body
        assert "'max_tokens'" in sent.note
        assert not build_request(frames.Generate(0, TEXT, max_tokens=5), KINDS[kind], "m").note
        assert not build_request(frames.Generate(0, CHAT), KINDS[kind], "m").note


def test_what_it_refuses_once_its_stream_has_begun_is_the_requests_fault() -> None:
    """As vLLM 0.32 says it of a grammar."""
    error = {"message": "Invalid grammar", "type": "BadRequestError", "param": None, "code": 400}

    async def main() -> None:
        server = UpstreamServer("big", Upstream(upstream=there.url))
        try:
            [each async for each in server.events(frames.Generate(0, CHAT))]
        finally:
            await server.close()

    with scripted_server(stream=event({"error": error})) as there:
        with pytest.raises(InvalidRequest, match=r"'big'.*Invalid grammar"):
            asyncio.run(main())
        there.stream = event({"error": {**error, "code": 500}})
        with pytest.raises(UpstreamError, match="failed: Invalid grammar"):
            asyncio.run(main())


@pytest.mark.parametrize("prompt", [TEXT, CHAT])
def test_it_names_the_tokens_of_a_text(prompt: frames.Prompt) -> None:
    chunk = {"index": 0, "text": "a", "delta": {"content": "a"}, "token_ids": [7, 8]}
    stream = event({"choices": [chunk]}) + event(
        {"choices": [{**chunk, "text": "", "delta": {}, "token_ids": [], "finish_reason": "stop"}]}
    )

    async def main() -> list[int]:
        server = UpstreamServer("big", Upstream(upstream=there.url))
        request = frames.Generate(0, prompt, max_tokens=9, return_tokens=True)
        events = [each async for each in server.events(request)]
        await server.close()
        return [each for delta in events if isinstance(delta, frames.Delta) for each in delta.ids]

    with scripted_server(stream=stream + event(b"[DONE]")) as there:
        assert asyncio.run(main()) == [7, 8]
        assert there.seen[-1].body["return_token_ids"] is True


def told(*requests: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The answers to small requests, and what was sent for them."""

    def answer(seen: Seen, connection: socket.socket) -> None:
        body = {"tokens": [1, 2, 3], "prompt": "x", "count": 3}
        connection.sendall(whole(body, headers="connection: close\r\n"))

    async def main() -> list[dict[str, Any]]:
        stated = Upstream(upstream=there.url, upstream_model="m", upstream_kind="vllm")
        server = UpstreamServer("big", stated)
        try:
            return [await server.ask(each) for each in requests]
        finally:
            await server.close()

    with scripted_server(answer=answer) as there:
        found = asyncio.run(main())
    assert {each.path for each in there.seen} <= {"/tokenize", "/detokenize"}
    return found, [each.body for each in there.seen]


def test_it_counts_a_chat_with_its_tools() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = frames.ChatPrompt(CHAT.messages, tools=[tool], template_kwargs={"a": 1})
    found, sent = told(frames.CountTokens(0, prompt))
    assert found == [{"tokens": 3}]
    assert sent[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert (sent[0]["tools"], sent[0]["chat_template_kwargs"]) == ([tool], {"a": 1})


def test_what_it_cannot_say_of_tokens_is_refused_by_its_name() -> None:
    """Markers are tokens to it, and a token's text is as its tokenizer has it: "Ġadd" for " add"."""
    found, _ = told(frames.Tokenize(0, "x", pieces=False))
    assert found[0]["tokens"] == [1, 2, 3]
    refused: list[tuple[str, Any]] = [
        ("parse_special", frames.Tokenize(0, "x", parse_special=False, pieces=False)),
        ("with_pieces", frames.Tokenize(0, "x")),
        ("messages", frames.ApplyTemplate(0, CHAT)),
    ]
    for name, request in refused:
        with pytest.raises(InvalidRequest) as caught:
            told(request)
        assert caught.value.param == name


def test_it_fills_in_with_its_models_markers_whatever_that_is_called_there() -> None:
    """Also where all that it can be asked for is stated; it is looked for once."""

    async def main(**stated: str) -> None:
        server = UpstreamServer("big", Upstream(upstream=there.url, **stated))  # type: ignore[arg-type]
        for _ in range(2):
            request = frames.Generate(0, frames.InfillPrompt("before", "after"), max_tokens=4)
            [each async for each in server.events(request)]
        await server.close()

    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    stream = event({"choices": [choice]}) + event(b"[DONE]")
    for stated in ({}, {"upstream_model": "coder", "upstream_kind": "vllm"}):
        with scripted_server(
            stream=stream, models=["coder"], root="/models/Qwen2.5-Coder-7B"
        ) as there:
            asyncio.run(main(**stated))
        filled = [each.body["prompt"] for each in there.seen if each.body]
        assert filled == ["<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"] * 2
        assert [each.path for each in there.seen].count("/v1/models") == 1
