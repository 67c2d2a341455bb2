"""What reading prompts costs is learned by how deep in a text it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.pair.profile import PrefillCost
from localspec.protocol.frames import PromptCost

N_CTX = 32768
lengths = st.lists(st.integers(30, N_CTX), max_size=6)


def read(learned: PrefillCost, truth: PromptCost, length: int, width: int, noise: float) -> None:
    """A prompt of so many tokens, in passes of a machine whose times vary by `noise`."""
    random.seed(length)
    for start in range(0, length, width):
        end = min(start + width, length)
        spent = truth.range_seconds(start, end) * random.uniform(1 - noise, 1 + noise)
        learned.observe(end - start, (start + end - 1) / 2, spent)


@given(
    st.floats(1e-4, 0.05),
    st.floats(0, 1e-3),
    st.floats(0, 1e-4),
    lengths,
    st.integers(24, 512),
    st.integers(0, N_CTX),
)
def test_what_deep_passes_cost_is_known_once_some_were_seen(
    first_s: float, deeper: float, guess: float, before: list[int], width: int, start: int
) -> None:
    """Whatever was expected of the model, and whatever short prompts were read in between."""
    truth, learned = PromptCost(first_s, deeper * first_s), PrefillCost(1.0, guess, N_CTX)
    for length in [*before, 25_000, 100, 400]:
        read(learned, truth, length, width, noise=0.1)
    assert learned.expected.range_seconds(start, N_CTX) == pytest.approx(
        truth.range_seconds(start, N_CTX), rel=0.25
    )


@given(st.floats(1e-4, 0.05), st.floats(0, 1e-3), st.lists(st.integers(30, 400), min_size=3))
def test_short_prompts_leave_what_is_expected_of_deep_ones(
    first_s: float, deeper: float, short: list[int]
) -> None:
    truth, learned = PromptCost(first_s, deeper * first_s), PrefillCost(1.0, deeper, N_CTX)
    for length in short:
        read(learned, truth, length, 512, noise=0.1)
    assert learned.expected.range_seconds(0, N_CTX) == pytest.approx(
        truth.range_seconds(0, N_CTX), rel=0.15
    )


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, N_CTX), st.floats(1e-6, 100))))
def test_nothing_costs_less_than_nothing(passes: list[tuple[int, float, float]]) -> None:
    learned = PrefillCost(0.01, 1e-4, N_CTX)
    for tokens, position, spent in passes:
        learned.observe(tokens, position, spent)
        assert learned.expected.token_s > 0
        assert learned.expected.deeper_s >= 0
        assert learned.planned_s(position) * tokens >= 0.99 * spent  # dearer is believed at once
