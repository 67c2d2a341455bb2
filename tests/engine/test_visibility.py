"""Stop strings apply to the visible text, whatever pieces an answer arrives in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localspec.chat.families import (
    functionary,
    gemma,
    granite,
    hermes,
    kimi,
    lfm2,
    llama,
    minimax,
    mistral,
    muse,
    nemotron,
    qwen_coder,
)
from localspec.chat.notations.loose_values import GEMMA_QUOTE
from localspec.chat.parser import AnswerParser, Text
from localspec.chat.visibility import HIDDEN, VISIBLE, VisibilityParser
from localspec.engine.text_stream import TextStream
from localspec.protocol.calls import CallFormat
from localspec.protocol.dialect import REASONING_MARKERS

TOOLS = {
    "led": {"type": "object", "properties": {"note": {"type": "string"}}},
    "get_weather": {"type": "object", "properties": {"note": {"type": "string"}}},
}
DETECTED = CallFormat(
    "found",
    ("<minimax:tool_call>",),
    "</invoke>\n</minimax:tool_call>",
    lead='\n<invoke name="',
    middle='">\n',
    parameter=('<parameter name="', '">', '">', "</parameter>\n"),
)
FORMATS = {
    "hermes": hermes.HERMES,
    "tags": qwen_coder.TAGS,
    "llama": llama.LLAMA,
    "granite": granite.GRANITE,
    "mistral": mistral.MISTRAL,
    "mistral args": mistral.MISTRAL_ARGS,
    "gemma": gemma.GEMMA,
    "functionary": functionary.FUNCTIONARY,
    "nemotron": nemotron.NEMOTRON,
    "lfm2": lfm2.LFM2,
    "minimax m3": minimax.MINIMAX_M3,
    "found": DETECTED,
}
# Pieces of answers, including beginnings of markers, and blanks wherever they matter.
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
spoken_texts = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
# Arguments contain no marker of their own format, which other tests cover.
NOTES = ["STOP", "x", "é", " ", "\n", '"', "\\", "{", "}", "[", "]", ";", "<b>", "</tool"]
notes = st.lists(st.sampled_from(NOTES), max_size=6).map("".join)


def write_call(call_format: CallFormat, name: str, note: str) -> str:
    """Return a call as a model of that family writes it."""
    arguments = json.dumps({"note": note}, ensure_ascii=False)
    call_json = f'{{"name": "{name}", "{call_format.arguments}": {arguments}}}'
    opening = call_format.opens[0]
    match call_format.kind:
        case "tags":
            value = f"<parameter=note>\n{note}\n</parameter>\n"
            return f"{opening}\n<function={name}>\n{value}</function>\n{call_format.close}"
        case "mistral" | "json" if not call_format.bare:
            return f"{opening}[{call_json}]{call_format.close}"
        case "named":
            return f"{opening}{name}{call_format.middle}{arguments}{call_format.close}"
        case "gemma":
            quote = GEMMA_QUOTE
            return f"{opening}call:{name}{{note:{quote}{note}{quote}}}{call_format.close}"
        case "python":
            return f"{opening}[{name}(note={json.dumps(note)})]{call_format.close}"
        case "found" if call_format.elements:
            mark = call_format.elements
            value = f"{mark}<note>{note}{mark}</note>"
            return (
                f"{opening}{call_format.lead}{name}{call_format.middle}{value}{call_format.close}"
            )
        case "found":
            value = f'<parameter name="note">{note}</parameter>\n'
            return f'{opening}\n<invoke name="{name}">\n{value}{call_format.close}'
    return f"{opening}{call_format.lead}{call_json}{call_format.lead}{call_format.close}"


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat | None, str, str]:
    """Draw a call format, the end of the prompt, and an answer of thoughts, texts and calls."""
    call_format = draw(st.sampled_from([None, *FORMATS.values()]))
    tail, answer = "<|assistant|>\n", ""
    if draw(st.booleans()):
        opening, closing = draw(st.sampled_from(REASONING_MARKERS))
        thoughts = draw(spoken_texts)
        if draw(st.booleans()):
            tail += opening
        else:
            answer += draw(st.sampled_from(["", "\n"])) + opening
        answer += thoughts + (closing if draw(st.booleans()) else "")
    answer += draw(spoken_texts)
    for _ in range(draw(st.integers(0, 2))):
        if call_format is None:
            break
        name = draw(st.sampled_from(sorted(TOOLS)))
        answer += write_call(call_format, name, draw(notes)) + draw(spoken_texts)
    return call_format, tail, answer


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def make_parser(call_format: CallFormat | None, tail: str) -> VisibilityParser:
    return VisibilityParser(REASONING_MARKERS, tail, call_format, TOOLS if call_format else ())


def classify(call_format: CallFormat | None, tail: str, pieces: Sequence[str]) -> str:
    follower = make_parser(call_format, tail)
    return "".join([*map(follower.feed, pieces), follower.finish()])


def read_content(call_format: CallFormat | None, tail: str, answer: str) -> tuple[str, bool]:
    """Return the text that a client is sent, and whether a call was malformed."""
    parser = AnswerParser(call_format, TOOLS) if call_format else AnswerParser()
    parser.begin(tail)
    pieces = [*parser.feed(answer), *parser.finish()]
    text = "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == "content")
    return text, any(mark in text for mark in (call_format.opens if call_format else ()))


def begin_second_call(text: str) -> tuple[CallFormat, str, str]:
    """Return an answer that is cut off behind a call of a format without markers between calls."""
    return llama.LLAMA, "<|assistant|>\n", write_call(llama.LLAMA, "get_weather", "") + text


def follow_a_call(name: str, note: str) -> tuple[CallFormat, str, str]:
    """Return an answer of a call with this argument, and text behind it."""
    call_format = FORMATS[name]
    return call_format, "<|assistant|>\n", f"{write_call(call_format, 'led', note)}STOP"


@settings(max_examples=300)
@given(answers())
@example(follow_a_call("minimax m3", '"'))
@example(follow_a_call("minimax m3", '[{"'))
@example(follow_a_call("found", '{"'))
@example(begin_second_call("{"))
@example(begin_second_call('; {"name": "get_w'))
@example(begin_second_call('{"name": "get_weather", '))
@example(begin_second_call("{ x"))
def test_visible_text_is_the_text_that_the_daemon_sends(
    given_answer: tuple[CallFormat | None, str, str],
) -> None:
    call_format, tail, answer = given_answer
    kinds = classify(call_format, tail, [answer])
    assert len(kinds) == len(answer)
    visible = "".join(c for c, kind in zip(answer, kinds, strict=True) if kind == VISIBLE)
    content, broken = read_content(call_format, tail, answer)
    if not broken:  # blanks at the very end do not matter, and are dropped after some calls
        assert visible.rstrip() == content.rstrip()


@given(st.data(), answers())
def test_pieces_of_an_answer_do_not_change_its_visibility(
    data: st.DataObject, given_answer: tuple[CallFormat | None, str, str]
) -> None:
    call_format, tail, answer = given_answer
    expected = classify(call_format, tail, [answer])
    assert classify(call_format, tail, list(answer)) == expected
    assert classify(call_format, tail, data.draw(cuts(answer))) == expected


@given(
    answers(),
    st.lists(st.sampled_from(["STOP", "\n", "\n\n", "{", "xSTOP", "a.", "P\n"]), max_size=2),
)
def test_stop_string_ends_an_answer_only_where_it_is_visible(
    given_answer: tuple[CallFormat | None, str, str], stops: list[str]
) -> None:
    call_format, tail, answer = given_answer
    kinds = classify(call_format, tail, [answer])
    runs = [""]
    for char, kind in zip(answer, kinds, strict=True):
        if kind == VISIBLE:
            runs[-1] += char
        elif runs[-1]:
            runs.append("")
    stream = TextStream(stops, make_parser(call_format, tail))
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


RECIPIENTS = (
    " to=self<|message|>STOP thinks<|eom|><|start|>assistant to=led<|message|><atem:function_calls>\n"
    '<atem:invoke name="led">\n<atem:parameter name="note">STOP</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>It is STOP on.<|eom|>"
)


SECTIONS = (
    "STOP thinks<|close|>think<|sep|><|open|>response<|sep|>It is STOP on.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="led" index="1"<|sep|><|open|>argument key="note" type="string"'
    "<|sep|>STOP<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)


@pytest.mark.parametrize(
    ("call_format", "tail", "answer"),
    [
        (hermes.HERMES, "<|start|>assistant", CHANNELS),
        (muse.MUSE, "<|start|>assistant", RECIPIENTS),
        (kimi.KIMI_K3, "<|open|>think<|sep|>", SECTIONS),
        (functionary.FUNCTIONARY_3_2, ">>>", 'all\nIt is STOP on.>>>led\n{"note": "STOP"}'),
    ],
)
def test_messages_are_thoughts_calls_and_text(
    call_format: CallFormat, tail: str, answer: str
) -> None:
    for pieces in ([answer], list(answer)):
        kinds = classify(call_format, tail, pieces)
        visible = "".join(c for c, k in zip(answer, kinds, strict=True) if k == VISIBLE)
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
def test_leading_json_is_a_call_if_it_names_a_tool(answer: str, visible: str) -> None:
    for pieces in ([answer], list(answer)):
        kinds = classify(llama.LLAMA, "", pieces)
        assert "".join(c for c, k in zip(answer, kinds, strict=True) if k == VISIBLE) == visible


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
        follower = VisibilityParser(REASONING_MARKERS, "", hermes.HERMES, TOOLS, plain_calls=True)
        kinds = "".join([*map(follower.feed, pieces), follower.finish()])
        assert len(kinds) == len(answer)
        text = "".join(c for c, k in zip(answer, kinds, strict=True) if k == VISIBLE)
        assert text == (answer if visible is None else visible)


@given(st.data())
def test_visible_text_beside_plain_calls_is_what_the_daemon_sends(data: st.DataObject) -> None:
    words = [*WORDS, "```", "```json\n", "```py\n", '{"name": "led", "arguments": {"note": "a"}}']
    answer = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    parser = AnswerParser(hermes.HERMES, TOOLS, plain_calls=tuple(TOOLS))
    parser.begin("")
    parsed = [*parser.feed(answer), *parser.finish()]
    content = "".join(p.text for p in parsed if isinstance(p, Text) and p.kind == "content")
    results = set()
    for pieces in ([answer], list(answer), data.draw(cuts(answer))):
        follower = VisibilityParser(REASONING_MARKERS, "", hermes.HERMES, TOOLS, plain_calls=True)
        kinds = "".join([*map(follower.feed, pieces), follower.finish()])
        assert len(kinds) == len(answer)
        results.add(kinds)
    assert len(results) == 1
    visible = "".join(c for c, k in zip(answer, kinds, strict=True) if k == VISIBLE)
    # Text that only begins like a call is hidden here, but the daemon sends it once it is not a call.
    assert parser.calls or "name" in answer or visible.split() == content.split()


def test_thoughts_are_visible_only_without_a_parser_for_them() -> None:
    answer = "<think>a STOP</think>b"
    assert classify(None, "", [answer]) == HIDDEN * (len(answer) - 1) + VISIBLE
    assert VisibilityParser().finish(answer) == VISIBLE * len(answer)
