"""Tools through the API and the official client: offered, required, called and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import jsonschema_rs
import openai
import pytest

from benchmarks.synthetic import target_cycle, write_model
from localspec.chat import tools
from localspec.chat.families import read_family
from localspec.chat.families.command_r import COMMAND_R
from localspec.chat.families.deepseek import DEEPSEEK_R1
from localspec.chat.families.functionary import FUNCTIONARY_3_2
from localspec.chat.families.gemma import GEMMA
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.granite import GRANITE
from localspec.chat.families.hermes import HERMES
from localspec.chat.families.kimi import KIMI_K2, KIMI_K3
from localspec.chat.families.lfm2 import LFM2
from localspec.chat.families.llama import LLAMA
from localspec.chat.families.minimax import MINIMAX_M3
from localspec.chat.families.mistral import MISTRAL, MISTRAL_ARGS
from localspec.chat.families.muse import MUSE
from localspec.chat.families.qwen_coder import TAGS
from localspec.daemon.completion.request import chat_frames
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.calls import EXPLAINED, ToolSet
from localspec.protocol.reading import decode
from localspec.protocol.requests import ChatRequest
from tests.support import templates
from tests.support.asynchronous import asynchronous
from tests.support.daemons import Home, real_home, scripted_home
from tests.support.official_clients import KNOWS_TOOLS, async_openai_client, openai_client
from tests.support.pairs import CONTEXT_SHAPE, N_VOCAB

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FORMATS = {
    "chatml": HERMES,
    "chatml_thinking": HERMES,
    "chatml_xml_calls": TAGS,
    "modes": HERMES,
    "channels": HARMONY,
    "headers": LLAMA,
    "documents": HERMES,
    "documents_marked": GRANITE,
    "inst": MISTRAL,
    "inst_args": MISTRAL_ARGS,
    "turns": EXPLAINED,
    "plain_turns": EXPLAINED,
    "think_opened": EXPLAINED,
    "turns_and_calls": GEMMA,
    "chatml_python_calls": LFM2,
    "elements": MINIMAX_M3,
    "sections": KIMI_K2,
    "actions": COMMAND_R,
    "fenced_calls": DEEPSEEK_R1,
    "recipients": MUSE,
    "xml_sections": KIMI_K3,
    "headers_recipients": FUNCTIONARY_3_2,
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Qwen3-Coder": TAGS,
    "Qwen3.5-4B": TAGS,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "ibm-granite-granite-4.1": HERMES,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL_ARGS,
    "unsloth-mistral-Devstral-Small-2507": MISTRAL_ARGS,
    "google-gemma-2-2b-it": EXPLAINED,
    "google-gemma-4-31B-it": GEMMA,
}


def request(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW], **fields}
    return decode(json.dumps(body).encode(), ChatRequest)


def translate(template: str | None = KNOWS_TOOLS, **fields: Any) -> frames.Generate:
    form = EXPLAINED if template is None else read_family(template)
    [frame] = chat_frames(request(**fields), form)
    return frame


def test_every_family_has_its_format() -> None:
    assert {file.stem for file in templates.FAMILIES.glob("*.jinja")} <= FORMATS.keys()


@pytest.mark.parametrize("name", [name for name in FORMATS if name in templates.files()])
def test_a_conversation_with_calls_renders_in_every_template(name: str) -> None:
    template = templates.template(name)
    assert read_family(template) == FORMATS[name]
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    messages: list[Any] = [
        {"role": "user", "content": "Is it raining in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    ]
    renderer = TemplateRenderer(template, "<s>", "</s>")
    try:
        for conversation in (messages[:1], messages):
            prompt = translate(template, messages=conversation).prompt
            assert isinstance(prompt, frames.ChatPrompt)
            text = renderer.render(prompt)
            assert "Tells the weather." in text
        assert "sunny" in text
        assert '\\"city\\"' not in text  # the arguments are an object, not text in text
        plain = translate(template, tools=None, messages=messages[:1]).prompt
        assert isinstance(plain, frames.ChatPrompt)
        assert "Tells" not in renderer.render(plain)
    finally:
        renderer.close()


def test_an_older_granite_is_known_by_its_marker() -> None:
    assert read_family("{% if tools %}<|tool_call|>{% endif %}") == GRANITE


@pytest.mark.parametrize(
    "template",
    [
        "{# no tools here #}{{ messages[0].content }}",
        "You have no tools. {{ messages[0].content }}",
        "{% if messages[0].role == 'tools' %}{{ raise_exception(\"no 'tools' here\") }}{% endif %}",
        "{% set builtin_tools = [] %}{{ messages[0].content }}",
    ],
)
def test_a_template_that_only_speaks_of_tools_knows_none(template: str) -> None:
    assert read_family(template) == EXPLAINED
    assert read_family(template + "{%- if tools %}<tool_call>{% endif %}") == HERMES
    assert read_family(template + "{{- tools | tojson }}<tool_call>") == HERMES


def test_tools_are_left_out_when_none_may_be_called() -> None:
    prompt = translate(tool_choice="none").prompt
    assert isinstance(prompt, frames.ChatPrompt)
    assert prompt.tools is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_required_call_is_one_of_the_tools(choice: Any) -> None:
    calls = translate(tool_choice=choice).tools
    assert calls is not None
    assert calls.required
    assert not calls.parallel
    assert list(calls.schemas) == (["weather", "now"] if choice == "required" else ["now"])
    nothing = {
        "type": "object",
        "properties": {},
    }  # OpenAI's default for a function without parameters
    assert calls.schemas == ({"weather": SCHEMA} if choice == "required" else {}) | {"now": nothing}


def test_a_request_defines_the_allowed_calls() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    calls = translate(tools=[strict, NOW], parallel_tool_calls=False).tools
    schemas = {"weather": SCHEMA, "now": {"type": "object", "properties": {}}}
    assert calls == ToolSet(HERMES, schemas, False, False, ["weather"])
    several = translate(tool_choice="required", parallel_tool_calls=True).tools
    assert several is not None
    assert several.parallel
    beside = translate(response_format={"type": "json_object"})
    assert beside.tools is not None
    assert beside.constraint is not None


def allow_only(mode: str, *names: str | None) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("names", [["now"], ["weather"], ["now", "weather"]])
def test_only_allowed_tools_are_offered(mode: str, names: list[str]) -> None:
    chat = request(tool_choice=allow_only(mode, *names))
    tools.check_tools(chat)
    assert {tool.function.name for tool in chat.tools or []} == set(names)
    assert chat.tool_choice == mode


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allow_only("required")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allow_only("auto", "now", "no")}, "tool_choice.allowed_tools.tools[1]"),
        ({"tool_choice": allow_only("auto", None)}, "tool_choice.allowed_tools.tools[0]"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "regex": "a"}, "tool_choice"),
    ],
)
def test_contradictory_tool_fields_are_named(fields: Any, param: str) -> None:
    def ask() -> None:
        tools.check_tools(request(**fields))
        translate(**fields)

    with pytest.raises(InvalidRequest) as refused:
        ask()
    assert refused.value.param == param


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    with scripted_home("--template", KNOWS_TOOLS) as home:
        yield home


@pytest.fixture
def client(api: Home) -> Iterator[openai.OpenAI]:
    with openai_client(api) as client:
        yield client


def build_chat(text: str) -> dict[str, Any]:
    return {"model": "", "messages": [{"role": "user", "content": text}], "tools": [WEATHER, NOW]}


def test_the_official_client_gets_a_call(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        **build_chat(f"raw <think>hm</think>Well.\n{CALL}")
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    assert choice.message.model_extra == {"reasoning_content": "hm"}
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )


def test_the_official_client_streams_calls(client: openai.OpenAI) -> None:
    names, arguments = ["", ""], ["", ""]
    reasons = set()
    for chunk in client.chat.completions.create(**build_chat(f"raw {CALL}\n{CALL}"), stream=True):
        choice = chunk.choices[0]
        reasons.add(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            names[call.index] += call.function.name or ""
            arguments[call.index] += call.function.arguments or ""
    assert names == ["weather", "weather"]
    assert [json.loads(argument) for argument in arguments] == [{"city": "Paris"}] * 2
    assert reasons == {None, "tool_calls"}


@asynchronous
async def test_the_official_client_works_asynchronously(api: Home) -> None:
    async with async_openai_client(api) as client:
        complete = await client.chat.completions.create(**build_chat(f"raw {CALL}"))
        stream = await client.chat.completions.create(
            **build_chat("raw <think>hm</think>yes"), stream=True, n=2
        )
        thoughts = ""
        async for chunk in stream:
            for choice in chunk.choices:
                thoughts += (choice.delta.model_extra or {}).get("reasoning_content", "")
    [call] = complete.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, thoughts) == ("weather", "hmhm")


def test_logprobs_come_with_the_text_and_without_it(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "raw <think>a</think>bcd"}],
        logprobs=True,
        stream=True,
    )
    entries = [
        entry.token
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(entries) == "<think>a</think>bcd"


BOOKING = {
    "type": "object",
    "properties": {"seats": {"enum": [1, 22]}, "day": {"enum": ["2026-05-01", "any"]}},
    "required": ["seats", "day"],
}
# Models whose answers are messages, sections or notations that no other model has.
SPOKEN = "channels recipients xml_sections headers_recipients chatml_python_calls elements".split()


@pytest.fixture(scope="module")
def served() -> Iterator[Home]:
    with real_home() as home:
        for name in SPOKEN:
            file = home.root / f"{name}.gguf"
            cycle = target_cycle(N_VOCAB)
            write_model(file, CONTEXT_SHAPE, cycle, template=templates.template(name))
            added = home.request("POST", "/localspec/pairs", {"name": name, "target": str(file)})
            assert added.status == 201, added.body
        yield home


@pytest.mark.parametrize("name", SPOKEN)
def test_a_required_call_of_a_real_engine_obeys_its_schema(served: Home, name: str) -> None:
    book = {"type": "function", "function": {"name": "book", "parameters": BOOKING}}
    body: dict[str, Any] = {
        "model": name,
        "messages": [{"role": "user", "content": "Two seats, please."}],
        "tools": [book, NOW],
        "tool_choice": {"type": "function", "function": {"name": "book"}},
        "temperature": 0,
        "max_tokens": 500,
        # A message of thoughts may come first, and this model would not end it.
        "logit_bias": {"a": -100, "s": -100},
        "reasoning_budget_tokens": 8,
    }
    answer = served.request("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    assert not choice["message"].get("content")
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "book"
    jsonschema_rs.validate(BOOKING, json.loads(call["function"]["arguments"]))


PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'


def test_a_custom_tool_is_called_with_a_text_and_read_again(client: openai.OpenAI) -> None:
    grammar: Any = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    tools: Any = [NOW, {"type": "custom", "custom": {**PATCH["custom"], "format": grammar}}]
    body = {**build_chat(f"raw {PATCH_CALL}"), "tools": tools}
    answer = client.chat.completions.create(**body)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [called] = choice.message.tool_calls or []
    assert called.type == "custom"
    assert (called.custom.name, called.custom.input) == ("patch", "a\nb")
    assert (answer.model_extra or {})["localspec"]["ignored"] == ["tools[1].custom.format"]
    body["messages"] += [
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": called.id, "content": "echo"},
    ]
    choose: Any = {"type": "custom", "custom": {"name": "patch"}}
    text = client.chat.completions.create(**body, tool_choice=choose).choices[0].message.content
    frame = json.loads(text or "")
    assert list(frame["tools"]["schemas"]) == ["patch"]
    offered = frame["prompt"]["tools"][1]["function"]
    assert offered["parameters"]["required"] == ["input"]
    assert "start: X" in offered["description"]
    [earlier] = frame["prompt"]["messages"][1]["extra"]["tool_calls"]
    assert earlier["function"] == {"name": "patch", "arguments": {"input": "a\nb"}}


def test_a_streamed_custom_call_has_its_whole_input(client: openai.OpenAI) -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    body = {**build_chat(f"raw {PATCH_CALL}{now}{PATCH_CALL}"), "tools": [NOW, PATCH]}
    chunks = client.chat.completions.create(**body, stream=True)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    calls: dict[int, dict[str, Any]] = {}
    for piece in [piece for delta in deltas for piece in cast(Any, delta.get("tool_calls", []))]:
        entry = calls.setdefault(piece["index"], {"text": ""})
        part = piece.get("custom") or piece["function"]
        entry["text"] += part.get("input", "") + part.get("arguments", "")
        entry |= {key: piece[key] for key in ("type", "id") if key in piece}
    assert [(call["type"], call["text"]) for call in calls.values()] == [
        ("custom", "a\nb"),
        ("function", "{}"),
        ("custom", "a\nb"),
    ]
    assert all(call["id"] for call in calls.values())


def test_an_allowed_tool_may_be_custom(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {**build_chat("echo"), "tools": [NOW, PATCH], "tool_choice": choice}
    text = client.chat.completions.create(**body).choices[0].message.content
    assert list(json.loads(text or "")["tools"]["schemas"]) == ["patch"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is missing"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "must be 'custom' or 'function'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom", "is missing"),
    ],
)
def test_a_tool_without_what_its_type_says_is_refused(
    api: Home, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/apply-template"):
        if "tool_choice" in fields and path == "/apply-template":
            continue
        answer = api.request("POST", path, {**build_chat("echo"), **fields})
        assert (answer.status, answer.error["param"]) == (400, param), path
        assert message in answer.error["message"]
