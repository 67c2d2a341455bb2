"""Limit what a server sends before its response begins.

An HTTP/1.1 server may first send any number of 1xx responses, each with headers of its own. The HTTP client
drops them without counting, so this module counts the bytes that are read from the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

MAX_HEADER_BYTES = 1 << 18

_bytes_left: ContextVar[list[int] | None] = ContextVar("header_bytes_left", default=None)


class TooManyHeaders(Exception):
    """A server sent more than MAX_HEADER_BYTES before its response."""


@contextlib.contextmanager
def limited_headers() -> Iterator[None]:
    """Limit what this task reads from the network until the block is left."""
    token = _bytes_left.set([MAX_HEADER_BYTES])
    try:
        yield
    finally:
        _bytes_left.reset(token)


def limit_headers(transport: httpx2.AsyncHTTPTransport) -> None:
    """Make the connections of a transport count the bytes that are read from them."""
    import httpcore2

    class CountingStream(httpcore2.AsyncNetworkStream):
        def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
            self._stream = stream

        async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            data = await self._stream.read(max_bytes, timeout)
            remaining = _bytes_left.get()
            if remaining:
                remaining[0] -= len(data)
                if remaining[0] < 0:
                    raise TooManyHeaders
            return data

        async def write(self, buffer: bytes, timeout: float | None = None) -> None:
            await self._stream.write(buffer, timeout)

        async def aclose(self) -> None:
            await self._stream.aclose()

        async def start_tls(self, *arguments: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
            return CountingStream(await self._stream.start_tls(*arguments, **options))

        def get_extra_info(self, info: str) -> Any:
            return self._stream.get_extra_info(info)

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(
            self, *arguments: Any, **options: Any
        ) -> httpcore2.AsyncNetworkStream:
            return CountingStream(await super().connect_tcp(*arguments, **options))

    pool = transport._pool
    assert isinstance(pool, httpcore2.AsyncConnectionPool)
    pool._network_backend = Backend()
