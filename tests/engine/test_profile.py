"""The cost table: padding, corrections from measured rounds, and storage between runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.engine.llama.waiting import parse_busy_seconds
from localspec.engine.pair.profile import (
    FIRST_WIDTHS,
    MAX_QUIET_NOISE,
    MAX_REPEATS,
    MIN_REPEATS,
    VERSION,
    WIDE_WIDTHS,
    Contention,
    PassTimes,
    ProfileStore,
    StoredProfile,
    hash_identity,
    measure_passes,
    measure_widths,
)
from localspec.engine.speculation.cost import (
    NO_CHANGE,
    PASSES_PER_CHANGE,
    RETRY_INTERVAL_PASSES,
    SETTLING_PASSES,
    ChangeCost,
    CostProfile,
    CostTable,
    UsedWidth,
    WidthHistory,
    parse_cost_table,
)
from tests.support.replay import DRAFT_MS, TARGET_MS

tables = st.dictionaries(st.integers(2, 32), st.floats(0.01, 1e4), min_size=0, max_size=12).flatmap(
    lambda d: st.floats(0.01, 1e4).map(lambda first: {1: first, **d})
)


def test_three_rows_are_padded_to_the_cheaper_four() -> None:
    table = CostTable(TARGET_MS)
    assert [table.padded_width(rows) for rows in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 5]


@given(tables, st.integers(1, 40))
def test_padding_holds_the_rows_and_never_costs_more(measured: dict[int, float], rows: int) -> None:
    table = CostTable(measured)
    width = table.padded_width(rows)
    assert width >= rows
    assert table.ms(width) <= table.ms(rows)
    assert width == rows or width in measured


@given(tables, st.integers(1, 40))
def test_the_table_of_costs_agrees_with_padding(measured: dict[int, float], rows: int) -> None:
    table = CostTable(measured)
    costs = table.padded_ms(rows)
    assert costs.shape == (rows + 1,)
    assert costs[0] == 0.0
    expected = [table.ms(table.padded_width(n)) for n in range(1, rows + 1)]
    assert costs[1:] == pytest.approx(expected)


@given(tables, st.integers(1, 4), st.integers(1, 9))
def test_passes_of_equal_sequences_are_padded_to_valid_widths(
    measured: dict[int, float], sequences: int, max_rows: int
) -> None:
    table = CostTable(measured, max_rows_each=max_rows).for_sequences(sequences)
    free = CostTable(measured).for_sequences(sequences)
    rows = max_rows * sequences
    for row_count in range(1, max_rows + 1):
        width = table.padded_width(row_count * sequences)
        assert width == row_count * sequences or width % sequences == 0
        assert row_count * sequences <= width <= rows
        assert table.ms(width) >= free.ms(free.padded_width(row_count * sequences))
        assert table.padded_ms(rows)[row_count * sequences] == pytest.approx(table.ms(width))


@given(tables)
def test_measured_widths_cost_what_was_measured(measured: dict[int, float]) -> None:
    table = CostTable(measured)
    for width, ms in measured.items():
        assert table.ms(width) == pytest.approx(ms)


def test_beyond_the_widest_there_is_no_cliff_downwards() -> None:
    table = CostTable(TARGET_MS)
    costs = [table.ms(width) for width in range(16, 200)]
    assert costs == sorted(costs)


@pytest.mark.parametrize("measured", [{}, {2: 1.0}, {1: 0.0}, {1: 1.0, 2: -1.0}])
def test_a_table_without_a_positive_width_one_is_refused(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="width 1"):
        CostTable(measured)


def test_slowdown_of_the_machine_is_followed_at_every_width() -> None:
    table = CostTable(TARGET_MS)
    for _ in range(200):
        table.observe(1, 2 * TARGET_MS[1])
    assert table.ms(1) == pytest.approx(2 * TARGET_MS[1], rel=0.05)
    assert table.ms(8) > 1.3 * TARGET_MS[8]
    for _ in range(300):
        for width in (1, 4, 8):
            table.observe(width, TARGET_MS[width])
    for width in (1, 4, 8):
        assert table.ms(width) == pytest.approx(TARGET_MS[width], rel=0.05)
    assert table.padded_ms(8)[8] == pytest.approx(TARGET_MS[8], rel=0.06)


def test_one_outlier_moves_little() -> None:
    table = CostTable(TARGET_MS)
    table.observe(4, 1e9)
    assert table.ms(4) < 1.4 * TARGET_MS[4]
    assert table.ms(1) < 1.3 * TARGET_MS[1]


def test_a_width_that_was_not_measured_is_learned_from_a_round() -> None:
    table = CostTable(TARGET_MS)
    cost_before = table.ms(6)
    table.observe(6, cost_before * 0.6)
    assert table.ms(6) == pytest.approx(cost_before * 0.6)
    assert table.padded_width(5) == 6
    assert table.padded_ms(6)[5] == pytest.approx(cost_before * 0.6)


@settings(max_examples=40)
@given(st.integers(0, 999), st.integers(1, 8), st.integers(1, 3), st.floats(1.05, 3.0))
def test_width_with_a_disturbed_measurement_is_soon_retried(
    seed: int, rows: int, more_disturbed: int, slower: float
) -> None:
    rng = random.Random(seed)
    costs = [2.0 + 0.5 * width * rng.uniform(0.8, 1.2) for width in range(18)]
    disturbed = {rows, *rng.sample(range(1, 17), more_disturbed)}
    table = CostTable({w: costs[w] * (slower if w in disturbed else 1) for w in range(1, 17)})
    spent = []
    for _ in range(40 * RETRY_INTERVAL_PASSES):
        width = table.choose_width(rows)
        assert width >= rows
        spent.append(costs[width])
        table.observe(width, costs[width] * rng.uniform(0.98, 1.1))
    # A wider width that seems expensive does not matter here, since it runs when drafts need it.
    best = min(costs[w] for w in range(rows, 17) if w == rows or w not in disturbed)
    assert sum(spent[-4 * RETRY_INTERVAL_PASSES :]) / (4 * RETRY_INTERVAL_PASSES) <= 1.06 * best


def test_prompt_passes_are_not_counted_as_rounds() -> None:
    table = CostTable(TARGET_MS)
    table.observe(500, 1.0)
    assert 500 not in table.as_dict()
    assert table.ms(1) == TARGET_MS[1]


@given(tables, st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 1e5)), max_size=60))
def test_costs_stay_positive_whatever_is_observed(
    measured: dict[int, float], observations: list[tuple[int, float]]
) -> None:
    table = CostTable(measured)
    for width, ms in observations:
        table.observe(width, ms)
    costs = table.padded_ms(40)[1:]
    assert np.all(np.isfinite(costs))
    assert np.all(costs > 0)


@pytest.mark.parametrize(
    ("limit_s", "pass_s", "repeats"), [(-1, 0, 1), (30, 0, MAX_REPEATS), (30, 0.03, MIN_REPEATS)]
)
def test_widths_take_turns_so_that_a_disturbance_falls_on_all(
    limit_s: float, pass_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is measured warm even without time, and slow passes are repeated fewer times."""
    calls, time_s = list[int](), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time_s[0])
    monkeypatch.setattr("localspec.engine.pair.profile.time", clock)

    def run(width: int) -> None:
        calls.append(width)
        time_s[0] += pass_s

    costs = measure_passes(run, (1, 2, 4), limit_s, lambda: time_s[0]).ms
    assert list(costs) == [1, 2, 4]
    assert calls == [1, 2, 4] + [*[1] * SETTLING_PASSES, 1, 2, 4] * repeats


