"""Answers that repeat themselves without progress are ended, and no others."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.llama import Model, Vocab, initialise
from localspec.engine.prompt.prepare import Preparer, has_word
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.loops import TEXT, THOUGHTS, LoopDetector, LoopLimits, count_repeats
from localspec.protocol.frames import (
    ChatPrompt,
    Generate,
    Message,
    Sampling,
    SpeculationSettings,
    ThinkingLimit,
)
from localspec.protocol.settings import LoopGuardScope
from tests.support.pairs import BOS, looping_pair
from tests.support.running import GREEDY, PLAIN, Running, drafting, running


def find_loop(
    tokens: list[int],
    limits: tuple[LoopLimits, LoopLimits] = THOUGHTS,
    is_word: Callable[[int], bool] = lambda _: True,
    allowed: int = 0,
) -> int | None:
    """Return after how many tokens a loop is found, None if there is none."""
    detector = LoopDetector(limits, is_word, lambda: allowed, passages=limits is THOUGHTS)
    return next((at for at, token in enumerate(tokens, 1) if detector.push(token)), None)


prefixes = st.lists(st.integers(0, 50), max_size=100)


@given(prefixes, st.lists(st.integers(100, 10_000), min_size=1, max_size=80, unique=True))
def test_a_period_is_found_when_it_was_repeated_long_enough(
    prefix: list[int], period: list[int]
) -> None:
    for limits in (THOUGHTS, TEXT):
        found = find_loop([*prefix, *period * 4000][: len(prefix) + 6000], limits)
        assert found is not None
        limit = limits[0] if len(period) >= 3 else limits[1]
        repeated = found - len(prefix) - len(period)
        needed = max(limit.tokens, limit.repeats * len(period))
        assert needed <= repeated <= needed + 16 + len(period)


@given(
    prefixes,
    st.lists(st.integers(100, 200), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_lines_with_a_counter_are_no_loop(
    prefix: list[int], line: list[int], rows: int, place: int
) -> None:
    """However equal the lines are otherwise."""
    tokens = [*prefix]
    for number in range(rows * 10):
        tokens += [*line[:place], 1000 + number, *line[place:]]
    assert find_loop(tokens) is None


def test_passages_in_changing_order_are_a_loop_in_thoughts_alone() -> None:
    generator = random.Random(3)
    passages = [[generator.randrange(10_000) for _ in range(60)] for _ in range(5)]
    tokens = [token for _ in range(100) for token in generator.choice(passages)]
    assert find_loop(tokens) is not None
    assert find_loop(tokens, TEXT) is None


@pytest.mark.parametrize("seed", range(8))
def test_forms_that_are_filled_in_are_no_loop(seed: int) -> None:
    """Long passages in changing order with something new behind each, as in reference pages."""
    generator = random.Random(seed)
    passages = [[generator.randrange(10_000) for _ in range(100)] for _ in range(3)]
    tokens: list[int] = []
    for entry in range(60):
        tokens += [*generator.choice(passages), *range(20_000 + 5 * entry, 20_005 + 5 * entry)]
    assert find_loop(tokens) is None


def test_a_text_may_repeat_what_the_prompt_repeats() -> None:
    line = [7, 8, 9, 10, 1]
    allowed = count_repeats([*range(20, 40), 1, *line * 300], lambda token: token == 1)
    assert allowed == 300
    assert find_loop(line * 300, TEXT, allowed=allowed) is None
    assert find_loop(line * 600, TEXT, allowed=allowed) is not None


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    initialise()
    path = Path(__file__).parents[2] / "localspec" / "builtin" / "target.gguf"
    with Model(str(path), n_gpu_layers=0) as model:
        yield model.vocab


WORDS = "alpha beta gamma value name count total index error open close green red north".split()


def make_tables(generator: random.Random) -> Iterator[str]:
    """Yield tables, lists and code with equal parts, as people ask for."""
    draw, rows = generator.choice, generator.randrange(10, 120)
    yield "".join(f"{i},{draw(WORDS)},{generator.randrange(100)}.25\n" for i in range(rows))
    yield "".join(f"| {draw(WORDS)} | {generator.randrange(5)} | yes |\n" for _ in range(rows))
    yield "[\n" + "  [0, 0, 0, 0, 0, 0, 0, 0],\n" * generator.randrange(4, 20) + "]"
    yield "\n".join(" ".join(draw("01") for _ in range(16)) for _ in range(rows))
    yield ", ".join(map(str, range(1, rows * 6)))
    yield draw(["    pass\n", "I must not talk in class.\n", "<li>item</li>\n", "x += 1\n"]) * 30
    yield "".join(f"    {draw(WORDS).upper()}_{i} = {i}\n" for i in range(rows))
    yield "".join(f'{{"id": {i}, "name": "{draw(WORDS)}", "tags": []}},\n' for i in range(rows))
    yield ", ".join(draw(["positive", "negative", "neutral"]) for _ in range(rows * 3))
    yield "".join(f"{i}. Check the {draw(WORDS)} and write it down.\n" for i in range(rows))
    yield ("+" + "-" * 40 + "+\n|" + " " * 40 + "|\n") * generator.randrange(3, 12)
    yield "".join(f"{16 * i:08x}  " + "00 " * 16 + "\n" for i in range(rows))


def test_code_tables_and_lists_are_no_loops(vocab: Vocab) -> None:
    generator = random.Random(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [path.read_text("utf-8", "replace") for path in generator.sample(files, 60)]
    texts = [source[:10_000] for source in sources]
    texts += [f"{s[:1500]}\nOnce more:\n{s[:1500]}\nAnd again:\n{s[:1500]}" for s in sources[:20]]
    texts += [table for _ in range(20) for table in make_tables(generator)]
    is_word = has_word(vocab)
    for text in texts:
        tokens = vocab.tokenize(text, add_special=False, parse_special=False)
        for limits in (THOUGHTS, TEXT):
            assert find_loop(tokens, limits, is_word) is None, text[:200]


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    files = looping_pair(tmp_path_factory.mktemp("looping"))
    with running(files, n_ctx=8192, parallel=2) as engine:
        yield engine


@pytest.fixture
def thinker(looping: Running) -> Iterator[Callable[..., None]]:
    """Return a function that submits a request whose prompt opens thoughts, with a limit if one is given."""
    renderer = TemplateRenderer("{{ messages[0].content }}<think>", "", "")
    prompt = ChatPrompt([Message("user", "a")])

    def submit(number: int, max_tokens: int, limit: int | None, **options: Any) -> None:
        thinking = ThinkingLimit(limit, [("<think>", "</think>")]) if limit else None
        options |= {"thinking": thinking, "return_tokens": True}
        looping.answers.pop(number, None)
        request = Generate(number, prompt, GREEDY, max_tokens, **options)
        looping.submit(Preparer(looping.pair, renderer).prepare(request))

    yield submit
    renderer.close()


@pytest.mark.parametrize(
    ("speculative", "sampled"),
    [(PLAIN, False), (drafting(4), True), (SpeculationSettings(), False)],
)
def test_a_text_in_a_loop_is_ended(
    looping: Running, speculative: SpeculationSettings, sampled: bool
) -> None:
    """Beside another answer, which may repeat itself."""
    sampling = Sampling(temperature=0.5, top_k=1) if sampled else GREEDY
    ids = [
        looping.start([BOS, 100], 3500, sampling, speculative, loop_guard=scope)
        for scope in ("all", "thoughts")
    ]
    looping.finish()
    guarded, free = (looping.answers[number] for number in ids)
    assert (guarded.done.finish_reason, guarded.done.loop) == ("length", "text")
    assert guarded.tokens == free.tokens[: len(guarded.tokens)]
    assert 1024 <= len(guarded.tokens) < 3200
    assert (free.done.loop, len(free.tokens)) == ("", 3500)


@pytest.mark.parametrize(
    ("speculative", "scope", "limit"),
    [
        (SpeculationSettings(), "off", None),
        (SpeculationSettings(), "off", 3000),
        (PLAIN, None, None),
        (drafting(4), None, None),
        (SpeculationSettings(), None, None),
        (SpeculationSettings(), "thoughts", 3000),
    ],
)
def test_thoughts_in_a_loop_are_closed_and_the_answer_follows(
    looping: Running,
    thinker: Callable[..., None],
    speculative: SpeculationSettings,
    scope: LoopGuardScope | None,
    limit: int | None,
) -> None:
    thinker(1000, 1500, limit, speculative=speculative, loop_guard=scope)
    looping.finish()
    answer = looping.answers[1000]
    marker = looping.pair.vocab.tokenize("</think>", add_special=False, parse_special=True)
    places = [at for at in range(1500) if answer.tokens[at : at + len(marker)] == marker]
    if scope == "off":
        assert (answer.done.loop, places) == ("", [])
        return
    assert answer.done.loop == "thoughts"
    assert len(places) == 1
    assert 512 <= places[0] < 1200
    assert len(answer.tokens) == 1500  # the answer goes on, into a loop of its own, which is text


@pytest.mark.parametrize("speculative", [PLAIN, drafting(4), SpeculationSettings()])
@pytest.mark.parametrize("limit", [None, 3000])
def test_thoughts_end_on_request(
    looping: Running,
    thinker: Callable[..., None],
    speculative: SpeculationSettings,
    limit: int | None,
) -> None:
    """Those of this answer alone, and only while there are any."""
    engine = looping.engine
    tokens = looping.pair.vocab.tokenize("</think>", add_special=False, parse_special=True)
    for number in (2000, 2001):
        thinker(number, 400, limit, speculative=speculative, loop_guard="off")
    assert not engine.end_thoughts(2000)  # it has not begun
    while not engine.end_thoughts(2000):
        engine.step()
    assert not engine.end_thoughts(2000)
    assert not engine.end_thoughts(1999)
    looping.finish()
    assert not engine.end_thoughts(2000)
    ended, other = (looping.answers[number].tokens for number in (2000, 2001))
    place = next(at for at in range(400) if ended[at : at + len(tokens)] == tokens)
    assert place < 200
    assert ended[:place] == other[:place]
    assert len(ended) == len(other) == 400
    assert all(other[at : at + len(tokens)] != tokens for at in range(400))
