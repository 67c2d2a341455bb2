"""Forecasts of waiting times: how they are learned, and how waiting clients get them."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.worker.queue import MAX_RETRY_AFTER_S, Admission, Forecast, Job
from localspec.errors import QueueFull, Unavailable
from localspec.protocol import frames
from tests.support.asynchronous import asynchronous
from tests.support.daemons import Home, wait_for

PROMPTS, TOKENS = 200.0, 20.0  # prompt tokens and written tokens per second


def train_forecast(answer: int = 100) -> Forecast:
    """Return a forecast that has learned from answers of this length."""
    forecast = Forecast()
    forecast.use_pair(make_loaded(PROMPTS, 1e3 / TOKENS))
    for _ in range(60):
        forecast.learn(Job(), make_done(answer))
    return forecast


def make_loaded(prompts: float, step_ms: float) -> frames.Loaded:
    costs = frames.PassCosts({1: step_ms}, {}, 0.0)
    reading = frames.PromptCost(1 / prompts)
    return frames.Loaded("p", "t", None, 4096, 4, None, "", "", costs=costs, reading=reading)


def make_done(
    tokens: int, speed: float = TOKENS, reason: Literal["stop", "length"] = "stop"
) -> frames.Done:
    timings = frames.Timings(predicted_n=tokens, predicted_per_second=speed)
    return frames.Done(1, reason, 10, tokens, timings, frames.Speculation())


def make_job(prompt: int = 0, max_tokens: int | None = None) -> Job:
    return Job(4 * prompt, max_tokens)


jobs = st.builds(make_job, st.integers(0, 4000), st.integers(1, 400))


@given(st.lists(jobs, max_size=4), st.lists(jobs, max_size=8), st.integers(1, 4))
def test_the_wait_is_that_of_a_queue_with_several_places(
    running: list[Job], before: list[Job], places: int
) -> None:
    """Compare the forecast with a simulation of the queue."""
    running = running[:places]
    forecast = train_forecast()

    def job_seconds(job: Job) -> float:
        max_tokens = min(job.most or 0, 100.0)
        return forecast.remaining_prompt_tokens(job) / PROMPTS + max_tokens / TOKENS

    busy = [job_seconds(running_job) for running_job in running] + [0.0] * (places - len(running))
    for waiting_job in before:
        free_place = busy.index(min(busy))
        busy[free_place] += job_seconds(waiting_job)
    wait = forecast.wait_s(running, before, places)
    assert wait == pytest.approx(min(busy), rel=0.02, abs=0.01)


def test_the_wait_shrinks_with_progress() -> None:
    forecast = train_forecast()
    job = make_job(1000)
    assert forecast.remaining_prompt_tokens(job) == 1000
    job.update(frames.Started(1, 800, 200))
    assert forecast.remaining_prompt_tokens(job) == 600
    job.update(frames.Reading(1, 500, 1.0))
    assert forecast.remaining_prompt_tokens(job) == 300
    assert forecast.wait_s([job], [], 1) == pytest.approx(300 / PROMPTS + 100 / TOKENS, rel=0.02)
    job.update(frames.Delta(1, tokens=60))
    assert forecast.wait_s([job], [], 1) == pytest.approx(40 / TOKENS, rel=0.02)
    job.update(frames.Delta(1, tokens=400))  # longer than the learned answers
    assert forecast.wait_s([job], [], 1) == pytest.approx(200 / TOKENS, rel=0.02)


costs = st.builds(frames.PromptCost, st.floats(1e-4, 0.1), st.floats(0, 1e-5))


@given(costs, st.integers(0, 40_000), st.integers(1, 40_000))
def test_prefill_time_depends_on_the_position(
    cost: frames.PromptCost, cached: int, more: int
) -> None:
    """The time is the sum over the tokens, each at its own position."""
    forecast, job = train_forecast(), Job(most=0)
    for event in (
        frames.Started(1, cached + more, cached, reading=cost),
        frames.Reading(1, cached + more // 2, 1.0, reading=frames.PromptCost(cost.token_s, 1e-6)),
    ):
        job.update(event)
        forecast.learn(job, event)
        assert event.reading is not None
        remaining_s = sum(
            event.reading.token_seconds(position) for position in range(job.read, job.prompt)
        )
        assert forecast.reading_s(job) == pytest.approx(
            remaining_s, rel=0.02, abs=event.reading.token_seconds(job.prompt)
        )
        assert forecast.wait_s([job], [], 1) == forecast.reading_s(job)
    initial_speed, full_speed = forecast.prompt_per_second or (0, 0)
    assert (initial_speed, full_speed) == pytest.approx(
        (1 / cost.token_s, 1 / (cost.token_s + 4096e-6))
    )


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(31, 400))
def test_short_answers_do_not_shorten_a_long_one(short: list[int], written: int) -> None:
    forecast, job = train_forecast(), Job()
    for tokens in short:
        forecast.learn(Job(), make_done(tokens))
    job.update(frames.Started(1, 10, 10))
    job.update(frames.Delta(1, tokens=written))
    wait = forecast.wait_s([job], [], 1)
    assert wait is not None
    if written < 90 and len(short) < 32:
        assert wait == pytest.approx((100 - written) / TOKENS, rel=0.02)
    elif written >= 100 or len(short) >= 32:
        assert wait == pytest.approx(written / 2 / TOKENS, rel=0.02)


@given(st.lists(st.integers(0, 90)))
def test_answers_cut_by_a_limit_do_not_shorten_the_forecast(cut: list[int]) -> None:
    forecast = train_forecast()
    for tokens in cut:
        forecast.learn(Job(most=tokens), make_done(tokens, reason="length"))
    assert forecast.wait_s([Job()], [], 1) == pytest.approx(100 / TOKENS, rel=0.02)


def test_short_answers_count_little_for_the_speed() -> None:
    forecast = train_forecast()
    for _ in range(3):
        forecast.learn(Job(), make_done(100))
        forecast.learn(Job(), make_done(2, speed=20 * TOKENS))
    assert forecast.wait_s([Job(most=20)], [], 1) == pytest.approx(20 / TOKENS, rel=0.05)


def test_text_lengths_caches_and_speeds_are_learned_per_pair() -> None:
    forecast = train_forecast()
    request = frames.Generate(1, frames.TextPrompt("x" * 6000), max_tokens=7, priority="editor")
    started = frames.Started(1, 1000, 900, reading=frames.PromptCost(0.02))
    for _ in range(60):
        forecast.learn(Job.of(request), started)
    assert Job.of(request).editor
    assert forecast.remaining_prompt_tokens(Job.of(request)) == pytest.approx(100, rel=0.02)
    assert forecast.reading_s(Job.of(request)) == pytest.approx(2.0, rel=0.02)
    forecast.use_pair(make_loaded(1000.0, 10.0))
    assert forecast.reading_s(Job.of(request)) == pytest.approx(0.1, rel=0.02)
    assert forecast.wait_s([Job.of(request)], [], 1) == pytest.approx(0.1 + 0.07, rel=0.02)


def test_there_is_no_forecast_without_data() -> None:
    assert Forecast().wait_s([make_job(100)], [], 1) is None
    assert Forecast().reading_s(make_job(100)) is None


@asynchronous
async def test_waiting_requests_get_a_position_and_refused_ones_a_retry_after() -> None:
    admission, finished = Admission(1, 3, train_forecast()), asyncio.Event()

    async def hold_place(job: Job) -> None:
        async with admission.place(job):
            await finished.wait()

    waiting = [make_job(200 * n) for n in range(1, 4)]
    editors = [Job(editor=True), Job(editor=True)]
    assert admission.ahead(Job()).seconds == 0
    tasks = [asyncio.create_task(hold_place(job)) for job in (*waiting[:2], *editors, waiting[2])]
    await asyncio.sleep(0.01)
    assert [job.placed for job in (*waiting, *editors)] == [True, False, False, True, False]
    first, second = admission.ahead(waiting[1]), admission.ahead(waiting[2])
    assert (first.position, first.requests, first.prompt_tokens) == (1, 3, 200)
    assert (second.position, second.requests, second.prompt_tokens) == (2, 4, 600)
    assert first.seconds is not None
    assert second.seconds is not None
    assert 6 <= first.seconds < second.seconds
    with pytest.raises(QueueFull) as full:
        async with admission.place():
            pass
    assert 1 <= (full.value.retry_after or 0) <= 6  # when the editor's request ends
    admission.close()
    with pytest.raises(Unavailable) as ending:
        async with admission.place():
            pass
    assert 6 <= (ending.value.retry_after or 0) < MAX_RETRY_AFTER_S
    finished.set()
    await asyncio.gather(*tasks)
    assert (admission.running, admission.waiting) == (0, 0)


def test_status_and_a_waiting_stream_agree(home: Home) -> None:
    home.start(parallel=1)
    home.chat("slow 20")  # gives the forecast its data
    with home.streaming("slow 200") as running:
        running.readline()
        wait_for(lambda: home.status()["running"] == 1, "the first answer")
        fields = {"localspec": {"progress": True}}
        with home.streaming("say two", **fields) as waiting:
            chunk = json.loads(waiting.readline().removeprefix(b"data: "))
            ahead = chunk["localspec"]["progress"]["ahead"]
            assert (ahead["position"], ahead["requests"]) == (0, 1)
            assert ahead["seconds"] >= 1
            status = home.status()["ahead"]
            assert (status["position"], status["requests"]) == (1, 2)
            assert status["seconds"] >= ahead["seconds"] - 1
            assert home.status()["figures"]["prompt_per_second"] == 100.0
            output = home.run("status").stdout
            assert "a new request waits for 2 other requests, about " in output
            running.leave()
            waiting.read()
    assert "a new request waits" not in home.run("status").stdout


def test_a_long_prompt_reports_its_progress(home: Home) -> None:
    home.start()
    with home.streaming("read 20", localspec={"progress": True}) as stream:
        lines = [line for line in stream.read().split(b"\n\n") if b'"reading"' in line]
    progress_events = [
        json.loads(line.removeprefix(b"data: "))["localspec"]["progress"] for line in lines
    ]
    shares = [
        progress["done"] for progress in progress_events if progress.get("prompt_tokens") == 100
    ]
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert progress_events[-1]["seconds"] == (
        progress_events[-1]["done"] < 1
    )  # rounded up; the last may tell of all
