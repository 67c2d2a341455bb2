"""Raw answers taken apart: thoughts, text and calls, however the stream is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.protocol.call_readers import Arguments, Call, JsonCalls
from localspec.protocol.calls import (
    GEMMA,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    NO_TOOLS,
    TAGS,
    UNKNOWN_FORMAT,
    CallFormat,
)

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}
SIZES = (1, 2, 3, 7, 1000)


def read(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls of an answer that comes in pieces of `size` characters."""
    content, reasoning = "", ""
    calls: list[list[str]] = []
    pieces = [p for at in range(0, len(text), size) for p in parser.feed(text[at : at + size])]
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case Text("content"):
                content += piece.text
            case Text():
                reasoning += piece.text
            case Call():
                assert piece.index == len(calls)
                assert len(piece.id) == 9
                calls.append([piece.name, ""])
            case Arguments():
                assert piece.index == len(calls) - 1
                calls[-1][1] += piece.text
    return content, reasoning, [(name, json.loads(text)) for name, text in calls]


PARIS = ("weather", {"city": "Paris", "days": 2})
HERMES_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)


TYPED = {
    "typed": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "none": {"type": ["string", "null"]},
            "list": {"type": "array"},
            "text": {"type": "string"},
            "odd": {"type": "integer"},
        },
    }
}


