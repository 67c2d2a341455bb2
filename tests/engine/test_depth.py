"""The depth policy, by tables, by properties, and by replaying traces with measured costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.traces.replay import Replay
from benchmarks.traces.trace import Trace
from localspec.engine.speculation.acceptance import (
    GRID,
    N_BUCKETS,
    Belief,
    Calibration,
    Floats,
    find_bucket,
)
from localspec.engine.speculation.controller import MAX_UNPROVEN_DRAFTS
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import (
    MARGIN,
    MAX_DEPTH,
    Candidate,
    RoundCosts,
    best_value,
    choose_first_count,
    decide,
    keep_drafting,
)
from localspec.engine.speculation.drafters.base import DraftRequest
from localspec.engine.speculation.drafters.draft_model import ModelDrafter
from localspec.engine.speculation.step import Drafting
from localspec.extras.bench.theory import replay_fixed_ms
from tests.support.replay import (
    COSTS,
    DRAFT_MS,
    OVERHEAD_MS,
    TARGET_MS,
    auto,
    best_fixed_ms,
    bursty,
    calibrated,
    plain_ms,
    steady,
    together,
)

STEP_MS = DRAFT_MS[1]


def pass_ms(rows: int = MAX_DEPTH + 1) -> Floats:
    return CostTable(TARGET_MS).padded_ms(rows)


def make_round_costs(passes: Floats) -> RoundCosts:
    return RoundCosts(passes, OVERHEAD_MS, OVERHEAD_MS)


def make_certain_belief(acceptance: float) -> Belief:
    """Return the belief that the acceptance rate is this one at every confidence."""
    calibration = Calibration()
    belief = Belief(calibration)
    belief.weights = np.zeros(len(GRID))
    belief.weights[int(np.abs(GRID - acceptance).argmin())] = 1.0
    return belief


def compute_rate(belief: Belief, depth: int) -> float:
    """Return the expected tokens per millisecond of a round at a fixed depth, by the formula."""
    alive = belief.survival((), depth)
    cost = depth * STEP_MS + float(pass_ms()[depth + 1]) + OVERHEAD_MS
    return float(alive.sum()) / cost


beliefs = st.lists(st.floats(0, 1), min_size=len(GRID), max_size=len(GRID)).filter(
    lambda weights: sum(weights) > 0.01
)


def make_belief(weights: list[float]) -> Belief:
    belief = Belief(Calibration())
    belief.weights = np.array(weights) / sum(weights)
    return belief


@pytest.mark.parametrize(("alpha", "depth"), list(product([0.2, 0.5, 0.8, 0.94], [0, 1, 3, 7])))
def test_expected_tokens_are_the_geometric_sum(alpha: float, depth: int) -> None:
    expected = (1 - alpha ** (depth + 1)) / (1 - alpha)
    assert make_certain_belief(alpha).survival((), depth).sum() == pytest.approx(expected)


@given(beliefs, st.lists(st.integers(0, N_BUCKETS - 1), max_size=8), st.integers(0, 12))
def test_survival_begins_at_one_and_never_rises(
    weights: list[float], buckets: list[int], depth: int
) -> None:
    alive = make_belief(weights).survival(buckets, depth)
    assert alive.shape == (depth + 1,)
    assert alive[0] == 1.0
    assert np.all(np.diff(alive) <= 1e-12)
    assert np.all(alive >= 0)


@given(beliefs)
def test_the_decision_is_the_best_of_all_depths(weights: list[float]) -> None:
    belief = make_belief(weights)
    decision = decide([Candidate(belief, MAX_DEPTH, STEP_MS)], make_round_costs(pass_ms()))
    rates = [compute_rate(belief, depth) for depth in range(MAX_DEPTH + 1)]
    assert rates[decision.depths[0]] == pytest.approx(max(rates), rel=1e-3)
    assert decision.rate == pytest.approx(max(rates), rel=1e-3)


@given(beliefs, st.floats(0, 300), st.floats(0.1, 100), st.integers(0, MAX_DEPTH))
def test_no_decision_is_expected_to_be_slower_than_plain(
    weights: list[float], entry_ms: float, step_ms: float, limit: int
) -> None:
    belief = make_belief(weights)
    candidate = Candidate(belief, limit, step_ms, entry_ms)
    depth = decide([candidate], make_round_costs(pass_ms())).depths[0]
    assert 0 <= depth <= limit
    gain = belief.survival((), depth).sum()
    cost = depth * step_ms + (entry_ms if depth else 0) + pass_ms()[depth + 1] + OVERHEAD_MS
    assert gain / cost >= 1 / (TARGET_MS[1] + OVERHEAD_MS) - 1e-12


def test_nothing_is_drafted_when_drafts_are_never_right() -> None:
    candidate = Candidate(make_certain_belief(0.01), MAX_DEPTH, STEP_MS)
    assert decide([candidate], make_round_costs(pass_ms())).depths == [0]


def test_padding_makes_three_drafts_cheaper_than_two() -> None:
    """Width 4 costs 87 ms and width 3 costs 117 ms, so three rows are padded to four."""
    assert pass_ms()[3] == pass_ms()[4] == TARGET_MS[4]
    depth = decide(
        [Candidate(make_certain_belief(0.7), MAX_DEPTH, STEP_MS)], make_round_costs(pass_ms())
    ).depths[0]
    assert depth == 3


@pytest.mark.parametrize(("alpha", "least"), [(0.98, 7), (0.88, 3), (0.5, 1)])
def test_better_drafts_are_drafted_deeper(alpha: float, least: int) -> None:
    candidate = Candidate(make_certain_belief(alpha), MAX_DEPTH, STEP_MS)
    assert decide([candidate], make_round_costs(pass_ms())).depths[0] >= least


def test_drafting_stops_when_the_draft_turns_doubtful() -> None:
    calibration = Calibration()
    calibration.offset[:] = np.linspace(-4, 3, N_BUCKETS)
    calibration._refresh()
    candidate = Candidate(Belief(calibration), MAX_DEPTH, STEP_MS)
    rate = decide([candidate], make_round_costs(pass_ms())).rate
    costs = pass_ms()[1:] - pass_ms()[1]
    candidate.known = [9, 9]
    assert keep_drafting(candidate, costs, rate)
    candidate.known = [9, 9, 0, 0]
    assert not keep_drafting(candidate, costs, rate)


@given(beliefs, st.lists(st.integers(0, N_BUCKETS - 1), max_size=MAX_DEPTH), st.floats(0, 0.1))
def test_values_of_depths_follow_the_formula(
    weights: list[float], buckets: list[int], at_rate: float
) -> None:
    entry_ms = 0.0 if buckets else 5.0
    candidate = Candidate(make_belief(weights), MAX_DEPTH, STEP_MS, entry_ms, buckets)
    costs = pass_ms()[1:] - pass_ms()[1]
    alive = candidate.belief.survival(buckets, MAX_DEPTH)

    def value(depth: int) -> float:
        steps = max(depth - len(buckets), 0) * STEP_MS + entry_ms * (depth > 0)
        return float(alive[: depth + 1].sum()) - at_rate * (float(costs[depth]) + steps)

    values = [value(depth) for depth in range(MAX_DEPTH + 1)]
    drafted = len(buckets)
    assert best_value(candidate, costs, at_rate) == pytest.approx(max(values))
    gain = max(values[drafted + 1 :], default=values[drafted]) - values[drafted]
    if buckets and abs(gain) > 1e-9:
        assert keep_drafting(candidate, costs, at_rate) == (gain > 0)


@given(
    beliefs,
    st.lists(st.integers(0, N_BUCKETS - 1), min_size=1, max_size=2 * MAX_DEPTH + 1),
    st.integers(1, MAX_DEPTH),
    st.floats(0, 0.1),
)
def test_first_count_maximises_the_value_of_two_rounds(
    weights: list[float], buckets: list[int], most: int, at_rate: float
) -> None:
    belief, costs = make_belief(weights), pass_ms()[1 : most + 2]
    # The last bucket predicts best what follows it.
    extended = [*buckets, *buckets[-1:] * (2 * most)]

    def next_round(accepted: int, drafts: int) -> float:
        """Return the value of a round that follows `after` accepted tokens."""
        gain, reached = 0.0, belief.survival(extended[:accepted], accepted)[-1]
        for row in range(drafts + 1):
            gain += float(belief.survival(extended[: accepted + row], accepted + row)[-1] / reached)
        return gain - at_rate * float(costs[drafts])

    def two_rounds(count: int) -> float:
        reached = belief.survival(extended[: count + 1], count + 1)
        later = max(next_round(count + 1, drafts) for drafts in range(most + 1))
        return float(reached[:-1].sum() - at_rate * costs[count] + reached[-1] * max(later, 0.0))

    values = [two_rounds(count) for count in range(most + 1)]
    first_count = choose_first_count(
        Candidate(belief, len(buckets), 0.0, 0.0, buckets, buckets), costs, at_rate
    )
    assert values[first_count] == pytest.approx(max(values))


def test_uncertain_passage_is_tried_with_few_tokens_first() -> None:
    """Seven of ten passages are repeated to their end, so a narrow pass before a wide one pays."""
    belief = Belief(Calibration())
    belief.calibration.offset[:] = 0
    belief.calibration._refresh()
    belief.weights = np.where(GRID[-1] == GRID, 0.7, np.where(GRID[0] == GRID, 0.3, 0.0))
    candidate = Candidate(belief, MAX_DEPTH, 0.0, 0.0, [5] * MAX_DEPTH, range(MAX_DEPTH))
    decision = decide([candidate], make_round_costs(pass_ms()))
    assert decision.depths[0] > 8
    assert choose_first_count(candidate, pass_ms()[1 : decision.depths[0] + 2], decision.rate) <= 3
    belief.weights = np.where(GRID[-1] == GRID, 1.0, 0.0)
    decision = decide([candidate], make_round_costs(pass_ms()))
    assert choose_first_count(candidate, pass_ms()[1 : decision.depths[0] + 2], decision.rate) > 8


def test_unread_draft_text_is_a_reason_not_to_draft() -> None:
    belief = make_certain_belief(0.7)
    near = decide([Candidate(belief, MAX_DEPTH, STEP_MS, 0.0)], make_round_costs(pass_ms()))
    far = decide([Candidate(belief, MAX_DEPTH, STEP_MS, 5000.0)], make_round_costs(pass_ms()))
    assert near.depths[0] > 0
    assert far.depths == [0]


def test_each_sequence_drafts_less_as_more_share_the_pass() -> None:
    """Rows beyond the narrow widths are expensive, and several sequences reach them sooner."""
    costs = CostTable({1: 78.0, 2: 95, 4: 110, 8: 161, 16: 320, 32: 700, 64: 1500})
    depths = []
    for count in (1, 2, 4, 8):
        candidates = [Candidate(make_certain_belief(0.8), MAX_DEPTH, STEP_MS) for _ in range(count)]
        table = costs.padded_ms(count * (MAX_DEPTH + 1))
        depths.append(sum(decide(candidates, make_round_costs(table)).depths) / count)
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_the_sequence_with_the_better_drafts_gets_more_of_the_pass() -> None:
    candidates = [Candidate(make_certain_belief(a), MAX_DEPTH, STEP_MS) for a in (0.94, 0.3)]
    depths = decide(candidates, make_round_costs(pass_ms(2 * MAX_DEPTH + 2))).depths
    assert depths[0] > depths[1]


@given(st.lists(beliefs, min_size=1, max_size=4), st.integers(0, 64))
def test_joint_decision_is_never_slower_than_plain(
    several: list[list[float]], prompt_rows: int
) -> None:
    candidates = [Candidate(make_belief(weights), MAX_DEPTH, STEP_MS) for weights in several]
    base = len(candidates) + prompt_rows
    table = pass_ms(base + len(candidates) * MAX_DEPTH)
    decision = decide(candidates, make_round_costs(table), prompt_rows)
    gain = sum(
        c.belief.survival((), d).sum() for c, d in zip(candidates, decision.depths, strict=True)
    )
    rows = sum(decision.depths)
    cost = rows * STEP_MS + table[base + rows] + OVERHEAD_MS
    plain = len(candidates) / (table[base] + OVERHEAD_MS)
    assert gain / cost >= plain - 1e-12
    assert decision.rate >= plain - 1e-12


@settings(max_examples=50)
@given(st.lists(beliefs, min_size=2, max_size=4), st.floats(0, 1), st.floats(0.05, 2))
def test_sequences_that_share_steps_are_at_least_as_fast_as_at_any_equal_depth(
    several: list[list[float]], added: float, row_ms: float
) -> None:
    """A step for all costs `added` more for each sequence, as a share of a step for one."""
    n = len(several)
    steps = CostTable({k: STEP_MS * (1 + added * (k - 1)) for k in range(1, n + 1)})
    candidates = [
        Candidate(make_belief(weights), MAX_DEPTH, STEP_MS, steps=steps) for weights in several
    ]
    passes = CostTable({1: 40.0, 128: 40.0 + 127 * row_ms}).padded_ms(n * (MAX_DEPTH + 1))

    def rate_of(depths: Sequence[int]) -> float:
        gain = sum(
            float(c.belief.survival((), d).sum()) for c, d in zip(candidates, depths, strict=True)
        )
        at_depth = [sum(d > depth for d in depths) for depth in range(max(depths))]
        cost = sum(steps.ms(k) for k in at_depth) + float(passes[n + sum(depths)]) + OVERHEAD_MS
        return gain / cost

    decision = decide(candidates, make_round_costs(passes))
    assert decision.rate == pytest.approx(rate_of(decision.depths))
    best = max(rate_of([depth] * n) for depth in range(MAX_DEPTH + 1))
    assert decision.rate >= best / MARGIN - 1e-9


@settings(max_examples=50)
@given(st.lists(st.tuples(beliefs, st.integers(0, 4)), min_size=2, max_size=3), st.integers(0, 1))
def test_decision_with_equal_rows_is_near_the_best_of_all(
    sequences: list[tuple[list[float], int]], plain_count: int
) -> None:
    """Every sequence has as many rows as the deepest draft needs, including those without drafts."""
    candidates = [Candidate(make_belief(w), limit, STEP_MS) for w, limit in sequences]
    count = len(candidates) + plain_count
    passes = pass_ms(5 * count)

    def rate_of(depths: Sequence[int]) -> float:
        pairs = zip(candidates, depths, strict=True)
        gain = plain_count + sum(float(c.belief.survival((), d).sum()) for c, d in pairs)
        cost = sum(depths) * STEP_MS + float(passes[count * (1 + max(depths))]) + OVERHEAD_MS
        return gain / cost

    costs = RoundCosts(passes, OVERHEAD_MS, OVERHEAD_MS, n_equal_sequences=count)
    decision = decide(candidates, costs, plain_count, plain_count)
    assert decision.rate == pytest.approx(rate_of(decision.depths))
    best = max(map(rate_of, product(*(range(limit + 1) for _, limit in sequences))))
    assert decision.rate > 0.97 * best


def test_belief_follows_a_burst_within_a_few_tokens() -> None:
    belief = Belief(Calibration())
    for _ in range(60):
        belief.observe(9, False)
    assert belief.mean < 0.15
    for _ in range(12):
        belief.observe(9, True)
    assert belief.mean > 0.6
    for _ in range(8):
        belief.observe(9, False)
    assert belief.mean < 0.4


@given(st.lists(st.tuples(st.integers(0, N_BUCKETS - 1), st.booleans()), max_size=80))
def test_a_belief_stays_a_distribution(observations: list[tuple[int, bool]]) -> None:
    belief = Belief(Calibration())
    for at, hit in observations:
        belief.observe(at, hit)
        belief.fade(3)
    for weights in (belief.weights, belief.calibration.prior, belief.calibration.share):
        assert weights.sum() == pytest.approx(1.0)
        assert weights.min() >= 0


def test_unobserved_belief_fades_to_the_prior() -> None:
    belief = Belief(Calibration())
    for _ in range(50):
        belief.observe(9, False)
    belief.fade(2000)
    assert belief.weights == pytest.approx(belief.calibration.prior)


def test_calibration_learns_the_value_of_each_confidence() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration()
    for _ in range(20):
        belief = Belief(calibration)
        for _ in range(100):
            at = int(rng.choice([2, 9]))
            belief.observe(at, bool(rng.random() < (0.95 if at == 9 else 0.2)))
    belief = Belief(calibration)
    sure, unsure = (float(belief.weights @ calibration.rates[at]) for at in (9, 2))
    assert sure == pytest.approx(0.95, abs=0.08)
    assert unsure == pytest.approx(0.2, abs=0.12)
    assert calibration.share[2] + calibration.share[9] > 0.95


def test_confidences_fall_into_their_buckets() -> None:
    buckets = [find_bucket(confidence) for confidence in np.linspace(0, 1, 401)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(N_BUCKETS))
    assert find_bucket(0.0) == 0
    assert find_bucket(1.0) == N_BUCKETS - 1


def test_a_calibration_survives_being_stored() -> None:
    calibration = Calibration()
    belief = Belief(calibration)
    for at in range(30):
        belief.observe(at % N_BUCKETS, at % 3 == 0)
    restored = Calibration.from_dict(calibration.as_dict())
    calibration._refresh()
    assert restored.prior == pytest.approx(calibration.prior)
    assert restored.rates == pytest.approx(calibration.rates)
    assert restored.unseen == pytest.approx(calibration.unseen)


@pytest.mark.parametrize(
    "damage",
    [
        None,
        [],
        "text",
        {},
        {"prior": [1.0]},
        {"prior": "many"},
        {"prior": [math.nan] * len(GRID)},
        {"prior": [-1.0, 2.0] + [0.0] * (len(GRID) - 2)},
        {"offset": [math.inf] * N_BUCKETS},
        {"offset": ["a"] * N_BUCKETS},
        {"offset": [1e300] * N_BUCKETS},
        {"share": [9.0] * N_BUCKETS},
        {"share": [-1.0] * N_BUCKETS},
        {"count": [-1e9] * N_BUCKETS},
    ],
)
def test_a_damaged_calibration_is_replaced_by_a_fresh_one(damage: object) -> None:
    stored: object = damage
    if isinstance(damage, dict) and damage:
        stored = {**Calibration(0.4).as_dict(), **damage}
    calibration = Calibration.from_dict(stored, 0.4)
    assert calibration.as_dict() == Calibration(0.4).as_dict()


def test_fixed_depth_ignores_costs() -> None:
    dear = CostProfile(CostTable(TARGET_MS), CostTable({1: 1e6}), OVERHEAD_MS)
    replay = Replay(steady(0.0, 40), dear, Calibration(), depth=5)
    replay.run()
    assert set(replay.depths[:-6]) == {5}


LENGTH = 1000
TRACES = [
    *(steady(alpha, LENGTH) for alpha in (0.0, 0.2, 0.4, 0.7, 0.95, 1.0)),
    bursty(0.95, 0.1, 40, LENGTH),
    bursty(0.95, 0.1, 200, LENGTH),
    calibrated(LENGTH),
]
all_traces = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)


@functools.cache
def replay_twice(name: str) -> tuple[Replay, Replay]:
    """Replay a trace in `auto` with a new pair, and again with what it has learned."""
    trace = next(trace for trace in TRACES if trace.name == name)
    calibration = Calibration()
    return auto(trace, calibration), auto(trace, calibration)


@all_traces
def test_auto_is_never_slower_than_plain(trace: Trace) -> None:
    """This holds for the first answer of a pair, at every acceptance rate, after 64 tokens."""
    first_run, _ = replay_twice(trace.name)
    begun = 64
    spent = first_run.spent_ms[-1] - first_run.spent_ms[begun]
    assert plain_ms(trace) * (1 - begun / LENGTH) / spent >= 0.97


@all_traces
def test_auto_with_a_known_pair_is_never_slower_than_plain(trace: Trace) -> None:
    assert plain_ms(trace) / replay_twice(trace.name)[1].spent_ms[-1] >= 0.97


@all_traces
def test_auto_is_near_the_best_fixed_depth_found_afterwards(trace: Trace) -> None:
    assert best_fixed_ms(trace) / replay_twice(trace.name)[1].spent_ms[-1] >= 0.95


@pytest.mark.parametrize("trace", TRACES[-3:], ids=lambda trace: trace.name)
def test_auto_is_no_worse_than_any_fixed_depth_where_the_text_changes(trace: Trace) -> None:
    assert best_fixed_ms(trace) / replay_twice(trace.name)[1].spent_ms[-1] >= 1.0


@pytest.mark.parametrize("bad", [200, 500, 1500])
def test_drafts_that_become_good_after_a_long_bad_stretch_are_noticed(bad: int) -> None:
    """They are noticed however much text the draft model has to read first."""
    trace = bursty(0.0, 0.95, bad, 2 * bad)
    calibration = Calibration()
    auto(steady(0.0, 1000), calibration)
    assert sum(auto(trace, calibration).depths) > 0.3 * bad


@pytest.mark.parametrize("share", [0.3, 0.1, 0.01, 0.001])
def test_looking_for_drafts_costs_little_where_none_are_found(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds whatever a search costs; where it costs almost nothing, every round searches."""
    looks, wrong = [0], steady(0.0, 600)

    def offer(drafter: ModelDrafter, request: DraftRequest) -> None:
        looks[0] += 1
        drafter.model._clock.spend(share * TARGET_MS[1])  # type: ignore[attr-defined]

    monkeypatch.setattr(ModelDrafter, "offer", offer)
    monkeypatch.setattr(ModelDrafter, "costly", False)
    replay = auto(wrong)
    assert plain_ms(wrong) / replay.spent_ms[-1] >= 0.95
    if share <= 0.001:
        assert looks[0] >= 0.99 * 600


