"""Requests to a scripted server, and what comes of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from localspec.daemon.worker.process import Event
from localspec.extras.upstream.server import UpstreamServer
from localspec.protocol import frames
from localspec.protocol.settings import Upstream
from tests.support.upstreams import ReceivedRequest, ScriptedServer, encode_event, encode_response

CHAT = frames.ChatPrompt([frames.Message("user", "hi")])


def state(remote: ScriptedServer, kind: str = "vllm", model: str = "m", **fields: Any) -> Upstream:
    """Return the settings of a server whose model and kind need not be asked for."""
    return Upstream(upstream=remote.url, upstream_model=model, upstream_kind=kind, **fields)  # type: ignore[arg-type]


def run_request(upstream: Upstream, *requests: frames.Generate) -> list[Event]:
    """Return all events of answers to requests, or to a chat."""

    async def main() -> list[Event]:
        server = UpstreamServer("big", upstream)
        try:
            return [
                event
                for request in requests or [frames.Generate(0, CHAT)]
                async for event in server.events(request)
            ]
        finally:
            await server.close()

    return asyncio.run(main())


def ask(upstream: Upstream, *requests: Any) -> list[dict[str, Any]]:
    """Return the responses to small requests."""

    async def main() -> list[dict[str, Any]]:
        server = UpstreamServer("big", upstream)
        try:
            return [await server.ask(request) for request in requests]
        finally:
            await server.close()

    return asyncio.run(main())


def list_deltas(events: list[Event]) -> list[frames.Delta]:
    return [event for event in events if isinstance(event, frames.Delta)]


def join_text(events: list[Event]) -> str:
    return "".join(delta.text for delta in list_deltas(events))


def send_bytes(data: bytes) -> Callable[[ReceivedRequest, socket.socket], None]:
    return lambda request, connection: connection.sendall(data)


def send_json(**body: Any) -> Callable[[ReceivedRequest, socket.socket], None]:
    """Answer with an object, and close the connection."""
    return send_bytes(encode_response(body, headers="connection: close\r\n"))


def encode_delta(**delta: Any) -> bytes:
    return encode_event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def encode_text(text: str, finish: str | None = "stop", **fields: Any) -> bytes:
    """Return a stream of one text that is not a chat."""
    choice = {"index": 0, "text": text, "finish_reason": finish, **fields}
    return encode_event({"choices": [choice]}) + encode_event(b"[DONE]")
