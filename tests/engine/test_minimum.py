"""An answer's least length, and token ids that end it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.sampling.guide import Both
from localspec.engine.sampling.minimum import MinimumLength

N_VOCAB = 12
TOKENS = st.lists(st.integers(0, N_VOCAB - 1), max_size=12)


@given(st.integers(0, 8), st.sets(st.integers(0, N_VOCAB - 1)), TOKENS, st.data())
def test_no_end_comes_before_its_time(
    least: int, ends: set[int], tokens: list[int], data: st.DataObject
) -> None:
    guide = MinimumLength(least, ends, N_VOCAB)
    taken = 0
    for token in tokens:
        mask = guide.mask()
        allowed = set(range(N_VOCAB)) if mask is None else set(np.flatnonzero(mask).tolist())
        assert allowed == set(range(N_VOCAB)) - (ends if taken < least else set())
        rest = tokens[taken:]
        bad = [at for at, each in enumerate(rest) if each in ends and taken + at < least]
        assert guide.valid(rest) == (bad[0] if bad else len(rest))
        guide.consume(token)
        taken += 1
    back = data.draw(st.integers(0, taken))
    guide.take_back(back)
    assert (guide.mask() is None) == (taken - back >= least)


def test_a_constraint_that_is_over_ends_the_answer_all_the_same() -> None:
    """What the first guide demands goes before what the second forbids."""

    class OnlyEnd(MinimumLength):
        def mask(self) -> np.ndarray:
            allowed = np.zeros(N_VOCAB, dtype=np.bool_)
            allowed[3] = True
            return allowed

    guide = Both(OnlyEnd(0, [], N_VOCAB), MinimumLength(5, [3], N_VOCAB))
    mask = guide.mask()
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [3]
