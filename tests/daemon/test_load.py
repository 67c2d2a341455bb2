"""Many clients: in order, without a trace of those who left. `scripts/soak` does the same for longer."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import localspec
from benchmarks import soak_daemon
from benchmarks.soak_daemon import Subject
from localspec.engine.llama import Model
from tests.support.daemons import (
    Answer,
    Home,
    RunningDaemon,
    UnixConnection,
    temporary_home,
    wait_for,
)
from tests.support.rescoring import SHIPPED_NEAR_TIE, worst_gap

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


@dataclass(frozen=True)
class Written:
    """A streamed /completion: its tokens and its text."""

    tokens: list[int]
    text: str

    @classmethod
    def of(cls, connection: UnixConnection) -> Written:
        response = connection.getresponse()
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
        connection.close()
        assert events[-1]["stop"] is True, events[-1]
        tokens = [token for event in events for token in event["tokens"]]
        return cls(tokens, "".join(event["content"] for event in events))


def order_of_beginning(connections: list[UnixConnection]) -> list[int]:
    """Whose first event came when, as the system queued them: whenever this test had time to look."""
    order: list[int] = []
    with select.epoll() as arrivals:
        numbers = {each.sock.fileno(): number for number, each in enumerate(connections)}
        for place in numbers:
            arrivals.register(place, select.EPOLLIN | select.EPOLLET)
        while len(order) < len(connections):
            for place, _ in arrivals.poll(60) or pytest.fail("nobody's answer begins any more"):
                number = numbers[place]
                come = connections[number].sock.recv(1 << 16, socket.MSG_PEEK)
                if number not in order and b"data: " in come:
                    order.append(number)
    return order


def test_sixty_four_clients_of_a_real_engine_each_get_the_answer_they_would_get_alone() -> None:
    """In exact mode to the byte; else what the target alone would choose, but for rounding.

    They are served in the order they came: whoever is overtaken is so by those beside it in the
    engine at most.
    """
    places, clients = 4, 64
    model = Path(localspec.__file__).parent / "builtin" / "target.gguf"
    with Model(str(model)) as loaded:
        vocab = loaded.vocab
        ends = vocab.ends
        texts = [
            f"# {n}\nimport {'os sys re json'.split()[n % 4]}\n\ndef f{n}(x):\n" for n in range(64)
        ]
        prompts = [vocab.tokenize(text, add_special=True, parse_special=False) for text in texts]
    with temporary_home() as home:
        home.environment |= {"LOCALSPEC_PARALLEL": str(places), "LOCALSPEC_CONTEXT": "4096"}
        daemon = RunningDaemon(home)

        def open_one(number: int) -> UnixConnection:
            body = {"prompt": prompts[number], "n_predict": 12, "temperature": 0, "stream": True}
            body |= {"ignore_eos": True, "return_tokens": True, "exact": number % 8 == 7}
            connection = UnixConnection(home.socket)
            connection.request("POST", "/completion", json.dumps(body))
            return connection

        alone = [Written.of(open_one(number)) for number in range(clients)]
        open_ones = [open_one(number) for number in range(clients)]
        order = order_of_beginning(open_ones)
        together = [Written.of(connection) for connection in open_ones]
        assert daemon.stop() == 0
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert len(other.tokens) == 12
        if number % 8 == 7:
            assert other.text == one.text
        elif other.tokens != one.tokens:
            assert worst_gap(str(model), prompts[number], other.tokens, ends) <= SHIPPED_NEAR_TIE
    shared = [n for n in range(clients) if n % 8 != 7]  # exact ones have a place of their own
    order = [n for n in order if n in shared]
    assert max(abs(order.index(n) - place) for place, n in enumerate(shared)) < 4 * places


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
        subject.ask("GET", "/health")  # who came before is seen before

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
    """A soak, in short: every kind of request at once; the daemon's memory comes to rest.

    Its allocator takes another piece once or twice in the first thousand requests, at any moment: a
    leak takes one in every turn. The engine's caches fill for longer; its verdict needs the minutes
    of scripts/soak.
    """
    found = []
    for _turn in range(5):
        requests, daemon, _engine = soak_daemon.mixed(subject, 2, quiet)
        assert requests.well, requests
        found.append(daemon)
        if daemon.well:
            break
    assert found[-1].well, found
    assert subject.status()["counts"]["worker_deaths"] == 0
