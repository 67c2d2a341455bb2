"""Random calls, as the templates of models write them, are read back as they were, streamed and cut.

LOCALSPEC_TEST_CALLS is the number of random answers of each template, LOCALSPEC_TEST_SEED the first seed.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from localspec.chat.markers import MESSAGE_START
from localspec.chat.reader import AnswerReader
from localspec.errors import TemplateRaised
from localspec.protocol.calls import CallFormat
from localspec.protocol.pieces import Arguments, Call, Text
from tests.support import templates
from tests.support.exploration import SEED, count_examples
from tests.support.random_calls import RandomCalls, Schema
from tests.support.written_calls import Calls, carried_pieces, learn, write_calls

pytestmark = pytest.mark.explore

ANSWERS = count_examples(25, "LOCALSPEC_TEST_CALLS")
TOOLS = "get", "get_all", "files.read-now"


def read_answer(
    form: CallFormat, schemas: dict[str, Schema], pieces: list[str]
) -> tuple[list[tuple[str, str]], str]:
    """Return the calls, with their arguments as text, and the text of an answer that comes in pieces."""
    parser = AnswerReader(form, schemas, tail=MESSAGE_START if form.thoughts else "")
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
    for seed in range(SEED, SEED + ANSWERS):
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
