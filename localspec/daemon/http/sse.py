"""Streams, of answers and of work that takes its time: server-sent events, or JSON a line."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.daemon.http import errors
from localspec.daemon.http.requests import ClientGone, unless_gone
from localspec.daemon.threads import Threads
from localspec.errors import Cancelled, LocalspecError

Value = TypeVar("Value", bound=msgspec.Struct)
PAUSE = 0.2  # seconds between two reports of progress
DONE = object()  # the value that is written as OpenAI's [DONE]
_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Named:
    """A value whose event has a name, as OpenAI's Responses and Anthropic's Messages give theirs."""

    name: str
    value: object


class Emit(Protocol):
    """Sends an event per value, and before the first call's the head, also where that has no value."""

    async def __call__(self, *values: object) -> None: ...


class EventStream(Response):
    """The events of some work. The head waits for the first: what fails before it has a status."""

    media_type = "text/event-stream"
    ping = b":\n\n"  # a comment

    def __init__(
        self,
        work: Callable[[Emit], Awaitable[object]],
        *,
        done: bool = True,
        failed: Callable[[LocalspecError], Sequence[object]] = errors.told,
        ping_s: float = 0.0,
    ) -> None:
        """`work` is called with what sends its events; `done`: [DONE] ends them, whatever came;
        `failed`: the events of an error, where others came before it. `ping_s`: seconds of silence
        after which a comment is sent, so that nobody on the way takes the stream for dead; 0: none is.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._done = done
        self._failed = failed
        self._ping_s = ping_s if self.ping else 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    def event(self, value: object) -> bytes:
        """A value as it is sent."""
        if isinstance(value, Named):
            return b"event: " + value.name.encode() + b"\n" + self.event(value.value)
        return b"data: " + (b"[DONE]" if value is DONE else _json.encode(value)) + b"\n\n"

    async def _send(self, send: Send) -> None:
        begun, last = False, time.monotonic()
        one_by_one = asyncio.Lock()  # where several choices are written at once

        async def emit(*values: object) -> None:
            await sent(b"".join(map(self.event, values)))

        async def sent(events: bytes) -> None:
            nonlocal begun, last
            async with one_by_one:
                last = time.monotonic()
                if not begun:
                    begun = True
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if events:
                    await send(_body(events))

        async def pings() -> None:
            while True:
                await asyncio.sleep(last + self._ping_s - time.monotonic())
                if time.monotonic() - last >= self._ping_s:
                    await sent(self.ping)

        try:
            async with _beside(pings() if self._ping_s > 0 else None):
                await self._work(emit)
        except Exception as error:  # a bug too: the client is told in the stream that it has
            if not begun:
                raise
            await emit(*self._failed(errors.known(error)))
        if self._done:
            await emit(DONE)
        await send(_body(b"", more=False))


class LineStream(EventStream):
    """The same as JSON, a value a line: Ollama's stream."""

    media_type = "application/x-ndjson"
    ping = b""

    def event(self, value: object) -> bytes:
        return _json.encode(value) + b"\n"


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None] | None) -> AsyncIterator[None]:
    """`work`, if there is any, is done while the body runs, and not longer."""
    task = asyncio.create_task(work) if work is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _body(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def reported(
    threads: Threads, work: Callable[[Callable[[Value], None]], Value]
) -> Callable[[Emit], Awaitable[None]]:
    """What `work`, run in one of the threads, reports on its way, then its result.

    When nobody listens any more, its next report raises Cancelled there and so ends it.
    """

    async def run(emit: Emit) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Value | None] = asyncio.Queue()
        left = threading.Event()

        def report(value: Value) -> None:
            if left.is_set():
                raise Cancelled("The client is no longer waiting.")
            loop.call_soon_threadsafe(inbox.put_nowait, value)

        task = asyncio.create_task(threads.run(work, report))
        task.add_done_callback(lambda _: inbox.put_nowait(None))
        try:
            while (value := await inbox.get()) is not None:
                await emit(value)
            await emit(task.result())
        finally:
            left.set()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    return run


def seldom(report: Callable[[Value], None]) -> Callable[[Value], None]:
    """The same, for work that could report at every step: the first at once, then not too often."""
    said = 0.0

    def told(value: Value) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PAUSE:
            said = now
            report(value)

    return told
