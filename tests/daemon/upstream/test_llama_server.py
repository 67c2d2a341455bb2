"""llama-server, which has paths of its own beside OpenAI's: what it is asked there, and what it answers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from localspec.daemon.worker.process import Event
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.settings import Upstream, UpstreamKind
from tests.support.upstreams import Seen, event, said, scripted_server, whole

CHAT = frames.ChatPrompt([frames.Message("user", "hi")])
TOKEN = {"id": 7, "token": "a", "bytes": [97], "logprob": -0.5}
TOPS = [{**TOKEN, "top_logprobs": [TOKEN, {**TOKEN, "token": "b", "logprob": -1.0}]}]
KIND: UpstreamKind = "llama-server"
EVERY = pytest.mark.parametrize("kind", [KIND, "localspec"])


def native(*pieces: dict[str, Any], **end: Any) -> bytes:
    """A stream of its own shape."""
    parts = [{"content": "a", "tokens": [7], "stop": False, **piece} for piece in pieces]
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", **end}
    timings = {"prompt_n": 3, "cache_n": 2, "predicted_n": len(pieces)}
    return b"".join(map(event, [*parts, {"timings": timings, **last}]))


def answered(
    stream: bytes, request: frames.Generate, kind: UpstreamKind = KIND
) -> tuple[list[frames.Delta], frames.Done, dict[str, Any]]:
    """What comes of an answer, and what was asked."""

    async def main() -> list[Event]:
        stated = Upstream(upstream=there.url, upstream_model="m", upstream_kind=kind)
        server = UpstreamServer("big", stated)
        events = [event async for event in server.events(request)]
        await server.close()
        return events

    with scripted_server(stream=stream) as there:
        events = asyncio.run(main())
    (seen,) = there.seen
    assert isinstance(events[-1], frames.Done)
    deltas = [event for event in events if isinstance(event, frames.Delta)]
    return deltas, events[-1], {"path": seen.path, **seen.body}


@EVERY
@pytest.mark.parametrize(
    "prompt",
    [
        frames.TextPrompt("x"),
        frames.TokenPrompt([1, 2]),
        frames.MixedPrompt(["x", 1]),
    ],
)
def test_of_a_text_it_says_which_stop_text_came_and_which_tokens(
    kind: UpstreamKind, prompt: frames.Prompt
) -> None:
    stream = native({"tokens_predicted": 1}, stop_type="word", stopping_word="END")
    request = frames.Generate(0, prompt, max_tokens=9, stop=["END"], return_tokens=True)
    deltas, done, sent = answered(stream, request, kind)
    assert (sent["path"], sent["n_predict"], sent["return_tokens"]) == ("/completion", 9, True)
    assert [(delta.text, delta.ids, delta.tokens) for delta in deltas] == [("a", [7], 1)]
    assert (done.finish_reason, done.stop_string) == ("stop", "END")
    assert (done.prompt_tokens, done.completion_tokens) == (5, 1)


def test_tokens_that_another_server_does_not_name_are_left_out_by_name() -> None:
    request = frames.Generate(0, frames.TextPrompt("x"), return_tokens=True)
    assert "'return_tokens'" in build_request(request, KINDS["openai"], "m").note


@EVERY
@pytest.mark.parametrize("tops", [0, 1, 2])
def test_log_probabilities_come_with_as_many_others_as_were_asked_for(
    kind: UpstreamKind, tops: int
) -> None:
    """It has none where none beside the token are asked for."""
    content = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": TOPS}}
    chat = event({"choices": [content]}) + said()
    texts: list[tuple[frames.Prompt, bytes, str]] = [
        (CHAT, chat, "top_logprobs"),
        (frames.TextPrompt("x"), native({"completion_probabilities": TOPS}), "n_probs"),
        (frames.InfillPrompt("x", "y"), native({"completion_probabilities": TOPS}), "n_probs"),
    ]
    for prompt, stream, name in texts:
        request = frames.Generate(0, prompt, top_logprobs=tops)
        deltas, _, sent = answered(stream, request, kind)
        assert sent[name] == max(tops, 1)
        (token,) = deltas[0].logprobs
        assert (token.id, token.piece, token.logprob, len(token.top)) == (7, b"a", -0.5, tops)


@EVERY
@pytest.mark.parametrize("prompt", [CHAT, frames.TextPrompt("x"), frames.InfillPrompt("x", "y")])
def test_a_prompt_that_is_only_to_be_read_has_no_text(
    kind: UpstreamKind, prompt: frames.Prompt
) -> None:
    """It writes a token all the same."""
    stream = said("a", finish="length")
    if prompt is not CHAT:
        stream = native({}, stop_type="limit")
    deltas, done, _ = answered(stream, frames.Generate(0, prompt, max_tokens=0), kind)
    assert not deltas
    assert (done.finish_reason, done.completion_tokens, done.timings.predicted_n) == (
        *("length", 0, 0),
    )


@EVERY
def test_it_is_told_how_long_to_think(kind: UpstreamKind) -> None:
    request = frames.Generate(0, CHAT, thinking=frames.ThinkingLimit(12, []))
    sent = build_request(request, KINDS[kind], "m")
    assert (sent.body["thinking_budget_tokens"], sent.note) == (12, "")


@EVERY
def test_an_object_can_be_asked_for_in_a_text(kind: UpstreamKind) -> None:
    constraint = frames.Constraint("json_object", param="response_format")
    request = frames.Generate(0, frames.TextPrompt("x"), constraint=constraint)
    body = build_request(request, KINDS[kind], "m").body
    assert "json_schema" in body or "response_format" in body
    assert body.get("json_schema", {"type": "object"}) == {"type": "object"}


@EVERY
def test_tools_are_part_of_a_template_and_count(kind: UpstreamKind) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = frames.ChatPrompt(CHAT.messages, tools=[tool])

    def answer(seen: Seen, connection: socket.socket) -> None:
        body = {"prompt": "hi", "tokens": [1, 2]}
        connection.sendall(whole(body, headers="connection: close\r\n"))

    async def main() -> None:
        stated = Upstream(upstream=there.url, upstream_model="m", upstream_kind=kind)
        server = UpstreamServer("big", stated)
        assert (await server.ask(frames.ApplyTemplate(0, prompt)))["prompt"] == "hi"
        assert (await server.ask(frames.CountTokens(0, prompt)))["tokens"] == 2
        await server.close()

    with scripted_server(answer=answer) as there:
        asyncio.run(main())
    rendered = [request.body for request in there.seen if request.path == "/apply-template"]
    assert [each["tools"] for each in rendered] == [[tool], [tool]]


@EVERY
@pytest.mark.parametrize("part", ["content", "reasoning_content"])
def test_an_answer_that_goes_on_is_not_repeated(kind: UpstreamKind, part: Any) -> None:
    """It repeats what was said unless it is told which part goes on."""
    last = frames.Message("assistant", "so far")
    prompt = frames.ChatPrompt([*CHAT.messages, last], continued=part)
    body = build_request(frames.Generate(0, prompt), KINDS[kind], "m").body
    assert body["continue_final_message"] == part
    assert body.get("add_generation_prompt", False) is False
