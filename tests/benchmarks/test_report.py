"""Figures from made-up runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.measuring import report
from benchmarks.measuring.interleaved import Measured
from benchmarks.measuring.report import Limits, after, best, median_of, ratio, row, verdicts, whole
from benchmarks.measuring.runner import speed_after
from benchmarks.measuring.runs import Run
from benchmarks.measuring.workloads import Workload


def run(setting: str, repetition: int, speed: float, later: float | None = None) -> Run:
    return Run(
        setting, repetition, 256, True, speed, later, 100, 80, 40, python_share=0.01, python_ms=1.0
    )


RUNS = [
    run("plain", 0, 10.0, 10.0),
    run("plain", 1, 20.0, 20.0),  # the machine was twice as fast in the second repetition
    run("3", 0, 25.0, 24.0),
    run("3", 1, 50.0, 48.0),
    run("auto", 0, 24.0, 24.5),
    run("auto", 1, 48.0, 49.0),
    run("server plain", 0, 10.0),
    run("server plain", 1, 20.0),
    run("server 3", 0, 15.0),
    run("server 3", 1, 30.0),
]
MEASURED = Measured(Workload("0.9", 0.9), 0.91, RUNS, {}, (100.0, 101.0))


def test_ratios_are_taken_within_a_repetition() -> None:
    assert median_of(RUNS, "plain", whole) == pytest.approx(15.0)
    assert ratio(RUNS, "auto", "plain", whole) == pytest.approx(2.4)
    assert ratio(RUNS, "auto", "plain", after) == pytest.approx(2.45)
    assert ratio(RUNS, "auto", "7", whole) is None


def test_the_best_fixed_setting_may_be_plain_but_never_auto() -> None:
    assert best(RUNS, whole) == "3"
    assert best(RUNS, whole, server=True) == "server 3"
    assert best([run("plain", 0, 10), run("1", 0, 5), run("auto", 0, 99)], whole) == "plain"
    assert best([run("plain", 0, 10)], after) is None


def test_a_row_holds_every_figure() -> None:
    found = row(MEASURED)
    assert found.auto_best == pytest.approx(0.96)
    assert found.auto_best_after == pytest.approx(24.5 / 24)
    assert found.accepted_share == pytest.approx(0.8)
    assert found.tokens_per_pass == pytest.approx(3.0)
    assert found.plain_server == pytest.approx(1.0)
    assert found.auto_server == pytest.approx(1.6)


def test_verdicts_prefer_the_figure_after_the_first_tokens() -> None:
    found = {v.what: v for v in verdicts([row(MEASURED)], Limits())}
    assert found["auto / plain, least"].value == pytest.approx(2.45)
    assert found["auto / llama-server's best, geometric mean over α ≥ 0.4"].holds
    assert found["Python's share of a round, largest"].holds
    assert all(v.holds for v in found.values())
    assert "auto / best fixed, bursty" not in found


def test_a_missed_limit_is_said() -> None:
    slow = Measured(
        Workload("bursty", (0.95, 0.1)),
        0.5,
        [run("plain", 0, 10.0), run("auto", 0, 9.0)],
        {},
        (1, 1),
    )
    text = report.markdown("Engine", ["a note"], [slow], Limits())
    assert "- auto / plain, least: 0.900 (must be ≥ 0.97): MISSED" in text
    assert "- auto / best fixed, bursty: 0.900 (must be ≥ 1): MISSED" in text


def test_tables_are_in_reading_order_and_json_holds_the_runs() -> None:
    text = report.markdown("Engine", [], [MEASURED], Limits())
    assert "| α | in these texts | plain | 3 | auto | best fixed |" in text
    assert "| α | plain | 3 | best | plain/plain | auto/its best |" in text
    assert "outputs that left the right text: 0" in text
    stored = json.loads(json.dumps(report.as_json({"seed": 1}, [MEASURED], Limits())))
    assert len(stored["workloads"][0]["runs"]) == len(RUNS)
    assert stored["rows"][0]["best"] == "3"


def test_speed_after_counts_from_the_first_round_that_got_there() -> None:
    stamps = [(0.0, 1), (1.0, 5), (2.0, 9), (4.0, 13)]
    assert speed_after(stamps, 4) == pytest.approx((13 - 5) / 3)
    assert speed_after(stamps, 9) == pytest.approx(2.0)
    assert speed_after(stamps, 13) is None
    assert speed_after(stamps, 99) is None
