"""The minimum length of an answer, and token ids that end it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.sampling.guide import CombinedGuide
from localspec.engine.sampling.sampler import MinimumLength
from localspec.errors import InvalidRequest
from tests.support.pairs import BOS, cycle_pair, ending_cycle, expected
from tests.support.running import Running, drafting, running

N_VOCAB = 12
TOKENS = st.lists(st.integers(0, N_VOCAB - 1), max_size=12)


@given(st.integers(0, 8), st.sets(st.integers(0, N_VOCAB - 1)), TOKENS, st.data())
def test_no_end_token_before_the_minimum_length(
    least: int, ends: set[int], tokens: list[int], data: st.DataObject
) -> None:
    guide = MinimumLength(least, ends, N_VOCAB)
    n_tokens = 0
    for token in tokens:
        mask = guide.mask()
        allowed = set(range(N_VOCAB)) if mask is None else set(np.flatnonzero(mask).tolist())
        assert allowed == set(range(N_VOCAB)) - (ends if n_tokens < least else set())
        rest = tokens[n_tokens:]
        bad = [
            at for at, candidate in enumerate(rest) if candidate in ends and n_tokens + at < least
        ]
        assert guide.count_valid(rest) == (bad[0] if bad else len(rest))
        guide.consume(token)
        n_tokens += 1
    back = data.draw(st.integers(0, n_tokens))
    guide.take_back(back)
    assert (guide.mask() is None) == (n_tokens - back >= least)


def test_completed_constraint_ends_a_short_answer() -> None:
    """The demands of the first guide have priority over the prohibitions of the second."""

    class OnlyEnd(MinimumLength):
        def mask(self) -> np.ndarray:
            allowed = np.zeros(N_VOCAB, dtype=np.bool_)
            allowed[3] = True
            return allowed

    guide = CombinedGuide(OnlyEnd(0, [], N_VOCAB), MinimumLength(5, [3], N_VOCAB))
    mask = guide.mask()
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [3]


@pytest.mark.parametrize("depth", [0, 2, 6, 15])
def test_answer_has_its_minimum_length_with_and_without_drafts(models: Path, depth: int) -> None:
    files = cycle_pair(models / "ending-5", 1.0, cycle=ending_cycle(5))
    with running(files) as engine:
        is_eog = engine.pair.vocab.is_eog
        plain = engine.ask([BOS, 0], 40, speculative=drafting(depth))
        for least in (1, 5, 6, 7, 13):
            answer = engine.ask([BOS, 0], 40, speculative=drafting(depth), min_tokens=least)
            assert len(answer.tokens) >= max(least, len(plain.tokens))
            assert not any(map(is_eog, answer.tokens[:least]))
            assert answer.tokens[:5] == plain.tokens[:5]
        exact = engine.ask([BOS, 0], 40, speculative=drafting(depth), min_tokens=6)
        assert exact.tokens[:5] == plain.tokens[:5]


@pytest.mark.parametrize("depth", [0, 6])
def test_stop_token_id_ends_an_answer_and_is_not_sent(models: Path, depth: int) -> None:
    files = cycle_pair(models / "cycle-1.0", 1.0)
    with running(files) as engine:
        truth = expected(7, 20)
        answer = engine.ask(
            [BOS, 7], 20, speculative=drafting(depth), stop_token_ids=[truth[4], truth[9]]
        )
        assert answer.tokens == truth[:5]
        assert answer.done.finish_reason == "stop"
        short = engine.ask([BOS, 7], 4, speculative=drafting(depth))
        assert answer.text == short.text
        later = engine.ask(
            [BOS, 7], 20, speculative=drafting(depth), stop_token_ids=[truth[4]], min_tokens=9
        )
        assert truth[4] not in later.tokens[:9]
        assert len(later.tokens) >= 9


def test_unknown_stop_token_id_is_refused(cycle: Running) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary") as refused:
        cycle.ask([BOS, 7], 4, stop_token_ids=[1 << 30])
    assert refused.value.param == "stop_token_ids"
