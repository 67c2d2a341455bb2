"""Lookup: every proposal really followed the last tokens somewhere, or follows a change that was made."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.speculation.acceptance import N_BUCKETS, Calibration
from localspec.engine.speculation.drafters.ngram import (
    GRAM_TOKENS,
    MAX_LOOKUP_TOKENS,
    NO_TOKENS,
    ExpectedTokens,
    NgramDrafter,
    NgramIndex,
    NgramMemory,
    choose_buckets,
)

# Few different tokens, so that grams repeat.
texts = st.lists(st.integers(0, 3), max_size=40)


def match_length(corpus: list[int], end: int, tokens: list[int]) -> int:
    """Tokens before `end` of the corpus that equal the last tokens, one by one."""
    length = 0
    while length < min(end, len(tokens), 48) and corpus[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, texts, st.integers(1, 8), st.integers(1, 20))
def test_a_first_proposal_followed_the_same_tokens_before(
    tokens: list[int], prediction: list[int], limit: int, written: int
) -> None:
    """The longest match of the latest places, in what is predicted and in the text itself."""
    for end in range(max(len(tokens) - written, 0), len(tokens) + 1):
        seen = tokens[:end]
        found = NgramIndex(prediction).propose(seen, limit, GRAM_TOKENS + 1)
        lengths = [
            match_length(corpus, place, seen)
            for corpus in (prediction, seen)
            for place in [
                place
                for place in range(GRAM_TOKENS, len(corpus))
                if len(seen) >= GRAM_TOKENS
                and corpus[place - GRAM_TOKENS : place] == seen[-GRAM_TOKENS:]
            ][-8:]
        ]
        assert found.strength == max(lengths, default=0)
        assert bool(found.tokens) == bool(lengths)
        assert len(found.tokens) <= min(limit, MAX_LOOKUP_TOKENS)


@given(texts, texts, st.lists(texts, max_size=3), st.integers(1, 64), st.data())
def test_what_is_proposed_comes_from_the_texts_that_were_given(
    tokens: list[int],
    prediction: list[int],
    earlier: list[list[int]],
    limit: int,
    data: st.DataObject,
) -> None:
    """Wherever it is looked up, and however the answer goes on; and never more than is asked for."""
    memory = NgramMemory(64)
    for each in earlier:
        memory.add(each, None)
    index, seen = NgramIndex(prediction, tokens, memory), list(tokens)
    for written in range(20):
        found = index.propose(seen, limit, written)
        assert len(found.tokens) <= limit
        assert bool(found.tokens) == bool(found.strength)
        assert {*found.tokens} <= {*prediction, *seen}.union(*earlier)
        assert len(choose_buckets(found)) == len(found.tokens)
        seen.append(data.draw(st.sampled_from([*found.tokens[:1], 0, 1, 2, 3])))


def test_text_without_repeats_has_no_proposal() -> None:
    assert NgramIndex().propose(list(range(50)), 8, 10) == NO_TOKENS


def test_a_repeat_is_continued_as_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 9, 9, 1, 2, 3]
    assert NgramIndex().propose(text, 2, 10) == ExpectedTokens([4, 5], 3)


def test_the_longer_match_wins_over_the_later_one() -> None:
    text = [7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3]
    assert NgramIndex().propose(text, 1, 10) == ExpectedTokens([4], 4, disputed=True)


def test_a_repetition_is_expected_to_go_on() -> None:
    text = [9, *[1, 2, 3, 4, 5] * 3]
    assert NgramIndex().propose(text, 12, 10).tokens == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


def test_nothing_is_proposed_for_no_room() -> None:
    assert NgramIndex([1, 2, 3]).propose([1, 2, 3, 1, 2, 3], 0, 0) == NO_TOKENS


# ---------------------------------------------------------------------------- predictions


def test_a_predicted_answer_is_proposed_from_its_first_token() -> None:
    prediction = [50, 51, 52, 53, 54]
    found = NgramIndex(prediction).propose([1, 2], 3, 0)
    assert found.tokens == [50, 51, 52]
    assert found.strength >= GRAM_TOKENS


@pytest.mark.parametrize("written", [1, 2])
def test_a_predicted_answer_goes_on_after_its_first_tokens(written: int) -> None:
    """The first token always comes with the prompt's own pass, without drafts."""
    prediction = [50, 51, 52, 53, 54]
    text = [1, 2, *prediction[:written]]
    assert NgramIndex(prediction).propose(text, 9, written).tokens == prediction[written:]


def test_an_answer_that_begins_otherwise_finds_its_way_into_the_prediction() -> None:
    index, text = NgramIndex([50, 51, 52, 53, 54]), [1, 2, 7]
    assert index.propose(text, 9, 1) == NO_TOKENS
    text += [50, 51, 52]
    assert index.propose(text, 9, 4) == ExpectedTokens([53, 54], 3)