@pytest.mark.parametrize("alpha", [0.0, 0.95])
def test_first_attempt_in_a_text_is_small(alpha: float) -> None:
    """Where rows are cheap, fifteen drafts would otherwise be tried at once, and lost in bad texts."""
    costs = CostProfile(CostTable({1: 20.0, 16: 24.0}), CostTable({1: 0.5, 16: 1.0}), 1.0)
    calibration = Calibration()
    for seed in range(4):
        Replay(steady(0.95, 200, seed), costs, calibration).run()
    replay = Replay(steady(alpha, 200, 9), costs, calibration)
    replay.run()
    begun = next((at for at, depth in enumerate(replay.depths) if depth), 0)
    assert 1 <= replay.depths[begun] <= MAX_UNPROVEN_DRAFTS
    if alpha:
        assert max(replay.depths) > 8
    else:
        assert max(replay.depths) <= MAX_UNPROVEN_DRAFTS
    fixed = Replay(steady(0.0, 40), costs, calibration, depth=6)
    fixed.run()
    assert max(fixed.depths) == 6


def test_successful_search_is_repeated_at_once() -> None:
    drafting = Drafting([])
    backoffs = []
    for success in (False, False, False, False, False, True, False, False):
        drafting.end_search(success, max_backoff=7)
        backoffs.append(drafting.budget.searches.left)
        while not drafting.begin_search():
            pass
    assert backoffs == [1, 2, 4, 7, 7, 0, 1, 2]
    fixed = Drafting([], 3)
    fixed.end_search(False, max_backoff=7)
    assert fixed.begin_search()


