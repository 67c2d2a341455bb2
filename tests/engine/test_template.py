"""Chat templates from downloaded files are rendered, or stopped with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from localspec.engine.prompt import template_process
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import TemplateFailed
from localspec.protocol.frames import ChatPrompt, Message
from tests.support import templates

CONVERSATION = [
    Message("system", "You are terse."),
    Message("user", "What is 2 + 2?"),
    Message("assistant", "Four."),
    Message("user", "And 3 + 3 < 7?"),
]
Render = Callable[..., str]


@pytest.fixture
def render() -> Iterator[Render]:
    renderers: list[TemplateRenderer] = []

    def render_once(
        template: str | None, messages: list[Message] = CONVERSATION, **more: Any
    ) -> str:
        renderers.append(TemplateRenderer(template, "<s>", "</s>"))
        return renderers[-1].render(ChatPrompt(messages, **more))

    yield render_once
    for renderer in renderers:
        renderer.close()


def test_messages_tokens_and_the_generation_prompt_reach_the_template(render: Render) -> None:
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


def test_template_gets_the_current_date_unless_overridden(
    render: Render,
) -> None:
    template = "{{ messages[0].content }}|{{ date_string }}|{{ datetime }}"
    days = [datetime.now().astimezone()]
    text = render(template, CONVERSATION[1:2])
    days.append(datetime.now().astimezone())  # midnight may pass in between
    content = CONVERSATION[1].content
    assert text in {f"{content}|{day:%d %b %Y}|{day:%b %d %Y}" for day in days}
    variables = {"date_string": "26 Jul 2024", "datetime": "never"}
    text = render(template, CONVERSATION[1:2], template_kwargs=variables)
    assert text == f"{content}|26 Jul 2024|never"


def test_one_renderer_serves_many_conversations(render: Render) -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}", "", "")
    try:
        for text in ("one", "two\n\n", "☃\0\u2028", "a" * 200_000):
            assert renderer.render(ChatPrompt([Message("user", text)])) == text
    finally:
        renderer.close()


def test_json_is_written_as_transformers_writes_it(render: Render) -> None:
    tools = [{"name": "é<b>"}]
    text = render("{{ tools | tojson }}{{ messages[0].content }}", CONVERSATION[1:2], tools=tools)
    assert text == '[{"name": "é<b>"}]What is 2 + 2?'


def test_model_without_template_is_refused(render: Render) -> None:
    with pytest.raises(TemplateFailed, match="no chat template"):
        render(None)


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
def test_a_template_reaches_nothing_outside_the_sandbox(render: Render, attack: str) -> None:
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
    renderer = TemplateRenderer("{{ messages[0].content }}" + endless, "", "")
    try:
        with pytest.raises(TemplateFailed, match="took longer than 1 seconds"):
            renderer.render(ChatPrompt(CONVERSATION[:1]))
        renderer._template = "{{ messages[0].content }}"
        assert renderer.render(ChatPrompt(CONVERSATION[:1])) == "You are terse."
    finally:
        renderer.close()


@pytest.mark.parametrize(
    "huge",
    [
        "{{ 'a' * 500000000 }}",
        "{{ 'a' * 5000000000 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_template_with_a_huge_result_is_stopped(
    render: Render, huge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 1.0)
    # A busy machine may time out before it reaches the limits of memory and length.
    stopped = "more memory than a template may have|the result is longer|took longer than"
    with pytest.raises(TemplateFailed, match=stopped) as raised:
        render(huge)
    assert len(raised.value.message) < 700


def test_a_syntax_error_names_its_line(render: Render) -> None:
    with pytest.raises(TemplateFailed, match="line 3"):
        render("one\ntwo\n{% for %}\n")


def test_a_templates_own_refusal_is_passed_on(render: Render) -> None:
    with pytest.raises(TemplateFailed, match="failed: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_error_of_the_template_is_reported(render: Render) -> None:
    with pytest.raises(TemplateFailed, match="Undefined"):
        render("{{ nothing.at.all }}")


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", templates.files())
def test_the_templates_of_models_render(render: Render, name: str, generation: bool) -> None:
    template = templates.template(name)
    text = render(template, CONVERSATION, add_generation_prompt=generation)
    places = [text.find(message.content or "") for message in CONVERSATION]
    assert -1 not in places
    assert places == sorted(places)
    alternative = render(template, CONVERSATION, add_generation_prompt=not generation)
    # Both have the same conversation and differ only after it.
    end = text.index("And 3 + 3 < 7?") + len("And 3 + 3 < 7?")
    assert text[:end] == alternative[:end]


def test_template_clock_is_that_of_this_machine() -> None:
    renderer = TemplateRenderer(
        "{{ messages[0].content }}{{ strftime_now('%Y-%m-%d %H') }}", "", ""
    )
    try:
        time_before = datetime.now()
        text = renderer.render(ChatPrompt([Message("user", "")]))
        time_after = datetime.now()
    finally:
        renderer.close()
    assert f"{time_before:%Y-%m-%d %H}" <= text <= f"{time_after:%Y-%m-%d %H}"


def make_call_messages(content: str | None, arguments: dict[str, Any]) -> list[Message]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    result = Message("tool", "Seen.", {"tool_call_id": "1"})
    return [Message("user", "Look."), Message("assistant", content, {"tool_calls": [call]}), result]


NAMES = (
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments"
)
NULL_DISTINGUISHED = (
    "{% for m in messages %}" + NAMES + " | tojson }}{% endif %}"
    "{% if m.content is not none %}[{{ m.content }}]{% else %}-{% endif %}{% endfor %}"
)
NULL_PRINTED = (
    "{% for m in messages %}" + NAMES + " | tojson }}{% endif %}[{{ m.content }}]{% endfor %}"
)
ARGUMENTS_AS_TEXT = (
    "{% for m in messages %}" + NAMES + " + '\n' }}{% endif %}[{{ m.content }}]{% endfor %}"
)
PARTS = (
    "{% for m in messages %}" + NAMES + " | tojson }}{% endif %}"
    "{% if m.content is not none %}[{% for part in m.content %}{{ part.text }}{% endfor %}]{% endif %}"
    "{% endfor %}"
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
    render: Render, template: str, content: str | None, expected: str
) -> None:
    """Null stays null if the template distinguishes it from an empty text, and is never printed."""
    assert render(template, make_call_messages(content, {"b": 1, "a": "é"})) == expected


def test_null_that_fails_in_one_chat_becomes_empty_text_there(render: Render) -> None:
    template = (
        "{% for m in messages %}" + NAMES + " | tojson }}{% endif %}"
        "[{{ m.content + '' if tools or m.content is not none }}]{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    expected = '[Look.]look{"b": 1}[][Seen.]'
    assert render(template, make_call_messages(None, {"b": 1})) == expected
    assert render(template, make_call_messages(None, {"b": 1}), tools=tools) == expected + "look"
