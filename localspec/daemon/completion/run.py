"""Running a request's choices for an HTTP client, who reads them as they come or in one object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import Shape
from localspec.daemon.http.requests import ClientGone, answer, unless_gone
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import LocalspecError
from localspec.protocol import frames


@dataclass(frozen=True, slots=True)
class Run:
    """What runs, and what becomes of it; `during` is held meanwhile."""

    supervisor: Supervisor
    pair: frames.PairFiles
    requests: Sequence[frames.Generate]  # one per choice
    shape: Shape
    during: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)

    async def respond(self, request: Request, stream: bool) -> Response:
        """The answer, unless the client leaves first."""
        if stream:
            return EventStream(self._streamed, done=False)
        try:
            await unless_gone(request.receive, self._run())
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; nginx's number for this
        return answer(self.shape.whole())

    async def _streamed(self, emit: Emit) -> None:
        await self._run(emit)
        await emit(*self.shape.end())

    async def _run(self, emit: Emit | None = None) -> None:
        """All choices to their end. The first error ends all."""
        failed = False
        async with self.during:
            try:
                if len(self.requests) == 1:
                    await self._follow(0, emit)
                else:
                    await self._follow_all(emit)
            except LocalspecError:
                failed = True
                raise
            finally:
                for choice in self.shape.answer.choices:
                    choice.end(failed=failed)

    async def _follow_all(self, emit: Emit | None) -> None:
        tasks = [asyncio.create_task(self._follow(i, emit)) for i in range(len(self.requests))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, emit: Emit | None) -> None:
        generating = self.supervisor.generate(self.pair, self.requests[index])
        async with contextlib.aclosing(generating) as events:
            async for event in events:
                pieces = self.shape.answer.choices[index].take(event)
                if emit is not None:
                    await emit(*self.shape.chunks(index, event, pieces))
