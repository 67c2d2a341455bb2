"""Responses under way, which may be looked at and cancelled by their ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from localspec.daemon.completion.responses.shape import ResponsesShape
from localspec.errors import Cancelled
from localspec.protocol.clients.responses.items import ResponseObject


class Running:
    """Of one daemon."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[ResponsesShape, asyncio.Timeout, asyncio.Event]] = {}

    @contextlib.asynccontextmanager
    async def under_way(self, shape: ResponsesShape) -> AsyncIterator[None]:
        """To be held until the response has ended.

        Raises:
            Cancelled: somebody wanted that.
        """
        name, timeout, over = shape.response.id, asyncio.timeout(None), asyncio.Event()
        self._under_way[name] = shape, timeout, over
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise Cancelled(f"The response {name} was cancelled.") from None
        finally:
            del self._under_way[name]
            over.set()

    def get(self, name: str) -> ResponseObject | None:
        """A response under way, as far as it is; None where none of this id is."""
        found = self._under_way.get(name)
        return found[0].now() if found else None

    async def cancel(self, name: str) -> ResponseObject | None:
        """End a response under way; as it is then, or None where none of this id is under way."""
        found = self._under_way.get(name)
        if found is None:
            return None
        shape, timeout, over = found
        timeout.reschedule(asyncio.get_running_loop().time())
        await over.wait()
        return shape.now("cancelled")
