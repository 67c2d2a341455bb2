"""Constrained JSON may spell its strings in every way that JSON allows, and says what was meant."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.engine.llama import Vocab
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.protocol.calls import ToolSet
from localspec.protocol.frames import Constraint
from tests.engine.test_calls import FORMATS, end_of_prompt, make_matcher, read_calls, write_answer
from tests.engine.test_schemas import make_matcher as make_byte_matcher
from tests.support.vocabularies import NAMES, VocabularyOnly, files_of

SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
characters = st.sampled_from('ab é東😀\U0010ffff\ud7ff\ue000"\\/\b\f\n\r\t\0\x1b\x1f\x7f') | (
    st.characters(exclude_categories=["Cs"])
)
words = st.text(characters, max_size=8)


@st.composite
def spelled(draw: st.DrawFn, value: str) -> str:
    """Draw one of the texts that JSON has for a string."""
    return f'"{"".join(draw(spelled_character(char)) for char in value)}"'


def spelled_shortly(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def spelled_character(char: str) -> st.SearchStrategy[str]:
    units = char.encode("utf-16-be").hex()
    groups = [units[at : at + 4] for at in range(0, len(units), 4)]
    ways = ["".join(f"\\u{group}" for group in groups)]
    ways.append("".join(f"\\u{group.upper()}" for group in groups))
    if char in SHORT:
        ways.append(f"\\{SHORT[char]}")
    if char not in '"\\\x7f' and char >= " ":
        ways.append(char)
    return st.sampled_from(ways[::-1])


Case = tuple[
    Any, Any, str
]  # A schema, a value that is valid under it, and one of the value's texts.


@st.composite
def strings(draw: st.DrawFn) -> Case:
    value = draw(words)
    lengths = {
        "minLength": draw(st.integers(0, len(value))),
        "maxLength": len(value) + draw(st.integers(0, 3)),
    }
    schema = draw(
        st.sampled_from([{}, {"type": "string"}, {"type": ["null", "string"]}])
        | st.just({"type": "string", **lengths})
        | st.just({"anyOf": [{"type": "integer"}, {"type": "string", **lengths}]})
    )
    return schema, value, draw(spelled(value))


@st.composite
def listed(draw: st.DrawFn) -> Case:
    """Draw a value of an enumeration, which has one spelling."""
    value = draw(words)
    schema = draw(
        st.sampled_from([{"const": value}, {"type": "string", "enum": ["other", value, "M\u00e1"]}])
    )
    return schema, value, spelled_shortly(value)


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[Case]) -> Case:
    schema, value, text = draw(items)
    size = draw(st.integers(1, 3))
    bounds = draw(st.sampled_from([{}, {"minItems": size}, {"minItems": 1, "maxItems": size}]))
    any_schema = draw(st.sampled_from([{}, {"type": "array", "items": schema, **bounds}]))
    return any_schema, [value] * size, f"[{', '.join([text] * size)}]"


@st.composite
def objects(draw: st.DrawFn, items: st.SearchStrategy[Case]) -> Case:
    """Draw an object with named keys, which have one spelling, and other keys, which have many."""
    named = draw(
        st.dictionaries(st.sampled_from(["a", "größe", 'q/"\\', "é\n"]), items, max_size=3)
    )
    others = draw(
        st.dictionaries(words.filter(lambda key: key not in named), spelled(""), max_size=2)
    )
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: part for key, (part, _, _) in named.items()},
        "required": [key for key in named if draw(st.booleans())],
        "additionalProperties": {"type": "string"} if others else draw(st.booleans()),
    }
    pairs = [f"{spelled_shortly(key)}: {text}" for key, (_, _, text) in named.items()]
    pairs += [f"{draw(spelled(key))}: {text}" for key, text in others.items()]
    value = {**{key: value for key, (_, value, _) in named.items()}, **dict.fromkeys(others, "")}
    return schema, value, f"{{{', '.join(pairs)}}}"


cases = st.recursive(
    strings() | listed(), lambda items: arrays(items) | objects(items), max_leaves=4
)


@pytest.fixture(scope="module")
def grammars(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Vocab, Grammars]]]:
    """Yield a compiler of grammars for each kind of vocabulary."""
    folder = tmp_path_factory.mktemp("spellings")
    opened = {name: VocabularyOnly(path) for name, path in files_of("learnt", folder).items()}
    yield {name: (model.vocab, Grammars(model.vocab)) for name, model in opened.items()}
    for model in opened.values():
        model.close()


@settings(max_examples=40)
@given(case=cases)
@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_of_a_valid_value_is_accepted(
    grammars: dict[str, tuple[Vocab, Grammars]], name: str, case: Case
) -> None:
    schema, value, text = case
    assert json.loads(text) == value
    jsonschema_rs.validate(schema, value)
    vocab, compiler = grammars[name]
    matcher = compiler.compile(Constraint("json_schema", json.dumps(schema)))
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    pieces = [vocab.piece(token, special=False) for token in tokens]
    if pieces[0].startswith(b" "):  # Such a tokenizer puts a blank before a text.
        first = vocab.tokenize_piece(b"\n" + text[:1].encode())
        tokens, pieces[0] = [first[-1], *tokens[1:]], text[:1].encode()
    accepted = matcher.count_valid(tokens)
    assert accepted == len(tokens), b"".join(pieces[:accepted])


MARK = "@@"
PROPERTIES: dict[str, dict[str, Any]] = {
    "plain": {"type": "string"},
    "in a list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
    "any": {"type": "object"},
}


@settings(max_examples=8)
@given(value=words, data=st.data())
@pytest.mark.parametrize("kind", PROPERTIES)
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_may_be_spelled_in_every_way_and_are_read_exactly(
    grammars: dict[str, tuple[Vocab, Grammars]],
    name: str,
    kind: str,
    value: str,
    data: st.DataObject,
) -> None:
    """Where a notation writes a string in JSON, any spelling of it is accepted, and read as what it says."""
    form, (vocab, _) = FORMATS[name], grammars["gpt-2"]
    call = write_call_of_mark(vocab, name, kind)
    if call is None:
        return
    text = call.replace(f'"{MARK}"', data.draw(spelled(value)))
    parameters = {"type": "object", "properties": {"x": PROPERTIES[kind]}, "required": ["x"]}
    tool_set = ToolSet(form, {"get": parameters}, required=True, parallel=False)
    matcher = make_matcher(vocab, tool_set, tail=end_of_prompt(form))
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    assert matcher.count_valid(tokens) == len(tokens), text
    [(called, arguments)], _ = read_calls(tool_set, text, end_of_prompt(form))
    expected = {"plain": value, "in a list": [value], "any": {value: value}}[kind]
    assert (called, json.loads(arguments)) == ("get", {"x": expected})


@cache
def write_call_of_mark(vocab: Vocab, name: str, kind: str) -> str | None:
    """Return a call whose argument has MARK as a string, or None where the notation writes no JSON."""
    part: dict[str, Any] = {"type": "string", "const": MARK}
    if kind == "in a list":
        part = {**PROPERTIES[kind], "items": part}
    elif kind == "any":
        part = {"type": "object", "properties": {MARK: part}, "required": [MARK]}
    parameters = {"type": "object", "properties": {"x": part}, "required": ["x"]}
    tool_set = ToolSet(FORMATS[name], {"get": parameters}, required=True, parallel=False)
    matcher = make_matcher(vocab, tool_set, tail=end_of_prompt(FORMATS[name]))
    text, _ = write_answer(vocab, matcher, random.Random(0))
    return text if f'"{MARK}"' in text.replace(f'"{MARK}":', "") else None


CONSTRAINED = [
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 5},
    {"type": "string", "pattern": "^[^x]*$"},
    {"type": "string", "pattern": "^.{1,6}$", "minLength": 2},
    {"type": "string", "format": "uri"},
    {"enum": ["M\u00e1laga", "\x1b[0m", 'a/"\\']},
    {"allOf": [{"type": "string"}, {"maxLength": 6}]},
    {"type": "object", "patternProperties": {"^.x": {"type": "string"}}},
    {"type": "object", "properties": {"é": {"const": 1}}, "additionalProperties": {"type": "null"}},
    {"type": "object"},
]


@settings(max_examples=50)
@given(schema=st.sampled_from(CONSTRAINED), seed=st.integers(0, 2**32))
def test_what_the_masks_let_through_is_valid(schema: Any, seed: int) -> None:
    """A walk that prefers escapes, and writes no character that could not be decoded."""
    rng, walk, data = random.Random(seed), make_byte_matcher(schema), bytearray()
    while len(data) < 300:
        bias = walk.compute_logit_bias()
        allowed = [token for token in range(257) if bias[token]]
        assert not set(allowed) & {*range(0x20), 0x7F}, "a raw control character"
        if 256 in allowed and len(allowed) == 1:
            break
        escapes = [token for token in allowed if token in b"\\uU/dDcC89aAbBfF0"]
        ends = [token for token in allowed if token in b'"}']
        drawn = rng.random()
        choice = escapes if drawn < 0.6 else ends if drawn < 0.75 else allowed
        token = rng.choice([t for t in choice if t < 256] or [t for t in allowed if t < 256])
        data.append(token)
        walk.consume_token(token)
    else:
        return  # A free object may never end.
    value = json.loads(data.decode())
    json.dumps(value, ensure_ascii=False).encode()  # Raises if a surrogate stands alone.
    jsonschema_rs.validate(schema, value)


@pytest.mark.parametrize("schema", CONSTRAINED)
def test_no_escape_is_begun_that_cannot_say_any_letter(schema: Any) -> None:
    """After `\\u` in a text, any letter's digits may follow; otherwise the letter itself must be written."""
    walk = make_byte_matcher(schema)
    start = b'"a' if walk.validate_tokens(list(b'"a')) == 2 else b'{"ax'
    if walk.validate_tokens(list(start + b"\\u")) == len(start) + 2:
        for digits in (b"00e1", b"4E1C", b"d83d\\ude00", b"001b"):
            text = start + b"\\u" + digits
            assert walk.validate_tokens(list(text)) == len(text)
