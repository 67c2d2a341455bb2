"""N-gram lookup proposes only tokens that followed the same tokens before, or follow a repeated edit."""

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
    """Count the tokens before `end` of the corpus that equal the last tokens, one by one."""
    length = 0
    while length < min(end, len(tokens), 48) and corpus[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, texts, st.integers(1, 8), st.integers(1, 20))
def test_a_first_proposal_followed_the_same_tokens_before(
    tokens: list[int], prediction: list[int], limit: int, written: int
) -> None:
    """It continues the longest match among the latest ones, in the prediction and in the text."""
    for end in range(max(len(tokens) - written, 0), len(tokens) + 1):
        text = tokens[:end]
        proposal = NgramIndex(prediction).propose(text, limit, GRAM_TOKENS + 1)
        lengths = [
            match_length(corpus, place, text)
            for corpus in (prediction, text)
            for place in [
                place
                for place in range(GRAM_TOKENS, len(corpus))
                if len(text) >= GRAM_TOKENS
                and corpus[place - GRAM_TOKENS : place] == text[-GRAM_TOKENS:]
            ][-8:]
        ]
        assert proposal.strength == max(lengths, default=0)
        assert bool(proposal.tokens) == bool(lengths)
        assert len(proposal.tokens) <= min(limit, MAX_LOOKUP_TOKENS)


@given(texts, texts, st.lists(texts, max_size=3), st.integers(1, 64), st.data())
def test_proposals_come_from_the_given_texts(
    tokens: list[int],
    prediction: list[int],
    earlier: list[list[int]],
    limit: int,
    data: st.DataObject,
) -> None:
    """This holds for every source and continuation, and no proposal exceeds the limit."""
    memory = NgramMemory(64)
    for text in earlier:
        memory.add(text, None)
    index, answer = NgramIndex(prediction, tokens, memory), list(tokens)
    for written in range(20):
        proposal = index.propose(answer, limit, written)
        assert len(proposal.tokens) <= limit
        assert bool(proposal.tokens) == bool(proposal.strength)
        assert {*proposal.tokens} <= {*prediction, *answer}.union(*earlier)
        assert len(choose_buckets(proposal)) == len(proposal.tokens)
        answer.append(data.draw(st.sampled_from([*proposal.tokens[:1], 0, 1, 2, 3])))


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


def test_limit_zero_gives_no_proposal() -> None:
    assert NgramIndex([1, 2, 3]).propose([1, 2, 3, 1, 2, 3], 0, 0) == NO_TOKENS


def test_a_predicted_answer_is_proposed_from_its_first_token() -> None:
    prediction = [50, 51, 52, 53, 54]
    proposal = NgramIndex(prediction).propose([1, 2], 3, 0)
    assert proposal.tokens == [50, 51, 52]
    assert proposal.strength >= GRAM_TOKENS


@pytest.mark.parametrize("written", [1, 2])
def test_a_predicted_answer_goes_on_after_its_first_tokens(written: int) -> None:
    """The first token always comes with the prompt's own pass, without drafts."""
    prediction = [50, 51, 52, 53, 54]
    text = [1, 2, *prediction[:written]]
    assert NgramIndex(prediction).propose(text, 9, written).tokens == prediction[written:]


def test_answer_with_another_beginning_joins_the_prediction() -> None:
    index, text = NgramIndex([50, 51, 52, 53, 54]), [1, 2, 7]
    assert index.propose(text, 9, 1) == NO_TOKENS
    text += [50, 51, 52]
    assert index.propose(text, 9, 4) == ExpectedTokens([53, 54], 3)


def test_a_prediction_of_one_token_is_over_after_it() -> None:
    assert NgramIndex([50]).propose([1, 50], 9, 1) == NO_TOKENS


def check_proposals(prompt: list[int], answer: list[int]) -> list[bool]:
    """Return whether each token of the answer was the proposed one."""
    index, text, hits = NgramIndex((), prompt), list(prompt), []
    for at, token in enumerate(answer):
        hits.append(index.propose(text, 1, at).tokens == [token])
        text.append(token)
    return hits


