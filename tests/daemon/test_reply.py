"""Parsing of raw answers into thoughts, text and calls, in pieces of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from localspec.chat.families.command_r import COMMAND_R
from localspec.chat.families.functionary import FUNCTIONARY_3_2
from localspec.chat.families.gemma import GEMMA
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.granite import GRANITE
from localspec.chat.families.hermes import HERMES
from localspec.chat.families.kimi import KIMI_K3
from localspec.chat.families.lfm2 import LFM2
from localspec.chat.families.llama import LLAMA
from localspec.chat.families.minimax import MINIMAX_M3
from localspec.chat.families.mistral import MISTRAL, MISTRAL_ARGS
from localspec.chat.families.muse import MUSE
from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.notations.call_readers import JsonCalls
from localspec.chat.reader import AnswerReader
from localspec.protocol.calls import NO_TOOLS, UNKNOWN_FORMAT, CallFormat
from localspec.protocol.pieces import Arguments, Call, Text

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}
SIZES = (1, 2, 3, 7, 1000)
TEXT_WITH_MARKERS = 'a </parameter> b </function> c </tool_call> <tool_call|> {"'
QUOTED = f'<|"|>{TEXT_WITH_MARKERS}<|"|>'


def parse_answer(
    parser: AnswerReader, text: str, size: int
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls of an answer that arrives in pieces of `size` characters."""
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
                assert piece.text.encode()  # half of a surrogate pair could not be sent
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
            "word": {"type": ["string", "null"]},
            "quoted": {"type": ["string", "null"]},
            "size": {"type": "number"},
            "list": {"type": "array"},
            "text": {"type": "string"},
            "odd": {"type": "integer"},
        },
    }
}


@pytest.mark.parametrize("size", SIZES)
def test_tagged_arguments_are_converted_by_their_schema(size: int) -> None:
    """Python's True and None are accepted, because templates write them; other values stay text."""
    values = {
        "on": "True",
        "none": "None",
        "word": "True",
        "quoted": '"q"',
        "size": "NaN",
        "list": "[1, 2]",
        "text": "3",
        "odd": "many",
        "new": "4",
    }
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    answer = f"<tool_call>\n<function=typed>\n{tags}</function>\n</tool_call>"
    expected = {
        "on": True,
        "none": None,
        "word": "True",
        "quoted": '"q"',
        "size": "NaN",
        "list": [1, 2],
        "text": "3",
    }
    expected |= {"odd": "many", "new": "4", "quoted": '"q"'}
    assert parse_answer(AnswerReader(HERMES, TYPED), answer, size) == (
        "",
        "",
        [("typed", expected)],
    )


