"""Random walks of the grammar of each family's calls are read back as the arguments that were walked.

The tokens are bytes, so a walk may take any path. LOCALSPEC_TEST_CALLS is the number of walks of each family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from localspec.chat.markers import MESSAGE_START
from localspec.chat.reader import AnswerReader
from localspec.engine.sampling.grammars.sources import GrammarJob, GrammarTokens, build_sources
from localspec.protocol.calls import CALL_ID_PLACEHOLDER, TYPE_PLACEHOLDER, CallFormat, ToolSet
from localspec.protocol.pieces import Arguments, Call
from tests.engine.test_calls import FORMATS, end_of_prompt, is_tagged
from tests.support.exploration import SEED, count_examples
from tests.support.random_calls import RandomCalls

pytestmark = pytest.mark.explore
WALKS = count_examples(20, "LOCALSPEC_TEST_CALLS")
WALKS_PER_SCHEMA = 10
MAX_BYTES = 1000
TOKENIZER = LLTokenizer("byte")
TEXT = [*b' "}]\\n,<ab17', *"é😀".encode()]
# What readers may stumble over, and the grammar allows in texts alone.
SNIPPETS = r"\u00e1 \ud83d\ude00 \/ <think> </think> <|eom|> <|end|> >>>get".split()
FLAT: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "enum": ["a", "b c", "é\n", "5"]},
    {"type": "integer"},
    {"type": "number", "minimum": 0},
    {"type": "boolean"},
]
WRAPPED = "arguments", "parameters", "with"  # keys of arguments in the object of a call
CONSTANTS = {"True": True, "False": False, "None": None}


def draw_tools(rng: Random, form: CallFormat) -> dict[str, Any]:
    """Return tools: with any schema where the arguments are JSON, and flat ones where they are not."""
    if not is_tagged(form):
        source = RandomCalls(rng, ["a"])
        return {name: source.parameters() for name in ("get", "get_all")}
    keys = rng.sample(["a", "b", "x_1", "to-do", "key.with.dots", "type"], rng.choice([0, 1, 3, 5]))
    flat = {
        "type": "object",
        "properties": {key: rng.choice(FLAT) for key in keys},
        "required": rng.sample(keys, rng.randint(0, len(keys))),
    }
    return {"get": flat, "now": {"type": "object", "properties": {}}}


def walk(matcher: LLMatcher, rng: Random) -> str | None:
    """Return the text of a random walk, which ends where it can; None if it did not end."""
    text = b""
    while len(text) < MAX_BYTES and not matcher.is_stopped():
        allowed = [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]
        if not allowed:
            return text.decode()
        if rng.random() < 0.05:
            snippet = rng.choice(SNIPPETS).encode()
            text += snippet[: matcher.try_consume_tokens(list(snippet))]
            continue
        likely = [byte for byte in allowed if byte in TEXT]
        byte = rng.choice(likely if likely and rng.random() < 0.9 else allowed)
        matcher.consume_token(byte)
        text += bytes([byte])
    return text.decode() if len(text) < MAX_BYTES else None


def read(tools: ToolSet, text: str, pieces: list[str]) -> list[Any]:
    """Return the arguments of the calls in an answer, which comes in pieces."""
    reader = AnswerReader(tools.format, tools.schemas, tail=end_of_prompt(tools.format))
    calls: list[str] = []
    for piece in [*(piece for part in pieces for piece in reader.feed(part)), *reader.finish()]:
        match piece:
            case Call():
                calls.append("")
            case Arguments():
                calls[piece.index] += piece.text
    return [json.loads(call) for call in calls]


def walked(tools: ToolSet, text: str) -> list[Any]:
    """Return the arguments in a walk, found in its notation without the reader of that."""
    form = tools.format
    if not is_tagged(form):
        wraps = form.kind in ("hermes", "json", "mistral") or "{" in form.lead
        return [
            value[next(key for key in WRAPPED if key in value)] if wraps else value
            for value in json_objects(text)
        ]
    return [dict(pairs(tools, call)) for call in calls_of(form, text)]


def json_objects(text: str) -> Iterator[Any]:
    at = text.find("{")
    while at >= 0:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, at)
        yield value
        at = text.find("{", end)


def calls_of(form: CallFormat, text: str) -> list[str]:
    """Return the text of each call."""
    names = "|".join(("get", "now"))
    if form.kind == "gemma":
        return re.split(rf"call:(?:{names})\{{", text)[1:]
    if form.kind == "python":
        return re.split(rf"(?:\[|, )(?:{names})\(", text)[1:]
    parts = [re.escape(part) for part in form.middle.rstrip().split(CALL_ID_PLACEHOLDER)]
    middle = r"[\w-]+".join(parts)
    lead = re.escape(form.lead.strip() or form.opens[0])
    return re.split(rf"{lead}\s*(?:{names}){middle}", text)[1:]


def pairs(tools: ToolSet, call: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call whose schema is flat, and not those of the next one."""
    form, properties = tools.format, tools.schemas["get"]["properties"]
    if form.kind == "python":
        yield from python_pairs(call)
        return
    for match in re.finditer(pattern_of(form), call):
        key, value = match["key"], match["value"]
        if properties[key]["type"] == "string":
            yield key, value
        else:
            yield key, CONSTANTS[value] if value in CONSTANTS else json.loads(value)


