"""Loading, unloading and swapping pairs during answers, with memory for one pair."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.daemons import Home, RunningDaemon, UnixConnection, wait_for

MEMORY_FOR_ONE_MIB = 200  # enough for one scripted engine


def read_load_events(home: Home, model: str = "") -> list[Any]:
    answer = home.request("POST", "/localspec/load", {"model": model})
    assert answer.status == 200, answer.body
    assert answer.events[-1] == "[DONE]"
    return [json.loads(event) for event in answer.events[:-1]]


def create_other_pair(home: Home) -> str:
    path = home.root / "other.gguf"
    path.touch()
    return str(path)


def test_a_load_reports_its_progress(home: Home) -> None:
    home.start("--load-delay", "0.3")
    events = read_load_events(home)
    assert [event["state"] for event in events][-2:] == ["loading", "ready"]
    assert ("target", 0.5) in [(event["stage"], event["progress"]) for event in events]
    assert [event["state"] for event in read_load_events(home)] == ["ready"]


@pytest.mark.parametrize("how", ["the engine refuses", "there is no engine"])
def test_a_load_that_fails_says_why(how: str, home: Home) -> None:
    """The error is an event after one of progress, because the answer has begun by then."""
    home.use_fake("--load-error")
    if how == "there is no engine":
        home.environment["LOCALSPEC_ENGINE"] = str(home.root / "nowhere")
    RunningDaemon(home)
    for _ in range(3):
        answer = home.request("POST", "/localspec/load", {})
        assert answer.status == 200
        first, *_, failed, done = answer.events
        assert json.loads(first)["state"] == "loading"
        assert json.loads(failed)["error"]["code"] == "load_failed"
        assert done == "[DONE]"


def test_a_load_that_is_refused_before_it_begins_has_a_status(
    home: Home, daemon: RunningDaemon
) -> None:
    missing = home.request("POST", "/localspec/load", {"model": "nobody"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    for _ in range(3):
        assert home.chat("exit 3").error["code"] == "worker_died"
    aside = home.request("POST", "/localspec/load", {})
    assert (aside.status, aside.error["code"]) == (503, "pair_set_aside")


def test_a_load_reports_that_it_waits_for_another_pair(home: Home) -> None:
    home.start(memory=MEMORY_FOR_ONE_MIB)
    with home.streaming("forever") as stream, ThreadPoolExecutor(1) as pool:
        stream.readline()
        connection = UnixConnection(home.socket)
        connection.request(
            "POST", "/localspec/load", json.dumps({"model": create_other_pair(home)})
        )
        response = connection.getresponse()
        first = json.loads(response.readline().removeprefix(b"data: "))
        assert (first["state"], first["stage"]) == ("loading", "waiting")
        rest = pool.submit(response.read)
        stream.leave()
        assert b'"state":"ready"' in rest.result()
        connection.close()


def test_a_stream_finishes_before_its_pair_is_swapped(home: Home) -> None:
    daemon = home.start(memory=MEMORY_FOR_ONE_MIB)
    other_model = create_other_pair(home)
    with home.streaming("slow 30") as stream, ThreadPoolExecutor(2) as pool:
        stream.readline()
        first = daemon.worker_pid()
        new = pool.submit(home.chat, "say new", model=other_model)
        wait_for(lambda: home.status()["running"] == 2, "the request for the new pair")
        old = pool.submit(home.chat, "say old")  # comes later, so it waits for the swap
        body = stream.read()
        assert body.endswith(b"data: [DONE]\n\n")
        assert b'"29 "' in body
        assert (new.result().status, new.result().text) == (200, "new")
        assert new.result().json["model"] == other_model
        assert old.result().text == "old"
    assert home.status()["counts"]["worker_deaths"] == 0
    assert daemon.worker_pid() != first


def test_leaving_while_waiting_for_a_swap_blocks_nobody(home: Home) -> None:
    home.start(memory=MEMORY_FOR_ONE_MIB)
    other_model = create_other_pair(home)
    with home.streaming("forever") as stream:
        stream.readline()
        connection = home.open("/v1/chat/completions", "say new", model=other_model)
        wait_for(lambda: home.status()["running"] == 2, "the request for the new pair")
        connection.close()
        wait_for(lambda: home.status()["running"] == 1, "its end")
        assert home.chat("say still here").text == "still here"


def test_concurrent_loads_and_unloads_leave_a_working_daemon(home: Home) -> None:
    home.start("--load-delay", "0.02", memory=MEMORY_FOR_ONE_MIB)
    other_model = create_other_pair(home)

    def ask(number: int) -> int:
        if number % 3 == 0:
            return home.request("POST", "/localspec/unload", {}).status
        return home.chat("say x", model=other_model if number % 3 == 1 else "").status

    with ThreadPoolExecutor(6) as pool:
        statuses = set(pool.map(ask, range(24)))
    assert statuses <= {200, 409, 503}
    assert home.chat("say y").text == "y"
    assert home.status()["counts"]["worker_deaths"] == 0
