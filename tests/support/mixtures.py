"""Answers in which what models really write is mixed at random, with what they mean.

An answer is a list of parts, and each part says what it means: that was written by hand, once for each
deviation. So the meaning of the whole is that of its parts, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

from localspec.chat.families.command_r import COMMAND_R
from localspec.chat.families.deepseek import DEEPSEEK_R1
from localspec.chat.families.functionary import FUNCTIONARY, FUNCTIONARY_3_2
from localspec.chat.families.gemma import GEMMA
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.granite import GRANITE
from localspec.chat.families.hermes import HERMES
from localspec.chat.families.kimi import KIMI_K2, KIMI_K3
from localspec.chat.families.lfm2 import LFM2
from localspec.chat.families.llama import LLAMA
from localspec.chat.families.minimax import MINIMAX_M3
from localspec.chat.families.mistral import MISTRAL, MISTRAL_ARGS
from localspec.chat.families.muse import MUSE
from localspec.chat.families.nemotron import NEMOTRON
from localspec.chat.families.qwen_coder import TAGS
from localspec.chat.markers import MESSAGE_START
from localspec.protocol.calls import CallFormat
from localspec.protocol.dialect import ThoughtMarkers

LED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "level": {"type": "integer"},
        "on": {"type": "boolean"},
    },
    "required": ["note"],
}
TOOLS: dict[str, Any] = {"led": LED, "now": {"type": "object", "properties": {}}}
STOP = "STOP"
TEXTS = [
    "So.",
    "Müller: „ja“.",
    "1 < 2 & 3",
    "日本 😀 e\u0301",
    "a\n\nb",
    "It is {fine}.",
    'A "b".',
    "<b>c</b>",
]
THOUGHTS = ["hm", "Let me see.\nI need it.", 'a <b> { " x', "5 > 3", f"日本, {STOP}?"]
VALUES = [
    "on",
    "a b",
    'say "hi"',
    "it's",
    "two\nlines",
    "日本 😀",
    "<b>&amp;</b>",
    "c:\\new",
    '{"x": [1]}',
    STOP,
]
BLANKS = ["", "\n", " ", "\n\n", " \n"]
Arguments = dict[str, Any]


class Part(NamedTuple):
    """A part of an answer: its text, and what that is; "" is neither text nor a call."""

    kind: Literal["content", "reasoning", "call", ""]
    text: str
    calls: tuple[tuple[str, Arguments], ...] = ()


@dataclass
class Mixture:
    """An answer behind `tail`, the end of its prompt."""

    form: CallFormat
    thoughts: ThoughtMarkers
    tail: str = ""
    parts: list[Part] = field(default_factory=list)

    def add(
        self, kind: Literal["content", "reasoning", "call", ""], text: str, *calls: Any
    ) -> None:
        self.parts.append(Part(kind, text, calls))

    @property
    def answer(self) -> str:
        return "".join(part.text for part in self.parts)

    def text(self, kind: str) -> str:
        """Return all text of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[tuple[str, Arguments]]:
        return [call for part in self.parts for call in part.calls]

    def content_chars(self) -> list[bool]:
        """Return which characters of the answer are content."""
        return [part.kind == "content" for part in self.parts for _ in part.text]

    def up_to_stop(self) -> Mixture:
        """Return what is left if STOP ends the content."""
        kept: list[Part] = []
        for part in self.parts:
            if part.kind == "content" and STOP in part.text:
                kept.append(Part("content", part.text.partition(STOP)[0]))
                break
            kept.append(part)
        return Mixture(self.form, self.thoughts, self.tail, kept)


def json_of(rng: Random, value: Any) -> str:
    """Return a value as JSON in one of its spellings."""
    separators = rng.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=separators)
    return text.replace("/", r"\/") if rng.random() < 0.2 else text


def blank(rng: Random) -> str:
    return rng.choice(BLANKS)


def json_call(rng: Random, name: str, arguments: Arguments, key: str = "arguments") -> str:
    entries = [("name", name), (key, arguments)]
    if rng.random() < 0.2:
        entries.insert(0, ("type", "function"))
    elif rng.random() < 0.2:
        entries.reverse()
    return json_of(rng, dict(entries))


Calls = list[tuple[str, Arguments]]
Write = Callable[[Random, Calls], str]


