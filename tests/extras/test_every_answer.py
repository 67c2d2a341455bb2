"""Answers to random and malformed requests, and to internal errors, have the published shape."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localspec.daemon.routes import ENDPOINTS
from tests.support.any_request import description
from tests.support.daemons import Home, RunningDaemon, UnixConnection, temporary_home
from tests.support.error_shapes import has_error, read_error
from tests.support.exploration import FACTOR
from tests.support.patience import PATIENCE

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
DIGITS = "9" * 5000
# Values as JSON text, because Python cannot write all of them.
VALUES = [
    *("null", "true", "0", "-1", "1", "2147483648", "9223372036854775808", "1e999", "-1e999"),
    *(DIGITS, f"-{DIGITS}", f"0.{DIGITS}", f"1e{DIGITS}", "NaN", "Infinity", "0.5", "1e-320"),
    *('""', '"a"', '"new"', '"last"'),
    *('"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"\x7f\\u009b"'),
    *('"~nobody/x.gguf"', '"/x.gguf,~nobody/y.gguf"', '"~/../\\u0000.gguf"', '"builtin"', '"../x"'),
    *(f'"{"/" + "a" * 5000}.gguf"', f'"/{"a/" * 5000}.gguf"', f'"{"a" * 5000}"', f'"{DIGITS}"'),
    *("[]", "{}", "[[]]", '[""]', "[0]", "[-1]", "[[0]]", "[{}]", '{"": ""}', '{"a": {"b": [1]}}'),
    *('[{"role": "user", "content": "x"}]', '[{"role": "user", "content": [{"type": "text"}]}]'),
    *('[{"type": "function", "function": {"name": "f"}}]', '{"type": "json_object"}', '"auto"'),
    *(
        f'[{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {a}}}}}]}}]'
        for a in (f'"{"[" * 9000}"', '"null"', "[]", DIGITS, '"\\u0000"', f'"{DIGITS}"')
    ),
    *("[" * deep + "]" * deep for deep in (200, 900, 2000)),
    *('{"a":' * deep + "1" + "}" * deep for deep in (200, 900)),
    '{"a":' * 2000 + "1" + "}" * 2000,
]
NAMES = [
    *("builtin", "x", "last", "new", "~nobody", "..", ".", "a" * 5000),
    *("\0", "é", "%", "a/b", "\x1b[2J"),
    *(" ", "?", "#", DIGITS, "default", "-", "A", "😀", "nobody.gguf", "~nobody/x.gguf", "\n"),
]
QUERIES = ["", "?limit=", "?context=", "?all=", "?search=", "?x=", "?limit=1&limit="]
DESCRIPTION: dict[str, Any] = description()


def list_fields(method: str, path: str) -> list[str]:
    """Return the field names that a body of this endpoint may have, inner objects included."""
    schemas = DESCRIPTION["components"]["schemas"]
    names: dict[str, None] = {}

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict):
            names.update(dict.fromkeys(node.get("properties", {})))
            for name, child in node.items():
                if name == "$ref" and child.startswith("#/components/schemas/"):
                    name = child.rsplit("/", 1)[1]
                    if name not in visited_schemas:
                        visited_schemas.add(name)
                        walk(schemas[name])
                else:
                    walk(child)

    visited_schemas: set[str] = set()
    walk(DESCRIPTION["paths"][path].get(method.lower(), {}).get("requestBody", {}))
    return list(names)


def draw_bodies(method: str, path: str) -> st.SearchStrategy[bytes]:
    names = list_fields(method, path)
    values = st.sampled_from(VALUES)
    member_name = st.sampled_from([*names, "other"])
    members = st.one_of(
        [st.dictionaries(member_name, values, min_size=1, max_size=n) for n in (1, 1, 5)]
    )
    usual = {"messages": '[{"role": "user", "content": "x"}]', "max_tokens": "9"}
    usual |= {"prompt": '"x"', "content": '"x"', "tokens": "[1]"}
    with_required = members.map(
        lambda drawn: {**{k: v for k, v in usual.items() if k in names}, **drawn}
    )
    objects = with_required.map(
        lambda drawn: "{" + ", ".join(f'"{name}": {value}' for name, value in drawn.items()) + "}"
    )
    return st.one_of(objects, objects, objects, values).map(str.encode) | st.sampled_from(
        [b"", b"\xff", b"{", b'{"a":1,}', b"\0", b"\xef\xbb\xbf{}", b" ", b"[1", b'{"a": \xc3}']
    )


def check_error(value: Any, target: str) -> None:
    _, code = read_error(target, value)
    assert code != "internal_error", value


def check_methods(allow: str) -> None:
    allowed = allow.split(", ")
    assert {"OPTIONS"} < set(allowed) <= set(METHODS), allow


def check_response(
    method: str, target: str, response: http.client.HTTPResponse, body: bytes
) -> None:
    summary = f"{method} {target[:80]}: {response.status} {body[:300]!r}"
    content_type = response.headers.get("content-type", "")
    path = target.partition("?")[0]
    plain_text = path in ("/", "/openapi.yaml", "/metrics") and response.status == 200
    if method == "HEAD":
        assert body == b""
        assert content_type != "text/plain; charset=utf-8" or plain_text, summary
        assert response.status != 500, summary
    elif method == "OPTIONS":  # the answer has only the methods of the path
        assert (response.status, body, content_type) == (204, b"", ""), summary
        check_methods(response.headers["allow"])
    elif response.status >= 400:
        assert content_type == "application/json", summary
        check_error(json.loads(body), target)
    elif content_type.startswith("text/event-stream"):
        for event in body.decode().split("\n\n"):
            if event and event != "data: [DONE]":
                value = json.loads(event.split("\n")[-1].removeprefix("data: "))
                if has_error(target, value):
                    check_error(value, target)
    elif content_type == "application/x-ndjson":
        for value in map(json.loads, body.splitlines()):
            if has_error(target, value):
                check_error(value, target)
    elif not plain_text:
        assert content_type == "application/json", summary
        json.loads(body)


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        home.environment["HF_HUB_OFFLINE"] = "1"
        RunningDaemon(home)
        yield home
        assert "a bug in a handler" not in home.log.read_text()


def send_request(home: Home, method: str, target: str, body: bytes | None) -> None:
    connection = UnixConnection(home.socket)
    try:
        connection.request(method, target, body)
        response = connection.getresponse()
        check_response(method, target, response, response.read())
    finally:
        connection.close()


@pytest.mark.explore
@pytest.mark.parametrize("path", dict.fromkeys(path for _, path, _, _ in ENDPOINTS))
def test_answers_to_random_requests_have_the_published_shape(api: Home, path: str) -> None:
    """Try each path with all methods and with random names, queries and bodies."""
    path_methods = [
        method for method, route, _, header in ENDPOINTS if not header and route == path
    ]

    @settings(max_examples=FACTOR * 12, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def send_random_request(data: st.DataObject) -> None:
        method = data.draw(st.sampled_from([*path_methods * 8, *METHODS]))
        if (method, path) == ("POST", "/localspec/shutdown"):  # the daemon must keep running
            method = "GET"
        target = path.replace("{name}", quote(data.draw(st.sampled_from(NAMES)), safe=""))
        if query := data.draw(st.sampled_from(QUERIES)):
            target += query + quote(data.draw(st.sampled_from([*NAMES, "1", "0", "²", "-1"])))
        described = method.lower() in DESCRIPTION["paths"][path]
        body = data.draw(draw_bodies(method if described else path_methods[0], path) | st.none())
        send_request(api, method, target, body)

    send_random_request()


PATHS = [
    "~nobody/x.gguf",
    "/x.gguf,~nobody/y.gguf",
    f"/{'a' * 5000}.gguf",
    "/\x01.gguf",
    "a" * 9000,
]


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        *(
            ("POST", target, {**body, "model": name}, {404})
            for name in PATHS
            for target, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/v1/completions", {"prompt": "x"}),
                ("/localspec/load", {}),
            )
        ),
        *(("POST", "/infill", {"prompt": "x", "model": name}, {200}) for name in PATHS),
        *(("POST", "/localspec/drafts", {"target": name}, {400, 404}) for name in PATHS),
        *(("POST", "/localspec/pulls", {"name": name}, {400, 404}) for name in PATHS),
        ("GET", f"/localspec/conversations?limit={DIGITS}", None, {400}),
        ("GET", f"/localspec/pairs/builtin?context={DIGITS}", None, {400}),
        (
            "POST",
            "/tokenize",
            b'{"content": "a", "x": "\\u0000", "y": ' + DIGITS.encode() + b"}",
            {400},
        ),
        ("POST", "/tokenize", b'{"content": "\\u0000", "y": 1e' + DIGITS.encode() + b"}", {400}),
        ("POST", "/tokenize", b'{"y": "\\ud800", "content": ' + DIGITS.encode() + b"}", {400}),
    ],
)
def test_requests_that_once_failed_are_refused_or_served(
    api: Home, method: str, target: str, body: Any, status: set[int]
) -> None:
    answer = api.request(method, target, body)
    assert answer.status in status, answer.body[:300]
    assert answer.headers["content-type"] == "application/json"


RAW = [
    b"GET /health HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET /health/ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"PUT /health HTTP/1.1\r\nHost: [::\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://localhost/nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //localhost/nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%ed%a0%80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: " + DIGITS.encode() + b"\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"f" * 5000
    + b"\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: x\r\nX-Localspec-Api: \xff\r\n\r\n",
    b"GET /nothing HTTP/1.0\r\n\r\n",
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_malformed_http_is_answered_in_the_published_shape(api: Home, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(str(api.socket))
        with contextlib.suppress(BrokenPipeError):
            raw.sendall(data)
        response = http.client.HTTPResponse(raw)
        response.begin()
        method = "OPTIONS" if data.startswith(b"OPTIONS ") else "GET"
        check_response(method, "raw", response, response.read())


BUGGY = """
import sys
from localspec.daemon.completion.answer import Choice
from localspec.daemon.http import tcp
from localspec.daemon.worker.table import PairTable

