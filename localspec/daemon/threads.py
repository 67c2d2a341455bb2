"""Work that blocks, in threads: each kind has a pool of its own, so that none holds up another.

The event loop's own pool is for short looks at the disk. Hashing a model takes minutes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Threads:
    """A pool for one kind of work, at most so many at once; the others wait for their turn."""

    def __init__(self, name: str, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)

    async def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*arguments, **keywords))


class Shared(Generic[Result]):
    """Long work by name: whoever asks while it runs gets its result, and it ends when all have left."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._running: dict[str, _Work[Result]] = {}

    async def get(self, name: str, work: Callable[[threading.Event], Result]) -> Result:
        """What `work` returns or raises; its event is set when nobody waits for that any more."""
        running = self._running.get(name)
        if running is None:
            running = self._running[name] = _Work(self._threads, work)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.left.set()
                if self._running.get(name) is running:
                    del self._running[name]

    def close(self) -> None:
        """End all of it."""
        for running in self._running.values():
            running.left.set()


class _Work(Generic[Result]):
    def __init__(self, threads: Threads, work: Callable[[threading.Event], Result]) -> None:
        self.waiting = 0
        self.left = threading.Event()
        self.task = asyncio.ensure_future(threads.run(work, self.left))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