def tagged(rng: Random, calls: Calls) -> str:
    """Return calls of Qwen Coder: with or without line ends, the first and the last marker."""
    texts = []
    for at, (name, arguments) in enumerate(calls):
        line = rng.choice(["\n", ""])
        values = "".join(
            f"<parameter={key}>{line}{plain(value)}{line}</parameter>{blank(rng)}"
            for key, value in arguments.items()
        )
        opening = f"<tool_call>{blank(rng)}" if rng.random() < 0.7 else "\n"
        is_last = at == len(calls) - 1
        close = f"{blank(rng)}</tool_call>" if rng.random() < 0.7 or not is_last else ""
        texts.append(f"{opening}<function={name}>{line}{values}</function>{close}")
    return "\n".join(texts)


def hermes(rng: Random, calls: Calls) -> str:
    if rng.random() < 0.2:
        return "\n".join(
            f"<tool_call>\n{tagged(Random(1), [call]).strip().removeprefix('<tool_call>').lstrip()}"
            for call in calls
        )
    return blank(rng).join(
        f"<tool_call>{blank(rng)}{json_call(rng, *call)}{blank(rng)}</tool_call>" for call in calls
    )


def array(opening: str, close: str = "") -> Write:
    """Return a writer of an array of objects in JSON, or of the only object."""

    def write(rng: Random, calls: Calls) -> str:
        objects = [json_call(rng, *call) for call in calls]
        inside = f",{blank(rng)}".join(objects)
        is_bare = len(calls) == 1 and rng.random() < 0.3
        return f"{opening}{blank(rng)}{inside if is_bare else f'[{blank(rng)}{inside}{blank(rng)}]'}{close}"

    return write


def named_arguments(rng: Random, calls: Calls) -> str:
    identity = rng.choice(["", "[CALL_ID]a1B2c3D4e"])
    return blank(rng).join(
        f"[TOOL_CALLS]{name}{identity}[ARGS]{json_of(rng, arguments)}" for name, arguments in calls
    )


def mistral(rng: Random, calls: Calls) -> str:
    write = named_arguments if rng.random() < 0.3 else array("[TOOL_CALLS]")
    return write(rng, calls)


def functionary(rng: Random, calls: Calls) -> str:
    return "".join(
        f"<function={name}>{json_of(rng, arguments)}{blank(rng)}</function>"
        for name, arguments in calls
    )


def kimi(rng: Random, calls: Calls) -> str:
    """Return a section of Kimi K2, whose first and last marker may be missing."""
    ends = ["<|tool_call_end|>" if rng.random() < 0.8 else "" for _ in calls]
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
        f"{json_of(rng, arguments)}{end}"
        for at, ((name, arguments), end) in enumerate(zip(calls, ends, strict=True))
    )
    opening = "<|tool_calls_section_begin|>" if rng.random() < 0.7 else ""
    is_closed = ends[-1] and rng.random() < 0.7
    return f"{opening}{inside}{'<|tool_calls_section_end|>' if is_closed else ''}"


def kimi_k3(rng: Random, calls: Calls) -> str:
    kinds: dict[type, str] = {str: "string", int: "number", bool: "boolean"}
    inside = "".join(
        f'<|open|>call tool="{name}" index="{at}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{plain(value)}'
            "<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for at, (name, arguments) in enumerate(calls)
    )
    close = "<|close|>tools<|sep|>" if rng.random() < 0.7 else ""
    return f"<|open|>tools<|sep|>{inside}{close}"


def gemma(rng: Random, calls: Calls) -> str:
    def write(value: Any) -> str:
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else plain(value)

    texts = []
    for name, arguments in calls:
        members = f",{rng.choice(['', ' '])}".join(f"{k}:{write(v)}" for k, v in arguments.items())
        inside = (
            f"call:{name}{{{members}}}" if rng.random() < 0.8 else json_call(rng, name, arguments)
        )
        texts.append(f"<|tool_call>{inside}<tool_call|>")
    return blank(rng).join(texts)


def python(rng: Random, calls: Calls) -> str:
    def write(value: Any) -> str:
        if isinstance(value, str) and not set(value) & set("'\\\n") and rng.random() < 0.5:
            return f"'{value}'"
        return (
            repr(value) if isinstance(value, bool) and rng.random() < 0.5 else json_of(rng, value)
        )

    texts = [
        f"{name}({f',{rng.choice(BLANKS)}'.join(f'{k}={write(v)}' for k, v in arguments.items())})"
        for name, arguments in calls
    ]
    return f"<|tool_call_start|>[{f',{blank(rng)}'.join(texts)}]<|tool_call_end|>"


