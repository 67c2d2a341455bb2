"""Anthropic's Messages API with the official client: text, thoughts, tools and errors."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from typing import Any, cast

import anthropic
import msgspec
import pytest

from localspec.daemon.completion.request import chat_prompt
from localspec.daemon.http.requests import MAX_BODY_BYTES
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest
from localspec.extras.anthropic.answer import model_page
from localspec.extras.anthropic.request import chat_request
from localspec.extras.anthropic.wire import MessagesRequest
from localspec.protocol import frames
from localspec.protocol.answers import Model
from localspec.protocol.fields import IgnoredFields
from localspec.protocol.reading import BadBody, decode
from tests.support import templates
from tests.support.daemons import Home, wait_for
from tests.support.official_clients import async_anthropic_client

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
PIXEL: Any = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def text_block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def build_body(text: Any, **fields: Any) -> dict[str, Any]:
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"model": "", "max_tokens": 2000, "messages": messages, **fields}


def translate(text: Any = "", **fields: Any) -> tuple[Any, list[str]]:
    body = decode(json.dumps({**build_body(text), **fields}).encode(), MessagesRequest)
    ignored = IgnoredFields()
    return chat_request(body, ignored)[0], ignored


def to_plain_messages(request: Any) -> list[dict[str, Any]]:
    messages = msgspec.to_builtins(request.messages)
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def test_blocks_become_the_messages_that_templates_know() -> None:
    cached = {"type": "ephemeral"}
    use = {"type": "tool_use", "id": "toolu_abc", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_abc", "is_error": True}
    request, ignored = translate(
        [
            {"role": "user", "content": [text_block("a"), text_block("b")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "…"},
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    text_block("Let me look."),
                    {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    text_block("Here:", cache_control=cached),
                    {**result, "content": [text_block("no such city")]},
                ],
            },
            {"role": "assistant", "content": "It"},
            {"role": "assistant", "content": [text_block("rains")]},
            {"role": "user", "content": [{"type": "new_block", "text": "?"}]},
            {"role": "user", "content": "Sure?"},
        ],
        system=[text_block("Be", cache_control=cached), text_block("brief.")],
    )
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    call = {"id": "abc", "type": "function", "function": function}
    assert to_plain_messages(request) == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a\nb"},
        {
            **{"role": "assistant", "content": "Let me look."},
            **{"reasoning_content": "hm", "tool_calls": [call]},
        },
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "abc"},
        {"role": "user", "content": "Here:"},
        {"role": "assistant", "content": "It\nrains"},
        {"role": "user", "content": "Sure?"},
    ]
    unknown = ["messages[1].content[3] (server_tool_use)", "messages[5].content[0] (new_block)"]
    assert ignored == unknown


def test_the_template_decides_which_earlier_thoughts_are_kept() -> None:
    """This template keeps the thoughts since the last question."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    thinking = {"type": "thinking", "signature": "x"}
    request, _ = translate(
        [
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": [{**thinking, "thinking": "early"},
                                              {"type": "text", "text": "Noon."}]},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": [{**thinking, "thinking": "late"}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
        ],
        thinking=THINK,
    )  # fmt: skip
    renderer = TemplateRenderer(templates.template("chatml_thinking"), "", "")
    try:
        text = renderer.render(chat_prompt(request))
    finally:
        renderer.close()
    assert "<think>\nlate\n</think>" in text
    assert "early" not in text


