"""The notation of tool calls is learned from what a template renders, if its family is unknown."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from typing import Any

import pytest

from localspec.chat.dialect import learn_calls, learn_dialect
from localspec.chat.families import read_family
from localspec.chat.markers import MESSAGE_START
from localspec.chat.reader import AnswerReader
from localspec.chat.tools import describe_format
from localspec.engine.prompt import template_process
from localspec.engine.prompt.template_child import environment, render
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.errors import TemplateRaised
from localspec.protocol.calls import UNKNOWN_FORMAT, CallFormat
from localspec.protocol.dialect import Dialect
from localspec.protocol.pieces import Arguments, Call, Text
from tests.support import templates

_TURNS = """{{ tools | tojson }}
{%- for m in messages %}{% if m.tool_calls %}<|bot|>CALLS{% else %}<|ROLE|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"""


def template(calls: str) -> str:
    bot = "{{ 'bot' if m.role == 'assistant' else m.role }}"
    return _TURNS.replace("CALLS", calls).replace("ROLE", bot)


LOOP = "{% for c in m.tool_calls %}"
TAGS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
LEARNABLE = {  # as GLM, DeepSeek, Cohere, Kimi, Apertus, MiniCPM, GigaChat and others have them, or nearly
    "keys": f"{LOOP}\n<tool_call>{{{{ c.function.name }}}}\n{TAGS}<arg_key>{{{{ k }}}}</arg_key>\n"
    f"<arg_value>{VALUE}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}<|end|>",
    "kinds": f'\n\n<｜X｜calls>\n{LOOP}<｜X｜invoke name="{{{{ c.function.name }}}}">\n{TAGS}'
    "<｜X｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    f"{VALUE}</｜X｜parameter>\n{{% endfor %}}</｜X｜invoke>\n{{% endfor %}}</｜X｜calls><|end|>",
    "counted": f'<|START_ACTION|>[{LOOP}\n    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": '
    '"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}{% endfor %}\n]<|END_ACTION|><|end|>",
    "ids": f"<|section|>{LOOP}<|call|>{{{{ c.id }}}}<|args|>{{{{ c.function.arguments | tojson }}}}"
    "<|call_end|>{% endfor %}<|section_end|><|end|>",
    "list": f'<|tools|>[{LOOP}{{"{{{{ c.function.name }}}}": {{{{ c.function.arguments | tojson }}}}}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tools|><|end|>",
    "no tojson": f'{LOOP}<function name="{{{{ c.function.name }}}}">{TAGS}<param name="{{{{ k }}}}">'
    "{{ v }}</param>{% endfor %}</function>{% endfor %}<|end|>",
    "quoted as in XML": f'{LOOP}<function name="{{{{ c.function.name }}}}">{TAGS}<param name="{{{{ k }}}}">'
    "{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}"
    f"{VALUE}{{% endif %}}</param>{{% endfor %}}</function>\n{{% endfor %}}<|end|>",
    "role": f'{LOOP}<|end|>\n\ncaller<|says|>\n{{"name": "{{{{ c.function.name }}}}", "arguments": '
    "{{ c.function.arguments | tojson }}}{% endfor %}<|end|>",
    "JSON in text": f"{LOOP}<act>{{{{ c.function.name }}}}\n{{{{ c.function.arguments + '' }}}}</act>"
    "{% endfor %}<|end|>",
}
# These cannot be learned: calls without markers, keys as markers, Python's calls, or no calls at all.
UNLEARNABLE = {
    "bare": f"{LOOP}{{{{ c.function.name }}}} {{{{ c.function.arguments | tojson }}}}{{% endfor %}}<|end|>",
    "keys as tags": f"{LOOP}<call>{{{{ c.function.name }}}}{TAGS}<{{{{ k }}}}>{VALUE}</{{{{ k }}}}>"
    "{% endfor %}</call>{% endfor %}<|end|>",
    "escaped": f"{LOOP}<call>{{{{ c.function.name }}}}{TAGS}<k>{{{{ k }}}}</k><v>{{{{ v | e }}}}</v>"
    "{% endfor %}</call>{% endfor %}<|end|>",
    "python": f"<|calls|>[{LOOP}{{{{ c.function.name }}}}({TAGS}{{{{ k }}}}='{VALUE}', {{% endfor %}})"
    "{% endfor %}]<|end|>",
    "marked like text": f"<|bot|>{LOOP}<|bot|>{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson "
    "}}<|end|>{% endfor %}",
    "nothing": "<|end|>",
    "failing": "{{ raise_exception('no calls') }}",
}
ALL = {
    **{name: template(text) for name, text in (LEARNABLE | UNLEARNABLE).items()},
    **{name: file.read_text("utf-8") for name, file in templates.files().items()},
}
NOT_LEARNED = UNLEARNABLE.keys()
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'Pa </p> "ris"\n \'s', "days": 2, "more": {"a": [True, 7, "x"]}}),
    ("now", {}),
    ("weather", {"city": "7"}),
]
TYPES = {"city": "string", "days": "integer", "more": "object"}
SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
SCHEMAS = {"weather": SCHEMA, "now": {"type": "object", "properties": {}}}
ENVIRONMENT = environment()


@cache
def learn_notation(text: str) -> CallFormat:
    process = TemplateProcess()
    try:
        return learn_calls(text, partial(process.render, text))
    finally:
        process.close()


def render_calls(text: str, calls: list[tuple[str, dict[str, Any]]], name: str) -> str:
    """Return what a template renders for these calls, after the question."""
    as_text = name == "JSON in text"
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"functions.{called}:{at}" if name == "ids" else f"abcdefg0{at}",
                "type": "function",
                "function": {"name": called, "arguments": json.dumps(a) if as_text else a},
            }
            for at, (called, a) in enumerate(calls)
        ],
    }
    functions = [
        {"name": tool, "description": "d", "parameters": schema} for tool, schema in SCHEMAS.items()
    ]
    variables: dict[str, Any] = {
        "messages": [{"role": "user", "content": "zqplace"}, answer],
        "tools": [{"type": "function", "function": function} for function in functions],
        "bos_token": "",
        "eos_token": "",
        "documents": None,
        "add_generation_prompt": False,
    }
    return render(ENVIRONMENT, text, variables).rpartition("zqplace")[2]


def parse_pieces(parser: AnswerReader, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that arrives in pieces of `size` characters."""
    content, calls = "", list[tuple[str, str]]()
    pieces = [p for at in range(0, len(text), size) for p in parser.feed(text[at : at + size])]
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case Call():
                calls.append((piece.name, ""))
            case Arguments():
                name, arguments = calls[piece.index]
                calls[piece.index] = name, arguments + piece.text
            case Text():
                content += piece.text
    return content.strip(), calls


