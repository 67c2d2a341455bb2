"""Health checks: a server is checked only while its answer is slow to begin."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from localspec.daemon.worker.queue import Job
from localspec.errors import UpstreamUnreachable
from localspec.extras.upstream import server as upstreams
from localspec.extras.upstream.server import Upstreams
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.support.upstreams import (
    HEAD,
    ReceivedRequest,
    ScriptedServer,
    encode_chat,
    encode_chunk,
    scripted_server,
)

REQUEST = frames.Generate(0, frames.ChatPrompt([frames.Message("user", "hi")]))
OTHER = frames.PairFiles("other", "other.gguf")


def make_pair(server: ScriptedServer) -> frames.PairFiles:
    settings = Upstream(
        upstream=server.url, upstream_model="m", upstream_kind="vllm", fallback="other"
    )
    return frames.PairFiles("big", "", upstream=settings)


async def read_text(table: Upstreams, pair: frames.PairFiles) -> str:
    collected = ""
    async with table.running(pair, REQUEST, Job.of(REQUEST)) as running:
        while not isinstance(event := await running.next(), frames.Done):
            collected += event.text if isinstance(event, frames.Delta) else ""
    return collected


def answer_slowly(seconds: float) -> Callable[[ReceivedRequest, socket.socket], None]:
    def answer(request: ReceivedRequest, connection: socket.socket) -> None:
        time.sleep(seconds)
        connection.sendall(HEAD + encode_chunk(encode_chat("at last")) + b"0\r\n\r\n")

    return answer


@pytest.mark.parametrize(
    ("first_event_s", "seconds", "text", "checks"),
    [(30.0, None, "hello there", set()), (0.01, 0.5, "at last", {"/v1/models"})],
    ids=["fast", "slow"],
)
def test_only_a_slow_server_gets_health_checks_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    first_event_s: float,
    seconds: float | None,
    text: str,
    checks: set[str],
) -> None:
    monkeypatch.setattr(upstreams, "_FIRST_EVENT_S", first_event_s)

    async def main() -> None:
        table = Upstreams(lambda _: OTHER)
        assert await read_text(table, make_pair(server)) == text
        await table.close()

    with scripted_server(answer=answer_slowly(seconds) if seconds else None) as server:
        asyncio.run(main())
        paths = [request.path for request in server.requests]
        assert paths.count("/v1/chat/completions") == 1
        assert set(paths) == {"/v1/chat/completions"} | checks


def test_a_silent_server_is_given_up_unless_another_answer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "_FIRST_EVENT_S", 0.01)
    monkeypatch.setattr(upstreams, "_PROBE_TIMEOUT_S", 0.2)

    async def main() -> None:
        table = Upstreams(lambda _: OTHER)
        pair = make_pair(server)
        with pytest.raises(UpstreamUnreachable, match="sent nothing for too long"):
            await read_text(table, pair)

        async def keep_hearing() -> None:
            while True:
                table._heard_at["big"] = time.monotonic()
                await asyncio.sleep(0.01)

        hearing = asyncio.create_task(keep_hearing())
        waiting = asyncio.create_task(read_text(table, pair))
        await asyncio.sleep(0.6)
        assert not waiting.done()
        for task in (hearing, waiting):
            task.cancel()
        await asyncio.gather(hearing, waiting, return_exceptions=True)
        await table.close()

    with scripted_server(silent=True) as server:
        asyncio.run(main())
