"""The cost of prefill is learned as a function of the position in a text."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.pair.profile import PrefillCost, StoredProfile
from localspec.protocol.frames import PromptCost

N_CTX = 32768
lengths = st.lists(st.integers(30, N_CTX), max_size=6)


def observe_prompt(
    learned: PrefillCost, truth: PromptCost, length: int, width: int, noise: float
) -> None:
    """Observe a prompt of `length` tokens, in passes whose durations vary by `noise`."""
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
def test_cost_of_deep_passes_is_learned_from_a_few(
    first_s: float, deeper: float, guess: float, earlier: list[int], width: int, start: int
) -> None:
    """This holds for any initial guess, and for any short prompts in between."""
    truth, learned = PromptCost(first_s, deeper * first_s), PrefillCost(1.0, guess, N_CTX)
    for length in [*earlier, 25_000, 100, 400]:
        observe_prompt(learned, truth, length, width, noise=0.1)
    assert learned.expected.range_seconds(start, N_CTX) == pytest.approx(
        truth.range_seconds(start, N_CTX), rel=0.25
    )


@given(st.floats(1e-4, 0.05), st.floats(0, 1e-3), st.lists(st.integers(30, 400), min_size=3))
def test_short_prompts_do_not_change_the_expected_deep_cost(
    first_s: float, deeper: float, short: list[int]
) -> None:
    truth, learned = PromptCost(first_s, deeper * first_s), PrefillCost(1.0, deeper, N_CTX)
    for length in short:
        observe_prompt(learned, truth, length, 512, noise=0.1)
    assert learned.expected.range_seconds(0, N_CTX) == pytest.approx(
        truth.range_seconds(0, N_CTX), rel=0.15
    )


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, N_CTX), st.floats(1e-6, 100))))
def test_costs_are_never_negative(passes: list[tuple[int, float, float]]) -> None:
    learned = PrefillCost(0.01, 1e-4, N_CTX)
    for tokens, position, spent in passes:
        learned.observe(tokens, position, spent)
        assert learned.expected.token_s > 0
        assert learned.expected.deeper_s >= 0
        # A higher cost is believed at once.
        assert learned.planned_s(position) * tokens >= 0.99 * spent


@given(st.floats(1e-4, 0.05), st.floats(0, 1e-3), st.lists(st.integers(30, 20_000), max_size=4))
def test_the_next_load_begins_with_what_was_learned(
    first_s: float, deeper: float, lengths: list[int]
) -> None:
    """It is stored as JSON; what only rests on the measurement of narrow passes is not."""
    truth, learned = PromptCost(first_s, deeper * first_s), PrefillCost(1.0, deeper, N_CTX)
    for length in lengths:
        observe_prompt(learned, truth, length, 512, noise=0.0)
    stored = StoredProfile.of(json.loads(json.dumps({"reading_ms": learned.learned_ms})))
    assert (stored.reading is None) == (not lengths)
    restored = PrefillCost(2.0, 1.0, N_CTX, stored.reading)
    assert restored.learned_ms == (stored.reading and pytest.approx(stored.reading))
    if lengths:
        for position in (0, 20_000):
            expected = learned.expected.token_seconds(position)
            assert restored.expected.token_seconds(position) == pytest.approx(expected)


@pytest.mark.parametrize("stored", [[0.0, 0.0], [1.0], "x", [float("nan"), 1.0], [-1.0, 0.0]])
def test_a_stored_cost_that_is_not_valid_is_not_used(stored: object) -> None:
    reading = StoredProfile.of({"reading_ms": stored}).reading
    assert PrefillCost(0.5, 0.0, N_CTX, reading).expected == PromptCost(0.5)