@pytest.mark.parametrize("size", SIZES)
def test_a_tagged_argument_is_what_its_schema_says(size: int) -> None:
    """Python's True and None as well, which templates write; text where nothing else can be made of it."""
    values = {
        "on": "True",
        "none": "None",
        "list": "[1, 2]",
        "text": "3",
        "odd": "many",
        "new": "4",
    }
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    answer = f"<tool_call>\n<function=typed>\n{tags}</function>\n</tool_call>"
    expected = {"on": True, "none": None, "list": [1, 2], "text": "3", "odd": "many", "new": "4"}
    assert read(AnswerParser(HERMES, TYPED), answer, size) == ("", "", [("typed", expected)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ('{"name": "now", "arguments": {}}', {}),
        ('call:now{a:[1, [], {}],  b : {c:null} , "d":"\\u00e9"}', None),
        ('call:now{<|"|>a b<|"|>:-2.5e3,e:true}', {"a b": -2500.0, "e": True}),
        ("call: now {}", {}),
    ],
)
def test_gemmas_notation_is_read(inside: str, expected: Any, size: int) -> None:
    if expected is None:
        expected = {"a": [1, [], {}], "b": {"c": None}, "d": "é"}
    found = read(AnswerParser(GEMMA, TOOLS), f"<|tool_call>{inside}<tool_call|>", size)
    assert found == ("", "", [("now", expected)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "inside",
    [
        "call:now{a:}",
        "call:now{a:maybe}",
        "call:now{a:1",
        'call:now{a:<|"|>no end}',
        "call:now",
        "call:{}",
        "now",
        "call:now{" + "a:{" * 3000,
    ],
)
def test_what_is_no_notation_of_gemma_stays_text(inside: str, size: int) -> None:
    content, _, calls = read(AnswerParser(GEMMA, TOOLS), f"<|tool_call>{inside}<tool_call|>", size)
    assert calls == []
    assert inside in content


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("form", "answer", "expected"),
    [
        pytest.param(HERMES, HERMES_CALL, [PARIS], id="hermes"),
        pytest.param(HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", [PARIS, PARIS], id="hermes twice"),
        pytest.param(
            HERMES,
            '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "weather"}</tool_call>',
            [PARIS],
            id="hermes, arguments first",
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}'
            "</tool_call>",
            [PARIS],
            id="hermes, arguments as a string",
        ),
        pytest.param(
            HERMES, '<tool_call>{"name": "now"}</tool_call>', [("now", {})], id="hermes, none"
        ),
        pytest.param(
            HERMES,
            '<tool_call>{"name": "now", "arguments": null }</tool_call>',
            [("now", {})],
            id="hermes, null",
        ),
        pytest.param(
            HERMES,
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            [PARIS],
            id="qwen coder",
        ),
        pytest.param(
            LLAMA,
            '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
            [PARIS],
            id="llama",
        ),
        pytest.param(
            LLAMA,
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
            [PARIS],
            id="llama, marked",
        ),
        pytest.param(
            LLAMA,
            '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            [("now", {})] * 2,
            id="llama twice",
        ),
        pytest.param(
            MISTRAL,
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}, "id": "x"},'
            ' {"name": "now", "arguments": {}}]',
            [PARIS, ("now", {})],
            id="mistral",
        ),
        pytest.param(
            MISTRAL_ARGS,
            '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}',
            [PARIS, ("now", {})],
            id="mistral, newer",
        ),
        pytest.param(
            MISTRAL_ARGS,
            '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 2}',
            [PARIS],
            id="mistral with an id",
        ),
        pytest.param(
            GRANITE,
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]',
            [PARIS],
            id="granite 3",
        ),
        pytest.param(
            GEMMA,
            '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
            [PARIS],
            id="gemma 4",
        ),
        pytest.param(
            GEMMA,
            "<|tool_call>call:now{}<tool_call|><|tool_call>call:weather{"
            'city:<|"|>a}b<|"|>,days:[1,{<|"|>x<|"|>:true}]}<tool_call|>',
            [("now", {}), ("weather", {"city": "a}b", "days": [1, {"x": True}]})],
            id="gemma 4, nested",
        ),
    ],
)
def test_calls_of_every_family(
    form: CallFormat, answer: str, expected: list[tuple[str, Any]], size: int
) -> None:
    parser = AnswerParser(form, TOOLS)
    assert read(parser, answer, size) == ("", "", expected)
    parser = AnswerParser(form, TOOLS)
    if not form.bare:
        content, _, calls = read(parser, f"Let me see.\n\n{answer}\n", size)
        assert (content, calls) == ("Let me see.", expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (HERMES, "no call, <tool> or so"),
        (HERMES, "<tool_call>\n{broken"),
        (HERMES, "before <tool_call>not json</tool_call> after"),
        (HERMES, '<tool_call>{"no": "name"}</tool_call>'),
        (LLAMA, '{"name": "Ada", "born": 1815}'),
        (LLAMA, '{"answer": 42} is JSON'),
        (LLAMA, "{ this is no JSON"),
        (MISTRAL_ARGS, "[TOOL_CALLS]a line\nwithout arguments"),
        (GEMMA, "<|tool_call>call:broken{city:<tool_call|>"),
        (NO_TOOLS, HERMES_CALL),
        (NO_TOOLS, "text ends <thi"),
    ],
)
def test_what_is_no_call_stays_text(form: CallFormat, answer: str, size: int) -> None:
    content, reasoning, calls = read(AnswerParser(form, TOOLS), answer, size)
    assert (content.replace(" ", ""), reasoning, calls) == (answer.replace(" ", ""), "", [])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("tail", "answer", "expected"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", ("yes", "hm")),
        ("", "\n<think>hm</think>yes", ("yes", "hm")),
        ("<|im_start|>assistant\n<think>\n", "hm, well\n</think>\n\nyes", ("yes", "hm, well")),
        ("<think>\n\n</think>\n\n", "yes", ("yes", "")),
        ("", "[THINK]hm[/THINK]yes", ("yes", "hm")),
        ("", "<|channel>thought\nhm<channel|>yes", ("yes", "hm")),
        ("", "<seed:think>hm</seed:think>yes", ("yes", "hm")),
        ("<|START_THINKING|>", "hm<|END_THINKING|>yes", ("yes", "hm")),
        ("", "yes <think>no</think>", ("yes <think>no</think>", "")),
        ("", "<think>cut o", ("", "cut o")),
        ("", "<th", ("<th", "")),
        ("", " a <b> c ", (" a <b> c ", "")),
        ("", "<think>a</think><think>b</think>", ("<think>b</think>", "a")),
    ],
)
def test_thoughts_are_set_apart(
    tail: str, answer: str, expected: tuple[str, str], size: int
) -> None:
    parser = AnswerParser()
    parser.begin(tail)
    assert read(parser, answer, size)[:2] == expected


