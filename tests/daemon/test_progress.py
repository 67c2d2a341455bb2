"""A stream says what its answer waits for, where that was asked for: the queue, another pair, a load."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, Stream, wait_for


def told(stream: Stream, most: int = 9) -> list[tuple[str, str]]:
    """What was said before the answer began: states and pairs, in their order, `most` of them."""
    found: list[tuple[str, str]] = []
    while len(found) < most and (line := stream.readline()):
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if chunk.get("choices"):
            return found
        now = chunk["localspec"]["progress"]
        if (now["state"], now["pair"]) not in found:
            found.append((now["state"], now["pair"]))
    return found


def asking(home: Home, text: str, model: str = "", **ours: Any) -> Any:
    return home.streaming(text, model=model, localspec={"progress": True, **ours})


def busy(home: Home, count: int) -> Any:
    status = home.request("GET", "/localspec/status").json
    return status["running"] == count and status["pair"]["state"] == "ready"


def test_a_load_names_the_pair_that_loads_and_not_the_one_before(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon("--load-delay", "0.7")
    other = home.root / "other.gguf"
    other.touch()
    with asking(home, "say one") as stream:
        assert ("loading", str(home.model)) in told(stream)
        stream.read()
    with asking(home, "say two", str(other)) as stream:
        states = told(stream)
    assert ("loading", str(other)) in states
    assert ("loading", str(home.model)) not in states


def test_status_names_the_pair_that_loads(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon("--load-delay", "2")
    other = home.root / "other.gguf"
    other.touch()
    with asking(home, "say one", str(other)):  # which is loading when its first event comes
        pair = home.request("GET", "/localspec/status").json["pair"]
        assert (pair["state"], pair["name"]) == ("loading", str(other))
    os.kill(daemon.worker_pid(), signal.SIGKILL)  # it would load to its end


def test_an_answer_that_waits_for_others_says_so(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon(parallel=1)
    with home.streaming("slow 100"):
        wait_for(lambda: busy(home, 1), "the first answer")
        with asking(home, "say queued") as stream:
            assert told(stream, 1) == [("queued", str(home.model))]


def test_an_answer_that_waits_for_another_pair_names_it(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon(memory=200)  # MiB, which hold one scripted engine
    other = home.root / "other.gguf"
    other.touch()
    with home.streaming("slow 100"):
        wait_for(lambda: busy(home, 1), "the first answer")
        with asking(home, "say two", str(other)) as stream:
            assert told(stream, 1) == [("waiting", str(home.model))]


def test_nothing_is_said_where_nobody_asked(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon("--load-delay", "0.5")
    with home.streaming("say one") as stream:
        assert b"progress" not in stream.read()


def test_what_fails_meanwhile_comes_in_the_stream(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon("--load-delay", "0.5", "--load-error")
    with asking(home, "say one") as stream:
        text = stream.read()
    assert b'"error"' in text


# ------------------------------------------------------------------------ llama-server's progress


def reading(home: Home, target: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream."""
    answer = home.request("POST", target, {**body, "stream": True, "return_progress": True})
    return [json.loads(event) for event in answer.events if event != "[DONE]"]


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_stream_says_how_much_of_its_prompt_is_read(
    home: Home, start_daemon: Callable[..., RunningDaemon], target: str
) -> None:
    start_daemon()
    chat = target.endswith("chat/completions")
    asked = {"messages": [{"role": "user", "content": "read 3"}]} if chat else {"prompt": "read 3"}
    chunks = reading(home, target, asked)
    told = [chunk for chunk in chunks if "prompt_progress" in chunk]
    assert [each["prompt_progress"] for each in told] == [
        {"total": 100, "cache": 1, "processed": read, "time_ms": ms}
        for read, ms in ((1, 0), (33, 50), (66, 100), (100, 150))
    ]
    for each in told:
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
    assert "read" in json.dumps(chunks[chunks.index(told[-1]) + 1 :])
    assert not any("timings" in each for each in told)
    timed = reading(home, target, {**asked, "timings_per_token": True})
    times = [each["timings"] for each in timed if "prompt_progress" in each]
    assert [(each["prompt_n"], each["prompt_ms"]) for each in times] == [
        (0, 0.0),
        (32, 50.0),
        (65, 100.0),
        (99, 150.0),
    ]
    assert all(each["cache_n"] == 1 and each["predicted_n"] == 0 for each in times)
    assert all(each["cache_exact_n"] == 1 for each in times)  # a number from the first event on
    plain = home.request("POST", target, {**asked, "stream": True})
    assert b"prompt_progress" not in plain.body


def test_a_stream_that_is_silent_gets_a_comment_now_and_then(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon()
    with (
        home.streaming("late 1.5", sse_ping_interval=1) as stream,
        home.streaming("late 1.2", sse_ping_interval=-1) as silent,
    ):
        assert b"\n:\n\n" in stream.read()
        assert b"\n:\n\n" not in silent.read()
