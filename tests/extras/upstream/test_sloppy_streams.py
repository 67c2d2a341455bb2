"""Streams of servers that follow OpenAI's shape loosely: one answer, however it is written, or an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import UpstreamError
from localspec.extras.upstream.connection import ResponseLines, UpstreamConnection
from localspec.extras.upstream.dialects import KINDS
from localspec.extras.upstream.reply import UpstreamReply, parse_events
from localspec.extras.upstream.request import UpstreamRequest
from localspec.protocol import frames, pieces
from localspec.protocol.settings import Upstream
from tests.support.daemons import temporary_home
from tests.support.upstreams import encode_event, encode_response, encode_stream, scripted_server

Call = tuple[str, str, dict[str, Any]]  # id, name, arguments
Part = dict[str, Any]


@dataclass
class Lines:
    """The lines of a response that has arrived whole."""

    data: bytes
    are_events: bool = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        *lines, last = self.data.split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if last:
            yield last.removesuffix(b"\r")


@dataclass
class Reading:
    thought: str
    text: str
    calls: list[Call]
    finish: str
    tokens: int


def read(data: bytes, *, are_events: bool = True, max_tokens: int | None = None) -> Reading:
    """Return what a response says. Checks that no part of a call comes after the next one has begun."""
    connection = UpstreamConnection("big", Upstream(upstream="http://127.0.0.1:1"))
    sent = UpstreamRequest("chat", "", {} if max_tokens is None else {"max_tokens": max_tokens})
    reply = UpstreamReply(connection, KINDS["openai"], sent, time.monotonic())

    async def collect() -> list[frames.Delta]:
        deltas: list[frames.Delta] = []
        marked = False
        async for chunk in parse_events(connection, cast(ResponseLines, Lines(data, are_events))):
            if marked := chunk is None:
                break
            deltas += reply.parse_chunk(chunk)
        return [*deltas, *reply.end(marked=marked)]

    deltas = asyncio.run(collect())
    calls: list[list[str]] = []
    thoughts = ""
    for piece in (piece for delta in deltas for piece in delta.pieces):
        if isinstance(piece, pieces.Text):
            thoughts += piece.text if piece.kind == "reasoning" else ""
            continue
        if isinstance(piece, pieces.Call):
            calls.append([piece.id, piece.name, ""])
        else:
            calls[-1][2] += piece.text
        assert piece.index == len(calls) - 1
    return Reading(
        thoughts,
        "".join(delta.text for delta in deltas),
        [(call_id, name, json.loads(arguments)) for call_id, name, arguments in calls],
        reply.finish,
        reply.completion_tokens,
    )


def encode_choices(*deltas: Part, finish: object = None, key: str = "delta") -> bytes:
    chunks = [{"choices": [{"index": 0, key: delta}]} for delta in deltas]
    return b"".join(
        map(encode_event, [*chunks, {"choices": [{"delta": {}, "finish_reason": finish}]}])
    )


def encode_calls(*lists: list[Part], finish: str = "tool_calls") -> bytes:
    return encode_choices(*({"tool_calls": parts} for parts in lists), finish=finish)


STRINGS = st.text('ab{}[]"\\: ,\n«é', max_size=8)
ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}), st.dictionaries(STRINGS, st.one_of(STRINGS, st.integers(), st.none()), min_size=1)
)


@dataclass(frozen=True)
class Answer:
    thought: str
    text: str
    calls: list[Call]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    calls = draw(st.lists(st.tuples(st.sampled_from(["f", "go", "look"]), ARGUMENTS), max_size=4))
    return Answer(
        draw(STRINGS),
        # A text whose beginning does not come again, or a `message` might repeat it.
        draw(st.one_of(st.just(""), st.text("ab{}\n é", max_size=9).map("^".__add__))),
        [(f"c{number}", *call) for number, call in enumerate(calls)],
    )


def cut(draw: st.DrawFn, text: str) -> list[str]:
    ends = draw(st.lists(st.integers(0, len(text)), max_size=4).map(sorted))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@st.composite
def streams(draw: st.DrawFn, answer: Answer) -> tuple[bytes, bool]:
    """Draw a response with this answer, in a dialect that leaves no doubt, and whether it has events."""
    whole = draw(st.sampled_from(["no", "no", "one event", "json"]))
    key = "message" if whole != "no" else draw(st.sampled_from(["delta", "delta", "message"]))
    reasoning = draw(st.sampled_from(["reasoning_content", "reasoning"]))
    parts: list[Part] = [{"role": "assistant", "content": draw(st.sampled_from(["", None]))}]
    parts += [{reasoning: piece} for piece in cut(draw, answer.thought)]
    parts += [{"content": piece} for piece in cut(draw, answer.text)]
    parts += draw(calls_in_parts(answer.calls, whole=whole != "no"))
    blank = draw(st.sampled_from([None, ""]))
    finish = draw(st.sampled_from(["stop", "tool_calls", "eos", "end_turn", "STOP", "tool_use"]))
    usage = {"completion_tokens": 5, "prompt_tokens": 3}
    if whole != "no":
        message: Part = {"content": answer.text or None, reasoning: answer.thought}
        message["tool_calls"] = [call for part in parts for call in part.get("tool_calls", [])]
        body = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
        data = json.dumps(body, indent=draw(st.sampled_from([None, 1]))).encode()
        if whole == "json":
            return data, False
        return encode_event(body) + draw(st.sampled_from([b"", encode_event(b"[DONE]")])), True
    deltas = [{"index": 0, key: part, "finish_reason": blank} for part in parts]
    last = {key: {}, "finish_reason": finish}
    events: list[object] = [{"choices": [choice]} for choice in [*deltas, last]]
    events.append(
        {"usage": usage, **draw(st.sampled_from([{"choices": []}, {"choices": None}, {}]))}
    )
    events += draw(st.sampled_from([[], [b"[DONE]"], [b"[DONE] "]]))
    keep_alive = st.sampled_from([{}, {"type": "ping"}, {"object": "keepalive", "choices": []}])
    for at in draw(st.lists(st.integers(0, len(events) - 1), max_size=2)):
        events.insert(at, draw(keep_alive))
    data = b"".join(map(encode_event, events))
    if draw(st.booleans()):
        data = data.replace(b"\n", b"\r\n")
    return data[: len(data) - draw(st.sampled_from([0, 1, 2]))], True


@st.composite
def calls_in_parts(draw: st.DrawFn, calls: list[Call], *, whole: bool) -> list[Part]:
    numbering = draw(st.sampled_from(["index", "zero", "null", "none"]))
    marks = draw(st.sampled_from(["every", "first", "blank"]))  # where the id stands
    later_name = draw(st.sampled_from(["none", "blank", "again"]))
    id_first = not whole and draw(st.booleans())
    written: list[list[Part]] = []
    for number, call in enumerate(calls):
        mark: Part = {"index": {"index": number}, "zero": {"index": 0}, "null": {"index": None}}
        written.append([])
        for position, part in enumerate(draw(one_call(call, whole=whole, id_first=id_first))):
            part.update(mark.get(numbering, {}))
            if position and marks != "every":
                part |= {"id": draw(st.sampled_from([None, ""]))} if marks == "blank" else {}
            else:
                part["id"] = call[0]
            if position and "name" not in part["function"] and later_name != "none":
                part["function"]["name"] = {"blank": "", "again": call[1]}[later_name]
            written[-1].append(part)
    if whole or draw(st.booleans()):
        return [{"tool_calls": [part for parts in written for part in parts]}]
    lists = [[part] for parts in written for part in parts]
    if numbering == "index" or marks == "every":  # each part says which call it belongs to
        lists = [[parts.pop(0)] for parts in written[:1]]
        for at, parts in enumerate(written[1:], 1):  # calls begin in their order
            for rest in [*written[:at], parts][:: draw(st.sampled_from([1, -1]))]:
                lists += [
                    [rest.pop(0)] for _ in range(draw(st.integers(int(rest is parts), len(rest))))
                ]
        lists += [[part] for parts in draw(st.permutations(written)) for part in parts]
    return [{"tool_calls": parts} for parts in lists]


@st.composite
def one_call(draw: st.DrawFn, call: Call, *, whole: bool, id_first: bool) -> list[Part]:
    _, name, arguments = call
    if not arguments:
        nothing = [
            {},
            {"arguments": None},
            {"arguments": ""},
            {"arguments": {}},
            {"arguments": "{}"},
            {"arguments": "null"},
        ]
        functions: list[Part] = [draw(st.sampled_from(nothing))]
    elif draw(st.booleans()):
        functions = [{"arguments": arguments}]
    else:
        text = json.dumps(arguments, ensure_ascii=draw(st.booleans()))
        functions = [{"arguments": piece} for piece in ([text] if whole else cut(draw, text))]
    functions[0] = {"name": name, **functions[0]}
    heads: list[Part] = [{"arguments": ""}, {"name": ""}, {}]
    functions[:0] = [draw(st.sampled_from(heads))] * id_first
    return [{"function": {**function}} for function in functions]


@given(st.data())
def test_an_answer_is_the_same_in_every_dialect(data: st.DataObject) -> None:
    answer = data.draw(answers())
    response, are_events = data.draw(streams(answer))
    expected = Reading(answer.thought, answer.text, answer.calls, "stop", 5)
    assert read(response, are_events=are_events) == expected


@given(ARGUMENTS.filter(bool), ARGUMENTS.filter(bool), st.data())
def test_mixed_parts_without_a_mark_are_refused(
    one: dict[str, Any], two: dict[str, Any], data: st.DataObject
) -> None:
    """Two calls are open under one index, and a part does not say which one it continues."""
    texts = [json.dumps(arguments) for arguments in (one, two)]
    ends = [data.draw(st.integers(1, len(text) - 1)) for text in texts]
    begun: list[Part] = [
        {"id": name, "function": {"name": name, "arguments": text[:end]}}
        for name, text, end in zip("fg", texts, ends, strict=True)
    ]
    rest: list[Part] = [
        {"function": {"arguments": text[end:]}} for text, end in zip(texts, ends, strict=True)
    ]
    index: Part = data.draw(st.sampled_from([{}, {"index": 0}, {"index": None}]))
    stream = encode_calls(*([part | index] for part in [*begun, *data.draw(st.permutations(rest))]))
    with pytest.raises(UpstreamError, match="does not say which call it belongs to"):
        read(stream)


def part(index: int | None = 0, call_id: str = "", name: str = "", arguments: Any = None) -> Part:
    return {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}


AMBIGUOUS: dict[str, tuple[bytes, str]] = {
    "another id without a name": (
        encode_calls([part(0, "a", "f", "{")], [part(0, "b", "", "}")]),
        "a call changes its id",
    ),
    "one id under two indexes": (
        encode_calls([part(0, "a", "f", "{")], [part(1, "a", "", "}")]),
        "two calls have the same id",
    ),
    "a name in parts, or two calls": (
        encode_calls([part(0, "a", "get_")], [part(0, "", "weather")]),
        "a call changes its name",
    ),
    "one call or two of one name": (
        encode_calls([part(None, "", "f")], [part(None, "", "f", "{}")]),
        "a name comes twice",
    ),
    "two objects in one call": (
        encode_calls([part(0, "a", "f", '{"q":1}')], [part(0, "", "", '{"q":2}')]),
        "go on after their end",
    ),
    "arguments twice": (
        encode_calls([part(0, "a", "f", {"q": 1})], [part(0, "a", "f", {"q": 1})]),
        "go on after their end",
    ),
    "no name": (encode_calls([part(0, "a", "", "{}")]), "a call has no name"),
    "a call that never began": (
        encode_calls([part(0, "a", "f", "{")], [part(1, "", "", "}")]),
        "a call has no name",
    ),
    "arguments as a list": (encode_calls([part(0, "a", "f", [1])]), "neither a text nor an object"),
    "an index that is no number": (
        encode_calls([{**part(0, "a", "f"), "index": "x"}]),
        "'index' of a call is not a number",
    ),
    "an unknown end": (
        encode_choices({"content": "x"}, finish="because"),
        "'because' is not known",
    ),
    "an end that is no text": (encode_choices({"content": "x"}, finish=1), "is not a text"),
    "an aborted answer": (encode_choices({"content": "x"}, finish="abort"), "off .'abort'."),
    "a withheld answer": (encode_choices({"content": "x"}, finish="SAFETY"), "withheld"),
    "no end": (encode_choices({"content": "x"}), "was cut off"),
    "no end, and nothing but blank ones before": (
        encode_choices({"content": "x"}, finish=""),
        "was cut off",
    ),
    "only events of another kind": (encode_event({"response": "x"}), "was cut off"),
    "two answers": (
        encode_event({"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1}]}),
        "several answers",
    ),
    "two answers in turn": (
        encode_event({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        + encode_event({"choices": [{"index": 1, "delta": {"content": "b"}}]}),
        "several answers",
    ),
    "all of the text again": (
        encode_choices({"content": "one"}, {"content": "one two"}, key="message", finish="stop"),
        "repeats the text",
    ),
    "an error without its key": (
        encode_event({"object": "error", "message": "out of memory"}),
        "failed: out of memory",
    ),
    "an end without a call's name": (
        encode_choices({"tool_calls": [{}]}, finish="tool_calls"),
        "a call has no name",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_stream_is_refused_by_name(name: str) -> None:
    stream, words = AMBIGUOUS[name]
    with pytest.raises(UpstreamError, match=words) as caught:
        read(stream + (encode_event(b"[DONE]") if "cut off" not in words else b""))
    assert "'big'" in caught.value.message


def test_names_without_ids_begin_calls_where_the_one_before_is_complete() -> None:
    lists = [[part(0, "", "f", '{"q":1}')], [part(0, "", "f", '{"q":')], [part(0, "", "", "2}")]]
    lists.append([part(0, "", "g", {"q": 3}), part(0, "", "g"), part(0, "", "h")])
    calls = [(name, arguments) for _, name, arguments in read(encode_calls(*lists)).calls]
    assert calls == [("f", {"q": 1}), ("f", {"q": 2}), ("g", {"q": 3}), ("h", {})]


def test_calls_with_one_id_get_ids_of_their_own() -> None:
    """Otherwise their results could not be told apart."""
    lists = [[part(0, "0", "f", "{}"), part(1, "0", "g", "{}")]]
    [first, (call_id, *second)] = read(encode_calls(*lists)).calls
    assert first == ("0", "f", {})
    assert (len(call_id), second) == (9, ["g", {}])


def test_a_call_in_the_older_form_is_read() -> None:
    deltas = [
        {"function_call": {"name": "f", "arguments": '{"q"'}},
        {"function_call": {"arguments": ":1}"}},
    ]
    stream = encode_choices(*deltas, finish="function_call")
    [(call_id, *call)] = read(stream).calls
    assert (len(call_id), call) == (9, ["f", {"q": 1}])


@pytest.mark.parametrize(("limit", "finish"), [(None, "stop"), (9, "stop"), (5, "length")])
def test_an_end_without_a_reason_is_known_by_the_count(limit: int | None, finish: str) -> None:
    stream = encode_choices({"content": "x"}, finish="") + encode_event(
        {"choices": [], "usage": {"completion_tokens": 5}}
    )
    assert read(stream + encode_event(b"[DONE]"), max_tokens=limit).finish == finish


@pytest.mark.parametrize("finish", ["length", "max_tokens", "MAX_TOKENS", "max_new_tokens"])
def test_an_answer_that_reached_its_limit_says_so(finish: str) -> None:
    assert read(encode_choices({"content": "x"}, finish=finish)).finish == "length"


def test_loose_streams_reach_every_protocol() -> None:
    """Calls that a server mixes come one after the other, because blocks and items cannot be mixed."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fgh"]
    mixed = [part(0, "a", "f", '{"q"'), part(1, "b", "g", '{"q":2'), part(2, "c", "h")]
    mixed += [part(0, "", "", ":1}"), part(1, "", "", "}")]
    stream = encode_calls(*([one] for one in mixed), finish="")
    stream += encode_event({"usage": {"completion_tokens": 9}}) + encode_event(b"[DONE]")
    inputs = [("f", {"q": 1}), ("g", {"q": 2}), ("h", {})]
    with temporary_home() as home, scripted_server(stream=stream) as remote:
        home.start()
        body = {"name": "big", "upstream": remote.url}
        assert home.request("POST", "/localspec/upstreams", body).status == 201
        chat: dict[str, Any] = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}
        answer = home.request("POST", "/v1/chat/completions", {**chat, "tools": tools}).json
        called = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in called] == inputs
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        named = [{"name": name, "input_schema": {"type": "object"}} for name in "fgh"]
        message = {**chat, "tools": named, "max_tokens": 50, "stream": True}
        blocks: list[list[str]] = []
        for event in map(json.loads, home.request("POST", "/v1/messages", message).events):
            if event.get("type") == "content_block_start":
                blocks.append([event["content_block"]["name"], ""])
            elif event.get("type") == "content_block_delta":
                blocks[event["index"]][1] += event["delta"]["partial_json"]
        assert [(name, json.loads(text)) for name, text in blocks] == inputs
        remote.answer = lambda request, connection: connection.sendall(
            encode_response(
                {"choices": [{"message": {"content": "whole"}, "finish_reason": "eos"}]}
            )
        )
        assert home.chat("hi", model="big").text == "whole"
        remote.answer = lambda request, connection: connection.sendall(
            encode_stream(encode_choices({"content": "x"}, finish="because"))
        )
        refused = home.chat("hi", model="big")
        assert (refused.status, "'because'" in refused.error["message"]) == (502, True)