def replace_all(text: list[int], old: list[int], new: list[int]) -> list[int]:
    out, at = list[int](), 0
    while at < len(text):
        matches = text[at : at + len(old)] == old
        out += new if matches else [text[at]]
        at += len(old) if matches else 1
    return out


@pytest.mark.parametrize("new", [[70], [70, 71], [70, 71, 72, 73]])
@pytest.mark.parametrize("old", [[60], [60, 61], [60, 61, 62]])
def test_replaced_name_is_replaced_from_then_on(old: list[int], new: list[int]) -> None:
    prompt = [90, 91, *range(10), *old, *range(10, 20), *old, 20, 21, *old, *range(22, 30)]
    answer = replace_all(prompt[2:], old, new)
    hits = check_proposals(prompt, [90, 91, *answer])
    first_hit = answer.index(new[0]) + 2
    resumed = first_hit + len(new) + 1  # one token after the name tells where the text continues
    assert all(hits[3:first_hit])
    assert all(hits[resumed:])


def test_copy_continues_right_after_an_edit() -> None:
    prompt = list(range(30))
    for answer in (
        [*range(10), 77, *range(10, 20)],  # inserted
        [*range(10), *range(12, 22)],  # deleted
        [*range(10), 77, 78, *range(11, 21)],  # replaced
    ):
        assert check_proposals(prompt, answer)[-8:] == [True] * 8


def test_change_that_is_not_repeated_is_not_proposed_again() -> None:
    prompt = [*range(10), 60, *range(10, 20), 60, *range(20, 30), 60, *range(30, 40)]
    hits = check_proposals(prompt, [70 if at == 10 else token for at, token in enumerate(prompt)])
    # Three to begin, the change and the return from it, and one more change.
    assert hits.count(False) == 3 + 2 + 1


def test_confidence_rises_along_a_proposal() -> None:
    buckets = choose_buckets(ExpectedTokens(list(range(60)), 3, (5,)))
    assert buckets.pop(5) == 0  # an expected change
    assert buckets == sorted(buckets)
    assert {*buckets} == {*range(2, N_BUCKETS)}
    # Of a long text that was left and matched again.
    assert choose_buckets(ExpectedTokens([1, 2], 54)) == [N_BUCKETS - 1] * 2


def test_disputed_proposal_has_a_less_certain_first_token() -> None:
    for strength in range(1, 60):
        first, second = choose_buckets(ExpectedTokens([1, 2], strength, disputed=True))
        assert 0 <= first <= second == choose_buckets(ExpectedTokens([1, 2], strength))[1]


def test_built_in_calibration_is_sound() -> None:
    learned = NgramDrafter.learned
    calibration = Calibration.from_dict(learned, NgramDrafter.initial_acceptance)
    assert calibration.as_dict() == learned
    rates = calibration.rates[:, 6]  # for an average text
    assert rates[-1] > 0.95 > 0.75 > rates[2] > rates[0]


@given(texts, texts, st.integers(0, 40))
def test_prompt_and_answer_are_looked_up_alike(
    tokens: list[int], prediction: list[int], prompt_length: int
) -> None:
    """The drafts do not depend on how much of the text was given as the prompt."""
    sorted_, grown = NgramIndex(prediction, tokens[:prompt_length]), NgramIndex(prediction)
    text = tokens[:prompt_length]
    for token in [*tokens[prompt_length:], 0]:
        assert sorted_.propose(text, 5, GRAM_TOKENS + 1) == grown.propose(text, 5, GRAM_TOKENS + 1)
        text.append(token)  # the text grows like that of a sequence


@given(st.lists(st.integers(2**21 - 4, 2**21 - 1), min_size=8, max_size=30))
def test_largest_token_ids_are_distinguished(tokens: list[int]) -> None:
    assert NgramIndex((), tokens).propose(tokens, 4, 9) == NgramIndex().propose(tokens, 4, 9)


def test_a_long_text_takes_little_memory() -> None:
    """A table of tuples would take 94 MiB for 400 000 tokens."""
    text = list(range(400_000))
    tracemalloc.start()
    try:
        lookup = NgramIndex(text, text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 20 << 20
    assert lookup.propose([*text, 5, 6, 7], 2, 9) == ExpectedTokens([8, 9], 3)
