"""Malformed HTTP is refused without harm to the daemon."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.support.daemons import Home
from tests.support.patience import PATIENCE

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
BODY = b'{"content":"a"}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n"


def send_bytes(home: Home, data: bytes) -> tuple[int, bytes]:
    """Send raw bytes; return the status and the body of the response."""
    received = b""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(str(home.socket))
        with contextlib.suppress(BrokenPipeError):  # refused before everything was sent
            raw.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while chunk := raw.recv(65536):
                received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(
            HEAD + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + BODY, 400, id="two lengths"
        ),
        # A proxy could read these differently, and find a smuggled second request in the rest.
        pytest.param(HEAD + b"Content-Length: 15\r\n" + CHUNKED, 400, id="a length and chunks"),
        pytest.param(
            HEAD + b"X-A: a\r\n b\r\nContent-Length: 15\r\n\r\n" + BODY, 400, id="a folded header"
        ),
        pytest.param(
            HEAD + b" X-A: a\r\nContent-Length: 15\r\n\r\n" + BODY, 400, id="a folded first header"
        ),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nX-A: a\x00b\r\n\r\n", 400, id="NUL in a header"),
        pytest.param(HEAD + b"X-A: " + b"a" * 1_000_000 + b"\r\n\r\n", 431, id="a header of 1 MB"),
        pytest.param(b"hello\r\n\r\n", 400, id="nonsense"),
    ],
)
def test_malformed_requests_are_refused_in_the_shape_of_openai(
    api: Home, data: bytes, status: int
) -> None:
    actual_status, body = send_bytes(api, data)
    assert actual_status == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert api.status()["draining"] is False


def test_a_bad_chunk_ends_the_connection(api: Home) -> None:
    status, _ = send_bytes(api, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY)
    assert status == 400
    assert api.request("GET", "/health").status == 200


def test_a_second_request_in_the_same_packet_is_checked_too(api: Home) -> None:
    good = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + BODY
    status, rest = send_bytes(api, good + HEAD + b"X-A: a\r\n b\r\n\r\n")
    assert status == 200
    assert b"HTTP/1.1 400 " in rest


def test_a_folded_line_in_a_body_is_accepted(api: Home) -> None:
    body = b'{"content":\r\n "a"}'
    length = str(len(body)).encode()
    status, response = send_bytes(api, HEAD + b"Content-Length: " + length + b"\r\n\r\n" + body)
    assert (status, json.loads(response)) == (200, {"tokens": [97]})


def test_a_chunked_body_is_accepted(api: Home) -> None:
    status, response = send_bytes(api, HEAD + CHUNKED)
    assert (status, json.loads(response)) == (200, {"tokens": [97]})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(rb'"a\ud800b"', id="a lone surrogate"),
        pytest.param(rb'"a\u0000b"', id="NUL"),
        pytest.param(b'"\xff"', id="no UTF-8"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, id="nested"),
        pytest.param(b'{"text": ' * 10_000 + b"1" + b"}" * 10_000, id="nested objects"),
    ],
)
def test_invalid_text_is_refused(api: Home, content: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
    for target in ("/v1/chat/completions", "/apply-template"):
        response = api.request("POST", target, body)
        assert response.status == 400
        assert response.error["type"] == "invalid_request_error"
    assert api.status()["running"] == 0
