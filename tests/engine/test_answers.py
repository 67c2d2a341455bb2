"""What models really write is read alike at every cut, and stop strings end content only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from localspec.chat.families.command_r import COMMAND_R
from localspec.chat.families.deepseek import DEEPSEEK_R1
from localspec.chat.families.functionary import FUNCTIONARY_3_2
from localspec.chat.families.gemma import GEMMA
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.hermes import HERMES
from localspec.chat.families.kimi import KIMI_K2, KIMI_K3
from localspec.chat.families.lfm2 import LFM2
from localspec.chat.families.llama import LLAMA
from localspec.chat.families.minimax import MINIMAX_M3
from localspec.chat.families.mistral import MISTRAL
from localspec.chat.families.muse import MUSE
from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.reader import AnswerReader
from localspec.engine.text_stream import TextStream
from localspec.protocol.calls import CallFormat
from localspec.protocol.dialect import REASONING_MARKERS
from localspec.protocol.pieces import Arguments, Call, Piece, Text
from tests.support.mixtures import ARRAY, KEYS

LED = {
    "type": "object",
    "properties": {"note": {"type": "string"}, "level": {"type": "integer"}},
    "required": ["note"],
}
TOOLS: dict[str, Any] = {"led": LED, "now": {"type": "object", "properties": {}}}
Read = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, and calls with their arguments
ON: list[tuple[str, str]] = [("led", '{"note": "on"}')]
START, MESSAGE, END = "<|start|>assistant", "<|message|>", "<|end|>"
THOUGHTS, FINAL = f"<|channel|>analysis{MESSAGE}", f"<|channel|>final{MESSAGE}"
TO_LED = f"<|channel|>commentary to=functions.led <|constrain|>json{MESSAGE}"
NOTE = '{"note": "on"}'
PARAMETER = "<parameter=note>\non\n</parameter>\n"
TWICE = PARAMETER + PARAMETER.replace("on", "off")
LEVEL = PARAMETER.replace("note", "level").replace("on", "3")
TAGGED = f"<function=led>\n{PARAMETER}</function>"
PYTHON = "<|tool_call_start|>"
OTHER = TAGGED.replace("led", "lid")
JSON_CALL = f'{{"name": "led", "arguments": {NOTE}}}'
KIMI_CALL = f"<|tool_call_begin|>functions.led:0<|tool_call_argument_begin|>{NOTE}"
FENCED_CALL = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>led\n```json\n{NOTE}```<｜tool▁call▁end｜>"
)
ATEM = '<atem:invoke name="led">\n<atem:parameter name="note">on</atem:parameter>\n</atem:invoke>'

# By the format and the end of the prompt: what a model does, its answer, and what that means.
DEVIATIONS: dict[tuple[CallFormat, str], dict[str, tuple[str, Read]]] = {
    (HARMONY, START): {
        "several analysis messages": (
            f"{THOUGHTS}a{END}{START}{THOUGHTS}b{END}{START}{FINAL}c",
            ("c", "ab", []),
        ),
        "a preamble before the call": (
            f"<|channel|>commentary{MESSAGE}So.{END}{START}{TO_LED}{NOTE}",
            ("So.", "", ON),
        ),
        "thoughts behind a call": (
            f"{TO_LED}{NOTE}{END}{START}{THOUGHTS}hm{END}{START}{FINAL}c",
            ("c", "hm", ON),
        ),
        "thoughts behind the answer": (f"{FINAL}c{END}{START}{THOUGHTS}hm{END}", ("c", "hm", [])),
        "a call in the analysis channel": (
            f"<|channel|>analysis to=functions.led{MESSAGE}{NOTE}",
            ("", "", ON),
        ),
        "the recipient before the channel": (
            f" to=functions.led<|channel|>commentary json{MESSAGE}{NOTE}",
            ("", "", ON),
        ),
        "an abandoned head": (f"<|channel|>analysis<|channel|>final{MESSAGE}c", ("c", "", [])),
        "an abandoned head of a call": (
            f"<|channel|>commentary to=functions.led{FINAL}No",
            ("No", "", []),
        ),
        "a head abandoned at its end": (f"<|channel|>analysis{END}{START}{FINAL}c", ("c", "", [])),
        "a stray head within thoughts": (f"{THOUGHTS}hm{FINAL}c", ("c", "hm", [])),
        "a stray head without a message": (f"{FINAL}c<|channel|>analysis", ("c", "", [])),
        "a stray message marker": (f"{THOUGHTS}{MESSAGE}hm{END}{FINAL}c", ("c", "hm", [])),
        "an apology to a function": (f"{TO_LED}Sorry, no.", ("Sorry, no.", "", [])),
        "an empty message to a function": (f"{TO_LED}{END}", ("", "", [("led", "{}")])),
        "text behind the JSON of a message": (
            f"{TO_LED}{NOTE} ok{END}{START}{FINAL}c",
            ("c", "", ON),
        ),
        "a quote behind the JSON of a message": (
            f'{TO_LED}{NOTE} 5" wide{END}{START}{FINAL}c',
            ("c", "", ON),
        ),
        "an apology with a quote to a function": (
            f'{TO_LED}No 5" one.{END}{START}{FINAL}c',
            ('No 5" one.c', "", []),
        ),
        "a marker in the JSON of a message": (
            f"{TO_LED}{NOTE.replace('on', END)}{END}{START}{FINAL}c",
            ("c", "", [("led", NOTE.replace("on", END))]),
        ),
        "JSON in a string of a message": (
            f"{TO_LED}{json.dumps(NOTE)}{END}{START}{FINAL}c",
            ("c", "", ON),
        ),
        "no message at all": ("plain <b>", ("plain <b>", "", [])),
        "a call that the answer shows": (
            f"{FINAL}So:\n```json\n{JSON_CALL}\n```\n<tool_call>{JSON_CALL}</tool_call>",
            (f"So:\n```json\n{JSON_CALL}\n```\n<tool_call>{JSON_CALL}</tool_call>", "", []),
        ),
        "a call that thoughts name": (
            f"{THOUGHTS}a <tool_call>{JSON_CALL}</tool_call> b{END}{START}{FINAL}c",
            ("c", f"a <tool_call>{JSON_CALL}</tool_call> b", []),
        ),
    },
    (MUSE, START): {
        "thoughts behind a call of Muse": (
            f" to=led{MESSAGE}<atem:function_calls>\n{ATEM}\n</atem:function_calls><|eom|>{START}"
            f" to=self{MESSAGE}hm<|eom|>{START} to=user{MESSAGE}c",
            ("c", "hm", ON),
        ),
        "a call of Muse that thoughts and the answer show": (
            f" to=self{MESSAGE}a {ATEM} b<|eom|>{START} to=user{MESSAGE}c\n{ATEM}",
            (f"c\n{ATEM}", f"a {ATEM} b", []),
        ),
        "the end of a message in a value of Muse": (
            f" to=led{MESSAGE}{ATEM.replace('on<', '<|eom|><')}<|eom|>{START} to=user{MESSAGE}c",
            ("c", "", [("led", '{"note": "<|eom|>"}')]),
        ),
    },
    (TAGS, ""): {
        "tags alone": (TAGGED, ("", "", ON)),
        "tags behind text": (f"So.\n{TAGGED}\n</tool_call>", ("So.", "", ON)),
        "tags of an unknown tool": (OTHER, (OTHER, "", [])),
        "tags in a sentence": (f"Write {TAGGED}.", (f"Write {TAGGED}.", "", [])),
        "a tag that is only named": ("<function=led> is it.", ("<function=led> is it.", "", [])),
        "a tag that is cut off": ("<function=led>\n", ("<function=led>\n", "", [])),
        "tags alone in thoughts": (f"<think>\nhm\n{TAGGED}\n", ("", "hm", ON)),
        "another order of arguments": (
            f"<tool_call>\n<function=led>\n{LEVEL}{PARAMETER}</function>\n</tool_call>",
            ("", "", [("led", '{"level": 3, "note": "on"}')]),
        ),
        "an argument twice": (
            f"<tool_call>\n<function=led>\n{TWICE}</function>\n</tool_call>",
            ("", "", ON),
        ),
        "no last closer": (f"<tool_call>\n{TAGGED}\nDone.", ("Done.", "", ON)),
        "no line ends": (f"<tool_call>{TAGGED}</tool_call>".replace("\n", ""), ("", "", ON)),
        "more line ends": (
            f"<tool_call>{TAGGED}</tool_call>".replace("><", ">\n\n<"),
            ("", "", ON),
        ),
    },
    (HERMES, ""): {
        "tags of a Hermes model": (f"So.\n\n{TAGGED}\n\n", ("So.", "", ON)),
        "JSON with the closing marker only": (f"{JSON_CALL}\n</tool_call>", ("", "", ON)),
        "text behind a call that ends like a marker": (
            f"<tool_call>{JSON_CALL}</tool_call>1 <",
            ("1 <", "", ON),
        ),
        "a marker behind a call that is cut off": (
            f"<tool_call>{JSON_CALL}</tool_call>\n<tool_",
            ("", "", ON),
        ),
        "a closing marker without thoughts": ("</think>\n\nc", ("c", "", [])),
        "a marker in the text": ("a <think>b</think>", ("a <think>b</think>", "", [])),
        "two blocks of thoughts": ("<think>a</think>\n<think>b</think>c", ("c", "ab", [])),
        "blanks around JSON": (f"<tool_call>  {JSON_CALL}\n\n</tool_call>\n\n", ("", "", ON)),
    },
    (KIMI_K2, ""): {
        "a call without its section": (f"{KIMI_CALL}<|tool_call_end|>", ("", "", ON)),
        "calls without the end of the first": (
            f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}<|tool_call_end|><|tool_calls_section_end|>",
            ("", "", ON * 2),
        ),
        "no closer of a section": (
            f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_call_end|> Done.",
            ("Done.", "", ON),
        ),
    },
    (DEEPSEEK_R1, ""): {
        "a fenced call without its section": (f"So.{FENCED_CALL}", ("So.", "", ON)),
    },
    (MUSE, ""): {
        "an invoke without its block": (f"a\n{ATEM}", ("a", "", ON)),
    },
    (HERMES, "<think>\n"): {
        "JSON in thoughts": (f"hm\n<tool_call>\n{JSON_CALL}\n</tool_call>", ("", "hm", ON)),
        "thoughts closed behind a call": (
            f"hm\n<tool_call>\n{JSON_CALL}\n</tool_call>\n</think>\n\nc",
            ("c", "hm", ON),
        ),
    },
    (TAGS, "<think>\n"): {
        "tags in thoughts": (f"hm\n<tool_call>\n{TAGGED}\n</tool_call>", ("", "hm", ON)),
    },
    (KIMI_K2, "<think>"): {
        "a section in thoughts": (
            f"hm<|tool_calls_section_begin|>{KIMI_CALL}<|tool_call_end|>",
            ("", "hm", ON),
        ),
        "a call without its section in thoughts": (
            f"hm{KIMI_CALL}<|tool_call_end|>",
            ("", "hm", ON),
        ),
    },
    (MISTRAL, ""): {
        "an array in thoughts": (f"[THINK]hm[TOOL_CALLS][{JSON_CALL}]", ("", "hm", ON)),
    },
    (HERMES, "<think>"): {
        "a marker that thoughts name": (
            "I need <tool_call> here</think>c",
            ("c", "I need <tool_call> here", []),
        ),
        "an unknown tool in thoughts": (
            '<tool_call>{"name": "x", "a": 1}</tool_call></think>c',
            ("c", '<tool_call>{"name": "x", "a": 1}</tool_call>', []),
        ),
        "a closing marker behind thoughts": ("hm</think>\n</think>c", ("c", "hm", [])),
    },
    (LFM2, ""): {
        "an argument twice in Python": (f"{PYTHON}[led(note='on', note='off')]", ("", "", ON)),
    },
    (GEMMA, ""): {
        "thoughts of Gemma behind text": (
            "c<|channel>thought\nhm<channel|>d<|channel>thought\n<channel|>",
            ("cd", "hm", []),
        ),
        "thoughts of Gemma without a line end": (
            "<|channel>thought<channel|>c<|channel>thought<channel|>d",
            ("cd", "", []),
        ),
        "a call of Gemma that the next one ends": (
            '<|tool_call>call:now{}\n<|tool_call>call:led{note:<|"|><|tool_call><|"|>}<tool_call|>',
            ("", "", [("now", "{}"), ("led", '{"note": "<|tool_call>"}')]),
        ),
        "a stray closing marker of Gemma": ("c<channel|>", ("c", "", [])),
        "a marker of thoughts in a call of Gemma": (
            '<|tool_call>call:led{note:<|"|><channel|><|"|>}<tool_call|>',
            ("", "", [("led", '{"note": "<channel|>"}')]),
        ),
    },
    (KEYS, ""): {
        "keys and values in one line": (
            "<tool_call>led<key>note</key><value>on</value></tool_call>",
            ("", "", ON),
        ),
        "keys and values with more line ends": (
            "<tool_call>\nled\n<key>note</key> \n<value>on</value>\n\n</tool_call>",
            ("", "", ON),
        ),
    },
    (ARRAY, ""): {
        "a compact array": (f'<calls>[{{"name":"led","arguments":{NOTE}}}]</calls>', ("", "", ON)),
        "an array in lines": (
            f'<calls>\n[\n {{"name" : "led",\n "arguments": {NOTE}\n }}\n]\n</calls>',
            ("", "", ON),
        ),
        "an array that is not closed": (
            f'<calls>[{{"name": "led", "arguments": {NOTE}}}] Done.',
            ("Done.", "", ON),
        ),
    },
    (COMMAND_R, ""): {
        "an action in one line": (
            f'Action:\n```json\n[{{"tool_name": "led", "parameters": {NOTE}}}]\n```',
            ("", "", ON),
        ),
    },
    (KIMI_K3, "<|open|>think<|sep|>"): {
        "a response that ends thoughts": (
            "hm<|open|>response<|sep|>c<|close|>response<|sep|>",
            ("c", "hm", []),
        ),
    },
}


def collect(pieces: Sequence[Piece]) -> Read:
    texts, calls = {"content": "", "reasoning": ""}, list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Text():
                texts[piece.kind] += piece.text
            case Call():
                calls.append((piece.name, ""))
            case Arguments():
                name, text = calls[piece.index]
                calls[piece.index] = name, text + piece.text
    return texts["content"], texts["reasoning"], calls


def cuts(text: str) -> Iterator[list[str]]:
    """Yield the text whole, by characters, and in two parts at every place."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