def minimax(rng: Random, calls: Calls) -> str:
    mark = "]<]minimax[>["
    inside = "".join(
        f'{blank(rng)}{mark}<invoke name="{name}">'
        + "".join(f"{blank(rng)}{mark}<{k}>{plain(v)}{mark}</{k}>" for k, v in arguments.items())
        + f"{blank(rng)}{mark}</invoke>"
        for name, arguments in calls
    )
    close = f"{blank(rng)}{mark}</tool_call>" if rng.random() < 0.7 else ""
    return f"{mark}<tool_call>{inside}{close}"


def fenced(rng: Random, calls: Calls) -> str:
    inside = blank(rng).join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json_of(rng, arguments)}"
        f"{rng.choice(['', chr(10)])}```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    opening = "<｜tool▁calls▁begin｜>" if rng.random() < 0.7 else ""
    close = "<｜tool▁calls▁end｜>" if opening and rng.random() < 0.7 else ""
    return f"{opening}{inside}{close}"


def actions(rng: Random, calls: Calls) -> str:
    objects = ",".join(
        f'\n    {{\n        "tool_name": "{name}",\n        "parameters": {json_of(rng, arguments)}\n    }}'
        for name, arguments in calls
    )
    return f"Action:{rng.choice([' ', chr(10)])}```json\n[{objects}\n]```"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Style:
    """How a family writes answers.

    alone: a call is the whole answer, and there is one. in_thoughts: calls end thoughts that nothing closes.
    """

    form: CallFormat
    write: Write
    thoughts: ThoughtMarkers = ("<think>", "</think>")
    alone: bool = False
    in_thoughts: bool = True

    def mix(self, rng: Random, *, stops: bool = False) -> Mixture:
        """Return an answer with thoughts, text and calls, each in one of the ways that models write it."""
        opening, close = self.thoughts
        mixture = Mixture(self.form, self.thoughts)
        n_calls = rng.choice([0, 1, 1, 2, 3])
        in_thoughts = n_calls and self.in_thoughts and not self.alone and rng.random() < 0.25
        for at in range(rng.choice([0, 1, 1, 2]) or in_thoughts):
            if at or rng.random() < 0.5:
                mixture.add("", opening)
            else:
                mixture.tail = opening
            mixture.add("", blank(rng))
            mixture.add("reasoning", rng.choice(THOUGHTS))
            mixture.add("", f"{blank(rng)}{close}{blank(rng)}")
        if not mixture.parts and rng.random() < 0.2:
            mixture.add("", f"{close}{blank(rng)}")
        if in_thoughts:  # nothing closes them
            *mixture.parts, _ = mixture.parts
            mixture.add("", "\n")
        elif not self.alone or not n_calls:
            self._add_text(rng, mixture, stops)
        if self.alone:
            n_calls = min(n_calls, 1)
        if n_calls:
            self._add_calls(rng, mixture, n_calls)
        if in_thoughts and rng.random() < 0.5:
            mixture.add("", f"\n{close}\n")
        if n_calls and not self.alone and rng.random() < 0.5:
            self._add_text(rng, mixture, stops)
        return mixture

    def _add_text(self, rng: Random, mixture: Mixture, stops: bool) -> None:
        if text := rng.choice(["", *TEXTS]):
            mixture.add("content", f"{text}{STOP} there" if stops and rng.random() < 0.5 else text)
            mixture.add("", "\n" if mixture.calls else "")

    def _add_calls(self, rng: Random, mixture: Mixture, count: int) -> None:
        if mixture.text("content"):
            mixture.add("", "\n" + blank(rng))
        calls = [draw_call(rng) for _ in range(count)]
        mixture.add("call", self.write(rng, calls), *calls)
        mixture.add("", rng.choice(["", "\n"]) if mixture.parts[-1].text else "")


def draw_call(rng: Random) -> tuple[str, Arguments]:
    """Return a call of one of TOOLS, with its arguments in any order."""
    if rng.random() < 0.2:
        return "now", {}
    arguments: Arguments = {"note": rng.choice(VALUES)}
    if rng.random() < 0.6:
        arguments["level"] = rng.choice([0, 3, -12])
    if rng.random() < 0.4:
        arguments["on"] = rng.random() < 0.5
    keys = rng.sample([*arguments], len(arguments))
    return "led", {key: arguments[key] for key in keys}


