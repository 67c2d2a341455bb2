"""What was sent is in the prompt, whatever roles a chat template knows, or it is refused in words."""

from __future__ import annotations

import atexit
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt, Message
from tests.support import templates

HERE = Path(__file__).resolve()
TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}" + OPEN
)
TEMPLATES = {
    "every role": TURN + OPEN,
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
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}" + OPEN
    ),
    "calls without text": (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}</>{% endfor %}" + OPEN
    ),
}
WORDS = st.text("abc XYZ 0123.,!? é☃語\n", min_size=0, max_size=12)
ROLES = st.sampled_from(["system", "system", "user", "user", "assistant", "assistant", "critic"])
CONVERSATIONS = st.lists(st.tuples(ROLES, WORDS), min_size=1, max_size=7)
# Turns as chats have them, so that the strict templates too are seen to accept something.
ORDERLY = st.tuples(
    st.lists(WORDS, max_size=2), st.lists(st.tuples(WORDS, st.lists(WORDS, max_size=1)), min_size=1)
).map(
    lambda drawn: (
        [("system", text) for text in drawn[0]]
        + [
            turn
            for asked, noted in drawn[1][:3]
            for turn in [
                ("user", asked + "?"),
                ("assistant", "so"),
                *[("system", text) for text in noted],
            ]
        ]
        + [("user", "last")]
    )
)


def template(name: str) -> str:
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name == "the shipped pair":
        file = gguf.GGUFReader(HERE.parents[2] / "localspec" / "builtin" / "target.gguf")
        return str(file.fields["tokenizer.chat_template"].contents())
    return templates.template(name)


@cache
def renderer(name: str) -> TemplateRenderer:
    found = TemplateRenderer(template(name), "<s>", "</s>")
    atexit.register(found.close)
    return found


def names() -> list[str]:
    return ["the shipped pair", *TEMPLATES, *templates.files()]


def prompt_of(name: str, conversation: list[tuple[str, str]], **more: Any) -> str:
    messages = [Message(role, text) for role, text in conversation]
    return renderer(name).render(ChatPrompt(messages, **more))


@pytest.mark.parametrize("name", names())
def test_every_text_is_in_the_prompt_in_order_or_a_role_is_named(name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(CONVERSATIONS | ORDERLY)
    def check(conversation: list[tuple[str, str]]) -> None:
        try:
            text = prompt_of(name, conversation)
        except InvalidRequest as error:
            refusal = error.message
        else:
            refusal = ""
        if refusal:
            assert any(role in refusal for role, _ in conversation)
            return
        at = 0
        for _, said in conversation:
            at = text.find(said.strip(), at)
            assert at >= 0, f"{said!r} is not in {text!r}"
            at += len(said.strip())

    check()


@pytest.mark.parametrize("name", names())
def test_a_system_message_is_never_refused(name: str) -> None:
    text = prompt_of(name, [("system", "Be terse."), ("user", "Anyone?"), ("assistant", "Yes")])
    assert text.index("Be terse.") < text.index("Anyone?")
    text = prompt_of(name, [("system", "Be terse."), ("system", "Be kind."), ("user", "Anyone?")])
    assert text.index("Be terse.") < text.index("Be kind.") < text.index("Anyone?")
    assert "Be terse." in prompt_of(name, [("system", "Be terse.")])


WITHOUT_SYSTEM = ("the shipped pair", "user and assistant", "turns", "google-gemma-2-2b-it")


@pytest.mark.parametrize("name", [name for name in WITHOUT_SYSTEM if name in names()])
def test_without_a_system_role_it_begins_the_question_as_in_llama_server(name: str) -> None:
    told = prompt_of(name, [("system", "Be terse."), ("user", "hi")])
    assert told == prompt_of(name, [("user", "Be terse.\nhi")])


def test_a_role_that_no_wording_saves_is_named() -> None:
    with pytest.raises(InvalidRequest, match="the role 'critic'"):
        prompt_of("the shipped pair", [("user", "hi"), ("critic", "Bah.")])
    with pytest.raises(TemplateFailed, match=r"must alternate.*assistant, assistant"):
        prompt_of("alternating", [("assistant", "hi"), ("assistant", "there")])


@pytest.mark.parametrize("name", names())
def test_questions_in_a_row_are_one_only_where_the_template_refuses_them(name: str) -> None:
    one = [("user", "hi"), ("assistant", "yes"), ("user", "there\nand\nhere")]
    several = [*one[:2], ("user", "there"), ("user", "and"), ("user", "here")]
    text = prompt_of(name, several)
    if name in ("alternating", "turns", "inst", "google-gemma-2-2b-it"):
        assert text == prompt_of(name, one)
    else:
        assert text.index("there") < text.index("and", text.index("there")) < text.rindex("here")


def test_answers_in_a_row_are_one_where_the_template_refuses_them() -> None:
    asked = [("user", "hi"), ("assistant", "yes"), ("assistant", "no"), ("user", "so?")]
    joined = [("user", "hi"), ("assistant", "yes\nno"), ("user", "so?")]
    assert prompt_of("alternating", asked) == prompt_of("alternating", joined)


def test_text_beside_a_call_is_kept_and_a_call_is_not_lost() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    messages = [Message("user", "hi"), Message("assistant", "Let me see.", {"tool_calls": [call]})]
    text = renderer("calls without text").render(ChatPrompt(messages))
    assert text.index("Let me see.") < text.index("look") < text.index('"at": "it"')
    text = renderer("user and assistant").render(ChatPrompt(messages))
    assert text.index("Let me see.") < text.index("look") < text.index('"at": "it"')


def called(at: str, number: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": at}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def seen(text: str, number: str) -> Message:
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
FIRST = CALLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]")
TEMPLATES["the first call only"] = TURNS + "{{ m.content or '' }}" + FIRST + ";{% endfor %}"
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
ONE = '{"name": "look", "arguments": {"at": "one"}}'
TWO = '{"name": "look", "arguments": {"at": "two"}}'
TWICE = [
    Message("user", "Look."),
    Message("assistant", None, {"tool_calls": [called("one", "1"), called("two", "2")]}),
    seen("second", "2"),
    seen("first", "1"),
]
BESIDE = [
    Message("user", "Look."),
    Message("assistant", "Well.", {"tool_calls": [called("one", "1")]}),
    seen("first", "1"),
    Message("assistant", "So."),
    Message("user", "Thanks."),
]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        (
            "one call a message",
            TWICE,
            f"<user>Look.<assistant>call_1:{ONE}<tool>first<assistant>call_2:{TWO}<tool>second",
        ),
        (
            "the first call only",
            TWICE,
            f"<user>Look.<assistant>call_1:{ONE}<tool>first<assistant>call_2:{TWO}<tool>second",
        ),
        (
            "one call a message",
            BESIDE,
            f"<user>Look.<assistant>Well.<assistant>call_1:{ONE}<tool>first<assistant>So.<user>Thanks.",
        ),
        (
            "calls without text, in turns",
            BESIDE,
            f"<user>Look.<assistant>Well.\n<tool_call>\n{ONE}\n"
            "</tool_call><user><tool_response>\nfirst\n</tool_response><assistant>So.<user>Thanks.",
        ),
    ],
)
def test_calls_are_where_a_template_has_a_place_for_them(
    name: str, messages: list[Message], expected: str
) -> None:
    assert renderer(name).render(ChatPrompt(messages)).replace(";", "") == expected


