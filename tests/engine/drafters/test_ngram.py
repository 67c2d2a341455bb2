"""Prompt lookup: every proposal really followed the last tokens somewhere."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.speculation.acceptance import BUCKETS
from localspec.engine.speculation.drafters.ngram import GRAM, NgramIndex, length_bucket

# Few different tokens, so that grams repeat.
texts = st.lists(st.integers(0, 3), max_size=40)


def match_length(corpus: list[int], end: int, tokens: list[int]) -> int:
    """Tokens before `end` of the corpus that equal the last tokens, one by one."""
    length = 0
    while length < min(end, len(tokens), 48) and corpus[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, texts, st.integers(1, 8), st.integers(1, 20))
def test_a_proposal_followed_the_same_tokens_before(
    tokens: list[int], prediction: list[int], limit: int, written: int
) -> None:
    lookup = NgramIndex(prediction)
    start = max(len(tokens) - written, 0)
    for end in range(start, len(tokens) + 1):  # the text grows, as during an answer
        seen = tokens[:end]
        drafts, length = lookup.propose(seen, limit, GRAM + 1)
        if not drafts:
            continue
        assert len(drafts) <= limit
        assert length >= GRAM
        places = [
            (corpus, place)
            for corpus in (prediction, seen)
            for place in range(GRAM, len(corpus))
            if corpus[place : place + len(drafts)] == drafts
        ]
        assert any(match_length(corpus, place, seen) == length for corpus, place in places)


@given(texts)
def test_the_longest_of_the_latest_matches_is_followed(tokens: list[int]) -> None:
    drafts, length = NgramIndex().propose(tokens, 4, GRAM + 1)
    ends = [
        place
        for place in range(GRAM, len(tokens))
        if tokens[place - GRAM : place] == tokens[-GRAM:] and len(tokens) >= GRAM
    ]
    lengths = [match_length(tokens, place, tokens) for place in ends[-8:]]
    assert length == max(lengths, default=0)
    assert bool(drafts) == bool(lengths)


def test_text_without_repeats_has_no_proposal() -> None:
    assert NgramIndex().propose(list(range(50)), 8, 10) == ([], 0)


def test_a_repeat_is_continued_as_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 9, 9, 1, 2, 3]
    assert NgramIndex().propose(text, 2, 10) == ([4, 5], 3)


def test_the_longer_match_wins_over_the_later_one() -> None:
    text = [7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3]
    assert NgramIndex().propose(text, 1, 10) == ([4], 4)


def test_nothing_is_proposed_for_no_room() -> None:
    assert NgramIndex([1, 2, 3]).propose([1, 2, 3, 1, 2, 3], 0, 0) == ([], 0)


def test_a_predicted_answer_is_proposed_from_its_first_token() -> None:
    prediction = [50, 51, 52, 53, 54]
    drafts, length = NgramIndex(prediction).propose([1, 2], 3, 0)
    assert drafts == [50, 51, 52]
    assert length >= GRAM


@pytest.mark.parametrize("written", [1, 2])
def test_a_predicted_answer_goes_on_after_its_first_tokens(written: int) -> None:
    """The first token always comes with the prompt's own pass, without drafts."""
    prediction = [50, 51, 52, 53, 54]
    text = [1, 2, *prediction[:written]]
    drafts, _ = NgramIndex(prediction).propose(text, 9, written)
    assert drafts == prediction[written:]


@pytest.mark.parametrize("text", [[1, 2, 99], [1, 50, 99]])
def test_a_prediction_that_was_wrong_from_the_start_waits_for_a_match(text: list[int]) -> None:
    lookup = NgramIndex([50, 51, 52, 53, 54])
    assert lookup.propose(text, 9, len(text) - 1) == ([], 0)
    assert lookup.propose([*text, 50, 51, 52], 9, len(text) + 2) == ([53, 54], 3)


def test_a_prediction_of_one_token_is_over_after_it() -> None:
    assert NgramIndex([50]).propose([1, 50], 9, 1) == ([], 0)


def test_match_lengths_fall_into_the_buckets_of_a_calibration() -> None:
    buckets = [length_bucket(length) for length in range(60)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(BUCKETS))


@given(texts, texts, st.integers(0, 40))
def test_what_is_known_at_the_start_and_what_comes_are_looked_up_alike(
    tokens: list[int], prediction: list[int], known: int
) -> None:
    """However much of the text was given as the prompt, the same drafts follow the same matches."""
    sorted_, grown = NgramIndex(prediction, tokens[:known]), NgramIndex(prediction)
    for end in range(known, len(tokens) + 1):
        wanted = grown.propose(tokens[:end], 5, GRAM + 1)
        assert sorted_.propose(tokens[:end], 5, GRAM + 1) == wanted


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
    assert lookup.propose([5, 6, 7], 2, 9) == ([8, 9], 3)
