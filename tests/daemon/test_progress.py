"""Progress in a stream on request: the queue, another pair, a load, and the prompt."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from tests.support.daemons import Home, Stream, wait_for


def read_progress(stream: Stream, limit: int = 9) -> list[tuple[str, str]]:
    """Return up to `limit` distinct states and pairs from before the answer began."""
    states: list[tuple[str, str]] = []
    while len(states) < limit and (line := stream.readline()):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if chunk.get("choices"):
            return states
        progress = chunk["localspec"]["progress"]
        if (progress["state"], progress["pair"]) not in states:
            states.append((progress["state"], progress["pair"]))
    return states


def stream_chat(home: Home, text: str, model: str = "", **options: Any) -> Any:
    return home.streaming(text, model=model, localspec={"progress": True, **options})


def is_busy(home: Home, count: int) -> Any:
    status = home.request("GET", "/localspec/status").json
    return status["running"] == count and status["pair"]["state"] == "ready"


def test_progress_of_a_load_names_the_pair_that_loads(home: Home) -> None:
    home.start("--load-delay", "0.7")
    other = home.root / "other.gguf"
    other.touch()
    with stream_chat(home, "say one") as stream:
        assert ("loading", str(home.model)) in read_progress(stream)
        stream.read()
    with stream_chat(home, "say two", str(other)) as stream:
        states = read_progress(stream)
    assert ("loading", str(other)) in states
    assert ("loading", str(home.model)) not in states


def test_status_names_the_pair_that_loads(home: Home) -> None:
    daemon = home.start("--load-delay", "2")
    other = home.root / "other.gguf"
    other.touch()
    with stream_chat(home, "say one", str(other)):  # still loading at its first event
        pair = home.request("GET", "/localspec/status").json["pair"]
        assert (pair["state"], pair["name"]) == ("loading", str(other))
    os.kill(daemon.worker_pid(), signal.SIGKILL)  # otherwise it would finish loading


def test_progress_shows_a_queued_request(home: Home) -> None:
    home.start(parallel=1)
    with home.streaming("slow 100"):
        wait_for(lambda: is_busy(home, 1), "the first answer")
        with stream_chat(home, "say queued") as stream:
            assert read_progress(stream, 1) == [("queued", str(home.model))]


def test_progress_names_the_pair_that_is_waited_for(home: Home) -> None:
    home.start(memory=200)  # MiB, which hold one scripted engine
    other = home.root / "other.gguf"
    other.touch()
    with home.streaming("slow 100"):
        wait_for(lambda: is_busy(home, 1), "the first answer")
        with stream_chat(home, "say two", str(other)) as stream:
            assert read_progress(stream, 1) == [("waiting", str(home.model))]


def test_progress_is_sent_only_on_request(home: Home) -> None:
    home.start("--load-delay", "0.5")
    with home.streaming("say one") as stream:
        assert b"progress" not in stream.read()


def test_a_failed_load_is_an_error_in_the_stream(home: Home) -> None:
    home.start("--load-delay", "0.5", "--load-error")
    with stream_chat(home, "say one") as stream:
        text = stream.read()
    assert b'"error"' in text


def read_chunks(home: Home, target: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream with prompt progress."""
    answer = home.request("POST", target, {**body, "stream": True, "return_progress": True})
    return [json.loads(event) for event in answer.events if event != "[DONE]"]


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_prompt_progress_in_a_stream(home: Home, target: str) -> None:
    home.start()
    chat = target.endswith("chat/completions")
    body = {"messages": [{"role": "user", "content": "read 3"}]} if chat else {"prompt": "read 3"}
    chunks = read_chunks(home, target, body)
    progress_chunks = [chunk for chunk in chunks if "prompt_progress" in chunk]
    assert [chunk["prompt_progress"] for chunk in progress_chunks] == [
        {
            "total": 100,
            "cache": 1,
            "processed": processed,
            "time_ms": ms,
            "remaining_ms": 10 * (100 - processed),
        }
        for processed, ms in ((1, 0), (33, 50), (66, 100), (100, 150))
    ]
    for each in progress_chunks:
        if chat:
            delta = {"role": "assistant", "content": None}
            (choice,) = each["choices"]
            assert (choice["index"], choice["delta"], choice["finish_reason"]) == (0, delta, None)
            assert each["object"] == "chat.completion.chunk"
        elif target == "/completion":
            assert (each["content"], each["stop"], each["tokens_predicted"]) == ("", False, 0)
            assert each["tokens_evaluated"] == 100
        else:
            assert each["choices"] == [
                {"index": 0, "text": "", "finish_reason": None, "logprobs": None}
            ]
    assert "read" in json.dumps(chunks[chunks.index(progress_chunks[-1]) + 1 :])
    assert not any("timings" in each for each in progress_chunks)
    chunks_with_timings = read_chunks(home, target, {**body, "timings_per_token": True})
    timings = [each["timings"] for each in chunks_with_timings if "prompt_progress" in each]
    assert [(each["prompt_n"], each["prompt_ms"]) for each in timings] == [
        (0, 0.0),
        (32, 50.0),
        (65, 100.0),
        (99, 150.0),
    ]
    assert all(each["cache_n"] == 1 and each["predicted_n"] == 0 for each in timings)
    assert all(each["cache_exact_n"] == 1 for each in timings)  # already in the first event
    plain_response = home.request("POST", target, {**body, "stream": True})
    assert b"prompt_progress" not in plain_response.body


def test_a_silent_stream_gets_pings(home: Home) -> None:
    home.start()
    with (
        home.streaming("late 1.5", sse_ping_interval=1) as stream,
        home.streaming("late 1.2", sse_ping_interval=-1) as silent,
    ):
        assert b"\n:\n\n" in stream.read()
        assert b"\n:\n\n" not in silent.read()


LONG = "say " + "word " * 900  # the scripted engine expects 10 ms for each


def test_a_long_wait_is_said_first(home: Home) -> None:
    home.start()
    with home.streaming(LONG, stream=True) as stream:
        first = stream.readline()
        assert re.fullmatch(rb": reading 9\d\d tokens of a prompt, in about 9 s\n", first)
        assert b"data: " in stream.read()
    assert "tokens of a prompt, in about 9 s" in home.log.read_text()
    with home.streaming("say short") as stream:
        assert b": reading" not in stream.read()
    messages = [{"role": "user", "content": LONG}]
    lines = home.request("POST", "/api/chat", {"model": str(home.model), "messages": messages})
    assert lines.body.startswith(b"{")  # a stream of JSON has no comments


def test_progress_says_how_long_the_rest_takes(home: Home) -> None:
    home.start()
    with home.streaming(LONG, return_progress=True) as stream:
        chunks = [
            json.loads(line[6:])
            for line in stream.read().splitlines()
            if line.startswith(b"data: {")
        ]
    (first, *_) = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    unread = first["total"] - first["processed"]
    assert unread > 800
    assert first["remaining_ms"] == pytest.approx(10 * unread, abs=1)


def test_slots_say_what_is_left_to_read(home: Home) -> None:
    home.start()
    with home.streaming("slow 100"):
        wait_for(lambda: home.request("GET", "/slots").json[0].get("n_prompt_tokens"), "a prompt")
        busy, *idle = home.request("GET", "/slots").json
    assert busy["n_prompt_tokens_processed"] <= busy["n_prompt_tokens"]
    assert busy["prompt_remaining_ms"] >= 0
    assert not any("n_prompt_tokens" in slot for slot in idle)