def take(self, event):
    if type(event).__name__ == "Done":
        raise ZeroDivisionError("a mistake")
    return taken(self, event)

def shown(self):
    raise KeyError("another")

taken, Choice.consume = Choice.consume, take
PairTable.most_recent = shown
tcp.TcpAuth.check_token = lambda *_: 1 / 0
from localspec.daemon.__main__ import main
sys.exit(main())
"""


def test_internal_errors_have_the_published_shape(home: Home) -> None:
    home.start(listen="127.0.0.1:0", program=BUGGY)
    expected = {
        "message": "Internal error in the daemon; its log has the details: localspec logs",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    for answer in (
        home.request("GET", "/props"),
        home.request("GET", "/localspec/status"),
        home.chat("say x"),
    ):
        assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
        assert answer.json == {"error": expected}
    for target, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say a b"}]}),
        ("/infill", {"prompt": "!say a b"}),
    ):
        first, *_, final = home.request("POST", target, {**body, "stream": True}).events
        assert "error" not in json.loads(first)
        words = f"Server error: {expected['message']}"  # a stream has no status that says so
        assert json.loads(final) == {"error": {**expected, "message": words}}
    [port] = [
        line.rsplit(" ", 1)[1] for line in home.log.read_text().splitlines() if "127.0" in line
    ]
    connection = http.client.HTTPConnection(
        "127.0.0.1", int(port.rpartition(":")[2]), timeout=PATIENCE
    )
    connection.request("GET", "/props")
    assert json.loads(connection.getresponse().read()) == {"error": expected}
    connection.close()
    assert "ZeroDivisionError: a mistake" in home.log.read_text()
    assert home.request("GET", "/api/version").status == 200


def test_a_hanging_request_gets_503_at_shutdown(home: Home) -> None:
    home.use_fake()
    hanging = """
import asyncio, sys
from localspec.daemon import lifecycle
from localspec.daemon.worker.table import PairTable

async def hang(self, name):
    await asyncio.sleep(3600)

PairTable.unload_idle = hang
start = lifecycle.Daemon.__init__
def impatient(self, *arguments, **keywords):
    start(self, *arguments, **keywords)
    self._server.config.timeout_graceful_shutdown = 0.3
lifecycle.Daemon.__init__ = impatient
from localspec.daemon.__main__ import main
sys.exit(main())
"""
    daemon = RunningDaemon(home, program=hanging)
    connection = UnixConnection(home.socket)
    connection.request("POST", "/localspec/unload")
    home.request("POST", "/localspec/shutdown")
    response = connection.getresponse()
    check_response("POST", "/localspec/unload", response, response.read())
    assert response.status == 503
    connection.close()
    daemon.stop()
