"""Carries requests to the engine worker: through the queue, into the worker, and once more.

A worker is started by the first request and ended after an idle time. When it dies, every running
request fails with the cause and the next one starts another. A death at the first decode is tried
again by itself, once, in safe mode; one that a request's text has caused fails that request, and the
others, unless part of their answer has been seen, are sent to the next worker.

`loaded` keeps the worker and its pair, `admission` is the queue, `forecast` says how long it takes,
`metrics` counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon import logs
from localspec.daemon.worker.admission import Admission
from localspec.daemon.worker.forecast import Forecast, Job
from localspec.daemon.worker.loaded import LoadedPair
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.process import DEFAULT_COMMAND, Again, Event, Request, Take, Worker
from localspec.daemon.worker.purposes import check_purpose
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Figures

log = logging.getLogger("localspec.supervisor")


async def _unheard(_: Event) -> None:
    pass


class Supervisor:
    """The worker, its pair and the requests that run in it."""

    def __init__(
        self, config: Config, paths: Paths, *, worker_command: Sequence[str] = DEFAULT_COMMAND
    ) -> None:
        """`worker_command` starts an engine; `--fd N` is appended."""
        self.forecast = Forecast()
        self.admission = Admission(config.parallel, config.queue, self.forecast)
        self.metrics = Metrics()
        self.loaded = LoadedPair(
            config,
            paths,
            self.admission,
            self.metrics.counts,
            worker_command=worker_command,
            load_is_over=self._rest_if_idle,
        )
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is being loaded."""
        return self.loaded.busy or self.admission.running > 0

    def configure(self, config: Config) -> None:
        """Use another configuration: at once, or from the next request, which loads the pair anew."""
        self.loaded.config = config
        self.admission.limit = config.queue
        self._rest_if_idle()  # by the new time

    def figures(self) -> Figures:
        """How answers went, for `localspec status`."""
        first, full = self.forecast.prompt_per_second or (None, None)
        return msgspec.structs.replace(
            self.metrics.figures(), prompt_per_second=first, full_prompt_per_second=full
        )

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        pair: frames.PairFiles,
        request: frames.Generate,
        take: Take = _unheard,
        job: Job | None = None,
    ) -> frames.Done:
        """Have `take` called with Started, Delta…, Done; returns the last. Where it raises, or this is
        cancelled, the request is cancelled in the worker. `job`: what others see of it.

        Raises:
            QueueFull, Unavailable, PairSetAside, LoadFailed: before it started.
            WorkerDied, WorkerTimeout, InvalidRequest…: the worker's own refusals and its death.
        """
        if self.loaded.config.log_prompts:
            logs.prompt(request.conversation, msgspec.json.encode(request.prompt).decode())
        job = job or Job.of(request)
        with self._at_work(), self.metrics.watched() as watch:
            async with self.admission.place(job):
                while True:
                    try:
                        worker = await self._worker_for(pair, request)
                        with worker.running(request, job) as running:
                            while not watch.over:
                                # Of an answer's text its beginning alone is counted.
                                event = await (
                                    running.text(take) if watch.shown else running.next()
                                )
                                assert not isinstance(event, frames.Reply)
                                self.forecast.sees(job, event)
                                if watch.sees(event):
                                    await take(event)
                        assert isinstance(event, frames.Done)
                        return event
                    except Again:
                        log.info("a request is sent once more, to a new worker")

    async def ask(self, pair: frames.PairFiles, request: Request) -> frames.Reply:
        """The answer to a small request (tokenize…), which does not wait in the queue.

        Raises:
            PairSetAside, LoadFailed, WorkerDied, InvalidRequest…: why there is none.
        """
        with self._at_work():
            while True:
                with contextlib.suppress(Again):
                    worker = await self._worker_for(pair, request)
                    with worker.running(request) as running:
                        reply = await running.next()
                    assert isinstance(reply, frames.Reply)
                    return reply

    async def _worker_for(self, pair: frames.PairFiles, request: Request) -> Worker:
        check_purpose(pair, request)
        ready = await self.loaded.ready(pair)
        self.forecast.uses(ready.info)
        worker = ready.engine.worker
        if (deadly := self.loaded.deadly_texts).hashes:
            deadly.check(self.loaded.cause(pair), request)
        return worker

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs or waits."""
        self.admission.abandon(error)
        self.loaded.abort(error)

    # ------------------------------------------------------------------ idle, and the end

    async def release(self) -> bool:
        """Unload the pair unless it is at work; False when nothing was loaded.

        Raises:
            Conflict: it is answering or being loaded.
        """
        if self.busy:
            raise errors.Conflict("The pair is busy; wait for its answer, then try again.")
        loaded = self.loaded.worker is not None
        await self.loaded.unload()
        return loaded

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        self._stop_resting()
        await self.loaded.close()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Nothing is unloaded for want of work while the body runs."""
        self._stop_resting()
        try:
            yield
        finally:
            self._rest_if_idle()

    def _stop_resting(self) -> None:
        if self._idle_timer:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _rest_if_idle(self) -> None:
        """Count down to unloading once nothing runs."""
        self._stop_resting()
        seconds = self.loaded.config.idle_unload
        if not self.busy and self.loaded.worker and seconds:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(seconds, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        if not self.busy:
            log.info("idle for %g s: the pair is unloaded", self.loaded.config.idle_unload)
            self.loaded.unload_soon()
