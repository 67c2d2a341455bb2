"""What is remembered of earlier requests: found where it stands, bounded, and gone when it is forgotten."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.speculation.drafters.ngram import (
    CAPACITY_TOKENS,
    KEY_TOKENS,
    NgramIndex,
    NgramMemory,
)
from tests.support.rescoring import assert_alike
from tests.support.running import GREEDY, Running, drafting

texts = st.lists(st.integers(0, 2), max_size=30)
Act = tuple[list[int] | None, str | None]  # a text that is kept, or None: forgotten; and whose
acts: st.SearchStrategy[list[Act]] = st.lists(
    st.tuples(st.none() | texts, st.sampled_from(["a", "b", None])), max_size=12
)


@given(acts, texts)
def test_only_what_is_remembered_is_found(acts: list[Act], tokens: list[int]) -> None:
    """The last tokens of it, whole, and nothing that was forgotten or overwritten."""
    memory, kept = NgramMemory(64), list[tuple[list[int], str | None]]()
    for text, conversation in acts:
        if text is not None:
            memory.add(text, conversation)
            kept.append((text, conversation))
        else:
            memory.forget(conversation)
            kept = [k for k in kept if conversation is not None and k[1] != conversation]
        assert len(memory) <= 64
    found = memory.find(tokens)
    if found is None:
        return
    text, place, length = found
    assert length >= KEY_TOKENS
    assert text[place - length : place] == tokens[-length:]
    piece = text[place - length : place + 1]  # with a token that follows
    assert len(piece) == length + 1
    assert any(piece == k[at : at + len(piece)] for k, _ in kept for at in range(len(k)))
    assert -1 not in text[place:]


def test_an_earlier_answer_is_proposed_in_another_request() -> None:
    memory = NgramMemory()
    answer = list(range(100, 200))
    memory.add([1, 2, 3, *answer], "a")
    found = NgramIndex((), [7, 8, 9], memory).propose([7, 8, 9, *answer[:20]], 64, 20)
    assert found.tokens == answer[20:84]
    memory.forget("b")
    assert memory.find(answer[:20]) is not None
    memory.forget("a")
    assert memory.find(answer[:20]) is None
    assert not len(memory)


def test_the_newer_of_two_texts_is_followed() -> None:
    memory = NgramMemory()
    memory.add([*range(10), 50, 51], None)
    memory.add([*range(10), 60, 61], None)
    found = memory.find(list(range(10)))
    assert found is not None
    text, place, length = found
    assert (text[place:], length) == ([60, 61], 10)


def test_a_memory_has_a_bound_and_nothing_to_remember_takes_none() -> None:
    tracemalloc.start()
    try:
        memory = NgramMemory()
        nothing, _ = tracemalloc.get_traced_memory()
        memory.add(list(range(100)), None)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nothing < 1 << 16
    assert size < 16 << 20
    assert size > 8 * CAPACITY_TOKENS  # all of it, from the first text on


def test_the_oldest_is_overwritten() -> None:
    memory = NgramMemory(1 << 12)

    def found(start: int) -> bool:  # some places are hidden by later ones of the same hash
        return any(memory.find(list(range(at, at + 50))) for at in range(start, start + 20))

    for start in range(0, 3 << 12, 1 << 11):
        memory.add(range(start, start + (1 << 11)), None)
    assert len(memory) == 1 << 12
    assert [found(at) for at in (0, 7_000, 9_000, 11_000)] == [False, False, True, True]
    memory.add(range(1 << 20), None)  # of more than there is room for, the end
    assert [found(at) for at in (9_000, 500_000, 1_048_000)] == [False, False, True]


# ---------------------------------------------------------------------------- of a loaded pair

PROMPT = [7, 8, 9]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, True),
        ({"conversation": "c"}, True),
        ({"private": True}, False),
        ({"private": True, "conversation": "c"}, True),  # private is what has no conversation
        ({"cache_prompt": False}, False),
        ({"priority": "editor"}, False),
    ],
)
def test_what_a_request_leaves_behind(
    contextual: Running, asked: dict[str, Any], kept: bool
) -> None:
    contextual.forget()
    answer = contextual.ask(PROMPT, 20, GREEDY, **asked)
    assert len(contextual.pair.memory) == kept * len([*PROMPT, *answer.tokens])
    contextual.engine.forget("another")
    assert bool(len(contextual.pair.memory)) == kept
    contextual.engine.forget(None)
    assert not len(contextual.pair.memory)


def test_an_answer_is_the_same_where_it_is_remembered_and_where_it_is_forgotten_meanwhile(
    contextual: Running,
) -> None:
    contextual.forget()
    first = contextual.ask(PROMPT, 60, GREEDY, drafting(None, "ngram"))
    rounds = first.done.speculation.rounds
    again = contextual.start(PROMPT, 60, GREEDY, drafting(None, "ngram"), conversation="c")
    beside = contextual.start([5, 6, 7, 8], 60, GREEDY)
    contextual.engine.step()
    contextual.engine.forget("c")  # it is still running, and leaves nothing
    contextual.finish()
    target = contextual.pair.files.target
    assert_alike(target, PROMPT, contextual.answers[again].tokens, first.tokens)
    assert contextual.answers[again].done.speculation.rounds < rounds
    kept = len(contextual.pair.memory)
    assert kept == len(PROMPT) + 60 + 4 + len(contextual.answers[beside].tokens)
