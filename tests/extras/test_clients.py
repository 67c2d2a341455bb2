"""The same requests through the official client, its asynchronous form and curl.

The builtin pair answers, so that a real engine writes the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.callers import CALLERS, JSON, Caller
from tests.support.daemons import Home, UnixConnection, real_home
from tests.support.official_clients import openai_client

CHAT, TEXT = "chat/completions", "completions"
QUESTION: list[Any] = [{"role": "user", "content": "What does shutil.copytree do?"}]
# With `exact`, a stream and a complete answer have the same text.
CHAT_BODY: JSON = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, "exact": True}
SCHEMA: JSON = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: JSON = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TOOL_BODY: JSON = {"messages": QUESTION, "temperature": 0, "max_tokens": 100}
TOOL_BODY |= {"tools": [TOOL], "tool_choice": "required"}


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with real_home(context="512") as home:
        yield home


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, served: Home) -> Caller:
    return CALLERS[request.param](served.socket)


def join_content(chunks: list[JSON], index: int = 0) -> str:
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


def test_a_chat_has_usage_timings_and_speculation(caller: Caller) -> None:
    answer = caller.ask(CHAT, CHAT_BODY)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].strip()
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["timings"]["predicted_n"] == usage["completion_tokens"]
    assert answer["localspec"]["speculation"]["drafted"] > 0


def test_a_stream_has_the_same_text_and_ends_with_usage(caller: Caller) -> None:
    complete = caller.ask(CHAT, CHAT_BODY)
    *chunks, usage_chunk = caller.stream(
        CHAT, {**CHAT_BODY, "stream_options": {"include_usage": True}}
    )
    assert join_content(chunks) == complete["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == complete["choices"][0]["finish_reason"]
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"]["completion_tokens"] == complete["usage"]["completion_tokens"]


def test_several_choices_are_streamed_beside_each_other(caller: Caller) -> None:
    chunks = caller.stream(CHAT, {"messages": QUESTION, "n": 2, "seed": 1, "max_tokens": 12})
    ends = {c["choices"][0]["index"] for c in chunks if c["choices"][0].get("finish_reason")}
    assert ends == {0, 1}
    assert join_content(chunks, 0)
    assert join_content(chunks, 1)


def test_a_required_tool_call_follows_its_schema(caller: Caller) -> None:
    [choice] = caller.ask(CHAT, TOOL_BODY)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_a_streamed_tool_call_is_the_same_call(caller: Caller) -> None:
    [complete] = caller.ask(CHAT, TOOL_BODY)["choices"][0]["message"]["tool_calls"]
    chunks = caller.stream(CHAT, TOOL_BODY)
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
    assert {piece["index"] for piece in pieces} == {0}
    assert pieces[0]["id"]
    assert pieces[0]["function"]["name"] == "weather"
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert json.loads(arguments) == json.loads(complete["function"]["arguments"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_json_answer_follows_its_schema(caller: Caller) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = caller.ask(CHAT, {**CHAT_BODY, "max_tokens": 60, "response_format": response_format})
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")


def test_logprobs_belong_to_the_tokens_of_the_text(caller: Caller) -> None:
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": 2}
    [choice] = caller.ask(CHAT, body)["choices"]
    entries = choice["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text.startswith(choice["message"]["content"])
    for entry in entries:  # with greedy sampling the token is the most probable one
        assert len(entry["top_logprobs"]) == 2
        assert entry["token"] == entry["top_logprobs"][0]["token"]
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert entry["logprob"] <= 0


def test_a_seed_repeats_a_sampled_answer(caller: Caller) -> None:
    body = {"messages": QUESTION, "temperature": 1.0, "max_tokens": 24, "exact": True}
    first, second = (caller.ask(CHAT, {**body, "seed": 7}) for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_a_text_is_continued_up_to_a_stop(caller: Caller) -> None:
    body = {"prompt": "import os\nimport ", "temperature": 0, "max_tokens": 32, "exact": True}
    text = caller.ask(TEXT, body)["choices"][0]["text"]
    assert len(text) > 2
    stop = text[1:3]
    stopped = caller.ask(TEXT, {**body, "stop": [stop]})["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    streamed = caller.stream(TEXT, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == text


def test_a_suffix_makes_a_fill_in_request(caller: Caller) -> None:
    body = {"prompt": "def add(a, b):\n    return ", "suffix": "\n", "temperature": 0}
    answer = caller.ask(TEXT, {**body, "max_tokens": 16})
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["object"] == "text_completion"


def test_parts_of_text_are_the_lines_of_one_message(caller: Caller) -> None:
    lines = ("Here is a question.", "What does shutil.copytree do?")
    parts = [{"type": "text", "text": text} for text in lines]
    split, joined = (
        {**CHAT_BODY, "messages": [{"role": "user", "content": content}]}
        for content in (parts, "\n".join(lines))
    )
    assert caller.ask(CHAT, split)["choices"] == caller.ask(CHAT, joined)["choices"]


def test_a_predicted_answer_is_counted(caller: Caller) -> None:
    text = caller.ask(CHAT, CHAT_BODY)["choices"][0]["message"]["content"]
    body = {**CHAT_BODY, "prediction": {"type": "content", "content": text}}
    details = caller.ask(CHAT, body)["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
        ({"regex": "("}, 400, None),
        ({"model": "gpt-4"}, 404, "model"),
    ],
    ids=["out of range", "missing schema", "bad regex", "no such model"],
)
def test_a_refusal_has_openais_body(
    caller: Caller, fields: JSON, status: int, param: str | None
) -> None:
    actual_status, error = caller.refused(CHAT, {**CHAT_BODY, **fields})
    assert actual_status == status
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    if param:
        assert error["param"] == param


def test_anthropic_messages_have_the_same_answers(served: Home) -> None:
    """Check the token count, stop sequences, tool calls and a prefilled answer."""

    def ask(path: str = "", **fields: Any) -> JSON:
        body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, "exact": True, **fields}
        answer = served.request("POST", f"/v1/messages{path}", body)
        assert answer.status == 200, answer.body
        message: JSON = answer.json
        return message

    complete = ask()
    usage = complete["usage"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert ask("/count_tokens")["input_tokens"] == prompt_tokens
    [block] = complete["content"]
    chat = served.request("POST", f"/v1/{CHAT}", CHAT_BODY)
    assert (block["type"], block["text"]) == ("text", chat.text)
    stop = block["text"][5:9]
    stopped = ask(stop_sequences=["never said", stop])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    tool = {"name": "weather", "input_schema": SCHEMA}
    called = ask(tools=[tool], tool_choice={"type": "any"}, max_tokens=100, exact=False)
    assert called["stop_reason"] == "tool_use"
    assert called["content"][-1]["input"]["city"] in ("Paris", "Rome")
    messages = [*QUESTION, {"role": "assistant", "content": block["text"][:9]}]
    assert ask(messages=messages)["content"][0]["text"]


def test_a_background_response_is_resumed(served: Home) -> None:
    """Its events and its text are the same as without an interruption."""
    fields: JSON = {"input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    with openai_client(served) as client:
        responses = client.responses
        exact = {"exact": True}
        text = responses.create(model="", extra_body=exact, **fields).output_text
        stream = responses.create(
            model="", background=True, stream=True, extra_body=exact, **fields
        )
        events: list[Any] = [next(stream) for _ in range(6)]
        stream.close()
        name, number = events[0].response.id, events[-1].sequence_number
        events += responses.retrieve(name, stream=True, starting_after=number)
        assert [event.sequence_number for event in events] == [*range(len(events))]
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == events[-1].response.output_text == text
        assert responses.retrieve(name).output_text == text


def test_a_resumable_chat_has_the_text_of_a_whole_one(served: Home) -> None:
    body = {**CHAT_BODY, "stream": True}
    connection = UnixConnection(served.socket)
    headers = {"X-Conversation-Id": "cut"}
    connection.request("POST", f"/v1/{CHAT}", json.dumps(body), headers)
    data = connection.getresponse().read(700)
    connection.close()
    rest = served.request("GET", f"/v1/stream?conv_id=cut&from={len(data)}")
    lines = (data + rest.body).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert join_content(chunks) == served.request("POST", f"/v1/{CHAT}", CHAT_BODY).text


def test_the_pair_is_listed(caller: Caller) -> None:
    assert caller.models()[0] == "builtin"
