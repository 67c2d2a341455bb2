"""Tool calls obey their tools' schemas, wherever in an answer and however cut into tokens they are opened."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import vocabulary
from localspec.daemon.completion.parser import AnswerParser, Text
from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, Logits, Vocab
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.engine.sampling.grammars.sources import GrammarTokens
from localspec.engine.sampling.guide import CombinedGuide, Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings, resolve_settings
from localspec.engine.sampling.thoughts import ThoughtLimit, ThoughtMarker
from localspec.engine.speculation import verification
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.verification import Verifier
from localspec.errors import GrammarRejected
from localspec.protocol.call_readers import Arguments, Call
from localspec.protocol.calls import (
    CALL_ID_PLACEHOLDER,
    FUNCTIONARY,
    GEMMA,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    TAGS,
    UNKNOWN_FORMAT,
    CallFormat,
    ToolSet,
)
from localspec.protocol.dialect import REASONING_MARKERS
from localspec.protocol.frames import Constraint, Generate, PairFiles, Sampling, TextPrompt
from tests.support.pairs import N_VOCAB, contextual_pair
from tests.support.rescoring import NEAR_TIE, assert_alike, worst_gap
from tests.support.running import GREEDY, PLAIN, Running, drafting, running
from tests.support.statistics import chi_square_z

FORMATS = {
    "hermes": HERMES,
    "tags": TAGS,
    "llama": LLAMA,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "named": MISTRAL_ARGS,
    "gemma": GEMMA,
    "functionary": FUNCTIONARY,
    "nemotron": NEMOTRON,
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
# What may stand in one token with the end of a marker, or its beginning, in GPT-2's spelling.
WORDS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "_call>Ċ", "_call>x", '_call>{"', "</think>",
    "think>Ċ", "think>y", '{"', '{"name', '":', '","', '"}', '}}', "}ĊĊ", ">Ċ", "><", "<function=",
    "</parameter>", "parameter", "name", "arguments", "[TOOL", "_CALLS]", "_CALLS][{", "[ARGS]{",
    "call:", "<tool_call|>", "<|tool", "python_tag|>{", ">x", "Ġ{", "Ċ{", "Ċ</", "true", "null",
]  # fmt: skip


def spelled() -> list[str]:
    usual = vocabulary(N_VOCAB)
    return [*usual[:256], *WORDS, *usual[256 + len(WORDS) :]]


@pytest.fixture(scope="module")
def caller_files(models: Path) -> PairFiles:
    return contextual_pair(models / "caller", tokens=spelled())


@pytest.fixture(scope="module")
def caller(caller_files: PairFiles) -> Iterator[Running]:
    with running(caller_files) as engine:
        yield engine


# ------------------------------------------------------------------ schemas by chance


def schema(chosen: random.Random, depth: int = 0) -> dict[str, Any]:
    text: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chosen.randint(0, 6)},
        {"type": "string", "enum": chosen.sample(["a", "b c", "</tool>", '"', "é\n", "5"], 2)},
        {
            "type": "string",
            "pattern": chosen.choice(["^[a-c]{1,3}$", "^x", "^\\d{2}-[^/]$"]),
            "maxLength": 5,
        },
    ]
    plain: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 3, "maximum": chosen.randint(3, 700)},
        {"type": "boolean"},
        {"type": "number", "minimum": 0, "maximum": 9},
        {"type": ["integer", "null"]},
        {"type": ["string", "null"], "maxLength": 4},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]},
        {"enum": [1, "1", None, "two"]},
        {"const": chosen.choice([7, "seven", False])},
        {"$ref": "#/$defs/Part"},
    ]
    deep = (
        [
            {"type": "array", "items": schema(chosen, depth + 1), "minItems": 1, "maxItems": 2},
            _object(chosen, depth + 1),
        ]
        if depth < 2
        else []
    )
    return chosen.choice(chosen.choice([text, plain, deep or plain]))


def _object(chosen: random.Random, depth: int) -> dict[str, Any]:
    keys = chosen.sample(
        ["a", "b", "name", "arguments", "x_1", "odd key", "Straße"][: 5 + depth], 3
    )
    made: dict[str, Any] = {
        "type": "object",
        "properties": {key: schema(chosen, depth) for key in keys},
        "required": chosen.sample(keys, chosen.randint(0, 3)),
    }
    if chosen.random() < 0.3:
        made["additionalProperties"] = chosen.choice([False, True])
    return made


def tool(chosen: random.Random) -> dict[str, Any]:
    part = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}}
    return {**_object(chosen, 0), "$defs": {"Part": part}}


def tools(chosen: random.Random) -> dict[str, Any]:
    made = {name: tool(chosen) for name in ("get", "get_all")}
    return {**made, "now": {"type": "object", "properties": {}}}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """As ours are, where they do not say otherwise; nothing else of them changed."""
    made = {k: closed(v) if isinstance(v, dict) else v for k, v in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        made.setdefault("additionalProperties", False)
    return made


# ------------------------------------------------------------------ a model by chance


def matcher_of(
    vocab: Vocab, offered: ToolSet | None, constraint: Any = None, tail: str = ""
) -> Guide:
    request = Generate(
        1, TextPrompt("x"), tools=offered, constraint=constraint, thoughts=list(REASONING_MARKERS)
    )
    found, note = GRAMMARS.setdefault(id(vocab), Grammars(vocab)).answer(request, tail, frozenset())
    assert found is not None
    assert not note
    return found


GRAMMARS: dict[int, Grammars] = {}


def write(
    vocab: Vocab, matcher: Guide, chosen: random.Random, begun: str = "", most: int = 1500
) -> tuple[str, bool]:
    """What a model without any sense writes, that ends whatever it can; and whether it came to an end.

    begun: spelled in any tokens that it can be spelled in, and the grammar lets in.
    """
    text = b""
    pieces = [vocab.piece(token) for token in range(vocab.size)]
    while len(text) < most:
        mask = matcher.mask()
        allowed = (
            list(range(vocab.size)) if mask is None else [int(t) for t in np.flatnonzero(mask)]
        )
        rest = begun.encode()[len(text) :]
        if rest:
            allowed = [t for t in allowed if _begins(pieces[t], rest)]
        elif mask is None or (
            any(vocab.is_eog(token) for token in allowed) and chosen.random() < 0.6
        ):
            break
        ending = [t for t in allowed if pieces[t][:1] in (b'"', b"}", b"]", b"<", b"\n", b",")]
        token = chosen.choice(ending if ending and chosen.random() < 0.3 else allowed)
        if vocab.is_eog(token):
            break
        if chosen.random() < 0.2:  # a round that is taken back
            forced = [*matcher.forced_tokens()[:2], token]
            count = matcher.count_valid(forced)
            for each in forced[:count]:
                matcher.consume(each)
            matcher.take_back(count)
        matcher.consume(token)
        text += pieces[token]
    return text.decode("utf-8", "replace"), len(text) < most


def _begins(piece: bytes, rest: bytes) -> bool:
    return bool(piece) and (rest.startswith(piece) or piece.startswith(rest))


def read(offered: ToolSet, text: str, tail: str = "") -> tuple[list[tuple[str, str]], str]:
    """The calls in an answer, and its text."""
    parser = AnswerParser(offered.format, offered.schemas, parallel=offered.parallel)
    parser.begin(tail)
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


def check(offered: ToolSet, calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        value = json.loads(arguments, parse_float=parse_finite)  # JSON's numbers have no end
        jsonschema_rs.validate(closed(offered.schemas[name]), value)


BEGUN = ["", "Let me see.\n", "<think>a <tool_call> or</think>\n", "1 < 2 <tool ", "<<tool<"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMATS)
def test_every_call_that_is_opened_obeys_its_schema(caller: Running, name: str, seed: int) -> None:
    chosen, vocab, form = random.Random(f"{name}{seed}"), caller.pair.vocab, FORMATS[name]
    offered = ToolSet(form, tools(chosen), parallel=chosen.random() < 0.7)
    begun = chosen.choice(BEGUN if form is HERMES else BEGUN[:2]) + form.opens[0]
    for _ in range(3):
        text, ended = write(vocab, matcher_of(vocab, offered), chosen, begun)
        calls, _ = read(offered, text)
        if ended:
            assert calls, text
            check(offered, calls)
        else:
            check(offered, calls[:-1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_nothing_but_calls(caller: Running, name: str, seed: int) -> None:
    chosen, vocab = random.Random(f"{name}{seed}"), caller.pair.vocab
    offered = ToolSet(FORMATS[name], tools(chosen), required=True, parallel=seed > 0)
    for tail in ("", "<think>\n"):
        begun = "so</think>\n" if tail else ""
        text, ended = write(vocab, matcher_of(vocab, offered, tail=tail), chosen, begun)
        calls, content = read(offered, text, tail)
        assert not ended or not content.strip()
        check(offered, calls if ended else calls[:-1])
        if not offered.parallel:
            assert len(calls) == 1
        for call, arguments in calls:
            value = json.loads(arguments) if ended else {}
            if ended and FORMATS[name] is HERMES:
                compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                assert len(arguments) <= len(compact.encode()) + 30, (call, arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_beside_a_response_format_an_answer_is_one_or_the_other(caller: Running, name: str) -> None:
    chosen, vocab = random.Random(name), caller.pair.vocab
    wanted = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
    constraint = Constraint("json_schema", json.dumps(wanted))
    seen = set()
    for at in range(12):
        offered = ToolSet(FORMATS[name], tools(chosen))
        begun = ['{"z', ""][at % 2]
        text, ended = write(vocab, matcher_of(vocab, offered, constraint), chosen, begun)
        if not ended:
            continue
        calls, content = read(offered, text)
        seen.add(bool(calls))
        check(offered, calls)
        if calls:
            assert not content.strip()
        else:
            jsonschema_rs.validate(closed(wanted), json.loads(content))
    assert seen == {True, False}


def test_structured_output_follows_thoughts_that_the_prompt_has_opened(caller: Running) -> None:
    chosen, vocab = random.Random(1), caller.pair.vocab
    matcher = matcher_of(vocab, None, Constraint("regex", "[ab]{3}"), "assistant\n<think>\n")
    text, ended = write(vocab, matcher, chosen, "I think, <b>ab</think>\n")
    assert ended
    assert text.rpartition("</think>")[2].strip("\n") in [
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    ]


WRITTEN = {
    "seen JSON": '<|calls|>[\n{"id": "0", "called": "note", "with": {"text": "a b", "n": 7}},\n'
    '{"id": "1", "called": "note", "with": {"text": "", "n": 8}}\n]<|end_calls|>',
    "seen keys": "<tool_call>note\n<key>text</key>\n<value>a b</value>\n<key>n</key>\n<value>7</value>\n"
    "</tool_call>\n<tool_call>note\n<key>text</key>\n<value></value>\n<key>n</key>\n<value>8</value>\n"
    "</tool_call>",
    "seen kinds": '<calls>\n<call name="note">\n<arg name="text" text="yes">a b</arg>\n'
    '<arg name="n" text="no">7</arg>\n</call>\n<call name="note">\n<arg name="text" text="yes"></arg>\n'
    '<arg name="n" text="no">8</arg>\n</call>\n</calls>',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_is_what_a_found_notation_lets_in(
    caller: Running, name: str
) -> None:
    parameters = {"text": {"type": "string"}, "n": {"type": "integer", "maximum": 8}}
    note = {"type": "object", "properties": parameters, "required": ["text", "n"]}
    offered, text, vocab = ToolSet(FORMATS[name], {"note": note}), WRITTEN[name], caller.pair.vocab

    def accepted(text: str) -> int:
        tokens = vocab.tokenize(text, add_special=False, parse_special=False)
        return len(tokens) - matcher_of(vocab, offered).count_valid(tokens)

    assert accepted(text) == 0
    assert accepted(text.replace("7", "9")) > 0
    assert accepted(text.replace("text", "tex", 1)) > 0
    assert [json.loads(given) for _, given in read(offered, text)[0]] == [
        {"text": "a b", "n": 7},
        {"text": "", "n": 8},
    ]


def test_what_ends_an_answer_is_in_no_grammar_of_its_calls() -> None:
    special = GrammarTokens({"<|call|>": 0, "<|calls|>": 1}, ends=frozenset([1]))
    assert special.lark_expression("}<|call|>\n<|calls|>") == '"}" <[0]> "\\n"'


def test_what_a_schema_asks_in_vain_is_said_or_refused(caller: Running) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    fine = {"type": "object", "properties": {"y": {"const": 1}}, "required": ["y"]}
    offered = ToolSet(HERMES, {"odd": odd, "fine": fine})
    request = Generate(1, TextPrompt("x"), tools=offered)
    matcher, note = Grammars(caller.pair.vocab).answer(request, "", frozenset())
    assert matcher is not None
    assert "'odd'" in note
    assert "fine" not in note
    request.tools = ToolSet(HERMES, {"odd": odd, "fine": fine}, strict=["odd"])
    with pytest.raises(GrammarRejected, match="tool 'odd'"):
        Grammars(caller.pair.vocab).answer(request, "", frozenset())


# ------------------------------------------------------------------ through the engine

SMALL = {
    "get": {
        "type": "object",
        "properties": {"n": {"enum": [1, 22, 333]}, "t": {"type": "string", "maxLength": 2}},
        "required": ["n", "t"],
    },
    "now": {"type": "object", "properties": {}},
}
OFFERED = ToolSet(HERMES, SMALL)


def opening(vocab: Vocab, temperature: float = 1.0, **more: Any) -> Sampling:
    """A wish that makes markers and ends of text likely."""
    likely = ["<tool_call>", "_call>", "<tool", "_call>Ċ", "_call>x", '_call>{"']
    bias = {256 + WORDS.index(word): 9.0 for word in likely}
    quote = vocab.tokenize('"', add_special=False, parse_special=False)[0]
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **more}
    return Sampling(temperature=temperature, logit_bias=bias | {quote: 9.0}, **options)


WISHES: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {}]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize(
    "speculative", [PLAIN, drafting(4, verification="rejection"), drafting(None, "auto")]
)
def test_calls_of_an_answer_obey_with_drafts_and_without(
    caller: Running, wish: Any, speculative: Any
) -> None:
    wanted = opening(caller.pair.vocab, **wish)
    requests = [
        caller.start(
            f"p{at}", 120, wanted, speculative, tools=OFFERED, thoughts=list(REASONING_MARKERS)
        )
        for at in range(6)
    ]
    caller.finish()
    found = 0
    for request in requests:
        answer = caller.answers[request]
        calls, _ = read(OFFERED, answer.text)
        if answer.text.rfind("<tool_call>") > answer.text.rfind("</tool_call>"):  # it was cut off
            calls = calls[:-1]
        check(OFFERED, calls)
        found += len(calls)
    assert found


@pytest.mark.parametrize("wish", WISHES[:2])
def test_drafts_do_not_change_an_answer_with_calls(caller: Running, wish: Any) -> None:
    pair, wanted = caller.pair, opening(caller.pair.vocab, **wish)
    prompt = pair.vocab.tokenize("a", add_special=True, parse_special=True)
    more: dict[str, Any] = {"tools": OFFERED, "thoughts": list(REASONING_MARKERS)}
    caller.forget()
    plain = caller.ask("a", 80, wanted, **more)
    assert read(OFFERED, plain.text)[0]
    for depth in (1, 3, 8, None):
        caller.forget()
        drafted = caller.ask("a", 80, wanted, drafting(depth, "auto"), **more)
        assert_alike(
            pair.files.target,
            prompt,
            drafted.tokens,
            plain.tokens,
            Sampler(resolve_settings(wanted, pair.defaults)),
            lambda: matcher_of(pair.vocab, OFFERED),
        )


def test_who_calls_no_tool_answers_as_ever(caller: Running) -> None:
    caller.forget()
    alone = caller.ask("bystander", 40).tokens
    caller.forget()
    wanted = opening(caller.pair.vocab)
    caller.start("p", 60, wanted, drafting(4, "auto"), tools=OFFERED)
    request = caller.start("bystander", 40)
    caller.start("q", 60, wanted, drafting(4, verification="rejection"), tools=OFFERED)
    caller.finish()
    tokens = caller.answers[request].tokens
    prompt = caller.pair.vocab.tokenize("bystander", add_special=True, parse_special=True)
    if tokens != alone:
        assert worst_gap(caller.pair.files.target, prompt, tokens) < NEAR_TIE


def test_what_a_call_must_have_is_drafted_without_a_model(caller: Running) -> None:
    long = {"a_rather_long_key_that_costs_many_tokens": {"const": "and a value as long as that"}}
    schema = {"type": "object", "properties": long, "required": list(long)}
    offered = ToolSet(HERMES, {"only": schema}, required=True, parallel=False)
    answer = caller.ask("x", 200, GREEDY, drafting(8), tools=offered)
    told = answer.done.speculation
    assert read(offered, answer.text)[0][0][0] == "only"
    assert answer.done.finish_reason == "stop"
    assert told.kind == "grammar"
    assert told.accepted == told.drafted > 60
    assert told.rounds < 40


# What follows the prompt, and then a "b", in the target's opinion and in the draft's: tokens and odds.
TARGET = {"b": 0.9, "c": 0.1}, {"c": 0.45, "d": 0.25, "e": 0.1, "f": 0.2}
DRAFT = {"b": 0.9, "f": 0.1}, {"c": 0.05, "d": 0.15, "e": 0.4, "f": 0.4}


class Table:
    """Stands for a context whose last pass has these rows."""

    def __init__(self, rows: Sequence[Logits]) -> None:
        self._rows = rows

    def finite_logits(self, row: int) -> Logits:
        return self._rows[row]


def excess_behind_a_marker(vocab: Vocab, dropped: bool) -> float:
    """How far tokens behind a "b", where "f" is forbidden, are from what the target says of the others.

    Both were drafted in one run. dropped: forbidden drafts are left out, and not rejected.
    """
    token = {x: vocab.tokenize(x, add_special=False, parse_special=False)[0] for x in "bcdef"}

    def row(odds: dict[str, float]) -> Logits:
        found: Logits = np.full(vocab.size, -np.inf, dtype=np.float32)
        for text, odd in odds.items():
            found[token[text]] = np.log(odd)
        return found

    sampler = Sampler(Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5))
    any_object: dict[str, Any] = {"type": "object"}
    offered = ToolSet(CallFormat("named", ("b",), middle="g"), dict.fromkeys("cde", any_object))
    target, after_draft = Table([*map(row, TARGET), row({"b": 1.0})]), list(map(row, DRAFT))
    drawn = []
    for _ in range(2500):
        probs = [sampler.distribution(each) for each in after_draft]
        tokens = [each.pick(sampler.uniform()) for each in probs]
        matcher = matcher_of(vocab, offered)
        drafts = DraftRequest(cast(Slot, None), 2, tokens=tokens, buckets=[0, 0], probs=probs)
        if dropped:
            drafts.cut(matcher.count_valid(tokens))
        verifier = Verifier(sampler, matcher, reject=True)
        kept = verifier.verify(cast(Context, target), 0, [0], drafts)
        if kept[0] == token["b"] and len(kept) > 1:
            drawn.append(kept[1])
    total = sum(odd for text, odd in TARGET[1].items() if text != "f")
    wanted = {token[text]: odd / total for text, odd in TARGET[1].items() if text != "f"}
    return chi_square_z((drawn, wanted))


def test_rejection_keeps_the_distribution_behind_a_marker_that_a_draft_completes(
    caller: Running,
) -> None:
    assert excess_behind_a_marker(caller.pair.vocab, dropped=False) < 4.5


@pytest.mark.parametrize("mistake", ["no residual", "dropped"])
def test_that_test_of_the_distribution_finds_a_wrong_rule(
    caller: Running, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "no residual":
        monkeypatch.setattr(verification, "residual", lambda target, draft: target)
    assert excess_behind_a_marker(caller.pair.vocab, dropped=mistake == "dropped") > 8


def test_calls_of_a_template_that_is_not_understood_are_free_and_that_is_said(
    caller: Running,
) -> None:
    grammars = Grammars(caller.pair.vocab)
    request = Generate(1, TextPrompt("x"), tools=ToolSet(UNKNOWN_FORMAT, SMALL))
    matcher, note = grammars.answer(request, "", frozenset())
    assert matcher is None
    assert "not constrained" in note
    request.constraint = Constraint("regex", "a")
    assert grammars.answer(request, "", frozenset())[0] is not None


def test_thoughts_that_end_at_their_limit_are_followed_by_the_call_that_is_required(
    caller: Running,
) -> None:
    chosen, vocab = random.Random(5), caller.pair.vocab
    offered = ToolSet(HERMES, SMALL, required=True, parallel=False)
    tail = "assistant\n<think>\n"
    closing = vocab.tokenize("</think>", add_special=False, parse_special=True)
    marker = ThoughtMarker(b"<think>", b"</think>", closing)
    for limit in (0, 3, 20):
        thoughts = ThoughtLimit(limit, [marker], tail, vocab.piece, vocab.size)
        guide = CombinedGuide(thoughts, matcher_of(vocab, offered, tail=tail))
        written = b""
        for _ in range(400):
            mask = guide.mask()
            forced = guide.forced_tokens()
            allowed = range(vocab.size - 8) if mask is None else np.flatnonzero(mask).tolist()
            assert not forced or forced[0] in allowed
            assert guide.count_valid(forced) == len(forced)
            token = forced[0] if forced else chosen.choice(list(allowed))
            if vocab.is_eog(token):
                break
            guide.consume(token)
            written += vocab.piece(token)
        text = written.decode("utf-8", "replace")
        thought, _, rest = text.partition("</think>")
        assert rest
        assert len(thought) < 40 * (limit + 9)
        calls, content = read(offered, text, tail)
        assert not content.strip()
        assert len(calls) == 1
        check(offered, calls)


KEYWORDS = st.sampled_from(
    "type properties required enum const anyOf allOf $ref items minItems maxLength pattern a".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "object", "string", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(KEYWORDS, JSON, max_size=4), st.sampled_from(sorted(FORMATS)))
def test_a_schema_of_any_shape_is_held_to_or_said(
    caller: Running, schema: dict[str, Any], name: str
) -> None:
    offered = ToolSet(FORMATS[name], {"odd": schema, "fine": SMALL["get"]})
    request = Generate(1, TextPrompt("x"), tools=offered)
    grammars = GRAMMARS.setdefault(id(caller.pair.vocab), Grammars(caller.pair.vocab))
    matcher, note = grammars.answer(request, "", frozenset())
    assert matcher is not None
    assert "'fine'" not in note
    read(offered, f"{offered.format.opens[0]}<function=odd><parameter=a>1</parameter></function>")