MARKED = 'a </parameter> b </function> c </tool_call> <tool_call|> {"'


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [TAGS, GEMMA, HERMES])
def test_json_may_hold_the_markers_that_end_it(form: CallFormat, size: int) -> None:
    value = {"note": [MARKED]}
    call = json.dumps({"name": "keep", "arguments": {"what": value}})
    if form is TAGS:
        written = f"\n<parameter=what>\n{json.dumps(value)}\n</parameter>\n"
        text = f"\n<parameter=text>\n1 </function>\n</parameter>{written}"
        call = f"<function=keep>{text}</function>"
    tools = {"keep": {"properties": {"what": {"type": "object"}, "text": {"type": "string"}}}}
    parser = AnswerParser(form, tools)
    _, _, [(name, arguments)] = read(parser, f"{form.opens[0]}{call}{form.close}", size)
    assert (name, arguments["what"]) == ("keep", value)


def test_tags_are_streamed_parameter_by_parameter() -> None:
    parser = AnswerParser(TAGS, TOOLS)
    pieces = parser.feed("<tool_call><function=weather>\n<parameter=days>\n2\n</parameter>\n<param")
    assert pieces[1:] == [Arguments('{"days": 2')]
    assert parser.feed("eter=city>\nRome\n</parameter>") == [Arguments(', "city": "Rome"')]
    assert parser.feed("\n</function>\n</tool_call>") == [Arguments("}")]


@pytest.mark.parametrize("size", SIZES)
def test_thoughts_come_before_calls(size: int) -> None:
    answer = f"<think>\nI should look.\n</think>\n\nOne moment.\n{HERMES_CALL}"
    found = read(AnswerParser(HERMES, TOOLS), answer, size)
    assert found == ("One moment.", "I should look.", [PARIS])
    answer = '<think>hm</think>{"name": "now", "parameters": {}}'
    assert read(AnswerParser(LLAMA, TOOLS), answer, size) == ("", "hm", [("now", {})])


@pytest.mark.parametrize("size", SIZES)
def test_messages_in_channels_are_thoughts_text_and_calls(size: int) -> None:
    """As gpt-oss writes them."""
    thoughts = "<|channel|>analysis<|message|>a < b, <|hm<|end|>"
    said = "<|start|>assistant<|channel|>final<|message|>yes <b>"
    assert read(AnswerParser(), thoughts + said, size) == ("yes <b>", "a < b, <|hm", [])
    called = (
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 2}'
    )
    before = "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    found = read(AnswerParser(UNKNOWN_FORMAT, TOOLS), thoughts + before + called, size)
    assert found == ("One moment.", "a < b, <|hm", [PARIS])
    cut = read(AnswerParser(UNKNOWN_FORMAT, TOOLS), "<|channel|>analysis<|message|>I thi", size)
    assert cut == ("", "I thi", [])
    assert read(AnswerParser(), "<|chan is text", size)[0] == "<|chan is text"


def test_thoughts_stay_in_the_text_on_request() -> None:
    parser = AnswerParser(reasoning=False)
    parser.begin("<think>")
    assert read(parser, "<think>a</think>b", 3)[0] == "<think>a</think>b"


def test_arguments_are_streamed_as_they_come() -> None:
    parser = AnswerParser(HERMES, TOOLS)
    parser.feed('<tool_call>\n{"name": "weather", ')
    assert parser.calls == 1
    assert parser.feed('"arguments": {"ci') == [Arguments('{"ci')]
    assert parser.feed('ty": "P') == [Arguments('ty": "P')]


