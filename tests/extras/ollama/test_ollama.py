"""Ollama's API, through its official client and as raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.support.daemons import Home, RunningDaemon, temporary_home
from tests.support.official_clients import KNOWS_TOOLS

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake("--template", KNOWS_TOOLS)
        home.environment["LOCALSPEC_PAIR"] = "builtin"  # a file whose header can be shown
        RunningDaemon(home)
        yield home


@pytest.fixture
def client(served: Home) -> Iterator[ollama.Client]:
    transport = httpx.HTTPTransport(uds=str(served.socket), verify=False)
    with ollama.Client("http://localspec", transport=transport) as client:
        yield client


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def read_frame(client: ollama.Client, **fields: Any) -> Any:
    """Send a chat and return the frame that the scripted engine echoes."""
    answer = client.chat("default", fields.pop("messages", user_message("echo")), **fields)
    return json.loads(answer.message.content or "")


def read_lines(served: Home, path: str, body: dict[str, Any]) -> list[Any]:
    answer = served.request("POST", path, body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


def test_a_chat_is_answered_with_and_without_streaming(client: ollama.Client) -> None:
    complete = client.chat("default", user_message("say one two"))
    assert (complete.message.role, complete.message.content) == ("assistant", "one two")
    assert (complete.model, complete.done, complete.done_reason) == ("default", True, "stop")
    *parts, final_part = client.chat("default", user_message("say one two"), stream=True)
    assert "".join(part.message.content or "" for part in parts) == "one two"
    assert not any(part.done for part in parts)
    assert (final_part.message.content, final_part.done_reason) == ("", "stop")
    assert final_part.done
    for response in (complete, final_part):
        assert (response.prompt_eval_count, response.eval_count) == (3, 2)
        assert response.total_duration is not None
        assert response.total_duration >= (response.load_duration or 0) >= 0
        assert response.created_at is not None


def test_the_asynchronous_client(served: Home) -> None:
    async def run_chats() -> tuple[str, str]:
        transport = httpx.AsyncHTTPTransport(uds=str(served.socket), verify=False)
        async with ollama.AsyncClient("http://localspec", transport=transport) as client:
            complete = await client.chat("default", user_message("say one two"))
            stream = await client.chat("default", user_message("say one two"), stream=True)
            parts = [part.message.content or "" async for part in stream]
        return complete.message.content or "", "".join(parts)

    assert asyncio.run(run_chats()) == ("one two", "one two")


def test_streaming_is_the_default_and_ends_with_statistics(served: Home) -> None:
    body = {"messages": user_message("say x"), "options": {"num_gpu": 1, "num_ctx": 1 << 20}}
    *_, last = read_lines(served, "/api/chat", body)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["localspec"]["ignored"] == ["options.num_gpu", "options.num_ctx"]
    assert isinstance(last["eval_duration"], int)


def test_a_full_context_is_reported_as_length(client: ollama.Client) -> None:
    assert client.chat("default", user_message("full")).done_reason == "length"


def test_thoughts_are_a_separate_field(client: ollama.Client) -> None:
    messages = user_message("raw <think>hm</think>yes")
    message = client.chat("default", messages, think=True).message
    assert (message.thinking, message.content) == ("hm", "yes")
    parts = [chunk.message for chunk in client.chat("default", messages, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == "hm"
    assert "".join(part.content or "" for part in parts) == "yes"
    answer = client.generate("default", "raw <think>hm</think>yes")
    assert (answer.thinking, answer.response) == ("hm", "yes")


def test_think_is_passed_to_the_template(client: ollama.Client) -> None:
    template_kwargs = {
        think: read_frame(client, think=think)["prompt"].get("template_kwargs", {})
        for think in (None, False, True, "high")
    }
    assert "enable_thinking" not in template_kwargs[None]
    switches = [template_kwargs[think]["enable_thinking"] for think in (False, True, "high")]
    assert switches == [False, True, True]
    assert template_kwargs["high"]["reasoning_effort"] == "high"


def test_arguments_of_a_tool_call_are_an_object(client: ollama.Client) -> None:
    messages = user_message(f"raw Let me see.{CALL}{CALL}")
    complete = client.chat("default", messages, tools=[WEATHER])
    chunks = client.chat("default", messages, tools=[WEATHER], stream=True)
    streamed = [call for chunk in chunks for call in chunk.message.tool_calls or []]
    for calls in (complete.message.tool_calls or [], streamed):
        functions = [(call.function.name, call.function.arguments) for call in calls]
        assert functions == [("weather", {"city": "Paris"})] * 2
    assert (complete.message.content, complete.done_reason) == ("Let me see.", "stop")


def test_a_tool_call_that_was_cut_off_is_text(client: ollama.Client) -> None:
    half = CALL.partition("Par")[0]
    message = client.chat("default", user_message(f"raw {half}"), tools=[WEATHER]).message
    assert not message.tool_calls
    assert message.content
    assert '"city"' in message.content


def test_tool_results_are_matched_to_calls_without_ids(client: ollama.Client) -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("a", "b", "a")]
    history = [
        *user_message("hi"),
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "two"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "tool_name": "a", "content": "echo"},
    ]
    messages = read_frame(client, messages=history)["prompt"]["messages"]
    ids = [call["id"] for call in messages[1]["extra"]["tool_calls"]]
    assert len(set(ids)) == 3
    answered = [message["extra"]["tool_call_id"] for message in messages[2:]]
    assert answered == [ids[1], ids[0], ids[2]]
    assert messages[1]["extra"]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


def test_neighbouring_messages_of_one_role_are_joined(client: ollama.Client) -> None:
    """As in Ollama, for every role but a tool's; an agent may leave two answers at the end."""
    call = {"function": {"name": "a", "arguments": {}}}
    history = [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        *user_message("three"),
        *user_message(""),
        *user_message("four"),
        {"role": "assistant", "tool_calls": [call], "thinking": "five"},
        {"role": "assistant", "content": "six", "tool_calls": [call], "thinking": "seven"},
        {"role": "tool", "content": "eight"},
        {"role": "tool", "content": "nine"},
        *user_message("echo"),
    ]
    messages = read_frame(client, messages=history)["prompt"]["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        *(("system", "one\n\ntwo"), ("user", "three\n\nfour"), ("assistant", "six")),
        *(("tool", "eight"), ("tool", "nine"), ("user", "echo")),
    ]
    assert messages[2]["extra"]["reasoning_content"] == "five\n\nseven"
    ids = [call["id"] for call in messages[2]["extra"]["tool_calls"]]
    assert ids == [message["extra"]["tool_call_id"] for message in messages[3:5]]