def test_tools_of_unknown_types_are_ignored_and_named() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        WEATHER,
        {"type": "code_execution_20250825", "name": "code_execution"},
        {**NOW, "type": "custom", "strict": True},
    ]
    request, ignored = translate("hi", tools=tools, mcp_servers=[{"name": "x"}], unknown=1)
    assert [tool.template_object()["function"] for tool in request.tools] == [
        {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
        {"name": "now", "parameters": {"type": "object"}},
    ]
    hosted = ["tools[0] (web_search_20250305)", "tools[2] (code_execution_20250825)"]
    assert ignored == ["mcp_servers", *hosted]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "now"}, {"function": {"name": "now"}, "type": "function"}),
    ],
)
def test_tool_choice_is_translated(choice: Any, expected: Any) -> None:
    request, _ = translate("hi", tools=[WEATHER, NOW], tool_choice=choice)
    assert msgspec.to_builtins(request.tool_choice) == expected
    parallel = False if "disable_parallel_tool_use" in choice else None
    assert request.parallel_tool_calls == parallel


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        (None, 0),
        ({"type": "disabled"}, 0),
        (THINK, 1024),
        ({"type": "adaptive"}, -1),
        ({"type": "of_next_year"}, -1),
    ],
)
def test_thinking_becomes_a_token_budget(thinking: Any, budget: int) -> None:
    request, _ = translate("hi", thinking=thinking)
    assert request.reasoning_budget_tokens == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": PIXEL}]}]},
         "messages[0].content[0].source.data"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "base64", "media_type": "application/pdf", "data": "AAA="}}]}]},
         "messages[0].content[0].source.data"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "url", "url": "https://example.com/a.pdf"}}]}]},
         "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)  # fmt: skip
def test_invalid_blocks_are_refused_by_path(fields: Any, param: str) -> None:
    with pytest.raises((BadBody, InvalidRequest)) as caught:
        translate("hi", **fields)
    assert getattr(caught.value, "param", None) == param
    assert str(caught.value).startswith(f"'{param}'")


def first_block(answer: Any) -> Any:
    return answer.content[0]


def block_types(answer: anthropic.types.Message) -> list[str]:
    return [block.type for block in answer.content]


def test_text_is_the_same_with_and_without_streaming(client: anthropic.Anthropic) -> None:
    complete = client.messages.create(**build_body("say one two three"))
    assert complete.id.startswith("msg_")
    assert str(complete._request_id).startswith("req_")
    assert (complete.role, complete.stop_reason) == ("assistant", "end_turn")
    assert complete.stop_sequence is None
    assert first_block(complete).text == "one two three"
    usage = complete.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 1, 3)
    with client.messages.stream(**build_body("say one two three")) as stream:
        assert "".join(stream.text_stream) == "one two three"
        final = stream.get_final_message()
    assert first_block(final).text == "one two three"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (3, 1)
    assert final.usage.output_tokens == usage.output_tokens


def test_the_asynchronous_client(home: Home) -> None:
    async def use() -> tuple[Any, Any]:
        async with async_anthropic_client(home) as client:
            complete = await client.messages.create(**build_body("say one two"))
            async with client.messages.stream(
                **build_body(f"raw {CALL}", tools=[WEATHER])
            ) as stream:
                return complete, await stream.get_final_message()

    complete, streamed = asyncio.run(use())
    assert first_block(complete).text == "one two"
    assert first_block(streamed).input == {"city": "Paris"}
    assert streamed.stop_reason == "tool_use"