def test_items_are_a_list_where_an_object_is_allowed_too() -> None:
    mark = "]<]minimax[>["
    either = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]}
    tools = {"find": {"type": "object", "properties": {"by": either}}}
    for inside, expected in [
        ("<item>a]<]minimax[>[</item>]<]minimax[>[<item>b]<]minimax[>[</item>", ["a", "b"]),
        ("<of>a]<]minimax[>[</of>", {"of": "a"}),
    ]:
        answer = (
            f'{mark}<tool_call>{mark}<invoke name="find">{mark}<by>{mark}{inside}{mark}</by>'
            f"{mark}</invoke>{mark}</tool_call>"
        )
        result = parse_answer(AnswerReader(MINIMAX_M3, tools), answer, 1000)
        assert result == ("", "", [("find", {"by": expected})])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ('{"name": "now", "arguments": {}}', {}),
        ('call:now{a:[1, [], {}],  b : {c:null} , "d":"\\u00e9"}', None),
        ('call:now{<|"|>a b<|"|>:-2.5e3,e:true}', {"a b": -2500.0, "e": True}),
        ("call: now {}", {}),
        (
            f"call:now{{a:{QUOTED},b:None,c:[True]}}",
            {"a": TEXT_WITH_MARKERS, "b": None, "c": [True]},
        ),
    ],
)
def test_calls_of_gemma_are_parsed(inside: str, expected: Any, size: int) -> None:
    if expected is None:
        expected = {"a": [1, [], {}], "b": {"c": None}, "d": "é"}
    result = parse_answer(AnswerReader(GEMMA, TOOLS), f"<|tool_call>{inside}<tool_call|>", size)
    assert result == ("", "", [("now", expected)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "inside",
    [
        "call:now{a:}",
        "call:now{a:maybe}",
        "call:now{a:NaN}",
        "call:now{a:1",
        'call:now{a:<|"|>no end}',
        "call:now",
        "call:{}",
        "now",
        "call:now{" + "a:{" * 3000,
    ],
)
def test_invalid_calls_of_gemma_stay_text(inside: str, size: int) -> None:
    content, _, calls = parse_answer(
        AnswerReader(GEMMA, TOOLS), f"<|tool_call>{inside}<tool_call|>", size
    )
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
            HERMES,
            '<tool_call>{"name": "weather", "arguments": {"city": "Pa\n\tris"}}</tool_call>',
            [("weather", {"city": "Pa\n\tris"})],
            id="hermes, with a line break",
        ),
        pytest.param(
            TAGS,
            '<tool_call>\n<function=weather>\n<parameter=days>\n["\\ud800"]\n</parameter>\n'
            "</function>\n</tool_call>",
            [("weather", {"days": ["\ud800"]})],
            id="qwen coder, half a character",
        ),
        pytest.param(
            LFM2,
            "<|tool_call_start|>[weather(city='Paris', days=2), now()]<|tool_call_end|>",
            [PARIS, ("now", {})],
            id="lfm2",
        ),
        pytest.param(
            LFM2,
            '<|tool_call_start|>[weather(city="it\'s\\n", days=True,'
            " more={'a': ['x\\'y', None], \"b:\": {}})]<|tool_call_end|>",
            [("weather", {"city": "it's\n", "days": True, "more": {"a": ["x'y", None], "b:": {}}})],
            id="lfm2, escaped",
        ),
        pytest.param(
            LFM2,
            "<|tool_call_start|>weather(**{\"city\": 'Paris', 'days': 2})<|tool_call_end|>",
            [PARIS],
            id="lfm2, as a mapping",
        ),
        pytest.param(
            MINIMAX_M3,
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Paris'
            "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
            ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
            [PARIS, ("now", {})],
            id="minimax m3",
        ),
        pytest.param(
            MINIMAX_M3,
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{"name": "now", "arguments": {}}'
            "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            [("now", {})],
            id="minimax m3, in JSON",
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
    parser = AnswerReader(form, TOOLS)
    assert parse_answer(parser, answer, size) == ("", "", expected)
    parser = AnswerReader(form, TOOLS)
    if not form.bare:
        content, _, calls = parse_answer(parser, f"Let me see.\n\n{answer}\n", size)
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
        (LFM2, "<|tool_call_start|>1 + 1 = 2<|tool_call_end|>"),
        (LFM2, "<|tool_call_start|>[not a call]"),
        (NO_TOOLS, HERMES_CALL),
        (NO_TOOLS, "text ends <thi"),
    ],
)
def test_text_that_is_not_a_call_stays_text(form: CallFormat, answer: str, size: int) -> None:
    content, reasoning, calls = parse_answer(AnswerReader(form, TOOLS), answer, size)
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
        ("", "<think>a</think>\n<think> b</think>c", ("c", "ab")),
    ],
)
def test_thoughts_are_separated_from_the_text(
    tail: str, answer: str, expected: tuple[str, str], size: int
) -> None:
    parser = AnswerReader(tail=tail)
    assert parse_answer(parser, answer, size)[:2] == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            COMMAND_R,
            'Action:\n```json\n[\n  {"tool_name":  "weather",\n\n"parameters": {"city": "P", "days": 2}}]```',
        ),
        (
            TAGS,
            "<tool_call><function=weather><parameter=city>P</parameter>\n\n"
            "<parameter=days>2</parameter></function></tool_call>",
        ),
        (
            TAGS,
            "<tool_call>\n<function=weather>\n<parameter=city>\nP\n</parameter>\nso\n"
            "<parameter=\n<parameter=days>\n2\n</parameter>\n</function>\n",
        ),
        (MISTRAL_ARGS, '[TOOL_CALLS] weather[ARGS] {"city": "P", "days": 2}'),
    ],
)
def test_blanks_and_text_between_the_parts_of_a_call_do_not_matter(
    form: CallFormat, text: str, size: int
) -> None:
    content, _, calls = parse_answer(AnswerReader(form, TOOLS), text, size)
    assert (content, calls) == ("", [("weather", {"city": "P", "days": 2})])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [TAGS, GEMMA, HERMES])
