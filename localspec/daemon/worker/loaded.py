"""A pair and the worker that holds it: load, change, unload and loss.

This is separate from the requests, because a load outlives the client that caused it, and a death concerns
all requests. Here is decided when a worker is started and ended, and whether it may be started once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker import eviction
from localspec.daemon.worker.death import (
    CrashHistory,
    DeadlyTexts,
    Death,
    MappedFiles,
    SafeMode,
    blame,
    crash_cause,
    deadly_text_error,
)
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.process import RetryRequest, RunningRequest, Worker
from localspec.daemon.worker.queue import Admission, Forecast
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus, PassCosts, Progress

# ------------------------------------------------------------------------ states
# The states of a pair (unloaded, loading, ready), and how they are shown.


# An eighth of the cache for prompts without a slot is kept even if another pair needs memory.
_MIN_CACHE_DIVISOR = 8


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A worker and the load that it got."""

    worker: Worker
    pair: frames.PairFiles  # as requested, before the plan changed it
    config: Config  # at the load
    mapped: MappedFiles  # the state of the files at the load
    planned: eviction.LoadPlan
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

    def with_cache_bytes(self, prefixes: int) -> LoadedEngine:
        """Return the engine with `prefixes` bytes for prompts without a slot."""
        plan = self.planned.plan
        assert plan is not None
        needed = plan.needed + prefixes - plan.prefixes
        changed = msgspec.structs.replace(plan, prefixes=prefixes, needed=needed)
        return replace(self, planned=self.planned._replace(plan=changed))

    @property
    def safe_mode(self) -> bool:
        return not self.planned.settings.extra_buffers

    @property
    def drafting(self) -> bool:
        """Whether it has got something that drafts besides the text itself."""
        plan, pair = self.planned.plan, self.planned.pair
        has_heads = self.planned.settings.own_heads and plan and plan.draft and plan.drafting.cache
        return bool(pair.draft or pair.other_drafts or has_heads)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """No worker."""

    engine: None = None


@dataclass(slots=True)
class LoadingPair:
    """A load.

    `engine` is the previous one until it is told to end, then None, then the one that loads. `begun` is set
    once there is memory for the load. Until then `behind` is the pair that it waits for, if any.
    """

    pair: frames.PairFiles
    task: asyncio.Task[None]
    engine: LoadedEngine | None
    begun: bool = False
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    engine: LoadedEngine
    info: frames.Loaded


PairState = Unloaded | LoadingPair | Ready


def pair_status(name: str, state: PairState, note: str | None) -> PairStatus:
    """Return the status of a pair. `note` is one that applies to every pair."""
    match state:
        case Unloaded():
            return PairStatus(name, "unloaded", note=note)
        case LoadingPair(begun=False):
            return PairStatus(name, "loading", "waiting", 0.0, note=note)
        case LoadingPair(engine=engine):
            progress = engine.worker.progress if engine else None
            stage, fraction = (progress.stage, progress.fraction) if progress else ("starting", 0.0)
            pid = engine.worker.pid if engine else None
            return PairStatus(name, "loading", stage, fraction, note=note, pid=pid)
        case Ready(engine, info):
            plan = engine.planned.plan
            return PairStatus(
                name,
                "ready",
                target=info.target_description,
                draft=info.draft_description,
                n_ctx=info.n_ctx,
                backend=info.backend,
                plan=plan,
                note=note or " ".join((*engine.planned.notes, *info.notes)) or info.speculation,
                pid=engine.worker.pid,
                since=engine.since,
                memory=plan.needed if plan else None,
                costs=_pass_costs(info.profile),
            )


def _pass_costs(profile: Mapping[str, Any]) -> PassCosts | None:
    """Return the costs of a pass that the worker measured. An encoder generates nothing, so has none."""
    if not profile.get("target_ms"):
        return None
    overhead = float(profile.get("overhead_ms") or 0.0)
    return PassCosts(
        _milliseconds_by_width(profile, "target_ms"),
        _milliseconds_by_width(profile, "draft_ms"),
        overhead,
    )