@pytest.mark.parametrize("count", [2, 3])
def test_answers_at_the_end_are_continued_as_one(client: ollama.Client, count: int) -> None:
    ends = [{"role": "assistant", "content": f"part {number}"} for number in range(count)]
    answer = client.chat("default", [*user_message("hi"), *ends])
    # The scripted engine repeats the last message.
    assert answer.message.content == "\n\n".join(end["content"] for end in ends)


def test_options_are_passed_to_the_engine(client: ollama.Client) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2}
    frame = read_frame(client, options={**options, "seed": 3, "num_predict": 9, "stop": ["x"]})
    assert frame["sampling"] == {**options, "seed": 3}
    assert (frame["max_tokens"], frame["stop"]) == (9, ["x"])
    assert "max_tokens" not in read_frame(client, options={"num_predict": -1})
    floats = {"num_predict": 9.0, "top_k": 7.0, "seed": 3.0, "temperature": 1}
    frame_of_floats = read_frame(client, options=floats)
    assert (frame_of_floats["max_tokens"], frame_of_floats["sampling"]["top_k"]) == (9, 7)


def test_a_format_is_json_or_a_schema(client: ollama.Client) -> None:
    assert read_frame(client, format="json")["constraint"]["kind"] == "json_object"
    constraint = read_frame(client, format=SCHEMA)["constraint"]
    assert (constraint["kind"], json.loads(constraint["source"])) == ("json_schema", SCHEMA)
    assert "constraint" not in read_frame(client, format="")


