"""A bridge from a random port of the loopback to the daemon's socket, for one agent while it runs.

Agents speak HTTP over TCP only, and the daemon's own TCP listener is the user's to turn on. Every user of a
machine can connect to its loopback, so a connection is forwarded only if its first request has the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import socket
import threading
from collections.abc import Callable

_POLL_INTERVAL_S = 0.5
_TOKEN_HEADER = re.compile(rb"\r\n(?:authorization: *bearer|x-api-key:) *(\S+) *(?=\r\n)", re.I)
_REFUSAL = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def start(socket_path: str, token: str, announce: Callable[[], None]) -> str:
    """Start a bridge in a process of its own, which also calls `announce`, and return its address.

    The process ends with the calling one, also after that has become another program.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    agent = os.getpid()
    if os.fork():
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        os.setsid()  # a Ctrl-C in the agent's terminal must not end the bridge
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # the terminal, or pipes whose readers wait for their end
            os.dup2(null, descriptor)
        threading.Thread(target=announce, daemon=True).start()
        asyncio.run(_forward(listener, socket_path, token, agent))
    finally:
        os._exit(0)


async def _forward(listener: socket.socket, socket_path: str, token: str, agent: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            head = await reader.readuntil(b"\r\n\r\n")
            if not has_token(head, token):
                writer.write(_REFUSAL % b"401 Unauthorized")
                return
            try:
                answers, daemon = await asyncio.open_unix_connection(socket_path)
            except OSError:  # agents try again, until a daemon runs
                writer.write(_REFUSAL % b"503 Service Unavailable")
                return
            with contextlib.closing(daemon):  # the daemon drops the work for an agent that left
                daemon.write(head)
                copies = _copy(reader, daemon), _copy(answers, writer)
                await asyncio.wait(
                    map(asyncio.ensure_future, copies), return_when="FIRST_COMPLETED"
                )

    async with await asyncio.start_server(serve, sock=listener):
        while os.getppid() == agent:
            await asyncio.sleep(_POLL_INTERVAL_S)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()


def has_token(head: bytes, token: str) -> bool:
    """Return whether the head of a request has the token, in one of the headers that agents use."""
    given = _TOKEN_HEADER.findall(head)
    return any(hmac.compare_digest(each, token.encode()) for each in given)
