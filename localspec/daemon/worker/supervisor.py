"""Carries requests to an engine worker: through its pair's queue, into the worker, and once more.

A worker is started by the first request for its pair and ended after an idle time. When it dies, every
request that runs in it fails with the cause and the next one starts another. A death at the first decode is
tried again by itself, once, in safe mode; one that a request's text has caused fails that request, and the
others, unless part of their answer has been seen, are sent to the next worker. Other pairs' workers have no
part in that.

What another server answers for takes the same way, without a worker; where it does not answer, the pair
that is named in its place does.

`residents` keeps the pairs in memory and `loaded` the worker of each, `admission` is its queue, `forecast`
says how long that takes, `metrics` counts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon import logs
from localspec.daemon.worker.loaded import LoadedPair
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.process import (
    DEFAULT_COMMAND,
    Again,
    Event,
    Request,
    Running,
    Take,
    Worker,
)
from localspec.daemon.worker.purposes import check_purpose
from localspec.daemon.worker.queue.forecast import Job
from localspec.daemon.worker.residents import Residents
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Figures, UpstreamStatus
from localspec.protocol.frames import PairFiles
from localspec.protocol.settings import MAX_PARALLEL

log = logging.getLogger("localspec.supervisor")


# A pair of another server, and that its server does not answer.
Unanswered = tuple[PairFiles, errors.UpstreamUnreachable]


async def _unheard(_: Event) -> None:
    pass


def _noted(take: Take, news: str, stand_in: str) -> Take:
    """Return `take` for the events of another pair than the one that was asked."""

    async def noted(event: Event) -> None:
        if isinstance(event, frames.Started):
            event.news, event.stand_in = news, stand_in
        await take(event)

    return noted


class Elsewhere(Protocol):
    """The pairs that other servers answer for."""

    def running(
        self, pair: PairFiles, request: frames.Generate, job: Job
    ) -> AbstractAsyncContextManager[Running]:
        """One request on its way. Raises UpstreamUnreachable: nobody answers; UpstreamError…"""

    async def stand_in(
        self, request: frames.Generate, failed: Sequence[Unanswered]
    ) -> tuple[PairFiles, frames.Generate, str]:
        """Who answers in the place of the last of these, what it is asked, and the line that says so.

        Raises:
            UpstreamUnreachable: nobody does; why each of them does not.
        """

    async def ask(self, pair: PairFiles, request: Request) -> frames.Reply:
        """The answer to a small request."""

    def info(self, pair: PairFiles) -> frames.Loaded:
        """As of a pair that is loaded."""

    def statuses(self) -> list[UpstreamStatus]:
        """Of those that were asked."""

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs."""

    async def close(self) -> None:
        """The end."""


