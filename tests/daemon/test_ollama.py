"""Ollama's API: through its official client, and as it looks on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.support.daemons import Home, RunningDaemon, temporary_home

KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake("--template", KNOWS_TOOLS)
        home.environment["LOCALSPEC_PAIR"] = "builtin"  # a file whose header can be shown
        daemon = RunningDaemon(home)
        yield home
        daemon.stop()


@pytest.fixture
def client(served: Home) -> Iterator[ollama.Client]:
    transport = httpx.HTTPTransport(uds=str(served.socket), verify=False)
    with ollama.Client("http://localspec", transport=transport) as client:
        yield client


def asking(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def sent(client: ollama.Client, **fields: Any) -> Any:
    """What the engine is asked, which the scripted one answers with."""
    answer = client.chat("default", fields.pop("messages", asking("echo")), **fields)
    return json.loads(answer.message.content or "")


def lines(served: Home, path: str, body: dict[str, Any]) -> list[Any]:
    answer = served.request("POST", path, body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


# ------------------------------------------------------------------ answers


def test_a_chat_is_answered_whole_and_in_lines(client: ollama.Client) -> None:
    whole = client.chat("default", asking("say one two"))
    assert (whole.message.role, whole.message.content) == ("assistant", "one two")
    assert (whole.model, whole.done, whole.done_reason) == ("default", True, "stop")
    *parts, last = client.chat("default", asking("say one two"), stream=True)
    assert "".join(each.message.content or "" for each in parts) == "one two"
    assert not any(each.done for each in parts)
    assert (last.message.content, last.done, last.done_reason) == ("", True, "stop")
    for end in (whole, last):
        assert (end.prompt_eval_count, end.eval_count) == (3, 2)
        assert end.total_duration is not None
        assert end.total_duration >= (end.load_duration or 0) >= 0
        assert end.created_at is not None


def test_the_client_for_asyncio_is_answered_alike(served: Home) -> None:
    async def asked() -> tuple[str, str]:
        transport = httpx.AsyncHTTPTransport(uds=str(served.socket), verify=False)
        async with ollama.AsyncClient("http://localspec", transport=transport) as client:
            whole = await client.chat("default", asking("say one two"))
            stream = await client.chat("default", asking("say one two"), stream=True)
            parts = [each.message.content or "" async for each in stream]
        return whole.message.content or "", "".join(parts)

    assert asyncio.run(asked()) == ("one two", "one two")


def test_a_stream_is_the_default_and_its_last_line_says_what_was_done(served: Home) -> None:
    body = {"messages": asking("say x"), "options": {"num_gpu": 1, "num_ctx": 1 << 20}}
    *_, last = lines(served, "/api/chat", body)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["localspec"]["ignored"] == ["options.num_gpu", "options.num_ctx"]
    assert isinstance(last["eval_duration"], int)


def test_an_answer_that_is_cut_says_so(client: ollama.Client) -> None:
    assert client.chat("default", asking("full")).done_reason == "length"


def test_thoughts_stand_apart(client: ollama.Client) -> None:
    asked = asking("raw <think>hm</think>yes")
    message = client.chat("default", asked, think=True).message
    assert (message.thinking, message.content) == ("hm", "yes")
    parts = [each.message for each in client.chat("default", asked, stream=True)]
    assert "".join(each.thinking or "" for each in parts) == "hm"
    assert "".join(each.content or "" for each in parts) == "yes"
    answer = client.generate("default", "raw <think>hm</think>yes")
    assert (answer.thinking, answer.response) == ("hm", "yes")


def test_whether_it_thinks_and_how_much_is_told_to_the_template(client: ollama.Client) -> None:
    told = {
        think: sent(client, think=think)["prompt"].get("template_kwargs", {})
        for think in (None, False, True, "high")
    }
    assert "enable_thinking" not in told[None]
    assert [told[each]["enable_thinking"] for each in (False, True, "high")] == [False, True, True]
    assert told["high"]["reasoning_effort"] == "high"


def test_a_call_is_told_whole_with_its_arguments_as_an_object(client: ollama.Client) -> None:
    asked = asking(f"raw Let me see.{CALL}{CALL}")
    whole = client.chat("default", asked, tools=[WEATHER])
    for calls in (
        whole.message.tool_calls or [],
        [
            call
            for each in client.chat("default", asked, tools=[WEATHER], stream=True)
            for call in each.message.tool_calls or []
        ],
    ):
        named = [(each.function.name, each.function.arguments) for each in calls]
        assert named == [("weather", {"city": "Paris"})] * 2
    assert (whole.message.content, whole.done_reason) == ("Let me see.", "stop")


def test_a_call_that_was_cut_off_is_text_and_no_call(client: ollama.Client) -> None:
    half = CALL.partition("Par")[0]
    message = client.chat("default", asking(f"raw {half}"), tools=[WEATHER]).message
    assert not message.tool_calls
    assert message.content
    assert '"city"' in message.content


def test_calls_and_their_results_find_each_other_without_ids(client: ollama.Client) -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("a", "b", "a")]
    told = [
        *asking("hi"),
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "two"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "tool_name": "a", "content": "echo"},
    ]
    messages = sent(client, messages=told)["prompt"]["messages"]
    ids = [call["id"] for call in messages[1]["extra"]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [each["extra"]["tool_call_id"] for each in messages[2:]] == [ids[1], ids[0], ids[2]]
    assert messages[1]["extra"]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


def test_options_are_those_of_the_engine(client: ollama.Client) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2}
    frame = sent(client, options={**options, "seed": 3, "num_predict": 9, "stop": ["x"]})
    assert frame["sampling"] == {**options, "seed": 3}
    assert (frame["max_tokens"], frame["stop"]) == (9, ["x"])
    assert "max_tokens" not in sent(client, options={"num_predict": -1})
    whole = sent(client, options={"num_predict": 9.0, "top_k": 7.0, "seed": 3.0, "temperature": 1})
    assert (whole["max_tokens"], whole["sampling"]["top_k"]) == (9, 7)


def test_a_format_is_json_or_a_schema(client: ollama.Client) -> None:
    assert sent(client, format="json")["constraint"]["kind"] == "json_object"
    constraint = sent(client, format=SCHEMA)["constraint"]
    assert (constraint["kind"], json.loads(constraint["source"])) == ("json_schema", SCHEMA)
    assert "constraint" not in sent(client, format="")


def test_a_text_is_a_question_or_goes_on_as_it_is(client: ollama.Client) -> None:
    frame = json.loads(client.generate("default", "echo", system="Be brief.").response or "")
    assert [each["role"] for each in frame["prompt"]["messages"]] == ["system", "user"]
    frame = json.loads(client.generate("default", "echo", raw=True).response or "")
    assert frame["prompt"] == {"type": "text", "text": "echo"}
    assert client.generate("default", "def", suffix="end").response == "def|end"
    *_, last = client.generate("default", "say x", stream=True)
    assert (last.response, last.done_reason) == ("", "stop")


def test_a_model_is_loaded_and_unloaded_without_a_question(client: ollama.Client) -> None:
    for load in (
        lambda **how: client.chat("default", **how),
        lambda **how: client.generate("default", **how),
    ):
        assert load(keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        assert load().done_reason == "load"
        [running] = client.ps().models
        assert running.context_length == 4096
    assert client.chat("default", asking("say x"), keep_alive="0s").message.content == "x"
    assert client.ps().models == []


# ------------------------------------------------------------------ models


def test_models_are_listed_and_shown_under_names_with_a_tag(client: ollama.Client) -> None:
    [name] = [each.model for each in client.list().models if "builtin" in (each.model or "")]
    assert name == "builtin:latest"
    for each in (name, "builtin"):
        shown = client.show(each)
        assert shown.details is not None
        assert shown.modelinfo is not None
        family = shown.details.family
        assert shown.modelinfo["general.architecture"] == family
        assert shown.modelinfo[f"{family}.context_length"] > 0
        assert "num_ctx" in (shown.parameters or "")
        assert "completion" in (shown.capabilities or [])
    assert client.chat(name, asking("say x")).message.content == "x"
    told = dict(line.split() for line in (client.show(name).parameters or "").splitlines())
    assert told["num_ctx"] == "4096"  # as it is loaded
    assert float(told["temperature"]) == pytest.approx(0.8)


def test_somebody_is_there(served: Home) -> None:
    assert served.request("GET", "/").body == b"localspec is running"
    assert served.request("HEAD", "/").status == 200
    assert served.request("GET", "/api/version").json["version"] > "0.1"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("ask", "status", "said"),
    [
        (lambda c: c.chat("llama3", asking("hi")), 404, "no pair 'llama3'"),
        (lambda c: c.show("qwen2.5:7b"), 404, "Ollama has no model"),
        (
            lambda c: c.chat("default", [{"role": "user", "images": [b"x"]}]),
            400,
            "messages[0].images",
        ),
        (lambda c: c.generate("default", "hi", images=[b"x"]), 400, "images"),
        (lambda c: c.generate("default", "hi", template="{{ .Prompt }}"), 400, "'template'"),
        (lambda c: c.generate("default", "hi", context=[1]), 400, "/api/chat"),
        (lambda c: c.chat("default", asking("hi"), options={"top_p": 2}), 400, "'options.top_p'"),
        (
            lambda c: c.chat("default", asking("hi"), options={"seed": 7.5}),
            400,
            "'options.seed'",
        ),
        (lambda c: c.embed("default", "hi"), 404, "localspec pull nomic-embed"),
        (lambda c: c.embeddings("builtin", "hi"), 400, "'builtin' writes text"),
        (lambda c: c.delete("builtin"), 400, "part of the installation"),
        (lambda c: c.pull("nobody-has-this"), 404, "nobody-has-this"),
        (lambda c: c.copy("builtin", "mine"), 501, "localspec add"),
        (lambda c: c.push("builtin"), 501, "stay on this machine"),
        (lambda c: c.create("mine", from_="builtin"), 501, "localspec add"),
        (lambda c: c.chat("default", asking("refuse context_length_exceeded")), 400, ""),
        (lambda c: list(c.chat("default", asking("die SIGKILL"), stream=True)), -1, "SIGKILL"),
    ],
)
def test_a_refusal_is_one_sentence(client: ollama.Client, ask: Any, status: int, said: str) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        ask(client)
    assert refused.value.status_code == status
    assert said in refused.value.error
    assert not refused.value.error.startswith("{")


def test_errors_have_ollamas_shape_whatever_is_wrong(served: Home) -> None:
    for method, path, status in [("POST", "/api/nothing", 404), ("PUT", "/api/chat", 405)]:
        answer = served.request(method, path)
        assert answer.status == status
        assert list(answer.json) == ["error"]
        assert path in answer.json["error"]
