"""A pair and the worker that holds it: load, change, unload and loss.

This is separate from the requests, because a load outlives the client that caused it, and a death concerns
all requests. Here is decided when a worker is started and ended, and whether it may be started once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker.death import Death, MappedFiles, blame
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.plan import LoadPlan, engine_settings, learn_answer, learn_load
from localspec.daemon.worker.process import RetryRequest, RunningRequest, Worker, spawn
from localspec.daemon.worker.queue import Admission, Forecast
from localspec.protocol import frames
from localspec.protocol.answers import PairStatus, Progress

if TYPE_CHECKING:
    from localspec.daemon.worker.table import PairTable

log = logging.getLogger("localspec.loaded_pair")

# An eighth of the cache for prompts without a slot is kept even if another pair needs memory.
_MIN_CACHE_DIVISOR = 8
_MIN_HALVED_CONTEXT = 512  # tokens; only a larger context is halved after a load ran out of memory
_MIN_PROMPT_TOKENS = 64  # shorter prompts say little about how fast others are read
_POLL_INTERVAL_S = 0.05  # between two reports on a load


@dataclass(slots=True)
class LoadedEngine:
    """A worker and the load that it got."""

    worker: Worker
    pair: frames.PairFiles  # as requested, before the plan changed it
    config: Config  # at the load
    mapped: MappedFiles  # the state of the files at the load
    planned: LoadPlan
    since: float  # Unix time
    smaller: bool = False  # whether a larger plan ran out of memory before

    @property
    def spare_bytes(self) -> int:
        """Bytes of its cache for prompts without a slot that it could give up, as far as they are unused."""
        plan = self.planned.plan
        return plan.prefixes - self.min_cache_bytes if plan else 0

    @property
    def given_up_bytes(self) -> int:
        """Bytes of that cache that it has given up."""
        plan = self.planned.plan
        return self.planned.settings.prefix_bytes - plan.prefixes if plan else 0

    @property
    def min_cache_bytes(self) -> int:
        """Bytes of that cache, as configured at the load, that it keeps even if they are unused."""
        return self.planned.settings.prefix_bytes // _MIN_CACHE_DIVISOR

    def set_cache_bytes(self, prefixes: int) -> None:
        """Plan with `prefixes` bytes for prompts without a slot."""
        plan = self.planned.plan
        assert plan is not None
        needed = plan.needed + prefixes - plan.prefixes
        changed = msgspec.structs.replace(plan, prefixes=prefixes, needed=needed)
        self.planned = self.planned._replace(plan=changed)

    @property
    def safe_mode(self) -> bool:
        return not self.planned.settings.extra_buffers

    @property
    def drafting(self) -> bool:
        """Whether it has got something that drafts besides the text itself."""
        plan, pair = self.planned.plan, self.planned.pair
        has_heads = self.planned.settings.own_heads and plan and plan.draft and plan.drafting.cache
        return bool(pair.draft or pair.other_drafts or has_heads)


@dataclass(slots=True)
class Load:
    """A load. `begun` is set once there is memory for it. Until then it may wait for the pair `behind`."""

    pair: frames.PairFiles
    task: asyncio.Task[None]
    begun: bool = False
    behind: str = ""


class LoadedPair:
    """A pair, in memory or not: at most one worker, the queue before it, and its idle time.

    It is being loaded while `loading` is set. Then `engine` is the previous one until that is told to end,
    then None, then the one that loads. It is ready if only `engine` is set, and unloaded if neither is.
    """

    def __init__(self, name: str, table: PairTable) -> None:
        self.name = name
        self.engine: LoadedEngine | None = None
        self.loading: Load | None = None
        self.info: frames.Loaded | None = None  # on what is loaded, while it is ready
        self.forecast = Forecast()
        self.metrics = Metrics()
        self.admission = Admission(
            table.config.parallel,
            table.config.queue,
            self.forecast,
            lambda: table.waiting() - self.admission.waiting,
        )
        self.used_at = 0.0  # monotonic time of the last request
        self.gives_way = ""  # the pair that waits until nothing runs here any more
        self._table = table
        self._load_waiters = 0  # requests that wait for its load
        # The engine whose load ran out of memory, while a smaller load is tried.
        self._too_large: LoadedEngine | None = None
        self._ending: dict[Worker, asyncio.Task[None]] = {}  # workers that are ending
        # Other files of this name that a request waits for.
        self._next: frames.PairFiles | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._answers = 0  # since the load, which have shown how fast it is

    @property
    def worker(self) -> Worker | None:
        """The worker, also while it loads."""
        return self.engine.worker if self.engine else None

    @property
    def answering(self) -> bool:
        """Whether it is being loaded, or a request runs in it or is about to."""
        at_work = bool(self.worker and self.worker.busy)
        return self.loading is not None or self._load_waiters > 0 or at_work

    @property
    def busy(self) -> bool:
        """Whether it is answering, or a request has a place in its queue."""
        return self.answering or self.admission.running > 0

    @property
    def running(self) -> int:
        """The number of requests that have a place, and of those that need none."""
        return self.admission.running + (self.worker.embedding_requests if self.worker else 0)

    @property
    def forgettable(self) -> bool:
        """Whether nothing of it is in use, waiting or ending."""
        return not (self.engine or self.busy or self.admission.waiting or self._ending)

    @property
    def files(self) -> frames.PairFiles | None:
        """The files that are loaded or being loaded."""
        return self.loading.pair if self.loading else self.engine.pair if self.engine else None

    def status(self) -> PairStatus:
        crashes, engine = self._table.crashes, self.engine
        if any(self._cause(files) == aside for aside, files in crashes.causes_set_aside(self.name)):
            note = "to try it again: localspec start --reset"
            return PairStatus(self.name, "set_aside", note=note)
        unloads_in = self._table.idle_seconds(self.name) or None
        if self._idle_timer:
            now = asyncio.get_running_loop().time()
            unloads_in = max(self._idle_timer.when() - now, 0.0)
        status = PairStatus(
            self.name,
            "unloaded",
            note=self._table.safe_mode.note(),
            running=self.running,
            waiting=self.admission.waiting,
            unloads_in=unloads_in,
            keep=self._table.is_kept(self.name),
            figures=self.metrics.figures(self.forecast.prompt_per_second),
        )
        if self.loading:
            status.state = "loading"
            status.stage, status.progress = self._load_progress()
            status.pid = engine.worker.pid if engine and self.loading.begun else None
        elif engine and (info := self.info):
            plan = engine.planned.plan
            status.state, status.n_ctx, status.backend = "ready", info.n_ctx, info.backend
            status.target, status.draft = info.target_description, info.draft_description
            status.pid, status.since = engine.worker.pid, engine.since
            status.plan, status.memory = plan, plan.needed if plan else None
            status.costs = info.costs
            passes = engine.planned.passes
            status.forecast = passes.forecast if passes else None
            status.plain_per_second = self.forecast.plain_per_second
            notes = " ".join((*engine.planned.notes, *info.notes))
            status.note = status.note or notes or info.speculation
        return status

    def _load_progress(self) -> tuple[str, float]:
        """Return the stage of the load, and how far that has got."""
        if self.loading and not self.loading.begun:
            return "waiting", 0.0
        progress = self.worker.progress if self.worker else None
        return (progress.stage, progress.fraction) if progress else ("starting", 0.0)

    def waits_for(self, pair: frames.PairFiles) -> Progress:
        """Return what a request for `pair`, files of this name, waits for once it has its place."""
        if self.gives_way:
            return Progress("waiting", self.gives_way)
        if self.loading and (self.loading.behind or self.loading.pair != pair):
            return Progress("waiting", self.loading.behind or self.name)
        if self.loading:
            stage, done = self._load_progress()
            return Progress("measuring" if stage == "profile" else "loading", self.name, done)
        if not self.engine:
            return Progress("loading", self.name)
        serves = self.engine.pair == pair and self._next in (None, pair)
        return Progress("reading" if serves else "waiting", self.name)

    async def ready(self, pair: frames.PairFiles) -> LoadedEngine:
        """Load `pair`, files of this name, if necessary. Requests during a load wait for that load.

        Raises LoadFailed, PairSetAside or WorkerDied… if the pair cannot be loaded.
        """
        while True:
            if not (load := self.loading):
                if self.engine and self._serves(self.engine, pair):
                    return self.engine
                if self._table.crashes.causes_set_aside(self.name):
                    self._table.crashes.check(self._cause(pair))
                if self.engine and (self.gives_way or self.engine.worker.busy):
                    await self._wait_for_change(pair)
                    continue
                self._table.check_open()
                self._next = self.info = None
                load = self.loading = Load(pair, asyncio.create_task(self._load(pair)))
                load.task.add_done_callback(self._on_load_end)
            with contextlib.suppress(RetryRequest):
                await self._wait_for_load(load, pair)

    async def _wait_for_load(self, load: Load, pair: frames.PairFiles) -> None:
        """Wait for a load. Raises RetryRequest if it should be tried once more."""
        self._load_waiters += 1
        try:
            # A client that leaves this wait does not stop a load that others wait for.
            await asyncio.wait({load.task})
            self._table.check_open()  # such a load was cancelled
            load.task.result()
        except errors.LocalspecError:
            if load.pair == pair:  # a failed load of other files does not concern this request
                raise
        finally:
            self._load_waiters -= 1
            if not self._load_waiters and not load.begun and not load.task.done():
                load.task.cancel()  # no request waits for it any more
                self._end_load(load.task)

    async def load(
        self, pair: frames.PairFiles, report: Callable[[PairStatus], Awaitable[None]]
    ) -> None:
        """Load as `ready` does, and report the status at the start, at every change and at the end.

        Raises as `ready`. If the load is refused before it starts, there is no report.
        """
        ready = asyncio.ensure_future(self.ready(pair))
        last_reported = None
        try:
            await asyncio.sleep(0)  # lets the task run until it is refused, is ready or has begun
            while not ready.done():
                status = self.status()
                if status.state != "loading":
                    # It waits for answers of other files of this name, or of another pair.
                    status = PairStatus(self.name, "loading", "waiting", 0.0)
                if status != last_reported:
                    await report(status)
                    last_reported = status
                await asyncio.wait({ready}, timeout=_POLL_INTERVAL_S)
            ready.result()
            await report(self.status())
        finally:
            ready.cancel()

    def _serves(self, engine: LoadedEngine, pair: frames.PairFiles) -> bool:
        """Return whether a request for `pair` may use the engine as it is."""
        is_next = self._next in (None, pair) and not self.gives_way
        # After a change of the configuration no new request uses the old engine. It waits for the running
        # answers, as for other files.
        config = self._table.config
        current = engine.config == config or self._settings(engine.config) == self._settings(config)
        return engine.worker.alive and engine.pair == pair and current and is_next

    def _settings(self, config: Config) -> frames.EngineSettings:
        return engine_settings(config, self._table.paths)

    def _cause(self, pair: frames.PairFiles) -> bytes:
        """Return the key under which a crash of `pair`, loaded with the current settings, is recorded."""
        return MappedFiles(pair).crash_cause(pair, self._settings(self._table.config))

    def _cause_of(self, engine: LoadedEngine) -> bytes:
        return engine.mapped.crash_cause(engine.pair, self._settings(engine.config))

    async def _wait_for_change(self, pair: frames.PairFiles) -> None:
        """Wait for a change of the requests that run here, or of another pair that this one gives way to.

        New requests for the present files wait too, or a busy pair would never give way.
        """
        if not self.gives_way:
            self._next = self._next or pair
        try:
            await self._table.wait_for_change()
        except asyncio.CancelledError:
            self._next = None  # other requests that wait for these files set it again
            self._table.notify_change()
            raise

    async def _load(self, pair: frames.PairFiles) -> None:
        # Wait until the old engine is gone, because two engines may not fit in memory.
        await self.unload()
        load, table = self.loading, self._table
        assert load is not None
        table.safe_mode.recall()
        failed, self._too_large = self._too_large, None
        failed = failed if failed and failed.pair == pair else None
        mapped = await asyncio.to_thread(MappedFiles, pair)
        async with table.make_room(self, load, failed) as planned:
            load.begun = True
            config = table.config
            cause = mapped.crash_cause(pair, self._settings(config))
            if problem := table.crashes.draft_problem(cause):
                planned = planned.without_draft(problem)
            try:
                worker = await spawn(table.worker_command, self, config.watchdog)
            except OSError as error:
                raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
            table.counts.worker_starts += 1
            engine = self.engine = LoadedEngine(
                worker, pair, config, mapped, planned, time.time(), failed is not None
            )
            self.admission.parallel = config.parallel
            log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, engine.safe_mode)
            try:
                info = await worker.load(planned.pair, planned.settings)
                learn_load(planned, info.costs)
            except errors.LoadFailed:
                await self.unload()
                raise
            if self.engine is not engine:
                raise RetryRequest  # the worker died just after the load
            self.info, self.loading, self._answers = info, None, 0
            self.used_at = time.monotonic()

    def _on_load_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case every waiter has left
        self._end_load(task)
        self.start_idle_timer()
        self._table.notify_change()

    def _end_load(self, task: asyncio.Task[None]) -> None:
        """End the load of this task if it has not become ready."""
        if self.loading and self.loading.task is task:
            self.unload_soon()
            self.loading = None

    async def unload(self) -> None:
        """End the worker, and wait until all its memory is free.

        This includes workers that were told to end before. Requests that still run fail.
        """
        self.unload_soon()
        await self.wait_until_gone()

    def unload_soon(self) -> None:
        """End the worker without waiting for it."""
        if engine := self._detach_engine():
            worker = engine.worker
            worker.fail(errors.Unavailable("The pair is being unloaded.", retry_after=2))
            # A task follows the worker to its end, even if no caller waits for it.
            ending = self._ending[worker] = asyncio.create_task(worker.shut_down())
            ending.add_done_callback(lambda _: self._on_worker_end(worker))
            self._table.notify_change()

    def _on_worker_end(self, worker: Worker) -> None:
        self._ending.pop(worker, None)
        self._table.on_memory_freed()
        self._table.notify_change()

    def _detach_engine(self) -> LoadedEngine | None:
        engine, self.engine, self.info = self.engine, None, None
        return engine

    async def wait_until_gone(self) -> None:
        """Wait until all workers that were told to end are gone."""
        while self._ending:
            await asyncio.wait(self._ending.values())

    async def forget(self, conversation: str | None) -> None:
        """Drop everything of a conversation, or of all with None, from the engine and its files.

        This includes engines that are ending.
        """
        workers = [*self._ending, *([self.worker] if self.worker else [])]
        await asyncio.gather(*(worker.forget(conversation) for worker in workers))

    async def limit_cache(self, max_bytes: int) -> None:
        """Limit the cache for prompts without a slot to `max_bytes` bytes, or to the bytes in use."""
        if engine := self.engine:
            prefix_bytes = await engine.worker.limit_cache(max_bytes)
            if prefix_bytes is not None:
                engine.set_cache_bytes(prefix_bytes)

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail every request that runs or waits."""
        self.admission.fail_waiting(error)
        if self.worker:
            self.worker.abort(error)

    def cancel_load(self) -> None:
        """End the load, if there is one, and its worker."""
        if self.loading:
            self.loading.task.cancel()

    async def close(self) -> None:
        """End the worker and wait for it."""
        self._stop_idle_timer()
        self.cancel_load()
        await self.unload()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the pair from being unloaded as idle during the block."""
        self._stop_idle_timer()
        self.used_at = time.monotonic()
        try:
            yield
        finally:
            self.used_at = time.monotonic()
            self.start_idle_timer()

    def start_idle_timer(self) -> None:
        """Start the idle timer if nothing runs."""
        self._stop_idle_timer()
        seconds = self._table.idle_seconds(self.name)
        if not self.busy and self.worker and seconds:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(seconds, self._unload_if_idle, seconds)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _unload_if_idle(self, seconds: float) -> None:
        if not self.busy:
            log.info("idle for %g s: %s is unloaded", seconds, self.name)
            self.unload_soon()

    def learn_speeds(self, done: frames.Done) -> None:
        """Learn how fast this machine is from an answer: of a load's first ones, and ever fewer later."""
        plain_ms = self.forecast.learn_plain(done)
        if not self.engine or not plain_ms:
            return
        self._answers += 1
        if self._answers & (self._answers - 1) == 0:  # a power of two
            reading = self.forecast.reading if done.timings.prompt_n >= _MIN_PROMPT_TOKENS else None
            learn_answer(self.engine.planned, plain_ms, reading)

    def on_decoded(self, worker: Worker) -> None:
        """Remember safe mode if the first decode succeeded with it."""
        if self.engine and self.engine.worker is worker and self.engine.safe_mode:
            self._table.safe_mode.keep()

    def on_quiet(self) -> None:
        """Handle the end of the last running request."""
        self._table.notify_change()

    def on_death(self, worker: Worker, death: Death) -> None:
        """Decide what the death means, and end the requests that wait for the worker."""
        if worker is not self.worker:
            log.info("worker %d ended", worker.pid)
            return
        engine, table = self._detach_engine(), self._table
        assert engine is not None
        table.notify_change()
        table.counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        suspects = worker.in_stage("preparing")
        progress = worker.progress or frames.Loading("target", 0.0)
        is_loading_target = self.loading and progress.stage == "target" and progress.fraction < 1
        blamed = blame(
            death,
            file_changed=death.may_be_from_kernels and engine.mapped.changed_file() is not None,
            preparing=bool(suspects),
            decoded=worker.decoded,
            safe_mode=engine.safe_mode,
            drafting=engine.drafting and not is_loading_target,
        )
        if blamed in ("draft", "pair") and engine.safe_mode and not worker.decoded:
            table.safe_mode.end()  # it did not help
        worker.fail(self._outcome(engine, death, blamed, suspects))

    def _outcome(
        self,
        engine: LoadedEngine,
        death: Death,
        blamed: str,
        suspects: Collection[RunningRequest],
    ) -> Exception | Callable[[RunningRequest], Exception]:
        """Remember what is blamed for a death, and return how the requests in the worker end."""
        table, error = self._table, death.error(self._table.config.watchdog)
        match blamed:
            case "file" if changed := engine.mapped.changed_file():
                return death.changed_file_error(changed)
            case "text":
                # Only the requests whose text was being tokenized fail. Neither the pair nor the kernels are
                # blamed.
                def outcome(running: RunningRequest) -> Exception:
                    if running in suspects:
                        return death.text_error()
                    return error if running.shown else RetryRequest()

                return outcome
            case "kernels":
                assert death.signal is not None
                table.safe_mode.begin(f"{death.signal.name} at the first decode")
                return RetryRequest()
            case "pair" if self._may_load_smaller(engine, death):
                self._too_large = engine
                return RetryRequest()
            case "draft":
                cause, how = self._cause_of(engine), death.description
                problem = table.crashes.drop_draft(engine.pair, cause, how)
                log.warning("%s: %s", self.name, problem)
                return type(error)(f"{error.message} {problem}")
        cause = self._cause_of(engine)
        table.crashes.record(engine.pair, cause, time.monotonic(), death.summary)
        return error

    def _may_load_smaller(self, engine: LoadedEngine, death: Death) -> bool:
        """Return whether to halve the context of a load that ran out of memory, if none was configured."""
        can_shrink = (
            not engine.config.context and engine.planned.settings.n_ctx > _MIN_HALVED_CONTEXT
        )
        return bool(self.loading and death.out_of_memory and can_shrink and not engine.smaller)