def test_with_time_all_widths_to_sixteen_are_measured_and_two_wide_ones_else_few() -> None:
    costs = measure_widths(lambda width: None, budget_s=30.0).ms
    assert list(costs) == [*range(1, 17), *WIDE_WIDTHS]
    assert parse_cost_table({str(width): ms for width, ms in costs.items()}) is not None
    assert list(measure_widths(lambda width: None, budget_s=0.0).ms) == [*FIRST_WIDTHS]


def test_waiting_for_a_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    time_s, turns = [0.0], [0]
    clock = SimpleNamespace(monotonic=lambda: time_s[0], perf_counter=lambda: time_s[0])
    monkeypatch.setattr("localspec.engine.pair.profile.time", clock)

    @contextmanager
    def turn() -> Iterator[None]:
        time_s[0] += 0.5  # others have their turns
        turns[0] += 1
        yield
        turns[0] -= 1

    def run(width: int) -> None:
        assert turns[0] == 1
        time_s[0] += 0.001 * width

    costs = measure_passes(run, (1, 2, 4), 60.0, lambda: time_s[0], turn).ms
    assert costs == pytest.approx({1: 1.0, 2: 2.0, 4: 4.0})
    assert measure_widths(run, 30.0, turn).ms.keys() == {*range(1, 17), *WIDE_WIDTHS}


