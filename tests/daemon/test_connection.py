"""Slow, unresponsive, foreign or too many clients do not keep the daemon from serving others."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
from collections.abc import Callable

import pytest

from tests.support.daemons import Home, RunningDaemon, UnixConnection, wait_for
from tests.support.patience import PATIENCE

# A daemon with short timeouts.
IMPATIENT = """
import sys
from localspec.daemon.http import connection
connection.HEAD_TIMEOUT_S = connection.BODY_TIMEOUT_S = connection.STALL_TIMEOUT_S = 0.3
from localspec.daemon.__main__ import main
sys.exit(main())
"""
STRANGER = """
import os, sys
from localspec.daemon.http import connection
connection.peer_credentials = lambda connected: (os.getuid() + 1, 1)
from localspec.daemon.__main__ import main
sys.exit(main())
"""


@pytest.fixture(params=["unix", "tcp"])
def impatient(request: pytest.FixtureRequest, home: Home) -> Callable[[], socket.socket]:
    """Run a daemon with short timeouts; return a function that connects to one of its listeners."""
    home.start(listen="127.0.0.1:0", parallel=1, program=IMPATIENT)
    port = int(home.status()["listen"].rpartition(":")[2])

    def connect() -> socket.socket:
        if request.param == "tcp":
            connected = socket.create_connection(("127.0.0.1", port))
        else:
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(str(home.socket))
        connected.settimeout(PATIENCE)
        return connected

    return connect


def build_head(home: Home, content_length: int, path: str = "/v1/chat/completions") -> bytes:
    token = (home.root / "state" / "token").read_text().strip()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {content_length}\r\n\r\n"
    ).encode()


def read_all(connected: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connected.recv(65536):
            received += data
    return received


def dribble(connected: socket.socket, data: bytes) -> None:
    """Send a byte each 50 ms until the other end closes."""
    connected.settimeout(0.05)
    for number in range(len(data)):
        try:
            connected.sendall(data[number : number + 1])
            if connected.recv(1, socket.MSG_PEEK):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    connected.settimeout(PATIENCE)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_slow_client_gets_408_and_is_disconnected(
    part: str, home: Home, impatient: Callable[[], socket.socket]
) -> None:
    with impatient() as slow:
        if part == "body":
            slow.sendall(build_head(home, 1000))
        dribble(slow, b"POST /v1/chat/completions HTTP/1.1\r\n" * 100)
        first, _, body = read_all(slow).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert f"The request's {part} did not arrive within 0.3 s." == error["message"]
    assert home.status()["running"] == 0
    assert "Traceback" not in home.log.read_text()


def test_a_client_that_keeps_sending_is_disconnected(
    home: Home, impatient: Callable[[], socket.socket]
) -> None:
    with impatient() as slow:
        slow.sendall(build_head(home, 1 << 30))  # refused at once: too large
        dribble(slow, b" " * 1000)
        assert read_all(slow).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_does_not_read_loses_its_slot(
    home: Home, impatient: Callable[[], socket.socket]
) -> None:
    request = {"messages": [{"role": "user", "content": "flood"}], "stream": True}
    body = json.dumps(request).encode()
    with impatient() as slow:
        slow.sendall(build_head(home, len(body)) + body)
        wait_for(
            lambda: "read nothing for 0.3 s and was dropped" in home.log.read_text(), "its end"
        )
        wait_for(lambda: home.status()["running"] == 0, "its place")


def test_a_quick_client_is_not_timed_out_between_and_after_its_requests(
    home: Home, impatient: Callable[[], socket.socket]
) -> None:
    """Answers and idle connections may last longer than the timeout of a request."""
    body = json.dumps({"messages": [{"role": "user", "content": "slow 30"}]}).encode()
    with impatient() as connected:
        for _ in range(2):
            connected.sendall(build_head(home, len(body)) + body)
            response = http.client.HTTPResponse(connected)
            response.begin()
            assert response.status == 200
            response.read()


def is_full(home: Home) -> bool:
    try:
        return home.request("GET", "/health").status == 200
    except ConnectionError:
        return False


def test_with_64_descriptors_some_are_refused_and_the_daemon_goes_on(home: Home) -> None:
    home.use_fake()
    limit = (64, 64)
    daemon = RunningDaemon(
        home, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    )
    assert home.chat("say hello").text == "hello"
    connections: list[UnixConnection] = []
    statuses: list[int] = []
    for _ in range(20):
        connection = UnixConnection(home.socket)
        connection.request("GET", "/health")
        response = connection.getresponse()
        statuses.append(response.status)
        if response.status == 503:
            assert json.loads(response.read())["error"]["code"] == "unavailable"
            assert int(response.headers["retry-after"]) > 0
            response.close()
        else:
            response.read()
        connections.append(connection)
    assert statuses[0] == 200
    assert 503 in statuses
    with contextlib.ExitStack() as stack:  # and many more that say nothing at all
        for _ in range(200):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(home.socket))
    for connection in connections:
        connection.close()
    wait_for(lambda: is_full(home), "a free connection")
    assert home.chat("say again").text == "again"
    assert "out of system resource" not in home.log.read_text()
    assert daemon.stop() == 0


def test_tcp_connections_do_not_block_the_unix_socket(home: Home) -> None:
    """TCP connections need no token, so they have a limit of their own."""
    home.use_fake(listen="127.0.0.1:0")
    limit = (128, 128)
    RunningDaemon(home, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
    port = int(home.status()["listen"].rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(300):  # silent, and they stay
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        own = [
            stack.enter_context(contextlib.closing(UnixConnection(home.socket))) for _ in range(24)
        ]
        for connection in own:
            connection.request("GET", "/health")
        answers = [connection.getresponse() for connection in own]
        assert {answer.status for answer in answers} == {200}
        for answer in answers:
            answer.read()
        assert home.chat("say hello").text == "hello"  # with descriptors for an engine
        last = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        last.settimeout(PATIENCE)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            last.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not read_all(last).startswith(b"HTTP/1.1 200 ")
    assert "out of system resource" not in home.log.read_text()

    def welcome() -> bool:
        with socket.create_connection(("127.0.0.1", port)) as again:
            again.settimeout(PATIENCE)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                again.sendall(
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
            return read_all(again).startswith(b"HTTP/1.1 200 ")

    wait_for(welcome, "places that were left")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux tells")
def test_the_daemon_takes_the_descriptors_it_may_have(home: Home) -> None:
    home.use_fake()
    limit = (128, 512)
    daemon = RunningDaemon(
        home, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    )
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (512, 512)


def test_another_user_is_dropped_before_a_byte_is_read(home: Home) -> None:
    home.start(program=STRANGER)
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(home.socket))
        with contextlib.suppress(BrokenPipeError):
            connected.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(connected) == b""
    assert "was refused" in home.log.read_text()
