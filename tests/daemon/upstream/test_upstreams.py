"""Whose turn it is: a server is asked for a sign of life where it is slow to begin, and its requests wait for
none.
"""

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
from tests.support.upstreams import HEAD, ScriptedServer, Seen, chunked, said, scripted_server

REQUEST = frames.Generate(0, frames.ChatPrompt([frames.Message("user", "hi")]))
OTHER = frames.PairFiles("other", "other.gguf")


def pair_of(server: ScriptedServer) -> frames.PairFiles:
    stated = Upstream(
        upstream=server.url, upstream_model="m", upstream_kind="vllm", fallback="other"
    )
    return frames.PairFiles("big", "", upstream=stated)


async def text(there: Upstreams, pair: frames.PairFiles) -> str:
    found = ""
    async with there.running(pair, REQUEST, Job.of(REQUEST)) as running:
        while not isinstance(event := await running.next(), frames.Done):
            found += event.text if isinstance(event, frames.Delta) else ""
    return found


def slowly(seconds: float) -> Callable[[Seen, socket.socket], None]:
    def answer(seen: Seen, connection: socket.socket) -> None:
        time.sleep(seconds)
        connection.sendall(HEAD + chunked(said("at last")) + b"0\r\n\r\n")

    return answer


def test_a_request_makes_no_journey_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_FIRST_EVENT_S", 30.0)

    async def main() -> None:
        there = Upstreams(lambda _: OTHER)
        assert await text(there, pair_of(server)) == "hello there"
        await there.close()

    with scripted_server() as server:
        asyncio.run(main())
        assert [request.path for request in server.seen] == ["/v1/chat/completions"]


def test_one_that_is_slow_to_begin_and_gives_a_sign_of_life_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "_FIRST_EVENT_S", 0.01)

    async def main() -> None:
        there = Upstreams(lambda _: OTHER)
        assert await text(there, pair_of(server)) == "at last"
        await there.close()

    with scripted_server(answer=slowly(0.5)) as server:
        asyncio.run(main())
        assert {request.path for request in server.seen} == {"/v1/chat/completions", "/v1/models"}


def test_one_that_gives_none_is_left_unless_another_of_its_answers_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "_FIRST_EVENT_S", 0.01)
    monkeypatch.setattr(upstreams, "_PROBE_TIMEOUT_S", 0.2)

    async def main() -> None:
        there = Upstreams(lambda _: OTHER)
        pair = pair_of(server)
        with pytest.raises(UpstreamUnreachable, match="sent nothing for too long"):
            await text(there, pair)

        async def heard() -> None:
            while True:
                there._heard_at["big"] = time.monotonic()
                await asyncio.sleep(0.01)

        hearing = asyncio.create_task(heard())
        waiting = asyncio.create_task(text(there, pair))
        await asyncio.sleep(0.6)
        assert not waiting.done()
        for task in (hearing, waiting):
            task.cancel()
        await asyncio.gather(hearing, waiting, return_exceptions=True)
        await there.close()

    with scripted_server(silent=True) as server:
        asyncio.run(main())