def measure_disturbed(rng: random.Random, share: float) -> PassTimes:
    """Measure passes of 9 ms and 1 ms per row, of which `share` take 1.5 or 2 times as long."""
    time_s = [0.0]

    def run(width: int) -> None:
        slower = rng.choice((1.5, 2.0)) if rng.random() < share else rng.uniform(1, 1.03)
        time_s[0] += (0.009 + 0.001 * width) * slower

    return measure_passes(run, range(1, 17), time.monotonic() + 60, lambda: time_s[0])


def measure_recorded(first_ms: float, second_ms: float) -> PassTimes:
    """Measure passes of 3 ms and 0.2 ms per further row, whose first and second cost more.

    On CUDA the first pass of a width starts kernels, the second is recorded, and later ones replay it.
    """
    time_s, last_width, repeats = [0.0], 0, 0

    def run(width: int) -> None:
        nonlocal last_width, repeats
        last_width, repeats = width, repeats + 1 if width == last_width else 0
        extra_ms = (first_ms, second_ms, 0.0)[min(repeats, 2)]
        time_s[0] += (3.0 + 0.2 * (width - 1) + extra_ms) / 1e3

    return measure_passes(run, range(1, 9), time.monotonic() + 60, lambda: time_s[0])


def test_a_change_of_width_is_measured_apart_from_the_widths() -> None:
    measured = measure_recorded(2.2, 5.0)
    assert measured.ms == pytest.approx({width: 3.0 + 0.2 * (width - 1) for width in range(1, 9)})
    assert measured.change == pytest.approx((2.2, 5.0))


