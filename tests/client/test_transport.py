"""Our reader of HTTP and server-sent events gives the same result however the bytes are split."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.client import transport
from localspec.errors import BadResponse, LocalspecError, NoAnswer, NoDaemon
from tests.support.daemons import Home


def feed(data: bytes, cuts: list[int]) -> Callable[[int], bytes]:
    """Return a `receive` that returns `data` in pieces of the given sizes, then the end."""
    pieces = []
    for size in cuts:
        pieces.append(data[:size])
        data = data[size:]
    pieces = [piece for piece in [*pieces, data] if piece]
    queue = iter(pieces)
    return lambda _count: next(queue, b"")


def response(data: bytes, cuts: list[int] | None = None) -> transport.Response:
    return transport.Response(transport.Reader(feed(data, cuts or [])))


CUTS = st.lists(st.integers(1, 20))
BODIES = st.lists(st.binary(min_size=1, max_size=50))


def chunked(parts: list[bytes], trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts)
    return (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
        + body
        + b"0\r\n"
        + trailer
        + b"\r\n"
    )


@given(BODIES, CUTS, st.sampled_from([b"", b"X-Trailer: 1\r\n"]))
def test_a_chunked_body_arrives_complete(
    parts: list[bytes], cuts: list[int], trailer: bytes
) -> None:
    assert response(chunked(parts, trailer), cuts).read() == b"".join(parts)


@given(st.binary(max_size=200), CUTS)
def test_a_body_with_a_length_arrives_complete(body: bytes, cuts: list[int]) -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-LENGTH:  %d \r\nA: b\r\n\r\n" % len(body)
    answer = response(head + body + b"not ours", cuts)
    assert answer.status == 503
    assert answer.headers["a"] == "b"
    assert answer.read() == body


@given(st.binary(max_size=200), CUTS)
def test_a_body_without_length_ends_with_the_stream(body: bytes, cuts: list[int]) -> None:
    assert response(b"HTTP/1.1 200 OK\r\n\r\n" + body, cuts).read() == body


@given(BODIES.filter(bool), CUTS, st.data())
def test_a_truncated_body_is_an_error(
    parts: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    complete = chunked(parts)
    cut = complete[: data.draw(st.integers(0, len(complete) - 3))]
    with pytest.raises(NoDaemon):
        response(cut, cuts).read()


@given(st.binary(max_size=300), CUTS)
def test_garbage_raises_our_own_error(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(LocalspecError):
        response(data, cuts).read()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 70_000,
    ],
)
def test_an_invalid_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        response(data).read()


def test_informational_responses_are_skipped() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"
    answer = response(data)
    assert answer.status == 204
    assert answer.read() == b""


LINES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))


@given(st.lists(st.lists(LINES, min_size=1), min_size=1), st.sampled_from(["\n", "\r\n"]), CUTS)
def test_events_arrive_as_they_were_sent(
    events: list[list[str]], end: str, cuts: list[int]
) -> None:
    text = "".join(
        f": a comment{end}event: x{end}" + "".join(f"data: {line}{end}" for line in event) + end
        for event in events
    )
    receive = feed(text.encode(), cuts)
    chunks = iter(lambda: receive(1), b"")
    assert list(transport.events(chunks)) == ["\n".join(event) for event in events]


def test_an_event_that_is_cut_is_dropped() -> None:
    assert list(transport.events(iter([b"data: one\n\nda", b"ta: tw"]))) == ["one"]


@contextlib.contextmanager
def serving(path: Path, answer: bytes) -> Iterator[list[bytes]]:
    """Serve `answer` to one client on a socket; yield the received bytes."""
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            received.append(connection.recv(65_536))
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        thread.join()


def test_a_request_carries_its_length_and_headers(home: Home) -> None:
    path = home.root / "s"
    with serving(path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as received:
        connection = transport.Connection(str(path))
        answer = connection.request("POST", "/x", b"body", {"X-A": "1"})
        assert answer.read() == b"ok"
        connection.close()
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Content-Length: 4" in head
    assert b"X-A: 1" in head
    assert body == b"body"


def test_the_error_without_a_daemon_names_the_command_to_start_one(home: Home) -> None:
    with pytest.raises(NoDaemon, match="localspec start"):
        transport.Connection(str(home.root / "nothing"))


def test_a_silent_daemon_times_out(home: Home) -> None:
    path = home.root / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        connection = transport.Connection(str(path), timeout=0.01)
        with pytest.raises(NoAnswer, match="does not respond"):
            connection.request("GET", "/")
        connection.close()


def no_socket(path: Path) -> None:
    path.write_bytes(b"")


def nobody_listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))


def datagram_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(path))


@pytest.mark.parametrize("make_socket", [no_socket, nobody_listens, datagram_socket])
def test_a_path_without_a_daemon_is_recognised(
    home: Home, make_socket: Callable[[Path], None]
) -> None:
    make_socket(path := home.root / "s")
    with pytest.raises(NoDaemon, match=r"localspec start|Cannot reach the daemon at .*: \w"):
        transport.Connection(str(path))


def test_a_daemon_that_accepts_no_connection_does_not_respond(home: Home) -> None:
    path = str(home.root / "s")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as waiting:
        listening.bind(path)
        listening.listen(0)
        refused = ""
        for _ in range(64):
            try:
                waiting.callback(transport.Connection(path, timeout=0.01).close)
            except NoDaemon as error:
                refused = error.message
        assert "does not respond" in refused


def test_a_daemon_that_dies_before_its_answer_is_an_error(home: Home) -> None:
    path = str(home.root / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        connection = transport.Connection(path, timeout=5.0)
        accepted, _ = listening.accept()
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nha")
        response = connection.request("POST", "/", b"never read")
        accepted.close()  # with bytes unread, so the connection is reset
        with pytest.raises(LocalspecError, match=r"ended|went away|closed|gone|died"):
            response.read()
        connection.close()