class Supervisor:
    """The pairs, their workers and the requests that run in them."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        elsewhere: Callable[[], Elsewhere] | None = None,
    ) -> None:
        """`worker_command` starts an engine; `--fd N` is appended. `elsewhere` is called when a pair of
        another server is asked first.
        """
        self.metrics = Metrics()
        self._others: Elsewhere | None = None
        self._elsewhere = elsewhere
        self.residents = Residents(
            config, paths, self.metrics.counts, worker_command=worker_command
        )

    def figures(self) -> Figures:
        """How answers went, for `localspec status`."""
        shown = self.residents.shown().forecast
        first, full = shown.prompt_per_second or (None, None)
        return msgspec.structs.replace(
            self.metrics.figures(), prompt_per_second=first, full_prompt_per_second=full
        )

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        pair: PairFiles,
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
        if self.residents.config.log_prompts:
            logs.prompt(request.conversation, msgspec.json.encode(request.prompt).decode())
        job = job or Job.of(request)
        failed: list[Unanswered] = []
        try:
            return await self._generate(pair, request, take, job)
        except errors.UpstreamUnreachable as error:
            failed.append((pair, error))
        while True:
            other, asked, news = await self.elsewhere.stand_in(request, failed)
            job.placed = False
            try:
                return await self._generate(other, asked, _noted(take, news, other.name), job)
            except errors.UpstreamUnreachable as error:
                failed.append((other, error))

    async def _generate(
        self, pair: PairFiles, request: frames.Generate, take: Take, job: Job
    ) -> frames.Done:
        asked = self.residents.of(pair.name)
        if pair.upstream is not None:
            asked.admission.parallel = MAX_PARALLEL  # how many at once is the server's own matter
        with asked.at_work(), self.metrics.watched() as watch:
            async with asked.admission.place(job):
                while True:
                    try:
                        async with self._running(asked, pair, request, job) as running:
                            while not watch.over:
                                # Of an answer's text its beginning alone is counted.
                                event = await (
                                    running.text(take) if watch.shown else running.next()
                                )
                                assert not isinstance(event, frames.Reply)
                                asked.forecast.sees(job, event)
                                if watch.sees(event):
                                    await take(event)
                        assert isinstance(event, frames.Done)
                        return event
                    except Again:
                        log.info("a request is sent once more, to a new worker")

    @contextlib.asynccontextmanager
    async def _running(
        self, asked: LoadedPair, pair: PairFiles, request: frames.Generate, job: Job
    ) -> AsyncIterator[Running]:
        """The request where its pair is: in a worker of ours, or with another server."""
        if pair.upstream is not None:
            async with self.elsewhere.running(pair, request, job) as running:
                yield running
            return
        worker = await self._worker_for(asked, pair, request)
        with worker.running(request, job) as running:
            yield running

    async def ask(self, pair: PairFiles, request: Request) -> frames.Reply:
        """The answer to a small request (tokenize…), which does not wait in the queue.

        Raises:
            PairSetAside, LoadFailed, WorkerDied, InvalidRequest…: why there is none.
        """
        if pair.upstream is not None:
            check_purpose(pair, request)
            return await self.elsewhere.ask(pair, request)
        asked = self.residents.of(pair.name)
        with asked.at_work():
            while True:
                with contextlib.suppress(Again):
                    worker = await self._worker_for(asked, pair, request)
                    with worker.running(request) as running:
                        reply = await running.next()
                    assert isinstance(reply, frames.Reply)
                    if isinstance(request, frames.Embed | frames.Rerank):
                        self.metrics.embedded(reply.value["tokens"])
                    return reply

    async def _worker_for(self, asked: LoadedPair, pair: PairFiles, request: Request) -> Worker:
        check_purpose(pair, request)
        ready = await asked.ready(pair)
        asked.forecast.uses(ready.info)
        deadly = self.residents.deadly_texts
        if deadly.hashes:
            deadly.check(asked.cause(pair), request)
        return ready.engine.worker

    async def ready(self, pair: PairFiles) -> frames.Loaded:
        """What is loaded of a pair, which is loaded for it. Raises as LoadedPair.ready."""
        if pair.upstream is not None:
            return self.elsewhere.info(pair)
        asked = self.residents.of(pair.name)
        with asked.at_work():
            return (await asked.ready(pair)).info

    # ------------------------------------------------------------------ other servers

    @property
    def elsewhere(self) -> Elsewhere:
        if self._others is None:
            assert self._elsewhere is not None
            self._others = self._elsewhere()
        return self._others

    def upstreams(self) -> list[UpstreamStatus]:
        """The pairs of other servers that were asked."""
        return self._others.statuses() if self._others else []

    # ------------------------------------------------------------------ the end

    def drain(self) -> int:
        """Let nobody else in; how many run."""
        self.residents.drain()
        return self.residents.running()

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs or waits."""
        for each in self.residents.all:
            each.abort(error)
        if self._others:
            self._others.abort(error)

    async def close(self) -> None:
        """The end: workers and connections are gone when this returns."""
        if self._others:
            await self._others.close()
        await self.residents.close()

    async def release(self, name: str | None = None) -> list[str]:
        """Unload the pair of that name, or all, unless they are at work; those that were loaded.

        Raises:
            Conflict: some are answering or being loaded; with all, the others have been unloaded.
        """
        named = [each for each in self.residents.all if name in (None, each.name)]
        busy = [each.name for each in named if each.busy]
        released = await self.residents.unload(
            {each.name for each in named if each.name not in busy}
        )
        if len(busy) > 1:
            raise errors.Conflict(
                f"These pairs are busy: {', '.join(busy)}; wait for their answers, then try again."
            )
        if busy:
            raise errors.Conflict(
                f"The pair {busy[0]} is busy; wait for its answer, then try again."
            )
        return released
