"""Every text of a chat is in the prompt, whatever roles the template knows, or it is refused."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.chat.families.lfm2 import LFM2
from localspec.chat.reader import AnswerReader
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt, Message
from localspec.protocol.pieces import Arguments, Call
from tests.support import templates

HERE = Path(__file__).resolve()
TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
GENERATION_PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}" + GENERATION_PROMPT
)
TEMPLATES = {
    "every role": TURN + GENERATION_PROMPT,
    "user and assistant": TWO_ROLES,
    "system first only": (
        "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}" + TWO_ROLES
    ),
    "the last system wins": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}" + TWO_ROLES
    ),
    "raises at system": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{% endfor %}" + TWO_ROLES
    ),
    "alternating": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TWO_ROLES
    ),
    "parts only": (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}"
        + GENERATION_PROMPT
    ),
    "calls without text": (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}</>{% endfor %}" + GENERATION_PROMPT
    ),
}
WORDS = st.text("abc XYZ 0123.,!? é☃語\n", min_size=0, max_size=12)
ROLES = st.sampled_from(["system", "system", "user", "user", "assistant", "assistant", "critic"])
CONVERSATIONS = st.lists(st.tuples(ROLES, WORDS), min_size=1, max_size=7)
# Turns in the usual order, so that strict templates accept some conversations too.
ORDERLY = st.tuples(
    st.lists(WORDS, max_size=2), st.lists(st.tuples(WORDS, st.lists(WORDS, max_size=1)), min_size=1)
).map(
    lambda drawn: (
        [("system", text) for text in drawn[0]]
        + [
            turn
            for question, system_texts in drawn[1][:3]
            for turn in [
                ("user", question + "?"),
                ("assistant", "so"),
                *[("system", text) for text in system_texts],
            ]
        ]
        + [("user", "last")]
    )
)


def get_template(name: str) -> str:
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name == "the shipped pair":
        file = gguf.GGUFReader(HERE.parents[2] / "localspec" / "builtin" / "target.gguf")
        return str(file.fields["tokenizer.chat_template"].contents())
    return templates.template(name)


@cache
def get_renderer(name: str) -> TemplateRenderer:
    renderer = TemplateRenderer(get_template(name), "<s>", "</s>")
    atexit.register(renderer.close)
    return renderer


def list_names() -> list[str]:
    return ["the shipped pair", *TEMPLATES, *templates.files()]


def render_prompt(name: str, conversation: list[tuple[str, str]], **more: Any) -> str:
    messages = [Message(role, text) for role, text in conversation]
    return get_renderer(name).render(ChatPrompt(messages, **more))


@pytest.mark.parametrize("name", list_names())
def test_prompt_has_every_text_in_order_or_the_refusal_names_a_role(name: str) -> None:
    @settings(max_examples=8, deadline=None)
    @given(CONVERSATIONS | ORDERLY)
    def check(conversation: list[tuple[str, str]]) -> None:
        try:
            text = render_prompt(name, conversation)
        except InvalidRequest as error:
            refusal = error.message
        else:
            refusal = ""
        if refusal:
            assert any(role in refusal for role, _ in conversation)
            return
        at = 0
        for _, content in conversation:
            at = text.find(content.strip(), at)
            assert at >= 0, f"{content!r} is not in {text!r}"
            at += len(content.strip())

    check()


@pytest.mark.parametrize("name", list_names())
def test_a_system_message_is_never_refused(name: str) -> None:
    text = render_prompt(name, [("system", "Be terse."), ("user", "Anyone?"), ("assistant", "Yes")])
    assert text.index("Be terse.") < text.index("Anyone?")
    text = render_prompt(
        name, [("system", "Be terse."), ("system", "Be kind."), ("user", "Anyone?")]
    )
    assert text.index("Be terse.") < text.index("Be kind.") < text.index("Anyone?")
    assert "Be terse." in render_prompt(name, [("system", "Be terse.")])


WITHOUT_SYSTEM = ("the shipped pair", "user and assistant", "turns", "google-gemma-2-2b-it")


@pytest.mark.parametrize("name", [name for name in WITHOUT_SYSTEM if name in list_names()])
def test_system_text_begins_the_question_without_a_system_role(name: str) -> None:
    prompt = render_prompt(name, [("system", "Be terse."), ("user", "hi")])
    assert prompt == render_prompt(name, [("user", "Be terse.\nhi")])


def test_unsupported_role_is_named() -> None:
    with pytest.raises(InvalidRequest, match="the role 'critic'"):
        render_prompt("the shipped pair", [("user", "hi"), ("critic", "Bah.")])
    with pytest.raises(TemplateFailed, match=r"must alternate.*assistant, assistant"):
        render_prompt("alternating", [("assistant", "hi"), ("assistant", "there")])


@pytest.mark.parametrize("name", list_names())
def test_consecutive_questions_are_joined_only_if_refused(name: str) -> None:
    joined = [("user", "hi"), ("assistant", "yes"), ("user", "there\nand\nhere")]
    several = [*joined[:2], ("user", "there"), ("user", "and"), ("user", "here")]
    text = render_prompt(name, several)
    if name in ("alternating", "turns", "inst", "google-gemma-2-2b-it"):
        assert text == render_prompt(name, joined)
    else:
        assert text.index("there") < text.index("and", text.index("there")) < text.rindex("here")


def test_consecutive_answers_are_joined_if_refused() -> None:
    separate = [("user", "hi"), ("assistant", "yes"), ("assistant", "no"), ("user", "so?")]
    joined = [("user", "hi"), ("assistant", "yes\nno"), ("user", "so?")]
    assert render_prompt("alternating", separate) == render_prompt("alternating", joined)


def test_text_beside_a_call_and_the_call_are_in_the_prompt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    messages = [Message("user", "hi"), Message("assistant", "Let me see.", {"tool_calls": [call]})]
    text = get_renderer("calls without text").render(ChatPrompt(messages))
    assert text.index("Let me see.") < text.index("look") < text.index('"at": "it"')
    text = get_renderer("user and assistant").render(ChatPrompt(messages))
    assert text.index("Let me see.") < text.index("look") < text.index('"at": "it"')


def make_call(at: str, number: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": at}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def make_tool_result(text: str, number: str) -> Message:
    return Message("tool", text, {"tool_call_id": f"call_{number}"})


TURNS = "{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls %}{{ c.id }}:{{ c.function | tojson }}{% endfor %}"
CALLS_OR_TEXT = (
    TURNS + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
TEMPLATES["one call a message"] = (
    "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('only single tool-calls') }}{% endfor %}" + CALLS_OR_TEXT
)
FIRST_CALL = CALLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]")
TEMPLATES["the first call only"] = TURNS + "{{ m.content or '' }}" + FIRST_CALL + ";{% endfor %}"
TEMPLATES["ids of nine"] = (
    "{% for m in messages %}{% for id in [m.tool_call_id] + (m.tool_calls or []) | map(attribute='id') | list"
    " if id and id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}"
    "{% endfor %}<{{ m.role }}>{{ m.content or '' }}" + CALLS + "{{ m.tool_call_id }};{% endfor %}"
)
TEMPLATES["calls without text, in turns"] = (
    "{% set ns = namespace(i=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endfor %}" + CALLS_OR_TEXT
)
CALL_ONE = '{"name": "look", "arguments": {"at": "one"}}'
CALL_TWO = '{"name": "look", "arguments": {"at": "two"}}'
TWO_CALLS = [
    Message("user", "Look."),
    Message("assistant", None, {"tool_calls": [make_call("one", "1"), make_call("two", "2")]}),
    make_tool_result("second", "2"),
    make_tool_result("first", "1"),
]
TEXT_AND_CALL = [
    Message("user", "Look."),
    Message("assistant", "Well.", {"tool_calls": [make_call("one", "1")]}),
    make_tool_result("first", "1"),
    Message("assistant", "So."),
    Message("user", "Thanks."),
]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        (
            "one call a message",
            TWO_CALLS,
            f"<user>Look.<assistant>call_1:{CALL_ONE}<tool>first<assistant>call_2:{CALL_TWO}<tool>second",
        ),
        (
            "the first call only",
            TWO_CALLS,
            f"<user>Look.<assistant>call_1:{CALL_ONE}<tool>first<assistant>call_2:{CALL_TWO}<tool>second",
        ),
        (
            "one call a message",
            TEXT_AND_CALL,
            f"<user>Look.<assistant>Well.<assistant>call_1:{CALL_ONE}<tool>first<assistant>So.<user>Thanks.",
        ),
        (
            "calls without text, in turns",
            TEXT_AND_CALL,
            f"<user>Look.<assistant>Well.\n<tool_call>\n{CALL_ONE}\n"
            "</tool_call><user><tool_response>\nfirst\n</tool_response><assistant>So.<user>Thanks.",
        ),
    ],
)
def test_calls_are_placed_where_the_template_supports_them(
    name: str, messages: list[Message], expected: str
) -> None:
    assert get_renderer(name).render(ChatPrompt(messages)).replace(";", "") == expected


def test_foreign_call_ids_get_the_length_the_template_requires() -> None:
    text = get_renderer("ids of nine").render(ChatPrompt(TWO_CALLS))
    match = re.fullmatch(
        r"<user>Look\.;<assistant>(\w{9}):.*one.*}}(\w{9}):.*two.*}};<tool>second(\w{9});<tool>first(\w{9});",
        text,
    )
    assert match is not None
    assert (match[1], match[2]) == (match[4], match[3])
    assert match[1] != match[2]


CALL_TURNS = st.lists(
    st.tuples(WORDS, st.lists(st.sampled_from("abcdef"), max_size=3, unique=True)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", list_names())
def test_no_call_and_no_result_is_lost(name: str) -> None:
    @settings(max_examples=6, deadline=None)
    @given(CALL_TURNS)
    def check(turns: list[tuple[str, list[str]]]) -> None:
        messages, expected_texts = [Message("user", "Begin.")], []
        for turn, (content, calls) in enumerate(turns):
            tool_calls = [make_call(f"at{turn}{letter}", f"{turn}{letter}") for letter in calls]
            messages.append(
                Message(
                    "assistant", content or "Hm.", {"tool_calls": tool_calls} if tool_calls else {}
                )
            )
            expected_texts += [content.strip(), *(f"at{turn}{letter}" for letter in calls)]
            for letter in calls:
                messages.append(make_tool_result(f"was {turn}{letter}", f"{turn}{letter}"))
                expected_texts.append(f"was {turn}{letter}")
            messages.append(Message("user", f"And {turn}?"))
        text = get_renderer(name).render(ChatPrompt(messages))
        assert [
            expected_text for expected_text in expected_texts if expected_text not in text
        ] == []

    check()


def test_tools_that_a_template_leaves_out_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(InvalidRequest, match="the tool 'look'"):
        render_prompt("every role", [("user", "hi")], tools=tools)


@pytest.mark.parametrize("name", list_names())
def test_a_continued_message_is_not_closed(name: str) -> None:
    """The unfinished prompt is the beginning of the prompt with the complete turn."""
    conversation = [("user", "Name a colour."), ("assistant", "The colour is ")]
    unfinished = render_prompt(name, conversation, continued="content")
    assert unfinished.rindex("Name a colour.") > 0
    assert "The colour" not in unfinished
    closed = render_prompt(name, conversation, add_generation_prompt=False)
    assert closed.startswith(unfinished + "The colour is")
    assert closed != unfinished + "The colour is "  # the end of the turn follows


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
TEMPLATES["thinks"] = THINKS


def test_thoughts_are_continued_if_the_template_supports_them() -> None:
    thought = Message("assistant", "", {"reasoning_content": "Well, "})
    prompt = ChatPrompt([Message("user", "hi"), thought], continued="reasoning_content")
    assert get_renderer("thinks").render(prompt) == "<user>hi</user><assistant><think>\n"
    with pytest.raises(TemplateFailed, match="no place for the 'reasoning_content'"):
        get_renderer("every role").render(prompt)


def test_second_chat_of_the_same_shape_is_rendered_once() -> None:
    renderer = TemplateRenderer(TURN + GENERATION_PROMPT, "<s>", "</s>")
    render, texts = renderer._rendered, []

    def counting_render(variables: Mapping[str, Any]) -> str:
        texts.append(render(variables))
        return texts[-1]

    renderer._rendered = counting_render  # type: ignore[method-assign]
    try:
        renderer.render(ChatPrompt([Message("system", "Be terse."), Message("user", "hi")]))
        texts.clear()
        second_text = renderer.render(
            ChatPrompt([Message("system", "Be kind."), Message("user", "ho")])
        )
        assert texts == [second_text]
        renderer.render(ChatPrompt([Message("system", ""), Message("user", "ho")]))
        assert len(texts) == 3
    finally:
        renderer.close()


def test_calls_of_lfm2_are_written_into_the_text_in_their_own_notation() -> None:
    """Its templates write texts alone, and results in a role of their own."""
    marker = "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}"
    renderer = TemplateRenderer(marker + TURN + GENERATION_PROMPT, "<s>", "</s>")
    arguments = {"note": 'it\'s "é"\n', "on": True, "more": {"a": [None, 2]}}
    calls = [{"id": "c1", "function": {"name": "led", "arguments": arguments}}]
    messages = [
        Message("user", "Do it."),
        Message("assistant", "Well.", {"tool_calls": [*calls, *calls]}),
        Message("tool", "done", {"tool_call_id": "c1"}),
    ]
    tools = [{"type": "function", "function": {"name": "led", "parameters": {}}}]
    try:
        text = renderer.render(ChatPrompt(messages, tools=tools))
    finally:
        renderer.close()
    assert "<tool>done</tool>" in text
    answer = text.partition("<assistant>Well.")[2].partition("</assistant>")[0]
    parser = AnswerReader(LFM2, {"led": {}})
    pieces = [*parser.feed(answer), *parser.finish()]
    assert [piece.name for piece in pieces if isinstance(piece, Call)] == ["led", "led"]
    written = [piece.text for piece in pieces if isinstance(piece, Arguments)]
    assert [json.loads(text) for text in written] == [arguments, arguments]
