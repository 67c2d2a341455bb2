"""Many clients: in order, without a trace of those who left. `scripts/soak` does the same for longer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from localspec.bench import soak_daemon
from localspec.bench.soak_daemon import Subject
from tests.support.daemons import Answer, Home, RunningDaemon, UnixConnection, wait_for

Start = Callable[..., RunningDaemon]


def quiet(_text: str) -> None:
    pass


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """A daemon with the shipped pair, as scripts/soak starts it."""
    with soak_daemon.own_daemon() as running:
        assert running.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        yield running


def finished(connection: UnixConnection) -> Answer:
    answer = Answer(connection.getresponse())
    connection.close()
    return answer


def written(connection: UnixConnection) -> str:
    """The text of a streamed chat, read to its end."""
    events = finished(connection).events
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    return "".join(chunk.get("content", "") for chunk in chunks)


def test_sixty_four_streaming_clients_at_once_finish_first_come_first_served(
    home: Home, start_daemon: Start
) -> None:
    """64 streaming clients at once: all finish, and the engine got them in the order they came."""
    start_daemon(parallel=2)
    with home.streaming("forever") as first, home.streaming("forever") as second:
        first.readline(), second.readline()
        clients = []
        for number in range(64):
            clients.append(home.open("/v1/chat/completions", "echo", stream=True))
            wait_for(lambda: home.status()["waiting"] > number, "its place")  # noqa: B023
        second.leave()
        first.leave()
        order = [json.loads(written(client))["id"] for client in clients]
    assert order == sorted(order)
    assert len(set(order)) == 64


def test_one_past_the_queue_is_refused_on_every_route_that_generates(
    home: Home, start_daemon: Start
) -> None:
    """One past the queue: 503 with Retry-After, for editors too."""
    start_daemon(parallel=1, queue=1)
    with home.streaming("forever") as chat:
        chat.readline()
        body = {"prompt": "!forever", "stream": True}
        editor, waiting = UnixConnection(home.socket), UnixConnection(home.socket)
        editor.request("POST", "/infill", json.dumps(body))
        wait_for(lambda: home.status()["running"] == 2, "the editor's place")
        waiting.request("POST", "/completion", json.dumps({"prompt": "say x"}))
        wait_for(lambda: home.status()["waiting"], "the queue to be full")
        for target, fields in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/completion", {"prompt": "x"}),
            ("/infill", {"prompt": "!say x", "input_prefix": "elsewhere"}),
        ):
            answer = home.request("POST", target, fields)
            assert (answer.status, answer.error["code"]) == (503, "queue_full"), target
            assert int(answer.headers["retry-after"]) > 0
        editor.close()
        chat.leave()
        assert finished(waiting).json["content"] == "x"


def test_clients_that_connect_and_go_leave_no_open_file(subject: Subject) -> None:
    """Connect and close, many times: the daemon's number of open files stays as it was."""
    verdict = soak_daemon.connections(subject, 300, quiet)
    assert verdict.well, verdict


def test_an_open_file_too_many_is_found(subject: Subject) -> None:
    """The check above can fail: connections that stay open are counted."""
    held: list[socket.socket] = []

    def hold(_text: str) -> None:
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect(subject.path)

    verdict = soak_daemon.connections(subject, 10, hold)
    for connection in held:
        connection.close()
    assert not verdict.well, verdict


def test_clients_that_leave_in_the_middle_free_their_places_within_a_second(
    subject: Subject,
) -> None:
    """Clients that leave mid-stream, four at a time: each one's place is free within 1 s."""
    verdict = soak_daemon.leavers(subject, 24, quiet)
    assert verdict.well, verdict


@pytest.mark.slow
def test_mixed_requests_are_all_answered_and_the_daemon_does_not_grow(subject: Subject) -> None:
    """A soak, in short: every kind of request at once; the daemon's memory stays flat.

    In seconds the engine's caches are still filling; its verdict needs the minutes of scripts/soak.
    """
    requests, daemon, _engine = soak_daemon.mixed(subject, 3, quiet)
    assert requests.well, requests
    assert daemon.well, daemon
    assert subject.status()["counts"]["worker_deaths"] == 0
