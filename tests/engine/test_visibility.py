"""Stop strings hold in the text that a reader sees, whatever pieces an answer comes in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.engine.text_stream import TextStream
from localspec.protocol import calls
from localspec.protocol.calls import CallFormat
from localspec.protocol.dialect import REASONING_MARKERS
from localspec.protocol.visibility import HIDDEN, VISIBLE, VisibilityParser

TOOLS = {
    "led": {"type": "object", "properties": {"note": {"type": "string"}}},
    "get_weather": {"type": "object", "properties": {"note": {"type": "string"}}},
}
FOUND = CallFormat(
    "found",
    ("<minimax:tool_call>",),
    "</invoke>\n</minimax:tool_call>",
    lead='\n<invoke name="',
    middle='">\n',
    parameter=('<parameter name="', '">', '">', "</parameter>\n"),
)
FORMS = {
    "hermes": calls.HERMES,
    "tags": calls.TAGS,
    "llama": calls.LLAMA,
    "granite": calls.GRANITE,
    "mistral": calls.MISTRAL,
    "mistral args": calls.MISTRAL_ARGS,
    "gemma": calls.GEMMA,
    "functionary": calls.FUNCTIONARY,
    "nemotron": calls.NEMOTRON,
    "found": FOUND,
}
# What models say: among it what begins as markers do, and blanks wherever they matter.
WORDS = [
    "STOP",
    "x",
    "é",
    "☃",
    " ",
    "\n",
    "\n\n",
    "<",
    "[",
    "{",
    "</",
    "<t",
    "<tool",
    "a.",
    '"',
    "}",
    "|",
]
said = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
# An argument has no marker of its own notation in it: what that means is not this file's matter.
NOTES = ["STOP", "x", "é", " ", "\n", '"', "\\", "{", "}", "[", "]", ";", "<b>", "</tool"]
notes = st.lists(st.sampled_from(NOTES), max_size=6).map("".join)


def written(form: CallFormat, name: str, note: str) -> str:
    """A call as a model of that family writes it."""
    arguments = json.dumps({"note": note}, ensure_ascii=False)
    whole = f'{{"name": "{name}", "{form.arguments}": {arguments}}}'
    opening = form.opens[0]
    match form.kind:
        case "tags":
            value = f"<parameter=note>\n{note}\n</parameter>\n"
            return f"{opening}\n<function={name}>\n{value}</function>\n{form.close}"
        case "mistral" | "json" if not form.bare:
            return f"{opening}[{whole}]{form.close}"
        case "named":
            return f"{opening}{name}{form.middle}{arguments}{form.close}"
        case "gemma":
            quote = calls.GEMMA_QUOTE
            return f"{opening}call:{name}{{note:{quote}{note}{quote}}}{form.close}"
        case "found":
            value = f'<parameter name="note">{note}</parameter>\n'
            return f'{opening}\n<invoke name="{name}">\n{value}{form.close}'
    return f"{opening}{form.lead}{whole}{form.lead}{form.close}"


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat | None, str, str]:
    """How calls are written, the end of the prompt, and an answer: thoughts, texts and calls."""
    form = draw(st.sampled_from([None, *FORMS.values()]))
    tail, answer = "<|assistant|>\n", ""
    if draw(st.booleans()):
        opening, closing = draw(st.sampled_from(REASONING_MARKERS))
        thoughts = draw(said)
        if draw(st.booleans()):
            tail += opening
        else:
            answer += draw(st.sampled_from(["", "\n"])) + opening
        answer += thoughts + (closing if draw(st.booleans()) else "")
    answer += draw(said)
    for _ in range(draw(st.integers(0, 2))):
        if form is None:
            break
        name = draw(st.sampled_from(sorted(TOOLS)))
        answer += written(form, name, draw(notes)) + draw(said)
    return form, tail, answer


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def regions(form: CallFormat | None, tail: str) -> VisibilityParser:
    return VisibilityParser(REASONING_MARKERS, tail, form, TOOLS if form else ())


def kinds(form: CallFormat | None, tail: str, pieces: Sequence[str]) -> str:
    follower = regions(form, tail)
    return "".join([*map(follower.feed, pieces), follower.finish()])


def content(form: CallFormat | None, tail: str, answer: str) -> tuple[str, bool]:
    """What a client is shown as text, and whether a call could not be read as one."""
    parser = AnswerParser(form, TOOLS) if form else AnswerParser()
    parser.begin(tail)
    pieces = [*parser.feed(answer), *parser.finish()]
    text = "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == "content")
    return text, any(mark in text for mark in (form.opens if form else ()))


@settings(max_examples=300)
@given(answers())
def test_what_is_visible_is_what_the_daemon_shows_as_text(
    given_answer: tuple[CallFormat | None, str, str],
) -> None:
    form, tail, answer = given_answer
    found = kinds(form, tail, [answer])
    assert len(found) == len(answer)
    visible = "".join(c for c, kind in zip(answer, found, strict=True) if kind == VISIBLE)
    shown, broken = content(form, tail, answer)
    if not broken:  # blanks at the very end say nothing, and are dropped behind some calls
        assert visible.rstrip() == shown.rstrip()


@given(st.data(), answers())
def test_the_pieces_in_which_an_answer_comes_change_nothing(
    data: st.DataObject, given_answer: tuple[CallFormat | None, str, str]
) -> None:
    form, tail, answer = given_answer
    whole = kinds(form, tail, [answer])
    assert kinds(form, tail, list(answer)) == whole
    assert kinds(form, tail, data.draw(cuts(answer))) == whole


@given(
    answers(),
    st.lists(st.sampled_from(["STOP", "\n", "\n\n", "{", "xSTOP", "a.", "P\n"]), max_size=2),
)
def test_a_stop_string_ends_an_answer_where_it_is_visible_and_nowhere_else(
    given_answer: tuple[CallFormat | None, str, str], stops: list[str]
) -> None:
    form, tail, answer = given_answer
    found = kinds(form, tail, [answer])
    runs = [""]
    for char, kind in zip(answer, found, strict=True):
        if kind == VISIBLE:
            runs[-1] += char
        elif runs[-1]:
            runs.append("")
    stream = TextStream(stops, regions(form, tail))
    text = "".join(stream.push(char.encode()).text for char in answer) + stream.flush().text
    expected = any(stop in run for run in runs for stop in stops)
    assert (stream.stopped is not None) == expected
    assert answer.startswith(text)
    if not expected:
        assert text == answer


CHANNELS = (
    "<|channel|>analysis<|message|>STOP thinks<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.led <|constrain|>json<|message|>{"note": "STOP"}<|end|>'
    "<|start|>assistant<|channel|>final<|message|>It is STOP on.<|end|>"
)


def test_channels_are_thoughts_calls_and_text() -> None:
    for pieces in ([CHANNELS], list(CHANNELS)):
        found = kinds(calls.HERMES, "<|start|>assistant", pieces)
        visible = "".join(c for c, k in zip(CHANNELS, found, strict=True) if k == VISIBLE)
        assert visible == "It is STOP on."


@pytest.mark.parametrize(
    ("answer", "visible"),
    [
        ('{"name": "led", "parameters": {"note": "STOP"}}', ""),
        ('{"type": "function", "name": "led", "parameters": {}}; {"name": "led"}', ""),
        ('{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}'),
        ('{"answer": "STOP"}', '{"answer": "STOP"}'),
        ('{"na', '{"na'),
    ],
)
def test_json_from_the_first_character_is_a_call_where_it_names_a_tool(
    answer: str, visible: str
) -> None:
    for pieces in ([answer], list(answer)):
        found = kinds(calls.LLAMA, "", pieces)
        assert "".join(c for c, k in zip(answer, found, strict=True) if k == VISIBLE) == visible


PLAIN = [
    ('```json\n{"name": "led", "arguments": {"note": "STOP"}}\n```', ""),
    ('Sure.\n```\n{"name": "led", "arguments": {}}\n``` Done.', "Sure.Done."),
    ('{"name": "led", "arguments": {"note": "STOP"}}', ""),
    ('```json\n{"name": "nobody", "arguments": {}}\n```', None),
    ('```json\n{"a": "STOP"}\n```\nb', None),
    ('```python\nx = {"name": "led"}\n```\nSTOP', None),
    ("```\nno JSON\n```", None),
    ("``", None),
    ("```", None),
    ("```js", None),
    ('```json\n{"na', None),
]


@pytest.mark.parametrize(("answer", "visible"), PLAIN)
def test_plain_json_that_names_a_tool_is_a_call_and_other_blocks_are_text(
    answer: str, visible: str | None
) -> None:
    for pieces in ([answer], list(answer)):
        follower = VisibilityParser(REASONING_MARKERS, "", calls.HERMES, TOOLS, plain_calls=True)
        found = "".join([*map(follower.feed, pieces), follower.finish()])
        assert len(found) == len(answer)
        text = "".join(c for c, k in zip(answer, found, strict=True) if k == VISIBLE)
        assert text == (answer if visible is None else visible)


@given(st.data())
def test_what_is_visible_beside_plain_calls_is_what_the_daemon_shows(data: st.DataObject) -> None:
    words = [*WORDS, "```", "```json\n", "```py\n", '{"name": "led", "arguments": {"note": "a"}}']
    answer = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    parser = AnswerParser(calls.HERMES, TOOLS, plain_calls=tuple(TOOLS))
    parser.begin("")
    read = [*parser.feed(answer), *parser.finish()]
    shown = "".join(p.text for p in read if isinstance(p, Text) and p.kind == "content")
    results = set()
    for pieces in ([answer], list(answer), data.draw(cuts(answer))):
        follower = VisibilityParser(REASONING_MARKERS, "", calls.HERMES, TOOLS, plain_calls=True)
        found = "".join([*map(follower.feed, pieces), follower.finish()])
        assert len(found) == len(answer)
        results.add(found)
    assert len(results) == 1
    visible = "".join(c for c, k in zip(answer, found, strict=True) if k == VISIBLE)
    # What only begins like a call is hidden here, and shown by the daemon once it has turned out to be none.
    assert parser.calls or "name" in answer or visible.split() == shown.split()


def test_a_marker_of_thoughts_is_no_text_and_thoughts_are_text_where_they_are_kept_in_it() -> None:
    answer = "<think>a STOP</think>b"
    assert kinds(None, "", [answer]) == HIDDEN * (len(answer) - 1) + VISIBLE
    assert VisibilityParser().finish(answer) == VISIBLE * len(answer)