def llama(rng: Random, calls: Calls) -> str:
    return f"{rng.choice(['', '<|python_tag|>'])}{json_call(rng, *calls[0], key='parameters')}"


KEYS = CallFormat(
    "found",
    ("<tool_call>",),
    "\n</tool_call>",
    middle="\n",
    again="\n</tool_call>\n<tool_call>",
    parameter=("<key>", "</key>\n<value>", "</key>\n<value>", "</value>"),
)
ARRAY = CallFormat(
    "found",
    ("<calls>",),
    "}]</calls>",
    lead='[{"name": "',
    middle='", "arguments": ',
    again='}, {"name": "',
)


def found(form: CallFormat) -> Write:
    """Return a writer of literals with blanks of its own between their brackets, quotes and tags."""
    gap = re.compile(r'\s+|(?<=[]>,:{[}"])(?=[]<:{[}"])')

    def write(rng: Random, calls: Calls) -> str:
        def loose(literal: str) -> str:
            return gap.sub(lambda _: blank(rng), literal)

        text = form.opens[0]
        for at, (name, arguments) in enumerate(calls):
            text += f"{loose(form.again if at else form.lead)}{name}{loose(form.middle)}"
            if form.parameter:
                opening, separator, _, close = form.parameter
                text += "".join(
                    f"{blank(rng)}{opening}{key}{loose(separator)}{plain(value)}{close}"
                    for key, value in arguments.items()
                )
            else:
                text += json_of(rng, arguments)
        is_closed = rng.random() < 0.7 or form is not ARRAY
        return text + (loose(form.close) if is_closed else "}]")

    return write


class Messages(Style):
    """Answers that are messages, in any order, with heads as gpt-oss and Muse Glimmer write them."""

    def mix(self, rng: Random, *, stops: bool = False) -> Mixture:
        mixture = Mixture(self.form, self.thoughts, MESSAGE_START)
        kinds = rng.choices(["thoughts", "call", "text"], k=rng.choice([1, 2, 3, 4]))
        for at, kind in enumerate(kinds):
            start = MESSAGE_START if at else ""
            match kind:
                case "thoughts":
                    mixture.add("", start + self._head_of_thoughts(rng))
                    mixture.add("reasoning", rng.choice([*THOUGHTS, self._draw_text(rng)]))
                case "text":
                    mixture.add("", start + self._head_of_text(rng))
                    text = self._draw_text(rng)
                    mixture.add(
                        "content", f"{text}{STOP}" if stops and rng.random() < 0.5 else text
                    )
                case "call":
                    call = draw_call(rng)
                    head, behind = self._around_call(rng, call[0])
                    mixture.add("", start + head)
                    mixture.add("call", self.write(rng, [call]), call)
                    mixture.add("", behind)
            mixture.add("", self.ending(rng, kind, is_last=at == len(kinds) - 1))
        return mixture

    def ending(self, rng: Random, kind: str, *, is_last: bool) -> str:
        """Return what ends a message; the last one's is the end of the answer."""
        return "" if is_last else "<|end|>"

    def _draw_text(self, rng: Random) -> str:
        """Return a text, which may show a call."""
        write = rng.choice([self.write, hermes, block])
        return rng.choice([*TEXTS, f"So:\n{write(rng, [draw_call(rng)])}."])

    def _head_of_thoughts(self, rng: Random) -> str:
        stray = ["", "", "<|channel|>commentary to=assistant", "<|channel|>final"]
        return f"{rng.choice(stray)}<|channel|>analysis<|message|>"

    def _head_of_text(self, rng: Random) -> str:
        channels = ["final", "final <|constrain|>json", "commentary"]
        stray = rng.choice(
            [
                "",
                "",
                "<|channel|>commentary",
                "<|channel|>analysis<|message|><|end|><|start|>assistant",
            ]
        )
        return f"{stray}<|channel|>{rng.choice(channels)}<|message|>"

    def _around_call(self, rng: Random, name: str) -> tuple[str, str]:
        """Return what stands before and behind the arguments of a call."""
        channel = f"<|channel|>{rng.choice(['commentary', 'analysis'])}"
        constraint = rng.choice(["", " json", " <|constrain|>json", "<|constrain|>json"])
        recipient = f" to=functions.{name}"
        head = rng.choice([f"{recipient}{channel}", f"{channel}{recipient}"])
        return f"{head}{constraint}<|message|>", rng.choice(["", "", ' 5" wide', "\n"])


