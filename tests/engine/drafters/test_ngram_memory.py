"""The memory of earlier requests: exact matches, a bounded size, and forgetting."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.speculation.drafters.ngram import (
    CAPACITY_TOKENS,
    KEY_TOKENS,
    MAX_MATCH_TOKENS,
    NgramIndex,
    NgramMemory,
)
from tests.support.rescoring import assert_alike
from tests.support.running import GREEDY, Running, drafting

texts = st.lists(st.integers(0, 2), max_size=30)
Action = tuple[list[int] | None, str | None]  # (text to add, or None to forget; conversation)
actions: st.SearchStrategy[list[Action]] = st.lists(
    st.tuples(st.none() | texts, st.sampled_from(["a", "b", None])), max_size=12
)


@given(actions, texts)
def test_find_returns_only_remembered_tokens(actions: list[Action], tokens: list[int]) -> None:
    """A match ends with the last tokens, and comes from no forgotten or overwritten text."""
    memory, stored = NgramMemory(64), list[tuple[list[int], str | None]]()
    for text, conversation in actions:
        if text is not None:
            memory.add(text, conversation)
            stored.append((text, conversation))
        else:
            memory.forget(conversation)
            stored = [
                entry for entry in stored if conversation is not None and entry[1] != conversation
            ]
        assert len(memory) <= 64
    match = memory.find(tokens)
    if match is None:
        return
    text, place, length = match
    assert length >= KEY_TOKENS
    assert text[place - length : place] == tokens[-length:]
    piece = text[place - length : place + 1]  # including the next token
    assert len(piece) == length + 1
    assert any(
        piece == entry[at : at + len(piece)] for entry, _ in stored for at in range(len(entry))
    )
    assert -1 not in text[place:]


@given(st.integers(1, 40), st.integers(0, 40), st.data())
def test_the_answer_of_the_same_question_is_found_among_others(
    n_others: int, n_words: int, data: st.DataObject
) -> None:
    """All questions end in the same words, as those of one chat template do."""
    ending = list(range(10))
    questions = [[100 + number] * n_words + [100 + number, *ending] for number in range(n_others)]
    memory = NgramMemory(1 << 13)
    for number in data.draw(st.permutations(range(n_others))):
        memory.add([*questions[number], *range(1000 * number, 1000 * number + 30)], None)
    asked = data.draw(st.integers(0, n_others - 1))
    proposal = NgramIndex((), questions[asked], memory).propose(questions[asked], 8, 0)
    assert proposal.tokens == list(range(1000 * asked, 1000 * asked + 8))


def test_a_prompt_that_leaves_nothing_to_chance_gives_its_answer_again() -> None:
    """Its drafts are in the best bucket from the first token on; those of a sampled answer are not."""
    memory, prompt, answer = NgramMemory(1 << 13), list(range(20)), list(range(100, 140))
    memory.add([*prompt, *answer], None)
    for repeats in (True, False):
        proposal = NgramIndex((), prompt, memory, repeats=repeats).propose(prompt, 16, 0)
        assert proposal.tokens == answer[:16]
        assert (proposal.strength == MAX_MATCH_TOKENS) == repeats
    longer = [77, *prompt]  # the same words at the end of another prompt
    assert NgramIndex((), longer, memory, repeats=True).propose(longer, 16, 0).strength == 20


def test_an_earlier_answer_is_proposed_in_another_request() -> None:
    memory = NgramMemory()
    answer = list(range(100, 200))
    memory.add([1, 2, 3, *answer], "a")
    proposal = NgramIndex((), [7, 8, 9], memory).propose([7, 8, 9, *answer[:20]], 64, 20)
    assert proposal.tokens == answer[20:84]
    memory.forget("b")
    assert memory.find(answer[:20]) is not None
    memory.forget("a")
    assert memory.find(answer[:20]) is None
    assert not len(memory)


def test_newer_of_two_matches_wins() -> None:
    memory = NgramMemory()
    memory.add([*range(10), 50, 51], None)
    memory.add([*range(10), 60, 61], None)
    match = memory.find(list(range(10)))
    assert match is not None
    text, place, length = match
    assert (text[place:], length) == ([60, 61], 10)


def test_memory_is_bounded_and_empty_memory_takes_nothing() -> None:
    tracemalloc.start()
    try:
        memory = NgramMemory()
        nothing, _ = tracemalloc.get_traced_memory()
        memory.add(list(range(100)), None)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nothing < 1 << 16
    assert size < 17 << 20
    assert size > 8 * CAPACITY_TOKENS  # the whole capacity is allocated with the first text


def test_the_oldest_is_overwritten() -> None:
    memory = NgramMemory(1 << 12)

    def is_found(start: int) -> bool:  # later entries with the same hash hide some places
        return any(memory.find(list(range(at, at + 50))) for at in range(start, start + 20))

    for start in range(0, 3 << 12, 1 << 11):
        memory.add(range(start, start + (1 << 11)), None)
    assert len(memory) == 1 << 12
    assert [is_found(at) for at in (0, 7_000, 9_000, 11_000)] == [False, False, True, True]
    memory.add(range(1 << 20), None)  # only the end of a text beyond the capacity is stored
    assert [is_found(at) for at in (9_000, 500_000, 1_048_000)] == [False, False, True]


PROMPT = [7, 8, 9]


@pytest.mark.parametrize(
    ("options", "remembered"),
    [
        ({}, True),
        ({"conversation": "c"}, True),
        ({"private": True}, False),
        ({"private": True, "conversation": "c"}, True),  # a conversation overrides `private`
        ({"cache_prompt": False}, False),
        ({"priority": "editor"}, False),
    ],
)
def test_requests_that_are_remembered(
    contextual: Running, options: dict[str, Any], remembered: bool
) -> None:
    contextual.forget()
    answer = contextual.ask(PROMPT, 20, GREEDY, **options)
    assert len(contextual.pair.memory) == remembered * len([*PROMPT, *answer.tokens])
    contextual.engine.forget("another")
    assert bool(len(contextual.pair.memory)) == remembered
    contextual.engine.forget(None)
    assert not len(contextual.pair.memory)


def test_answer_is_the_same_when_remembered_or_forgotten(
    contextual: Running,
) -> None:
    contextual.forget()
    first = contextual.ask(PROMPT, 60, GREEDY, drafting(None, "ngram"))
    rounds = first.done.speculation.rounds
    repeated = contextual.start(PROMPT, 60, GREEDY, drafting(None, "ngram"), conversation="c")
    beside = contextual.start([5, 6, 7, 8], 60, GREEDY)
    contextual.engine.step()
    contextual.engine.forget("c")  # the request is still running, and leaves nothing behind
    contextual.finish()
    target = contextual.pair.files.target
    assert_alike(target, PROMPT, contextual.answers[repeated].tokens, first.tokens)
    assert contextual.answers[repeated].done.speculation.rounds < rounds
    size = len(contextual.pair.memory)
    assert size == len(PROMPT) + 60 + 4 + len(contextual.answers[beside].tokens)
