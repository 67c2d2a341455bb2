"""Who may generate now: `parallel` requests at once; the others wait in order, up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from localspec.errors import LocalspecError, QueueFull, Unavailable

# Long enough for one short answer to make room, short enough that nobody gives up.
RETRY_AFTER = 2  # seconds


class Admission:
    """A bounded first-come-first-served queue in front of a number of places."""

    def __init__(self, parallel: int, limit: int) -> None:
        self.parallel = parallel
        self.limit = limit
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed: LocalspecError | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, *, ahead: bool = False) -> AsyncIterator[None]:
        """Hold a place for the body of the `with`; `ahead` of everybody who waits.

        Raises:
            QueueFull: `limit` requests wait already.
            Unavailable: the daemon is ending.
        """
        await self._enter(ahead)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, ahead: bool) -> None:
        if self._closed is not None:
            raise self._closed
        if self.running < self.parallel and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= self.limit:
            raise QueueFull(
                f"The queue is full: {self.running} requests run and {self.limit} wait. "
                "Try again in a moment, or set a larger `queue` in config.toml.",
                retry_after=RETRY_AFTER,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if ahead:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            await turn  # `_leave` hands its place over: `running` counts it already
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # cancelled just after the place was handed to us
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def close(self) -> None:
        """Let nobody else in; those that wait still get their turn."""
        self._closed = Unavailable("The daemon is ending; try again.", retry_after=RETRY_AFTER)

    def abandon(self, error: LocalspecError) -> None:
        """Fail everybody who waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
