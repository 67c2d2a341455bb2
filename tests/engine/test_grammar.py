"""Structured output is valid with and without drafts, and hostile grammars are refused in bounded time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.engine.sampling.grammars.compile import Grammars
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings, resolve_settings
from localspec.errors import GrammarRejected
from localspec.protocol.frames import Constraint, PairFiles, Sampling
from tests.support.pairs import N_VOCAB, contextual_pair
from tests.support.patience import PATIENCE
from tests.support.rescoring import assert_alike
from tests.support.running import GREEDY, PLAIN, Running, drafting
from tests.support.statistics import chi_square_z

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["alpha", "beta"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    }
)
INTEGER_A = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
LIST_GRAMMAR = 'root ::= "(" item ("," item)* ")"\nitem ::= [a-c]{1,3}'
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3),
    Sampling(temperature=1.0, seed=4),
]


def assert_in_language(kind: str, text: str) -> None:
    if kind == "json_schema":
        value = json.loads(text)
        assert list(value) == ["name", "kind", "count", "tags"]
        assert len(value["name"]) <= 6
        assert value["kind"] in ("alpha", "beta")
        assert 0 <= value["count"] <= 99
        assert len(value["tags"]) <= 2
    elif kind == "grammar":
        assert re.fullmatch(r"\([a-c]{1,3}(,[a-c]{1,3})*\)", text)
    else:
        assert re.fullmatch(r"[A-F]{4}-[0-9]{3}(yes|no)", text)


CONSTRAINTS = [
    ("json_schema", SCHEMA),
    ("grammar", LIST_GRAMMAR),
    ("regex", "[A-F]{4}-[0-9]{3}(yes|no)"),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("kind", "source"), CONSTRAINTS)
@pytest.mark.parametrize("speculative", [PLAIN, drafting(4), drafting(None, "auto")])
def test_a_finished_answer_is_in_its_language(
    contextual: Running, kind: Any, source: str, sampling: Sampling, speculative: Any
) -> None:
    answer = contextual.constrained(
        kind, source, max_tokens=480, sampling=sampling, speculative=speculative
    )
    if answer.done.finish_reason == "stop":
        assert_in_language(kind, answer.text)
    else:  # a random model may never end a list, but its beginning must be valid
        assert kind == "grammar"
        assert re.match(r"\([a-c,]*$", answer.text)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize(("kind", "source"), CONSTRAINTS)
def test_drafts_do_not_change_a_constrained_answer(
    contextual: Running, kind: Any, source: str, sampling: Sampling
) -> None:
    contextual.forget()
    pair = contextual.pair
    prompt = pair.vocab.tokenize("a", add_special=True, parse_special=True)
    plain = contextual.constrained(kind, source, max_tokens=60, sampling=sampling)
    for depth in (1, 3, 8, None):
        contextual.forget()
        drafted = contextual.constrained(
            kind, source, max_tokens=60, sampling=sampling, speculative=drafting(depth, "auto")
        )
        assert_alike(
            pair.files.target,
            prompt,
            drafted.tokens,
            plain.tokens,
            Sampler(resolve_settings(sampling, pair.defaults)),
            lambda: Grammars(pair.vocab).compile(Constraint(kind, source)),
        )


def test_forced_tokens_are_drafted_without_a_model(contextual: Running) -> None:
    source = "(this is the only thing that can be said here)"
    answer = contextual.constrained("regex", source, max_tokens=80, speculative=drafting(8))
    speculation = answer.done.speculation
    assert answer.text == source[1:-1]
    assert speculation.kind == "grammar"
    assert speculation.accepted == speculation.drafted > 30
    assert speculation.rounds < 20


def test_json_mode_gives_an_object(contextual: Running) -> None:
    biased = Sampling(temperature=0.0, logit_bias={ord("}") - 33: 30.0, ord('"') - 33: 20.0})
    answer = contextual.constrained("json_object", max_tokens=120, sampling=biased)
    if answer.done.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    assert answer.text.lstrip().startswith("{")


HOSTILE = {
    "an open bracket": ("grammar", "root ::= ["),
    "left recursion": ("grammar", 'root ::= root "a" | "b"'),
    "no root": ("grammar", 'start ::= "a"'),
    "a billion repeats": ("grammar", 'root ::= "a"{1000000000}'),
    "deep nesting": ("grammar", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "empty": ("grammar", ""),
    "control characters": ("grammar", "\0\x01root ::= \ud7ff"),
    "20 000 alternatives": ("grammar", "root ::= " + " | ".join(['"a"'] * 20_000)),
    "an unknown rule": ("grammar", "root ::= missing"),
    "a string of a billion": ("json_schema", '{"type": "string", "maxLength": 1000000000}'),
    "an array of a billion": (
        "json_schema",
        '{"type": "array", "items": {"type": "string"}, "minItems": 1000000000}',
    ),
    "deep schema": ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "a schema of itself": ("json_schema", '{"$ref": "#"}'),
    "a schema that is none": ("json_schema", "[1, 2"),
    "an unknown type": ("json_schema", '{"type": "colour"}'),
    "a pattern of itself": ("json_schema", '{"pattern": "(a*)*b", "type": "string"}'),
    "an open group": ("regex", "(((("),
    "nested repeats": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "a look-behind": ("regex", "(?<=a)b"),
    "nothing possible": ("regex", "[^\\s\\S]"),
    "too long": ("grammar", 'root ::= "' + "a" * 600_000 + '"'),
}
# Those that must be refused. Others may be, or be usable.
REFUSED = {"an open bracket", "no root", "deep nesting", "a schema that is none", "too long"}
REFUSED |= {"an unknown type", "an open group"}


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_usable_in_bounded_time(
    contextual: Running, name: str
) -> None:
    kind, source = HOSTILE[name]
    refusal: GrammarRejected | None = None
    try:
        contextual.constrained(kind, source, max_tokens=6)
    except GrammarRejected as error:
        refusal = error
    assert refusal or name not in REFUSED
    if refusal is not None:
        assert 20 < len(refusal.message) < 500
        assert "\n" not in refusal.message
        assert refusal.status == 400
    assert len(contextual.ask("a", 4).tokens) == 4


@pytest.mark.parametrize("speculative", [PLAIN, drafting(4)])
def test_ignore_eos_stops_at_the_end_of_the_language(contextual: Running, speculative: Any) -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    answer = contextual.constrained(
        "regex", "[A-F]{4}", max_tokens=40, sampling=endless, speculative=speculative
    )
    assert answer.done.finish_reason == "stop"
    assert re.fullmatch("[A-F]{4}", answer.text)


def test_a_refused_grammar_leaves_the_next_one_alone(contextual: Running) -> None:
    with pytest.raises(GrammarRejected):
        contextual.constrained("regex", "(")
    request = contextual.start("a", 5, constraint=Constraint("regex", "ab"))
    contextual.finish()
    assert contextual.answers[request].text == "ab"


@pytest.mark.parametrize(("kind", "source"), [CONSTRAINTS[0], CONSTRAINTS[2]])
@pytest.mark.parametrize("speculative", [PLAIN, drafting(4)])
def test_continued_answer_is_in_its_language_as_a_whole(
    contextual: Running, kind: Any, source: str, speculative: Any
) -> None:
    options = {"max_tokens": 480, "sampling": SAMPLINGS[1], "speculative": speculative}
    full_text = contextual.constrained(kind, source, **options).text
    for at in range(0, len(full_text), 5):
        rest = contextual.constrained(kind, source, full_text[:at], **options)
        assert rest.done.finish_reason == "stop"
        assert_in_language(kind, full_text[:at] + rest.text)


@pytest.mark.parametrize(
    ("kind", "source", "begun", "message"),
    [
        ("regex", "a(b", "", "unclosed group"),
        ("regex", "ab+", "ba", "does not fit the regular expression"),
        *(
            ("json_schema", INTEGER_A, begun, "does not fit the JSON Schema")
            for begun in ("\n{", "{\n", "{  ", '{"a":  ')
        ),
    ],
)
def test_a_refusal_names_the_cause(
    contextual: Running, kind: Any, source: str, begun: str, message: str
) -> None:
    with pytest.raises(GrammarRejected, match=message):
        contextual.constrained(kind, source, begun=begun)


def test_a_beginning_with_a_blank_is_continued(contextual: Running) -> None:
    assert contextual.constrained("json_schema", INTEGER_A, begun='{ "a": 1').done


def test_a_regular_expression_may_hold_any_character(contextual: Running) -> None:
    assert contextual.constrained("regex", r"a/\"b\\'\n/").text == "a/\"b\\'\n/"


def test_rejection_keeps_the_distribution_that_a_grammar_leaves(
    contextual_files: PairFiles, models: Path, load: Callable[..., Running]
) -> None:
    """A draft outside the language is rejected like any other, since dropping it would favour the rest."""
    stranger = contextual_pair(models / "stranger", seed=9)
    contextual = load(PairFiles("strangers", contextual_files.target, stranger.draft))
    vocab = contextual.pair.vocab
    a, b, c, outside = (
        vocab.tokenize(x, add_special=False, parse_special=False)[0] for x in "abcd"
    )
    likely = dict.fromkeys((a, b, c, outside), 12.0)
    sampling = Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, logit_bias=likely)
    sampler = Sampler(Settings(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0))
    speculative = drafting(1, verification="rejection")
    # "a" is forced and the next token is the target's own, so the third comes from a draft.
    constraint = Constraint("regex", "a[abc]{3}")
    answers = [
        contextual.ask("x", 4, sampling, speculative, constraint=constraint).tokens
        for _ in range(1500)
    ]
    samples = []
    for second in (a, b, c):
        drawn = [tokens[2] for tokens in answers if tokens[:2] == [a, second]]
        prompt = "xa" + vocab.piece(second).decode()
        entry = contextual.ask(prompt, 1, GREEDY, top_logprobs=N_VOCAB).logprobs[0]
        row = np.full(N_VOCAB, -np.inf, dtype=np.float32)
        for token, _, logprob in entry.top:
            if token in (a, b, c):
                row[token] = logprob
        distribution = sampler.distribution(row)
        if len(drawn) > 100:
            samples.append(
                (drawn, {token: distribution.probability_of(token) for token in (a, b, c)})
            )
    assert samples
    assert chi_square_z(*samples) < 4.5


def test_rejected_round_is_rolled_back(contextual: Running) -> None:
    """This also holds for tokens beyond the end of the grammar."""
    grammars = contextual.preparer._grammars
    rng = np.random.default_rng(7)
    for _ in range(20):
        matcher = grammars.compile(Constraint("regex", "[a-f]{1,4}"))
        tokens: list[int] = []
        masks = [matcher.mask()]
        while len(tokens) < 8 and not matcher.ended:
            tokens.append(int(rng.choice(np.flatnonzero(masks[-1]))))
            matcher.consume(tokens[-1])
            masks.append(matcher.mask() if not matcher.ended else masks[-1])
        ended = len(tokens)
        for token in tokens[:2]:  # these are ignored since the grammar has ended
            matcher.consume(token)
        back = int(rng.integers(0, ended + 1))
        matcher.take_back(min(2, ended) + ended - back)
        if back < ended:
            assert np.array_equal(matcher.mask(), masks[back])