def test_without_parallel_calls_only_the_first_is_given() -> None:
    parser = AnswerParser(HERMES, TOOLS, parallel=False)
    assert read(parser, HERMES_CALL * 3, 4)[2] == [PARIS]


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    parser = AnswerParser(HERMES, TOOLS)
    pieces = parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    pieces += parser.finish()
    assert [type(piece) for piece in pieces] == [Call, Arguments]
    assert isinstance(pieces[1], Arguments)
    assert pieces[1].text == '{"city": "Pa'


@pytest.mark.parametrize("form", [HERMES, LLAMA, GRANITE, MISTRAL, MISTRAL_ARGS, GEMMA])
@pytest.mark.parametrize("closed", [False, True])
def test_a_call_that_is_cut_off_is_a_call_or_text_and_never_both(
    form: CallFormat, closed: bool
) -> None:
    opens = form.opens[0]
    call = '{"name": "weather", "arguments": {"city": "Pa}ris", "days": 2}}'
    for end in range(len(call)):
        parser = AnswerParser(form, TOOLS)
        pieces = parser.feed(f"{opens}{call[:end]}{form.close if closed else ''}")
        pieces += parser.finish()
        begun = [piece for piece in pieces if isinstance(piece, Call)]
        assert len(begun) + any(isinstance(piece, Text) for piece in pieces) <= 1


def mangled(chosen: random.Random) -> str:
    """A call or several as JSON, some with a character too many, too few or another."""
    call = {
        "name": chosen.choice(["weather", "now", 'a"b\\']),
        "arguments": chosen.choice([{"city": "Pa\\ris", "at": [1, {}]}, "{}", None, {"q": 'a"}'}]),
        "id": chosen.choice([1, "x", ["name"], {"arguments": 2}]),
    }
    items = chosen.sample(list(call.items()), chosen.randint(1, 3))
    text = json.dumps(dict(items), indent=chosen.choice([None, 1]))
    text = chosen.choice([text, f"[{text}, {text}]", f"{text} and more"])
    for _ in range(chosen.choice([0, 0, 1, 3])):
        at = chosen.randrange(len(text))
        text = text[:at] + chosen.choice(["", "{", "]", '"', ":", "\\", " x"]) + text[at + 1 :]
    return text


def test_gemmas_json_is_a_call_or_text_and_never_both() -> None:
    objects = [text for seed in range(300) if (text := mangled(random.Random(seed)))[:1] == "{"]
    assert len(objects) > 150
    for inside in objects:
        plain = JsonCalls()
        plain.feed(inside.strip())
        parser = AnswerParser(GEMMA, TOOLS)
        pieces = [*parser.feed(f"<|tool_call>{inside}<tool_call|>"), *parser.finish()]
        is_call, is_text = (any(isinstance(p, kind) for p in pieces) for kind in (Call, Text))
        assert is_call != is_text, inside
        assert is_text or not plain.is_broken, inside


def as_it_came(text: str, size: int, forced: bool) -> tuple[Any, ...]:
    """What a reader makes of a text in pieces of `size` characters, and what it leaves of it."""
    reader = JsonCalls(call=Call("x" * 9, "now") if forced else None)
    names, arguments, left = [], "", text
    pieces: list[Any] = []
    while left and not (reader.is_finished or reader.is_broken):
        found, rest = reader.feed(left[:size])
        assert not rest or reader.is_finished or reader.is_broken
        pieces, left = [*pieces, *found], rest + left[size:]
    state = reader.is_finished, reader.is_broken, reader.raw, left
    for piece in [*pieces, *reader.end()]:
        if isinstance(piece, Call):
            names.append(piece.name)
        else:
            arguments += piece.text
    return names, arguments, *state


@pytest.mark.parametrize("forced", [False, True])
def test_calls_are_read_the_same_however_they_come(forced: bool) -> None:
    chosen = random.Random(5)
    for _ in range(400):
        text = mangled(chosen)
        whole = as_it_came(text, len(text), forced)
        assert whole[-2] + whole[-1] == text  # nothing is lost
        assert [as_it_came(text, size, forced) for size in (1, 2, 5)] == [whole] * 3