def test_generate_takes_a_question_a_raw_prompt_or_a_suffix(client: ollama.Client) -> None:
    frame = json.loads(client.generate("default", "echo", system="Be brief.").response or "")
    assert [message["role"] for message in frame["prompt"]["messages"]] == ["system", "user"]
    frame = json.loads(client.generate("default", "echo", raw=True).response or "")
    assert frame["prompt"] == {"type": "text", "text": "echo"}
    assert client.generate("default", "def", suffix="end").response == "def|end"
    *_, last = client.generate("default", "say x", stream=True)
    assert (last.response, last.done_reason) == ("", "stop")


def test_a_model_is_loaded_and_unloaded_without_a_question(client: ollama.Client) -> None:
    for load in (
        lambda **options: client.chat("default", **options),
        lambda **options: client.generate("default", **options),
    ):
        assert load(keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        assert load().done_reason == "load"
        [running] = client.ps().models
        assert running.context_length == 4096
    assert client.chat("default", user_message("say x"), keep_alive="0s").message.content == "x"
    assert client.ps().models == []


def test_models_are_listed_and_shown_under_names_with_a_tag(client: ollama.Client) -> None:
    [name] = [model.model for model in client.list().models if "builtin" in (model.model or "")]
    assert name == "builtin:latest"
    for listed_name in (name, "builtin"):
        details = client.show(listed_name)
        assert details.details is not None
        assert details.modelinfo is not None
        family = details.details.family
        assert details.modelinfo["general.architecture"] == family
        assert details.modelinfo[f"{family}.context_length"] > 0
        assert "num_ctx" in (details.parameters or "")
        assert "completion" in (details.capabilities or [])
    assert client.chat(name, user_message("say x")).message.content == "x"
    parameters = dict(line.split() for line in (client.show(name).parameters or "").splitlines())
    assert parameters["num_ctx"] == "4096"  # the context size of the loaded model
    assert float(parameters["temperature"]) == pytest.approx(0.8)


def test_the_root_and_the_version_are_answered(served: Home) -> None:
    assert served.request("GET", "/").body == b"localspec is running"
    assert served.request("HEAD", "/").status == 200
    assert served.request("GET", "/api/version").json["version"] > "0.1"


PICTURE = {"role": "user", "images": [b"x"]}


@pytest.mark.parametrize(
    ("send", "status", "message"),
    [
        (lambda c: c.chat("llama3", user_message("hi")), 404, "no pair 'llama3'"),
        (lambda c: c.show("qwen2.5:7b"), 404, "Ollama has no model"),
        (lambda c: c.chat("default", [PICTURE]), 400, "messages[0].images"),
        (lambda c: c.generate("default", "hi", images=[b"x"]), 400, "images"),
        (lambda c: c.generate("default", "hi", template="{{ .Prompt }}"), 400, "'template'"),
        (lambda c: c.generate("default", "hi", context=[1]), 400, "/api/chat"),
        (lambda c: c.generate("default", "hi", options={"top_p": 2}), 400, "'options.top_p'"),
        (lambda c: c.generate("default", "hi", options={"seed": 7.5}), 400, "'options.seed'"),
        (lambda c: c.embed("default", "hi"), 404, "localspec pull nomic-embed"),
        (lambda c: c.embeddings("builtin", "hi"), 400, "'builtin' writes text"),
        (lambda c: c.delete("builtin"), 400, "part of the installation"),
        (lambda c: c.pull("nobody-has-this"), 404, "nobody-has-this"),
        (lambda c: c.copy("builtin", "mine"), 501, "localspec add"),
        (lambda c: c.push("builtin"), 501, "stay on this machine"),
        (lambda c: c.create("mine", from_="builtin"), 501, "localspec add"),
        (lambda c: c.chat("default", user_message("refuse context_length_exceeded")), 400, ""),
        (lambda c: [*c.generate("default", "die SIGKILL", stream=True)], -1, "SIGKILL"),
    ],
)
def test_a_refusal_is_one_sentence(
    client: ollama.Client, send: Any, status: int, message: str
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        send(client)
    assert caught.value.status_code == status
    assert message in caught.value.error
    assert not caught.value.error.startswith("{")


def test_errors_have_the_shape_of_ollama(served: Home) -> None:
    for method, path, status in [("POST", "/api/nothing", 404), ("PUT", "/api/chat", 405)]:
        answer = served.request(method, path)
        assert answer.status == status
        assert list(answer.json) == ["error"]
        assert path in answer.json["error"]