def test_arguments_can_contain_the_end_markers(form: CallFormat, size: int) -> None:
    value = {"note": [TEXT_WITH_MARKERS]}
    call = json.dumps({"name": "keep", "arguments": {"what": value}})
    if form is TAGS:
        parameter = f"\n<parameter=what>\n{json.dumps(value)}\n</parameter>\n"
        text = f"\n<parameter=text>\n1 </function>\n</parameter>{parameter}"
        call = f"<function=keep>{text}</function>"
    tools = {"keep": {"properties": {"what": {"type": "object"}, "text": {"type": "string"}}}}
    parser = AnswerReader(form, tools)
    _, _, [(name, arguments)] = parse_answer(parser, f"{form.opens[0]}{call}{form.close}", size)
    assert (name, arguments["what"]) == ("keep", value)


def test_tags_are_streamed_parameter_by_parameter() -> None:
    parser = AnswerReader(TAGS, TOOLS)
    pieces = parser.feed("<tool_call><function=weather>\n<parameter=days>\n2\n</parameter>\n<param")
    assert pieces[1:] == [Arguments('{"days": 2')]
    assert parser.feed("eter=city>\nRome\n</parameter>") == [Arguments(', "city": "Rome"')]
    assert parser.feed("\n</function>\n</tool_call>") == [Arguments("}")]


@pytest.mark.parametrize("size", SIZES)
def test_thoughts_come_before_calls(size: int) -> None:
    answer = f"<think>\nI should look.\n</think>\n\nOne moment.\n{HERMES_CALL}"
    result = parse_answer(AnswerReader(HERMES, TOOLS), answer, size)
    assert result == ("One moment.", "I should look.", [PARIS])
    answer = '<think>hm</think>{"name": "now", "parameters": {}}'
    assert parse_answer(AnswerReader(LLAMA, TOOLS), answer, size) == ("", "hm", [("now", {})])


@pytest.mark.parametrize("size", SIZES)
def test_channel_messages_are_thoughts_text_and_calls(size: int) -> None:
    """The answers are in the notation of gpt-oss."""
    thoughts = "<|channel|>analysis<|message|>a < b, <|hm<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>yes <b>"
    assert parse_answer(AnswerReader(), thoughts + final, size) == ("yes <b>", "a < b, <|hm", [])
    call = (
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 2}'
    )
    preamble = "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    result = parse_answer(AnswerReader(UNKNOWN_FORMAT, TOOLS), thoughts + preamble + call, size)
    assert result == ("One moment.", "a < b, <|hm", [PARIS])
    cut = parse_answer(
        AnswerReader(UNKNOWN_FORMAT, TOOLS), "<|channel|>analysis<|message|>I thi", size
    )
    assert cut == ("", "I thi", [])
    assert parse_answer(AnswerReader(), "<|chan is text", size)[0] == "<|chan is text"