def _milliseconds_by_width(profile: Mapping[str, Any], name: str) -> dict[int, float]:
    return {int(width): float(ms) for width, ms in (profile.get(name) or {}).items()}


def request_progress(
    name: str, state: PairState, pair: frames.PairFiles, following: frames.PairFiles | None
) -> Progress:
    """Return what a request for `pair` waits for. `following` are the next files of the name."""
    match state:
        case LoadingPair(behind=behind) if behind or state.pair != pair:
            return Progress("waiting", behind or name)
        case LoadingPair():
            return Progress("loading", name, pair_status(name, state, None).progress or 0.0)
        case Unloaded():
            return Progress("loading", name)
        case Ready(engine, _) if engine.pair != pair or following not in (None, pair):
            return Progress("waiting", name)
    return Progress("reading", name)


# ------------------------------------------------------------------------ loaded


log = logging.getLogger("localspec.loaded_pair")

_MIN_HALVED_CONTEXT = 512  # tokens; only a larger context is halved after a load ran out of memory
_POLL_INTERVAL_S = 0.05  # between two reports on a load


class SharedResources(Protocol):
    """What loaded pairs share: memory, and what is known of the machine and of earlier deaths."""

    config: Config  # a change takes effect with the next request
    paths: Paths
    counts: Counts
    safe_mode: SafeMode
    crashes: CrashHistory
    deadly_texts: DeadlyTexts

    def make_room(
        self, pair: LoadedPair, loading: LoadingPair, failed: LoadedEngine | None
    ) -> AbstractAsyncContextManager[eviction.LoadPlan]:
        """Make room for a load, which is the block, and yield its plan. `failed` ran out of memory before.

        Raises:
            LoadFailed: There is no room, and none can be made.
        """

    async def spawn(self, pair: LoadedPair) -> Worker:
        """Start an engine. Raises OSError if it cannot be started."""

    async def wait_for_change(self) -> None:
        """Wait until the state of some pair changes."""

    def on_memory_freed(self) -> None:
        """Handle that the memory of a worker is free again."""

    def notify_change(self) -> None:
        """Wake those that wait for a change."""

    def idle_seconds(self, name: str) -> float:
        """Return the idle time after which the pair is unloaded, 0 for never."""

    def is_kept(self, name: str) -> bool:
        """Return whether the pair is never evicted for another one."""

    def waiting(self) -> int:
        """Return how many requests wait, for all pairs."""


