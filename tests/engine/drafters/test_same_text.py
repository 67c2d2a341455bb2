"""With a seed the answer is the one without drafts, whatever drafts and whatever is asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from localspec.chat.families.mistral import MISTRAL
from localspec.protocol.calls import ToolSet
from localspec.protocol.frames import Constraint, PairFiles, Sampling
from tests.engine.drafters.test_layers import contextual_files as with_layers
from tests.engine.test_engine import draw_with_noise_per_round, keep_every_second_rejected
from tests.support.exploration import SEED, count_examples
from tests.support.heads import contextual_heads
from tests.support.pairs import N_VOCAB, contextual_pair, target_alone
from tests.support.running import Answer, Running, drafting, running

PAIRS = ("none", "draft", "mtp", "gemma4", "eagle3", "dflash")
REQUESTS = range(SEED, SEED + count_examples(85, "LOCALSPEC_TEST_SEEDED"))  # of each pair

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "string"}},
    "required": ["b"],
}
CONSTRAINTS = (
    Constraint("json_object"),
    Constraint("json_schema", json.dumps(OBJECT)),
    Constraint("regex", "([a-z]{1,6} ?){3,40}"),
    Constraint("grammar", 'root ::= ("w" [0-9]+ " ")+'),
)


def write_files(name: str, folder: Any) -> PairFiles:
    match name:
        case "none":
            return target_alone(contextual_pair(folder))
        case "draft":
            return contextual_pair(folder)
        case "mtp":
            return contextual_heads(folder)
        case "gemma4":
            return contextual_heads(folder, "gemma4")
    return with_layers(folder, name)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=PAIRS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(write_files(request.param, tmp_path_factory.mktemp("seeded"))) as loaded:
        yield loaded


def draw_sampling(rng: random.Random) -> Sampling:
    """Return sampling settings with a seed; each of the others in a fraction of the requests."""

    def perhaps(share: float, *values: Any) -> Any:
        return rng.choice(values) if rng.random() < share else None

    return Sampling(
        seed=rng.randrange(1 << 40),
        temperature=rng.choice([0.2, 0.4, 0.7, 0.8, 1.0, 1.5]),
        top_k=perhaps(0.5, 0, 4, 20),
        top_p=perhaps(0.4, 0.8, 1.0),
        min_p=perhaps(0.4, 0.0, 0.1),
        typical_p=perhaps(0.2, 0.7),
        top_n_sigma=perhaps(0.1, 1.5),
        xtc_probability=perhaps(0.2, 0.5),
        dynatemp_range=perhaps(0.1, 0.3),
        repeat_penalty=perhaps(0.3, 1.1, 1.5),
        repeat_last_n=perhaps(0.3, -1, 16),
        frequency_penalty=perhaps(0.2, 0.5),
        presence_penalty=perhaps(0.2, 0.5),
        dry_multiplier=perhaps(0.3, 0.8),
        dry_allowed_length=perhaps(0.3, 1),
        logit_bias={rng.randrange(N_VOCAB): rng.choice([-5.0, 3.0])} if rng.random() < 0.2 else {},
        ignore_eos=rng.random() < 0.2,
    )


def draw_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt that repeats itself, and the options of a request."""
    words = [rng.randrange(256, N_VOCAB - 5) for _ in range(rng.randint(2, 12))]
    options: dict[str, Any] = {"sampling": draw_sampling(rng), "max_tokens": rng.randint(8, 40)}
    match rng.randrange(4):
        case 0:
            options["constraint"] = rng.choice(CONSTRAINTS)
        case 1:
            options["tools"] = ToolSet(MISTRAL, {"get": OBJECT}, required=rng.random() < 0.7)
    if rng.random() < 0.3:
        options |= {"top_logprobs": rng.randint(0, 5), "post_sampling": rng.random() < 0.3}
    if rng.random() < 0.2:
        options["min_tokens"] = 6
    return words * rng.randint(1, 5), options


def report(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.text, answer.done.finish_reason, answer.logprobs


def disturb(rng: random.Random, text: str) -> str | None:
    """Return, in half of the cases, the text with a few of its words replaced by others."""
    words = text.split(" ")
    for _ in range(len(words) // 6 + 1):
        words[rng.randrange(len(words))] = f"w{rng.randrange(100)}"
    return " ".join(words) if rng.random() < 0.5 else None


def find_difference(engine: Running, seeds: Iterable[int]) -> str | None:
    """Return the first request whose answer is another one with drafts, which are of each kind in turns."""
    kinds = ["auto", "ngram"] + ([engine.pair.drafter.kind] if engine.pair.drafter else [])
    drafted = dict.fromkeys(kinds, 0)
    for seed in seeds:
        rng = random.Random(seed)
        prompt, options = draw_request(rng)
        kind, depth = kinds[seed % len(kinds)], rng.choice([None, 1, 2, 3, 5, 8])
        plain = engine.ask(prompt, exact=True, **options)
        settings = drafting(depth, kind, prediction=disturb(rng, plain.text))
        answer = engine.ask(prompt, exact=True, speculative=settings, **options)
        if report(answer) != report(plain):
            return f"{seed}: {kind}, depth {depth}, {options}"
        drafted[kind] += answer.done.speculation.drafted
    assert all(drafted.values()), drafted
    return None


@pytest.mark.explore
def test_a_seed_gives_the_same_answer_with_and_without_drafts(engine: Running) -> None:
    """In `exact`, where no rounding excuses a difference."""
    assert find_difference(engine, REQUESTS) is None


@pytest.mark.parametrize("rule", [keep_every_second_rejected, draw_with_noise_per_round])
def test_a_wrong_rule_gives_another_answer(
    engine: Running, monkeypatch: pytest.MonkeyPatch, rule: Callable[..., list[int]]
) -> None:
    """The control of the test above."""
    monkeypatch.setattr("localspec.engine.speculation.verification.verify_match", rule)
    assert find_difference(engine, REQUESTS) is not None
