"""Calls as plain JSON, in a fenced block or alone, and calls that are cut off before their name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localspec.chat.families.functionary import FUNCTIONARY
from localspec.chat.families.gemma import GEMMA
from localspec.chat.families.granite import GRANITE
from localspec.chat.families.hermes import HERMES
from localspec.chat.families.llama import LLAMA
from localspec.chat.families.mistral import MISTRAL, MISTRAL_ARGS
from localspec.chat.families.nemotron import NEMOTRON
from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.reader import AnswerReader, reader_of
from localspec.daemon.completion.request import chat_frames
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, EXPLAINED, CallFormat
from localspec.protocol.pieces import Arguments, Call, Piece, Text
from localspec.protocol.reading import decode
from localspec.protocol.requests import ChatRequest

TOOLS: dict[str, Any] = {
    "led_on": {"type": "object", "properties": {}},
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SIZES = (1, 2, 3, 7, 1000)
Read = tuple[str, list[tuple[str, str]]]


def parser(form: CallFormat = HERMES, **options: Any) -> AnswerReader:
    return AnswerReader(form, TOOLS, plain_calls=tuple(TOOLS), constrained=True, **options)


def collect(pieces: list[Piece]) -> Read:
    """Return the content and the calls with their arguments' text."""
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, Text):
            content += piece.text if piece.kind == "content" else ""
        elif isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[piece.index] = calls[piece.index][0], calls[piece.index][1] + piece.text
    return content, calls


def read(reader: AnswerReader, text: str, size: int = 1000) -> Read:
    pieces = [p for at in range(0, len(text), size) for p in reader.feed(text[at : at + size])]
    return collect([*pieces, *reader.finish()])


LED = '{"name": "led_on", "arguments": {}}'
CITY = '{"name": "weather", "arguments": {"city": "Pa`ris"}}'
CALLED_LED, CALLED_CITY = ("led_on", "{}"), ("weather", '{"city": "Pa`ris"}')


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"```json\n{LED}\n```", ("", [CALLED_LED])),
        (f"\n```json\n{LED}\n```\n", ("", [CALLED_LED])),
        (f"```\n{CITY}\n```", ("", [CALLED_CITY])),
        (f"```JSON\n{json.dumps(json.loads(LED), indent=4)}\n```", ("", [CALLED_LED])),
        (f"```json\n[{LED},\n {CITY}]\n```", ("", [CALLED_LED, CALLED_CITY])),
        (f"```json\n{LED}\n{CITY}\n```", ("", [CALLED_LED, CALLED_CITY])),
        (f"Here it is:\n\n```json\n{CITY}\n```", ("Here it is:", [CALLED_CITY])),
        (f"```json\n{LED}\n```\nDone.", ("Done.", [CALLED_LED])),
        (f"```json\n{LED}\n```\n\n```json\n{CITY}\n```", ("", [CALLED_LED, CALLED_CITY])),
        (f"```py\nx\n```\n```json\n{LED}\n```", ("```py\nx\n```", [CALLED_LED])),
        (f"```json\n{LED}", ("", [CALLED_LED])),
        (LED, ("", [CALLED_LED])),
        (f"{LED}\n{CITY}", ("", [CALLED_LED, CALLED_CITY])),
    ],
)
def test_plain_json_of_a_known_tool_is_a_call(answer: str, expected: Read, size: int) -> None:
    assert read(parser(), answer, size) == expected
    assert read(parser(EXPLAINED), answer, size) == expected