def test_events_come_in_the_published_order(home: Home) -> None:
    text = f"raw <think>hm, let me see</think>Well, both.\n{CALL}\n{CALL}"
    body = build_body(text, tools=[WEATHER], thinking=THINK, stream=True)
    answer = home.request("POST", "/v1/messages", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    descriptions = [
        " ".join([event["type"], *[event[k]["type"] for k in ("content_block", "delta")
                                  if "type" in event.get(k, {})]])
        for event in events
    ]  # fmt: skip
    call = ["content_block_start tool_use", "content_block_delta input_json_delta",
            "content_block_stop"]  # fmt: skip
    begun, delta, ended = (f"content_block_{part}" for part in ("start", "delta", "stop"))
    thinking = [f"{begun} thinking", "ping", f"{delta} thinking_delta", f"{delta} signature_delta"]
    words = [f"{begun} text", f"{delta} text_delta", ended]
    assert [name for name, _ in groupby(descriptions)] == [
        *("message_start", *thinking, ended, *words, *call, *call, "message_delta", "message_stop")
    ]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == [0, 1, 2, 3]
    pieces = [event["delta"]["partial_json"] for event in events
              if event.get("delta", {}).get("partial_json")]  # fmt: skip
    assert len(pieces) > 4  # arguments are streamed in pieces
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["localspec"]["speculation"]["drafted"] == 4


def test_thoughts_are_a_block_that_can_be_omitted(client: anthropic.Anthropic) -> None:
    text = "raw <think>hm</think>So."
    for display, thoughts in ((None, "hm"), ("omitted", "")):
        thinking: Any = {**THINK, "display": display}
        body = build_body(text, thinking=thinking)
        complete = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        for answer in (complete, streamed):
            assert block_types(answer) == ["thinking", "text"]
            thought, text_block = cast(list[Any], answer.content)
            assert thought.thinking == thoughts
            assert thought.signature
            assert text_block.text == "So."


def test_thinking_reaches_the_engine_and_the_template(client: anthropic.Anthropic) -> None:
    def frame(**fields: Any) -> frames.Generate:
        answer = client.messages.create(**build_body("echo", **fields))
        return msgspec.json.decode(first_block(answer).text, type=frames.Generate)

    for fields, tokens in (({}, 0), ({"thinking": THINK}, 1024)):
        echoed = frame(**fields)
        assert echoed.thinking is not None
        assert echoed.thinking.tokens == tokens
        assert isinstance(echoed.prompt, frames.ChatPrompt)
        assert echoed.prompt.template_kwargs["enable_thinking"] == bool(tokens)
    adaptive = frame(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert adaptive.thinking is None
    assert isinstance(adaptive.prompt, frames.ChatPrompt)
    assert adaptive.prompt.template_kwargs["reasoning_effort"] == "low"


def test_a_tool_loop_of_five_turns(client: anthropic.Anthropic) -> None:
    """Each tool result is what the scripted model writes next."""
    messages: list[Any] = [{"role": "user", "content": f"raw Turn 0.\n{CALL}"}]
    for turn in range(1, 6):
        with client.messages.stream(**build_body(messages, tools=[WEATHER, NOW])) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        text, call = cast(list[Any], answer.content)
        assert text.text == f"Turn {turn - 1}."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Paris"})
        content = f"raw Turn {turn}.\n{CALL}" if turn < 5 else "raw Sunny."
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        messages += [{"role": "assistant", "content": answer.content},
                     {"role": "user", "content": [result]}]  # fmt: skip
    answer = client.messages.create(**build_body(messages, tools=[WEATHER, NOW]))
    assert (answer.stop_reason, block_types(answer)) == ("end_turn", ["text"])


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**build_body("slow 9", max_tokens=3)).stop_reason == "max_tokens"
    full = client.messages.create(**build_body("full"))
    assert full.stop_reason == "model_context_window_exceeded"
    cut = client.messages.create(
        **build_body('raw <tool_call>\n{"name": "weather", "arg', tools=[WEATHER])
    )
    assert block_types(cut) == ["tool_use"]
    assert first_block(cut).input == {}


def test_ignored_tools_are_reported(client: anthropic.Anthropic) -> None:
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    expected = ["tools[0] (web_search_20250305)"]
    complete = client.messages.create(**build_body("say so", tools=tools))
    assert complete.model_extra is not None
    assert complete.model_extra["localspec"]["ignored"] == expected
    for event in client.messages.create(**build_body("say so", tools=tools), stream=True):
        if event.type == "message_start":
            assert event.message.model_extra is not None
            assert event.message.model_extra["localspec"]["ignored"] == expected


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic) -> None:
    """The scripted engine counts the words of the last message."""
    count = client.messages.count_tokens(
        model="", system="ab", messages=[{"role": "user", "content": "c d"}], thinking=THINK
    )
    assert count.input_tokens == 2


