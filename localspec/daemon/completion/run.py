"""Running a request for an HTTP client: streamed or whole, and ended when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from localspec.daemon.completion.answer import Composer
from localspec.daemon.http import errors
from localspec.daemon.worker.supervisor import Event, Supervisor
from localspec.protocol import frames

Result = TypeVar("Result")
Indexed = tuple[int, Event]
_json = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed its connection."""


async def events_of(
    supervisor: Supervisor, pair: frames.PairFiles, requests: list[frames.Generate]
) -> AsyncGenerator[Indexed, None]:
    """The events of every choice, as they come, with its index. The first error ends all."""
    if len(requests) == 1:
        async with contextlib.aclosing(supervisor.generate(pair, requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    inbox: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()

    async def follow(index: int, request: frames.Generate) -> None:
        try:
            async for event in supervisor.generate(pair, request):
                inbox.put_nowait((index, event))
            inbox.put_nowait(None)
        except Exception as error:
            inbox.put_nowait(error)

    tasks = [asyncio.create_task(follow(*item)) for item in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """`work`'s result; when the client leaves first, `work` is cancelled.

    Raises:
        ClientGone: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(events: AsyncGenerator[Indexed, None], composer: Composer) -> bytes:
    """The complete answer as JSON."""
    async with contextlib.aclosing(events):
        async for index, event in events:
            composer.feed(index, event)
    return _json.encode(composer.whole())


async def whole_answer(
    request: Request, events: AsyncGenerator[Indexed, None], composer: Composer
) -> Response:
    """The complete answer, unless the client leaves first."""
    try:
        data = await unless_gone(request.receive, whole(events, composer))
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; nginx's number for this
    return Response(data, media_type="application/json")


class EventStream(Response):
    """Server-sent events. The head waits for the first event: what fails before has a status."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Indexed, None], composer: Composer, *, usage: bool
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._composer = composer
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self._lines(first):
                await send(_body(line, more=True))
        await send(_body(b"", more=False))

    async def _lines(self, first: Indexed) -> AsyncIterator[bytes]:
        try:
            for chunk in self._composer.chunks(*first):
                yield _data(chunk)
            async for index, event in self._events:
                for chunk in self._composer.chunks(index, event):
                    yield _data(chunk)
            if self._usage:
                yield _data(self._composer.usage_chunk())
            if self._composer.says_done:
                yield b"data: [DONE]\n\n"
        except Exception as error:
            yield errors.event(error)


def _data(value: object) -> bytes:
    return b"data: " + _json.encode(value) + b"\n\n"


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
