"""OpenAI's Responses API through the official client: text, tools, thoughts, schemas and storage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response as Published
from openai.types.responses import ResponseItemList, ResponseStreamEvent

from tests.daemon.test_forgetting import find_words
from tests.support.daemons import Home, scripted_home, wait_for
from tests.support.official_clients import (
    KNOWS_TOOLS,
    async_openai_client,
    written_call,
)

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
    return written_call(name, **arguments)


def stream_events(home: Home, text: str, /, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, each validated against its published type."""
    answer = home.request("POST", "/v1/responses", {"input": text, "stream": True, **fields})
    assert answer.status == 200, answer.body
    events = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_json(data.removeprefix("data: "))
        events.append(value)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def collapse_types(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events without consecutive repetitions."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for index, kind in enumerate(types) if types[index - 1 : index] != [kind]]


def result_of(call_id: Any, output: Any) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def read_prompt(response: Any) -> Any:
    """Return the prompt that the echoing engine received."""
    return json.loads(response.output_text)["prompt"]


def test_a_response_matches_the_published_schema(home: Home) -> None:
    body = {"input": "say hello there", "metadata": {"a": "b"}, "max_output_tokens": 40}
    answer = home.request("POST", "/v1/responses", body)
    response = Published.model_validate_json(answer.body, strict=True)
    assert (response.status, response.output_text) == ("completed", "hello there")
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 40)
    assert response.usage
    assert response.usage.output_tokens == 2
    assert (response.output[0].id or "").startswith("msg_")


def test_events_come_in_the_published_order(home: Home) -> None:
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    events = stream_events(
        home, text + call("apply_patch", {"input": "a\nb"}), tools=[WEATHER, PATCH]
    )
    text_of_message = ["output_text.delta", "output_text.done", "content_part.done"]
    begun, ended = "output_item.added", "output_item.done"
    assert collapse_types(events) == [
        *("created", "in_progress"),
        *(begun, "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", ended),
        *(begun, "content_part.added", *text_of_message, ended),
        *(begun, "function_call_arguments.delta", "function_call_arguments.done", ended),
        *(begun, "custom_tool_call_input.delta", "custom_tool_call_input.done", ended),
        "completed",
    ]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert response["output"] == items
    thoughts, message, weather, patch = items
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "so so"}]
    assert message["content"][0]["text"] == "well:"
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": "Oslo"})
    called = [patch[name] for name in ("type", "name", "input")]
    assert called == ["custom_tool_call", "apply_patch", "a\nb"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for item in items:
        added = next(event for event in events if event.get("item", {}).get("id") == item["id"])
        assert added["type"] == "response.output_item.added"
        assert added["item"]["status"] == "in_progress"


def test_a_summary_repeats_the_thoughts_and_a_note_says_so(home: Home) -> None:
    events = stream_events(home, "raw <think>so so</think>yes", reasoning={"summary": "auto"})
    assert (
        collapse_types(events)[2:8]
        == (
            "output_item.added reasoning_summary_part.added reasoning_summary_text.delta "
            "reasoning_summary_text.done reasoning_summary_part.done output_item.done"
        ).split()
    )
    response = events[-1]["response"]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "so so"}]
    assert any("'reasoning.summary'" in note for note in response["localspec"]["ignored"])


@pytest.mark.parametrize(
    ("text", "fields", "status"),
    [
        ("say one two three", {"max_output_tokens": 2}, "incomplete"),
        ("say one", {}, "completed"),
        ("full", {}, "incomplete"),
    ],
)
def test_streamed_and_complete_responses_agree(
    home: Home, client: openai.OpenAI, text: str, fields: dict[str, Any], status: str
) -> None:
    complete = client.responses.create(input=text, model="", **fields)
    final_event = stream_events(home, text, **fields)[-1]
    assert (complete.status, final_event["type"]) == (status, f"response.{status}")
    response = Published.model_validate(final_event["response"])
    assert response.output_text == complete.output_text
    assert response.incomplete_details == complete.incomplete_details
    streamed_item, complete_item = response.output[0], complete.output[0]
    assert streamed_item.status == complete_item.status == status  # type: ignore[union-attr] # messages, or thoughts


