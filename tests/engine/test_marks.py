"""What opens and closes a model's thoughts is seen in what its template makes of some, or said not to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.protocol.dialect import REASONING_MARKERS, Dialect, ThoughtMarkers
from localspec.protocol.frames import ChatPrompt, Generate, Message, ThinkingLimit
from tests.support import templates
from tests.support.running import Running

Renderers = Callable[[str], TemplateRenderer]

TURNS = """{{ INSTRUCTIONS }}{% for m in messages %}{% if m.role == 'user' %}
<|user|>{{ m.content }}<|end|>{% else %}<|bot|>{{ THOUGHTS }}{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|bot|>{{ OPEN }}{% endif %}"""


def template(thoughts: str, opened: str = "''", instructions: str = "''") -> str:
    kept = f"({thoughts}) if m.reasoning_content else ''"
    found = TURNS.replace("THOUGHTS", kept).replace("OPEN", opened)
    return found.replace("INSTRUCTIONS", instructions)


SEEN: dict[str, tuple[str, ThoughtMarkers]] = {
    "the model opens them": (
        template("'<ab:think>' ~ m.reasoning_content ~ '</ab:think>'"),
        ("<ab:think>", "</ab:think>"),
    ),
    "made of parts, and explained": (
        template(
            "'<reason' ~ ':x>\\n' ~ m.reasoning_content ~ '\\n</reason' ~ ':x>\\n'",
            instructions="'Think between <reason' ~ ':x> and </reason' ~ ':x>.\n'",
        ),
        ("<reason:x>", "</reason:x>"),
    ),
    "the prompt opens them where that is asked for": (
        template(
            "'<mind>\n' ~ m.reasoning_content ~ '</mind>'",
            "'<mind>' if enable_thinking else '<mind></mind>'",
        ),
        ("<mind>", "</mind>"),
    ),
    "the prompt opens them, and they are kept without": (
        template("m.reasoning_content ~ '\n[FINAL WORDS]\n'", "'Here are my steps:\n'"),
        ("Here are my steps:", "[FINAL WORDS]"),
    ),
}
UNSEEN = {
    "nothing marks them": template("m.reasoning_content ~ '\n\n'"),
    "what ends an answer closes them": template(
        "'<|think|>' ~ m.reasoning_content ~ '<|end|><|bot|><|text|>'"
    ),
    "another turn": template("'<|user|>' ~ m.reasoning_content ~ '<|over|>'"),
    "one mark for both": template("'<|mind|>' ~ m.reasoning_content ~ '<|mind|>'"),
}
NONE = {
    "left out": template("''") + "{# reasoning #}",
    "not known": template("''").replace("m.reasoning_content", "false"),
    "raises": "{{ raise_exception('no reasoning here') }}",
    "channels": template("'<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>'"),
}


@pytest.fixture
def renderer() -> Iterator[Renderers]:
    made: list[TemplateRenderer] = []

    def make(text: str) -> TemplateRenderer:
        made.append(TemplateRenderer(text, "", ""))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", SEEN)
def test_marks_are_seen_and_the_answer_is_taken_apart_by_them(
    renderer: Renderers, name: str
) -> None:
    text, marks = SEEN[name]
    found = renderer(text)
    assert found.dialect.thoughts == (marks,)
    assert not found.dialect.has_unknown_thoughts
    prompt = found.render(
        ChatPrompt([Message("user", "?")], template_kwargs={"enable_thinking": True})
    )
    opening, closing = marks
    opened = prompt.rstrip().endswith(opening)
    written = f"{'' if opened else opening}\nhm <think> or [THINK]\n{closing}\n\nyes"
    for size in (1, 3, 1000):
        parser = AnswerParser()
        parser.begin(prompt[-64:], [marks])
        pieces = [
            p for at in range(0, len(written), size) for p in parser.feed(written[at : at + size])
        ]
        said = {"reasoning": "", "content": ""}
        for piece in [*pieces, *parser.finish()]:
            assert isinstance(piece, Text)
            said[piece.kind] += piece.text
        assert said == {"reasoning": "hm <think> or [THINK]", "content": "yes"}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_read_is_said(renderer: Renderers, name: str) -> None:
    dialect = renderer(UNSEEN[name]).dialect
    assert (dialect.thoughts, dialect.has_unknown_thoughts) == ((), True)


@pytest.mark.parametrize("name", NONE)
def test_a_template_without_thoughts_has_no_marks(renderer: Renderers, name: str) -> None:
    dialect = renderer(NONE[name]).dialect
    assert (dialect.thoughts, dialect.has_unknown_thoughts) == ((), False)


def test_known_marks_need_no_look(renderer: Renderers) -> None:
    found = renderer(templates.template("chatml_thinking"))
    assert found.dialect.thoughts == (("<think>", "</think>"),)


@pytest.mark.parametrize("name", templates.files())
def test_a_dialect_is_the_same_after_its_way_through_a_frame(
    renderer: Renderers, name: str
) -> None:
    dialect = renderer(templates.template(name)).dialect
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(dialect), type=Dialect) == dialect


@pytest.mark.parametrize(
    ("template", "can_switch"),
    [
        (templates.template("chatml_thinking"), True),
        (SEEN["the prompt opens them where that is asked for"][0], True),
        (SEEN["the model opens them"][0], False),
        (templates.template("chatml"), False),
        ("{{ raise_exception('no thinking') }}", False),
    ],
)
def test_whether_thoughts_can_be_switched_is_seen_in_the_prompt(
    renderer: Renderers, template: str, can_switch: bool
) -> None:
    assert renderer(template).dialect.can_switch_thoughts == can_switch


def test_a_second_renderer_takes_over_the_dialect_and_learns_nothing() -> None:
    first = TemplateRenderer(templates.template("chatml_thinking"), "", "")
    second = TemplateRenderer(*first.texts, first.dialect)
    assert second.dialect is first.dialect
    assert second._process._child is None
    first.close()


def test_a_request_is_prepared_with_the_marks_that_were_seen(
    cycle: Running, renderer: Renderers
) -> None:
    text, marks = SEEN["the model opens them"]
    chat = ChatPrompt([Message("user", "?")])

    def asked(**fields: Any) -> Generate:
        limit = ThinkingLimit(0, list(REASONING_MARKERS))
        return Generate(
            1, chat, thinking=limit, thoughts=list(REASONING_MARKERS), shown=["<x>"], **fields
        )

    ready = Preparer(cycle.pair, renderer(text)).prepare(asked())
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
    unread = Preparer(cycle.pair, renderer(UNSEEN["one mark for both"])).prepare(asked())
    assert "not known" in unread.note
    assert (unread.request.thoughts, unread.matcher) == ([], None)
