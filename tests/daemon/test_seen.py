"""How calls are written is seen in what a template makes of some, where no family here is known."""

from __future__ import annotations

import json
import random
from functools import cache, partial
from typing import Any

import pytest

from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.daemon.completion.tools import describe_format
from localspec.engine.prompt import template_process
from localspec.engine.prompt.dialect import learn_calls, learn_dialect, read_family
from localspec.engine.prompt.template_child import TemplateRaised, environment, render
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.protocol.call_readers import Arguments, Call
from localspec.protocol.calls import UNKNOWN_FORMAT, CallFormat
from localspec.protocol.dialect import Dialect
from tests.support import templates

_TURNS = """{{ tools | tojson }}
{%- for m in messages %}{% if m.tool_calls %}<|bot|>CALLS{% else %}<|ROLE|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"""


def template(calls: str) -> str:
    bot = "{{ 'bot' if m.role == 'assistant' else m.role }}"
    return _TURNS.replace("CALLS", calls).replace("ROLE", bot)


EACH = "{% for c in m.tool_calls %}"
TAGS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
WRITTEN = {  # as GLM, DeepSeek, Cohere, Kimi, Apertus, MiniCPM and Functionary have them, or nearly
    "keys": f"{EACH}\n<tool_call>{{{{ c.function.name }}}}\n{TAGS}<arg_key>{{{{ k }}}}</arg_key>\n"
    f"<arg_value>{VALUE}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}<|end|>",
    "kinds": f'\n\n<｜X｜calls>\n{EACH}<｜X｜invoke name="{{{{ c.function.name }}}}">\n{TAGS}'
    "<｜X｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    f"{VALUE}</｜X｜parameter>\n{{% endfor %}}</｜X｜invoke>\n{{% endfor %}}</｜X｜calls><|end|>",
    "counted": f'<|START_ACTION|>[{EACH}\n    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": '
    '"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %},{% endif %}{% endfor %}\n]<|END_ACTION|><|end|>",
    "ids": f"<|section|>{EACH}<|call|>{{{{ c.id }}}}<|args|>{{{{ c.function.arguments | tojson }}}}"
    "<|call_end|>{% endfor %}<|section_end|><|end|>",
    "list": f'<|tools|>[{EACH}{{"{{{{ c.function.name }}}}": {{{{ c.function.arguments | tojson }}}}}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|/tools|><|end|>",
    "no tojson": f'{EACH}<function name="{{{{ c.function.name }}}}">{TAGS}<param name="{{{{ k }}}}">'
    "{{ v }}</param>{% endfor %}</function>{% endfor %}<|end|>",
    "quoted as in XML": f'{EACH}<function name="{{{{ c.function.name }}}}">{TAGS}<param name="{{{{ k }}}}">'
    "{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}"
    f"{VALUE}{{% endif %}}</param>{{% endfor %}}</function>\n{{% endfor %}}<|end|>",
    "JSON in text": f"{EACH}<act>{{{{ c.function.name }}}}\n{{{{ c.function.arguments + '' }}}}</act>"
    "{% endfor %}<|end|>",
}
# What is said of these instead: no marker of their own, keys as markers, Python's calls, no calls at all.
UNSEEN = {
    "bare": f"{EACH}{{{{ c.function.name }}}} {{{{ c.function.arguments | tojson }}}}{{% endfor %}}<|end|>",
    "keys as tags": f"{EACH}<call>{{{{ c.function.name }}}}{TAGS}<{{{{ k }}}}>{VALUE}</{{{{ k }}}}>"
    "{% endfor %}</call>{% endfor %}<|end|>",
    "escaped": f"{EACH}<call>{{{{ c.function.name }}}}{TAGS}<k>{{{{ k }}}}</k><v>{{{{ v | e }}}}</v>"
    "{% endfor %}</call>{% endfor %}<|end|>",
    "python": f"<|calls|>[{EACH}{{{{ c.function.name }}}}({TAGS}{{{{ k }}}}='{VALUE}', {{% endfor %}})"
    "{% endfor %}]<|end|>",
    "marked like text": f"<|bot|>{EACH}<|bot|>{{{{ c.function.name }}}}{{{{ c.function.arguments | tojson "
    "}}<|end|>{% endfor %}",
    "nothing": "<|end|>",
    "failing": "{{ raise_exception('no calls') }}",
}
ALL = {
    **{name: template(text) for name, text in (WRITTEN | UNSEEN).items()},
    **{name: file.read_text("utf-8") for name, file in templates.files().items()},
}
SAID = {*UNSEEN, "channels", "openai-gpt-oss-120b"}
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
def notation(text: str) -> CallFormat:
    process = TemplateProcess()
    try:
        return learn_calls(text, partial(process.render, text))
    finally:
        process.close()


