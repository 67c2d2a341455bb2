"""The learned cost of attention to earlier text, on machines of every kind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.engine.llama import Batch
from localspec.engine.speculation.cost import AttentionCost, CostTable, parse_pair_of_ms
from localspec.protocol.frames import PairFiles
from tests.support.pairs import BOS, expected
from tests.support.running import GREEDY, Load, drafting

WIDTHS = {1: 14.0, 2: 15.0, 4: 17.0, 8: 24.0, 16: 40.0, 32: 75.0}


@given(
    a=st.floats(0, 4e-3),
    c=st.floats(0, 4e-3),
    guess=st.sampled_from([0.1, 0.5, 1, 2]),
    seed=st.integers(0, 10**6),
    shares=st.booleans(),
)
def test_deep_passes_teach_the_attention_cost_and_keep_the_widths(
    a: float, c: float, guess: float, seed: int, shares: bool
) -> None:
    """`a` and `c` are costs of the machine, and `guess` a factor of `c`; a quarter of passes are shallow."""
    rng, table = random.Random(seed), CostTable(WIDTHS)
    attention = AttentionCost(lambda: guess * c, shares=shares)
    for _ in range(300):
        rows, sequences = rng.choice([(1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (4, 4), (8, 4)])
        depth = rng.choice([rng.randrange(20, 300), *(rng.randrange(8_000, 40_000),) * 3])
        ms = WIDTHS[rows] + depth * (a * sequences + c * rows)
        ms *= rng.uniform(0.97, 1.03)
        table.observe(rows, attention.observe(rows, sequences, depth, ms, table.ms(rows)))
    for rows, sequences in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 4)):
        for depth in (100, 30_000):
            truth = WIDTHS[rows] + depth * (a * sequences + c * rows)
            estimate = table.ms(rows) + attention.ms(float(rows), sequences, depth)
            assert estimate == pytest.approx(truth, rel=0.3)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 8), st.floats(0, 1e6), st.floats(0, 1e5)),
        max_size=30,
    ),
    st.floats(0, 1),
)
def test_attention_costs_never_become_negative(
    passes: list[tuple[int, int, float, float]], guess: float
) -> None:
    attention = AttentionCost(lambda: guess)
    for rows, sequences, depth, ms in passes:
        width_ms = attention.observe(rows, sequences, depth, ms, 10.0)
        assert width_ms >= 0
        assert min(attention.costs) >= 0
    restored = parse_pair_of_ms(list(attention.costs))
    assert restored == attention.costs or max(attention.costs) >= 1e3


@pytest.mark.parametrize("stored", [None, [], [1], [1, "2"], [-1, 0], [0, 1e9], {"a": 1}, [[], 1]])
def test_invalid_stored_costs_are_ignored(stored: object) -> None:
    assert parse_pair_of_ms(stored) is None


def test_poor_drafts_are_skipped_deep_in_a_text(cycle_files: PairFiles, load: Load) -> None:
    """At the beginning of a text rows are nearly free, and at its end they are not."""
    engine = load(cycle_files, n_ctx=2048)
    lane, elapsed, table = engine.pair.shared, [0.0], CostTable(WIDTHS)
    for timed in (lane, engine.engine, engine.pair.drafter):
        timed._clock = lambda: elapsed[0]  # type: ignore[union-attr]
    lane.costs = engine.pair.learned.costs.target = CostTable(WIDTHS)
    assert engine.pair.drafter is not None
    engine.pair.drafter.steps = CostTable({1: 0.5})
    decode = lane.context.decode

    def slow_decode(batch: Batch) -> None:
        elapsed[0] += (table.ms(batch.rows) + 0.03 * batch.rows * batch.mean_position) / 1e3
        decode(batch)

    lane.context.decode = slow_decode  # type: ignore[method-assign]

    def count_drafted(length: int) -> int:
        prompt = [BOS, *expected(BOS, length)]
        return engine.ask(prompt, 60, GREEDY, drafting(None)).done.speculation.drafted

    count_drafted(5)
    assert count_drafted(1500) < 30 < count_drafted(5)
    assert count_drafted(1500) < 30 < count_drafted(5)