def test_replayed_costs_are_the_measured_ones() -> None:
    """The two extremes of a replay can be computed by hand."""
    everything = steady(1.0, 400)
    assert plain_ms(everything) == pytest.approx(400 * (TARGET_MS[1] + OVERHEAD_MS))
    always = replay_fixed_ms(everything.hits, 3, COSTS)
    assert always == pytest.approx(100 * (TARGET_MS[4] + 3 * STEP_MS + OVERHEAD_MS))


@pytest.mark.parametrize(("clients", "alpha"), [(2, 0.95), (4, 0.0), (4, 0.8), (8, 0.4), (8, 0.95)])
def test_several_clients_are_never_slower_than_without_drafts(clients: int, alpha: float) -> None:
    """This holds in total from the first texts of a pair, where rows of several texts cost more."""
    dearer = 0.02
    calibration = Calibration()
    for number, least in enumerate((0.95, 0.97, 0.97)):
        trace = steady(alpha, 128 * clients, number)
        plain = together(trace, clients, 0, dearer=dearer)
        assert plain / together(trace, clients, None, calibration, dearer) >= least


@pytest.mark.parametrize("clients", [2, 4])
def test_several_clients_get_most_of_the_best_fixed_depth(clients: int) -> None:
    """This holds in total, once the pair has learned."""
    calibration = Calibration()
    ratios = []
    for number in range(6):
        trace = steady(0.95, 128 * clients, number)
        spent_ms = together(trace, clients, None, calibration)
        if number >= 3:
            best = min(together(trace, clients, depth) for depth in (0, 1, 3))
            ratios.append(best / spent_ms)
    assert np.mean(ratios) >= 0.93
