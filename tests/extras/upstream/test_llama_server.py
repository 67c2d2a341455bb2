"""Requests to llama-server, which has native paths beside OpenAI's, and its answers."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.request import build_request
from localspec.protocol import frames
from localspec.protocol.settings import UpstreamKind
from tests.extras.upstream.asking import CHAT, ask, list_deltas, run_request, send_json, state
from tests.support.upstreams import encode_chat, encode_event, scripted_server

TOKEN = {"id": 7, "token": "a", "bytes": [97], "logprob": -0.5}
LOGPROBS = [{**TOKEN, "top_logprobs": [TOKEN, {**TOKEN, "token": "b", "logprob": -1.0}]}]
KIND: UpstreamKind = "llama-server"
EVERY_KIND = pytest.mark.parametrize("kind", [KIND, "localspec"])


def encode_stream(*pieces: dict[str, Any], **end: Any) -> bytes:
    """Return a stream in the native shape of llama-server."""
    parts = [{"content": "a", "tokens": [7], "stop": False, **piece} for piece in pieces]
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", **end}
    timings = {"prompt_n": 3, "cache_n": 2, "predicted_n": len(pieces)}
    return b"".join(map(encode_event, [*parts, {"timings": timings, **last}]))


def read_answer(
    stream: bytes, request: frames.Generate, kind: UpstreamKind = KIND
) -> tuple[list[frames.Delta], frames.Done, dict[str, Any]]:
    """Return the deltas and the end of an answer, and the request that the server received."""
    with scripted_server(stream=stream) as remote:
        events = run_request(state(remote, kind), request)
    (seen,) = remote.requests
    assert isinstance(events[-1], frames.Done)
    return list_deltas(events), events[-1], {"path": seen.path, **seen.body}


@EVERY_KIND
@pytest.mark.parametrize(
    "prompt", [frames.TextPrompt("x"), frames.TokenPrompt([1, 2]), frames.MixedPrompt(["x", 1])]
)
def test_a_completion_has_its_stop_string_and_token_ids(
    kind: UpstreamKind, prompt: frames.Prompt
) -> None:
    stream = encode_stream({"tokens_predicted": 1}, stop_type="word", stopping_word="END")
    request = frames.Generate(0, prompt, max_tokens=9, stop=["END"], return_tokens=True)
    deltas, done, body = read_answer(stream, request, kind)
    assert (body["path"], body["n_predict"], body["return_tokens"]) == ("/completion", 9, True)
    assert [(delta.text, delta.ids, delta.tokens) for delta in deltas] == [("a", [7], 1)]
    assert (done.finish_reason, done.stop_string) == ("stop", "END")
    assert (done.prompt_tokens, done.completion_tokens) == (5, 1)


def test_other_servers_note_that_token_ids_are_left_out() -> None:
    request = frames.Generate(0, frames.TextPrompt("x"), return_tokens=True)
    assert "'return_tokens'" in build_request(request, KINDS["openai"], "m").note


@EVERY_KIND
@pytest.mark.parametrize("tops", [0, 1, 2])
def test_logprobs_have_the_requested_number_of_alternatives(kind: UpstreamKind, tops: int) -> None:
    """Without alternatives, the server is still asked for one, because zero gives no logprobs."""
    content = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": LOGPROBS}}
    chat = encode_event({"choices": [content]}) + encode_chat()
    native = encode_stream({"completion_probabilities": LOGPROBS})
    texts: list[tuple[frames.Prompt, bytes, str]] = [
        (CHAT, chat, "top_logprobs"),
        (frames.TextPrompt("x"), native, "n_probs"),
        (frames.InfillPrompt("x", "y"), native, "n_probs"),
    ]
    for prompt, stream, name in texts:
        request = frames.Generate(0, prompt, top_logprobs=tops)
        deltas, _, body = read_answer(stream, request, kind)
        assert body[name] == max(tops, 1)
        (token,) = deltas[0].logprobs
        assert (token.id, token.piece, token.logprob, len(token.top)) == (7, b"a", -0.5, tops)


@EVERY_KIND
@pytest.mark.parametrize("prompt", [CHAT, frames.TextPrompt("x"), frames.InfillPrompt("x", "y")])
def test_max_tokens_zero_gives_no_text(kind: UpstreamKind, prompt: frames.Prompt) -> None:
    """The server writes one token all the same, which is dropped."""
    stream = encode_chat("a", finish="length")
    if prompt is not CHAT:
        stream = encode_stream({}, stop_type="limit")
    deltas, done, _ = read_answer(stream, frames.Generate(0, prompt, max_tokens=0), kind)
    assert not deltas
    assert (done.finish_reason, done.completion_tokens, done.timings.predicted_n) == (
        *("length", 0, 0),
    )


@EVERY_KIND
def test_the_thinking_budget_is_sent(kind: UpstreamKind) -> None:
    request = frames.Generate(0, CHAT, thinking=frames.ThinkingLimit(12, []))
    upstream_request = build_request(request, KINDS[kind], "m")
    assert (upstream_request.body["thinking_budget_tokens"], upstream_request.note) == (12, "")


@EVERY_KIND
def test_a_completion_can_be_constrained_to_json(kind: UpstreamKind) -> None:
    constraint = frames.Constraint("json_object", param="response_format")
    request = frames.Generate(0, frames.TextPrompt("x"), constraint=constraint)
    body = build_request(request, KINDS[kind], "m").body
    assert "json_schema" in body or "response_format" in body
    assert body.get("json_schema", {"type": "object"}) == {"type": "object"}


@EVERY_KIND
def test_tools_are_part_of_the_template_and_the_count(kind: UpstreamKind) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = frames.ChatPrompt(CHAT.messages, tools=[tool])
    with scripted_server(answer=send_json(prompt="hi", tokens=[1, 2])) as remote:
        small = frames.ApplyTemplate(0, prompt), frames.CountTokens(0, prompt)
        template, count = ask(state(remote, kind), *small)
    assert (template["prompt"], count["tokens"]) == ("hi", 2)
    rendered = [request.body for request in remote.requests if request.path == "/apply-template"]
    assert [body["tools"] for body in rendered] == [[tool], [tool]]


@EVERY_KIND
@pytest.mark.parametrize("part", ["content", "reasoning_content"])
def test_a_continued_answer_is_not_repeated(kind: UpstreamKind, part: Any) -> None:
    """The server repeats the partial answer unless the request names the part to continue."""
    partial = frames.Message("assistant", "so far")
    prompt = frames.ChatPrompt([*CHAT.messages, partial], continued=part)
    body = build_request(frames.Generate(0, prompt), KINDS[kind], "m").body
    assert body["continue_final_message"] == part
    assert body.get("add_generation_prompt", False) is False