class MuseMessages(Messages):
    def ending(self, rng: Random, kind: str, *, is_last: bool) -> str:
        return "" if is_last else "<|eom|>"

    def _head_of_thoughts(self, rng: Random) -> str:
        return " to=self<|message|>"

    def _head_of_text(self, rng: Random) -> str:
        return rng.choice([" to=user<|message|>", "<|message|>"])

    def _around_call(self, rng: Random, name: str) -> tuple[str, str]:
        return f" to={name}<|message|>", ""


class Recipients(Style):
    """Answers of Functionary 3.2, in which each text says whom it is for."""

    def mix(self, rng: Random, *, stops: bool = False) -> Mixture:
        mixture = Mixture(self.form, self.thoughts, ">>>")
        kinds = rng.choices(["call", "text"], k=rng.choice([1, 2, 3]))
        for at, kind in enumerate(kinds):
            mixture.add("", ">>>" if at else "")
            if kind == "text":
                mixture.add("", "all\n")
                text = rng.choice(TEXTS)
                mixture.add("content", f"{text}{STOP}" if stops and rng.random() < 0.5 else text)
            else:
                call = draw_call(rng)
                mixture.add(
                    "call", f"{call[0]}\n{json_of(rng, call[1])}{rng.choice(['', chr(10)])}", call
                )
        return mixture


def block(rng: Random, calls: Calls) -> str:
    """Return calls as plain JSON in a fenced block, which Qwen2.5-Coder writes instead of Hermes' markers."""
    objects = [json_call(rng, *call) for call in calls]
    inside = "\n".join(objects) if rng.random() < 0.5 else f"[{', '.join(objects)}]"
    return f"\n```{rng.choice(['json', '', 'tool_call'])}\n{inside}\n```"


def message_json(rng: Random, calls: Calls) -> str:
    return json_of(rng, calls[0][1])


def atem(rng: Random, calls: Calls) -> str:
    [(name, arguments)] = calls
    values = "".join(
        f'<atem:parameter name="{k}">{plain(v)}</atem:parameter>{blank(rng)}'
        for k, v in arguments.items()
    )
    opening, close = rng.choice([("", ""), ("<atem:function_calls>", "\n</atem:function_calls>")])
    return f'{opening}\n<atem:invoke name="{name}">\n{values}</atem:invoke>{close}'


STYLES: dict[str, Style] = {
    "hermes": Style(HERMES, hermes),
    "plain JSON": Style(HERMES, block, in_thoughts=False),
    "qwen coder": Style(TAGS, tagged),
    "llama": Style(LLAMA, llama, alone=True),
    "granite": Style(GRANITE, array("<|tool_call|>")),
    "nemotron": Style(NEMOTRON, array("<TOOLCALL>", "</TOOLCALL>")),
    "mistral": Style(MISTRAL, mistral, ("[THINK]", "[/THINK]")),
    "newer mistral": Style(MISTRAL_ARGS, named_arguments, ("[THINK]", "[/THINK]")),
    "functionary": Style(FUNCTIONARY, functionary),
    "functionary 3.2": Recipients(FUNCTIONARY_3_2, message_json),
    "kimi k2": Style(KIMI_K2, kimi),
    "kimi k3": Style(KIMI_K3, kimi_k3, ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    "gemma": Style(GEMMA, gemma, ("<|channel>thought\n", "<channel|>")),
    "lfm2": Style(LFM2, python),
    "minimax m3": Style(MINIMAX_M3, minimax, ("<mm:think>", "</mm:think>")),
    "deepseek r1": Style(DEEPSEEK_R1, fenced),
    "command r": Style(COMMAND_R, actions),
    "found in keys": Style(KEYS, found(KEYS)),
    "found in an array": Style(ARRAY, found(ARRAY)),
    "gpt-oss": Messages(HARMONY, message_json),
    "muse": MuseMessages(MUSE, atem),
}


def mixtures(
    name: str, count: int, seed: int, *, stops: bool = False
) -> Iterator[tuple[Random, Mixture]]:
    """Yield random answers of a family, each with the source that it was drawn from."""
    for number in range(seed, seed + count):
        rng = Random(f"{name} {number}")
        yield rng, STYLES[name].mix(rng, stops=stops)
