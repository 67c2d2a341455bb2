"""Chat templates from downloaded files are rendered, or stopped with a reason."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from localspec.engine.prompt import template_process
from localspec.errors import TemplateFailed
from localspec.protocol.frames import ChatPrompt, Message
from tests.support import templates

CONVERSATION = [
    Message("system", "You are terse."),
    Message("user", "What is 2 + 2?"),
    Message("assistant", "Four."),
    Message("user", "And 3 + 3 < 7?"),
]


def render(template: str | None, messages: list[Message] = CONVERSATION, **more: Any) -> str:
    return templates.shared_renderer(template).render(ChatPrompt(messages, **more))


def test_messages_tokens_and_the_generation_prompt_reach_the_template() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'] }}]{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ tools | length if tools }}{{ x }}"
    )
    assert render(template, CONVERSATION[1:2]) == "<s>[user|What is 2 + 2?]</s>>"
    text = render(
        template,
        CONVERSATION[1:2],
        add_generation_prompt=False,
        tools=[{"a": 1}, {"b": 2}],
        template_kwargs={"x": "y"},
    )
    assert text == "<s>[user|What is 2 + 2?]</s>2y"


def test_template_gets_the_current_date_unless_overridden() -> None:
    template = "{{ messages[0].content }}|{{ date_string }}|{{ datetime }}"
    days = [datetime.now().astimezone()]
    text = render(template, CONVERSATION[1:2])
    days.append(datetime.now().astimezone())  # midnight may pass in between
    content = CONVERSATION[1].content
    assert text in {f"{content}|{day:%d %b %Y}|{day:%b %d %Y}" for day in days}
    variables = {"date_string": "26 Jul 2024", "datetime": "never"}
    text = render(template, CONVERSATION[1:2], template_kwargs=variables)
    assert text == f"{content}|26 Jul 2024|never"


def test_one_renderer_serves_many_conversations() -> None:
    renderer = templates.shared_renderer("{{ messages[0].content }}")
    for text in ("one", "two\n\n", "☃\0\u2028", "a" * 200_000):
        assert renderer.render(ChatPrompt([Message("user", text)])) == text


def test_json_of_a_part_of_each_tool() -> None:
    """Templates that come with llama.cpp do not make a list of `map` first."""
    template = "{{ tools | map(attribute='function') | tojson }}{{ messages[0].content }}"
    tools = [{"function": {"name": "a<b"}}, {"function": {"name": "c"}}]
    text = render(template, CONVERSATION[1:2], tools=tools)
    assert text == '[{"name": "a<b"}, {"name": "c"}]What is 2 + 2?'


def test_json_is_written_as_transformers_writes_it() -> None:
    tools = [{"name": "é<b>"}]
    text = render("{{ tools | tojson }}{{ messages[0].content }}", CONVERSATION[1:2], tools=tools)
    assert text == '[{"name": "é<b>"}]What is 2 + 2?'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("one\ntwo\n{% for %}\n", "line 3"),
        ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
        ("{{ nothing.at.all }}", "Undefined"),
    ],
)
def test_a_failure_names_its_cause(template: str | None, message: str) -> None:
    with pytest.raises(TemplateFailed, match=message):
        render(template)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ (''|attr('__class__')).__base__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set x = namespace() %}{{ x.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_outside_the_sandbox(attack: str) -> None:
    refused = ""
    try:
        text = render("{{ messages[0].content }}|" + attack, CONVERSATION[1:2])
    except TemplateFailed as error:
        refused = error.message
    # The sandbox renders hidden attributes as empty text.
    assert "chat template failed" in refused or text.split("|")[1] in ("", "None")


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for a in range(90000) %}{{ f() if a > 89990 }}{% endfor %}{% endmacro %}"
        "{% for a in range(90000) %}{{ f() }}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_endless_template_is_stopped_and_the_next_one_works(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 1.0)
    renderer = templates.shared_renderer("{{ messages[0].content }}" + endless)
    with pytest.raises(TemplateFailed, match="took longer than 1 seconds"):
        renderer.render(ChatPrompt(CONVERSATION[:1]))
    renderer._template = "{{ messages[0].content }}"
    assert renderer.render(ChatPrompt(CONVERSATION[:1])) == "You are terse."


@pytest.mark.parametrize(
    "huge",
    [
        "{{ 'a' * 500000000 }}",
        "{{ 'a' * 5000000000 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_template_with_a_huge_result_is_stopped(huge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 1.0)
    # A busy machine may time out before it reaches the limits of memory and length.
    stopped = "more memory than a template may have|the result is longer|took longer than"
    with pytest.raises(TemplateFailed, match=stopped) as raised:
        render(huge)
    assert len(raised.value.message) < 700


@pytest.mark.parametrize("name", templates.files())
def test_the_templates_of_models_render(name: str) -> None:
    renderer = templates.shared_renderer(templates.template(name))
    text, alternative = (
        renderer.render(ChatPrompt(CONVERSATION, add_generation_prompt=generation))
        for generation in (True, False)
    )
    for rendered in (text, alternative):
        places = [rendered.find(message.content or "") for message in CONVERSATION]
        assert -1 not in places
        assert places == sorted(places)
    # Both have the same conversation and differ only after it.
    end = text.index("And 3 + 3 < 7?") + len("And 3 + 3 < 7?")
    assert text[:end] == alternative[:end]


def test_template_clock_is_that_of_this_machine() -> None:
    time_before = datetime.now()
    text = render(
        "{{ messages[0].content }}{{ strftime_now('%Y-%m-%d %H') }}", [Message("user", "")]
    )
    assert f"{time_before:%Y-%m-%d %H}" <= text <= f"{datetime.now():%Y-%m-%d %H}"


def make_call_messages(content: str | None, arguments: dict[str, Any]) -> list[Message]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = Message("tool", "Seen.", {"tool_call_id": "1"})
    return [Message("user", "Look."), Message("assistant", content, {"tool_calls": [call]}), result]


def write_template(content: str, arguments: str = " | tojson") -> str:
    """Return a template that writes each message's call and content."""
    call = "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments"
    names = "{% if m.tool_calls %}" + call + arguments + " }}{% endif %}"
    return "{% for m in messages %}" + names + content + "{% endfor %}"