@pytest.mark.parametrize("size", SIZES)
def test_calls_of_gpt_oss_may_name_the_tool_first_and_contain_the_end_markers(size: int) -> None:
    parser = AnswerReader(HARMONY, TOOLS, tail="<|end|><|start|>assistant")
    call = f' to=functions.weather<|channel|>commentary json<|message|>{{"city": "{END_MARKERS}"}}<|call|>'
    assert parse_answer(parser, call, size) == ("", "", [("weather", {"city": END_MARKERS})])
    cut = AnswerReader(HARMONY, TOOLS, tail="<|start|>assistant")
    pieces = [*cut.feed(call.partition("<|end|>")[0]), *cut.finish()]
    assert [piece.text for piece in pieces if isinstance(piece, Arguments)] == ['{"city": "a ']


END_MARKERS = "a <|end|> b <|start|>assistant<|channel|>final<|message|> <|call|>"


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_muse_glimmer_are_thoughts_text_and_calls(size: int) -> None:
    thoughts, start = " to=self<|message|>hm <b><|eom|>", "<|start|>assistant"
    text, calls = f"{start} to=user<|message|>One moment.<|eom|>", ""
    for name, days in (("weather", 2), ("weather", 3)):
        calls += (
            f'{start} to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
            f'<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">{days}'
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>"
        )
    for answer, expected in ((thoughts + text + calls, "One moment."), (thoughts + calls, "")):
        parser = AnswerReader(MUSE, TOOLS, tail="<|start|>assistant")
        read = parse_answer(parser, answer, size)
        assert read == (expected, "hm <b>", [PARIS, ("weather", {"city": "Paris", "days": 3})])
    parser = AnswerReader(tail="<|start|>assistant")
    assert parse_answer(parser, "<|message|>yes", size) == ("yes", "", [])


@pytest.mark.parametrize("size", SIZES)
def test_sections_of_kimi_k3_are_thoughts_text_and_calls(size: int) -> None:
    thoughts = "hm<|close|>think<|sep|><|open|>response<|sep|>"
    call = (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )
    end = "<|close|>message<|sep|>"
    for answer, expected in (
        (f"{thoughts}One moment.{call}{end}", ("One moment.", "hm", [PARIS])),
        (f"{thoughts}{call}{end}", ("", "hm", [PARIS])),
        (f"{thoughts} yes <|close|><|close|>response<|sep|>{end}", ("yes <|close|>", "hm", [])),
    ):
        tail = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
        parser = AnswerReader(KIMI_K3, TOOLS, tail=tail)
        assert parse_answer(parser, answer, size) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("all\nHi.\n>>> 1 + 1\n>>>", ("Hi.\n>>> 1 + 1\n>>>", [])),
        ('weather\n{"city": "Paris", "days": 2}', ("", [PARIS])),
        (
            'all\nSo.>>>weather\n{"city": "Paris", "days": 2}>>>now\n{}',
            ("So.", [PARIS, ("now", {})]),
        ),
        ('{"in": "JSON"}', ('{"in": "JSON"}', [])),
        ("other\n{}", ("other\n{}", [])),
        (">>>", (">>>", [])),
        ("", ("", [])),
    ],
)
def test_recipients_of_functionary_are_text_and_calls(
    answer: str, expected: tuple[str, Any], size: int
) -> None:
    for form in (FUNCTIONARY_3_2, *([] if expected[1] else [NO_TOOLS])):
        parser = AnswerReader(form, TOOLS, tail="<|end_header_id|>\n\n>>>")
        content, _, calls = parse_answer(parser, answer, size)
        assert (content, calls) == expected


def test_thoughts_stay_in_the_text_on_request() -> None:
    parser = AnswerReader(reasoning=False, tail="<think>")
    assert parse_answer(parser, "<think>a</think>b", 3)[0] == "<think>a</think>b"