def pattern_of(form: CallFormat) -> str:
    """Return the expression of an argument."""
    key = r"(?P<key>[\w.-]+)"
    if form.kind == "gemma":
        return rf'{key}:(?P<quote><\|"\|>)?(?P<value>(?s:.*?))(?(quote)<\|"\|>|(?=[,}}]))'
    if mark := re.escape(form.elements):
        return rf"{mark}<{key}>(?P<value>(?s:.*?)){mark}</(?P=key)>"
    opening, text, other, close = map(re.escape, form.parameter)
    between = f"(?:{text}|{other.replace(TYPE_PLACEHOLDER, '[a-z]+')})"
    return rf"{opening}{key}{between}(?P<value>(?s:.*?)){close}"


def python_pairs(call: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while key := re.compile(r"(?:, )?([\w.-]+)=\s*").match(call, at):
        at = key.end()
        if call[at] == "'":
            end = call.index("'", at + 1)
            text, at = call[at + 1 : end], end + 1
            yield key[1], text
        elif constant := re.compile("True|False|None").match(call, at):
            at = constant.end()
            yield key[1], CONSTANTS[constant[0]]
        else:
            value, at = json.JSONDecoder(strict=False).raw_decode(call, at)
            yield key[1], value


@pytest.mark.parametrize("name", FORMATS)
def test_walks_are_read_as_they_were_walked(name: str) -> None:
    form, n_ended = FORMATS[name], 0
    for number in range(SEED, SEED + WALKS, WALKS_PER_SCHEMA):
        rng = Random(f"{name} {number}")
        tools = ToolSet(form, draw_tools(rng, form), parallel=rng.random() < 0.5)
        sources = build_sources(GrammarJob(tools), GrammarTokens({}), TOKENIZER)
        assert not sources.note
        gate = rng.choice(sources.gates)
        grammar = LLMatcher(TOKENIZER, gate.source)
        for _ in range(WALKS_PER_SCHEMA):
            text = walk(grammar.deep_copy(), rng)
            if text is None:
                continue
            n_ended += 1
            head = form.head.replace(CALL_ID_PLACEHOLDER, "get")
            if text.startswith(MESSAGE_START):  # behind another message
                head = f"{form.answer}So.<|end|>"
            answer = f"{head}{text}"
            expected = [[*value.items()] for value in walked(tools, text)]
            for pieces in ([answer], RandomCalls(rng, []).split(answer)):
                assert [[*value.items()] for value in read(tools, answer, pieces)] == expected, (
                    answer
                )
    assert n_ended > WALKS / 3