def test_prompt_progress_has_the_shape_of_llama_server(home: Home) -> None:
    events = stream_events(home, "say x", return_progress=True)
    progress_events = [event for event in events if "prompt_progress" in event]
    assert {event["type"] for event in progress_events} == {"response.in_progress"}
    assert progress_events[-1]["prompt_progress"]["total"] > 0
    assert [event["type"] for event in events if "timings" in event] == ["response.completed"]


def test_timings_per_token_have_the_shape_of_llama_server(home: Home) -> None:
    fields = {"timings_per_token": True, "return_progress": True}
    events = stream_events(home, "say one two", **fields)
    timings = [
        event["timings"] for event in events if event["type"] == "response.output_text.delta"
    ]
    assert [timing["predicted_n"] for timing in timings] == [1, 2]
    assert all("timings" in event for event in events if "prompt_progress" in event)
    assert events[-1]["timings"] == events[-1]["response"]["timings"]


def test_an_engine_death_fails_the_response_and_keeps_its_text(home: Home) -> None:
    events = stream_events(home, "die SIGKILL")
    assert collapse_types(events)[-2:] == ["error", "failed"]
    response = events[-1]["response"]
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["content"][0]["text"] == "one two "
    stored = home.request("GET", f"/v1/responses/{response['id']}").json
    assert (stored["status"], stored["output"]) == ("failed", response["output"])


@pytest.mark.parametrize("name", ["weather", "apply_patch"])
def test_an_engine_death_ends_no_call(name: str) -> None:
    """Agents run a call as soon as it is done, even if its response fails afterwards."""
    whole = call("weather", {"city": "Rome"})
    unfinished = call(name, {"city": "Oslo", "input": "a and b"})[:-20]
    with scripted_home("--template", KNOWS_TOOLS) as home:
        events = stream_events(home, f"die SIGKILL {whole}{unfinished}", tools=[WEATHER, PATCH])
    assert events[-1]["type"] == "response.failed"
    added, done = (
        [event["item"]["name"] for event in events if event["type"] == f"response.output_item.{at}"]
        for at in ("added", "done")
    )
    assert (added, done) == (["weather", name], ["weather"])
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed", "incomplete"]


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        input="raw <think>so so</think>yes no", model="", top_logprobs=1, store=False
    )
    part: Any = response.output[-1]
    tokens = [logprob.token for logprob in part.content[0].logprobs]
    assert "yes no" in "".join(tokens)
    assert "so so" not in "".join(tokens)
    with client.responses.stream(
        input="say a b", model="", include=["message.output_text.logprobs"]
    ) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert [delta.logprobs[0].token for delta in deltas] == ["a", " b"]


