"""Figures computed from invented runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.measuring import report
from benchmarks.measuring.interleaved import Measured
from benchmarks.measuring.report import Limits, after, best, median_of, ratio, row, verdicts, whole
from benchmarks.measuring.runner import speed_after
from benchmarks.measuring.runs import Run
from benchmarks.measuring.workloads import Workload


def make_run(
    setting: str, repetition: int, speed: float, speed_after_start: float | None = None
) -> Run:
    return Run(
        setting,
        repetition,
        256,
        True,
        speed,
        speed_after_start,
        100,
        80,
        40,
        python_share=0.01,
        python_ms=1.0,
    )


RUNS = [
    make_run("plain", 0, 10.0, 10.0),
    make_run("plain", 1, 20.0, 20.0),  # the machine was twice as fast in the second repetition
    make_run("3", 0, 25.0, 24.0),
    make_run("3", 1, 50.0, 48.0),
    make_run("auto", 0, 24.0, 24.5),
    make_run("auto", 1, 48.0, 49.0),
    make_run("server plain", 0, 10.0),
    make_run("server plain", 1, 20.0),
    make_run("server 3", 0, 15.0),
    make_run("server 3", 1, 30.0),
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
    assert (
        best([make_run("plain", 0, 10), make_run("1", 0, 5), make_run("auto", 0, 99)], whole)
        == "plain"
    )
    assert best([make_run("plain", 0, 10)], after) is None


def test_a_row_has_every_figure() -> None:
    figures = row(MEASURED)
    assert figures.auto_best == pytest.approx(0.96)
    assert figures.auto_best_after == pytest.approx(24.5 / 24)
    assert figures.accepted_share == pytest.approx(0.8)
    assert figures.tokens_per_pass == pytest.approx(3.0)
    assert figures.plain_server == pytest.approx(1.0)
    assert figures.auto_server == pytest.approx(1.6)


def test_verdicts_prefer_the_figure_after_the_first_tokens() -> None:
    by_name = {v.what: v for v in verdicts([row(MEASURED)], Limits())}
    assert by_name["auto / plain, least"].value == pytest.approx(2.45)
    assert by_name["auto / llama-server's best, geometric mean over α ≥ 0.4"].holds
    assert by_name["Python's share of a round, largest"].holds
    assert all(v.holds for v in by_name.values())
    assert "auto / best fixed, bursty" not in by_name


def test_a_missed_limit_is_reported() -> None:
    slow = Measured(
        Workload("bursty", (0.95, 0.1)),
        0.5,
        [make_run("plain", 0, 10.0), make_run("auto", 0, 9.0)],
        {},
        (1, 1),
    )
    text = report.markdown("Engine", ["a note"], [slow], Limits())
    assert "- auto / plain, least: 0.900 (must be ≥ 0.97): MISSED" in text
    assert "- auto / best fixed, bursty: 0.900 (must be ≥ 1): MISSED" in text


def test_the_report_has_ordered_tables_and_json_has_the_runs() -> None:
    text = report.markdown("Engine", [], [MEASURED], Limits())
    assert "| α | in these texts | plain | 3 | auto | best fixed |" in text
    assert "| α | plain | 3 | best | plain/plain | auto/its best |" in text
    assert "outputs that left the right text: 0" in text
    stored = json.loads(json.dumps(report.as_json({"seed": 1}, [MEASURED], Limits())))
    assert len(stored["workloads"][0]["runs"]) == len(RUNS)
    assert stored["rows"][0]["best"] == "3"


def test_speed_after_counts_from_the_first_round_beyond_it() -> None:
    stamps = [(0.0, 1), (1.0, 5), (2.0, 9), (4.0, 13)]
    assert speed_after(stamps, 4) == pytest.approx((13 - 5) / 3)
    assert speed_after(stamps, 9) == pytest.approx(2.0)
    assert speed_after(stamps, 13) is None
    assert speed_after(stamps, 99) is None
