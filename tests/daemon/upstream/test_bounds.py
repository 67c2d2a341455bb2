"""Whatever a server sends, its answer ends: in bytes, in events, in tokens, and in headers."""

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
    UpstreamConnection,
)
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.support.daemons import RunningDaemon, temporary_home
from tests.support.upstreams import (
    HEAD,
    ScriptedServer,
    Seen,
    chunked,
    event,
    said,
    scripted_server,
    streamed,
    whole,
)

CHAT = frames.ChatPrompt([frames.Message("user", "hi")])
ROOT = Path(__file__).parents[3]


def chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


class Sending:
    """Answers with pieces for as long as the client stays; counts what it could send."""

    def __init__(self, head: bytes, pieces: Callable[[], Iterable[bytes]]) -> None:
        self.sent = 0
        self.over = threading.Event()
        self._head = head
        self._pieces = pieces

    def __call__(self, seen: Seen, connection: socket.socket) -> None:
        try:
            connection.sendall(self._head)
            for piece in self._pieces():
                connection.sendall(piece)
                self.sent += len(piece)
        finally:
            self.over.set()


def answered(
    there: ScriptedServer, kind: str = "vllm", **fields: Any
) -> tuple[str, UpstreamError | None]:
    """The text of an answer as far as it came, and the error that ended it."""
    upstream = Upstream(upstream=there.url, upstream_model="m", upstream_kind=kind)  # type: ignore[arg-type]

    async def main() -> tuple[str, UpstreamError | None]:
        server, text = UpstreamServer("big", upstream), ""
        try:
            async for event in server.events(frames.Generate(0, CHAT, **fields)):
                if isinstance(event, frames.Delta):
                    text += event.text + event.thought + "".join(c.arguments for c in event.calls)
        except UpstreamError as error:
            return text, error
        finally:
            await server.close()
        return text, None

    return asyncio.run(main())


KINDS_OF_PIECES: dict[str, Callable[[], bytes]] = {
    "large texts": lambda: chunk(content="x" * (1 << 20)),
    "small texts": lambda: chunk(content="x" * 1000) * 64,
    "thoughts": lambda: chunk(reasoning_content="x" * 5000) * 16,
    "arguments": lambda: (
        chunk(tool_calls=[{"index": 0, "function": {"name": "look", "arguments": "x" * 9000}}]) * 8
    ),
    "nothing": lambda: chunk(content="") * 500,
    "no choices": lambda: event({"choices": []}) * 1000,
    "comments": lambda: b": ping\n\n" * 5000,
    "empty lines": lambda: b"\n" * (1 << 16),
    "token ids": lambda: (
        event({"choices": [{"delta": {"content": "a"}, "token_ids": [1] * 9}]}) * 200
    ),
}


