"""What is no proper HTTP is refused, and the daemon goes on."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.support.daemons import Home

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
BODY = b'{"content":"a"}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n"


def answer(home: Home, data: bytes) -> tuple[int, bytes]:
    """Status and body of whatever comes back before the connection closes."""
    received = b""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(home.socket))
        with contextlib.suppress(BrokenPipeError):  # it was refused before all was sent
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
        # Two programs may read these in two ways, and one would find a second request in the rest.
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
def test_it_is_refused_in_openais_shape(api: Home, data: bytes, status: int) -> None:
    found, body = answer(api, data)
    assert found == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert api.status()["draining"] is False


def test_a_bad_chunk_ends_the_connection(api: Home) -> None:
    status, _ = answer(api, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY)
    assert status == 400
    assert api.request("GET", "/health").status == 200


def test_a_second_request_in_the_same_packet_is_read_as_strictly(api: Home) -> None:
    good = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + BODY
    status, rest = answer(api, good + HEAD + b"X-A: a\r\n b\r\n\r\n")
    assert status == 200
    assert b"HTTP/1.1 400 " in rest


def test_what_looks_like_a_folded_header_is_welcome_in_a_body(api: Home) -> None:
    body = b'{"content":\r\n "a"}'
    length = str(len(body)).encode()
    status, found = answer(api, HEAD + b"Content-Length: " + length + b"\r\n\r\n" + body)
    assert (status, json.loads(found)) == (200, {"tokens": [97]})


def test_chunks_alone_are_read(api: Home) -> None:
    status, found = answer(api, HEAD + CHUNKED)
    assert (status, json.loads(found)) == (200, {"tokens": [97]})


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
def test_what_is_no_text_is_refused(api: Home, content: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
    for target in ("/v1/chat/completions", "/apply-template"):
        found = api.request("POST", target, body)
        assert found.status == 400
        assert found.error["type"] == "invalid_request_error"
    assert api.status()["running"] == 0