def test_json_that_is_not_a_call_stays_text(subtests: pytest.Subtests) -> None:
    for size in SIZES:
        for answer in [
            '```json\n{"name": "other", "arguments": {}}\n```',
            '```json\n{"name": "led_on"}\n```',
            '```json\n{"name": "led_on", "arguments": "{}"}\n```',
            '```json\n{"name": "led_on", "arguments": null}\n```',
            '```json\n{"name": "led_on", "arguments": {}, "more": 1}\n```',
            '```json\n{"name": "led_on", "arguments": {"a": }}\n```',
            f"```json\n{LED} // switches it on\n```",
            f"```json\n// a call\n{LED}\n```",
            f"```python\n{LED}\n```",
            f"see ```json\n{LED}\n```",
            f"{LED} is a call.",
            f"{LED}\n\nThis switches it on.",
            '```json\n[1, 2, {"name": "led_on", "arguments": {}}]\n```',
            '```json\n{"name": "led_on", "arguments": {"a": 1',
            "```json\n",
            "```",
            "a\n``",
            "```json\n{}\n```",
            '{"name": "Ada", "arguments": {}}',
            f"````md\n```json\n{LED}\n```\n````",
        ]:
            with subtests.test(answer=str(answer), size=str(size)):
                assert read(parser(), answer, size) == (answer, [])


@pytest.mark.parametrize(
    ("answer", "at"),
    [
        ("```python\nprint(1)", "```python"),
        ('```json\n{"users": [1, 2, 3', '{"users'),
        ('```json\n{"name": "Ada", "born": 1815', '"Ad'),
        ("```json\n[1, 2, 3", "[1"),
        ('{"answer": 42, "more"', '{"answer'),
        ('```json\n{"name": {"first": "x"', '{"first'),
    ],
)
def test_other_blocks_are_streamed_as_soon_as_they_differ(answer: str, at: str) -> None:
    reader = parser()
    head = answer[: answer.index(at) + len(at)]
    content = collect([piece for char in head for piece in reader.feed(char)])[0]
    assert content == head


def test_the_held_back_text_is_bounded() -> None:
    reader = parser()
    reader.feed('```json\n{"name": "weather", "arguments": {"city": "')
    streamed_length = 0
    for _ in range(300):
        streamed_length += len(collect(reader.feed("x" * 1000))[0])
    assert streamed_length >= 299_000 - (1 << 17)


TEXTS = st.lists(
    st.sampled_from(
        [LED, CITY, "```", "```json\n", "```py\n", "\n", "text", " ", "`", "{", "}", "[", "]", ",",
         '"name"', ":", "<tool_call>", "</tool_call>", '{"name": "led_on", ', '"arguments": {}', "\\"]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 9), st.sampled_from([HERMES, LLAMA, GRANITE, EXPLAINED]))
def test_parsing_does_not_depend_on_the_pieces(text: str, size: int, form: CallFormat) -> None:
    assert read(parser(form), text, size) == read(parser(form), text)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 9))
@example("```[]", 1)
def test_without_a_call_no_character_is_lost(text: str, size: int) -> None:
    content, calls = read(AnswerReader(EXPLAINED, TOOLS, plain_calls=tuple(TOOLS)), text, size)
    if not calls and "<tool_call>" not in text:
        assert content == text or text.isspace()


def make_parser(**fields: Any) -> AnswerReader:
    """Return the parser for the answer to a chat request with a tool."""
    tool = {"type": "function", "function": {"name": "led_on"}}
    body = {"messages": [{"role": "user", "content": "on"}], "tools": [tool], **fields}
    request = decode(json.dumps(body).encode(), ChatRequest)
    [frame] = chat_frames(request, HERMES)
    reader = reader_of(frame, reasoning=True)
    assert isinstance(reader, AnswerReader)
    return reader


def test_without_tool_calls_json_stays_text() -> None:
    answer = f"```json\n{LED}\n```"
    assert read(make_parser(tool_choice="none"), answer) == (answer, [])
    assert read(make_parser(response_format={"type": "json_object"}), answer) == (answer, [])
    assert read(make_parser(), answer) == ("", [CALLED_LED])


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}])
def test_tool_choice_decides_whether_a_marker_is_text(fields: dict[str, str]) -> None:
    for end in range(1, len("<tool_call>\n")):
        content, _ = read(make_parser(**fields), "<tool_call>\n"[:end])
        held_back = fields["tool_choice"] == "required" or end >= len("<tool_call>")
        assert content == ("" if held_back else "<tool_call>"[:end])