@pytest.mark.parametrize("n_in_time", range(60))
def test_every_width_is_measured_wherever_the_time_ends(
    n_in_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a change costs much may be found in the last repeat that there is time for."""
    widths: list[int] = []
    time_s = [0.0]

    def run(width: int) -> None:
        repeats = sum(1 for _ in itertools.takewhile(lambda last: last == width, reversed(widths)))
        widths.append(width)
        time_s[0] += (3.0 + (2.0, 5.0, 0.0)[min(repeats, 2)]) / 1e3

    clock = SimpleNamespace(
        monotonic=lambda: float(len(widths) > n_in_time), perf_counter=lambda: time_s[0]
    )
    monkeypatch.setattr("localspec.engine.pair.profile.time", clock)
    assert set(measure_passes(run, (1, 2, 4), 0.5, lambda: time_s[0]).ms) == {1, 2, 4}


def test_a_change_to_a_width_whose_graph_is_kept_costs_nothing() -> None:
    """Eight widths have graphs, fewer than are measured."""
    time_s, kept, repeats = [0.0], list[int](), dict[int, int]()

    def run(width: int) -> None:
        n_before = repeats.get(width, 0) if width in kept else 0
        repeats[width] = n_before + 1
        kept[:] = [*(other for other in kept if other != width), width][-8:]
        time_s[0] += (3.0 + 0.2 * (width - 1) + (2.2, 5.0, 0.0)[min(n_before, 2)]) / 1e3

    measured = measure_passes(run, range(1, 17), time.monotonic() + 60, lambda: time_s[0])
    assert measured.change == NO_CHANGE
    assert measured.ms == pytest.approx({width: 3.0 + 0.2 * (width - 1) for width in range(1, 17)})


def test_a_small_change_of_width_belongs_to_the_wider_pass() -> None:
    """As on a CPU, where a pass follows one of another width if it is not the usual one."""
    measured = measure_recorded(0.1, 0.0)
    assert measured.change == NO_CHANGE
    assert measured.ms == pytest.approx(
        {1: 3.0} | {width: 3.1 + 0.2 * (width - 1) for width in range(2, 9)}
    )


def test_noise_is_that_of_the_passes_themselves_or_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contention = SimpleNamespace(share=0.0)
    monkeypatch.setattr("localspec.engine.pair.profile.Contention", lambda: contention)
    for seed in range(30):
        assert measure_disturbed(random.Random(seed), 0.05).noise <= MAX_QUIET_NOISE
        assert measure_disturbed(random.Random(seed), 0.65).noise > MAX_QUIET_NOISE
    contention.share = 0.5
    assert measure_disturbed(random.Random(1), 0.0).noise == 0.5


@pytest.mark.parametrize("row_ms", [0.1, 0.8, 1.0, 1.5, 30.0])
@pytest.mark.parametrize("widths", [range(1, 17), (1, 64, 2)])
def test_passes_that_take_longer_than_their_rows_apart_were_disturbed(
    row_ms: float, widths: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass of more than one row takes as long each time."""
    quiet = SimpleNamespace(share=0.0)
    monkeypatch.setattr("localspec.engine.pair.profile.Contention", lambda: quiet)
    time_s = [0.0]

    def run(width: int) -> None:
        time_s[0] += (1.0 if width == 1 else row_ms * width) / 1e3

    measured = measure_passes(run, widths, time.monotonic() + 60, lambda: time_s[0])
    assert (measured.noise > MAX_QUIET_NOISE) == (row_ms > 1)
    measured = measure_widths(run, 60.0, clock=lambda: time_s[0])
    assert (measured.noise > MAX_QUIET_NOISE) == (row_ms > 1)


def test_contention_is_the_share_of_other_processes() -> None:
    cores = os.cpu_count() or 1
    used, own, times = iter([100.0, 100.0 + 3 * cores]), iter([5.0, 5.0 + cores]), iter([7.0, 11.0])
    contention = Contention(lambda: next(used), lambda: next(own), lambda: next(times))
    assert contention.share == pytest.approx(0.5)  # 2 of 4 seconds on each
    line = "cpu  100 20 30 5000 400 1 2 7 50 60"
    assert parse_busy_seconds(line, 100) == pytest.approx(1.6)
    for wrong in ("", "cpu0 1 2", "intr 1 2 3 4 5 6 7 8 9", "cpu a b c d e f g h"):
        with pytest.raises(ValueError, match=r"processors|unpack|int"):
            parse_busy_seconds(wrong, 100)

    def missing() -> float:
        raise FileNotFoundError

    assert Contention(missing).share == 0.0


@pytest.mark.parametrize("noise", [None, "x", float("nan"), 1.5, -0.1])
def test_a_profile_without_a_valid_noise_counts_as_disturbed(noise: object) -> None:
    assert StoredProfile.of({"noise": noise}).noise == 1.0
    assert StoredProfile.of({"noise": 0.01}).noise == 0.01


@pytest.mark.parametrize("change", [None, [1.0], [1.0, "x"], [1.0, -1.0], {"a": 1}])
def test_a_profile_without_the_cost_of_a_change_is_measured_again(change: object) -> None:
    assert StoredProfile.of({"target_ms": {"1": 1.0}, "target_change_ms": change}).target is None


@pytest.mark.parametrize("seed", range(10))
def test_observed_passes_correct_a_disturbed_profile(seed: int) -> None:
    """Every width is wrong by up to 1.8 times, and is observed with noise and rare hiccups."""
    rng = random.Random(seed)
    wrong = {width: ms * rng.uniform(0.55, 1.8) for width, ms in TARGET_MS.items()}
    table = CostTable(wrong)
    for _ in range(1500):
        width = rng.choice(sorted(TARGET_MS))
        hiccup = 6.0 if rng.random() < 0.02 else 1.0
        table.observe(width, TARGET_MS[width] * rng.uniform(0.97, 1.05) * hiccup)
    shape = [table.ms(width) / ms for width, ms in TARGET_MS.items()]
    assert max(shape) / min(shape) < 1.12  # the ratios between widths matter
    assert shape == pytest.approx([1.0] * len(shape), rel=0.12)


def test_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    profile = CostProfile(CostTable(TARGET_MS), CostTable(DRAFT_MS), 0.7)
    ProfileStore(tmp_path / "new", "key").write(profile.as_dict())
    stored = ProfileStore(tmp_path / "new", "key").read()
    assert parse_cost_table(stored["target_ms"]) == pytest.approx(TARGET_MS)
    assert parse_cost_table(stored["draft_ms"]) == pytest.approx(DRAFT_MS)
    assert stored["overhead_ms"] == 0.7
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["profile-key.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile-key.json").write_bytes(content)
    assert ProfileStore(tmp_path, "key").read() == {}


@pytest.mark.parametrize("version", [{}, {"version": VERSION + 1}])
def test_file_of_another_version_or_key_is_ignored(tmp_path: Path, version: dict[str, int]) -> None:
    content = {**version, "target_ms": {"1": 1.0}}
    (tmp_path / "profile-key.json").write_text(json.dumps(content))
    ProfileStore(tmp_path, "one").write({"overhead_ms": 1.0})
    assert ProfileStore(tmp_path, "key").read() == ProfileStore(tmp_path, "other").read() == {}


def test_unwritable_store_does_not_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", None):
        ProfileStore(folder, "key").write({"a": 1})
        assert ProfileStore(folder, "key").read() == {}


@pytest.mark.parametrize(
    "stored",
    [None, [], "1", {}, {"2": 1.0}, {"1": 0.0}, {"1": -3}, {"1": "x"}, {"a": 1.0}, {"1": 1.0, "-4": 2.0},
     {"1": float("nan")}, {"1": float("inf")}, {"1": 1.0, "100000": 2.0}, {"1": None}],
)  # fmt: skip
def test_invalid_cost_table_is_rejected(stored: object) -> None:
    assert parse_cost_table(stored) is None


def test_a_profile_belongs_to_files_settings_and_build(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    versions = ({"threads": 1}, "0.1"), ({"threads": 2}, "0.1"), ({"threads": 1}, "0.2")
    keys = [hash_identity([str(file)], *version) for version in versions]
    assert hash_identity([str(file)], *versions[0]) == keys[0]
    file.write_bytes(b"other")
    keys.append(hash_identity([str(file)], *versions[0]))
    assert len(set(keys)) == 4


@given(tables, st.integers(1, 64), st.integers(0, 200), st.floats(0, 50))
def test_a_pass_is_padded_to_the_width_in_use_where_that_costs_less(
    measured: dict[int, float], rows: int, last: int, price_ms: float
) -> None:
    table, used = CostTable(measured), UsedWidth(last, price_ms)
    width = table.padded_width(rows, used)

    def cost_ms(width: int) -> float:
        return table.ms(width) + used.price_ms(width)

    assert width >= rows
    assert table.padded_ms(rows, used)[rows] == pytest.approx(cost_ms(width))
    if rows <= last <= 64 and price_ms:
        assert cost_ms(width) <= cost_ms(last) * 1.021


@given(st.integers(0, 64), st.floats(0, 50))
def test_a_change_has_its_price_and_a_wider_one_a_higher_price(last: int, price_ms: float) -> None:
    used = UsedWidth(last, price_ms)
    prices = np.array([used.price_ms(rows) for rows in range(65)])
    assert prices[last] == 0
    assert (np.delete(prices, last) >= price_ms).all()
    assert (np.diff(prices[last + 1 :]) >= 0).all()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_the_width_in_use_is_that_of_the_last_pass(widths: list[int]) -> None:
    history = WidthHistory(ChangeCost(1.0, 9.0))
    for width in widths:
        history.note(width)
    assert history.used == UsedWidth(widths[-1], 10.0 / PASSES_PER_CHANGE)
    assert WidthHistory(NO_CHANGE).used == UsedWidth()
