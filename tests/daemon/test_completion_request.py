"""The translation of HTTP fields to the frame that the engine gets."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from localspec.chat.families import read_family
from localspec.daemon.completion.request import (
    chat_frames,
    chat_prompt,
    completion_frames,
    translate_request,
)
from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.reading import decode
from localspec.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest

KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"
USER = [{"role": "user", "content": "hi"}]


def translate_chat(**fields: Any) -> list[Any]:
    """Return the Generate frames of a chat request as the engine receives them."""
    request = decode(json.dumps({"messages": USER, **fields}).encode(), ChatRequest)
    requests = chat_frames(request, read_family(KNOWS_TOOLS))
    return [msgspec.to_builtins(frame) for frame in requests]


def translate_completion(**fields: Any) -> list[Any]:
    request = decode(json.dumps(fields).encode(), CompletionRequest)
    return [msgspec.to_builtins(frame) for frame in completion_frames(request)]


def test_every_sampling_field_reaches_the_engine() -> None:
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    sampling |= {"typical_p": 0.8, "repeat_penalty": 1.1, "repeat_last_n": 32, "seed": 42}
    sampling |= {"frequency_penalty": 0.2, "presence_penalty": -0.2, "dry_multiplier": 0.8}
    sampling |= {"dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1}
    sampling |= {"dry_sequence_breakers": ["\n"], "ignore_eos": True}
    [frame] = translate_chat(**sampling, logit_bias={"7": -100})
    assert frame["sampling"] == {**sampling, "logit_bias": {7: -100.0}}


NULL = {"kind": "json_schema", "source": '{"type":"null"}', "param": "response_format"}
NULL_SCHEMA = {"schema": {"type": "null"}}
NULL_FORMAT = {"type": "json_schema", "json_schema": NULL_SCHEMA}
OBJECT = {"kind": "json_object", "param": "response_format"}
DEPTH = {"depth": 3, "kind": "ngram"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {}),
        ({"n_predict": -2}, {}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": None, "n_predict": 7}, {"max_tokens": 7}),
        ({"stream": None, "model": None, "user": None, "stop": None, "n": None}, {}),
        ({"tools": [], "tool_choice": None, "parallel_tool_calls": None}, {}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "", "y"]}, {"stop": ["x", "y"]}),
        ({"exact": True, "cache_prompt": False}, {"exact": True, "cache_prompt": False}),
        ({"speculative": {"enabled": False}}, {"speculative": {"enabled": False}}),
        ({"speculative": DEPTH}, {"speculative": DEPTH}),
        ({"speculative": {"depth": "auto"}}, {}),
        ({"prediction": {"content": "so"}}, {"speculative": {"prediction": "so"}}),
        ({"seed": -1}, {}),
        ({"logprobs": True}, {"top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"constraint": OBJECT}),
        ({"response_format": NULL_FORMAT}, {"constraint": NULL}),
        ({"response_format": {"type": "json_object", **NULL_SCHEMA}}, {"constraint": NULL}),
        ({"grammar": "a"}, {"constraint": {"kind": "grammar", "source": "a", "param": "grammar"}}),
        ({"regex": "a+"}, {"constraint": {"kind": "regex", "source": "a+", "param": "regex"}}),
    ],
)
def test_fields_are_translated(fields: Any, expected: Any) -> None:
    [frame] = translate_chat(**fields)
    for name in ("type", "id", "prompt"):
        del frame[name]
    frame = {name: value for name, value in frame.items() if value}
    if "top_logprobs" in expected or "cache_prompt" in expected:
        frame = {**translate_chat(**fields)[0], **frame}
    assert {name: frame.get(name) for name in expected} == expected
    always = {"type", "id", "prompt", "read_ahead", "sampling", "speculative", "shown", "thoughts"}
    assert set(frame) - set(expected) <= always


def test_messages_reach_the_template_unchanged() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    rendered = [{**calls[0], "function": {"name": "f", "arguments": {}}}]
    [frame] = translate_chat(messages=messages)
    assert frame["prompt"]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "extra": {"tool_calls": rendered}},
        {"role": "tool", "content": "done", "extra": {"tool_call_id": "1"}},
    ]


CONTINUED = {"continue_final_message": True}
HALF = {"role": "assistant", "content": "The colour is "}
PARTS = {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("Wh", "ill")]}
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Well, "}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "fields", "expected"),
    [
        ({"role": "user", "content": "so?"}, {}, {}),
        ({"role": "user", "content": "so?"}, {"add_generation_prompt": False}, {}),
        (HALF, {}, {"continued": "content", "answer_prefix": "The colour is "}),
        (HALF, {"add_generation_prompt": True}, {"continued": "content"}),
        (HALF, {**CONTINUED, "add_generation_prompt": False}, {"continued": "content"}),
        (HALF, {"continue_final_message": "content"}, {"continued": "content"}),
        (HALF, {"continue_final_message": False}, {}),
        (PARTS, {}, {"continued": "content", "answer_prefix": "Wh\n\nill"}),
        (THOUGHT, {}, {"continued": "reasoning_content", "answer_prefix": "Well, "}),
        ({**HALF, **THOUGHT, "content": "So"}, {}, {"continued": "content", "answer_prefix": "So"}),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(
    last: Any, fields: Any, expected: Any
) -> None:
    [frame] = translate_chat(messages=[*USER, last], **fields)
    prompt = frame["prompt"]
    names = ("continued", "answer_prefix")
    continuation = {name: prompt[name] for name in names if prompt.get(name)}
    assert {**continuation, **expected} == continuation
    assert bool(continuation) == bool(expected)
    add_generation_prompt = fields.get("add_generation_prompt", True)
    assert prompt.get("add_generation_prompt", True) is add_generation_prompt


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([*USER, HALF, HALF], {}, "'assistant' at the end"),
        ([*USER, HALF], {**CONTINUED, "add_generation_prompt": True}, "cannot be used together"),
        (USER, CONTINUED, "its role is 'user'"),
        ([*USER, {**HALF, "tool_calls": [CALL]}], {}, "'tool_calls'"),
        ([*USER, HALF], {"continue_final_message": "reasoning_content"}, "no 'reasoning_content'"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(
    messages: Any, fields: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        translate_chat(messages=messages, **fields)


def test_each_choice_has_a_seed_of_its_own() -> None:
    seeds = [frame["sampling"]["seed"] for frame in translate_chat(n=3, seed=2**32 - 2)]
    assert seeds == [2**32 - 2, 0, 1]
    assert [frame["sampling"] for frame in translate_chat(n=2)] == [{}, {}]


AUDIO = {"type": "input_audio"}


@pytest.mark.parametrize(
    ("prompt", "kinds"),
    [
        ("a", ["text"]),
        (["a", "b"], ["text", "text"]),
        ([1, 2], ["tokens"]),
        ([[1], [2], "c"], ["tokens", "tokens", "text"]),
    ],
)
def test_prompts_of_every_form(prompt: Any, kinds: list[str]) -> None:
    assert [frame["prompt"]["type"] for frame in translate_completion(prompt=prompt)] == kinds


def test_a_suffix_makes_it_a_fill_in_the_middle() -> None:
    [frame] = translate_completion(prompt="before", suffix="after")
    assert frame["prompt"] == {"type": "infill", "prefix": "before", "suffix": "after"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": True}}, 'logit_bias["x"]'),
        ({"grammar": "a", "regex": "b"}, "regex"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
    ],
)
def test_contradictory_fields_are_refused(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate_chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([1, [2]], "prompt"), ([[]], "prompt[0]"), ([[-1]], "prompt[0]"), (["a"] * 17, "prompt")],
)
def test_invalid_prompts_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate_completion(prompt=prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 1, "suffix": "y"}, "suffix"), ({"best_of": 2}, "best_of")],
)
def test_unsupported_fields_that_change_the_answer_are_refused(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate_completion(prompt="x", **fields)
    assert caught.value.param == param
    plain = translate_completion(prompt="x")
    assert translate_completion(prompt="x", echo=False, best_of=1) == plain


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def render_messages(*messages: dict[str, Any]) -> list[frames.Message]:
    body = json.dumps({"messages": [*messages, {"role": "user", "content": "go on"}]}).encode()
    return chat_prompt(decode(body, ChatRequest)).messages


def test_a_null_tool_result_is_empty() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    assert render_messages(call, result)[1].content == ""
    assert render_messages(call, {**result, "content": []})[1].content == ""


@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer", "critic"])
def test_null_content_is_distinguished_from_missing_content(role: str) -> None:
    for message, word in (({"content": None}, "null"), ({}, "missing")):
        with pytest.raises(InvalidRequest) as caught:
            render_messages({"role": role, **message})
        assert caught.value.message.startswith(f"'messages[0].content' is {word}")
        assert caught.value.param == "messages[0].content"


def test_a_refusal_is_text_of_its_message() -> None:
    refusal = {"type": "refusal", "refusal": "I cannot."}
    parts = [{"type": "text", "text": "Well:"}, refusal]
    assert render_messages({"role": "assistant", "content": parts})[0].content == "Well:\nI cannot."
    for role, part in (("user", refusal), ("assistant", {"type": "refusal"})):
        with pytest.raises(InvalidRequest):
            render_messages({"role": role, "content": [part]})


def test_tools_and_calls_reach_the_template_unchanged() -> None:
    parameters = {"z": 1, "type": "object", "a": None}
    function = {"parameters": parameters, "name": "b", "strict": 1}
    offered = [
        {"function": function, "x": {"y": [1, None]}, "type": "function"},
        {"function": {"name": "a", "description": None}, "type": None},
    ]
    called_function = {"arguments": '{"z":1,"a":{"y":2,"b":null}}', "name": "b"}
    call = {"type": "function", "function": called_function}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "1"}]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "so"})
    [frame] = translate_chat(tools=offered, messages=messages)
    added = {"type": "function", "function": {"name": "a"}}
    assert json.dumps(frame["prompt"]["tools"]) == json.dumps([offered[0], added])
    sent = frame["prompt"]["messages"][1]
    assert sent.get("content") is None
    arguments = {"z": 1, "a": {"y": 2, "b": None}}
    called = {**call, "function": {"arguments": arguments, "name": "b"}, "id": "1"}
    assert json.dumps(sent["extra"]["tool_calls"]) == json.dumps([called])


@pytest.mark.parametrize(
    ("fields", "template_kwargs", "limit"),
    [
        ({}, {}, None),
        ({"reasoning_effort": None, "reasoning_budget_tokens": None}, {}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}, 0),
        ({"reasoning_budget_tokens": 0}, {"enable_thinking": False, "thinking": False}, 0),
        ({"thinking_budget_tokens": 9}, {"enable_thinking": True, "thinking": True}, 9),
        ({"reasoning_budget_tokens": -1}, {"enable_thinking": True, "thinking": True}, None),
        ({"reasoning_budget_tokens": 9, "max_completion_tokens": 9},
         {"enable_thinking": True, "thinking": True}, None),
        ({"reasoning_effort": "low"},
         {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "high", "reasoning_budget_tokens": 7},
         {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, 7),
        *((switch, {"enable_thinking": False, "thinking": False}, 0) for switch in (
            {"enable_thinking": False, "reasoning_effort": "low"},
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
            {"thinking": {"type": "disabled"}, "reasoning_budget_tokens": 9},
            {"thinking": {"type": "disabled", "budget_tokens": 9}},
            {"reasoning": {"enabled": False}},
            {"reasoning": {"effort": "none"}},
            {"reasoning": {"max_tokens": 0}},
            {"thinking_budget": 0},
            {"enable_thinking": False, "thinking": {"type": "enabled"}},
        )),
        *((switch, {"enable_thinking": True, "thinking": True}, None) for switch in (
            {"enable_thinking": True},
            {"thinking": {"type": "enabled"}},
            {"thinking": {"type": "adaptive"}},
            {"reasoning": {"enabled": True}},
            {"thinking": {"type": "enabled", "budget_tokens": -1}},
        )),
        *((switch, {"enable_thinking": True, "thinking": True}, 7) for switch in (
            {"enable_thinking": True, "thinking_budget": 7},
            {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"reasoning": {"max_tokens": 7}},
            {"enable_thinking": True, "reasoning_budget_tokens": 7, "thinking_budget": 9},
        )),
        ({"reasoning": {"effort": "low"}, "enable_thinking": True},
         {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}, 1024),
        ({"reasoning": {"effort": "high", "enabled": True}},
         {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, None),
    ],
)  # fmt: skip
def test_the_thinking_limit_reaches_the_template_and_the_engine(
    fields: Any, template_kwargs: Any, limit: int | None
) -> None:
    [frame] = translate_chat(**fields)
    assert frame["prompt"].get("template_kwargs", {}) == template_kwargs
    assert frame.get("thinking", {}).get("tokens") == limit


DETAILS = [
    {"type": "reasoning.summary", "summary": "h"},
    {"type": "reasoning.text", "text": "m", "signature": None, "index": 1},
    {"type": "reasoning.encrypted", "data": "x"},
]


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning_details": DETAILS},
        {"reasoning": "hm", "reasoning_details": DETAILS},
        {"reasoning": "other", "reasoning_content": "hm"},
    ],
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": "x"}])
def test_earlier_thoughts_are_read_under_every_name(thoughts: Any, content: Any) -> None:
    messages = [*USER, {"role": "assistant", **thoughts, **content}, *USER]
    [frame] = translate_chat(messages=messages)
    message = frame["prompt"]["messages"][1]
    assert message["extra"] == {"reasoning_content": "hm"}
    assert message["content"] == (content.get("content") or "")


@pytest.mark.parametrize("name", GenerationRequest.__struct_fields__)
def test_fields_with_the_same_name_reach_the_request(name: str) -> None:
    source = msgspec.defstruct("Source", [(name, Any), ("of_its_own", Any)])(1, 2)
    assert getattr(translate_request(CompletionRequest, source, prompt=""), name) == 1
    assert getattr(translate_request(CompletionRequest, source, prompt="", **{name: 3}), name) == 3
