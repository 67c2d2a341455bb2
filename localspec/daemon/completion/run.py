"""Running a request for an HTTP client: streamed or whole, and ended when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import Composer
from localspec.daemon.http.requests import ClientGone, unless_gone
from localspec.daemon.http.sse import DONE, Emit, EventStream
from localspec.daemon.worker.process import Event
from localspec.daemon.worker.supervisor import Supervisor
from localspec.protocol import frames

Indexed = tuple[int, Event]
_json = msgspec.json.Encoder()


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


def streamed(
    events: AsyncGenerator[Indexed, None], composer: Composer, *, usage: bool
) -> EventStream:
    """The answer as it comes."""

    async def work(emit: Emit) -> None:
        async with contextlib.aclosing(events):
            async for index, event in events:
                await emit(*composer.chunks(index, event))
        if usage:
            await emit(composer.usage_chunk())
        if composer.says_done:
            await emit(DONE)

    return EventStream(work, done=False)
