"""Keeps one engine worker alive, loaded and honest, and carries requests to it.

A worker is started by the first request and ended after an idle time. When it dies, every running
request fails with the cause and the next one starts another. A death at the first decode is tried
again by itself, once, in safe mode; one that a request's text has caused fails that request, and the
others, unless part of their answer has been seen, are sent to the next worker.

This is what the rest of the daemon speaks to: a request's way through the queue into the worker,
and the idle time. `loaded_pair` keeps the worker, `in_flight` what runs in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon import logs
from localspec.daemon.worker.admission import Admission
from localspec.daemon.worker.in_flight import Again, InFlight, Running
from localspec.daemon.worker.loaded import LoadedPair
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.process import DEFAULT_COMMAND
from localspec.daemon.worker.safe_mode import Memory
from localspec.protocol import frames
from localspec.protocol.http import Counts, PairStatus

log = logging.getLogger("localspec.supervisor")

Event = frames.Started | frames.Delta | frames.Done


class Supervisor:
    """The worker, its pair and the requests that run in it."""

    def __init__(
        self,
        config: Config,
        memory: Memory,
        *,
        state_dir: str = "",
        states_dir: str = "",
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_command` starts an engine; `--fd N` is appended. `clock` counts seconds."""
        self.admission = Admission(config.parallel, config.queue)
        self.counts = Counts()
        self.metrics = Metrics()
        self._config = config
        self._in_flight = InFlight()
        self._loaded = LoadedPair(
            config,
            memory,
            self._in_flight,
            self.admission,
            self.counts,
            state_dir=state_dir,
            states_dir=states_dir,
            worker_command=worker_command,
            clock=clock,
            load_is_over=self._rest_if_idle,
        )
        self._idle_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ what routes use

    @property
    def info(self) -> frames.PairInfo | None:
        """What is loaded."""
        return self._loaded.info

    @property
    def worker_pid(self) -> int | None:
        return self._loaded.worker_pid

    @property
    def safe_mode(self) -> bool:
        return self._loaded.safe_mode

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is being loaded."""
        return bool(self._in_flight or self._loaded.loading or self.admission.running)

    def uses(self, name: str) -> bool:
        """Whether the pair is loaded or being loaded."""
        return self._loaded.uses(name)

    def holds(self, name: str) -> frames.PairFiles | None:
        """The files of the pair, if it is the one that is loaded."""
        return self._loaded.holds(name)

    def note(self) -> str | None:
        """What a person should know about how the answer came about."""
        return self._loaded.note()

    def pair_status(self, name: str) -> PairStatus:
        """What `name`, the configured pair, or the loaded one is doing."""
        return self._loaded.status(name)

    def configure(self, config: Config) -> None:
        """Use another configuration: at once where that is possible, else from the next load."""
        self._config = self._loaded.config = config
        self.admission.limit = config.queue

    async def ready(self, pair: frames.PairFiles) -> frames.PairInfo:
        """Load `pair` unless it is loaded.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: why it is not.
        """
        await self._loaded.worker_for(pair)
        assert self.info is not None
        return self.info

    async def generate(
        self, pair: frames.PairFiles, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        """Started, Delta…, Done. Closing the iterator cancels the request in the worker.

        Raises:
            QueueFull, Unavailable, PairSetAside, LoadFailed: before it started.
            WorkerDied, WorkerTimeout, InvalidRequest…: the worker's own refusals and its death.
        """
        self.counts.requests += 1
        if self._config.log_prompts:
            logs.prompt(request.conversation, msgspec.json.encode(request.prompt).decode())
        watch = self.metrics.begin()
        finished = False
        try:
            async with (
                self.admission.place(editor=request.priority == "editor"),
                contextlib.aclosing(self._replayed(pair, request)) as events,
            ):
                async for event in events:
                    watch.saw(event)
                    if isinstance(event, frames.Done):
                        finished = True
                        self._count(event)
                    yield event
        except errors.LocalspecError:
            self.counts.failed += 1
            finished = True
            raise
        finally:
            self.counts.cancelled += not finished
            self._rest_if_idle()

    async def ask(
        self, pair: frames.PairFiles, make: Callable[[int], frames.Frame]
    ) -> frames.Reply:
        """A small request (tokenize…): `make` gets its id. It does not wait in the queue."""
        try:
            while True:
                with contextlib.suppress(Again):
                    async with self._sent(pair, make) as running:
                        reply = await running.next()
                    if isinstance(reply, frames.Failed):
                        raise errors.from_code(reply.code, reply.message, param=reply.param)
                    assert isinstance(reply, frames.Reply)
                    return reply
        finally:
            self._rest_if_idle()

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self._loaded.reset()

    async def forget(self, conversation: str | None) -> None:
        """Nothing of a conversation, with None of any, stays in the engine or in its files."""
        await self._loaded.forget(conversation)

    async def release(self) -> bool:
        """Unload the pair unless it is at work; False when nothing was loaded.

        Raises:
            Conflict: it is answering or being loaded.
        """
        if self.busy:
            raise errors.Conflict("The pair is at work; wait for its answer, then try again.")
        loaded = self._loaded.has_worker
        await self.unload()
        return loaded

    async def unload(self) -> None:
        """End the worker; all its memory goes back. Whatever still runs in it fails."""
        await self._loaded.unload()

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs or waits."""
        self.admission.abandon(error)
        self._in_flight.abort(error)

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        if self._idle_timer:
            self._idle_timer.cancel()
        await self._loaded.close()

    # ------------------------------------------------------------------ one request

    async def _replayed(
        self, pair: frames.PairFiles, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        """The request's events; after a death of others' making, those of the next try."""
        started = False
        while True:
            try:
                async with self._sent(
                    pair, lambda id: msgspec.structs.replace(request, id=id)
                ) as running:
                    while True:
                        event = await running.next()
                        if isinstance(event, frames.Failed):
                            raise errors.from_code(event.code, event.message, param=event.param)
                        assert isinstance(event, frames.Started | frames.Delta | frames.Done)
                        if not (started and isinstance(event, frames.Started)):
                            yield event
                        started = True
                        if isinstance(event, frames.Done):
                            return
            except Again:
                log.info("a request is sent once more, to a new worker")

    @contextlib.asynccontextmanager
    async def _sent(
        self, pair: frames.PairFiles, make: Callable[[int], frames.Frame]
    ) -> AsyncIterator[Running]:
        """Send a request to the worker for `pair`; cancel it there when the body ends early."""
        if self._idle_timer:
            self._idle_timer.cancel()
        worker = await self._loaded.worker_for(pair)
        if not self._in_flight:
            worker.heard = time.monotonic()  # silence counts from now
        number, running = self._in_flight.enter(make)
        try:
            self._loaded.check_text(running.frame)
            try:
                worker.send(running.frame)
            except OverflowError as error:  # in what a template is given as it is
                raise errors.InvalidRequest(
                    "The request holds a whole number of more than 64 bits."
                ) from error
            yield running
        finally:
            # Still there: no Done, Failed or Reply has come.
            if self._in_flight.leave(number) and worker.alive:
                worker.send(frames.Cancel(number))

    def _count(self, done: frames.Done) -> None:
        self.counts.tokens += done.completion_tokens
        self.counts.drafted += done.speculation.drafted
        self.counts.accepted += done.speculation.accepted

    # ------------------------------------------------------------------ idle

    def _rest_if_idle(self) -> None:
        """Count down to unloading once nothing runs."""
        if self._idle_timer:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.busy or not self._loaded.has_worker or not self._config.idle_unload:
            return
        loop = asyncio.get_running_loop()
        self._idle_timer = loop.call_later(self._config.idle_unload, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        if not self.busy:
            log.info("idle for %g s: the pair is unloaded", self._config.idle_unload)
            self._loaded.unload_soon()
