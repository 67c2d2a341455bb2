"""Who may generate now: `parallel` requests at once; the others wait in order, up to a limit.

Editors' requests go ahead of all that wait, and have a place beyond `parallel` that no chat takes:
whoever types does not wait until an answer is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from localspec.errors import LocalspecError, QueueFull, Unavailable

# Long enough for one short answer to make room, short enough that nobody gives up.
RETRY_AFTER = 2  # seconds
EDITOR_PLACES = 1  # the engine decodes so many sequences beyond `parallel`

Waiter = asyncio.Future[None]


class Admission:
    """A bounded first-come-first-served queue, and one for editors, before a number of places."""

    def __init__(self, parallel: int, limit: int) -> None:
        self.parallel = parallel
        self.limit = limit
        self.running = 0
        self._chatting = 0  # of them, those that are no editor's
        self._chats: deque[Waiter] = deque()
        self._editors: deque[Waiter] = deque()
        self._closed: LocalspecError | None = None

    @property
    def waiting(self) -> int:
        return len(self._chats) + len(self._editors)

    @contextlib.asynccontextmanager
    async def place(self, *, editor: bool = False) -> AsyncIterator[None]:
        """Hold a place for the body of the `with`.

        Raises:
            QueueFull: `limit` requests wait already.
            Unavailable: the daemon is ending.
        """
        queue = self._editors if editor else self._chats
        await self._enter(queue)
        try:
            yield
        finally:
            self._leave(queue)

    async def _enter(self, queue: deque[Waiter]) -> None:
        if self._closed is not None:
            raise self._closed
        if not queue and self._room(queue):
            self._count(queue, 1)
            return
        if self.waiting >= self.limit:
            raise QueueFull(
                f"The queue is full: {self.running} requests are running and {self.limit} are "
                "waiting. Try again in a moment, or set a larger `queue` in config.toml.",
                retry_after=RETRY_AFTER,
            )
        waiter: Waiter = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        try:
            await waiter  # `_call` has counted us as running then
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(queue)  # cancelled just after the place was handed to us
            else:
                with contextlib.suppress(ValueError):
                    queue.remove(waiter)
            raise

    def _room(self, queue: deque[Waiter]) -> bool:
        full = self.running >= self.parallel + EDITOR_PLACES
        return not full and (queue is self._editors or self._chatting < self.parallel)

    def _count(self, queue: deque[Waiter], change: int) -> None:
        self.running += change
        self._chatting += change if queue is self._chats else 0

    def _leave(self, left: deque[Waiter]) -> None:
        self._count(left, -1)
        for queue in (self._editors, self._chats):
            self._call(queue)

    def _call(self, queue: deque[Waiter]) -> None:
        """Let in whoever waits in `queue`, as far as there is room."""
        while queue and self._room(queue):
            waiter = queue.popleft()
            if not waiter.done():
                self._count(queue, 1)
                waiter.set_result(None)

    def close(self) -> None:
        """Let nobody else in; those that wait are still let in."""
        self._closed = Unavailable(
            "The daemon is shutting down; try again.", retry_after=RETRY_AFTER
        )

    def abandon(self, error: LocalspecError) -> None:
        """Fail everybody who waits."""
        for queue in (self._editors, self._chats):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_exception(error)