def test_closing_a_stream_frees_the_engine(client: anthropic.Anthropic, home: Home) -> None:
    with client.messages.create(**build_body("forever"), stream=True) as stream:
        next(event for event in stream if event.type == "content_block_delta")
        assert home.status()["running"] == 1
    wait_for(lambda: home.status()["running"] == 0, "the request's end")
    assert home.chat("running").text == "0"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"max_tokens": -1}, 400, "invalid_request_error", "'max_tokens' must be at least 0"),
        ({"model": "claude-x"}, 404, "not_found_error", "claude-x"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": PIXEL}]}]},
         400, "invalid_request_error", "is no picture; PNG, JPEG, GIF, BMP"),
        ({"messages": [{"role": "user", "content": "refuse queue_full"}]},
         503, "overloaded_error", "Refused as told."),
        ({"messages": [{"role": "user", "content": "refuse worker_timeout"}]},
         504, "timeout_error", "Refused as told."),
        ({"messages": [{"role": "user", "content": "die SIGKILL"}]}, 500, "api_error", ""),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_anthropic(
    client: anthropic.Anthropic, fields: Any, status: int, kind: str, message: str
) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**{**build_body("hi"), **fields})
    error: Any = caught.value.body
    assert caught.value.status_code == status
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert message in error["error"]["message"]
    assert error["request_id"] == caught.value.request_id
    assert error["request_id"].startswith("req_")


def test_http_errors_have_the_shape_of_anthropic(home: Home) -> None:
    for method, target, body, status in (
        ("GET", "/v1/messages", None, 405),
        ("POST", "/v1/messages/batches", {}, 404),
        ("POST", "/v1/messages", b"no JSON", 400),
        ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, 400),
        ("POST", "/v1/messages", b" " * (MAX_BODY_BYTES + 1), 413),
    ):
        answer = home.request(method, target, body)
        assert answer.status == status, answer.body
        assert answer.json["type"] == "error"
        assert answer.error["message"]


def test_an_error_in_a_stream_is_an_event(client: anthropic.Anthropic) -> None:
    with (
        client.messages.create(**build_body("die SIGKILL"), stream=True) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        list(stream)
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


def test_models_have_the_shape_of_anthropic(client: anthropic.Anthropic) -> None:
    model = client.models.retrieve("builtin")
    assert (model.id, model.lifecycle, model.type) == ("builtin", "active", "model")
    assert model.max_input_tokens
    assert model.max_tokens == model.max_input_tokens
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("no-such-pair")
    assert cast(Any, missing.value.body)["error"]["type"] == "not_found_error"
    listed = client.models.list()
    assert listed.data[0].id == listed.first_id
    assert listed.data[-1].id == listed.last_id
    assert model.id in [entry.id for entry in listed.data]
    assert not listed.has_more
    assert listed.data[0].created_at.year > 2000


def test_models_come_in_pages() -> None:
    names = ["a", "b", "c"]
    models = [Model(name, 0) for name in names]

    def page(**query: str) -> tuple[list[str], bool]:
        found = model_page(models, query)
        ids = [model.id for model in found.data]
        assert (found.first_id, found.last_id) == ((ids[0], ids[-1]) if ids else (None, None))
        return ids, found.has_more

    assert page() == (names, False)
    assert page(limit="2") == (["a", "b"], True)
    assert page(limit="2", after_id="a") == (["b", "c"], False)
    assert page(after_id="c") == ([], False)
    assert page(limit="1", before_id="c") == (["b"], True)
    assert page(before_id="b") == (["a"], False)
    for query in ({"limit": "0"}, {"limit": "x"}, {"after_id": "d"}, {"before_id": "d"}):
        with pytest.raises(InvalidRequest) as refused:
            page(**query)
        assert refused.value.param in query


def test_only_active_models_exist(client: anthropic.Anthropic) -> None:
    assert not client.models.list(lifecycle=["retired"]).data
    assert client.models.list(lifecycle=["active", "retired"], limit=1).data
    with pytest.raises(anthropic.BadRequestError, match="no model 'x'"):
        client.models.list(after_id="x")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/files"), ("POST", "/v1/complete"), ("DELETE", "/v1/messages/batches/x")],
)
def test_an_unknown_path_is_an_error_of_anthropic(
    client: anthropic.Anthropic, method: str, path: str
) -> None:
    send: Any = {"GET": client.get, "POST": client.post, "DELETE": client.delete}[method]
    with pytest.raises(anthropic.NotFoundError) as missing:
        send(path, cast_to=object)
    body = cast(Any, missing.value.body)
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert missing.value.request_id
