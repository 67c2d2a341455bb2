"""Thoughts that may have only so many tokens: they end with the model's own marker, the answer follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.thoughts import ThoughtLimit, ThoughtMarker
from localspec.protocol.frames import (
    ChatPrompt,
    Generate,
    Message,
    Sampling,
    SpeculationSettings,
    ThinkingLimit,
)
from tests.support.pairs import BOS, expected
from tests.support.running import GREEDY, PLAIN, Running, drafting

FIRST, BESIDE = 7, 300
WAYS = [PLAIN, drafting(1), drafting(4), drafting(8, "auto"), SpeculationSettings()]
HOT = Sampling(temperature=0.8, top_k=3)


def limited(engine: Running, tokens: int, opened: int = 2, closing: str = "</ab>") -> ThinkingLimit:
    """A limit for an answer whose first tokens are taken for the marker that opens thoughts."""
    vocab = engine.pair.vocab
    opening = b"".join(map(vocab.piece, expected(FIRST, opened))).decode().lstrip()
    return ThinkingLimit(tokens, [("<never>", "</never>"), (opening, closing)])


def closed(engine: Running, text: str = "</ab>") -> list[int]:
    return engine.pair.vocab.tokenize(text, add_special=False, parse_special=True)


@pytest.mark.parametrize("speculative", WAYS)
@pytest.mark.parametrize("limit", [0, 1, 9])
def test_thoughts_end_at_the_limit_whatever_is_drafted_and_nobody_beside_sees_it(
    cycle: Running, limit: int, speculative: SpeculationSettings
) -> None:
    marker = closed(cycle)
    assert len(marker) > 1
    cycle.forget()
    thinking = limited(cycle, limit)
    ids = [
        cycle.start([BOS, FIRST], 40, GREEDY, speculative, thinking=thinking),
        cycle.start([BOS, BESIDE], 40, GREEDY, speculative),
        cycle.start([BOS, FIRST], 40, HOT, speculative, thinking=limited(cycle, limit, 0)),
    ]
    cycle.finish()
    tokens, beside, hot = (cycle.answers[each].tokens for each in ids)
    thoughts = expected(FIRST, 2 + limit)
    assert tokens == [*thoughts, *marker, *expected(marker[-1], 40 - len(thoughts) - len(marker))]
    assert beside == expected(BESIDE, 40)
    # An empty text opens them before the answer; they end where what is drawn is a whole character.
    end = next(at for at in range(limit, 40) if hot[at : at + len(marker)] == marker)
    assert end <= limit + 8
    assert all(cycle.pair.vocab.piece(hot[at - 1])[-1] >= 0x80 for at in range(limit, end))


def test_thoughts_that_end_by_themselves_and_answers_without_any_are_left_alone(
    cycle: Running,
) -> None:
    own = b"".join(map(cycle.pair.vocab.piece, expected(FIRST, 9)[6:])).decode()
    for thinking in (limited(cycle, 10, closing=own), ThinkingLimit(0, [("<t>", "</t>")])):
        for speculative in (PLAIN, drafting(4)):
            cycle.forget()
            answer = cycle.ask([BOS, FIRST], 40, GREEDY, speculative, thinking=thinking)
            assert answer.tokens == expected(FIRST, 40)


# ------------------------------------------------------------------ of any text

PIECES = ["a", "b ", "\n", "<", "</", "think", ">", "é"[:1], "<think>", "</think>", "\u20ac"]
BYTES = [*(piece.encode() for piece in PIECES), b"\xe2", b"\x82", b"\xac"]
CLOSING = [BYTES.index(piece) for piece in (b"</", b"think", b">")]


@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=60),
    st.integers(0, 12),
    st.sampled_from(["", "…<think>\n"]),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_whatever_a_model_writes_its_thoughts_end_in_time_and_once(
    wishes: list[int], limit: int, tail: str, tried: list[int]
) -> None:
    """`wishes` is what it would write; some tokens are taken back and written again on the way."""
    marker = ThoughtMarker(b"<think>", b"</think>", CLOSING)
    guide = ThoughtLimit(limit, [marker], tail, BYTES.__getitem__, len(BYTES))
    written: list[int] = []

    def write(wish: int) -> None:
        forced = guide.forced_tokens()
        mask = guide.mask()
        token = forced[0] if forced else wish
        assert (mask is None) == (not forced)
        assert mask is None or mask.nonzero()[0].tolist() == [token]
        assert guide.count_valid([token]) == 1
        assert not forced or guide.count_valid([wish]) == (wish == token)
        guide.consume(token)
        written.append(token)

    for at, wish in enumerate(wishes):
        write(wish)
        if at < len(tried):  # a round that was not kept
            count = min(tried[at], len(written))
            again = written[len(written) - count :]
            guide.take_back(count)
            assert guide.count_valid(again) == count
            for token in again:
                guide.consume(token)
    text = b"".join(BYTES[token] for token in written)
    begun = text if tail else text.lstrip()
    if not tail and not begun.startswith(b"<think>"):
        assert written == wishes
        return
    thoughts, marked, _ = begun.partition(b"</think>")
    if not marked:
        assert len(written) <= limit + len(CLOSING) + 10 + (0 if tail else written_before(written))
    elif b"</think>" not in b"".join(BYTES[wish] for wish in wishes):
        assert len(thoughts) >= limit  # no token here is empty


def written_before(tokens: list[int]) -> int:
    """Tokens up to the opening marker, with it."""
    counts = range(1, len(tokens) + 1)
    return next(n for n in counts if b"<think>" in b"".join(BYTES[t] for t in tokens[:n]))


def test_a_marker_that_is_one_control_token_is_forced_as_that(cycle: Running) -> None:
    end = "<|user|>"
    marker = closed(cycle, end)
    assert len(marker) == 1
    cycle.forget()
    thinking: Any = limited(cycle, 3, closing=end)
    answer = cycle.ask([BOS, FIRST], 40, GREEDY, drafting(4), thinking=thinking)
    assert answer.tokens[:6] == [*expected(FIRST, 5), *marker]


@pytest.mark.parametrize(
    ("template", "forced"),
    [
        ("{{ messages[0].content }}<think>\n", "</think>"),  # opened by the prompt
        ("{{ messages[0].content }}{# <think> #}", ""),  # by the answer, if at all
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_limit_is_for_models_whose_template_knows_thoughts(
    cycle: Running, template: str, forced: str | None
) -> None:
    renderer = TemplateRenderer(template, "", "")
    try:
        preparer = Preparer(cycle.pair, renderer)
        prompt = ChatPrompt([Message("user", "a")])
        thinking = ThinkingLimit(0, [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
        ready = preparer.prepare(Generate(1, prompt, thinking=thinking))
    finally:
        renderer.close()
    assert (ready.matcher is None) == (forced is None)
    if ready.matcher is not None:
        assert ready.matcher.forced_tokens() == closed(cycle, forced or "")
