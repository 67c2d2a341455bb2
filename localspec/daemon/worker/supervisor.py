"""Carry requests to engine workers: through the queue of the pair, into the worker, and once more if it dies.

The first request for a pair starts its worker, and an idle time ends it. If the worker dies, every request
in it fails with the cause, and the next request starts another one. A death at the first decode is tried
again once in safe mode. A death caused by a request's text fails that request. The others are sent to the
next worker, unless part of their answer was already shown. The workers of other pairs are not affected.

Requests for pairs of other servers take the same way without a worker. If the server does not respond, the
pair's fallback answers.

`residents` keeps the pairs in memory and `loaded` the worker of each one. `admission` is its queue,
`forecast` estimates times, and `metrics` counts.
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
    Event,
    EventHandler,
    Request,
    RetryRequest,
    RunningRequest,
    Worker,
)
from localspec.daemon.worker.purposes import check_purpose
from localspec.daemon.worker.queue import Job
from localspec.daemon.worker.residents import ResidentTable
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Figures, UpstreamStatus
from localspec.protocol.frames import PairFiles
from localspec.protocol.settings import MAX_PARALLEL

log = logging.getLogger("localspec.supervisor")


# A pair of another server, and the error that its server does not respond.
FailedUpstream = tuple[PairFiles, errors.UpstreamUnreachable]


async def _ignore_event(_: Event) -> None:
    pass


def _with_notice(take: EventHandler, notice: str, stand_in: str) -> EventHandler:
    """Return `take` with a notice in the first event that another pair answers."""

    async def take_with_notice(event: Event) -> None:
        if isinstance(event, frames.Started):
            event.news, event.stand_in = notice, stand_in
        await take(event)

    return take_with_notice


def _encode_without_pictures(prompt: frames.Prompt) -> str:
    """Return a prompt as JSON. One picture would fill the log, so only its mark in the text is left."""
    if isinstance(prompt, frames.ChatPrompt):
        prompt = msgspec.structs.replace(prompt, pictures=[])
    return msgspec.json.encode(prompt).decode()


class UpstreamPairs(Protocol):
    """The pairs that other servers answer for."""

    def running(
        self, pair: PairFiles, request: frames.Generate, job: Job
    ) -> AbstractAsyncContextManager[RunningRequest]:
        """Run one request. Raises UpstreamUnreachable if the server does not respond, or UpstreamError."""

    async def fallback_pair(
        self, request: frames.Generate, failed: Sequence[FailedUpstream]
    ) -> tuple[PairFiles, frames.Generate, str]:
        """Return the pair that answers in place of the last of these, its request, and a note about it.

        Raises:
            UpstreamUnreachable: No pair can answer. The message has the reason for each.
        """

    async def ask(self, pair: PairFiles, request: Request) -> frames.Reply:
        """Return the response to a small request."""

    def info(self, pair: PairFiles) -> frames.Loaded:
        """Return the information of a loaded pair."""

    def statuses(self) -> list[UpstreamStatus]:
        """Return the status of the servers that were used."""

    def forget(self, name: str) -> None:
        """Drop the server of a pair that was removed. Its running requests go on."""

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail every running request."""

    async def close(self) -> None:
        """Close all connections."""


