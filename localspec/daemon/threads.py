"""Blocking work in threads. Each kind of work has its own pool, so that none delays another.

The event loop's own pool is for short disk operations. Hashing a model takes minutes.
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
    """A pool for one kind of work, with a limited number of threads."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix=name)

    async def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*arguments, **keywords))


class Shared(Generic[Result]):
    """Long work by name. Callers share the result of running work, which ends once all of them have left."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._running: dict[str, _Work[Result]] = {}

    async def get(self, name: str, work: Callable[[threading.Event], Result]) -> Result:
        """Return the result of `work`. Its argument is an event that is set when no caller waits any more."""
        running = self._running.get(name)
        if running is None:
            running = self._running[name] = _Work(self._threads, work)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.cancelled.set()
                if self._running.get(name) is running:
                    del self._running[name]

    def close(self) -> None:
        """Cancel all running work."""
        for running in self._running.values():
            running.cancelled.set()


class _Work(Generic[Result]):
    def __init__(self, threads: Threads, work: Callable[[threading.Event], Result]) -> None:
        self.waiting = 0
        self.cancelled = threading.Event()
        self.task = asyncio.ensure_future(threads.run(work, self.cancelled))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
