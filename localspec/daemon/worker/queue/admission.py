"""Admit up to `parallel` requests at once. The others wait in order, up to a limit.

Editors' requests go ahead of all that wait, and have a place beyond `parallel` that no chat can take, so a
person who types does not wait for the end of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from localspec.daemon.worker.queue.forecast import Forecast, Job
from localspec.errors import LocalspecError, QueueFull, Unavailable
from localspec.protocol.answers import Ahead

# Seconds for Retry-After: the default if no forecast is possible, enough for one short answer to end, and the
# maximum if there is a forecast.
RETRY_AFTER, LAST_RETRY = 2, 600
EDITOR_PLACES = 1  # sequences that the engine decodes beyond `parallel`


@dataclass(slots=True, eq=False)
class Waiter:
    job: Job
    called: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """A number of places, with a bounded first-come-first-served queue before them, and one for editors."""

    def __init__(
        self,
        parallel: int,
        limit: int,
        forecast: Forecast | None = None,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the queue. `elsewhere` returns how many requests wait in other queues.

        These count towards the same limit.
        """
        self.parallel = parallel
        self.limit = limit
        self._forecast = forecast or Forecast()
        self._count_elsewhere = elsewhere
        self._running: list[Job] = []
        self._chats: deque[Waiter] = deque()
        self._editors: deque[Waiter] = deque()
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._chats) + len(self._editors)

    def ahead(self, job: Job) -> Ahead:
        """Return what is ahead of a request that waits, or that would wait if it came now."""
        queued = [waiter.job for waiter in self._editors]
        queued += [] if job.editor else [waiter.job for waiter in self._chats]
        if job in queued:
            queued = queued[: queued.index(job)]
        running = [other for other in self._running if job.editor or not other.editor]
        seconds = self._forecast.wait_s(running, queued, self.parallel + EDITOR_PLACES * job.editor)
        if not queued and self._has_room(job):
            seconds = 0.0
        prompt_tokens = sum(map(self._forecast.prompt_left, [*self._running, *queued]))
        wait_s = None if seconds is None else math.ceil(seconds)
        return Ahead(len(queued), self.running + len(queued), prompt_tokens, wait_s)

    @contextlib.asynccontextmanager
    async def place(self, job: Job | None = None) -> AsyncIterator[None]:
        """Hold a place for the block.

        Raises:
            QueueFull: `limit` requests wait already.
            Unavailable: The daemon is ending.
        """
        job = job or Job()
        await self._enter(job)
        try:
            yield
        finally:
            self._leave(job)

    async def _enter(self, job: Job) -> None:
        queue = self._editors if job.editor else self._chats
        if self._closed:
            seconds = self._forecast.over_s(self._running)
            raise Unavailable(
                "The daemon is shutting down; try again.", retry_after=_retry_after(seconds)
            )
        if not queue and self._has_room(job):
            self._start(job)
            return
        if self.waiting + self._count_elsewhere() >= self.limit:
            seconds = self._forecast.wait_s(self._running, [], self.running)
            raise QueueFull(
                f"The queue is full: {self.running} requests are running and {self.limit} are "
                "waiting. Try again in a moment, or set a larger `queue` in config.toml.",
                retry_after=_retry_after(seconds),
            )
        waiter = Waiter(job)
        queue.append(waiter)
        try:
            await waiter.called  # by then `_admit_waiting` has counted this request as running
        except BaseException:
            called = waiter.called
            if called.done() and not called.cancelled() and called.exception() is None:
                self._leave(job)  # cancelled just after it got the place
            else:
                with contextlib.suppress(ValueError):
                    queue.remove(waiter)
            raise

    def _has_room(self, job: Job) -> bool:
        chats = sum(not other.editor for other in self._running)
        full = self.running >= self.parallel + EDITOR_PLACES
        return not full and (job.editor or chats < self.parallel)

    def _start(self, job: Job) -> None:
        job.placed = True
        self._running.append(job)

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        for queue in (self._editors, self._chats):
            self._admit_waiting(queue)

    def _admit_waiting(self, queue: deque[Waiter]) -> None:
        """Admit requests that wait in `queue` as long as there is room."""
        while queue and self._has_room(queue[0].job):
            waiter = queue.popleft()
            if not waiter.called.done():
                self._start(waiter.job)
                waiter.called.set_result(None)

    def close(self) -> None:
        """Admit no new requests. Those that wait are still admitted."""
        self._closed = True

    def abandon(self, error: LocalspecError) -> None:
        """Fail every request that waits."""
        for queue in (self._editors, self._chats):
            while queue:
                called = queue.popleft().called
                if not called.done():
                    called.set_exception(error)


def _retry_after(seconds: float | None) -> int:
    return RETRY_AFTER if seconds is None else min(max(math.ceil(seconds), 1), LAST_RETRY)
