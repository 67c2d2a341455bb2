"""Replays of small traces, for which the right answer can be counted by hand."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.device import (
    bursts,
    compare,
    compare_draws,
    device_profile,
    make_text,
    warm_start,
    without_draft,
)
from benchmarks.measuring.driven import Driven
from benchmarks.texts import replay as lookups
from benchmarks.traces.copying import compare_copying, make_answer, make_copying, shortest_ms
from benchmarks.traces.replay import Costs, Replay, markdown, regret, runs_of_hits
from benchmarks.traces.trace import EXAMPLE_COSTS, Trace, cost_profile
from localspec.engine.llama import Batch
from localspec.engine.speculation.acceptance import Calibration, find_bucket
from localspec.engine.speculation.cost import NO_CHANGE, ChangeCost, CostProfile, CostTable
from localspec.engine.speculation.depth import MAX_DEPTH
from localspec.extras.bench.theory import replay_fixed_ms, replay_optimal_ms
from localspec.protocol.frames import SpeculationSettings

# Widths 1…16 cost 100 ms and a tenth of that per further row; a draft costs 10 ms; no overhead.
LINEAR = {
    "target_ms": {w: 100.0 + 10.0 * (w - 1) for w in range(1, 17)},
    "draft_ms": dict.fromkeys(range(1, 17), 10.0),
    "overhead_ms": 0.0,
}
COSTS = Costs.of(cost_profile(LINEAR))


def make_trace(hits: list[bool], confidence: float = 0.7) -> Trace:
    target = list(range(len(hits)))
    draft = [token if hit else -1 for token, hit in zip(target, hits, strict=True)]
    return Trace("test", target, draft, [find_bucket(confidence)] * len(hits), LINEAR)


def random_hits(rate: float, count: int, seed: int = 0) -> list[bool]:
    rng = random.Random(seed)
    return [rng.random() < rate for _ in range(count)]


def test_runs_of_hits() -> None:
    assert runs_of_hits([True, True, False, True]) == [2, 1, 0, 1]
    assert runs_of_hits([]) == []


def test_plain_decoding_is_one_pass_per_token() -> None:
    assert replay_fixed_ms([True] * 5, 0, COSTS) == pytest.approx(500)


def test_a_fixed_depth_writes_the_accepted_drafts_and_one_token_more() -> None:
    # two drafts: 10 + 10, and a pass of width 3: 120
    assert replay_fixed_ms([True, True, True], 2, COSTS) == pytest.approx(140)
    assert replay_fixed_ms([False, False, False], 2, COSTS) == pytest.approx(140 + (10 + 110) + 100)


def test_a_fixed_depth_does_not_draft_beyond_the_end() -> None:
    assert replay_fixed_ms([True], 8, COSTS) == pytest.approx(100)


def brute_force_ms(hits: list[bool], at: int = 0) -> float:
    if at >= len(hits):
        return 0.0
    runs = runs_of_hits(hits)
    return min(
        COSTS.round_cost(k) + brute_force_ms(hits, at + min(runs[at], k) + 1)
        for k in range(len(hits) - at)
    )


def test_the_clairvoyant_path_is_the_shortest_of_all() -> None:
    for hits in itertools.product([False, True], repeat=6):
        assert replay_optimal_ms(list(hits), MAX_DEPTH, COSTS) == pytest.approx(
            brute_force_ms(list(hits))
        )


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.7, 0.95])
def test_no_policy_is_faster_than_the_clairvoyant(rate: float) -> None:
    result = regret(make_trace(random_hits(rate, 300)), cost_profile(LINEAR), range(1, 9))
    assert result.clairvoyant <= min(result.best_fixed, result.auto, result.auto_first) + 1e-6


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_fixed_policy_costs_what_is_computed(depth: int) -> None:
    hits = random_hits(0.6, 200)
    replay = Replay(make_trace(hits), cost_profile(LINEAR), Calibration(), depth)
    spent = replay.run()
    fixed = replay_fixed_ms(hits, depth, COSTS)
    assert fixed * (1 - 1e-6) <= spent <= fixed * 1.02
    if depth == 0:
        assert set(replay.depths) == {0}


@pytest.mark.parametrize("rate", [0.95, 0.7, 0.4, 0.0])
def test_auto_stays_near_the_best_fixed_depth(rate: float) -> None:
    """Without repacked kernels; tests/engine/test_depth.py has the costs with them."""
    trace = make_trace(random_hits(rate, 1500))
    result = regret(trace, cost_profile(EXAMPLE_COSTS["plain"]), range(1, 9), passes=2)
    assert result.plain / result.auto >= 0.97
    assert result.best_fixed / result.auto >= 0.95


def test_auto_drafts_nothing_for_long_where_all_drafts_are_wrong() -> None:
    replay = Replay(make_trace([False] * 400), cost_profile(LINEAR), Calibration())
    replay.run()
    assert sum(replay.depths[200:]) <= 10


def test_a_saved_trace_loads_unchanged(tmp_path: Path) -> None:
    trace = make_trace([True, False, True])
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert (loaded.target, loaded.draft, loaded.buckets) == (
        trace.target,
        trace.draft,
        trace.buckets,
    )
    assert loaded.hits == [True, False, True]
    costs = cost_profile(loaded.costs)
    assert costs.target.ms(1) + costs.overhead_ms == pytest.approx(100)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"version": 2}',
        '{"version": 1, "name": "x"}',
        '{"version": 1, "name": "", "target": [1], "draft": [], "buckets": [0], "costs": {}}',
        '{"version": 1, "name": "", "target": [1], "draft": [1], "buckets": [99], "costs": {}}',
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"trace"):
        Trace.load(path)


def test_the_table_has_every_policy() -> None:
    trace = make_trace(random_hits(0.7, 100))
    text = markdown(trace, regret(trace, cost_profile(LINEAR), [1, 2]))
    for name in ("plain", "fixed 1", "fixed 2", "auto", "clairvoyant"):
        assert f"| {name} |" in text


# Costs as on an H100, with targets of 8 B and 27 B: a draft of 0.5 B is expensive beside the first.
ON_GPU = {
    "8 B": ({1: 3.2, 4: 3.4, 8: 4.6, 9: 6.5, 16: 6.9, 64: 9.0}, {1: 1.9, 2: 2.4, 16: 2.6, 64: 3.0}),
    "27 B": ({1: 12.0, 4: 12.6, 8: 16.0, 9: 22.0, 64: 32.0}, {1: 1.9, 2: 2.4, 16: 2.6, 64: 3.0}),
}


@pytest.mark.parametrize("pair", ON_GPU)
@pytest.mark.parametrize("rate", [0.95, 0.8, 0.4, 0.0])
def test_auto_is_no_slower_than_plain_if_changes_of_width_are_expensive(
    pair: str, rate: float
) -> None:
    target, draft = (CostTable(table, change=ChangeCost(2.1, 2.4)) for table in ON_GPU[pair])
    profile = CostProfile(target, draft, 0.2)
    traces = [make_text([rate] * 300, seed) for seed in range(1, 3)]

    def spent_ms(depth: int | None, calibrations: list[Calibration]) -> float:
        pairs = zip(traces, calibrations, strict=True)
        return sum(Replay(trace, profile, learned, depth).run() for trace, learned in pairs)

    learned = [Calibration() for _ in traces]
    auto = max(spent_ms(None, learned) for _ in range(2))  # in its first text, too
    plain, fixed = (spent_ms(depth, [Calibration() for _ in traces]) for depth in (0, 4))
    assert plain / auto >= 0.96
    assert min(plain, fixed) / auto >= 0.8


@pytest.mark.parametrize(
    ("target", "rates"),
    [
        ("32B", [0.95] * 300),
        ("32B", [0.6] * 300),
        ("32B", bursts(0.95, 0.1, 100, 300)),
        ("70B", [0.8] * 300),
        ("70B", [0.4] * 300),
        ("70B", bursts(0.95, 0.1, 100, 300)),
    ],
    ids=["32B-0.95", "32B-0.6", "32B-bursts", "70B-0.8", "70B-0.4", "70B-bursts"],
)
def test_auto_is_as_fast_as_the_best_depth_if_changes_of_width_are_dear(
    target: str, rates: list[float]
) -> None:
    outcome = compare(target, make_text(rates), depths=(1, 2, 4, 7, 15))
    assert outcome.best_fixed / outcome.auto >= 0.94  # a change costs 1 % of so short a text
    assert outcome.plain / outcome.auto >= 0.98


@pytest.mark.parametrize("every", [40, 80])
@pytest.mark.parametrize("target", ["8B", "32B"])
def test_texts_that_change_are_hardly_slower_than_plain_if_changes_of_width_are_dear(
    target: str, every: int
) -> None:
    outcome = compare_draws(target, bursts(0.95, 0.1, every, 512), 2, depths=())
    assert outcome.plain / outcome.auto >= (0.95 if target == "8B" else 1.05)


@pytest.mark.parametrize("target", ["8B", "32B"])
def test_four_sequences_are_hardly_slower_than_plain_if_changes_of_width_are_dear(
    target: str,
) -> None:
    outcome = compare(target, make_text(bursts(0.95, 0.1, 40, 1024)), 4, depths=())
    assert outcome.plain / outcome.auto >= 0.94


@pytest.mark.parametrize(("target", "gain"), [("8B", 1.15), ("32B", 2.0), ("70B", 2.4)])
def test_four_sequences_are_as_fast_as_at_the_best_depth_if_they_draft_well(
    target: str, gain: float
) -> None:
    outcome = compare_draws(target, [0.95] * 1024, 2, 4, depths=(5, 7))
    assert outcome.best_fixed / outcome.auto >= 0.94
    assert outcome.plain / outcome.auto >= gain


@pytest.mark.parametrize("target", ["8B", "32B", "70B"])
@pytest.mark.parametrize(
    ("prose", "copy", "least"), [(40, 40, 0.85), (100, 60, 0.92), (100, 150, 0.93)]
)
def test_copies_are_nearly_as_fast_as_for_a_clairvoyant(
    target: str, prose: int, copy: int, least: float
) -> None:
    costs = without_draft(target)
    ratios = [compare_copying(costs, make_copying(prose, copy, 3, seed)) for seed in (1, 2)]
    assert all(beside_clairvoyant <= 1 for beside_clairvoyant, _ in ratios)
    assert sum(beside_clairvoyant for beside_clairvoyant, _ in ratios) / 2 >= least
    assert all(beside_plain > 1.2 for _, beside_plain in ratios)


@pytest.mark.parametrize(("change", "passes_ms"), [(ChangeCost(2.0, 9.0), 33.0), (NO_CHANGE, 23.0)])
def test_a_clairvoyant_changes_the_width_only_where_that_pays(
    change: ChangeCost, passes_ms: float
) -> None:
    """Five passes of two rows take 20 ms and a change, ten of one row 30 ms."""
    table = CostTable({1: 3.0, 2: 4.0, 64: 200.0}, change=change)
    known = [False, True, False, True, False, True, False, True, False, True, False]
    assert shortest_ms(known, CostProfile(table, None, 0.0)) == passes_ms


def test_the_cost_of_a_draft_is_learned_from_replayed_passes_alone() -> None:
    replay = Replay(make_text([0.8] * 200), device_profile("8B"), Calibration())
    replay.run()
    drafter = replay.pair.drafter
    assert drafter is not None
    assert drafter.steps.ms(1) == pytest.approx(1.03, rel=0.02)


@pytest.mark.parametrize("target", ["8B", "32B", "70B"])
def test_useless_drafts_cost_little_if_changes_of_width_are_dear(target: str) -> None:
    outcome = compare(target, make_text([0.0] * 400), depths=())
    assert outcome.plain / outcome.auto >= 0.985


def test_a_round_stays_at_the_width_in_use_and_drafts_in_passes_of_one_width() -> None:
    replay = Replay(make_text([0.8] * 400), device_profile("32B"), Calibration())
    widths: list[list[int]] = []
    assert replay.pair.drafter is not None
    for context in (replay.pair.shared.context, replay.pair.drafter.context):
        widths.append([])

        def decode(batch: Batch, seen: list[int] = widths[-1], real: Any = context.decode) -> None:
            seen.append(batch.rows)
            real(batch)

        context.decode = decode  # type: ignore[method-assign]
    replay.run()
    target, draft = widths
    changes = sum(a != b for a, b in pairwise(target))
    assert changes < len(target) / 8
    assert draft.count(1) > 0.9 * len(draft)


# A small model, of which a pass takes about as long as another program's turn on the processor.
SMALL_TARGET = {1: 1.0, 2: 1.15, 3: 1.3, 4: 1.4, 5: 1.6, 6: 1.7, 8: 2.0, 12: 2.6, 16: 3.1, 32: 5.5}
SMALL_DRAFT = {1: 0.13, 2: 0.15, 4: 0.2, 8: 0.3, 16: 0.45, 64: 1.4}


def small_profile(wide: float = 1.0) -> CostProfile:
    """Return the costs of a small model, with passes of five and more rows `wide` times as dear."""
    target = {rows: ms * (wide if rows >= 5 else 1.0) for rows, ms in SMALL_TARGET.items()}
    return CostProfile(CostTable(target), CostTable(SMALL_DRAFT), 0.2)


def last_half_ms(replay: Replay) -> float:
    """Replay a text, and return the milliseconds of its last half."""
    replay.run()
    return replay.spent_ms[-1] - replay.spent_ms[len(replay.spent_ms) // 2]


@pytest.mark.parametrize("rate", [0.95, 0.8, 0.6])
def test_a_pass_that_waited_does_not_end_drafting(rate: float) -> None:
    text = make_text([rate] * 400, 3)

    def replay(waiting: int, wait_ms: float) -> float:
        """Replay with a wait of `wait_ms` in pass number `waiting`."""
        replay = Replay(text, small_profile(), warm_start(text))
        spend, passes = replay.clock.spend, itertools.count()
        replay.clock.spend = lambda ms: spend(ms + wait_ms * (next(passes) == waiting))  # type: ignore[method-assign]
        return last_half_ms(replay)

    undisturbed = replay(0, 0.0)
    for waiting in range(20, 44, 6):
        assert undisturbed / replay(waiting, 50.0) > 0.93, waiting


@pytest.mark.parametrize("rate", [0.95, 0.8, 0.6])
def test_wide_passes_that_were_measured_too_dear_are_tried_again(rate: float) -> None:
    text = make_text([rate] * 800, 3)
    informed = last_half_ms(Replay(text, small_profile(), warm_start(text)))
    for wide in (1.3, 1.5, 2.0):
        misled = Replay(text, small_profile(), warm_start(text), believed=small_profile(wide))
        assert informed / last_half_ms(misled) > 0.93, wide


N_ANSWERS, ANSWER_TOKENS = 16, 120


def dearer(costs: CostProfile, factor: float) -> CostProfile:
    """Return costs with passes of the target of more than one row `factor` times as dear."""
    known = costs.target.as_dict()
    wide = {rows: ms * (factor if rows > 1 else 1.0) for rows, ms in known.items()}
    return CostProfile(CostTable(wide, change=costs.target.change), costs.draft, costs.overhead_ms)


def use_idle_time(replay: Driven) -> None:
    while replay.engine.has_idle_work:
        replay.engine.use_idle_time()


def write_drafted(costs: CostProfile, factor: float) -> list[float]:
    """Return the milliseconds of each answer if wide passes seemed `factor` times as dear."""
    text = make_text([0.7] * ANSWER_TOKENS * N_ANSWERS)
    believed = dearer(costs, factor)
    replay = Replay(text, costs, warm_start(text), None, N_ANSWERS, believed=believed)
    replay.pair.learned.noise, times = factor - 1, list[float]()
    for number in range(N_ANSWERS):
        start, prompt = replay.clock(), [number * ANSWER_TOKENS]
        replay.write_greedily(number + 1, prompt, ANSWER_TOKENS, SpeculationSettings(kind="draft"))
        replay.finish()
        times.append(1e3 * (replay.clock() - start))
        use_idle_time(replay)
    return times


def write_looked_up(costs: CostProfile, factor: float) -> list[float]:
    """Return what `write_drafted` does, of answers whose drafts are looked up."""
    replay = lookups.Replay(costs, dearer(costs, factor).target.as_dict())
    replay.pair.learned.noise, times = factor - 1, list[float]()
    for number in range(N_ANSWERS):
        times.append(replay.write(make_answer("edits", ANSWER_TOKENS, number)).ms)
        use_idle_time(replay)
    return times


@pytest.mark.parametrize("drafts", ["draft", "heads", "looked up", "looked up, 32B"])
def test_a_disturbed_measurement_does_not_keep_answers_slow(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = SimpleNamespace(share=0.0)
    monkeypatch.setattr("localspec.engine.pair.profile.Contention", lambda: quiet)
    costs = cost_profile(EXAMPLE_COSTS["repacked"])
    if drafts == "heads":  # as a draft that costs a third
        assert costs.draft is not None
        cheap = {rows: ms / 3 for rows, ms in costs.draft.as_dict().items()}
        costs = CostProfile(costs.target, CostTable(cheap), costs.overhead_ms)
    elif drafts.startswith("looked up"):
        known = CostProfile(CostTable(lookups.COSTS), None, lookups.OVERHEAD_MS)
        costs = without_draft("32B") if drafts.endswith("32B") else known
    write = write_looked_up if costs.draft is None else write_drafted
    informed, misled = write(costs, 1.0), write(costs, 3.0)
    assert informed[0] / misled[0] < 0.9
    assert sum(informed[10:]) / sum(misled[10:]) >= 0.98