@pytest.mark.parametrize("pieces", KINDS_OF_PIECES)
@pytest.mark.parametrize("max_tokens", [5, None])
def test_an_answer_without_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, pieces: str, max_tokens: int | None
) -> None:
    monkeypatch.setattr(requests, "MAX_LINE_BYTES", 1 << 20)
    if max_tokens is None:
        monkeypatch.setattr(requests, "MAX_ANSWER_BYTES", 2 << 20)
    piece = chunked(KINDS_OF_PIECES[pieces]())
    sending = Sending(HEAD, lambda: itertools.repeat(piece))
    with scripted_server(answer=sending) as there:
        text, error = answered(there, max_tokens=max_tokens)
        assert error
        assert "'big'" in error.message
        assert any(each in error.message for each in ("longer than", "more than"))
        assert sending.over.wait(30)
    assert sending.sent < 24 << 20  # with what the sockets hold
    assert len(text) < (2 << 17 if max_tokens else 8 << 20)


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_within_its_limits_comes_whole(seed: int) -> None:
    """Even where each token is as long as the longest, and each has all its neighbours beside it."""
    draw = random.Random(seed)
    tokens, tops = draw.randint(1, 300), draw.choice([0, 0, 5, 20])
    longest = draw.choice([1, 4, 128, 256])
    texts = ["é" * draw.randint(1, longest) for _ in range(tokens)]

    def entry(text: str) -> dict[str, Any]:
        near = [{"token": text[:16], "bytes": [*text[:16].encode()], "logprob": -1.5}] * tops
        return {"token": text[:16], "logprob": -0.5, "top_logprobs": near}

    body = b"".join(
        event(
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
    with scripted_server(stream=body + said()) as there:
        text, error = answered(there, max_tokens=tokens, top_logprobs=tops or None)
    assert (text, error) == ("".join(texts), None)


@pytest.mark.parametrize("parts", [2, 1000, 60_000])
def test_an_event_of_many_lines_is_one_object(parts: int) -> None:
    pieces = ['{"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}],"x":[0']
    pieces += [",1"] * (parts - 2)
    pieces += ["]}"]
    lines = "".join(f"data: {piece}\n" for piece in pieces) + "\n"
    with scripted_server(stream=lines.encode() + said(" two")) as there:
        assert answered(there) == ("one two", None)


def test_an_event_of_endless_lines_is_ended() -> None:
    for line in (b"data: 1,\n", b"data:\n", b"data: " + b"x" * 60_000 + b"\n"):
        piece = chunked(line * (60_000 // len(line) + 1))
        sending = Sending(HEAD, lambda piece=piece: itertools.repeat(piece))  # type: ignore[misc]
        with scripted_server(answer=sending) as there:
            text, error = answered(there, max_tokens=4096)
            assert sending.over.wait(30)
        assert not text
        assert error
        assert "an event has more than 4 MiB" in error.message


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":[]}', "[[1]]"])
def test_an_event_of_too_many_values_is_not_decoded(value: str) -> None:
    many = ",".join([value] * ((MAX_LINE_BYTES - 4096) // (len(value) + 1)))
    with scripted_server(stream=event(f'{{"choices":[{many}]}}'.encode())) as there:
        _, error = answered(there)
    assert error
    assert "too many values" in error.message
    body = whole(None, plain=f'{{"tokens":[{many}]}}')
    with scripted_server(answer=lambda seen, connection: connection.sendall(body)) as there:

        async def main() -> None:
            connection = UpstreamConnection("big", Upstream(upstream=there.url))
            with pytest.raises(UpstreamError, match="too many values"):
                await connection.post("/tokenize", {}, 30.0)
            await connection.close()

        asyncio.run(main())


def informational(draw: random.Random) -> Iterator[bytes]:
    while True:
        headers = "".join(
            f"x-{at}: {'y' * draw.randint(0, 200)}\r\n" for at in range(draw.randint(0, 5))
        )
        yield f"HTTP/1.1 {draw.choice([100, 102, 103, 110])} Wait\r\n{headers}\r\n".encode()


@pytest.mark.parametrize("seed", range(3))
def test_endless_informational_responses_are_ended(seed: int) -> None:
    sending = Sending(b"", lambda: informational(random.Random(seed)))
    with scripted_server(answer=sending) as there:
        text, error = answered(there)
        assert sending.over.wait(30)
    assert not text
    assert error
    assert "it has too many headers" in error.message


def test_some_informational_responses_are_no_matter() -> None:
    few = list(itertools.islice(informational(random.Random(4)), 100))
    assert 10_000 < sum(map(len, few)) < MAX_HEADER_BYTES

    def answer(seen: Seen, connection: socket.socket) -> None:
        connection.sendall(b"".join(few) + streamed(said("hello")))

    with scripted_server(answer=answer) as there:
        assert answered(there) == ("hello", None)


def test_a_large_body_is_no_matter_for_the_limit_of_headers() -> None:
    text = "x" * (1 << 20)
    with scripted_server(stream=said(*[text] * 4)) as there:
        assert answered(there) == (text * 4, None)


LAZY = """
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


def test_nothing_is_imported_while_the_clock_of_a_request_runs() -> None:
    with scripted_server() as there:
        command = [sys.executable, "-c", LAZY, there.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("first", ["get", "ask", "streamed"])
def test_our_own_imports_are_no_time_of_the_servers(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The clock stands still until the client is there, however long its making takes."""
    from localspec.extras.upstream import connection as connections

    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made = connections.UpstreamConnection._create_client

    def slowly(self: connections.UpstreamConnection) -> Any:
        now[0] += 3600
        return made(self)

    monkeypatch.setattr(connections.UpstreamConnection, "_create_client", slowly)
    stated = Upstream(upstream="", upstream_model="m", upstream_kind="vllm")

    async def main() -> None:
        upstream = msgspec.structs.replace(stated, upstream=there.url)
        connection = connections.UpstreamConnection("big", upstream)
        match first:
            case "get":
                await connection.get("models", 10.0)
            case "ask":
                with contextlib.suppress(UpstreamError):  # an event stream is no JSON
                    await connection.post("/tokenize", {}, 10.0)
            case _:
                async with connection.stream("chat/completions", {}):
                    pass
        await connection.close()

    with scripted_server() as there:
        asyncio.run(main())
        assert there.seen


def test_an_answer_without_end_ends_for_whoever_asked() -> None:
    """And whoever asks next is answered, by a daemon that has grown by little."""
    piece = chunked(chunk(content="x" * (1 << 18)))
    sending = Sending(HEAD, lambda: itertools.repeat(piece))
    with temporary_home() as home, scripted_server(answer=sending) as there:
        home.use_fake()
        daemon = RunningDaemon(home)
        body = {"name": "big", "upstream": there.url}
        assert home.request("POST", "/localspec/upstreams", body).status == 201
        answer = home.chat("flood", model="big", max_tokens=5)
        assert answer.status == 502
        assert "longer than its limit of tokens" in answer.error["message"]
        assert home.chat("say hello").text == "hello"
        daemon.stop()
