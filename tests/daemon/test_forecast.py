"""What is before a request that waits, and how long that takes: learned of others, told to whoever waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.daemon.worker.admission import LAST_RETRY, Admission
from localspec.daemon.worker.forecast import Forecast, Job
from localspec.errors import QueueFull, Unavailable
from localspec.protocol import frames
from tests.support.daemons import Home, RunningDaemon, wait_for

PROMPTS, TOKENS = 200.0, 20.0  # a second


def knowing(answer: int = 100) -> Forecast:
    """One that has seen answers of this length."""
    forecast = Forecast()
    forecast.uses(loaded(PROMPTS, 1e3 / TOKENS))
    for _ in range(60):
        forecast.sees(Job(), done(answer))
    return forecast


def loaded(prompts: float, step_ms: float) -> frames.Loaded:
    profile = {"target_ms": {1: step_ms}}
    return frames.Loaded(
        "p", "t", None, 4096, 4, None, "", "", profile=profile, prompt_per_second=prompts
    )


def done(tokens: int, speed: float = TOKENS) -> frames.Done:
    timings = frames.Timings(predicted_n=tokens, predicted_per_second=speed)
    return frames.Done(1, "stop", 10, tokens, timings, frames.Speculation())


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
        return forecast.prompt_left(each) / PROMPTS + most / TOKENS

    busy = [takes(each) for each in running] + [0.0] * (places - len(running))
    for each in before:
        first = busy.index(min(busy))
        busy[first] += takes(each)
    wait = forecast.wait_s(running, before, places)
    assert wait == pytest.approx(min(busy), rel=0.02, abs=0.01)


def test_what_has_been_read_and_written_is_not_waited_for() -> None:
    forecast = knowing()
    one = job(1000)
    assert forecast.prompt_left(one) == 1000
    one.sees(frames.Started(1, 800, 200))
    assert forecast.prompt_left(one) == 600
    one.sees(frames.Reading(1, 500, 1.0))
    assert forecast.prompt_left(one) == 300
    assert forecast.wait_s([one], [], 1) == pytest.approx(300 / PROMPTS + 100 / TOKENS, rel=0.02)
    one.sees(frames.Delta(1, "x", tokens=60))
    assert forecast.wait_s([one], [], 1) == pytest.approx(40 / TOKENS, rel=0.02)
    one.sees(frames.Delta(1, "x", tokens=400))  # longer than others were: it goes on for a while
    assert forecast.wait_s([one], [], 1) == pytest.approx(100 / TOKENS, rel=0.02)


def test_texts_caches_and_speeds_are_learned_and_another_pair_has_its_own() -> None:
    forecast = knowing()
    asked = frames.Generate(1, frames.TextPrompt("x" * 6000), max_tokens=7, priority="editor")
    for _ in range(60):
        forecast.sees(Job.of(asked), frames.Started(1, 1000, 900, prompt_per_second=50.0))
    assert Job.of(asked).editor
    assert forecast.prompt_left(Job.of(asked)) == pytest.approx(100, rel=0.02)
    assert forecast.reading_s(Job.of(asked)) == pytest.approx(2.0, rel=0.02)
    forecast.uses(loaded(1000.0, 10.0))
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
        assert 6 <= (ending.value.retry_after or 0) < LAST_RETRY
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
    assert told[-1]["seconds"] == 1