def test_a_prediction_of_one_token_is_over_after_it() -> None:
    assert NgramIndex([50]).propose([1, 50], 9, 1) == NO_TOKENS


# ---------------------------------------------------------------------------- through changes


def right(prompt: list[int], answer: list[int]) -> list[bool]:
    """Was each token of the answer what was proposed?"""
    index, text, found = NgramIndex((), prompt), list(prompt), []
    for at, token in enumerate(answer):
        found.append(index.propose(text, 1, at).tokens == [token])
        text.append(token)
    return found


def replaced(text: list[int], old: list[int], new: list[int]) -> list[int]:
    out, at = list[int](), 0
    while at < len(text):
        here = text[at : at + len(old)] == old
        out += new if here else [text[at]]
        at += len(old) if here else 1
    return out


@pytest.mark.parametrize("new", [[70], [70, 71], [70, 71, 72, 73]])
@pytest.mark.parametrize("old", [[60], [60, 61], [60, 61, 62]])
def test_a_name_that_was_replaced_is_replaced_from_then_on(old: list[int], new: list[int]) -> None:
    prompt = [90, 91, *range(10), *old, *range(10, 20), *old, 20, 21, *old, *range(22, 30)]
    answer = replaced(prompt[2:], old, new)
    hits = right(prompt, [90, 91, *answer])
    first = answer.index(new[0]) + 2
    back = first + len(new) + 1  # one token after the name says where the text goes on
    assert all(hits[3:first])
    assert all(hits[back:])


def test_after_a_token_of_its_own_a_copy_goes_on_at_once() -> None:
    prompt = list(range(30))
    for answer in (
        [*range(10), 77, *range(10, 20)],  # put in
        [*range(10), *range(12, 22)],  # left out
        [*range(10), 77, 78, *range(11, 21)],  # replaced
    ):
        assert right(prompt, answer)[-8:] == [True] * 8


def test_what_was_changed_once_and_not_again_is_left_alone() -> None:
    prompt = [*range(10), 60, *range(10, 20), 60, *range(20, 30), 60, *range(30, 40)]
    hits = right(prompt, [70 if at == 10 else token for at, token in enumerate(prompt)])
    assert hits.count(False) == 3 + 2 + 1  # to begin, the change and back from it, and once more


# ---------------------------------------------------------------------------- what is known of them


def test_each_token_is_surer_if_those_before_it_come() -> None:
    known = choose_buckets(ExpectedTokens(list(range(60)), 3, (5,)))
    assert known.pop(5) == 0  # a change that is expected
    assert known == sorted(known)
    assert {*known} == {*range(2, N_BUCKETS)}
    assert (
        choose_buckets(ExpectedTokens([1, 2], 54)) == [N_BUCKETS - 1] * 2
    )  # of a long text that was left and found again


def test_where_another_token_has_followed_the_first_one_is_less_sure() -> None:
    for strength in range(1, 60):
        first, second = choose_buckets(ExpectedTokens([1, 2], strength, disputed=True))
        assert 0 <= first <= second == choose_buckets(ExpectedTokens([1, 2], strength))[1]


def test_what_is_known_of_any_pair_is_sound() -> None:
    learned = NgramDrafter.learned
    found = Calibration.from_dict(learned, NgramDrafter.initial_acceptance)
    assert found.as_dict() == learned
    sure = found.rates[:, 6]  # of an average text
    assert sure[-1] > 0.95 > 0.75 > sure[2] > sure[0]


# ---------------------------------------------------------------------------- prompts


@given(texts, texts, st.integers(0, 40))
def test_what_is_known_at_the_start_and_what_comes_are_looked_up_alike(
    tokens: list[int], prediction: list[int], known: int
) -> None:
    """However much of the text was given as the prompt, the same drafts follow the same matches."""
    sorted_, grown = NgramIndex(prediction, tokens[:known]), NgramIndex(prediction)
    seen = tokens[:known]
    for token in [*tokens[known:], 0]:
        assert sorted_.propose(seen, 5, GRAM_TOKENS + 1) == grown.propose(seen, 5, GRAM_TOKENS + 1)
        seen.append(token)  # the text itself grows, as a sequence's does


@given(st.lists(st.integers(2**21 - 4, 2**21 - 1), min_size=8, max_size=30))
def test_the_largest_token_ids_are_told_apart(tokens: list[int]) -> None:
    assert NgramIndex((), tokens).propose(tokens, 4, 9) == NgramIndex().propose(tokens, 4, 9)


def test_a_long_text_takes_little_memory() -> None:
    """400 000 tokens took 94 MiB as a table of tuples."""
    text = list(range(400_000))
    tracemalloc.start()
    try:
        lookup = NgramIndex(text, text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 20 << 20
    assert lookup.propose([*text, 5, 6, 7], 2, 9) == ExpectedTokens([8, 9], 3)
