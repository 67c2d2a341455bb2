"""The markers of thoughts are detected from what a template renders, or reported as unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from localspec.chat.reader import AnswerReader
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.dialect import REASONING_MARKERS, Dialect, ThoughtMarkers
from localspec.protocol.frames import ChatPrompt, Generate, Message, ThinkingLimit
from localspec.protocol.pieces import Text
from tests.support import templates
from tests.support.running import Running

Renderers = Callable[[str], TemplateRenderer]

TURNS = """{{ INSTRUCTIONS }}{% for m in messages %}{% if m.role == 'user' %}
<|user|>{{ m.content }}<|end|>{% else %}<|bot|>{{ THOUGHTS }}{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|bot|>{{ OPEN }}{% endif %}"""


def make_template(thoughts: str, opened: str = "''", instructions: str = "''") -> str:
    thoughts_expression = f"({thoughts}) if m.reasoning_content else ''"
    text = TURNS.replace("THOUGHTS", thoughts_expression).replace("OPEN", opened)
    return text.replace("INSTRUCTIONS", instructions)


DETECTED: dict[str, tuple[str, ThoughtMarkers]] = {
    "the model opens them": (
        make_template("'<ab:think>' ~ m.reasoning_content ~ '</ab:think>'"),
        ("<ab:think>", "</ab:think>"),
    ),
    "made of parts, and explained": (
        make_template(
            "'<reason' ~ ':x>\\n' ~ m.reasoning_content ~ '\\n</reason' ~ ':x>\\n'",
            instructions="'Think between <reason' ~ ':x> and </reason' ~ ':x>.\n'",
        ),
        ("<reason:x>", "</reason:x>"),
    ),
    "the prompt opens them where that is asked for": (
        make_template(
            "'<mind>\n' ~ m.reasoning_content ~ '</mind>'",
            "'<mind>' if enable_thinking else '<mind></mind>'",
        ),
        ("<mind>", "</mind>"),
    ),
    "the prompt opens them, and they are kept without": (
        make_template("m.reasoning_content ~ '\n[FINAL WORDS]\n'", "'Here are my steps:\n'"),
        ("Here are my steps:", "[FINAL WORDS]"),
    ),
}
UNDETECTED = {
    "nothing marks them": make_template("m.reasoning_content ~ '\n\n'"),
    "what ends an answer closes them": make_template(
        "'<|think|>' ~ m.reasoning_content ~ '<|end|><|bot|><|text|>'"
    ),
    "another turn": make_template("'<|user|>' ~ m.reasoning_content ~ '<|over|>'"),
    "one mark for both": make_template("'<|mind|>' ~ m.reasoning_content ~ '<|mind|>'"),
}
NO_THOUGHTS = {
    "left out": make_template("''") + "{# reasoning #}",
    "not known": make_template("''").replace("m.reasoning_content", "false"),
    "raises": "{{ raise_exception('no reasoning here') }}",
    "channels": make_template("'<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>'"),
}


@pytest.fixture
def renderer() -> Iterator[Renderers]:
    renderers: list[TemplateRenderer] = []

    def make(text: str) -> TemplateRenderer:
        renderers.append(TemplateRenderer(text, "", ""))
        return renderers[-1]

    yield make
    for template_renderer in renderers:
        template_renderer.close()


@pytest.mark.parametrize("name", DETECTED)
def test_markers_are_detected_and_split_the_answer(renderer: Renderers, name: str) -> None:
    text, marks = DETECTED[name]
    template_renderer = renderer(text)
    assert template_renderer.dialect.thoughts == (marks,)
    assert not template_renderer.dialect.has_unknown_thoughts
    prompt = template_renderer.render(
        ChatPrompt([Message("user", "?")], template_kwargs={"enable_thinking": True})
    )
    opening, closing = marks
    opened = prompt.rstrip().endswith(opening)
    answer = f"{'' if opened else opening}\nhm <think> or [THINK]\n{closing}\n\nyes"
    for size in (1, 3, 1000):
        parser = AnswerReader(tail=prompt[-64:], thoughts=[marks])
        pieces = [
            p for at in range(0, len(answer), size) for p in parser.feed(answer[at : at + size])
        ]
        texts = {"reasoning": "", "content": ""}
        for piece in [*pieces, *parser.finish()]:
            assert isinstance(piece, Text)
            texts[piece.kind] += piece.text
        assert texts == {"reasoning": "hm <think> or [THINK]", "content": "yes"}


@pytest.mark.parametrize("name", UNDETECTED)
def test_undetected_markers_are_reported(renderer: Renderers, name: str) -> None:
    dialect = renderer(UNDETECTED[name]).dialect
    assert (dialect.thoughts, dialect.has_unknown_thoughts) == ((), True)


@pytest.mark.parametrize("name", NO_THOUGHTS)
def test_template_without_thoughts_has_no_markers(renderer: Renderers, name: str) -> None:
    dialect = renderer(NO_THOUGHTS[name]).dialect
    assert (dialect.thoughts, dialect.has_unknown_thoughts) == ((), False)


def test_known_markers_are_recognized(renderer: Renderers) -> None:
    template_renderer = renderer(templates.template("chatml_thinking"))
    assert template_renderer.dialect.thoughts == (("<think>", "</think>"),)


@pytest.mark.parametrize("name", templates.files())
def test_dialect_survives_serialization(renderer: Renderers, name: str) -> None:
    dialect = renderer(templates.template(name)).dialect
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(dialect), type=Dialect) == dialect


def test_second_renderer_reuses_the_dialect() -> None:
    original = TemplateRenderer(templates.template("chatml_thinking"), "", "")
    second = TemplateRenderer(*original.texts, original.dialect)
    assert second.dialect is original.dialect
    assert second._process._child is None
    original.close()


def test_request_is_prepared_with_the_detected_markers(cycle: Running, renderer: Renderers) -> None:
    text, marks = DETECTED["the model opens them"]
    chat = ChatPrompt([Message("user", "?")])

    def make_request(**fields: Any) -> Generate:
        limit = ThinkingLimit(0, list(REASONING_MARKERS))
        return Generate(
            1, chat, thinking=limit, thoughts=list(REASONING_MARKERS), shown=["<x>"], **fields
        )

    ready = Preparer(cycle.pair, renderer(text)).prepare(make_request())
    assert ready.request.thoughts == [marks]
    assert {"<x>", *marks} <= {*ready.request.shown}
    guide = ready.matcher
    assert guide is not None
    for token in cycle.pair.vocab.tokenize(marks[0], add_special=False, parse_special=True):
        assert guide.forced_tokens() == []
        guide.consume(token)
    assert guide.forced_tokens() == cycle.pair.vocab.tokenize(
        marks[1], add_special=False, parse_special=True
    )
    unread = Preparer(cycle.pair, renderer(UNDETECTED["one mark for both"])).prepare(make_request())
    assert "not known" in unread.note
    assert (unread.request.thoughts, unread.matcher) == ([], None)
