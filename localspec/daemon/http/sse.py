"""Server-sent events about work that takes its time: pulls, verification, measurements."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.daemon.completion.run import ClientGone, unless_gone
from localspec.daemon.http import errors
from localspec.daemon.threads import Threads
from localspec.errors import Cancelled

Value = TypeVar("Value", bound=msgspec.Struct)


class Stream(Response):
    """One event per value. The head waits for the first: what fails before it has a status."""

    media_type = "text/event-stream"

    def __init__(self, values: AsyncGenerator[msgspec.Struct, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._values = values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async with contextlib.aclosing(self._values):
            first = await anext(self._values)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await event(_data(first))
                async for value in self._values:
                    await event(_data(value))
            except Exception as error:
                await event(errors.event(error))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _data(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def reported(
    threads: Threads, work: Callable[[Callable[[Value], None]], Value]
) -> AsyncGenerator[Value, None]:
    """What `work`, run in one of the threads, reports on its way, then its result.

    When nobody listens any more, its next report raises Cancelled there and so ends it.
    """
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Value | None] = asyncio.Queue()
    left = threading.Event()

    def report(value: Value) -> None:
        if left.is_set():
            raise Cancelled("Nobody waits for it any more.")
        loop.call_soon_threadsafe(inbox.put_nowait, value)

    task = asyncio.create_task(threads.run(work, report))
    task.add_done_callback(lambda _: inbox.put_nowait(None))
    try:
        while (value := await inbox.get()) is not None:
            yield value
        yield task.result()
    finally:
        left.set()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
