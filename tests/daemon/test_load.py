"""Many clients are served in order, and those that leave leak nothing; `scripts/soak` runs longer."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
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


def quiet(_text: str) -> None:
    pass


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """Run a daemon with the builtin pair, like scripts/soak."""
    with soak_daemon.own_daemon() as running:
        assert running.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        yield running


def read_answer(connection: UnixConnection) -> Answer:
    answer = Answer(connection.getresponse())
    connection.close()
    return answer


def read_text(connection: UnixConnection) -> str:
    """Read a streamed chat to its end and return its text."""
    events = read_answer(connection).events
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    return "".join(chunk.get("content", "") for chunk in chunks)


def test_64_streaming_clients_are_served_in_order(home: Home) -> None:
    """All clients finish, and the engine gets them in the order in which they came."""
    home.start(parallel=2)
    with home.streaming("forever") as first, home.streaming("forever") as second:
        first.readline(), second.readline()
        clients = []
        for number in range(64):
            clients.append(home.open("/v1/chat/completions", "echo", stream=True))
            wait_for(lambda: home.status()["waiting"] > number, "its place")  # noqa: B023
        second.leave()
        first.leave()
        order = [json.loads(read_text(client))["id"] for client in clients]
    assert order == sorted(order)
    assert len(set(order)) == 64


@dataclass(frozen=True)
class CompletionText:
    """The tokens and the text of a streamed /completion."""

    tokens: list[int]
    text: str

    @classmethod
    def of(cls, connection: UnixConnection) -> CompletionText:
        response = connection.getresponse()
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
        connection.close()
        assert events[-1]["stop"] is True, events[-1]
        tokens = [token for event in events for token in event["tokens"]]
        return cls(tokens, "".join(event["content"] for event in events))


def list_start_order(connections: list[UnixConnection]) -> list[int]:
    """Return the order of the first events, as the system queued them."""
    order: list[int] = []
    with select.epoll() as arrivals:
        numbers = {
            connection.sock.fileno(): number for number, connection in enumerate(connections)
        }
        for place in numbers:
            arrivals.register(place, select.EPOLLIN | select.EPOLLET)
        while len(order) < len(connections):
            for place, _ in arrivals.poll(60) or pytest.fail("nobody's answer begins any more"):
                number = numbers[place]
                come = connections[number].sock.recv(1 << 16, socket.MSG_PEEK)
                if number not in order and b"data: " in come:
                    order.append(number)
    return order


def test_64_clients_of_a_real_engine_get_their_own_answers() -> None:
    """Exact answers are equal to the byte; others are the target's own choice, near-ties aside.

    Clients are served in the order in which they came, except for those in the engine together.
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

        alone = [CompletionText.of(open_one(number)) for number in range(clients)]
        open_ones = [open_one(number) for number in range(clients)]
        order = list_start_order(open_ones)
        together = [CompletionText.of(connection) for connection in open_ones]
        assert daemon.stop() == 0
    for number, (expected, actual) in enumerate(zip(alone, together, strict=True)):
        assert len(actual.tokens) == 12
        if number % 8 == 7:
            assert actual.text == expected.text
        elif actual.tokens != expected.tokens:
            assert worst_gap(str(model), prompts[number], actual.tokens, ends) <= SHIPPED_NEAR_TIE
    shared = [n for n in range(clients) if n % 8 != 7]  # exact ones have a place of their own
    order = [n for n in order if n in shared]
    assert max(abs(order.index(n) - place) for place, n in enumerate(shared)) < 4 * places


def test_a_full_queue_refuses_requests_on_every_route(home: Home) -> None:
    """The refusal is a 503 with Retry-After, for editors too."""
    home.start(parallel=1, queue=1)
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
        assert read_answer(waiting).json["content"] == "x"


def test_disconnects_leave_no_open_files(subject: Subject) -> None:
    """The daemon's number of open files does not change."""
    verdict = soak_daemon.connections(subject, 300, quiet)
    assert verdict.well, verdict


def test_leaked_open_files_are_detected(subject: Subject) -> None:
    """This tests the check above: it counts connections that stay open."""
    open_sockets: list[socket.socket] = []

    def hold(_text: str) -> None:
        open_sockets.append(socket.socket(socket.AF_UNIX))
        open_sockets[-1].connect(subject.path)
        subject.ask("GET", "/health")  # earlier connections are accepted by then

    verdict = soak_daemon.connections(subject, 10, hold)
    for connection in open_sockets:
        connection.close()
    assert not verdict.well, verdict


def test_clients_that_leave_free_their_slots_within_a_second(subject: Subject) -> None:
    """Four clients at a time leave in the middle of a stream."""
    verdict = soak_daemon.leavers(subject, 24, quiet)
    assert verdict.well, verdict


@pytest.mark.slow
def test_mixed_requests_do_not_make_the_daemon_grow(subject: Subject) -> None:
    """All kinds of requests run at once, and the daemon's memory stops growing.

    The allocator takes another block once or twice in the first thousand requests, but a leak takes
    one in every turn. The engine's caches fill more slowly, which only scripts/soak can check.
    """
    results = []
    for _turn in range(5):
        requests, daemon, _engine = soak_daemon.mixed(subject, 2, quiet)
        assert requests.well, requests
        results.append(daemon)
        if daemon.well:
            break
    assert results[-1].well, results
    assert subject.status()["counts"]["worker_deaths"] == 0
