"""OpenAI's Responses through the official client: text, tools, thoughts, schemas, and what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.responses import Response as Published
from openai.types.responses import ResponseItemList, ResponseStreamEvent

from tests.daemon.test_forgetting import found_in
from tests.support.daemons import Home, RunningDaemon, scripted_home, temporary_home, wait_for

BASE = "http://localspec/v1"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A scripted engine whose template knows tools."""
    with scripted_home("--template", "{% if tools %}<tool_call>{% endif %}") as home:
        yield home


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(home.socket), verify=False)
    with (
        httpx2.Client(transport=transport, timeout=30) as http,
        openai.OpenAI(api_key="none", base_url=BASE, http_client=http, max_retries=0) as client,
    ):
        yield client


def streamed(home: Home, asked: str, /, **fields: Any) -> list[dict[str, Any]]:
    """The events of a response as they are on the wire, each of them strictly of its published type."""
    answer = home.request("POST", "/v1/responses", {"input": asked, "stream": True, **fields})
    assert answer.status == 200, answer.body
    found = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_json(data.removeprefix("data: "))
        found.append(value)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def told_apart(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, those that follow each other once."""
    types = [each["type"].removeprefix("response.") for each in events]
    return [each for at, each in enumerate(types) if types[at - 1 : at] != [each]]


def prompt(response: Any) -> Any:
    """What an engine that echoes was asked."""
    return json.loads(response.output_text)["prompt"]


# ------------------------------------------------------------------------ shapes


def test_a_whole_response_is_what_is_published(home: Home) -> None:
    body = {"input": "say hello there", "metadata": {"a": "b"}, "max_output_tokens": 40}
    answer = home.request("POST", "/v1/responses", body)
    found = Published.model_validate_json(answer.body, strict=True)
    assert (found.status, found.output_text) == ("completed", "hello there")
    assert (found.metadata, found.max_output_tokens) == ({"a": "b"}, 40)
    assert found.usage
    assert found.usage.output_tokens == 2
    assert (found.output[0].id or "").startswith("msg_")


def test_events_come_in_the_published_order(home: Home) -> None:
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    events = streamed(home, text + call("apply_patch", {"input": "a\nb"}), tools=[WEATHER, PATCH])
    text_of_message = ["output_text.delta", "output_text.done", "content_part.done"]
    assert told_apart(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        *text_of_message,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert response["output"] == done
    thoughts, said, weather, patch = done
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "so so"}]
    assert said["content"][0]["text"] == "well:"
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": "Oslo"})
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "a\nb",
    )
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for item in done:
        begun = next(each for each in events if each.get("item", {}).get("id") == item["id"])
        assert begun["type"] == "response.output_item.added"
        assert begun["item"]["status"] == "in_progress"


def test_a_summary_is_the_thoughts_themselves_and_that_is_said(home: Home) -> None:
    events = streamed(home, "raw <think>so so</think>yes", reasoning={"summary": "auto"})
    assert told_apart(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    response = events[-1]["response"]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "so so"}]
    assert any("'reasoning.summary'" in each for each in response["localspec"]["ignored"])


@pytest.mark.parametrize(
    ("text", "fields", "status"),
    [
        ("say one two three", {"max_output_tokens": 2}, "incomplete"),
        ("say one", {}, "completed"),
        ("full", {}, "incomplete"),
    ],
)
def test_streamed_and_whole_say_the_same(
    home: Home, client: openai.OpenAI, text: str, fields: dict[str, Any], status: str
) -> None:
    whole = client.responses.create(input=text, model="", **fields)
    last = streamed(home, text, **fields)[-1]
    assert (whole.status, last["type"]) == (status, f"response.{status}")
    response = Published.model_validate(last["response"])
    assert response.output_text == whole.output_text
    assert response.incomplete_details == whole.incomplete_details
    first, same = response.output[0], whole.output[0]
    assert first.status == same.status == status  # type: ignore[union-attr] # messages, or thoughts


def test_how_much_of_the_prompt_is_read_is_said_as_llama_server_does(home: Home) -> None:
    events = streamed(home, "say x", return_progress=True)
    told = [each for each in events if "prompt_progress" in each]
    assert {each["type"] for each in told} == {"response.in_progress"}
    assert told[-1]["prompt_progress"]["total"] > 0
    assert [each["type"] for each in events if "timings" in each] == ["response.completed"]


def test_timings_come_with_each_token_as_llama_server_gives_them(home: Home) -> None:
    fields = {"timings_per_token": True, "return_progress": True}
    events = streamed(home, "say one two", **fields)
    told = [each["timings"] for each in events if each["type"] == "response.output_text.delta"]
    assert [each["predicted_n"] for each in told] == [1, 2]
    assert all("timings" in each for each in events if "prompt_progress" in each)
    assert events[-1]["timings"] == events[-1]["response"]["timings"]


def test_an_engine_that_dies_fails_the_response_and_keeps_what_was_said(home: Home) -> None:
    events = streamed(home, "die SIGKILL")
    assert told_apart(events)[-2:] == ["error", "failed"]
    response = events[-1]["response"]
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["content"][0]["text"] == "one two "
    kept = home.request("GET", f"/v1/responses/{response['id']}").json
    assert (kept["status"], kept["output"]) == ("failed", response["output"])


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    found = client.responses.create(
        input="raw <think>so so</think>yes no", model="", top_logprobs=1, store=False
    )
    part: Any = found.output[-1]
    tokens = [each.token for each in part.content[0].logprobs]
    assert "yes no" in "".join(tokens)
    assert "so so" not in "".join(tokens)
    with client.responses.stream(
        input="say a b", model="", include=["message.output_text.logprobs"]
    ) as stream:
        deltas = [each for each in stream if each.type == "response.output_text.delta"]
    assert [each.logprobs[0].token for each in deltas] == ["a", " b"]


# ------------------------------------------------------------------------ tools


def test_five_turns_with_tools_also_without_anything_kept(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "raw " + call("weather", {"city": "0"})}]
    for turn in range(1, 5):
        found = client.responses.create(
            input=items, model="", tools=[WEATHER], store=False, instructions="Be brief."
        )
        [made] = [each for each in found.output if each.type == "function_call"]
        assert json.loads(made.arguments) == {"city": str(turn - 1)}
        items += [each.to_dict() for each in found.output]
        result = "raw " + call("weather", {"city": str(turn)}) if turn < 4 else "echo"
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": result})
    last = client.responses.create(
        input=items, model="", tools=[WEATHER], store=False, instructions="Be brief."
    )
    asked = prompt(last)
    roles = [each["role"] for each in asked["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 4]
    cities = [
        each["extra"]["tool_calls"][0]["function"]["arguments"]["city"]
        for each in asked["messages"]
        if each["role"] == "assistant"
    ]
    assert cities == ["0", "1", "2", "3"]
    assert asked["tools"][0]["function"]["parameters"] == SCHEMA


def test_five_turns_with_tools_that_go_on_from_each_other(client: openai.OpenAI) -> None:
    previous: str | None = None
    asked: Any = "raw " + call("weather", {"city": "0"})
    for turn in range(1, 5):
        found = client.responses.create(
            input=asked, model="", tools=[WEATHER], previous_response_id=previous
        )
        previous = found.id
        [made] = [each for each in found.output if each.type == "function_call"]
        result = "raw " + call("weather", {"city": str(turn)}) if turn < 4 else "echo"
        asked = [{"type": "function_call_output", "call_id": made.call_id, "output": result}]
    last = client.responses.create(
        input=asked, model="", tools=[WEATHER], previous_response_id=previous
    )
    roles = [each["role"] for each in prompt(last)["messages"]]
    assert roles == ["user", *["assistant", "tool"] * 4]


def test_several_calls_and_thoughts_are_one_turn_of_the_model(client: openai.OpenAI) -> None:
    found = client.responses.create(
        model="",
        store=False,
        tools=[WEATHER, PATCH],
        input=[
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "input_text", "text": "Both, please."}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Both.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "x"},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
            {
                "type": "custom_tool_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "echo"}],
            },
        ],
    )
    system, user, turn, rain, last = prompt(found)["messages"]
    assert (system["role"], user["content"]) == ("system", "Both, please.")
    assert (turn["content"], turn["extra"]["reasoning_content"]) == ("Both.", "hm")
    arguments = [each["function"]["arguments"] for each in turn["extra"]["tool_calls"]]
    assert arguments == [{}, {"input": "x"}]
    assert [rain["content"], last["content"]] == ["rain", "echo"]


def test_thoughts_come_back_from_clients_that_keep_them_unread(client: openai.OpenAI) -> None:
    text = "raw <think>so so</think>" + call("weather", {})
    first = client.responses.create(
        input=text, model="", tools=[WEATHER], store=False, include=["reasoning.encrypted_content"]
    )
    thoughts, made = (each.to_dict() for each in first.output)
    thoughts["content"] = None
    output = {"type": "function_call_output", "call_id": made["call_id"], "output": "echo"}
    items: Any = [{"role": "user", "content": text}, thoughts, made, output]
    second = client.responses.create(input=items, model="", tools=[WEATHER], store=False)
    assert prompt(second)["messages"][1]["extra"]["reasoning_content"] == "so so"


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("auto", ["weather", "now"], False),
        ("none", [], False),
        ("required", ["weather", "now"], True),
        ({"type": "function", "name": "now"}, ["weather", "now"], True),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
            ["now"],
            False,
        ),
        ({"type": "web_search_preview"}, ["weather", "now"], False),
    ],
)
def test_choices_of_tools(
    client: openai.OpenAI, choice: Any, names: list[str], forced: bool
) -> None:
    now: Any = {"type": "function", "name": "now", "parameters": None, "strict": False}
    tools: Any = [WEATHER, now, {"type": "web_search"}]
    found = client.responses.create(
        input="echo", model="", tools=tools, tool_choice=choice, store=False
    )
    asked = json.loads(found.output_text)
    assert asked.get("tools", {}).get("required", False) == forced
    shown = prompt(found).get("tools") or []
    assert [each["function"]["name"] for each in shown] == names
    extra: Any = found.model_extra
    assert any("'tools[2]'" in each for each in extra["localspec"]["ignored"])


def test_an_agents_request_is_taken_whole(home: Home) -> None:
    """What a command-line agent sends that speaks this protocol alone."""
    shell = {"type": "object", "properties": {"command": {"type": "array"}}}
    shell_call = {"type": "local_shell_call", "call_id": "9", "status": "completed", "action": {}}
    events = streamed(
        home,
        "",
        model="",
        instructions="You are a coding agent. " * 2000,
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {**shell_call, "id": None},
            {"type": "compaction", "encrypted_content": "gAAAA"},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ok"}]},
        ],
        tools=[
            {"type": "function", "name": "shell", "strict": False, "parameters": shell},
            PATCH,
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "mcp", "description": "", "tools": [WEATHER]},
        ],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "low"},
        client_metadata={"x": "y"},
        service_tier=None,
    )
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == "ok"
    said = " ".join(response["localspec"]["ignored"])
    for each in ("input[2]", "input[3]", "tools[2]", "tools[3]", "tools[1].format", "verbosity"):
        assert f"'{each}'" in said or each in said
    assert home.request("GET", f"/v1/responses/{response['id']}").status == 404


def test_a_tool_in_a_namespace_is_called_by_its_name_there(client: openai.OpenAI) -> None:
    spaces: Any = [
        {"type": "namespace", "name": each, "description": "", "tools": [WEATHER]} for each in "ab"
    ]
    text = "raw " + call("weather", {}) + call("b.weather", {})
    found = client.responses.create(input=text, model="", tools=spaces, store=False)
    made: list[Any] = list(found.output)
    assert [(each.name, each.namespace) for each in made] == [("weather", "a"), ("weather", "b")]


# ------------------------------------------------------------------------ forms of the answer


class Place(pydantic.BaseModel):
    city: str


def test_a_schema_is_obeyed_and_parsed(client: openai.OpenAI) -> None:
    found = client.responses.parse(input='raw {"city": "Oslo"}', model="", text_format=Place)
    assert found.output_parsed == Place(city="Oslo")
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    echo = client.responses.create(input="echo", model="", text=text)
    assert json.loads(json.loads(echo.output_text)["constraint"]["source"]) == SCHEMA


@pytest.mark.parametrize(("effort", "budget"), [("low", 1024), ("none", 0), ("most", None)])
def test_an_effort_limits_the_thoughts(
    client: openai.OpenAI, effort: Any, budget: int | None
) -> None:
    found = client.responses.create(
        input="echo", model="", reasoning={"effort": effort}, store=False
    )
    limit = json.loads(found.output_text).get("thinking")
    assert (limit and limit.get("tokens", 0)) == budget
    extra: Any = found.model_extra
    said = extra["localspec"].get("ignored", [])
    assert any("'reasoning.effort'" in each for each in said) == (budget is None)


def test_the_asynchronous_client(home: Home) -> None:
    async def use() -> tuple[str, str, list[Any]]:
        transport = httpx2.AsyncHTTPTransport(uds=str(home.socket), verify=False)
        async with (
            httpx2.AsyncClient(transport=transport, timeout=30) as http,
            openai.AsyncOpenAI(
                api_key="none", base_url=BASE, http_client=http, max_retries=0
            ) as client,
        ):
            whole = await client.responses.create(input="say so", model="")
            async with client.responses.stream(input="say so", model="") as stream:
                types = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert (await client.responses.retrieve(final.id)).output_text == "so"
            return whole.output_text, final.output_text, types

    whole, final, types = asyncio.run(use())
    assert whole == final == "so"
    assert types[-1] == "response.completed"


# ------------------------------------------------------------------------ what is kept


def test_a_response_is_kept_shown_listed_and_deleted(home: Home, client: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    first = client.responses.create(
        input=text, model="", tools=tools, instructions="Once.", metadata={"a": "b"}
    )
    result: Any = {"type": "function_call_output", "output": "say rain"}
    result["call_id"] = first.output[-1].to_dict()["call_id"]
    second = client.responses.create(input=[result], model="", previous_response_id=first.id)
    again = client.responses.retrieve(first.id)
    assert again.to_dict().keys() >= {"instructions", "usage"}
    assert [again.output, again.metadata, again.tools, again.usage] == [
        *(first.output, {"a": "b"}, first.tools, first.usage)
    ]
    raw = home.request("GET", f"/v1/responses/{second.id}/input_items?order=asc")
    page = ResponseItemList.model_validate_json(raw.body, strict=True)
    kinds = [each.type for each in page.data]
    assert kinds == [*("message", "reasoning", "message", "function_call", "function_call_output")]
    assert [each.id for each in page.data[1:4]] == [each.id for each in first.output]
    pages = [each.id for each in client.responses.input_items.list(second.id, limit=2)]
    assert pages == [each.id for each in reversed(page.data)]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    shown = home.request("GET", "/localspec/conversations/last").json
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant"]


def test_it_is_forgotten_with_its_conversation_and_taken_back_with_its_question(
    home: Home, client: openai.OpenAI
) -> None:
    first = client.responses.create(input="say one", model="")
    second = client.responses.create(input="say two", model="", previous_response_id=first.id)
    home.request("POST", "/localspec/conversations/last/undo")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert client.responses.retrieve(first.id).output_text == "one"
    home.request("DELETE", "/localspec/conversations/last")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    remains = (home.root / "data").rglob("*") if (home.root / "data").exists() else ()
    assert not any(first.id.encode() in each.read_bytes() for each in remains if each.is_file())


def test_who_sends_everything_again_goes_on_in_one_conversation(
    home: Home, client: openai.OpenAI
) -> None:
    before = home.request("GET", "/localspec/conversations").json["conversations"]
    items: list[Any] = [{"role": "user", "content": "raw " + call("weather", {"city": "x"})}]
    first = client.responses.create(input=items, model="", tools=[WEATHER])
    result: Any = {"type": "function_call_output", "output": "say so"}
    result["call_id"] = first.output[0].to_dict()["call_id"]
    items += [*(each.to_dict() for each in first.output), result]
    second = client.responses.create(input=items, model="", tools=[WEATHER])
    items += [*(each.to_dict() for each in second.output), {"role": "user", "content": "say z"}]
    client.responses.create(input=items, model="", tools=[WEATHER])
    newest, *others = home.request("GET", "/localspec/conversations").json["conversations"]
    assert (others, newest["messages"]) == (before, 6)
    items[0]["content"] += " or another"  # is another conversation, whatever ids are in it
    client.responses.create(input=items, model="", tools=[WEATHER])
    after = home.request("GET", "/localspec/conversations").json["conversations"]
    assert len(after) == len(before) + 2


def _other_question(items: list[Any]) -> None:
    items[0]["content"] += " or another"


def _other_result(items: list[Any]) -> None:
    items[2]["output"] += " and more"


def _other_answer(items: list[Any]) -> None:
    items[3]["content"][0]["text"] += "!"


def _other_call(items: list[Any]) -> None:
    items[1]["call_id"] = items[2]["call_id"] = "call_other"


@pytest.mark.parametrize("change", [_other_question, _other_result, _other_answer, _other_call])
def test_a_request_with_other_texts_is_not_filed_into_a_conversation_that_it_names(
    home: Home, client: openai.OpenAI, change: Callable[[list[Any]], None]
) -> None:
    """Its items have ids of a kept response, but it says something else than that was asked for."""
    items: list[Any] = [{"role": "user", "content": "raw " + call("weather", {"city": "x"})}]
    first = client.responses.create(input=items, model="", tools=[WEATHER])
    result: Any = {"type": "function_call_output", "output": "say so"}
    result["call_id"] = first.output[0].to_dict()["call_id"]
    items += [*(each.to_dict() for each in first.output), result]
    second = client.responses.create(input=items, model="", tools=[WEATHER])
    items += [*(each.to_dict() for each in second.output), {"role": "user", "content": "say z"}]
    change(items)
    client.responses.create(input=items, model="", tools=[WEATHER])
    newest, older = home.request("GET", "/localspec/conversations").json["conversations"][:2]
    assert (newest["messages"], older["messages"]) == (6, 4)
    shown = home.request("GET", f"/localspec/conversations/{newest['id']}").json["messages"]
    question, called, result, answer, *_ = shown
    assert question["content"] == items[0]["content"]
    assert called["tool_calls"][0]["id"] == items[1]["call_id"] == result["tool_call_id"]
    assert result["content"] == items[2]["output"]
    assert answer["content"] == items[3]["content"][0]["text"]


def test_two_that_go_on_from_one_do_not_read_each_other(client: openai.OpenAI) -> None:
    one = client.responses.create(input="say one", model="", instructions="Once.")
    client.responses.create(input="say two", model="", previous_response_id=one.id)
    other = client.responses.create(input="echo", model="", previous_response_id=one.id)
    assert [each["content"] for each in prompt(other)["messages"]] == ["say one", "one", "echo"]
    last = client.responses.create(input="echo", model="", previous_response_id=other.id)
    assert len(prompt(last)["messages"]) == 5


def test_two_that_go_on_from_one_at_once_do_not_read_each_other(
    home: Home, client: openai.OpenAI
) -> None:
    one = client.responses.create(input="say one", model="")
    with client.responses.stream(input="slow 20", model="", previous_response_id=one.id) as stream:
        next(iter(stream))
        other = client.responses.create(input="say x", model="", previous_response_id=one.id)
        slow = stream.get_final_response()
    for each in (slow, other):
        last = client.responses.create(input="echo", model="", previous_response_id=each.id)
        asked = [message["content"] for message in prompt(last)["messages"]]
        assert asked[::2] == ["say one", "slow 20" if each is slow else "say x", "echo"]
    days = home.request("GET", "/localspec/statistics").json
    client.responses.create(input="say y", model="", previous_response_id=one.id)
    after = home.request("GET", "/localspec/statistics").json
    assert after["total"]["answers"] == days["total"]["answers"] + 1


def test_items_are_meant_by_their_ids(client: openai.OpenAI) -> None:
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    first = client.responses.create(input=text, model="", tools=[WEATHER])
    items: Any = [{"type": "item_reference", "id": each.id} for each in first.output]
    output: Any = {"type": "function_call_output", "output": "echo"}
    output["call_id"] = first.output[-1].to_dict()["call_id"]
    second = client.responses.create(input=[*items, output], model="", tools=[WEATHER])
    turn, _ = prompt(second)["messages"]
    assert (turn["content"], turn["extra"]["reasoning_content"]) == ("well:", "so so")
    assert turn["extra"]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_what_is_not_to_be_kept_is_not(home: Home, client: openai.OpenAI) -> None:
    before = home.request("GET", "/localspec/conversations").json
    found = client.responses.create(input="say x", model="", store=False)
    assert home.request("GET", "/localspec/conversations").json == before
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="say y", model="", previous_response_id=found.id)
    assert caught.value.param == "previous_response_id"
    home.run("config", "set", "keep_responses", "false")
    unsaid = client.responses.create(input="say x", model="")
    assert unsaid.model_dump()["store"] is False
    assert home.request("GET", "/localspec/conversations").json == before
    asked = client.responses.create(input="say x", model="", store=True)
    home.run("config", "unset", "keep_responses")
    assert client.responses.retrieve(asked.id).id == asked.id


def test_input_tokens(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count
    short = count(input="say x", model="").input_tokens
    long = count(input="say x y", instructions="Be brief.", model="").input_tokens
    assert 0 < short < long


# ------------------------------------------------------------------------ its end


def test_a_client_that_leaves_frees_the_engine_and_nobody_else(
    home: Home, client: openai.OpenAI
) -> None:
    with home.streaming("slow 100") as beside:
        beside.readline()
        stream = client.responses.create(input="forever", model="", stream=True)
        for event in stream:
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                break
        stream.close()
        wait_for(lambda: home.status()["running"] == 1, "the engine to be free of it")
        assert b'"content":"99 "' in beside.read()
    kept = wait_for(
        lambda: next(
            (
                each
                for each in [home.request("GET", f"/v1/responses/{name}").json]
                if each.get("status") == "cancelled"
            ),
            None,
        ),
        "what it got to be kept",
    )
    assert kept["output"][0]["content"][0]["text"].startswith("0 ")


def test_a_response_is_cancelled_by_its_id(client: openai.OpenAI) -> None:
    stream = client.responses.create(input="forever", model="", stream=True)
    name, types = "", []
    for event in stream:
        types.append(event.type)
        if event.type == "response.created":
            name = event.response.id
        if event.type == "response.output_text.delta" and types.count(event.type) == 1:
            assert client.responses.retrieve(name).status == "in_progress"
            assert client.responses.cancel(name).status == "cancelled"
    assert types[-1] == "response.incomplete"
    assert client.responses.cancel(name).status == "cancelled"
    over = client.responses.create(input="say x", model="")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(over.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_0")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0]"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [IMAGE]}]},
            "input[0].output[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_a_refusal_names_the_field_as_the_client_knows_it(
    home: Home, fields: dict[str, Any], param: str
) -> None:
    answer = home.request("POST", "/v1/responses", {"input": "say x", **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith(param)
    assert param.split("[")[0].split(".")[0] in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


def test_null_is_what_is_left_out(home: Home) -> None:
    fields = [
        *("instructions", "previous_response_id", "store", "background", "conversation", "prompt"),
        *("metadata", "max_output_tokens", "tools", "tool_choice", "reasoning", "text", "include"),
        *("top_logprobs", "truncation", "user", "stream", "temperature", "top_p", "model"),
    ]
    answer = home.request("POST", "/v1/responses", {"input": "say x", **dict.fromkeys(fields)})
    assert answer.status == 200, answer.body


def test_a_branch_is_removed_with_all_that_was_written_of_it() -> None:
    with temporary_home() as home:
        home.use_fake(log_prompts="true")
        daemon = RunningDaemon(home)

        def respond(text: str, **fields: Any) -> str:
            answer = home.request("POST", "/v1/responses", {"input": text, **fields})
            name: str = answer.json["id"]
            return name

        first = respond("say one")
        respond("say two", previous_response_id=first)
        branch = respond("say secret", previous_response_id=first)
        assert found_in(home, "secret", branch)
        home.request("DELETE", "/localspec/conversations/last")
        assert not found_in(home, "secret", branch)
        assert home.request("GET", f"/v1/responses/{first}").status == 200
        daemon.stop()