def test_five_turns_with_tools_without_stored_responses(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "raw " + call("weather", {"city": "0"})}]
    for turn in range(1, 5):
        response = client.responses.create(
            input=items, model="", tools=[WEATHER], store=False, instructions="Be brief."
        )
        [tool_call] = [item for item in response.output if item.type == "function_call"]
        assert json.loads(tool_call.arguments) == {"city": str(turn - 1)}
        items += [item.to_dict() for item in response.output]
        result = "raw " + call("weather", {"city": str(turn)}) if turn < 4 else "echo"
        items.append(result_of(tool_call.call_id, result))
    final = client.responses.create(
        input=items, model="", tools=[WEATHER], store=False, instructions="Be brief."
    )
    final_prompt = read_prompt(final)
    roles = [message["role"] for message in final_prompt["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 4]
    cities = [
        message["extra"]["tool_calls"][0]["function"]["arguments"]["city"]
        for message in final_prompt["messages"]
        if message["role"] == "assistant"
    ]
    assert cities == ["0", "1", "2", "3"]
    assert final_prompt["tools"][0]["function"]["parameters"] == SCHEMA


def test_five_turns_with_tools_by_previous_response_id(client: openai.OpenAI) -> None:
    previous: str | None = None
    turn_input: Any = "raw " + call("weather", {"city": "0"})
    for turn in range(1, 5):
        response = client.responses.create(
            input=turn_input, model="", tools=[WEATHER], previous_response_id=previous
        )
        previous = response.id
        [tool_call] = [item for item in response.output if item.type == "function_call"]
        result = "raw " + call("weather", {"city": str(turn)}) if turn < 4 else "echo"
        turn_input = [result_of(tool_call.call_id, result)]
    final = client.responses.create(
        input=turn_input, model="", tools=[WEATHER], previous_response_id=previous
    )
    roles = [message["role"] for message in read_prompt(final)["messages"]]
    assert roles == ["user", *["assistant", "tool"] * 4]


def test_calls_and_thoughts_become_one_assistant_message(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "Both, please."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            **{"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"},
            "content": [{"type": "output_text", "text": "Both.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "x"},
        result_of("1", "rain"),
        {
            **{"type": "custom_tool_call_output", "call_id": "2"},
            "output": [{"type": "input_text", "text": "echo"}],
        },
    ]
    tools: Any = [WEATHER, PATCH]
    response = client.responses.create(model="", store=False, tools=tools, input=items)
    system, user, turn, weather_output, patch_output = read_prompt(response)["messages"]
    assert (system["role"], user["content"]) == ("system", "Both, please.")
    assert (turn["content"], turn["extra"]["reasoning_content"]) == ("Both.", "hm")
    arguments = [call["function"]["arguments"] for call in turn["extra"]["tool_calls"]]
    assert arguments == [{}, {"input": "x"}]
    assert [weather_output["content"], patch_output["content"]] == ["rain", "echo"]


def test_encrypted_thoughts_are_restored_from_the_client(client: openai.OpenAI) -> None:
    text = "raw <think>so so</think>" + call("weather", {})
    first = client.responses.create(
        input=text, model="", tools=[WEATHER], store=False, include=["reasoning.encrypted_content"]
    )
    thoughts, tool_call = (item.to_dict() for item in first.output)
    thoughts["content"] = None
    output = result_of(tool_call["call_id"], "echo")
    items: Any = [{"role": "user", "content": text}, thoughts, tool_call, output]
    second = client.responses.create(input=items, model="", tools=[WEATHER], store=False)
    assert read_prompt(second)["messages"][1]["extra"]["reasoning_content"] == "so so"


NOW_ONLY = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("auto", ["weather", "now"], False),
        ("none", [], False),
        ("required", ["weather", "now"], True),
        ({"type": "function", "name": "now"}, ["weather", "now"], True),
        (NOW_ONLY, ["now"], False),
        ({"type": "web_search_preview"}, ["weather", "now"], False),
    ],
)
def test_tool_choice(client: openai.OpenAI, choice: Any, names: list[str], forced: bool) -> None:
    now_tool: Any = {"type": "function", "name": "now", "parameters": None, "strict": False}
    tools: Any = [WEATHER, now_tool, {"type": "web_search"}]
    response = client.responses.create(
        input="echo", model="", tools=tools, tool_choice=choice, store=False
    )
    frame = json.loads(response.output_text)
    assert frame.get("tools", {}).get("required", False) == forced
    offered = read_prompt(response).get("tools") or []
    assert [tool["function"]["name"] for tool in offered] == names
    extra: Any = response.model_extra
    assert any("'tools[2]'" in note for note in extra["localspec"]["ignored"])


def test_a_request_of_a_coding_agent_is_accepted(home: Home) -> None:
    """The body is that of a command-line agent that supports only this protocol."""
    shell = {"type": "object", "properties": {"command": {"type": "array"}}}
    shell_call = {"type": "local_shell_call", "call_id": "9", "status": "completed", "action": {}}

    def message(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "role": role, "content": content}

    events = stream_events(
        home,
        "",
        model="",
        instructions="You are a coding agent. " * 2000,
        input=[
            message("developer", "<permissions>"),
            message("user", "a"),
            {**shell_call, "id": None},
            {"type": "compaction", "encrypted_content": "gAAAA"},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
            message("user", "ok"),
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
    ignored = " ".join(response["localspec"]["ignored"])
    for field in ("input[3]", "tools[3]", "tools[1].format", "verbosity"):
        assert f"'{field}'" in ignored or field in ignored
    assert home.request("GET", f"/v1/responses/{response['id']}").status == 404


def test_a_tool_in_a_namespace_is_called_by_its_name(client: openai.OpenAI) -> None:
    namespaces: Any = [
        {"type": "namespace", "name": namespace, "description": "", "tools": [WEATHER]}
        for namespace in "ab"
    ]
    text = "raw " + call("weather", {}) + call("b.weather", {})
    response = client.responses.create(input=text, model="", tools=namespaces, store=False)
    tool_calls: list[Any] = list(response.output)
    names = [(tool_call.name, tool_call.namespace) for tool_call in tool_calls]
    assert names == [("weather", "a"), ("weather", "b")]


class Place(pydantic.BaseModel):
    city: str


def test_a_schema_is_obeyed_and_parsed(client: openai.OpenAI) -> None:
    response = client.responses.parse(input='raw {"city": "Oslo"}', model="", text_format=Place)
    assert response.output_parsed == Place(city="Oslo")
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    echo = client.responses.create(input="echo", model="", text=text)
    assert json.loads(json.loads(echo.output_text)["constraint"]["source"]) == SCHEMA


@pytest.mark.parametrize(("effort", "budget"), [("low", 1024), ("none", 0), ("most", None)])
def test_an_effort_limits_the_thoughts(
    client: openai.OpenAI, effort: Any, budget: int | None
) -> None:
    response = client.responses.create(
        input="echo", model="", reasoning={"effort": effort}, store=False
    )
    limit = json.loads(response.output_text).get("thinking")
    assert (limit and limit.get("tokens", 0)) == budget
    extra: Any = response.model_extra
    notes = extra["localspec"].get("ignored", [])
    assert any("'reasoning.effort'" in note for note in notes) == (budget is None)


@pytest.mark.parametrize(
    ("reasoning", "budget"),
    [
        ({"max_tokens": 7}, 7),
        ({"enabled": False}, 0),
        ({"enabled": False, "effort": "high"}, 0),
        ({"enabled": True}, None),
        ({"enabled": True, "effort": "low"}, 1024),
    ],
)
def test_the_switch_of_another_router_is_read(home: Home, reasoning: Any, budget: Any) -> None:
    body = {"input": "echo", "reasoning": reasoning, "store": False}
    response = home.request("POST", "/v1/responses", body).json
    frame = json.loads(response["output"][0]["content"][0]["text"])
    assert frame.get("thinking", {}).get("tokens") == budget
    assert frame["prompt"]["template_kwargs"]["enable_thinking"] == (budget != 0)
    assert "ignored" not in response["localspec"]


def test_the_asynchronous_client(home: Home) -> None:
    async def use() -> tuple[str, str, list[Any]]:
        async with async_openai_client(home) as client:
            response = await client.responses.create(input="say so", model="")
            async with client.responses.stream(input="say so", model="") as stream:
                types = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert (await client.responses.retrieve(final.id)).output_text == "so"
            return response.output_text, final.output_text, types

    text, final_text, types = asyncio.run(use())
    assert text == final_text == "so"
    assert types[-1] == "response.completed"


def test_a_response_is_stored_retrieved_listed_and_deleted(
    home: Home, client: openai.OpenAI
) -> None:
    tools: Any = [WEATHER]
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    first = client.responses.create(
        input=text, model="", tools=tools, instructions="Once.", metadata={"a": "b"}
    )
    result = result_of(first.output[-1].to_dict()["call_id"], "say rain")
    second = client.responses.create(input=[result], model="", previous_response_id=first.id)
    retrieved = client.responses.retrieve(first.id)
    assert retrieved.to_dict().keys() >= {"instructions", "usage"}
    assert [retrieved.output, retrieved.metadata, retrieved.tools, retrieved.usage] == [
        *(first.output, {"a": "b"}, first.tools, first.usage)
    ]
    raw = home.request("GET", f"/v1/responses/{second.id}/input_items?order=asc")
    page = ResponseItemList.model_validate_json(raw.body, strict=True)
    kinds = [item.type for item in page.data]
    assert kinds == [*("message", "reasoning", "message", "function_call", "function_call_output")]
    assert [item.id for item in page.data[1:4]] == [item.id for item in first.output]
    pages = [each.id for each in client.responses.input_items.list(second.id, limit=2)]
    assert pages == [item.id for item in reversed(page.data)]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    conversation = home.request("GET", "/localspec/conversations/last").json
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant"]


def test_a_response_is_deleted_with_its_conversation_or_question(
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
    paths = (home.root / "data").rglob("*") if (home.root / "data").exists() else ()
    assert not any(first.id.encode() in path.read_bytes() for path in paths if path.is_file())


def items_of_two_turns(client: openai.OpenAI) -> list[Any]:
    """Return all items of a call, its result and a third question, which is not sent yet."""
    items: list[Any] = [{"role": "user", "content": "raw " + call("weather", {"city": "x"})}]
    first = client.responses.create(input=items, model="", tools=[WEATHER])
    result = result_of(first.output[0].to_dict()["call_id"], "say so")
    items += [*(item.to_dict() for item in first.output), result]
    second = client.responses.create(input=items, model="", tools=[WEATHER])
    return [
        *items,
        *(item.to_dict() for item in second.output),
        {"role": "user", "content": "say z"},
    ]


def test_a_resent_history_continues_its_conversation(home: Home, client: openai.OpenAI) -> None:
    before = home.request("GET", "/localspec/conversations").json["conversations"]
    items = items_of_two_turns(client)
    client.responses.create(input=items, model="", tools=[WEATHER])
    newest, *others = home.request("GET", "/localspec/conversations").json["conversations"]
    assert (others, newest["messages"]) == (before, 6)
    items[0]["content"] += " or another"  # makes it another conversation, whatever item ids it has
    client.responses.create(input=items, model="", tools=[WEATHER])
    after = home.request("GET", "/localspec/conversations").json["conversations"]
    assert len(after) == len(before) + 2


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items[0].update(content=items[0]["content"] + " or another"),
        lambda items: items[2].update(output=items[2]["output"] + " and more"),
        lambda items: items[3]["content"][0].update(text="so!"),
        lambda items: [item.update(call_id="call_other") for item in items[1:3]],
    ],
    ids=["question", "result", "answer", "call"],
)
def test_a_changed_history_starts_a_new_conversation(
    home: Home, client: openai.OpenAI, change: Callable[[list[Any]], None]
) -> None:
    """The item ids are those of a stored response, but the texts differ from the stored ones."""
    items = items_of_two_turns(client)
    change(items)
    client.responses.create(input=items, model="", tools=[WEATHER])
    newest, older = home.request("GET", "/localspec/conversations").json["conversations"][:2]
    assert (newest["messages"], older["messages"]) == (6, 4)
    messages = home.request("GET", f"/localspec/conversations/{newest['id']}").json["messages"]
    question, called, result, answer, *_ = messages
    assert question["content"] == items[0]["content"]
    assert called["tool_calls"][0]["id"] == items[1]["call_id"] == result["tool_call_id"]
    assert result["content"] == items[2]["output"]
    assert answer["content"] == items[3]["content"][0]["text"]


def test_branches_of_a_response_do_not_mix(client: openai.OpenAI) -> None:
    first = client.responses.create(input="say one", model="", instructions="Once.")
    client.responses.create(input="say two", model="", previous_response_id=first.id)
    branch = client.responses.create(input="echo", model="", previous_response_id=first.id)
    contents = [message["content"] for message in read_prompt(branch)["messages"]]
    assert contents == ["say one", "one", "echo"]
    final = client.responses.create(input="echo", model="", previous_response_id=branch.id)
    assert len(read_prompt(final)["messages"]) == 5


def test_concurrent_branches_of_a_response_do_not_mix(home: Home, client: openai.OpenAI) -> None:
    first = client.responses.create(input="say one", model="")
    with client.responses.stream(
        input="slow 20", model="", previous_response_id=first.id
    ) as stream:
        next(iter(stream))
        quick = client.responses.create(input="say x", model="", previous_response_id=first.id)
        slow = stream.get_final_response()
    for branch in (slow, quick):
        echo = client.responses.create(input="echo", model="", previous_response_id=branch.id)
        contents = [message["content"] for message in read_prompt(echo)["messages"]]
        assert contents[::2] == ["say one", "slow 20" if branch is slow else "say x", "echo"]
    before = home.request("GET", "/localspec/statistics").json
    client.responses.create(input="say y", model="", previous_response_id=first.id)
    after = home.request("GET", "/localspec/statistics").json
    assert after["total"]["answers"] == before["total"]["answers"] + 1


def test_item_references_are_resolved(client: openai.OpenAI) -> None:
    text = "raw <think>so so</think>well: " + call("weather", {"city": "Oslo"})
    first = client.responses.create(input=text, model="", tools=[WEATHER])
    items: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = result_of(first.output[-1].to_dict()["call_id"], "echo")
    second = client.responses.create(input=[*items, output], model="", tools=[WEATHER])
    turn, _ = read_prompt(second)["messages"]
    assert (turn["content"], turn["extra"]["reasoning_content"]) == ("well:", "so so")
    assert turn["extra"]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_a_response_is_not_stored_without_store(home: Home, client: openai.OpenAI) -> None:
    before = home.request("GET", "/localspec/conversations").json
    response = client.responses.create(input="say x", model="", store=False)
    assert home.request("GET", "/localspec/conversations").json == before
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="say y", model="", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"
    home.run("config", "set", "keep_responses", "false")
    default = client.responses.create(input="say x", model="")
    assert default.model_dump()["store"] is False
    assert home.request("GET", "/localspec/conversations").json == before
    requested = client.responses.create(input="say x", model="", store=True)
    home.run("config", "unset", "keep_responses")
    assert client.responses.retrieve(requested.id).id == requested.id


def test_input_tokens(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count
    short = count(input="say x", model="").input_tokens
    long = count(input="say x y", instructions="Be brief.", model="").input_tokens
    assert 0 < short < long


def test_a_disconnect_ends_only_that_request(home: Home, client: openai.OpenAI) -> None:
    with home.streaming("slow 100") as bystander:
        bystander.readline()
        stream = client.responses.create(input="forever", model="", stream=True)
        for event in stream:
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                break
        stream.close()
        wait_for(lambda: home.status()["running"] == 1, "the engine to be free of it")
        assert b'"content":"99 "' in bystander.read()

    def cancelled() -> Any:
        response = home.request("GET", f"/v1/responses/{name}").json
        return response if response.get("status") == "cancelled" else None

    stored = wait_for(cancelled, "what it got to be kept")
    assert stored["output"][0]["content"][0]["text"].startswith("0 ")


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
    finished = client.responses.create(input="say x", model="")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(finished.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_0")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
FILE = {"type": "input_file"}
UNNAMED = {"type": "function", "name": {"x": 1}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0].file_data"),
        ({"input": [result_of("1", [IMAGE])]}, "input[0].output[0].image_url"),
        ({"input": [{"type": "additional_tools", "tools": [UNNAMED]}]}, "input[0].tools[0].name"),
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
def test_a_refusal_names_the_field_of_the_client(
    home: Home, fields: dict[str, Any], param: str
) -> None:
    answer = home.request("POST", "/v1/responses", {"input": "say x", **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith(param)
    assert param.split("[")[0].split(".")[0] in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


def test_null_fields_count_as_absent(home: Home) -> None:
    fields = [
        *("instructions", "previous_response_id", "store", "background", "conversation", "prompt"),
        *("metadata", "max_output_tokens", "tools", "tool_choice", "reasoning", "text", "include"),
        *("top_logprobs", "truncation", "user", "stream", "temperature", "top_p", "model"),
    ]
    answer = home.request("POST", "/v1/responses", {"input": "say x", **dict.fromkeys(fields)})
    assert answer.status == 200, answer.body


def test_a_deleted_branch_leaves_no_text_on_disk() -> None:
    with scripted_home(log_prompts="true") as home:

        def respond(text: str, **fields: Any) -> str:
            answer = home.request("POST", "/v1/responses", {"input": text, **fields})
            name: str = answer.json["id"]
            return name

        first = respond("say one")
        respond("say two", previous_response_id=first)
        branch = respond("say secret", previous_response_id=first)
        assert find_words(home, "secret", branch)
        home.request("DELETE", "/localspec/conversations/last")
        assert not find_words(home, "secret", branch)
        assert home.request("GET", f"/v1/responses/{first}").status == 200