def test_ids_of_other_servers_are_as_the_template_wants_them() -> None:
    text = renderer("ids of nine").render(ChatPrompt(TWICE))
    found = re.fullmatch(
        r"<user>Look\.;<assistant>(\w{9}):.*one.*}}(\w{9}):.*two.*}};<tool>second(\w{9});<tool>first(\w{9});",
        text,
    )
    assert found is not None
    assert (found[1], found[2]) == (found[4], found[3])
    assert found[1] != found[2]


CALLED = st.lists(
    st.tuples(WORDS, st.lists(st.sampled_from("abcdef"), max_size=3, unique=True)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", names())
def test_no_call_and_no_result_is_lost(name: str) -> None:
    @settings(max_examples=6, deadline=None)
    @given(CALLED)
    def check(turns: list[tuple[str, list[str]]]) -> None:
        messages, places = [Message("user", "Begin.")], []
        for turn, (said, calls) in enumerate(turns):
            made = [called(f"at{turn}{each}", f"{turn}{each}") for each in calls]
            messages.append(
                Message("assistant", said or "Hm.", {"tool_calls": made} if made else {})
            )
            places += [said.strip(), *(f"at{turn}{each}" for each in calls)]
            for each in calls:
                messages.append(seen(f"was {turn}{each}", f"{turn}{each}"))
                places.append(f"was {turn}{each}")
            messages.append(Message("user", f"And {turn}?"))
        text = renderer(name).render(ChatPrompt(messages))
        assert [place for place in places if place not in text] == []

    check()


def test_tools_that_a_template_leaves_out_are_not_lost_in_silence() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(InvalidRequest, match="the tool 'look'"):
        prompt_of("every role", [("user", "hi")], tools=tools)


@pytest.mark.parametrize("name", names())
def test_a_continued_message_is_not_closed(name: str) -> None:
    """What the text would stand after is what it stands after when the turn is over."""
    said = [("user", "Name a colour."), ("assistant", "The colour is ")]
    begun = prompt_of(name, said, continued="content")
    assert begun.rindex("Name a colour.") > 0
    assert "The colour" not in begun
    closed = prompt_of(name, said, add_generation_prompt=False)
    assert closed.startswith(begun + "The colour is")
    assert closed != begun + "The colour is "  # it has what closes a turn


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
TEMPLATES["thinks"] = THINKS


def test_thoughts_are_continued_where_a_template_has_a_place_for_them() -> None:
    thought = Message("assistant", "", {"reasoning_content": "Well, "})
    prompt = ChatPrompt([Message("user", "hi"), thought], continued="reasoning_content")
    assert renderer("thinks").render(prompt) == "<user>hi</user><assistant><think>\n"
    with pytest.raises(TemplateFailed, match="no place for the 'reasoning_content'"):
        renderer("every role").render(prompt)


def test_the_next_chat_of_one_shape_is_rendered_once() -> None:
    found = TemplateRenderer(TURN + OPEN, "<s>", "</s>")
    rendered, texts = found._rendered, []

    def counted(variables: Mapping[str, Any]) -> str:
        texts.append(rendered(variables))
        return texts[-1]

    found._rendered = counted  # type: ignore[method-assign]
    try:
        found.render(ChatPrompt([Message("system", "Be terse."), Message("user", "hi")]))
        texts.clear()
        again = found.render(ChatPrompt([Message("system", "Be kind."), Message("user", "ho")]))
        assert texts == [again]
        found.render(ChatPrompt([Message("system", ""), Message("user", "ho")]))
        assert len(texts) == 3
    finally:
        found.close()