NULL_DISTINGUISHED = write_template(
    "{% if m.content is not none %}[{{ m.content }}]{% else %}-{% endif %}"
)
NULL_PRINTED = write_template("[{{ m.content }}]")
ARGUMENTS_AS_TEXT = write_template("[{{ m.content }}]", " + '\n'")
PARTS = write_template(
    "{% if m.content is not none %}[{% for part in m.content %}{{ part.text }}{% endfor %}]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (NULL_DISTINGUISHED, None, '[Look.]look{"b": 1, "a": "é"}-[Seen.]'),
        (NULL_DISTINGUISHED, "", '[Look.]look{"b": 1, "a": "é"}[][Seen.]'),
        (NULL_PRINTED, None, '[Look.]look{"b": 1, "a": "é"}[][Seen.]'),
        (ARGUMENTS_AS_TEXT, None, '[Look.]look{"b": 1, "a": "é"}\n[][Seen.]'),
        (PARTS, None, '[Look.]look{"b": 1, "a": "é"}[Seen.]'),
        (PARTS, "Well.", '[Look.]look{"b": 1, "a": "é"}[Well.][Seen.]'),
    ],
)
def test_call_reaches_the_template_in_its_expected_form(
    template: str, content: str | None, expected: str
) -> None:
    """Null stays null if the template distinguishes it from an empty text, and is never printed."""
    assert render(template, make_call_messages(content, {"b": 1, "a": "é"})) == expected


def test_null_that_fails_in_one_chat_becomes_empty_text_there() -> None:
    template = write_template("[{{ m.content + '' if tools or m.content is not none }}]")
    template += "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "look"}}]
    expected = '[Look.]look{"b": 1}[][Seen.]'
    assert render(template, make_call_messages(None, {"b": 1})) == expected
    assert render(template, make_call_messages(None, {"b": 1}), tools=tools) == expected + "look"