def written(text: str, calls: list[tuple[str, dict[str, Any]]], name: str) -> str:
    """What a template makes of these calls, from behind the question on."""
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
        {"name": each, "description": "d", "parameters": schema} for each, schema in SCHEMAS.items()
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


def taken_apart(parser: AnswerParser, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces of `size` characters."""
    said, calls = "", list[tuple[str, str]]()
    pieces = [p for at in range(0, len(text), size) for p in parser.feed(text[at : at + size])]
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case Call():
                calls.append((piece.name, ""))
            case Arguments():
                name, given = calls[piece.index]
                calls[piece.index] = name, given + piece.text
            case Text():
                said += piece.text
    return said.strip(), calls


def read(parser: AnswerParser, text: str, size: int) -> list[tuple[str, Any]]:
    _, calls = taken_apart(parser, text, size)
    return [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("name", ["keys", "kinds", "counted", "list", "quoted as in XML"])
def test_however_an_answer_is_cut_the_same_is_read_of_it(name: str) -> None:
    """Of one that is mangled, too."""
    form, chosen = notation(ALL[name]), random.Random(name)
    for _ in range(40):
        text = written(ALL[name], chosen.choice([CALLS, CALLS[:1]]), name)
        for _ in range(chosen.choice([0, 1, 1, 3])):
            at, gone = chosen.randrange(len(text)), chosen.choice([0, 1, 5])
            more = chosen.choice(["", "<", ">", '"', "{", "}", "\n", "</", " x"])
            text = text[:at] + chosen.choice([more + text[at + gone :], "x"])
        found = [taken_apart(AnswerParser(form, SCHEMAS), text, size) for size in (1, 4, 10_000)]
        assert found[0] == found[1] == found[2], text


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_writes_of_calls_is_read_again_or_said(name: str) -> None:
    form = notation(ALL[name])
    assert form.guessed == (name in SAID), form
    if form.guessed:
        assert "not known" in describe_format(form)
        return
    if form.told:
        return
    calls = [(each, {**given}) for each, given in CALLS]
    if name in ("Qwen3-Coder", "chatml_xml_calls", "no tojson"):
        calls[0][1].pop("more")  # Python's own writing of objects has no quotes inside
    if name == "quoted as in XML":
        calls[0][1]["city"] = "Pa </param> & ]]> or </p>"
    for some in ([calls[0]], [calls[1]], calls):
        try:
            text = written(ALL[name], some, name)
        except TemplateRaised:
            if len(some) == 1:
                raise
            continue  # it takes one call at a time, as Llama's
        if len(some) > 1 and text.count("weather") + text.count("now") < len(some):
            continue
        if form.bare:
            text = text[text.index("{") :]
        for size in (1, 2, 3, 7, 10_000):
            assert read(AnswerParser(form, SCHEMAS), text, size) == some, (form, text)


def test_a_template_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template, process = "{{ tools }}{# thinking #}" + loop, TemplateProcess()
    rendered: list[dict[str, Any]] = []

    def stopped(variables: dict[str, Any]) -> str:
        rendered.append(variables)
        return process.render(template, variables)

    assert learn_dialect(template, stopped) == Dialect()
    assert len(rendered) == 2  # one for calls, and one for everything else


def test_of_a_found_notation_a_person_sees_an_example() -> None:
    shown = describe_format(notation(ALL["keys"]))
    assert shown.endswith(
        "<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> …</tool_call>"
    )
    assert describe_format(notation(ALL["chatml"])) == "in the notation of Hermes"


def test_a_family_is_not_taken_for_another_that_has_a_key_in_common() -> None:
    assert read_family(ALL["counted"]) == UNKNOWN_FORMAT
    assert notation(ALL["counted"]).opens == ("<|START_ACTION|>",)
