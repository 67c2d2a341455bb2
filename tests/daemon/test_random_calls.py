"""Random calls, as the templates of models write them, are read back as they were, streamed and cut.

LOCALSPEC_TEST_CALLS is the number of random answers of each template, LOCALSPEC_TEST_SEED the first seed.
"""

from __future__ import annotations

import json
import os
import random
from functools import cache, partial
from typing import Any

import jsonschema_rs
import pytest

from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.engine.prompt.dialect import learn_dialect
from localspec.engine.prompt.template_child import TemplateRaised, environment, render
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.protocol.call_readers import Arguments, Call
from localspec.protocol.calls import CallFormat, append_calls
from localspec.protocol.dialect import Dialect
from localspec.protocol.visibility import MESSAGE_START
from tests.support import templates
from tests.support.random_calls import PIECES, RandomCalls, Schema

ANSWERS = int(os.environ.get("LOCALSPEC_TEST_CALLS", "25"))
FIRST_SEED = int(os.environ.get("LOCALSPEC_TEST_SEED", "1"))
TOOLS = "get", "get_all", "files.read-now"
QUESTION = "zqquestion"
ENVIRONMENT = environment()
Calls = list[tuple[str, Any]]


@cache
def learn(name: str) -> Dialect:
    text, process = templates.template(name), TemplateProcess()
    try:
        return learn_dialect(text, partial(process.render, text))
    finally:
        process.close()


def carried_pieces(form: CallFormat) -> list[str]:
    """Return the pieces of texts that the notation can write: its own markers, but none that ends a text."""
    literals = [*form.opens, form.close, form.lead, form.middle, form.again, *form.parameter[:3]]
    ends = [*form.parameter[3:], form.elements, *END_OF_TEXT.get(form.kind, ())]
    pieces = [*PIECES, *filter(str.strip, literals)]
    return [piece for piece in pieces if not any(end.strip() in piece for end in ends if end)]


# Templates of LFM2 escape nothing.
END_OF_TEXT = {"tags": ["</parameter>"], "gemma": ['<|"|>'], "python": ["'", "\\"]}


def write_calls(name: str, calls: Calls, schemas: dict[str, Schema]) -> str:
    """Return an answer of these calls as the model's template writes them. Raises TemplateRaised."""
    dialect = learn(name)
    is_text = dialect.calls.told or dialect.calls.guessed
    as_json = dialect.messages.json_arguments and not is_text
    tool_calls = [
        {
            "id": f"abcdefg0{at}",
            "type": "function",
            "function": {
                "name": called,
                "arguments": json.dumps(arguments) if as_json else arguments,
            },
        }
        for at, (called, arguments) in enumerate(calls)
    ]
    if is_text:
        return append_calls("", tool_calls)
    functions = [
        {"name": tool, "description": "d", "parameters": schema} for tool, schema in schemas.items()
    ]
    variables: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
        ],
        "tools": [{"type": "function", "function": function} for function in functions],
        "bos_token": "",
        "eos_token": "",
        "documents": None,
        "add_generation_prompt": False,
    }
    text = render(ENVIRONMENT, templates.template(name), variables).rpartition(QUESTION)[2]
    if dialect.calls.thoughts:
        text = text.partition(MESSAGE_START)[2]
    return text[text.index("{") :] if dialect.calls.bare else text


def read_answer(
    form: CallFormat, schemas: dict[str, Schema], pieces: list[str]
) -> tuple[list[tuple[str, str]], str]:
    """Return the calls, with their arguments as text, and the text of an answer that comes in pieces."""
    parser = AnswerParser(form, schemas)
    parser.begin(MESSAGE_START if form.thoughts else "")
    calls: list[tuple[str, str]] = []
    content = ""
    for piece in [*(part for text in pieces for part in parser.feed(text)), *parser.finish()]:
        match piece:
            case Call():
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            case Arguments():
                called, arguments = calls[piece.index]
                calls[piece.index] = called, arguments + piece.text
            case Text():
                content += piece.text
    return calls, content


def is_part(cut: Any, whole: Any) -> bool:
    """Return whether arguments of a call that was cut off are among those of the whole call."""
    return cut.items() <= whole.items() if not _nested(whole) else set(cut) <= set(whole)


def _nested(arguments: Any) -> bool:
    return any(isinstance(value, list | dict) for value in arguments.values())


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", templates.files())
def test_calls_are_read_as_they_were_written(name: str) -> None:
    form = learn(name).calls
    count = 0
    for seed in range(FIRST_SEED, FIRST_SEED + ANSWERS):
        source = RandomCalls(random.Random(seed), carried_pieces(form), nulls=not form.elements)
        schemas = {tool: source.parameters() for tool in TOOLS}
        names = source.rng.choices(TOOLS, k=source.rng.choice([1, 1, 2, 3]))
        calls: Calls = [(called, source.arguments(schemas[called])) for called in names]
        first = write_calls(name, calls[:1], schemas)
        try:
            answer = write_calls(name, calls, schemas)
        except TemplateRaised:
            answer = first
        if answer == first:  # the template has no place for a second call
            calls = calls[:1]
        whole, content = read_answer(form, schemas, [answer])
        assert [(called, strict_json(arguments)) for called, arguments in whole] == calls, answer
        for called, arguments in whole:
            jsonschema_rs.validate(schemas[called], json.loads(arguments))
        count += len(whole)
        assert read_answer(form, schemas, source.split(answer)) == (whole, content), answer
        for _ in range(4):
            cut = answer[: source.rng.randrange(len(answer))]
            check_cut_answer(read_answer(form, schemas, source.split(cut))[0], whole, cut)
    assert count >= ANSWERS


def check_cut_answer(
    calls: list[tuple[str, str]], whole: list[tuple[str, str]], answer: str
) -> None:
    """Assert that all calls but the last are complete, and that the last is a part of what was written."""
    assert calls[:-1] == whole[: max(len(calls) - 1, 0)], answer
    if not calls:
        return
    (called, arguments), (expected, complete) = calls[-1], whole[len(calls) - 1]
    assert called == expected, answer
    if not complete.startswith(arguments):  # some notations are translated to JSON, and then closed
        assert is_part(strict_json(arguments), json.loads(complete)), answer