class LoadedPair:
    """A pair, in memory or not: at most one worker, the queue before it, and its idle time."""

    def __init__(self, name: str, room: SharedResources) -> None:
        self.name = name
        self.state: Unloaded | LoadingPair | Ready = Unloaded()
        self.forecast = Forecast()
        self.metrics = Metrics()
        self.admission = Admission(
            room.config.parallel,
            room.config.queue,
            self.forecast,
            lambda: room.waiting() - self.admission.waiting,
        )
        self.used_at = 0.0  # monotonic time of the last request
        self.gives_way = ""  # the pair that waits until nothing runs here any more
        self._room = room
        self._load_waiters = 0  # requests that wait for its load
        # The engine whose load ran out of memory, while a smaller load is tried.
        self._too_large: LoadedEngine | None = None
        self._ending: dict[Worker, asyncio.Task[None]] = {}  # workers that are ending
        # Other files of this name that a request waits for.
        self._next: frames.PairFiles | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ state

    @property
    def info(self) -> frames.Loaded | None:
        """The information on what is loaded."""
        return self.state.info if isinstance(self.state, Ready) else None

    @property
    def worker(self) -> Worker | None:
        """The worker, also while it loads."""
        return self.state.engine.worker if self.state.engine else None

    @property
    def answering(self) -> bool:
        """Whether it is being loaded, or a request runs in it or is about to."""
        loading = isinstance(self.state, LoadingPair)
        return loading or self._load_waiters > 0 or bool(self.worker and self.worker.busy)

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
        in_use = self.busy or self.admission.waiting or self._ending
        return isinstance(self.state, Unloaded) and not in_use

    @property
    def unloads_in(self) -> float | None:
        """Seconds until it is unloaded without further requests, None for never."""
        if self._idle_timer:
            return max(self._idle_timer.when() - asyncio.get_running_loop().time(), 0.0)
        return self._room.idle_seconds(self.name) or None

    @property
    def files(self) -> frames.PairFiles | None:
        """The files that are loaded or being loaded."""
        if isinstance(self.state, LoadingPair):
            return self.state.pair
        return self.state.engine.pair if self.state.engine else None

    def status(self) -> PairStatus:
        """Return the status of the pair."""
        crashes, note = self._room.crashes, self._room.safe_mode.note()
        if any(self.cause(files) == aside for aside, files in crashes.causes_set_aside(self.name)):
            return PairStatus(
                self.name, "set_aside", note="to try it again: localspec start --reset"
            )
        return msgspec.structs.replace(
            pair_status(self.name, self.state, note),
            running=self.running,
            waiting=self.admission.waiting,
            unloads_in=self.unloads_in,
            keep=self._room.is_kept(self.name),
            figures=self.metrics.figures(self.forecast.prompt_per_second),
        )

    def waits_for(self, pair: frames.PairFiles) -> Progress:
        """Return what a request for `pair`, files of this name, waits for once it has its place."""
        if self.gives_way:
            return Progress("waiting", self.gives_way)
        return request_progress(self.name, self.state, pair, self._next)

    # ------------------------------------------------------------------ load

    async def ready(self, pair: frames.PairFiles) -> Ready:
        """Load `pair`, files of this name, if necessary. Requests during a load wait for that load.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: The pair cannot be loaded.
        """
        while True:
            state = self.state
            if not isinstance(state, LoadingPair):
                if isinstance(state, Ready) and self._serves(state.engine, pair):
                    return state
                if self._room.crashes.causes_set_aside(self.name):
                    self._room.crashes.check(self.cause(pair))
                if state.engine and (self.gives_way or state.engine.worker.busy):
                    await self._wait_for_change(pair)
                    continue
                self._next = None
                state = LoadingPair(pair, asyncio.create_task(self._load(pair)), state.engine)
                state.task.add_done_callback(self._on_load_end)
                self.state = state
            with contextlib.suppress(RetryRequest):
                await self._wait_for_load(state, pair)

    async def _wait_for_load(self, state: LoadingPair, pair: frames.PairFiles) -> None:
        """Wait for a load. Raises Again if it should be tried once more."""
        self._load_waiters += 1
        try:
            # Shielded, because a client that leaves must not stop a load that others wait for.
            await asyncio.shield(state.task)
        except errors.LocalspecError:
            if state.pair == pair:  # a failed load of other files does not concern this request
                raise
        finally:
            self._load_waiters -= 1
            if not self._load_waiters and not state.begun and not state.task.done():
                self._cancel_load(state)  # no request waits for it any more

    def _cancel_load(self, state: LoadingPair) -> None:
        state.task.cancel()
        if self.state is state:
            self.unload_soon()
            self.state = Unloaded()

    async def load(
        self, pair: frames.PairFiles, report: Callable[[PairStatus], Awaitable[None]]
    ) -> None:
        """Load as `ready` does, and report the status at the start, at every change and at the end.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: The pair cannot be loaded. If the load is refused
                before it starts, there is no report.
        """
        ready = asyncio.ensure_future(self.ready(pair))
        last_reported = None
        try:
            await asyncio.sleep(0)  # lets the task run until it is refused, is ready or has begun
            while not ready.done():
                state = self.status()
                if state.state != "loading":
                    # It waits for answers of other files of this name, or of another pair.
                    state = PairStatus(self.name, "loading", "waiting", 0.0)
                if state != last_reported:
                    await report(state)
                    last_reported = state
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
        config = self._room.config
        current = engine.config == config or self._settings(engine.config) == self._settings(config)
        return engine.worker.alive and engine.pair == pair and current and is_next

    def _settings(self, config: Config) -> frames.EngineSettings:
        return eviction.engine_settings(config, self._room.paths, safe_mode=self._room.safe_mode.on)

    def cause(self, pair: frames.PairFiles) -> bytes:
        """Return the key under which a crash of `pair`, loaded with the current settings, is recorded."""
        return crash_cause(
            pair, MappedFiles(pair), eviction.engine_settings(self._room.config, self._room.paths)
        )

    def _cause_of(self, engine: LoadedEngine) -> bytes:
        settings = eviction.engine_settings(engine.config, self._room.paths)
        return crash_cause(engine.pair, engine.mapped, settings)

    async def _wait_for_change(self, pair: frames.PairFiles) -> None:
        """Wait for a change of the requests that run here, or of another pair that this one gives way to.

        New requests for the present files wait too, or a busy pair would never give way.
        """
        if not self.gives_way:
            self._next = self._next or pair
        try:
            await self._room.wait_for_change()
        except asyncio.CancelledError:
            self._next = None  # other requests that wait for these files set it again
            self._room.notify_change()
            raise

    async def _load(self, pair: frames.PairFiles) -> None:
        # Wait until the old engine is gone, because two engines may not fit in memory.
        await self.unload()
        loading, room = self.state, self._room
        assert isinstance(loading, LoadingPair)
        room.safe_mode.recall()
        failed, self._too_large = self._too_large, None
        failed = failed if failed and failed.pair == pair else None
        mapped = await asyncio.to_thread(MappedFiles, pair)
        async with room.make_room(self, loading, failed) as planned:
            loading.begun = True
            config = room.config
            cause = crash_cause(pair, mapped, eviction.engine_settings(config, room.paths))
            if problem := room.crashes.draft_problem(cause):
                planned = planned.without_draft(problem)
            try:
                worker = await room.spawn(self)
            except OSError as error:
                raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
            began = time.time()
            engine = LoadedEngine(worker, pair, config, mapped, planned, began, failed is not None)
            loading.engine = engine
            self.admission.parallel = config.parallel
            log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, engine.safe_mode)
            try:
                info = await worker.load(planned.pair, planned.settings)
                eviction.learn_speeds(planned, info.profile)
            except errors.LoadFailed:
                await self.unload()
                raise
            if loading.engine is not engine:
                raise RetryRequest  # the worker died just after the load
            self.state = Ready(engine, info)
            self.used_at = time.monotonic()

    def _on_load_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case every waiter has left
        if isinstance(self.state, LoadingPair) and self.state.task is task:  # the load has failed
            self.unload_soon()
            self.state = Unloaded()
        self.start_idle_timer()
        self._room.notify_change()

    # ------------------------------------------------------------------ unload

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
            self._room.notify_change()

    def _on_worker_end(self, worker: Worker) -> None:
        self._ending.pop(worker, None)
        self._room.on_memory_freed()
        self._room.notify_change()

    def _detach_engine(self) -> LoadedEngine | None:
        """Remove the engine from the state and return it."""
        engine = self.state.engine
        if isinstance(self.state, LoadingPair):
            self.state.engine = None
        else:
            self.state = Unloaded()
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
        worker = self.worker
        prefix_bytes = await worker.limit_cache(max_bytes) if worker else None
        if prefix_bytes is not None and isinstance(self.state, Ready) and self.worker is worker:
            self.state = Ready(self.state.engine.with_cache_bytes(prefix_bytes), self.state.info)

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail every request that runs or waits."""
        self.admission.fail_waiting(error)
        if self.worker:
            self.worker.abort(error)

    async def close(self) -> None:
        """End the worker and wait for it."""
        self._stop_idle_timer()
        if isinstance(self.state, LoadingPair):
            self.state.task.cancel()
        await self.unload()

    # ------------------------------------------------------------------ idle

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
        seconds = self._room.idle_seconds(self.name)
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

    # ------------------------------------------------------------------ events of the worker

    def on_notice(self, text: str) -> None:
        log.warning("%s", text)

    def on_decoded(self, worker: Worker) -> None:
        """Remember safe mode if the first decode succeeded with it."""
        engine = self.state.engine
        if engine and engine.worker is worker and engine.safe_mode:
            self._room.safe_mode.keep()

    def on_quiet(self) -> None:
        self._room.notify_change()

    def on_death(self, worker: Worker, death: Death) -> None:
        """Decide what the death means, and end the requests that wait for the worker."""
        if worker is not self.worker:
            log.info("worker %d ended", worker.pid)
            return
        engine = self._detach_engine()
        assert engine is not None
        self._room.notify_change()
        self._room.counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        changed = engine.mapped.changed_file() if death.may_be_from_kernels else None
        suspects = worker.in_stage("preparing")
        blamed = blame(
            death,
            file_changed=changed is not None,
            preparing=bool(suspects),
            decoded=worker.decoded,
            safe_mode=engine.safe_mode,
            drafting=engine.drafting and not self._is_loading_target(worker),
        )
        if blamed in ("draft", "pair") and engine.safe_mode and not worker.decoded:
            self._room.safe_mode.end()  # it did not help
        match blamed:
            case "file":
                assert changed is not None
                worker.fail(death.changed_file_error(changed))
            case "text":
                self._fail_suspects(engine, suspects, death)
            case "kernels":
                assert death.signal is not None
                self._room.safe_mode.begin(f"{death.signal.name} at the first decode")
                worker.fail(RetryRequest())
            case "pair" if self._may_load_smaller(engine, death):
                self._too_large = engine
                worker.fail(RetryRequest())
            case "draft":
                self._drop_draft(engine, death)
            case "pair":
                self._room.crashes.record(
                    engine.pair, self._cause_of(engine), time.monotonic(), death.summary
                )
                worker.fail(death.error(self._room.config.watchdog))

    def _is_loading_target(self, worker: Worker) -> bool:
        """Return whether a load has not got beyond the target yet."""
        progress = worker.progress or frames.Loading("target", 0.0)
        is_on_target = progress.stage == "target" and progress.fraction < 1
        return isinstance(self.state, LoadingPair) and is_on_target

    def _drop_draft(self, engine: LoadedEngine, death: Death) -> None:
        """Have the next load leave out what drafts, and fail the requests."""
        cause, how = self._cause_of(engine), death.description
        problem = self._room.crashes.drop_draft(engine.pair, cause, how)
        log.warning("%s: %s", self.name, problem)
        error = death.error(self._room.config.watchdog)
        engine.worker.fail(type(error)(f"{error.message} {problem}"))

    def _may_load_smaller(self, engine: LoadedEngine, death: Death) -> bool:
        """Return whether to halve the context of a load that ran out of memory, if none was configured."""
        loading = isinstance(self.state, LoadingPair)
        can_shrink = (
            not engine.config.context and engine.planned.settings.n_ctx > _MIN_HALVED_CONTEXT
        )
        return loading and death.out_of_memory and can_shrink and not engine.smaller

    def _fail_suspects(
        self, engine: LoadedEngine, suspects: list[RunningRequest], death: Death
    ) -> None:
        """Fail the requests whose text was being tokenized. Neither the pair nor the kernels are blamed.

        A text is remembered if it was the only one, and a first decode cannot have been the cause.
        """
        worker = engine.worker
        if len(suspects) == 1 and (worker.decoded or not worker.in_stage("prepared")):
            self._room.deadly_texts.add(self._cause_of(engine), suspects[0].request, death)

        def outcome(running: RunningRequest) -> Exception:
            if running in suspects:
                return deadly_text_error(death.description)
            return death.error(self._room.config.watchdog) if running.shown else RetryRequest()

        worker.fail(outcome)
