"""Limits on what a server sends: bytes, events, tokens and headers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localspec.errors import UpstreamError
from localspec.extras.upstream import request as requests
from localspec.extras.upstream.connection import (
    MAX_HEADER_BYTES,
    MAX_LINE_BYTES,
)
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.pieces import Call
from localspec.protocol.settings import Upstream
from tests.extras.upstream.asking import CHAT, ask, encode_delta, send_bytes, state
from tests.support.daemons import temporary_home
from tests.support.patience import PATIENCE
from tests.support.upstreams import (
    HEAD,
    ReceivedRequest,
    ScriptedServer,
    encode_chat,
    encode_chunk,
    encode_event,
    encode_response,
    encode_stream,
    scripted_server,
)

ROOT = Path(__file__).parents[3]


class EndlessAnswer:
    """Send pieces until the client leaves, and count the bytes that were sent."""

    def __init__(self, head: bytes, pieces: Callable[[], Iterable[bytes]]) -> None:
        self.sent_bytes = 0
        self.over = threading.Event()
        self._head = head
        self._pieces = pieces

    def __call__(self, request: ReceivedRequest, connection: socket.socket) -> None:
        try:
            connection.sendall(self._head)
            for piece in self._pieces():
                connection.sendall(piece)
                self.sent_bytes += len(piece)
        finally:
            self.over.set()


def read_answer(
    remote: ScriptedServer, kind: str = "vllm", **fields: Any
) -> tuple[str, UpstreamError | None]:
    """Return the text of an answer up to the error that ended it, and that error."""

    async def main() -> tuple[str, UpstreamError | None]:
        server, text = UpstreamServer("big", state(remote, kind)), ""
        try:
            async for event in server.events(frames.Generate(0, CHAT, **fields)):
                if isinstance(event, frames.Delta):
                    text += "".join(p.text for p in event.pieces if not isinstance(p, Call))
        except UpstreamError as error:
            return text, error
        finally:
            await server.close()
        return text, None

    return asyncio.run(main())


KINDS_OF_PIECES: dict[str, Callable[[], bytes]] = {
    "large texts": lambda: encode_delta(content="x" * (1 << 20)),
    "small texts": lambda: encode_delta(content="x" * 1000) * 64,
    "thoughts": lambda: encode_delta(reasoning_content="x" * 5000) * 16,
    "arguments": lambda: (
        encode_delta(
            tool_calls=[{"index": 0, "function": {"name": "look", "arguments": "x" * 9000}}]
        )
        * 8
    ),
    "nothing": lambda: encode_delta(content="") * 500,
    "no choices": lambda: encode_event({"choices": []}) * 1000,
    "comments": lambda: b": ping\n\n" * 5000,
    "empty lines": lambda: b"\n" * (1 << 16),
    "token ids": lambda: (
        encode_event({"choices": [{"delta": {"content": "a"}, "token_ids": [1] * 9}]}) * 200
    ),
}


@pytest.mark.parametrize("pieces", KINDS_OF_PIECES)
@pytest.mark.parametrize("max_tokens", [5, None])
def test_an_endless_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, pieces: str, max_tokens: int | None
) -> None:
    monkeypatch.setattr(requests, "MAX_LINE_BYTES", 1 << 20)
    if max_tokens is None:
        monkeypatch.setattr(requests, "MAX_ANSWER_BYTES", 2 << 20)
    piece = encode_chunk(KINDS_OF_PIECES[pieces]())
    endless_answer = EndlessAnswer(HEAD, lambda: itertools.repeat(piece))
    with scripted_server(answer=endless_answer) as remote:
        text, error = read_answer(remote, max_tokens=max_tokens)
        assert error
        assert "'big'" in error.message
        assert any(phrase in error.message for phrase in ("longer than", "more than"))
        assert endless_answer.over.wait(PATIENCE)
    assert endless_answer.sent_bytes < 24 << 20  # includes what the socket buffers hold
    assert len(text) < (2 << 17 if max_tokens else 8 << 20)


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_within_its_limits_is_complete(seed: int) -> None:
    """That includes answers with the longest tokens and all log-probabilities."""
    draw = random.Random(seed)
    tokens, tops = draw.randint(1, 300), draw.choice([0, 0, 5, 20])
    longest = draw.choice([1, 4, 128, 256])
    texts = ["é" * draw.randint(1, longest) for _ in range(tokens)]

    def entry(text: str) -> dict[str, Any]:
        neighbours = [{"token": text[:16], "bytes": [*text[:16].encode()], "logprob": -1.5}] * tops
        return {"token": text[:16], "logprob": -0.5, "top_logprobs": neighbours}

    body = b"".join(
        encode_event(
            {
                "id": "chatcmpl-0123456789abcdef",
                "object": "chat.completion.chunk",
                "created": 1_795_000_000,
                "model": "Some-Organisation/Some-Model-123B-Instruct",
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": text},
                        "finish_reason": None,
                        "token_ids": [17],
                        **({"logprobs": {"content": [entry(text)]}} if tops else {}),
                    }
                ],
            }
        )
        for text in texts
    )
    with scripted_server(stream=body + encode_chat()) as remote:
        text, error = read_answer(remote, max_tokens=tokens, top_logprobs=tops or None)
    assert (text, error) == ("".join(texts), None)


@pytest.mark.parametrize("parts", [2, 1000, 60_000])
def test_an_event_of_many_lines_is_one_object(parts: int) -> None:
    pieces = ['{"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}],"x":[0']
    pieces += [",1"] * (parts - 2)
    pieces += ["]}"]
    lines = "".join(f"data: {piece}\n" for piece in pieces) + "\n"
    with scripted_server(stream=lines.encode() + encode_chat(" two")) as remote:
        assert read_answer(remote) == ("one two", None)


def test_an_event_of_endless_lines_is_ended() -> None:
    for line in (b"data: 1,\n", b"data:\n", b"data: " + b"x" * 60_000 + b"\n"):
        piece = encode_chunk(line * (60_000 // len(line) + 1))
        endless_answer = EndlessAnswer(HEAD, lambda piece=piece: itertools.repeat(piece))  # type: ignore[misc]
        with scripted_server(answer=endless_answer) as remote:
            text, error = read_answer(remote, max_tokens=4096)
            assert endless_answer.over.wait(PATIENCE)
        assert not text
        assert error
        assert "an event has more than 4 MiB" in error.message


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":[]}', "[[1]]"])
def test_an_event_of_too_many_values_is_not_decoded(value: str) -> None:
    many = ",".join([value] * ((MAX_LINE_BYTES - 4096) // (len(value) + 1)))
    with scripted_server(stream=encode_event(f'{{"choices":[{many}]}}'.encode())) as remote:
        _, error = read_answer(remote)
    assert error
    assert "too many values" in error.message
    body = encode_response(None, plain=f'{{"tokens":[{many}]}}')
    with (
        scripted_server(answer=send_bytes(body)) as remote,
        pytest.raises(UpstreamError, match="too many values"),
    ):
        ask(state(remote), frames.Tokenize(0, "x", pieces=False))


def draw_informational(draw: random.Random) -> Iterator[bytes]:
    while True:
        headers = "".join(
            f"x-{at}: {'y' * draw.randint(0, 200)}\r\n" for at in range(draw.randint(0, 5))
        )
        yield f"HTTP/1.1 {draw.choice([100, 102, 103, 110])} Wait\r\n{headers}\r\n".encode()


@pytest.mark.parametrize("seed", range(3))
def test_endless_informational_responses_are_ended(seed: int) -> None:
    endless_answer = EndlessAnswer(b"", lambda: draw_informational(random.Random(seed)))
    with scripted_server(answer=endless_answer) as remote:
        text, error = read_answer(remote)
        assert endless_answer.over.wait(PATIENCE)
    assert not text
    assert error
    assert "it has too many headers" in error.message


def test_some_informational_responses_are_allowed() -> None:
    few = list(itertools.islice(draw_informational(random.Random(4)), 100))
    assert 10_000 < sum(map(len, few)) < MAX_HEADER_BYTES

    response = b"".join(few) + encode_stream(encode_chat("hello"))
    with scripted_server(answer=send_bytes(response)) as remote:
        assert read_answer(remote) == ("hello", None)


def test_a_large_body_does_not_count_as_headers() -> None:
    text = "x" * (1 << 20)
    with scripted_server(stream=encode_chat(*[text] * 4)) as remote:
        assert read_answer(remote) == (text * 4, None)


IMPORTS_OF_A_REQUEST = """
import asyncio, sys
from localspec.extras.upstream.connection import UpstreamConnection
from localspec.protocol.settings import Upstream

