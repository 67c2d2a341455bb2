"""Keeps one engine worker alive, loaded and honest, and carries requests to it.

A worker is started by the first request and ended after an idle time. When it dies, every running
request fails with the cause and the next one starts another; only a death at the first decode is
tried again by itself, once, in safe mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.admission import Admission
from localspec.daemon.crashes import CrashHistory, Death
from localspec.daemon.metrics import Metrics
from localspec.daemon.safe_mode import Memory
from localspec.daemon.worker import DEFAULT_COMMAND, Worker, spawn
from localspec.protocol import frames
from localspec.protocol.http import Counts, PairStatus

log = logging.getLogger("localspec.supervisor")

Event = frames.Started | frames.Delta | frames.Done
# A big model may take its time between two reports of progress, but not for ever.
LOADING_PATIENCE = 5  # times the watchdog
SAFE_NOTE = (
    "Safe mode: llama.cpp's fast kernels crashed on this machine, so slower ones are used. "
    "Rebuilding llama-cpp-python for this machine (scripts/setup) cures it."
)


class _Again(Exception):
    """The worker died where safe mode may help."""


class _Running:
    """One request in the worker: its frames, or the exception that ended it."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[frames.FromWorker | Exception] = asyncio.Queue()

    async def next(self) -> frames.FromWorker:
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item