def test_arguments_are_streamed_as_they_come() -> None:
    parser = AnswerReader(HERMES, TOOLS)
    parser.feed('<tool_call>\n{"name": "weather", ')
    assert parser.calls == 1
    assert parser.feed('"arguments": {"ci') == [Arguments('{"ci')]
    assert parser.feed('ty": "P') == [Arguments('ty": "P')]


def test_without_parallel_calls_only_the_first_is_returned() -> None:
    parser = AnswerReader(HERMES, TOOLS, parallel=False)
    assert parse_answer(parser, HERMES_CALL * 3, 4)[2] == [PARIS]


def test_a_call_that_is_cut_off_keeps_its_partial_arguments() -> None:
    parser = AnswerReader(HERMES, TOOLS)
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
        parser = AnswerReader(form, TOOLS)
        pieces = parser.feed(f"{opens}{call[:end]}{form.close if closed else ''}")
        pieces += parser.finish()
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        assert len(calls) + any(isinstance(piece, Text) for piece in pieces) <= 1


def draw_damaged_calls(rng: random.Random) -> str:
    """Return calls as JSON, some with a wrong, missing or additional character."""
    call = {
        "name": rng.choice(["weather", "now", 'a"b\\']),
        "arguments": rng.choice([{"city": "Pa\\ris", "at": [1, {}]}, "{}", None, {"q": 'a"}'}]),
        "id": rng.choice([1, "x", ["name"], {"arguments": 2}]),
    }
    items = rng.sample(list(call.items()), rng.randint(1, 3))
    text = json.dumps(dict(items), indent=rng.choice([None, 1]))
    text = rng.choice([text, f"[{text}, {text}]", f"{text} and more"])
    for _ in range(rng.choice([0, 0, 1, 3])):
        position = rng.randrange(len(text))
        text = (
            text[:position]
            + rng.choice(["", "{", "]", '"', ":", "\\", " x"])
            + text[position + 1 :]
        )
    return text


def test_gemmas_json_is_a_call_or_text_and_never_both() -> None:
    objects = [
        text for seed in range(300) if (text := draw_damaged_calls(random.Random(seed)))[:1] == "{"
    ]
    assert len(objects) > 150
    for inside in objects:
        plain = JsonCalls()
        plain.feed(inside.strip())
        parser = AnswerReader(GEMMA, TOOLS)
        pieces = [*parser.feed(f"<|tool_call>{inside}<tool_call|>"), *parser.finish()]
        is_call, is_text = (any(isinstance(p, kind) for p in pieces) for kind in (Call, Text))
        assert is_call != is_text, inside
        assert is_text or not plain.is_broken, inside


def read_in_pieces(text: str, size: int, forced: bool) -> tuple[Any, ...]:
    """Return the calls of a text read in pieces of `size` characters, and the reader's final state."""
    reader = JsonCalls(call=Call("x" * 9, "now") if forced else None)
    names, arguments, remaining = [], "", text
    pieces: list[Any] = []
    while remaining and not (reader.is_finished or reader.is_broken):
        new_pieces, rest = reader.feed(remaining[:size])
        assert not rest or reader.is_finished or reader.is_broken
        pieces, remaining = [*pieces, *new_pieces], rest + remaining[size:]
    state = reader.is_finished, reader.is_broken, reader.raw, remaining
    for piece in [*pieces, *reader.end()]:
        if isinstance(piece, Call):
            names.append(piece.name)
        else:
            arguments += piece.text
    return names, arguments, *state


@pytest.mark.parametrize("forced", [False, True])
def test_parsing_calls_does_not_depend_on_the_pieces(forced: bool) -> None:
    rng = random.Random(5)
    for _ in range(400):
        text = draw_damaged_calls(rng)
        expected = read_in_pieces(text, len(text), forced)
        assert expected[-2] + expected[-1] == text  # no character is lost
        assert [read_in_pieces(text, size, forced) for size in (1, 2, 5)] == [expected] * 3