SEEN_JSON = CallFormat(
    "found",
    ("<|calls|>",),
    "}\n]<|end_calls|>",
    lead=f'[\n{{"id": "{CALL_ID_PLACEHOLDER}", "called": "',
    middle='", "with": ',
    again=f'}},\n{{"id": "{CALL_ID_PLACEHOLDER}", "called": "',
)
SEEN_KEYS = CallFormat(
    "found",
    ("<tool_call>",),
    "</tool_call>",
    again="</tool_call>\n<tool_call>",
    middle="\n",
    parameter=("<key>", "</key>\n<value>", "</key>\n<value>", "</value>\n"),
)


def join_calls(opening: str, between: str, close: str, *calls: str) -> str:
    return opening + between.join(calls) + close


NOTATIONS = {
    "hermes": (HERMES,
               join_calls("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", LED, CITY)),
    "told": (EXPLAINED,
             join_calls("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", LED, CITY)),
    "tags": (TAGS, "<tool_call>\n<function=led_on>\n</function>\n</tool_call>\n<tool_call>\n"
             "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
    "llama": (LLAMA, '{"name": "led_on", "parameters": {}}; '
              '{"name": "weather", "parameters": {"city": "P"}}'),
    "llama, marked": (LLAMA, f"<|python_tag|>{LED}; {CITY}"),
    "granite": (GRANITE, join_calls("<|tool_call|>[", ", ", "]", LED, CITY)),
    "mistral": (MISTRAL, join_calls("[TOOL_CALLS][", ", ", "]", LED, CITY)),
    "mistral, newer": (MISTRAL_ARGS, '[TOOL_CALLS]led_on[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "P"}'),
    "gemma": (GEMMA, "<|tool_call>call:led_on{}<tool_call|>"
              '<|tool_call>call:weather{city:<|"|>P<|"|>}<tool_call|>'),
    "functionary": (FUNCTIONARY, '<function=led_on>{}</function><function=weather>{"city": "P"}</function>'),
    "nemotron": (NEMOTRON, join_calls("<TOOLCALL>[", ", ", "]</TOOLCALL>", LED, CITY)),
    "seen JSON": (SEEN_JSON, '<|calls|>[\n{"id": "a1", "called": "led_on", "with": {}},\n'
                  '{"id": "a2", "called": "weather", "with": {"city": "P"}}\n]<|end_calls|>'),
    "seen keys": (SEEN_KEYS, "<tool_call>led_on\n</tool_call>\n<tool_call>weather\n<key>city</key>\n"
                  "<value>P</value>\n</tool_call>"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTATIONS)
def test_two_calls_are_joined_in_every_notation(name: str) -> None:
    form, text = NOTATIONS[name]
    content, calls = read(parser(form, required=True), text)
    assert (content.strip(), [call for call, _ in calls]) == ("", ["led_on", "weather"])


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("before", ["", "\n", "<think>I must.</think>\n\n"])
def test_a_required_call_that_is_cut_off_leaves_no_markup(name: str, before: str) -> None:
    form, text = NOTATIONS[name]
    text = before + text
    for end in range(len(text) + 1):
        result = read(parser(form, required=True), text[:end])
        assert result[0].strip() == "", text[:end]
        for size in SIZES[:4]:
            assert read(parser(form, required=True), text[:end], size) == result


@pytest.mark.parametrize("name", NOTATIONS)
def test_an_unfinished_required_call_is_not_text(name: str) -> None:
    form, text = NOTATIONS[name]
    second = re.search("led_on", text)
    assert second is not None
    markup = re.compile(r"[<\[|{]")
    for end in range(second.end() + 1, len(text) + 1):
        for size in (1, 5, 1000):
            content, calls = read(parser(form), f"Let me see.\n{text[:end]}", size)
            if calls:
                assert not markup.search(content), text[:end]


def test_a_partial_marker_stays_text_without_a_required_call() -> None:
    assert read(parser(), "a < b and <tool")[0] == "a < b and <tool"