class Supervisor:
    """The worker, its pair and the requests that run in it."""

    def __init__(
        self,
        config: Config,
        memory: Memory,
        *,
        state_dir: str = "",
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_command` starts an engine; `--fd N` is appended. `clock` counts seconds."""
        self.admission = Admission(config.parallel, config.queue)
        self.counts = Counts()
        self.metrics = Metrics()
        self.history = CrashHistory()
        self.info: frames.PairInfo | None = None
        self.safe_reason: str | None = None  # why the fast kernels are off
        self._config = config
        self._memory = memory
        self._state_dir = state_dir
        self._command = worker_command
        self._clock = clock
        self._pair: frames.PairFiles | None = None
        self._worker: Worker | None = None
        self._progress: frames.Loading | None = None
        self._loading: asyncio.Task[Worker] | None = None
        self._loaded: asyncio.Future[frames.PairInfo] | None = None
        self._loaded_with: frames.EngineSettings | None = None
        self._proven = False  # this worker has decoded
        self._recalled = False
        self._running: dict[int, _Running] = {}
        self._ids = itertools.count(1)
        self._next_pair: frames.PairFiles | None = None  # somebody waits for this other one
        self._until_quiet: list[asyncio.Future[None]] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what routes use

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    @property
    def safe_mode(self) -> bool:
        return self.safe_reason is not None

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is being loaded."""
        return bool(self._running or self._loading or self.admission.running)

    def uses(self, name: str) -> bool:
        """Whether the pair is loaded or being loaded."""
        held = self._worker is not None or self._loading is not None
        return held and self._pair is not None and self._pair.name == name

    def holds(self, name: str) -> frames.PairFiles | None:
        """The files of the pair, if it is the one that is loaded."""
        return self._pair if self.info and self.uses(name) else None

    def configure(self, config: Config) -> None:
        """Use another configuration: at once where that is possible, else from the next load."""
        self._config = config
        self.admission.limit = config.queue

    async def release(self) -> bool:
        """Unload the pair unless it is at work; False when nothing was loaded.

        Raises:
            Conflict: it is answering or being loaded.
        """
        if self.busy:
            raise errors.Conflict("The pair is at work; wait for its answer, then try again.")
        loaded = self._worker is not None
        await self.unload()
        return loaded

    def note(self) -> str | None:
        """What a person should know about how the answer came about."""
        return SAFE_NOTE if self.safe_mode else None

    def pair_status(self, name: str) -> PairStatus:
        """What `name`, the configured pair, or the loaded one is doing."""
        name = self._pair.name if self._pair and self._worker else name
        note = self.note()
        if self.history.is_set_aside(name):
            return PairStatus(name, "set_aside", note="localspec start --reset tries it again")
        if self._loading is not None:
            stage, fraction = ("starting", 0.0)
            if self._progress:
                stage, fraction = self._progress.stage, self._progress.fraction
            return PairStatus(name, "loading", stage, fraction, note=note)
        if self.info is None:
            return PairStatus(name, "unloaded", note=note)
        info = self.info
        return PairStatus(
            name,
            "ready",
            target=info.target_description,
            draft=info.draft_description,
            n_ctx=info.n_ctx,
            backend=info.backend,
            note=note or info.speculation,
        )

    async def ready(self, pair: frames.PairFiles) -> frames.PairInfo:
        """Load `pair` unless it is loaded.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: why it is not.
        """
        await self._worker_for(pair)
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
        watch = self.metrics.begin()
        finished = False
        try:
            async with (
                self.admission.place(ahead=request.priority == "editor"),
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
                with contextlib.suppress(_Again):
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
        self.history.reset()
        if self.safe_mode:
            self.safe_reason = None
            self._memory.forget()
            self._later(self.unload())

    async def unload(self) -> None:
        """End the worker; all its memory goes back. Whatever still runs in it fails."""
        worker, self._worker = self._worker, None
        self.info = None
        if worker:
            self._fail_all(errors.Unavailable("The pair is being unloaded.", retry_after=2))
            await worker.shut_down()

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs or waits."""
        self.admission.abandon(error)
        for running in self._running.values():
            running.inbox.put_nowait(error)

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        if self._idle_timer:
            self._idle_timer.cancel()
        if self._loading:
            self._loading.cancel()
        await self.unload()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ one request

    async def _replayed(
        self, pair: frames.PairFiles, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        """The request's events; after a death at the first decode, those of the second try."""
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
            except _Again:
                log.info("request is replayed in safe mode")

    @contextlib.asynccontextmanager
    async def _sent(
        self, pair: frames.PairFiles, make: Callable[[int], frames.Frame]
    ) -> AsyncIterator[_Running]:
        """Send a request to the worker for `pair`; cancel it there when the body ends early."""
        if self._idle_timer:
            self._idle_timer.cancel()
        worker = await self._worker_for(pair)
        if not self._running:
            worker.heard = time.monotonic()  # silence counts from now
        number, running = next(self._ids), _Running()
        self._running[number] = running
        try:
            worker.send(make(number))
            yield running
        finally:
            # Still there: no Done, Failed or Reply has come.
            if self._running.pop(number, None) is not None and worker.alive:
                worker.send(frames.Cancel(number))
            self._let_next_in()

    def _count(self, done: frames.Done) -> None:
        self.counts.tokens += done.completion_tokens
        self.counts.drafted += done.speculation.drafted
        self.counts.accepted += done.speculation.accepted

    # ------------------------------------------------------------------ the worker

    async def _worker_for(self, pair: frames.PairFiles) -> Worker:
        """A live worker that has loaded `pair`; many that ask while it loads wait for one load."""
        while True:
            if self._loading is None:
                self.history.check(pair.name)
                # An edit of the configuration waits for the answers that are being written.
                current = self._running or self._loaded_with == self._settings()
                mine = self._next_pair in (None, pair)
                if self._worker and self._worker.alive and self._pair == pair and current and mine:
                    return self._worker
                if self._worker and self._running:
                    await self._turn_of(pair)
                    continue
                self._next_pair = None
                self._loading = asyncio.create_task(self._load(pair))
                self._loading.add_done_callback(self._load_ended)
            with contextlib.suppress(_Again):
                # Shielded: one client that leaves does not stop the load others wait for.
                await asyncio.shield(self._loading)

    async def _turn_of(self, pair: frames.PairFiles) -> None:
        """Wait until what runs on the present pair has finished: two pairs may not fit in memory.

        Whoever asks for the present pair meanwhile waits too, or a busy one would never give way.
        """
        self._next_pair = self._next_pair or pair
        quiet = asyncio.get_running_loop().create_future()
        self._until_quiet.append(quiet)
        try:
            await quiet
        except asyncio.CancelledError:
            self._next_pair = None  # whoever still waits for it asks again
            self._wake()
            raise
        finally:
            self._until_quiet.remove(quiet)

    def _let_next_in(self) -> None:
        """Something ended; when nothing runs any more, those who wait for a pair go on."""
        if not self._running:
            self._wake()

    def _wake(self) -> None:
        for quiet in self._until_quiet:
            if not quiet.done():
                quiet.set_result(None)

    def _load_ended(self, task: asyncio.Task[Worker]) -> None:
        self._loading = self._progress = self._loaded = None
        if not task.cancelled():
            task.exception()  # seen, also when every waiter has left
        self._rest_if_idle()

    async def _load(self, pair: frames.PairFiles) -> Worker:
        await self.unload()
        if not self._recalled:
            self._recalled = True
            self.safe_reason = self._memory.recall()
        self._pair, self._proven = pair, False
        self._loaded = asyncio.get_running_loop().create_future()
        try:
            worker = await spawn(self._command, self._on_frame, self._on_death)
        except OSError as error:
            raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
        self._worker = worker
        self.counts.worker_starts += 1
        self._later(self._watch(worker))
        self._loaded_with = self._settings()
        self.admission.parallel = self._config.parallel
        worker.send(frames.Load(pair, self._loaded_with))
        log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, self.safe_mode)
        try:
            self.info = await self._loaded
        except errors.LoadFailed:
            await self.unload()
            raise
        return worker

    def _settings(self) -> frames.EngineSettings:
        config = self._config
        return frames.EngineSettings(
            n_ctx=config.context,
            parallel=config.parallel,
            n_threads=config.threads,
            n_gpu_layers=config.gpu_layers,
            type_kv=config.kv_type,
            extra_buffers=not self.safe_mode,
            exact=config.exact,
            depth=None if config.depth < 0 else config.depth,
            state_dir=self._state_dir,
        )

    def _on_frame(self, worker: Worker, frame: frames.FromWorker) -> None:
        if worker is not self._worker:
            return  # on its way out
        match frame:
            case frames.Loading():
                self._progress = frame
            case frames.Loaded():
                self._settle(frame.info)
            case frames.LoadError():
                self._settle(errors.LoadFailed(frame.message))
            case frames.Pong():
                pass
            case _:
                self._deliver(frame)

    def _settle(self, outcome: frames.PairInfo | Exception) -> None:
        """End the wait for a load."""
        if self._loaded is None or self._loaded.done():
            return
        if isinstance(outcome, Exception):
            self._loaded.set_exception(outcome)
        else:
            self._loaded.set_result(outcome)

    def _deliver(
        self, frame: frames.Started | frames.Delta | frames.Done | frames.Failed | frames.Reply
    ) -> None:
        if isinstance(frame, frames.Delta) or (
            isinstance(frame, frames.Done) and frame.completion_tokens
        ):
            self._prove()
        over = isinstance(frame, frames.Done | frames.Failed | frames.Reply)
        running = self._running.pop(frame.id, None) if over else self._running.get(frame.id)
        if running:
            running.inbox.put_nowait(frame)

    def _prove(self) -> None:
        """The first decode went well; when that took safe mode, it is worth remembering."""
        if self._proven:
            return
        self._proven = True
        if self.safe_reason is not None:
            self._memory.remember(self.safe_reason)

    def _on_death(self, worker: Worker, death: Death) -> None:
        if worker is not self._worker:
            log.info("worker %d ended", worker.pid)
            return
        self._worker = self.info = None
        if death.ending == "unload":
            return
        self.counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        assert self._pair is not None
        outcome: Exception
        if death.by_kernels and not self._proven and not self.safe_mode:
            assert death.signal is not None
            self.safe_reason = f"{death.signal.name} at the first decode"
            outcome = _Again()
        else:
            if self.safe_mode and not self._proven:
                self.safe_reason = None  # it did not help, so it is not the cure
            outcome = death.error(self._config.watchdog)
            reason = f"{death.how} {death.last_words}".rstrip()
            self.history.record(self._pair.name, self._clock(), reason)
        self._fail_all(outcome)

    def _fail_all(self, outcome: Exception) -> None:
        """End the load and every request of a worker that is gone."""
        self._settle(outcome)
        doomed, self._running = self._running, {}
        for running in doomed.values():
            running.inbox.put_nowait(outcome)

    async def _watch(self, worker: Worker) -> None:
        """End a worker that is silent while it has something to do."""
        limit = self._config.watchdog
        while worker.alive:
            await asyncio.sleep(min(limit / 4, 5.0))
            if self._running or self._loading:
                patience = limit * LOADING_PATIENCE if self._loading else limit
                if time.monotonic() - worker.heard > patience:
                    worker.kill("watchdog")
                    return
                worker.send(frames.Ping(0))

    # ------------------------------------------------------------------ idle

    def _rest_if_idle(self) -> None:
        """Count down to unloading once nothing runs."""
        if self._idle_timer:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.busy or self._worker is None or not self._config.idle_unload:
            return
        loop = asyncio.get_running_loop()
        self._idle_timer = loop.call_later(self._config.idle_unload, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        if not self.busy:
            log.info("idle for %g s: the pair is unloaded", self._config.idle_unload)
            self._later(self.unload())

    def _later(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
