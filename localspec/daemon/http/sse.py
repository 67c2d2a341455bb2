"""Streamed responses of answers and of long work: server-sent events, or one JSON value per line."""

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
from localspec.daemon.http.requests import ClientGone, while_connected
from localspec.daemon.logs import ThreadPool
from localspec.errors import Cancelled, LocalspecError

Value = TypeVar("Value", bound=msgspec.Struct)
REPORT_INTERVAL_S = 0.2  # the shortest time between two progress reports, in seconds
DONE = object()  # a value that is written as OpenAI's [DONE]
_json = msgspec.json.Encoder()
# What httpx and Python end a line at, besides what JSON escapes.
_LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"]


@dataclass(frozen=True, slots=True)
class NamedEvent:
    """A value whose event has a name, as in OpenAI's Responses and Anthropic's Messages."""

    name: str
    value: object


class Emit(Protocol):
    """A function that sends one event per value. The first call sends the head, even without a value."""

    async def __call__(self, *values: object) -> None: ...


class EventStream(Response):
    """The events of some work as a response.

    The head is sent with the first event, so a failure before it has an HTTP status of its own.
    """

    media_type = "text/event-stream"
    ping = b":\n\n"  # a comment

    def __init__(
        self,
        work: Callable[[Emit], Awaitable[object]],
        *,
        done: bool = True,
        failed: Callable[[LocalspecError], Sequence[object]] = errors.stream_error,
        ping_s: float = 0.0,
        pings: Callable[[], Sequence[object]] = tuple,
    ) -> None:
        """Create the response. `work` is called with the function that sends its events.

        `done`: whether [DONE] ends the stream, also after an error.
        `failed`: returns the events for an error that occurs after the first event.
        `ping_s`: seconds of silence after which a ping is sent, so that neither a proxy nor a client
        takes the stream for dead; 0 for none.
        `pings`: returns the events of a ping; if there are none, it is `ping`, which no client reads.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._done = done
        self._failed = failed
        self._ping_s = ping_s
        self._pings = pings

    @classmethod
    def comment(cls, text: str) -> Sequence[object]:
        """Return an event that only people read, if there is such a thing in this format."""
        return (f": {text}\n\n".encode(),)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self.run(send))

    def event(self, value: object) -> bytes:
        """Return the bytes of the event for a value; bytes are events already."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, NamedEvent):
            return b"event: " + value.name.encode() + b"\n" + self.event(value.value)
        return b"data: " + (b"[DONE]" if value is DONE else _encode_line(value)) + b"\n\n"

    def failure(self, error: LocalspecError) -> bytes:
        """Return the events for an error that ends the stream after its first event."""
        return b"".join(map(self.event, self._failed(error)))

    async def run(self, send: Send) -> None:
        """Do the work and send its events, whether or not there is a client."""
        begun, last_sent = False, time.monotonic()
        send_lock = asyncio.Lock()  # several choices may be written at once

        async def emit(*values: object) -> None:
            await send_events(b"".join(map(self.event, values)))

        async def send_events(events: bytes) -> None:
            nonlocal begun, last_sent
            async with send_lock:
                if events or not begun:  # text that is held back or hidden ends no silence
                    last_sent = time.monotonic()
                if not begun:
                    begun = True
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if events:
                    await send(_body_message(events))

        async def send_pings() -> None:
            while True:
                await asyncio.sleep(last_sent + self._ping_s - time.monotonic())
                if time.monotonic() - last_sent >= self._ping_s:
                    await send_events(b"".join(map(self.event, self._pings())) or self.ping)

        try:
            async with running_beside(send_pings() if self._ping_s > 0 else None):
                await self._work(emit)
        except Exception as error:  # once the stream has begun, even a bug becomes an event
            if not begun:
                raise
            await send_events(self.failure(errors.as_localspec_error(error)))
        if self._done:
            await emit(DONE)
        await send(_body_message(b"", more=False))


class LineStream(EventStream):
    """The same stream as JSON with one value per line, as Ollama sends it."""

    media_type = "application/x-ndjson"
    # White space before a JSON value. Clients parse each line, and would fail at an empty one.
    ping = b" "

    @classmethod
    def comment(cls, text: str) -> Sequence[object]:
        return ()

    def event(self, value: object) -> bytes:
        return _encode_line(value) + b"\n"


def _encode_line(value: object) -> bytes:
    """Return a value as JSON that no client takes for several lines."""
    line = _json.encode(value)
    for end, escape in _LINE_ENDS:
        line = line.replace(end, escape)
    return line


@contextlib.asynccontextmanager
async def running_beside(work: Coroutine[None, None, None] | None) -> AsyncIterator[None]:
    """Run `work`, if there is any, in a task while the body runs, and cancel it afterwards."""
    task = asyncio.create_task(work) if work is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _body_message(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def stream_reports(
    threads: ThreadPool, work: Callable[[Callable[[Value], None]], Value]
) -> Callable[[Emit], Awaitable[None]]:
    """Return work for an EventStream: the reports of `work`, which runs in a thread, then its result.

    When the client leaves, the next report raises Cancelled inside `work` and so ends it.
    """

    async def run(emit: Emit) -> None:
        loop = asyncio.get_running_loop()
        reports: asyncio.Queue[Value | None] = asyncio.Queue()
        client_left = threading.Event()

        def report(value: Value) -> None:
            if client_left.is_set():
                raise Cancelled("The client is no longer waiting.")
            loop.call_soon_threadsafe(reports.put_nowait, value)

        task = asyncio.create_task(threads.run(work, report))
        task.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (value := await reports.get()) is not None:
                await emit(value)
            await emit(task.result())
        finally:
            client_left.set()
            # The work may end long after the client left. Retrieve its exception, or asyncio logs a warning.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    return run


def rate_limited(report: Callable[[Value], None]) -> Callable[[Value], None]:
    """Return `report`, limited to one call per REPORT_INTERVAL_S. Calls in between are dropped."""
    last_report = 0.0

    def limited_report(value: Value) -> None:
        nonlocal last_report
        now = time.monotonic()
        if now - last_report >= REPORT_INTERVAL_S:
            last_report = now
            report(value)

    return limited_report