@pytest.mark.parametrize(
    ("form", "tail", "answer", "expected"),
    [
        pytest.param(form, tail, *case, id=name)
        for (form, tail), cases in DEVIATIONS.items()
        for name, case in cases.items()
    ],
)
def test_deviations_mean_what_the_model_meant(
    form: CallFormat, tail: str, answer: str, expected: Read
) -> None:
    for parts in cuts(answer):
        own = REASONING_MARKERS[2:3] if form is GEMMA else ()
        reader = AnswerReader(form, TOOLS, tail=tail, plain_calls=tuple(TOOLS), thoughts=own)
        pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
        assert collect(pieces) == expected, parts
        for piece in pieces:
            if isinstance(piece, Text):
                assert answer[piece.at :].startswith(piece.text)


@pytest.mark.parametrize("text", [NOTE, ""])
def test_a_message_to_a_function_is_text_without_tools(text: str) -> None:
    for parts in cuts(f"{TO_LED}{text}{END}{START}{FINAL}c"):
        reader = AnswerReader(tail=START)
        pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
        assert collect(pieces) == (f"{text}c", "", [])


STOP_ON = NOTE.replace("on", "STOP")
STOPPED: list[tuple[CallFormat, str, str, str | None]] = [
    (HERMES, "<think>", "STOP</think>It is STOP on.", "It is "),
    (HERMES, "", f"<tool_call>{JSON_CALL.replace('on', 'STOP')}</tool_call>So STOP.", "So "),
    (HERMES, "", f"```json\n{JSON_CALL.replace('on', 'STOP')}\n```", None),
    (HERMES, "", f"```json\n{JSON_CALL.replace('led', 'STOP')}\n```", '```json\n{"name": "'),
    (LLAMA, "", f'{{"name": "led", "parameters": {STOP_ON}}}', None),
    (HERMES, "", f"ST<tool_call>{JSON_CALL}</tool_call>OP", None),
    (TAGS, "", TAGGED.replace("on\n", "STOP\n"), None),
    (TAGS, "", "<function=led> STOP", "<function=led> "),
    (HARMONY, START, f"{THOUGHTS}STOP{END}{START}{TO_LED}{STOP_ON}{END}{START}{FINAL}a STOP", "a "),
    (MUSE, START, f" to=self{MESSAGE}STOP<|eom|>{START} to=user{MESSAGE}a STOP", "a "),
    (
        KIMI_K3,
        "<|open|>think<|sep|>",
        "STOP<|close|>think<|sep|><|open|>response<|sep|>a STOP",
        "a ",
    ),
    (FUNCTIONARY_3_2, ">>>", f"all\na STOP>>>led\n{NOTE}", "a "),
    (MINIMAX_M3, "", "a STO", None),
]


@pytest.mark.parametrize(("form", "tail", "answer", "content"), STOPPED)
def test_stop_strings_end_content_and_nothing_else(
    form: CallFormat, tail: str, answer: str, content: str | None
) -> None:
    for parts in cuts(answer):
        reader = AnswerReader(form, TOOLS, tail=tail, plain_calls=tuple(TOOLS))
        stream = TextStream(["STOP"], reader)
        chunks = [*(stream.push(part.encode()) for part in parts), stream.flush()]
        shown = collect([piece for chunk in chunks for piece in chunk.pieces])
        assert (stream.stopped is not None) == (content is not None)
        assert content is None or shown[0] == content
        # Every character is decided once, and those of the content are known as such.
        chars = list(itertools.chain.from_iterable(chunk.chars for chunk in chunks))
        ends = list(itertools.accumulate(len(char.encode()) for char in answer))
        assert [end for end, _ in chars] == ends[: len(chars)]
        marked = "".join(char for char, (_, mark) in zip(answer, chars, strict=False) if mark)
        assert marked == shown[0]
        assert all(json.loads(arguments) for _, arguments in shown[2])