class Supervisor:
    """The pairs, their workers, and the requests that run in them."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        elsewhere: Callable[[], UpstreamPairs] | None = None,
    ) -> None:
        """Create the supervisor. `worker_command` starts an engine, with `--fd N` appended.

        `elsewhere` is called at the first request for a pair of another server.
        """
        self.metrics = Metrics()
        self._upstreams: UpstreamPairs | None = None
        self._create_upstreams = elsewhere
        self.residents = ResidentTable(
            config, paths, self.metrics.counts, worker_command=worker_command
        )

    def figures(self) -> Figures:
        """Return the figures of all pairs' answers for `localspec status`."""
        return self.metrics.figures(self.residents.most_recent().forecast.prompt_per_second)

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        pair: PairFiles,
        request: frames.Generate,
        take: EventHandler = _ignore_event,
        job: Job | None = None,
    ) -> frames.Done:
        """Call `take` with Started, Delta… and Done, and return Done.

        If `take` raises or this is cancelled, the request is cancelled in the worker. `job` is what the queue
        knows about the request.

        Raises:
            QueueFull, Unavailable, PairSetAside, LoadFailed: The request did not start.
            WorkerDied, WorkerTimeout, InvalidRequest…: The worker ended or refused the request.
        """
        if self.residents.config.log_prompts and not request.private:
            logs.log_prompt(request.conversation, _encode_without_pictures(request.prompt))
        job = job or Job.of(request)
        failed: list[FailedUpstream] = []
        try:
            return await self._generate(pair, request, take, job)
        except errors.UpstreamUnreachable as error:
            failed.append((pair, error))
        while True:
            fallback, adapted, notice = await self.upstream_pairs.fallback_pair(request, failed)
            job.placed = False
            try:
                return await self._generate(
                    fallback, adapted, _with_notice(take, notice, fallback.name), job
                )
            except errors.UpstreamUnreachable as error:
                failed.append((fallback, error))

    async def _generate(
        self, pair: PairFiles, request: frames.Generate, take: EventHandler, job: Job
    ) -> frames.Done:
        loaded_pair = self._admitting(pair)
        elsewhere = pair.upstream is not None
        with (
            loaded_pair.in_use(),
            loaded_pair.metrics.watch(elsewhere=elsewhere) as own_watch,
            self.metrics.watch(elsewhere=elsewhere) as watch,
        ):
            async with loaded_pair.admission.place(job):
                while True:
                    try:
                        async with self._run_in_place(loaded_pair, pair, request, job) as running:
                            while not watch.over:
                                # Only the first text is counted, so further text takes the short way.
                                event = await (
                                    running.pass_text(take) if watch.shown else running.next()
                                )
                                assert not isinstance(event, frames.Reply)
                                loaded_pair.forecast.learn(job, event)
                                own_watch.count_event(event)
                                if watch.count_event(event):
                                    await take(event)
                        assert isinstance(event, frames.Done)
                        return event
                    except RetryRequest:
                        log.info("a request is sent once more, to a new worker")

    def check_room(self, pair: PairFiles, request: frames.Generate) -> None:
        """Check that a request would be admitted or queued now. Raises QueueFull or Unavailable."""
        self._admitting(pair).admission.check_room(Job.of(request))

    def _admitting(self, pair: PairFiles) -> LoadedPair:
        loaded_pair = self.residents.get(pair.name)
        if pair.upstream is not None:
            # How many at once is the server's own matter.
            loaded_pair.admission.parallel = MAX_PARALLEL
        return loaded_pair

    @contextlib.asynccontextmanager
    async def _run_in_place(
        self, loaded_pair: LoadedPair, pair: PairFiles, request: frames.Generate, job: Job
    ) -> AsyncIterator[RunningRequest]:
        """Run the request where its pair is: in a worker of ours, or on another server."""
        if pair.upstream is not None:
            async with self.upstream_pairs.running(pair, request, job) as running:
                yield running
            return
        worker = await self._worker_for(loaded_pair, pair, request)
        with worker.running(request, job) as running:
            yield running

    async def end_thoughts(self, pair: PairFiles, requests: Sequence[frames.Generate]) -> bool:
        """End the thoughts of running requests. Return False if none of them is in its thoughts here."""
        if pair.upstream is not None or (worker := self.residents.get(pair.name).worker) is None:
            return False
        ended = [await worker.end_thoughts(request) for request in requests]
        return any(ended)

    async def ask(self, pair: PairFiles, request: Request) -> frames.Reply:
        """Return the reply to a small request (tokenize…), which does not wait in the queue.

        Raises:
            PairSetAside, LoadFailed, WorkerDied, InvalidRequest…: There is no reply.
        """
        if pair.upstream is not None:
            check_purpose(pair, request)
            return await self.upstream_pairs.ask(pair, request)
        loaded_pair = self.residents.get(pair.name)
        with loaded_pair.in_use():
            while True:
                with contextlib.suppress(RetryRequest):
                    worker = await self._worker_for(loaded_pair, pair, request)
                    with worker.running(request) as running:
                        reply = await running.next()
                    assert isinstance(reply, frames.Reply)
                    if isinstance(request, frames.Embed | frames.Rerank):
                        self.metrics.count_embeddings(reply.value["tokens"])
                    return reply

    async def _worker_for(
        self, loaded_pair: LoadedPair, pair: PairFiles, request: Request
    ) -> Worker:
        check_purpose(pair, request)
        ready = await loaded_pair.ready(pair)
        loaded_pair.forecast.use_pair(ready.info)
        deadly_texts = self.residents.deadly_texts
        if deadly_texts.hashes:
            deadly_texts.check(loaded_pair.cause(pair), request)
        return ready.engine.worker

    async def ready(self, pair: PairFiles) -> frames.Loaded:
        """Load the pair if necessary and return what is loaded. Raises as `LoadedPair.ready`."""
        if pair.upstream is not None:
            return self.upstream_pairs.info(pair)
        loaded_pair = self.residents.get(pair.name)
        with loaded_pair.in_use():
            return (await loaded_pair.ready(pair)).info

    # ------------------------------------------------------------------ other servers

    @property
    def upstream_pairs(self) -> UpstreamPairs:
        if self._upstreams is None:
            assert self._create_upstreams is not None
            self._upstreams = self._create_upstreams()
        return self._upstreams

    def upstreams(self) -> list[UpstreamStatus]:
        """Return the status of the servers that were used."""
        return self._upstreams.statuses() if self._upstreams else []

    def forget_upstream(self, name: str) -> None:
        """Drop what is known about the server of a pair that was removed."""
        if self._upstreams:
            self._upstreams.forget(name)

    # ------------------------------------------------------------------ end

    def drain(self) -> int:
        """Admit no more requests. Return how many are running."""
        self.residents.drain()
        return self.residents.running()

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail every request that runs or waits."""
        for pair in self.residents.all:
            pair.abort(error)
        if self._upstreams:
            self._upstreams.abort(error)

    async def close(self) -> None:
        """End all workers and connections."""
        if self._upstreams:
            await self._upstreams.close()
        await self.residents.close()

    async def unload_idle(self, name: str | None = None) -> list[str]:
        """Unload the pair `name`, or all pairs, except those at work. Return the names of those unloaded.

        Raises:
            Conflict: Some pairs are busy. All others have been unloaded.
        """
        pairs = [pair for pair in self.residents.all if name in (None, pair.name)]
        busy = [pair.name for pair in pairs if pair.busy]
        released = await self.residents.unload(
            {pair.name for pair in pairs if pair.name not in busy}
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
