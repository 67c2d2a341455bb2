"""A limit for what a server sends before its answer begins.

An HTTP/1.1 server may send any number of 1xx responses first, each with headers of its own. The HTTP client
drops them without counting, so the bytes are counted where they are read from the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

MAX_HEADER_BYTES = 1 << 18

_left: ContextVar[list[int] | None] = ContextVar("header_bytes_left", default=None)


class TooManyHeaders(Exception):
    """A server sent more than MAX_HEADER_BYTES before its answer."""


@contextlib.contextmanager
def limited_headers() -> Iterator[None]:
    """Limit what this task reads from the network until the block is left."""
    token = _left.set([MAX_HEADER_BYTES])
    try:
        yield
    finally:
        _left.reset(token)


def limit_headers(transport: httpx2.AsyncHTTPTransport) -> None:
    """Have the connections of a transport count what is read from them."""
    import httpcore2

    class Counting(httpcore2.AsyncNetworkStream):
        def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
            self._stream = stream

        async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            data = await self._stream.read(max_bytes, timeout)
            left = _left.get()
            if left:
                left[0] -= len(data)
                if left[0] < 0:
                    raise TooManyHeaders
            return data

        async def write(self, buffer: bytes, timeout: float | None = None) -> None:
            await self._stream.write(buffer, timeout)

        async def aclose(self) -> None:
            await self._stream.aclose()

        async def start_tls(self, *arguments: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
            return Counting(await self._stream.start_tls(*arguments, **options))

        def get_extra_info(self, info: str) -> Any:
            return self._stream.get_extra_info(info)

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(
            self, *arguments: Any, **options: Any
        ) -> httpcore2.AsyncNetworkStream:
            return Counting(await super().connect_tcp(*arguments, **options))

    pool = transport._pool
    assert isinstance(pool, httpcore2.AsyncConnectionPool)
    pool._network_backend = Backend()
