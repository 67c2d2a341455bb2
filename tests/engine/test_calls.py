"""Tool calls obey the schemas of their tools, wherever they begin and however they are tokenized."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jsonschema_rs
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from benchmarks.synthetic import vocabulary as synthetic_vocabulary
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
from localspec.chat.reader import AnswerReader
from localspec.chat.tools import control_tokens
from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, Logits, Vocab
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.engine.sampling.grammars.sources import GrammarTokens, json_rule
from localspec.engine.sampling.guide import CombinedGuide, Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings, resolve_settings
from localspec.engine.sampling.thoughts import ThoughtLimit, ThoughtMarker
from localspec.engine.speculation import verification
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.verification import Verifier, residual
from localspec.errors import GrammarRejected
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    OPTION_PLACEHOLDER,
    TYPE_PLACEHOLDER,
    UNKNOWN_FORMAT,
    CallFormat,
    ToolSet,
)
from localspec.protocol.dialect import REASONING_MARKERS
from localspec.protocol.frames import (
    ChatPrompt,
    Constraint,
    Generate,
    PairFiles,
    Sampling,
    TextPrompt,
)
from localspec.protocol.pieces import Arguments, Call, Text
from tests.support import templates
from tests.support.exploration import SEED, count_examples
from tests.support.pairs import N_VOCAB, contextual_pair
from tests.support.random_calls import RandomCalls
from tests.support.rescoring import NEAR_TIE, assert_alike, worst_gap
from tests.support.running import GREEDY, PLAIN, Running, drafting, running
from tests.support.statistics import chi_square_z
from tests.support.vocabularies import CONTROL, VocabularyOnly, vocabulary, with_tokens
from tests.support.written_calls import carried_pieces, learn, write_calls

# Of the random answers of each format.
SEEDS = range(SEED, SEED + count_examples(1, "LOCALSPEC_TEST_CALLS"))
FORMATS = {
    "hermes": HERMES,
    "tags": TAGS,
    "llama": LLAMA,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "named": MISTRAL_ARGS,
    "gemma": GEMMA,
    "functionary": FUNCTIONARY,
    "functionary 3.2": FUNCTIONARY_3_2,
    "nemotron": NEMOTRON,
    "lfm2": LFM2,
    "minimax m3": MINIMAX_M3,
    "kimi k2": KIMI_K2,
    "kimi k3": KIMI_K3,
    "harmony": HARMONY,
    "muse": MUSE,
    "command r": COMMAND_R,
    "deepseek r1": DEEPSEEK_R1,
    "seen JSON": CallFormat(
        "found",
        ("<|calls|>",),
        "}\n]<|end_calls|>",
        lead=f'[\n{{"id": "{CALL_ID_PLACEHOLDER}", "called": "',
        middle='", "with": ',
        again=f'}},\n{{"id": "{CALL_ID_PLACEHOLDER}", "called": "',
    ),
    "seen keys": CallFormat(
        "found",
        ("<tool_call>",),
        "</tool_call>",
        again="</tool_call>\n<tool_call>",
        middle="\n",
        parameter=("<key>", "</key>\n<value>", "</key>\n<value>", "</value>\n"),
    ),
    "seen kinds": CallFormat(
        "found",
        ("<calls>",),
        "</call>\n</calls>",
        lead='\n<call name="',
        middle='">\n',
        again='</call>\n<call name="',
        parameter=('<arg name="', '" text="yes">', '" text="no">', "</arg>\n"),
    ),
}
# Tokens that hold the end or the beginning of a marker, in GPT-2's spelling.
WORDS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "_call>Ċ", "_call>x", '_call>{"', "</think>",
    "think>Ċ", "think>y", '{"', '{"name', '":', '","', '"}', '}}', "}ĊĊ", ">Ċ", "><", "<function=",
    "</parameter>", "parameter", "name", "arguments", "[TOOL", "_CALLS]", "_CALLS][{", "[ARGS]{",
    "call:", "<tool_call|>", "<|tool", "python_tag|>{", ">x", "Ġ{", "Ċ{", "Ċ</", "true", "null",
]  # fmt: skip


def build_vocabulary() -> list[str]:
    tokens = synthetic_vocabulary(N_VOCAB)
    return [*tokens[:256], *WORDS, *tokens[256 + len(WORDS) :]]


@pytest.fixture(scope="module")
def caller_files(models: Path) -> PairFiles:
    return contextual_pair(models / "caller", tokens=build_vocabulary())


@pytest.fixture(scope="module")
def caller(caller_files: PairFiles) -> Iterator[Running]:
    with running(caller_files) as engine:
        yield engine


def draw_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    text: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "string", "enum": rng.sample(["a", "b c", "</tool>", '"', "é\n", "5"], 2)},
        {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{1,3}$", "^x", "^\\d{2}-[^/]$"]),
            "maxLength": 5,
        },
    ]
    plain: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 3, "maximum": rng.randint(3, 700)},
        {"type": "boolean"},
        {"type": "number", "minimum": 0, "maximum": 9},
        {"type": ["integer", "null"]},
        {"type": ["string", "null"], "maxLength": 4},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]},
        {"enum": [1, "1", None, "two"]},
        {"const": rng.choice([7, "seven", False])},
        {"$ref": "#/$defs/Part"},
    ]
    deep = (
        [
            {"type": "array", "items": draw_schema(rng, depth + 1), "minItems": 1, "maxItems": 2},
            _draw_object(rng, depth + 1),
        ]
        if depth < 2
        else []
    )
    return rng.choice(rng.choice([text, plain, deep or plain]))


def _draw_object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(["a", "b", "name", "arguments", "x_1", "odd key", "Straße"][: 5 + depth], 3)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: draw_schema(rng, depth) for key in keys},
        "required": rng.sample(keys, rng.randint(0, 3)),
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, True])
    return schema


def draw_tool(rng: random.Random) -> dict[str, Any]:
    part = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}}
    return {**_draw_object(rng, 0), "$defs": {"Part": part}}


def draw_tools(rng: random.Random) -> dict[str, Any]:
    schemas = {name: draw_tool(rng) for name in ("get", "get_all")}
    return {**schemas, "now": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    """Return a vocabulary in which every marker of every format is a control token."""
    markers = [m for form in FORMATS.values() for m in control_tokens(form)]
    # Without these two, llama.cpp takes <|end|> for the end of an answer, as it always takes <|calls|>.
    tokens = dict.fromkeys([*markers, "<|call|>", "<|return|>"], CONTROL)
    del tokens["<|calls|>"]
    file = with_tokens(vocabulary("gpt-2"), tokens)
    loaded = VocabularyOnly(file.write(tmp_path_factory.mktemp("marked") / "vocabulary.gguf"))
    atexit.register(loaded.close)
    return loaded.vocab


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects are closed by default, as the product closes them."""
    closed = {k: close_schema(v) if isinstance(v, dict) else v for k, v in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def make_matcher(
    vocab: Vocab, tool_set: ToolSet | None, constraint: Any = None, tail: str = ""
) -> Guide:
    request = Generate(
        1, TextPrompt("x"), tools=tool_set, constraint=constraint, thoughts=list(REASONING_MARKERS)
    )
    shown = frozenset(vocab.special_tokens).difference(vocab.ends)
    matcher, note = GRAMMARS.setdefault(id(vocab), Grammars(vocab)).answer(request, tail, shown)
    assert matcher is not None
    assert not note
    return matcher


GRAMMARS: dict[int, Grammars] = {}


class Pieces(NamedTuple):
    """The text of each token of a vocabulary, which of them end an answer, and which end a part of it."""

    texts: list[bytes]
    ends: npt.NDArray[np.bool_]
    closing: npt.NDArray[np.bool_]


@functools.cache
def get_pieces(vocab: Vocab) -> Pieces:
    texts = [vocab.piece(token, special=True) for token in range(vocab.size)]
    ends = np.array([vocab.is_eog(token) for token in range(vocab.size)])
    closing = np.array([text[:1] in (b'"', b"}", b"]", b"<", b"\n", b",") for text in texts])
    return Pieces(texts, ends, closing)


def write_answer(
    vocab: Vocab, matcher: Guide, rng: random.Random, beginning: str = "", most: int = 1500
) -> tuple[str, bool]:
    """Return the text of a random model that ends what it can, and whether it ended.

    The text begins with `begun`, spelled in any tokens that the grammar accepts.
    """
    text, pieces = b"", get_pieces(vocab)
    while len(text) < most:
        mask = matcher.mask()
        allowed = np.arange(vocab.size) if mask is None else np.flatnonzero(mask)
        rest = beginning.encode()[len(text) :]
        if rest:
            usable = allowed[~pieces.ends[allowed]].tolist()
            allowed = np.array([t for t in usable if _begins(pieces.texts[t], rest)])
        elif mask is None or (pieces.ends[allowed].any() and rng.random() < 0.6):
            break
        closing = allowed[pieces.closing[allowed]]
        usual = closing if len(closing) and rng.random() < 0.3 else allowed
        token = int(usual[rng.randrange(len(usual))])
        if pieces.ends[token]:
            break
        if rng.random() < 0.2:  # a round that is rolled back
            forced = [*matcher.forced_tokens()[:2], token]
            count = matcher.count_valid(forced)
            for forced_token in forced[:count]:
                matcher.consume(forced_token)
            matcher.take_back(count)
        matcher.consume(token)
        text += pieces.texts[token]
    return text.decode("utf-8", "replace"), len(text) < most


def _begins(piece: bytes, rest: bytes) -> bool:
    return bool(piece) and (rest.startswith(piece) or piece.startswith(rest))


def read_calls(tool_set: ToolSet, text: str, tail: str = "") -> tuple[list[tuple[str, str]], str]:
    """Return the calls in an answer, and its text."""
    parser = AnswerReader(tool_set.format, tool_set.schemas, parallel=tool_set.parallel, tail=tail)
    pieces = parser.feed(text[: len(text) // 2])
    pieces += parser.feed(text[len(text) // 2 :])
    pieces += parser.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            name, arguments = calls[piece.index]
            calls[piece.index] = name, arguments + piece.text
    return calls, "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == "content")


def parse_finite(text: str) -> float:
    return max(min(float(text), 1e300), -1e300)


def validate_calls(tool_set: ToolSet, calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        value = json.loads(arguments, parse_float=parse_finite)  # numbers in JSON are unbounded
        jsonschema_rs.validate(close_schema(tool_set.schemas[name]), value)


BEGINNINGS = ["", "Let me see.\n", "<think>a <tool_call> or</think>\n", "1 < 2 <tool ", "<<tool<"]
# Beginnings of answers up to the marker of a call, for formats with messages or sections.
MESSAGES = {
    "harmony": [
        HARMONY.opens[0],
        " to=functions.",  # the prompt has the beginning of the marker
        f"<|channel|>analysis<|message|>So.<|end|>{HARMONY.opens[2]}",
        f"<|channel|>commentary<|message|>Well.<|end|><|start|>assistant{HARMONY.opens[1]}",
    ],
    "muse": [
        f" to=get<|message|>{MUSE.opens[0]}",
        f" to=self<|message|>So.<|eom|><|start|>assistant to=now<|message|>{MUSE.opens[0]}",
    ],
    "functionary 3.2": ["get\n", "all\n>>> a > 1\n>>>now\n", "all\n1 >> 2>>>get_all\n"],
    "kimi k3": [f"Well.<|close|>response<|sep|>{KIMI_K3.opens[0]}"],
}


def end_of_prompt(call_format: CallFormat) -> str:
    """Return the end of a prompt after which a model with this format answers."""
    ends = {KIMI_K3: "<|open|>response<|sep|>", FUNCTIONARY_3_2: ">>>"}
    return ends.get(call_format, "<|start|>assistant" if call_format.thoughts else "")


@pytest.mark.explore
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_call_obeys_the_schema_of_its_tool(caller: Running, name: str, seed: int) -> None:
    rng, vocab, call_format = random.Random(f"{name}{seed}"), caller.pair.vocab, FORMATS[name]
    tool_set = ToolSet(call_format, draw_tools(rng), parallel=rng.random() < 0.7)
    texts = BEGINNINGS if call_format is HERMES else BEGINNINGS[:2]
    beginning = rng.choice(MESSAGES.get(name) or [text + call_format.opens[0] for text in texts])
    tail = end_of_prompt(call_format)
    for _ in range(3):
        text, ended = write_answer(vocab, make_matcher(vocab, tool_set, tail=tail), rng, beginning)
        calls, _ = read_calls(tool_set, text, tail)
        if ended:
            assert calls, text
            validate_calls(tool_set, calls)
        else:
            validate_calls(tool_set, calls[:-1])


@pytest.mark.explore
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMATS)
def test_required_call_gives_an_answer_of_calls_only(caller: Running, name: str, seed: int) -> None:
    rng, vocab = random.Random(f"{name}{seed}"), caller.pair.vocab
    tool_set = ToolSet(FORMATS[name], draw_tools(rng), required=True, parallel=rng.random() < 0.5)
    end = end_of_prompt(tool_set.format)
    for tail in (end, end or "<think>\n"):
        beginning = "so</think>\n" if tail == "<think>\n" else ""
        if tool_set.format.thoughts and rng.random() < 0.5:
            beginning = "So.".join(tool_set.format.thoughts)
        text, ended = write_answer(vocab, make_matcher(vocab, tool_set, tail=tail), rng, beginning)
        calls, content = read_calls(tool_set, text, tail)
        assert not ended or not content.strip()
        validate_calls(tool_set, calls if ended else calls[:-1])
        if not tool_set.parallel and (calls or ended):
            assert len(calls) == 1
        for call, arguments in calls:
            value = json.loads(arguments) if ended else {}
            if ended and FORMATS[name] is HERMES:
                compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                assert len(arguments) <= len(compact.encode()) + 30, (call, arguments)


@pytest.mark.explore
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMATS)
def test_markers_may_be_control_tokens(marked: Vocab, name: str, seed: int) -> None:
    rng, tool_format = random.Random(f"{name}{seed}"), FORMATS[name]
    tail = end_of_prompt(tool_format)
    for required in (False, True):
        is_parallel = rng.random() < 0.5
        tool_set = ToolSet(tool_format, draw_tools(rng), required=required, parallel=is_parallel)
        beginning = rng.choice(MESSAGES.get(name) or [tool_format.opens[0]])
        matcher = make_matcher(marked, tool_set, tail=tail)
        text, ended = write_answer(marked, matcher, rng, "" if required else beginning)
        calls, content = read_calls(tool_set, text, tail)
        assert not ended or calls, text
        assert not ended or not required or not content.strip(), text
        validate_calls(tool_set, calls if ended else calls[:-1])


@pytest.mark.parametrize("name", FORMATS)
def test_answer_is_a_call_or_follows_the_response_format(caller: Running, name: str) -> None:
    rng, vocab = random.Random(name), caller.pair.vocab
    response_schema = {
        "type": "object",
        "properties": {"z": {"type": "integer"}},
        "required": ["z"],
    }
    constraint = Constraint("json_schema", json.dumps(response_schema))
    outcomes = set[bool]()
    for at in range(12):
        if len(outcomes) == 2:
            break
        tool_set = ToolSet(FORMATS[name], draw_tools(rng))
        beginning, tail = ['{"z', ""][at % 2], end_of_prompt(tool_set.format)
        beginning = tool_set.format.answer + beginning if beginning else ""
        matcher = make_matcher(vocab, tool_set, constraint, tail)
        text, ended = write_answer(vocab, matcher, rng, beginning)
        if not ended:
            continue
        calls, content = read_calls(tool_set, text, tail)
        outcomes.add(bool(calls))
        validate_calls(tool_set, calls)
        if calls:
            assert not content.strip()
        else:
            jsonschema_rs.validate(close_schema(response_schema), json.loads(content))
    assert outcomes == {True, False}


def test_structured_output_follows_thoughts_that_the_prompt_has_opened(caller: Running) -> None:
    rng, vocab = random.Random(1), caller.pair.vocab
    matcher = make_matcher(vocab, None, Constraint("regex", "[ab]{3}"), "assistant\n<think>\n")
    text, ended = write_answer(vocab, matcher, rng, "I think, <b>ab</think>\n")
    assert ended
    assert text.rpartition("</think>")[2].strip("\n") in [
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    ]


@pytest.mark.parametrize("name", ["harmony", "muse"])
def test_structured_output_stands_in_the_message_to_the_user(caller: Running, name: str) -> None:
    rng, vocab, form = random.Random(1), caller.pair.vocab, FORMATS[name]
    constraint = Constraint("regex", "[ab]{3}")
    request = Generate(1, ChatPrompt([]), constraint=constraint)
    shown = frozenset(vocab.special_tokens).difference(vocab.ends)
    for thoughts in ("", f"{form.thoughts[0]}I think{form.thoughts[1]}"):
        matcher, note = Grammars(vocab).answer(request, MESSAGE_START, shown, form=form)
        assert matcher is not None
        assert not note
        text, ended = write_answer(vocab, matcher, rng, f"{thoughts}{form.answer}")
        assert ended
        pieces = AnswerReader(tail=MESSAGE_START).finish(text)
        assert {piece.kind for piece in pieces if isinstance(piece, Text)} == {
            "content",
            *(["reasoning"] if thoughts else []),
        }
        assert re.fullmatch("(I think)?[ab]{3}", "".join(getattr(p, "text", "") for p in pieces))


TEMPLATE_CALLS = {
    "seen JSON": '<|calls|>[\n{"id": "0", "called": "note", "with": {"text": "a b", "n": 7}},\n'
    '{"id": "1", "called": "note", "with": {"text": "", "n": 8}}\n]<|end_calls|>',
    "seen keys": "<tool_call>note\n<key>text</key>\n<value>a b</value>\n<key>n</key>\n<value>7</value>\n"
    "</tool_call>\n<tool_call>note\n<key>text</key>\n<value></value>\n<key>n</key>\n<value>8</value>\n"
    "</tool_call>",
    "seen kinds": '<calls>\n<call name="note">\n<arg name="text" text="yes">a b</arg>\n'
    '<arg name="n" text="no">7</arg>\n</call>\n<call name="note">\n<arg name="text" text="yes"></arg>\n'
    '<arg name="n" text="no">8</arg>\n</call>\n</calls>',
}


@pytest.mark.parametrize("name", TEMPLATE_CALLS)
def test_detected_format_accepts_what_its_template_writes(caller: Running, name: str) -> None:
    parameters = {"text": {"type": "string"}, "n": {"type": "integer", "maximum": 8}}
    note = {"type": "object", "properties": parameters, "required": ["text", "n"]}
    tool_set, text, vocab = (
        ToolSet(FORMATS[name], {"note": note}),
        TEMPLATE_CALLS[name],
        caller.pair.vocab,
    )

    def count_rejected(text: str) -> int:
        tokens = vocab.tokenize(text, add_special=False, parse_special=False)
        return len(tokens) - make_matcher(vocab, tool_set).count_valid(tokens)

    assert count_rejected(text) == 0
    assert count_rejected(text.replace("7", "9")) > 0
    assert count_rejected(text.replace("text", "tex", 1)) > 0
    assert [json.loads(arguments) for _, arguments in read_calls(tool_set, text)[0]] == [
        {"text": "a b", "n": 7},
        {"text": "", "n": 8},
    ]


NUMBERS = [0, 7, -1, 2**31, 0.5, 12345.678]
WRITTEN = [name for name in templates.files() if not learn(name).calls.told]


@pytest.mark.explore
@pytest.mark.parametrize("name", WRITTEN)
def test_grammar_accepts_what_templates_write(caller: Running, name: str) -> None:
    """The grammar must not lead a model away from the notation that its earlier calls are shown in."""
    form, vocab = learn(name).calls, caller.pair.vocab
    pieces = [piece for piece in carried_pieces(form) if piece not in ("null", "True", "7", "\x7f")]
    for seed in range(SEED, SEED + 2 * len(SEEDS)):
        source = RandomCalls(random.Random(seed), pieces, nulls=not form.elements, numbers=NUMBERS)
        # The lists and objects in calls of LFM2 are in Python's notation or JSON; the grammar has JSON alone.
        depth = 3 if form.kind == "python" else 0
        schemas = {tool: source.parameters(depth) for tool in ("get", "files.read-now")}
        called = source.rng.choice(list(schemas))
        arguments = source.arguments(schemas[called])
        text = write_calls(name, [(called, arguments)], schemas)
        start = (
            0 if form.bare or form.thoughts else min(text.find(m) for m in form.opens if m in text)
        )
        tokens = vocab.tokenize(text[start:], add_special=False, parse_special=False)
        tail = text[:start] or end_of_prompt(form)
        tool_set = ToolSet(form, schemas, parallel=False)
        count = make_matcher(vocab, tool_set, tail=tail).count_valid(tokens)
        accepted = b"".join(map(vocab.piece, tokens[:count])).decode("utf-8", "replace")
        calls, _ = read_calls(tool_set, accepted, tail)
        assert [(tool, json.loads(text)) for tool, text in calls] == [(called, arguments)], text


OPTIONAL = {
    "type": "object",
    "properties": {
        "day": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "größe": {"type": ["string", "number"]},
        "id": {"type": "integer"},
        "last": {"type": ["boolean", "null"]},
    },
}
# A nullable string that begins like a number, an id of 19 digits, a key that is not ASCII, and a constant.
OPTIONAL_ARGUMENTS = {"day": "2026-05-01", "größe": "7 m", "id": 1234567890123456789, "last": None}


def is_tagged(form: CallFormat) -> bool:
    """Return whether the arguments are not JSON."""
    return bool(form.parameter or form.elements) or form.kind in ("gemma", "python")


def count_accepted(vocab: Vocab, tool_set: ToolSet, text: str) -> tuple[int, int]:
    """Return how many tokens of an answer its grammar accepts, and how many there are."""
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    matcher = make_matcher(vocab, tool_set, tail=end_of_prompt(tool_set.format))
    return matcher.count_valid(tokens), len(tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_of_several_types_are_written_in_the_notation(caller: Running, name: str) -> None:
    form = FORMATS[name]
    tool_set = ToolSet(form, {"get": OPTIONAL}, required=True, parallel=False)
    if is_tagged(form):
        text = write_call(form, OPTIONAL_ARGUMENTS)
        count, size = count_accepted(caller.pair.vocab, tool_set, text)
        assert count == size, text
        [(called, arguments)], _ = read_calls(tool_set, text, end_of_prompt(form))
        assert (called, json.loads(arguments)) == ("get", OPTIONAL_ARGUMENTS)


ORDERED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer", "maximum": 99},
        "last": {"type": "boolean"},
        "tag": {"type": "string"},
    },
    "required": ["path", "last"],
}
ORDERED_VALUES: dict[str, Any] = {"path": "a b", "n": 7, "last": True, "tag": "x"}


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_in_any_order_with_all_that_are_required(caller: Running, name: str) -> None:
    form, vocab = FORMATS[name], caller.pair.vocab
    tool_set = ToolSet(form, {"get": ORDERED}, required=True, parallel=False)
    for size in range(2, 5):
        for keys in itertools.permutations(ORDERED_VALUES, size):
            arguments = {key: ORDERED_VALUES[key] for key in keys}
            text = write_call(form, arguments)
            is_valid = {"path", "last"} <= arguments.keys()
            count, n_tokens = count_accepted(vocab, tool_set, text)
            assert (count == n_tokens) == is_valid, text
            if is_valid:
                assert [*json.loads(read_calls(tool_set, text, end_of_prompt(form))[0][0][1])] == [
                    *keys
                ]
    twice = write_call(form, ORDERED_VALUES).replace("tag", "path")
    count, n_tokens = count_accepted(vocab, tool_set, twice)
    assert count < n_tokens, twice


def test_order_and_count_of_many_arguments() -> None:
    """A rule's parameter has 64 bits; more keys come in the schema's order."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {f"k{at}": {"type": "integer", "maximum": 9} for at in range(65)},
        "required": ["k0", "k1"],
        "additionalProperties": {"type": "boolean"},
    }
    tokenizer = LLTokenizer("byte")

    def is_accepted(keys: Sequence[str], n_keys: int) -> bool:
        properties = {key: schema["properties"][key] for key in [*schema["properties"]][:n_keys]}
        source = f"start: {json_rule({**schema, 'properties': properties})}"
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(source))
        assert not matcher.get_error()
        arguments = {key: 1 if key.startswith("k") else True for key in keys}
        text = json.dumps(arguments, separators=(",", ":")).encode()
        return matcher.try_consume_tokens(list(text)) == len(text)

    keys = [*schema["properties"]]
    for n_keys in (2, 3, 63, 64):
        reverse = keys[:n_keys][::-1]
        assert is_accepted(reverse, n_keys)
        assert is_accepted(["o1", "o2", *reverse], n_keys)
        assert is_accepted([*reverse[:1], "o1", "o2", *reverse[1:], "o3", "o4"], n_keys)
        assert not is_accepted(keys[1:n_keys], n_keys)
        assert not is_accepted(["o1", *keys[1:n_keys], "o2"], n_keys)
    assert is_accepted([*keys, "o1", "o2"], 65)
    assert not is_accepted(keys[::-1], 65)


def write_call(form: CallFormat, arguments: dict[str, Any]) -> str:
    """Return an answer that calls "get" with these arguments."""
    entries = list(arguments.items())
    match form.kind:
        case "gemma":
            quoted = [
                f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{plain(v)}"
                for k, v in entries
            ]
            return f"<|tool_call>call:get{{{','.join(quoted)}}}<tool_call|>"
        case "python":
            values = ", ".join(
                f"{k}={v!r}" if v is None else f"{k}={plain(v, quote=True)}" for k, v in entries
            )
            return f"{form.opens[0]}[get({values})]{form.close}"
        case "hermes" | "json" | "mistral":
            call = json.dumps(
                {"name": "get", form.arguments: arguments},
                separators=(",", ":"),
                ensure_ascii=False,
            )
            call = call if form.bare or form.kind == "hermes" else f"[{call}]"
            return call if form.bare else f"{form.opens[0]}{form.lead}{call}{form.lead}{form.close}"
    head = form.head.replace(CALL_ID_PLACEHOLDER, "get")
    middle = form.middle.replace(CALL_ID_PLACEHOLDER, "1").replace(OPTION_PLACEHOLDER, "")
    opening = (
        "" if form.recipient else f"{form.opens[0]}{form.lead}".replace(CALL_ID_PLACEHOLDER, "1")
    )
    mark = form.elements
    if mark:
        values = "".join(f"{mark}<{k}>{plain(v)}{mark}</{k}>" for k, v in entries)
    elif form.parameter:
        before_key, text, other, close = form.parameter
        kinds = {str: "string", bool: "boolean", int: "number", type(None): "null"}
        values = "".join(
            f"{before_key}{k}{other.replace(TYPE_PLACEHOLDER, kinds[type(v)])}{plain(v)}{close}"
            if not isinstance(v, str)
            else f"{before_key}{k}{text}{v}{close}"
            for k, v in entries
        )
    else:
        values = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    return f"{head}{opening}get{middle}{values}{form.close}"


def plain(value: Any, *, quote: bool = False) -> str:
    """Return a value as it stands between tags."""
    if isinstance(value, str) and not quote:
        return value
    return "None" if value is None else json.dumps(value)


def test_end_token_is_left_out_of_the_call_grammar() -> None:
    special = GrammarTokens({"<|call|>": 0, "<|calls|>": 1}, ends=[1])
    assert special.lark_expression("}<|call|>\n<|calls|>") == '"}" <[0]> "\\n"'


def test_unsupported_schema_is_reported_or_refused(caller: Running) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    fine = {"type": "object", "properties": {"y": {"const": 1}}, "required": ["y"]}
    tool_set = ToolSet(HERMES, {"odd": odd, "fine": fine})
    request = Generate(1, TextPrompt("x"), tools=tool_set)
    matcher, note = Grammars(caller.pair.vocab).answer(request, "", frozenset())
    assert matcher is not None
    assert "'odd'" in note
    assert "fine" not in note
    request.tools = ToolSet(HERMES, {"odd": odd, "fine": fine}, strict=["odd"])
    with pytest.raises(GrammarRejected, match="tool 'odd'"):
        Grammars(caller.pair.vocab).answer(request, "", frozenset())


SMALL = {
    "get": {
        "type": "object",
        "properties": {"n": {"enum": [1, 22, 333]}, "t": {"type": "string", "maxLength": 2}},
        "required": ["n", "t"],
    },
    "now": {"type": "object", "properties": {}},
}
OFFERED = ToolSet(HERMES, SMALL)


def make_sampling(vocab: Vocab, temperature: float = 1.0, **more: Any) -> Sampling:
    """Return sampling settings that make markers and ends of text likely."""
    likely = ["<tool_call>", "_call>", "<tool", "_call>Ċ", "_call>x", '_call>{"']
    bias = {256 + WORDS.index(word): 9.0 for word in likely}
    quote = vocab.tokenize('"', add_special=False, parse_special=False)[0]
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **more}
    return Sampling(temperature=temperature, logit_bias=bias | {quote: 9.0}, **options)


SAMPLING_OPTIONS: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {}]


def written_text(running: Running, tokens: list[int]) -> str:
    """Return all that a model has written, with its calls."""
    return b"".join(map(running.pair.vocab.piece, tokens)).decode("utf-8", "replace")


@pytest.mark.parametrize("options", SAMPLING_OPTIONS)
@pytest.mark.parametrize(
    "speculative", [PLAIN, drafting(4, verification="rejection"), drafting(None, "auto")]
)
def test_calls_of_an_answer_obey_with_drafts_and_without(
    caller: Running, options: Any, speculative: Any
) -> None:
    sampling = make_sampling(caller.pair.vocab, **options)
    requests = [
        caller.start(
            f"p{at}", 120, sampling, speculative, tools=OFFERED, thoughts=list(REASONING_MARKERS)
        )
        for at in range(3)
    ]
    caller.finish()
    call_count = 0
    for request in requests:
        text = written_text(caller, caller.answers[request].tokens)
        calls, _ = read_calls(OFFERED, text)
        if text.rfind("<tool_call>") > text.rfind("</tool_call>"):  # the call was cut off
            calls = calls[:-1]
        validate_calls(OFFERED, calls)
        call_count += len(calls)
    assert call_count


@pytest.mark.parametrize("options", SAMPLING_OPTIONS[:2])
def test_drafts_do_not_change_an_answer_with_calls(caller: Running, options: Any) -> None:
    pair, sampling = caller.pair, make_sampling(caller.pair.vocab, **options)
    prompt = pair.vocab.tokenize("a", add_special=True, parse_special=True)
    more: dict[str, Any] = {"tools": OFFERED, "thoughts": list(REASONING_MARKERS)}
    caller.forget()
    plain = caller.ask("a", 80, sampling, **more)
    assert read_calls(OFFERED, written_text(caller, plain.tokens))[0]
    for depth in (1, 3, 8, None):
        caller.forget()
        drafted = caller.ask("a", 80, sampling, drafting(depth, "auto"), **more)
        assert_alike(
            pair.files.target,
            prompt,
            drafted.tokens,
            plain.tokens,
            Sampler(resolve_settings(sampling, pair.defaults)),
            lambda: make_matcher(pair.vocab, OFFERED),
        )


def test_request_without_tools_is_unaffected(caller: Running) -> None:
    caller.forget()
    alone = caller.ask("bystander", 40).tokens
    caller.forget()
    sampling = make_sampling(caller.pair.vocab)
    caller.start("p", 60, sampling, drafting(4, "auto"), tools=OFFERED)
    request = caller.start("bystander", 40)
    caller.start("q", 60, sampling, drafting(4, verification="rejection"), tools=OFFERED)
    caller.finish()
    tokens = caller.answers[request].tokens
    prompt = caller.pair.vocab.tokenize("bystander", add_special=True, parse_special=True)
    if tokens != alone:
        assert worst_gap(caller.pair.files.target, prompt, tokens) < NEAR_TIE


def test_forced_parts_of_a_call_are_drafted_by_the_grammar(caller: Running) -> None:
    long = {"a_rather_long_key_that_costs_many_tokens": {"const": "and a value as long as that"}}
    schema = {"type": "object", "properties": long, "required": list(long)}
    tool_set = ToolSet(HERMES, {"only": schema}, required=True, parallel=False)
    answer = caller.ask("x", 200, GREEDY, drafting(8), tools=tool_set)
    speculation = answer.done.speculation
    assert read_calls(tool_set, answer.text)[0][0][0] == "only"
    assert answer.done.finish_reason == "stop"
    assert speculation.kind == "grammar"
    assert speculation.accepted == speculation.drafted > 60
    assert speculation.rounds < 40


@pytest.mark.parametrize("name", FORMATS)
def test_engine_writes_a_required_call_in_every_notation(caller: Running, name: str) -> None:
    form = FORMATS[name]
    if form.thoughts:  # thoughts of this model would not end
        form = msgspec.structs.replace(form, thoughts=())
    tool_set = ToolSet(form, {"get": SMALL["get"]}, required=True, parallel=False)
    answer = caller.ask("x", 400, GREEDY, drafting(8, "auto"), tools=tool_set)
    assert answer.done.finish_reason == "stop"
    calls, content = read_calls(
        msgspec.structs.replace(tool_set, format=FORMATS[name]),
        answer.text,
        end_of_prompt(FORMATS[name]),
    )
    assert not content.strip()
    assert [called for called, _ in calls] == ["get"]
    validate_calls(tool_set, calls)


# Probabilities of the first token, and of the token after a "b", by the target and by the draft.
TARGET = {"b": 0.9, "c": 0.1}, {"c": 0.45, "d": 0.25, "e": 0.1, "f": 0.2}
DRAFT = {"b": 0.9, "f": 0.1}, {"c": 0.05, "d": 0.15, "e": 0.4, "f": 0.4}


class FakeContext:
    """A stand-in for a context whose last pass has these rows."""

    def __init__(self, rows: Sequence[Logits]) -> None:
        self._rows = rows

    def finite_logits(self, row: int) -> Logits:
        return self._rows[row]


def measure_excess_behind_marker(vocab: Vocab, dropped: bool) -> float:
    """Return how far tokens after a "b", where "f" is forbidden, are from the target's distribution.

    Both tokens are drafted in one round. If `dropped`, forbidden drafts are left out instead of rejected.
    """
    token = {x: vocab.tokenize(x, add_special=False, parse_special=False)[0] for x in "bcdef"}

    def make_row(odds: dict[str, float]) -> Logits:
        row_logits: Logits = np.full(vocab.size, -np.inf, dtype=np.float32)
        for text, odd in odds.items():
            row_logits[token[text]] = np.log(odd)
        return row_logits

    sampler = Sampler(Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5))
    any_object: dict[str, Any] = {"type": "object"}
    tool_set = ToolSet(CallFormat("named", ("b",), middle="g"), dict.fromkeys("cde", any_object))
    target, after_draft = (
        FakeContext([*map(make_row, TARGET), make_row({"b": 1.0})]),
        list(map(make_row, DRAFT)),
    )
    drawn, probs = [], [sampler.distribution(logits) for logits in after_draft]
    for _ in range(2500):
        tokens = [distribution.pick(sampler.uniform()) for distribution in probs]
        matcher = make_matcher(vocab, tool_set)
        drafts = DraftRequest(cast(Slot, None), 2, tokens=tokens, buckets=[0, 0], probs=[*probs])
        if dropped:
            drafts.cut(matcher.count_valid(tokens))
        verifier = Verifier(sampler, matcher, reject=True)
        accepted = verifier.verify(cast(Context, target), 0, [0], drafts)
        if accepted[0] == token["b"] and len(accepted) > 1:
            drawn.append(accepted[1])
    total = sum(odd for text, odd in TARGET[1].items() if text != "f")
    probabilities = {token[text]: odd / total for text, odd in TARGET[1].items() if text != "f"}
    return chi_square_z((drawn, probabilities))


def test_rejection_keeps_the_distribution_behind_a_marker_that_a_draft_completes(
    caller: Running,
) -> None:
    assert measure_excess_behind_marker(caller.pair.vocab, dropped=False) < 4.5


@pytest.mark.parametrize("mistake", ["no residual", "dropped"])
def test_distribution_test_finds_a_wrong_rule(
    caller: Running, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "no residual":
        monkeypatch.setattr(
            verification, "residual", lambda p, q, weight: (p, residual(p, q, weight)[1])
        )
    assert measure_excess_behind_marker(caller.pair.vocab, dropped=mistake == "dropped") > 8


def test_unknown_call_format_is_unconstrained_with_a_note(
    caller: Running,
) -> None:
    grammars = Grammars(caller.pair.vocab)
    request = Generate(1, TextPrompt("x"), tools=ToolSet(UNKNOWN_FORMAT, SMALL))
    matcher, note = grammars.answer(request, "", frozenset())
    assert matcher is None
    assert "not constrained" in note
    request.constraint = Constraint("regex", "a")
    assert grammars.answer(request, "", frozenset())[0] is not None


def test_required_call_follows_thoughts_that_reach_their_limit(
    caller: Running,
) -> None:
    rng, vocab = random.Random(5), caller.pair.vocab
    tool_set = ToolSet(HERMES, SMALL, required=True, parallel=False)
    tail = "assistant\n<think>\n"
    closing = vocab.tokenize("</think>", add_special=False, parse_special=True)
    marker = ThoughtMarker("<think>", "</think>", closing)
    for limit in (0, 3, 20):
        thoughts = ThoughtLimit(limit, [marker], tail, vocab.piece, vocab.size)
        guide = CombinedGuide(thoughts, make_matcher(vocab, tool_set, tail=tail))
        output = b""
        for _ in range(400):
            mask = guide.mask()
            forced = guide.forced_tokens()
            allowed = range(vocab.size - 8) if mask is None else np.flatnonzero(mask).tolist()
            assert not forced or forced[0] in allowed
            assert guide.count_valid(forced) == len(forced)
            token = forced[0] if forced else rng.choice(list(allowed))
            if vocab.is_eog(token):
                break
            guide.consume(token)
            output += vocab.piece(token)
        text = output.decode("utf-8", "replace")
        thought, _, rest = text.partition("</think>")
        assert rest
        assert len(thought) < 40 * (limit + 9)
        calls, content = read_calls(tool_set, text, tail)
        assert not content.strip()
        assert len(calls) == 1
        validate_calls(tool_set, calls)


KEYWORDS = st.sampled_from(
    "type properties required enum const anyOf allOf $ref items minItems maxLength pattern a".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "object", "string", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20)
@given(st.dictionaries(KEYWORDS, JSON, max_size=4), st.sampled_from(sorted(FORMATS)))
def test_schema_of_any_shape_compiles_or_is_reported(
    caller: Running, schema: dict[str, Any], name: str
) -> None:
    tool_set = ToolSet(FORMATS[name], {"odd": schema, "fine": SMALL["get"]})
    request = Generate(1, TextPrompt("x"), tools=tool_set)
    grammars = GRAMMARS.setdefault(id(caller.pair.vocab), Grammars(caller.pair.vocab))
    matcher, note = grammars.answer(request, "", frozenset())
    assert matcher is not None
    assert "'fine'" not in note
    read_calls(
        tool_set, f"{tool_set.format.opens[0]}<function=odd><parameter=a>1</parameter></function>"
    )
