"""The budget of speculation: whatever is drafted, an answer loses no more than its stated bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traces.replay import Replay
from benchmarks.traces.trace import Trace
from localspec.engine.llama import Batch
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.budget import (
    INITIAL_KNOWN_ROUNDS,
    INITIAL_MODEL_ROUNDS,
    KNOWN_REFILL_ROUNDS,
    MAX_BALANCE_ROUNDS,
    MODEL_REFILL_ROUNDS,
    Backoff,
    Budget,
    ProbeBudget,
)
from localspec.engine.speculation.cost import ChangeCost, CostProfile, CostTable
from tests.support.exploration import FACTOR, SEED

WIDTHS = (1, 2, 3, 4, 5, 8, 12, 16, 32, 64)
TOKENS = 96  # for each sequence


def random_costs(rng: random.Random, scale: float, steepness: float) -> dict[int, float]:
    """Return a staircase of milliseconds by width that rises at random, and may fall a little."""
    costs, ms = {}, scale
    for width in WIDTHS:
        costs[width] = ms
        ms *= 1 + rng.uniform(-0.05, 1) * steepness
    return costs


def draw_hits(rng: random.Random, kind: str, count: int) -> list[bool]:
    """Return which guesses are right: at random, never, or a lure that fails once it is believed."""
    if kind == "never":
        return [False] * count
    if kind == "random":
        rate = rng.random()
        return [rng.random() < rate for _ in range(count)]
    hits: list[bool] = []
    while len(hits) < count:
        hits += [True] * rng.randint(1, 12) + [False] * rng.randint(1, 24)
    return hits[:count]


def record_reading_ms(replay: Replay, costs: CostTable, sequences: int) -> list[float]:
    """Note the milliseconds in which the draft model reads texts, beyond its drafts and its probes."""
    assert replay.pair.drafter is not None
    context, spent_ms = replay.pair.drafter.context, [0.0]
    decode = context.decode

    def recording_decode(batch: Batch) -> None:
        rows = batch.struct
        drafts = sum(bool(rows.logits[row]) for row in range(batch.rows))
        if sequences not in {rows.seq_id[row][0] for row in range(batch.rows)}:  # no probe
            spent_ms[0] += costs.ms(batch.rows) - (costs.ms(drafts) if drafts else 0.0)
        decode(batch)

    context.decode = recording_decode  # type: ignore[method-assign]
    return spent_ms


@pytest.mark.explore
@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("kind", ["never", "random", "lure"])
@pytest.mark.parametrize("seed", range(SEED, SEED + 2 * FACTOR))
@pytest.mark.parametrize("change_ms", [0.0, 60.0])
def test_drafts_never_lose_more_than_the_bound(
    change_ms: float, seed: int, kind: str, sequences: int
) -> None:
    """The pair is new, and the confidence of its hopeful drafts is random or misleading.

    change_ms: what another width of the target's passes costs, as on a GPU.
    """
    rng = random.Random(f"{seed} {kind} {sequences}")
    change = ChangeCost(change_ms / 5, change_ms * 4 / 5)
    target = CostTable(random_costs(rng, 40.0, rng.uniform(0.1, 1.0)), change=change)
    draft = CostTable(random_costs(rng, rng.uniform(0.4, 20.0), 0.1))
    confident = rng.random()
    profile, count = CostProfile(target, draft, 1.0), TOKENS * sequences
    hits = draw_hits(rng, kind, count)
    guesses = [place if hit else place + 1_000_000 for place, hit in enumerate(hits)]
    buckets = [9 if rng.random() < confident else rng.randrange(10) for _ in range(count)]
    trace = Trace("any", list(range(count)), guesses, buckets, profile.as_dict())
    replay = Replay(trace, profile, Calibration(0.9), None, sequences)
    reading_ms = record_reading_ms(replay, draft, sequences)
    replay.run()
    # Only the time until the first answer ends counts, since later passes have fewer sequences.
    answers = replay.answers.values()
    end = min(answer.stamps[-1] for answer in answers)
    generated = sum(
        max((d.tokens for d, at in zip(a.deltas, a.stamps, strict=True) if at <= end), default=0)
        for a in answers
    )
    round_ms = target.ms(sequences) + profile.overhead_ms
    bound_ms = (INITIAL_MODEL_ROUNDS + MODEL_REFILL_ROUNDS * TOKENS) * round_ms
    # From the prompt's width, to that of drafts, and back. A round of several can overdraw their balances.
    bound_ms += (3 if sequences == 1 else 5) * change_ms
    assert 1e3 * end <= (generated / sequences) * round_ms + bound_ms + reading_ms[0]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 5)), max_size=60))
def test_affordable_costs_never_overdraw_a_balance(rounds: list[tuple[float, int]]) -> None:
    balance, lost = Budget().known, 0.0
    balance.open(10.0)
    for cost_ms, gained in rounds:
        balance.refill(10.0)
        if balance.balance_ms >= cost_ms:
            balance.settle(cost_ms, gained, 10.0)
            lost += cost_ms - 10.0 * gained
        assert 0 <= balance.balance_ms <= MAX_BALANCE_ROUNDS * 10.0
    assert lost <= (INITIAL_KNOWN_ROUNDS + KNOWN_REFILL_ROUNDS * len(rounds)) * 10.0 + 1e-6


def test_a_probe_needs_its_own_budget_and_the_balance() -> None:
    probes, balance = ProbeBudget(), Budget().model
    assert not balance.pay_probe(1.0, probes)
    probes.refill(10.0, 10.0, new=True)
    assert not balance.pay_probe(1.0, probes)
    balance.open(10.0)
    assert balance.pay_probe(15.0, probes)
    assert not balance.pay_probe(15.0, probes)


def test_backoffs_grow_to_the_last_length_and_start_again_after_a_success() -> None:
    backoff, lengths = Backoff((0, 1, 3)), []
    for attempt in range(6):
        backoff.end() if attempt == 4 else backoff.begin(longest=2)
        lengths.append(backoff.left)
    assert lengths == [0, 1, 2, 2, 0, 0]
