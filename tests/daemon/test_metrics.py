"""The metrics page and the figures of `status` after runs with known numbers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from localspec.daemon.handlers import control
from localspec.daemon.worker.metrics import Histogram, Metrics, TokenSums
from localspec.errors import WorkerDied
from localspec.protocol import frames
from tests.support.daemons import Home, RunningDaemon
from tests.support.pairs import cycle_pair

SAMPLE = re.compile(r'(?:localspec_|llamacpp:)(\w+)(?:\{(\w+)="([^"]+)"\})? (-?[0-9.e+-]+)')


def parse_metrics(text: str, prefix: str = "localspec_") -> dict[str, dict[str, float]]:
    """Return each metric's values by label (or ""), and check that every line has a TYPE."""
    metrics: dict[str, dict[str, float]] = {}
    announced: dict[str, str] = {}
    other_prefix = {"localspec_": "llamacpp:", "llamacpp:": "localspec_"}[prefix]
    for line in text.splitlines():
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(other_prefix):
            continue
        if line.startswith(f"# TYPE {prefix}"):
            name, kind = line.removeprefix(f"# TYPE {prefix}").split(" ")
            assert name not in announced
            announced[name] = kind
        elif not line.startswith(f"# HELP {prefix}"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, _, label, value = match.groups()
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in announced or announced[family] == "histogram", line
            counts = announced.get(name) == "counter" and name != "n_tokens_max"  # llama-server's
            assert name.endswith("_total") == counts
            values = metrics.setdefault(name, {})
            assert (label or "") not in values
            values[label or ""] = float(value)
    return metrics


def make_done(depths: list[int], accepts: list[int], speed_up: float | None = None) -> frames.Done:
    timings = frames.Timings(predicted_ms=500.0)
    speculation = frames.Speculation(rounds=sum(depths), speed_up=speed_up)
    return frames.Done(1, "stop", 9, 9, timings, speculation, depths=depths, accepts=accepts)


@pytest.mark.parametrize("cache", frames.CACHE_SOURCES)
def test_cached_prompts_are_counted_by_source(cache: frames.CacheSource) -> None:
    metrics = Metrics()
    with metrics.watch() as watch:
        assert watch.count_event(frames.Started(1, 10, 8, cache=cache))
    assert metrics.figures().cache_hits == dict.fromkeys(frames.CACHE_SOURCES, 0) | {cache: 1}


def test_acceptance_is_counted_by_position_and_depth() -> None:
    metrics = Metrics()
    with metrics.watch() as watch:
        assert watch.count_event(frames.Started(1, 10, 8, cache="memory"))
        # 2 passes without drafts, 1 with one, 4 with three of which 3, 2, 2 and 0 were accepted.
        assert watch.count_event(make_done([2, 1, 0, 4], [4, 0, 2, 1], 2.0))
    assert metrics.drafted == {1: 5, 2: 4, 3: 4}
    assert metrics.accepted == {1: 3, 2: 3, 3: 1}
    assert metrics.depths.count == 7
    assert metrics.depths.sum == 13
    figures = metrics.figures()
    assert figures.accepted_at == [3 / 5, 3 / 4, 1 / 4]
    assert figures.mean_depth == 13 / 7
    assert figures.cache_hits == dict.fromkeys(frames.CACHE_SOURCES, 0) | {"memory": 1}
    assert figures.speed_up == 2.0
    with metrics.watch() as watch:
        watch.count_event(make_done([3], [3], 1.0))
    assert metrics.figures().speed_up == 1.5


def test_every_generation_is_counted_once() -> None:
    metrics = Metrics()
    with metrics.watch() as watch:
        assert watch.count_event(frames.Started(1, 10, 8))
        assert not watch.count_event(frames.Started(2, 10, 8))  # of the worker that was tried next
        watch.count_event(make_done([2], [2]))
    with metrics.watch():
        pass  # its client left
    with pytest.raises(WorkerDied), metrics.watch():
        raise WorkerDied("as it happens")
    counts = metrics.counts
    assert (counts.requests, counts.cancelled, counts.failed) == (3, 1, 1)
    assert (counts.tokens, metrics.figures().prompt_tokens) == (9, 10)


def test_a_prompt_length_that_comes_with_the_end_is_counted() -> None:
    """Answers of another server report the length of the prompt only at their end."""
    metrics = Metrics()
    ended = make_done([2], [2])
    ended.prompt_tokens, ended.timings.cache_n = 30, 12
    with metrics.watch() as watch:
        watch.count_event(frames.Started(1, 0, 0))
        watch.count_event(ended)
    figures = metrics.figures()
    assert (figures.prompt_tokens, figures.cached_tokens) == (30, 12)


def test_answers_of_another_server_are_not_in_the_figures_of_this_engine() -> None:
    """They are in our own sums, and a rate over a network is none of llama.cpp's."""
    metrics = Metrics()
    for elsewhere in (False, True):
        ended = make_done([2], [2])
        ended.timings = frames.Timings(prompt_n=20, prompt_ms=1e-3 if elsewhere else 1e3)
        ended.speculation.drafted, ended.speculation.accepted = 4, 2
        with metrics.watch(elsewhere=elsewhere) as watch:
            watch.count_event(frames.Started(1, 30, 10))
            watch.count_event(ended)
    assert metrics.prompt_rate.take() == 20
    assert metrics.prompt_seconds == 1
    assert metrics.elsewhere == TokenSums(30, 10, 9, 4, 2)
    assert (metrics.counts.tokens, metrics.figures().prompt_tokens) == (18, 60)


def test_a_large_counter_keeps_its_precision() -> None:
    lines = [*control._speculation_lines(Metrics(taken_seconds=1234567.25))]
    assert "localspec_generating_seconds_total 1234567.25" in lines


def test_there_are_no_figures_without_answers() -> None:
    figures = Metrics().figures()
    assert (figures.first_text_ms, figures.mean_depth, figures.speed_up) == (None, None, None)
    assert figures.accepted_at == []


@pytest.mark.parametrize(
    ("values", "median"),
    [([0.5], 0.5), ([0.5, 1.5], 1.0), ([1.5, 1.5, 3.0, 3.0], 2.0), ([9.0, 9.0], 4.0)],
)
def test_the_median_lies_within_its_bucket(values: list[float], median: float) -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.median() is None
    for value in values:
        histogram.add(value)
    assert histogram.median() == median


def check_llama_server_metrics(home: Home, metrics: dict[str, dict[str, float]]) -> None:
    """Check the known run under the metric names of llama-server."""
    expected = {"prompt_tokens_total": 21, "prompt_tokens_cached_total": 19}
    expected |= {"tokens_predicted_total": 82, "n_tokens_max": 61, "requests_processing": 0}
    expected |= {"requests_deferred": 0, "n_busy_slots_per_decode": 1}
    expected |= {"spec_decode_num_draft_tokens_total": 60, "spec_decode_num_drafts_total": 20}
    expected["spec_decode_num_accepted_tokens_total"] = 60
    assert {name: metrics[name][""] for name in expected} == expected
    assert metrics["spec_decode_num_accepted_tokens_per_pos_total"] == {"0": 20, "1": 20, "2": 20}
    assert metrics["n_decode_total"][""] >= 21
    rates = ["prompt_tokens_seconds", "predicted_tokens_seconds"]
    for name in (*rates, "prompt_seconds_total", "tokens_predicted_seconds_total"):
        assert metrics[name][""] > 0
    repeated = parse_metrics(home.request("GET", "/metrics").body.decode(), "llamacpp:")
    assert [repeated[name][""] for name in rates] == [0, 0]  # rates count from the previous reading
    assert repeated["n_decode_total"] == metrics["n_decode_total"]


def test_the_metrics_of_a_known_run(home: Home, tmp_path: Path) -> None:
    """All drafts are accepted, three in each pass, so that a pass gives 4 tokens."""
    files = cycle_pair(tmp_path / "pair", 1.0)
    home.environment["LOCALSPEC_PAIR"] = f"{files.target},{files.draft}"
    home.environment["LOCALSPEC_DEPTH"] = "3"
    daemon = RunningDaemon(home)
    body = {"prompt": list(range(1, 21)), "max_tokens": 41, "temperature": 0}
    for _ in range(2):
        answer = home.request("POST", "/v1/completions", body)
        assert answer.status == 200, answer.body
    spec = answer.json["localspec"]["speculation"]
    page = home.request("GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    metrics = parse_metrics(page.body.decode())
    check_llama_server_metrics(home, parse_metrics(page.body.decode(), "llamacpp:"))
    assert abs(int(page.headers["process-start-time-unix"]) - time.time()) < 600
    assert metrics["requests_total"] == {"": 2}
    assert metrics["requests_waiting"] == metrics["requests_running"] == {"": 0}
    assert metrics["prompt_tokens_total"] == {"": 40}
    assert metrics["cached_tokens_total"] == {"": 19}
    assert metrics["cache_hits_total"] == dict.fromkeys(frames.CACHE_SOURCES, 0) | {"slot": 1}
    assert metrics["generated_tokens_total"] == {"": 82}
    assert metrics["worker_starts_total"] == {"": 1}
    assert metrics["worker_deaths_total"] == {"": 0}
    # The first answer's first token comes with the prompt: 40 tokens are left, 4 a pass. The second
    # reads one token only, so that all of its passes draft.
    drafted, accepted = metrics["drafted_at_total"], metrics["accepted_at_total"]
    assert drafted == accepted == {"1": 20, "2": 20, "3": 20}
    assert sum(drafted.values()) == metrics["drafted_tokens_total"][""]
    buckets = metrics["draft_depth_bucket"]
    assert buckets["3"] - buckets["2"] == 20
    assert buckets["+Inf"] == metrics["draft_depth_count"][""] == spec["rounds"] + 10
    assert metrics["draft_depth_sum"][""] == sum(drafted.values())
    assert metrics["time_to_first_text_seconds_count"] == {"": 2}
    assert metrics["speed_up"][""] == pytest.approx(spec["speed_up"], rel=1e-4)

    figures = home.status()["figures"]
    assert figures["accepted_at"] == [1.0, 1.0, 1.0]
    assert figures["cached_tokens"] == 19
    assert figures["measured_tokens"] == 82
    output = home.run("status", "-v").stdout
    assert "accepted by position: 100% 100% 100%" in output
    assert "48% of prompt tokens cached (1 from slot)" in output
    assert "speed-up" not in output, "82 tokens say nothing of it"
    for _ in range(4):
        home.request("POST", "/v1/completions", body)
    assert re.search(r"^speed-up +\d\.\d\d×$", home.run("status").stdout, re.MULTILINE)
    assert daemon.stop() == 0
