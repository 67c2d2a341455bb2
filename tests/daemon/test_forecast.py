"""What is before a request that waits, and how long that takes: learned of others, told to whoever waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.worker.queue import MAX_RETRY_AFTER_S, Admission, Forecast, Job
from localspec.errors import QueueFull, Unavailable
from localspec.protocol import frames
from tests.support.daemons import Home, RunningDaemon, wait_for

PROMPTS, TOKENS = 200.0, 20.0  # a second


def knowing(answer: int = 100) -> Forecast:
    """One that has seen answers of this length."""
    forecast = Forecast()
    forecast.use_pair(loaded(PROMPTS, 1e3 / TOKENS))
    for _ in range(60):
        forecast.learn(Job(), done(answer))
    return forecast


def loaded(prompts: float, step_ms: float) -> frames.Loaded:
    profile = {"target_ms": {1: step_ms}}
    reading = frames.PromptCost(1 / prompts)
    return frames.Loaded("p", "t", None, 4096, 4, None, "", "", profile=profile, reading=reading)


def done(
    tokens: int, speed: float = TOKENS, reason: Literal["stop", "length"] = "stop"
) -> frames.Done:
    timings = frames.Timings(predicted_n=tokens, predicted_per_second=speed)
    return frames.Done(1, reason, 10, tokens, timings, frames.Speculation())


def job(prompt: int = 0, most: int | None = None) -> Job:
    return Job(4 * prompt, most)


jobs = st.builds(job, st.integers(0, 4000), st.integers(1, 400))


@given(st.lists(jobs, max_size=4), st.lists(jobs, max_size=8), st.integers(1, 4))
def test_the_wait_is_that_of_places_that_are_taken_in_order(
    running: list[Job], before: list[Job], places: int
) -> None:
    """Against a clock that goes by milliseconds."""
    running = running[:places]
    forecast = knowing()

    def takes(each: Job) -> float:
        most = min(each.most or 0, 100.0)
        return forecast.remaining_prompt_tokens(each) / PROMPTS + most / TOKENS

    busy = [takes(each) for each in running] + [0.0] * (places - len(running))
    for each in before:
        first = busy.index(min(busy))
        busy[first] += takes(each)
    wait = forecast.wait_s(running, before, places)
    assert wait == pytest.approx(min(busy), rel=0.02, abs=0.01)


def test_what_has_been_read_and_written_is_not_waited_for() -> None:
    forecast = knowing()
    one = job(1000)
    assert forecast.remaining_prompt_tokens(one) == 1000
    one.update(frames.Started(1, 800, 200))
    assert forecast.remaining_prompt_tokens(one) == 600
    one.update(frames.Reading(1, 500, 1.0))
    assert forecast.remaining_prompt_tokens(one) == 300
    assert forecast.wait_s([one], [], 1) == pytest.approx(300 / PROMPTS + 100 / TOKENS, rel=0.02)
    one.update(frames.Delta(1, "x", tokens=60))
    assert forecast.wait_s([one], [], 1) == pytest.approx(40 / TOKENS, rel=0.02)
    one.update(frames.Delta(1, "x", tokens=400))  # longer than others were: it goes on for a while
    assert forecast.wait_s([one], [], 1) == pytest.approx(200 / TOKENS, rel=0.02)


costs = st.builds(frames.PromptCost, st.floats(1e-4, 0.1), st.floats(0, 1e-5))


@given(costs, st.integers(0, 40_000), st.integers(1, 40_000))
def test_what_is_deep_in_a_text_takes_as_long_as_it_does(
    cost: frames.PromptCost, cached: int, more: int
) -> None:
    """The sum over its tokens, each after all those that are before it."""
    forecast, one = knowing(), Job(most=0)
    for event in (
        frames.Started(1, cached + more, cached, reading=cost),
        frames.Reading(1, cached + more // 2, 1.0, reading=frames.PromptCost(cost.token_s, 1e-6)),
    ):
        one.update(event)
        forecast.learn(one, event)
        assert event.reading is not None
        left = sum(event.reading.token_seconds(at) for at in range(one.read, one.prompt))
        assert forecast.reading_s(one) == pytest.approx(
            left, rel=0.02, abs=event.reading.token_seconds(one.prompt)
        )
        assert forecast.wait_s([one], [], 1) == forecast.reading_s(one)
    first, full = forecast.prompt_per_second or (0, 0)
    assert (first, full) == pytest.approx((1 / cost.token_s, 1 / (cost.token_s + 4096e-6)))


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(31, 400))
def test_short_answers_do_not_end_a_long_one(short: list[int], written: int) -> None:
    forecast, one = knowing(), Job()
    for tokens in short:
        forecast.learn(Job(), done(tokens))
    one.update(frames.Started(1, 10, 10))
    one.update(frames.Delta(1, "x", tokens=written))
    wait = forecast.wait_s([one], [], 1)
    assert wait is not None
    if written < 90 and len(short) < 32:
        assert wait == pytest.approx((100 - written) / TOKENS, rel=0.02)
    elif written >= 100 or len(short) >= 32:
        assert wait == pytest.approx(written / 2 / TOKENS, rel=0.02)


@given(st.lists(st.integers(0, 90)))
def test_answers_that_their_limit_cut_do_not_make_others_shorter(cut: list[int]) -> None:
    forecast = knowing()
    for tokens in cut:
        forecast.learn(Job(most=tokens), done(tokens, reason="length"))
    assert forecast.wait_s([Job()], [], 1) == pytest.approx(100 / TOKENS, rel=0.02)


def test_a_short_answer_says_little_of_how_fast_long_ones_are_written() -> None:
    forecast = knowing()
    for _ in range(3):
        forecast.learn(Job(), done(100))
        forecast.learn(Job(), done(2, speed=20 * TOKENS))
    assert forecast.wait_s([Job(most=20)], [], 1) == pytest.approx(20 / TOKENS, rel=0.05)


def test_texts_caches_and_speeds_are_learned_and_another_pair_has_its_own() -> None:
    forecast = knowing()
    asked = frames.Generate(1, frames.TextPrompt("x" * 6000), max_tokens=7, priority="editor")
    started = frames.Started(1, 1000, 900, reading=frames.PromptCost(0.02))
    for _ in range(60):
        forecast.learn(Job.of(asked), started)
    assert Job.of(asked).editor
    assert forecast.remaining_prompt_tokens(Job.of(asked)) == pytest.approx(100, rel=0.02)
    assert forecast.reading_s(Job.of(asked)) == pytest.approx(2.0, rel=0.02)
    forecast.use_pair(loaded(1000.0, 10.0))
    assert forecast.reading_s(Job.of(asked)) == pytest.approx(0.1, rel=0.02)
    assert forecast.wait_s([Job.of(asked)], [], 1) == pytest.approx(0.1 + 0.07, rel=0.02)


def test_nothing_is_made_up_while_nothing_is_known() -> None:
    assert Forecast().wait_s([job(100)], [], 1) is None
    assert Forecast().reading_s(job(100)) is None


def test_who_waits_is_told_what_is_before_and_who_is_refused_when_there_is_room() -> None:
    async def scenario() -> None:
        admission, over = Admission(1, 3, knowing()), asyncio.Event()

        async def come(each: Job) -> None:
            async with admission.place(each):
                await over.wait()

        waiting = [job(200 * n) for n in range(1, 4)]
        editors = [Job(editor=True), Job(editor=True)]
        assert admission.ahead(Job()).seconds == 0
        tasks = [asyncio.create_task(come(each)) for each in (*waiting[:2], *editors, waiting[2])]
        await asyncio.sleep(0.01)
        assert [each.placed for each in (*waiting, *editors)] == [True, False, False, True, False]
        first, second = admission.ahead(waiting[1]), admission.ahead(waiting[2])
        assert (first.position, first.requests, first.prompt_tokens) == (1, 3, 200)
        assert (second.position, second.requests, second.prompt_tokens) == (2, 4, 600)
        assert first.seconds is not None
        assert second.seconds is not None
        assert 6 <= first.seconds < second.seconds
        with pytest.raises(QueueFull) as full:
            async with admission.place():
                pass
        assert 1 <= (full.value.retry_after or 0) <= 6  # the editor's end
        admission.close()
        with pytest.raises(Unavailable) as ending:
            async with admission.place():
                pass
        assert 6 <= (ending.value.retry_after or 0) < MAX_RETRY_AFTER_S
        over.set()
        await asyncio.gather(*tasks)
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(scenario())


def test_status_and_the_stream_of_one_that_waits_say_the_same(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon(parallel=1)
    home.chat("slow 20")  # what an answer takes is known now
    with home.streaming("slow 200") as running:
        running.readline()
        wait_for(lambda: home.status()["running"] == 1, "the first answer")
        asked = {"localspec": {"progress": True}}
        with home.streaming("say two", **asked) as waiting:
            chunk = json.loads(waiting.readline().removeprefix(b"data: "))
            ahead = chunk["localspec"]["progress"]["ahead"]
            assert (ahead["position"], ahead["requests"]) == (0, 1)
            assert ahead["seconds"] >= 1
            now = home.status()["ahead"]
            assert (now["position"], now["requests"]) == (1, 2)
            assert now["seconds"] >= ahead["seconds"] - 1
            assert home.status()["figures"]["prompt_per_second"] == 100.0
            shown = home.run("status").stdout
            assert "a new request waits for 2 other requests, about " in shown
            running.leave()
            waiting.read()
    assert "a new request waits" not in home.run("status").stdout


def test_a_long_prompt_that_is_read_says_how_far_it_is(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon()
    with home.streaming("read 20", localspec={"progress": True}) as stream:
        lines = [line for line in stream.read().split(b"\n\n") if b'"reading"' in line]
    told = [json.loads(line.removeprefix(b"data: "))["localspec"]["progress"] for line in lines]
    shares = [each["done"] for each in told if each.get("prompt_tokens") == 100]
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert told[-1]["seconds"] == (told[-1]["done"] < 1)  # rounded up; the last may tell of all
