"""Thoughts with a token limit end with the model's own marker, and the answer follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sampling.thoughts import ThoughtLimit, ThoughtMarker
from localspec.protocol.calls import CallFormat, ToolSet
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

FIRST_TOKEN, BYSTANDER_TOKEN = 7, 300
SPECULATIONS = [PLAIN, drafting(1), drafting(4), drafting(8, "auto"), SpeculationSettings()]
SAMPLED = Sampling(temperature=0.8, top_k=3)


def make_limit(
    engine: Running, tokens: int, opened: int = 2, closing: str = "</ab>"
) -> ThinkingLimit:
    """Return a limit for an answer whose first tokens serve as the opening marker of thoughts."""
    vocab = engine.pair.vocab
    opening = b"".join(map(vocab.piece, expected(FIRST_TOKEN, opened))).decode().lstrip()
    return ThinkingLimit(tokens, [("<never>", "</never>"), (opening, closing)])


def tokenize_marker(engine: Running, text: str = "</ab>") -> list[int]:
    return engine.pair.vocab.tokenize(text, add_special=False, parse_special=True)


@pytest.mark.parametrize("speculative", SPECULATIONS)
@pytest.mark.parametrize("limit", [0, 1, 9])
def test_thoughts_end_at_the_limit_whatever_is_drafted(
    cycle: Running, limit: int, speculative: SpeculationSettings
) -> None:
    marker = tokenize_marker(cycle)
    assert len(marker) > 1
    cycle.forget()
    thinking = make_limit(cycle, limit)
    ids = [
        cycle.start([BOS, FIRST_TOKEN], 40, GREEDY, speculative, thinking=thinking),
        cycle.start([BOS, BYSTANDER_TOKEN], 40, GREEDY, speculative),
        cycle.start(
            [BOS, FIRST_TOKEN], 40, SAMPLED, speculative, thinking=make_limit(cycle, limit, 0)
        ),
    ]
    cycle.finish()
    tokens, beside, hot = (cycle.answers[request].tokens for request in ids)
    thoughts = expected(FIRST_TOKEN, 2 + limit)
    assert tokens == [*thoughts, *marker, *expected(marker[-1], 40 - len(thoughts) - len(marker))]
    assert beside == expected(BYSTANDER_TOKEN, 40)
    # An empty marker opens thoughts before the answer; they end after a complete character.
    end = next(at for at in range(limit, 40) if hot[at : at + len(marker)] == marker)
    assert end <= limit + 8
    assert all(cycle.pair.vocab.piece(hot[at - 1])[-1] >= 0x80 for at in range(limit, end))


def test_short_or_missing_thoughts_are_left_alone(
    cycle: Running,
) -> None:
    closing = b"".join(map(cycle.pair.vocab.piece, expected(FIRST_TOKEN, 9)[6:])).decode()
    for thinking in (make_limit(cycle, 10, closing=closing), ThinkingLimit(0, [("<t>", "</t>")])):
        for speculative in (PLAIN, drafting(4)):
            cycle.forget()
            answer = cycle.ask([BOS, FIRST_TOKEN], 40, GREEDY, speculative, thinking=thinking)
            assert answer.tokens == expected(FIRST_TOKEN, 40)


@pytest.mark.parametrize("speculative", SPECULATIONS)
@pytest.mark.parametrize("tool", ["w59", "other"])
def test_a_call_ends_thoughts_and_their_limit(
    cycle: Running, tool: str, speculative: SpeculationSettings
) -> None:
    """The text in the thoughts is "… Nx w59 w182 …": a call of "w59" if there is such a tool."""
    opening = b"".join(map(cycle.pair.vocab.piece, expected(FIRST_TOKEN, 2))).decode().lstrip()
    cycle.forget()
    answer = cycle.ask(
        [BOS, FIRST_TOKEN],
        60,
        GREEDY,
        speculative,
        thinking=ThinkingLimit(24, [(opening, "</ab>")]),
        thoughts=[(opening, "</ab>")],
        tools=ToolSet(CallFormat("named", ("Nx",), middle=" w182"), {tool: {"type": "object"}}),
    )
    assert (answer.tokens == expected(FIRST_TOKEN, 60)) == (tool == "w59")


PIECES = ["a", "b ", "\n", "<", "</", "think", ">", "é"[:1], "<think>", "</think>", "\u20ac"]
BYTES = [*(piece.encode() for piece in PIECES), b"\xe2", b"\x82", b"\xac"]
CLOSING = [BYTES.index(piece) for piece in (b"</", b"think", b">")]


@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=60),
    st.integers(0, 12),
    st.sampled_from(["", "…<think>\n"]),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_thoughts_of_any_text_end_in_time_and_once(
    preferred: list[int], limit: int, tail: str, rollbacks: list[int]
) -> None:
    """`preferred` are the tokens of the model; some are rolled back and repeated."""
    marker = ThoughtMarker("<think>", "</think>", CLOSING)
    guide = ThoughtLimit(limit, [marker], tail, BYTES.__getitem__, len(BYTES))
    output: list[int] = []

    def write_token(token_choice: int) -> None:
        forced = guide.forced_tokens()
        mask = guide.mask()
        token = forced[0] if forced else token_choice
        assert (mask is None) == (not forced)
        assert mask is None or mask.nonzero()[0].tolist() == [token]
        assert guide.count_valid([token]) == 1
        assert not forced or guide.count_valid([token_choice]) == (token_choice == token)
        guide.consume(token)
        output.append(token)

    for at, token_choice in enumerate(preferred):
        write_token(token_choice)
        if at < len(rollbacks):  # a rejected round
            count = min(rollbacks[at], len(output))
            removed = output[len(output) - count :]
            guide.take_back(count)
            assert guide.count_valid(removed) == count
            for token in removed:
                guide.consume(token)
    text = b"".join(BYTES[token] for token in output)
    answer = text if tail else text.lstrip()
    if not tail and not answer.startswith(b"<think>"):
        assert output == preferred
        return
    thoughts, marked, _ = answer.partition(b"</think>")
    if not marked:
        assert len(output) <= limit + len(CLOSING) + 10 + (
            0 if tail else count_opening_tokens(output)
        )
    elif b"</think>" not in b"".join(BYTES[token_choice] for token_choice in preferred):
        assert len(thoughts) >= limit  # no token here is empty


def test_a_second_block_of_thoughts_counts_as_well() -> None:
    marker = ThoughtMarker("<think>", "</think>", [BYTES.index(b"</think>")])
    opening, closing, letter, line = map(BYTES.index, (b"<think>", b"</think>", b"a", b"\n"))
    guide = ThoughtLimit(4, [marker], "", BYTES.__getitem__, len(BYTES))
    for token in [opening, letter, letter, closing, line, opening, letter]:
        assert not guide.forced_tokens()
        guide.consume(token)
    assert guide.is_thinking
    guide.consume(letter)
    assert guide.forced_tokens() == [closing]
    guide.consume(closing)
    assert not guide.is_thinking


def count_opening_tokens(tokens: list[int]) -> int:
    """Count the tokens up to and including the opening marker."""
    counts = range(1, len(tokens) + 1)
    return next(n for n in counts if b"<think>" in b"".join(BYTES[t] for t in tokens[:n]))


def test_marker_that_is_a_control_token_is_forced_as_one(cycle: Running) -> None:
    end = "<|user|>"
    marker = tokenize_marker(cycle, end)
    assert len(marker) == 1
    cycle.forget()
    thinking: Any = make_limit(cycle, 3, closing=end)
    answer = cycle.ask([BOS, FIRST_TOKEN], 40, GREEDY, drafting(4), thinking=thinking)
    assert answer.tokens[:6] == [*expected(FIRST_TOKEN, 5), *marker]


@pytest.mark.parametrize(
    ("template", "forced"),
    [
        ("{{ messages[0].content }}<think>\n", "</think>"),  # opened by the prompt
        ("{{ messages[0].content }}{# <think> #}", ""),  # by the answer, if at all
        ("{{ messages[0].content }}", None),
    ],
)
def test_limit_applies_only_if_the_template_has_thoughts(
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
        assert ready.matcher.forced_tokens() == tokenize_marker(cycle, forced or "")