async def main():
    connection = UpstreamConnection("big", Upstream(upstream=sys.argv[1]))
    await connection._ready()
    before = set(sys.modules)
    async with connection.stream("chat/completions", {}) as lines:
        async for line in lines:
            pass
    print(sorted(set(sys.modules) - before))
    await connection.close()

asyncio.run(main())
"""


def test_nothing_is_imported_during_a_request() -> None:
    with scripted_server() as remote:
        command = [sys.executable, "-c", IMPORTS_OF_A_REQUEST, remote.url]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize("call", ["get", "ask", "streamed"])
def test_imports_do_not_count_towards_the_timeout(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The timeout starts only after the HTTP client was created, however long that takes."""
    from localspec.extras.upstream import connection as connections

    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    create_client = connections.UpstreamConnection._create_client

    def create_slowly(self: connections.UpstreamConnection) -> Any:
        clock[0] += 3600
        return create_client(self)

    monkeypatch.setattr(connections.UpstreamConnection, "_create_client", create_slowly)
    settings = Upstream(upstream="", upstream_model="m", upstream_kind="vllm")

    async def main() -> None:
        upstream = msgspec.structs.replace(settings, upstream=remote.url)
        connection = connections.UpstreamConnection("big", upstream)
        match call:
            case "get":
                await connection.get("models", 10.0)
            case "ask":
                with contextlib.suppress(UpstreamError):  # an event stream is no JSON
                    await connection.post("/tokenize", {}, 10.0)
            case _:
                async with connection.stream("chat/completions", {}):
                    pass
        await connection.close()

    with scripted_server() as remote:
        asyncio.run(main())
        assert remote.requests


def test_an_endless_answer_ends_for_its_client() -> None:
    """The next client is answered as usual."""
    piece = encode_chunk(encode_delta(content="x" * (1 << 18)))
    endless_answer = EndlessAnswer(HEAD, lambda: itertools.repeat(piece))
    with temporary_home() as home, scripted_server(answer=endless_answer) as remote:
        home.start()
        body = {"name": "big", "upstream": remote.url}
        assert home.request("POST", "/localspec/upstreams", body).status == 201
        answer = home.chat("flood", model="big", max_tokens=5)
        assert answer.status == 502
        assert "longer than its limit of tokens" in answer.error["message"]
        assert home.chat("say hello").text == "hello"
