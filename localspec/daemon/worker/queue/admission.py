"""Who may generate now: `parallel` requests at once; the others wait in order, up to a limit.

Editors' requests go ahead of all that wait, and have a place beyond `parallel` that no chat takes:
whoever types does not wait until an answer is written.
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

# Seconds after which to try again, where nobody knows how long it will take: long enough for one short
# answer to make room, short enough that nobody gives up. And at most, where that is known.
RETRY_AFTER, LAST_RETRY = 2, 600
EDITOR_PLACES = 1  # the engine decodes so many sequences beyond `parallel`


@dataclass(slots=True, eq=False)
class Waiter:
    job: Job
    called: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """A bounded first-come-first-served queue, and one for editors, before a number of places."""

    def __init__(
        self,
        parallel: int,
        limit: int,
        forecast: Forecast | None = None,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """`elsewhere`: how many wait in other queues, which count towards the same limit."""
        self.parallel = parallel
        self.limit = limit
        self._forecast = forecast or Forecast()
        self._elsewhere = elsewhere
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
        """What is before a request that waits, or would if it came now."""
        before = [waiter.job for waiter in self._editors]
        before += [] if job.editor else [waiter.job for waiter in self._chats]
        if job in before:
            before = before[: before.index(job)]
        beside = [each for each in self._running if job.editor or not each.editor]
        seconds = self._forecast.wait_s(beside, before, self.parallel + EDITOR_PLACES * job.editor)
        if not before and self._room(job):
            seconds = 0.0
        left = sum(map(self._forecast.prompt_left, [*self._running, *before]))
        whole = None if seconds is None else math.ceil(seconds)
        return Ahead(len(before), self.running + len(before), left, whole)

    @contextlib.asynccontextmanager
    async def place(self, job: Job | None = None) -> AsyncIterator[None]:
        """Hold a place for the body of the `with`.

        Raises:
            QueueFull: `limit` requests wait already.
            Unavailable: the daemon is ending.
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
        if not queue and self._room(job):
            self._start(job)
            return
        if self.waiting + self._elsewhere() >= self.limit:
            seconds = self._forecast.wait_s(self._running, [], self.running)
            raise QueueFull(
                f"The queue is full: {self.running} requests are running and {self.limit} are "
                "waiting. Try again in a moment, or set a larger `queue` in config.toml.",
                retry_after=_retry_after(seconds),
            )
        waiter = Waiter(job)
        queue.append(waiter)
        try:
            await waiter.called  # `_call` has counted us as running then
        except BaseException:
            called = waiter.called
            if called.done() and not called.cancelled() and called.exception() is None:
                self._leave(job)  # cancelled just after the place was handed to us
            else:
                with contextlib.suppress(ValueError):
                    queue.remove(waiter)
            raise

    def _room(self, job: Job) -> bool:
        chatting = sum(not each.editor for each in self._running)
        full = self.running >= self.parallel + EDITOR_PLACES
        return not full and (job.editor or chatting < self.parallel)

    def _start(self, job: Job) -> None:
        job.placed = True
        self._running.append(job)

    def _leave(self, job: Job) -> None:
        self._running.remove(job)
        for queue in (self._editors, self._chats):
            self._call(queue)

    def _call(self, queue: deque[Waiter]) -> None:
        """Let in whoever waits in `queue`, as far as there is room."""
        while queue and self._room(queue[0].job):
            waiter = queue.popleft()
            if not waiter.called.done():
                self._start(waiter.job)
                waiter.called.set_result(None)

    def close(self) -> None:
        """Let nobody else in; those that wait are still let in."""
        self._closed = True

    def abandon(self, error: LocalspecError) -> None:
        """Fail everybody who waits."""
        for queue in (self._editors, self._chats):
            while queue:
                called = queue.popleft().called
                if not called.done():
                    called.set_exception(error)


def _retry_after(seconds: float | None) -> int:
    return RETRY_AFTER if seconds is None else min(max(math.ceil(seconds), 1), LAST_RETRY)
