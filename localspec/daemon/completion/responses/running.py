"""List the responses under way, which can be read and cancelled by their ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from localspec.daemon.completion.responses.shape import ResponsesShape
from localspec.errors import Cancelled
from localspec.protocol.clients.responses.items import ResponseObject


class Running:
    """The responses under way in one daemon."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[ResponsesShape, asyncio.Timeout, asyncio.Event]] = {}

    @contextlib.asynccontextmanager
    async def under_way(self, shape: ResponsesShape) -> AsyncIterator[None]:
        """Mark a response as under way until it has ended.

        Raises:
            Cancelled: `cancel` was called for this response.
        """
        name, timeout, finished = shape.response.id, asyncio.timeout(None), asyncio.Event()
        self._under_way[name] = shape, timeout, finished
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise Cancelled(f"The response {name} was cancelled.") from None
        finally:
            del self._under_way[name]
            finished.set()

    def get(self, name: str) -> ResponseObject | None:
        """Return a response as far as it is written; None if it is not under way."""
        entry = self._under_way.get(name)
        return entry[0].now() if entry else None

    async def cancel(self, name: str) -> ResponseObject | None:
        """End a response and return what is written of it; None if it is not under way."""
        entry = self._under_way.get(name)
        if entry is None:
            return None
        shape, timeout, finished = entry
        timeout.reschedule(asyncio.get_running_loop().time())
        await finished.wait()
        return shape.now("cancelled")