def parse_calls(parser: AnswerReader, text: str, size: int) -> list[tuple[str, Any]]:
    _, calls = parse_pieces(parser, text, size)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", ["keys", "kinds", "counted", "list", "quoted as in XML"])
def test_parsing_does_not_depend_on_how_an_answer_is_split(name: str) -> None:
    """Damaged answers are parsed alike in pieces of any size, too."""
    form, rng = learn_notation(ALL[name]), random.Random(name)
    for _ in range(40):
        text = render_calls(ALL[name], rng.choice([CALLS, CALLS[:1]]), name)
        for _ in range(rng.choice([0, 1, 1, 3])):
            position, removed = rng.randrange(len(text)), rng.choice([0, 1, 5])
            inserted = rng.choice(["", "<", ">", '"', "{", "}", "\n", "</", " x"])
            text = text[:position] + rng.choice([inserted + text[position + removed :], "x"])
        results = [parse_pieces(AnswerReader(form, SCHEMAS), text, size) for size in (1, 4, 10_000)]
        assert results[0] == results[1] == results[2], text


@pytest.mark.parametrize("name", ALL)
def test_calls_that_a_template_renders_are_parsed_or_reported(name: str) -> None:
    form = learn_notation(ALL[name])
    assert form.guessed == (name in NOT_LEARNED), form
    if form.guessed:
        assert "not known" in describe_format(form)
        return
    if form.told:
        return
    calls = [(tool, {**arguments}) for tool, arguments in CALLS]
    if name in ("Qwen3-Coder", "chatml_xml_calls", "no tojson"):
        calls[0][1].pop("more")  # Python's notation of objects is not JSON
    if name == "elements":
        calls[0][1]["more"] = {"a": ["x"]}  # what has no type in the schema is read as a text
    if name == "quoted as in XML":
        calls[0][1]["city"] = "Pa </param> & ]]> or </p>"
    for subset in ([calls[0]], [calls[1]], calls):
        try:
            text = render_calls(ALL[name], subset, name)
        except TemplateRaised:
            if len(subset) == 1:
                raise
            continue  # the template allows one call at a time, like Llama's
        if len(subset) > 1 and text.count("weather") + text.count("now") < len(subset):
            continue
        if form.bare:
            text = text[text.index("{") :]
        if form.thoughts:
            text = text.partition(MESSAGE_START)[2]
        for size in (1, 2, 3, 7, 10_000):
            parser = AnswerReader(form, SCHEMAS, tail=MESSAGE_START if form.thoughts else "")
            assert parse_calls(parser, text, size) == subset, (form, text)


def test_a_slow_template_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template, process = "{{ tools }}{# thinking #}" + loop, TemplateProcess()
    rendered: list[dict[str, Any]] = []

    def render_slowly(variables: dict[str, Any]) -> str:
        rendered.append(variables)
        return process.render(template, variables)

    assert learn_dialect(template, render_slowly) == Dialect()
    assert len(rendered) == 1


def test_a_learned_notation_is_described_by_an_example() -> None:
    description = describe_format(learn_notation(ALL["keys"]))
    assert description.endswith(
        "<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> …</tool_call>"
    )
    assert describe_format(learn_notation(ALL["chatml"])) == "in the notation of Hermes"


def test_families_with_a_common_key_are_distinguished() -> None:
    assert read_family(ALL["counted"]) == UNKNOWN_FORMAT
    assert learn_notation(ALL["counted"]).opens == ("<|START_ACTION|>",)
