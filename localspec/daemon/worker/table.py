"""The table of pairs: carry requests to their engine workers, and keep as many pairs in memory as fit.

A request goes through the queue of its pair into the worker, and once more if that dies. The first request
for a pair starts its worker, and an idle time ends it. If the worker dies, every request in it fails with
the cause, and the next request starts another one. A death at the first decode is tried again once in safe
mode. A death caused by a request's text fails that request. The others are sent to the next worker, unless
part of their answer was already shown. The workers of other pairs are not affected.

Only one pair is loaded at a time, so that the free memory can be measured while no other load is taking it.
If a new pair does not fit, `eviction` decides which one leaves. The table makes it leave, and waits for that.

Requests for pairs of other servers take the same way without a worker. If the server does not respond, the
pair's fallback answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon import logs
from localspec.daemon.worker import eviction
from localspec.daemon.worker.clients import Clients
from localspec.daemon.worker.death import CrashHistory, SafeMode
from localspec.daemon.worker.eviction import PairMemory, ResidentPairs
from localspec.daemon.worker.loaded import Load, LoadedEngine, LoadedPair
from localspec.daemon.worker.metrics import Metrics
from localspec.daemon.worker.plan import MIB, LoadPlan, LoadPlanner, engine_settings
from localspec.daemon.worker.process import (
    DEFAULT_COMMAND,
    Event,
    EventHandler,
    Request,
    RetryRequest,
    RunningRequest,
    Worker,
)
from localspec.daemon.worker.queue import Job
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Figures, PairStatus, UpstreamStatus
from localspec.protocol.frames import PairFiles
from localspec.protocol.settings import MAX_PARALLEL
from localspec.registry.catalogue import Preset

log = logging.getLogger("localspec.pairs")

_MAX_UNLOADED_PAIRS = 64  # unloaded pairs that are remembered, for their measured speed


async def _ignore_event(_: Event) -> None:
    pass


class PairTable:
    """The pairs by name, their requests, and the memory that they share."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
        elsewhere: Callable[[], Any] = lambda: None,
    ) -> None:
        """Create the table. `worker_command` starts an engine, with `--fd N` appended.

        `elsewhere` is called at the first request for a pair of another server. It returns the `Upstreams` of
        the extra, which the core does not import.
        """
        self.config = config  # a change takes effect with the next request
        self.paths = paths
        self.worker_command = worker_command
        self.metrics = Metrics()
        self.clients = Clients(paths.state / "clients.json")
        self.counts = self.metrics.counts
        self.safe_mode = SafeMode(paths.state / "safe-mode.json")
        self.crashes = CrashHistory()
        # Returns what models.toml states about a pair, by its name.
        self.preset: Callable[[str], Preset] = lambda _: Preset()
        # The last load, even if it is unloaded by now.
        self.last_loaded: frames.Loaded | None = None
        self._upstreams: Any = None
        self._create_upstreams = elsewhere
        self._pairs: dict[str, LoadedPair] = {}
        self._load_lock = asyncio.Lock()
        self._loading_pair = ""  # the name of the pair that holds the lock
        self._evicted: dict[str, tuple[PairMemory, float]] = {}  # with the time of the last request
        self._change = asyncio.Event()  # set, and replaced, when the state of some pair changes
        # Returns cache room to pairs that gave it up.
        self._give_back_task: asyncio.Task[None] | None = None
        self._over_budget = False  # the budget was lowered, and busy pairs must still leave
        self._draining = False

    async def generate(
        self,
        pair: PairFiles,
        request: frames.Generate,
        take: EventHandler = _ignore_event,
        job: Job | None = None,
    ) -> frames.Done:
        """Call `take` with Started, Delta… and Done, and return Done.

        If `take` raises or this is cancelled, so is the request in the worker. `job` is what the queue knows
        about it. Raises QueueFull, Unavailable, PairSetAside or LoadFailed if it did not start,
        and WorkerDied, WorkerTimeout or InvalidRequest… if the worker ended or refused it.
        """
        if self.config.log_prompts and not request.private:
            prompt = request.prompt
            if isinstance(prompt, frames.ChatPrompt):
                # One picture would fill the log, so only its mark in the text is left.
                prompt = msgspec.structs.replace(prompt, pictures=[])
            logs.log_prompt(request.conversation, msgspec.json.encode(prompt).decode())
        job = job or Job.of(request)
        # The pairs of other servers that did not respond.
        failed: list[tuple[PairFiles, errors.UpstreamUnreachable]] = []
        tried, adapted, notice = pair, request, ""

        async def take_with_notice(event: Event) -> None:
            if isinstance(event, frames.Started):
                event.news, event.stand_in = notice, tried.name
            await take(event)

        while True:
            try:
                taker = take_with_notice if failed else take
                return await self._generate(tried, adapted, taker, job)
            except errors.UpstreamUnreachable as error:
                failed.append((tried, error))
            tried, adapted, notice = await self.upstream_pairs.fallback_pair(request, failed)
            job.placed = False

    async def _generate(
        self, pair: PairFiles, request: frames.Generate, take: EventHandler, job: Job
    ) -> frames.Done:
        loaded_pair = self._admitting(pair)
        request.form = self.clients.form(request.client)
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
                        if event.sent_back is not None:
                            self.clients.learn(request.client, event.sent_back)
                        loaded_pair.learn_speeds(event)
                        return event
                    except RetryRequest:
                        log.info("a request is sent once more, to a new worker")

    def check_room(self, pair: PairFiles, request: frames.Generate) -> None:
        """Check that a request would be admitted or queued now. Raises QueueFull or Unavailable."""
        self._admitting(pair).admission.check_room(Job.of(request))

    def _admitting(self, pair: PairFiles) -> LoadedPair:
        loaded_pair = self.get(pair.name)
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
        if pair.upstream is not None or (worker := self.get(pair.name).worker) is None:
            return False
        ended = [await worker.end_thoughts(request) for request in requests]
        return any(ended)

    async def ask(self, pair: PairFiles, request: Request) -> frames.Reply:
        """Return the reply to a small request (tokenize…), which does not wait in the queue.

        Raises PairSetAside, LoadFailed, WorkerDied or InvalidRequest… if there is no reply.
        """
        if pair.upstream is not None:
            check_purpose(pair, request)
            reply: frames.Reply = await self.upstream_pairs.ask(pair, request)
            return reply
        loaded_pair = self.get(pair.name)
        with loaded_pair.in_use():
            while True:
                with contextlib.suppress(RetryRequest):
                    worker = await self._worker_for(loaded_pair, pair, request)
                    with worker.running(request) as running:
                        answer = await running.next()
                    assert isinstance(answer, frames.Reply)
                    if isinstance(request, frames.Embed | frames.Rerank):
                        self.metrics.count_embeddings(answer.value["tokens"])
                    return answer

    async def _worker_for(
        self, loaded_pair: LoadedPair, pair: PairFiles, request: Request
    ) -> Worker:
        check_purpose(pair, request)
        engine = await loaded_pair.ready(pair)
        assert loaded_pair.info is not None
        loaded_pair.forecast.use_pair(loaded_pair.info)
        return engine.worker

    async def ready(self, pair: PairFiles) -> frames.Loaded:
        """Load the pair if necessary and return what is loaded. Raises as `LoadedPair.ready`."""
        if pair.upstream is not None:
            info: frames.Loaded = self.upstream_pairs.info(pair)
            return info
        loaded_pair = self.get(pair.name)
        with loaded_pair.in_use():
            await loaded_pair.ready(pair)
            assert loaded_pair.info is not None
            return loaded_pair.info

    @property
    def upstream_pairs(self) -> Any:
        """The pairs that other servers answer for, an `Upstreams` of the extra."""
        self._upstreams = self._upstreams or self._create_upstreams()
        return self._upstreams

    def upstreams(self) -> list[UpstreamStatus]:
        """Return the status of the servers that were used."""
        return self._upstreams.statuses() if self._upstreams else []

    def forget_upstream(self, name: str) -> None:
        """Drop what is known about the server of a pair that was removed."""
        if self._upstreams:
            self._upstreams.forget(name)

    def get(self, name: str) -> LoadedPair:
        if name not in self._pairs:
            unused = [pair for pair in self._pairs.values() if pair.forgettable]
            unused.sort(key=lambda pair: pair.used_at, reverse=True)
            for pair in unused[_MAX_UNLOADED_PAIRS:]:
                del self._pairs[pair.name]
            self._pairs[name] = LoadedPair(name, self)
            if self._draining:
                self._pairs[name].admission.close()
        return self._pairs[name]

    @property
    def all(self) -> list[LoadedPair]:
        """The pairs that are in use, are loaded or were so lately."""
        return [*self._pairs.values()]

    @property
    def loaded(self) -> list[LoadedPair]:
        """The pairs in memory, the most recently used first."""
        return [pair for pair in self.present if pair.info]

    @property
    def present(self) -> list[LoadedPair]:
        """The pairs in memory and those that are being loaded, the most recently used first."""
        pairs = [pair for pair in self._pairs.values() if pair.files]
        return sorted(pairs, key=lambda pair: pair.used_at, reverse=True)

    @property
    def pids(self) -> list[int]:
        """The process ids of the engine workers."""
        return [pair.worker.pid for pair in self._pairs.values() if pair.worker]

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is being loaded."""
        return any(pair.busy for pair in self._pairs.values())

    def waiting(self) -> int:
        """Return how many requests wait, for all pairs."""
        return sum(pair.admission.waiting for pair in self._pairs.values())

    def running(self) -> int:
        """Return how many requests are running."""
        return sum(pair.running for pair in self._pairs.values())

    def is_loaded_or_loading(self, name: str) -> bool:
        return name in self._pairs and self._pairs[name].files is not None

    def loaded_files(self, name: str) -> PairFiles | None:
        return self._pairs[name].files if self.info(name) else None

    def info(self, name: str) -> frames.Loaded | None:
        """Return the information on what is loaded under that name."""
        return self._pairs[name].info if name in self._pairs else None

    def most_recent(self) -> LoadedPair:
        """Return the most recently used pair in memory, or the configured one."""
        present = self.present
        return present[0] if present else self.get(self.config.pair)

    def statuses(self) -> list[PairStatus]:
        """Return the statuses of all pairs in memory and of those being loaded."""
        return [pair.status() for pair in self.present]

    def figures(self) -> Figures:
        """Return the figures of all pairs' answers for `localspec status`."""
        return self.metrics.figures(self.most_recent().forecast.prompt_per_second)

    def idle_seconds(self, name: str) -> float:
        """Return the idle time after which the pair is unloaded, 0 for never."""
        stay = self.preset(name)
        if stay.idle_unload is not None:
            return stay.idle_unload
        return 0.0 if stay.keep else self.config.idle_unload

    def is_kept(self, name: str) -> bool:
        """Return whether the pair is never evicted for another one."""
        return self.preset(name).keep

    async def wait_for_change(self) -> None:
        """Wait until the state of some pair changes."""
        await self._change.wait()

    def notify_change(self) -> None:
        """Wake those that wait for a change."""
        if self._over_budget:
            self._enforce_budget()
        self._change.set()
        self._change = asyncio.Event()

    @contextlib.asynccontextmanager
    async def make_room(
        self, pair: LoadedPair, load: Load, failed: LoadedEngine | None
    ) -> AsyncIterator[LoadPlan]:
        """Make room for a load, which is the block, and yield its plan. `failed` ran out of memory before.

        Raises LoadFailed if there is no room, and none can be made.
        """
        try:
            while True:
                load.behind = self._loading_pair
                async with self._load_lock:
                    load.behind, self._loading_pair = "", pair.name
                    try:
                        decision = await self._make_room(pair, load, failed)
                        if isinstance(decision, LoadPlan):
                            self._set_giving_way(pair, None)
                            self._evicted.pop(pair.name, None)
                            yield decision
                            self.last_loaded = pair.info
                            return
                    finally:
                        self._loading_pair = ""
                load.behind = decision.name
                self._set_giving_way(pair, decision.name)
                # Wait for a pair that could be evicted, or until there is no other pair.
                while (others := self._others(pair)) and all(
                    other.answering or self.is_kept(other.name) for other in others
                ):
                    await self.wait_for_change()
        finally:
            self._set_giving_way(pair, None)

    def _set_giving_way(self, newcomer: LoadedPair, name: str | None) -> None:
        """Make the pair of that name, and no other, give way to the new pair."""
        for pair in self._pairs.values():
            if pair.name == name:
                pair.gives_way = newcomer.name
            elif pair.gives_way == newcomer.name:
                pair.gives_way = ""
        self.notify_change()

    async def _make_room(
        self, newcomer: LoadedPair, load: Load, failed: LoadedEngine | None
    ) -> LoadPlan | eviction.WaitForPair:
        """Return a plan that fits, or the pair to wait for. Raises LoadFailed if there is neither."""
        spared: set[str] = set()  # pairs that gave up unused memory
        while True:
            for pair in self.all:
                await pair.wait_until_gone()  # the memory of an ending worker is not free before
            config = self.config
            decision = await self._decide(newcomer, load.pair, failed, spared)
            if isinstance(decision, eviction.DoesNotFit):
                raise errors.LoadFailed(decision.message)
            if isinstance(decision, eviction.ShrinkCaches):
                spared.update(decision.names)
                await asyncio.gather(*map(self._shrink_cache, decision.names))
            elif isinstance(decision, eviction.EvictPair):
                self._evict(self._pairs[decision.name])
            elif config is self.config:
                return decision

    async def _decide(
        self,
        newcomer: LoadedPair,
        pair: PairFiles,
        failed: LoadedEngine | None,
        spared: Collection[str],
    ) -> eviction.Decision:
        """Decide in a thread how to load a pair. `spared` are the pairs that gave up unused memory."""
        kept: list[LoadedEngine] = []
        idle: list[LoadedEngine] = []
        busy: list[LoadedEngine] = []
        for other in self._others(newcomer):
            assert other.engine is not None
            group = kept if self.is_kept(other.name) else busy if other.answering else idle
            group.append(other.engine)
        if failed and idle:  # memory has run out, whatever was computed
            return eviction.EvictPair(idle[0].pair.name)
        settings = engine_settings(self.config, self.paths, safe_mode=self.safe_mode.on)
        evicted, budget = self._evicted_lately(newcomer), self.config.memory * MIB

        def measure_and_decide() -> eviction.Decision:
            from localspec import machine

            standing = ResidentPairs(
                *(_holdings(kept, spared), _holdings(idle, spared), _holdings(busy, spared)),
                evicted,
            )
            plans, note = LoadPlanner(pair, settings, machine.installed_backend()), ""
            if failed:
                plans, note = plans.with_half_context(failed.planned)
            snapshot = eviction.MemorySnapshot.measure(standing.all)
            decision = eviction.decide_eviction(plans, standing, snapshot, budget)
            if note and isinstance(decision, LoadPlan):
                decision = decision._replace(notes=(*decision.notes, note))
            return decision

        return await asyncio.to_thread(measure_and_decide)

    def _others(self, newcomer: LoadedPair) -> list[LoadedPair]:
        """Return the other pairs in memory, the least recently used first."""
        return [pair for pair in reversed(self.loaded) if pair is not newcomer]

    def _evicted_lately(self, newcomer: LoadedPair) -> list[PairMemory]:
        """Return the pairs that only evictions have removed from memory, the most recently used first."""
        now = time.monotonic()
        for name, (_, used) in [*self._evicted.items()]:
            seconds = self.idle_seconds(name)
            if seconds and now - used > seconds:
                del self._evicted[name]
        entries = [entry for name, entry in self._evicted.items() if name != newcomer.name]
        return [holding for holding, _ in sorted(entries, key=lambda entry: -entry[1])]

    def _evict(self, pair: LoadedPair) -> None:
        """Unload a pair for another one, unless it got a request meanwhile."""
        if pair.engine and not pair.answering:
            log.info("%s is unloaded: another pair needs the memory", pair.name)
            self._evicted[pair.name] = _holdings([pair.engine])[0], pair.used_at
            pair.unload_soon()

    async def _shrink_cache(self, name: str) -> None:
        """Make the pair give up unused memory for prompts without a slot."""
        if engine := self._pairs[name].engine:
            log.info("%s gives up room for prompts: another pair needs the memory", name)
            await self._pairs[name].limit_cache(engine.min_cache_bytes)

    def on_memory_freed(self) -> None:
        """Return memory to pairs that gave it up for another one."""
        if not self._give_back_task and not self._draining:
            self._give_back_task = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        def measure_unplanned(engines: list[LoadedEngine], budget: int) -> int:
            """Return the bytes that no load has planned."""
            holdings = _holdings(engines)
            snapshot = eviction.MemorySnapshot.measure(holdings)
            return snapshot.free_beside({}, holdings).reserve((), budget).free.ram

        async with self._load_lock:
            self._give_back_task = None
            for pair in self.loaded:
                engine = pair.engine
                if engine and engine.given_up_bytes:
                    engines = [other.engine for other in self.loaded if other.engine]
                    budget = self.config.memory * MIB
                    unplanned = await asyncio.to_thread(measure_unplanned, engines, budget)
                    # Use the plan from before the measurement. If the engine is gone, nothing is sent.
                    plan = engine.planned.plan
                    assert plan is not None
                    given_back = min(engine.given_up_bytes, unplanned // 2)
                    await pair.limit_cache(plan.prefixes + given_back)

    def configure(self, config: Config) -> None:
        """Use another configuration: at once where possible, else from the next request, which reloads."""
        self.config = config
        for pair in self._pairs.values():
            pair.admission.limit = config.queue
            pair.start_idle_timer()  # restarts the timer with the new time
        self._enforce_budget()
        self.notify_change()

    def _enforce_budget(self) -> None:
        """Evict idle pairs until all are within the budget. Busy ones leave later."""
        budget = self.config.memory * MIB
        self._over_budget = False  # An eviction calls `notify_change`, which must not call this.
        for pair in reversed(self.present) if budget else ():
            engines = [other.engine for other in self.present if other.engine]
            if eviction.total_bytes(_holdings(engines)) <= budget:
                return
            if not pair.answering and not self.is_kept(pair.name):
                self._evict(pair)
        self._over_budget = bool(budget) and any(pair.answering for pair in self.present)

    async def unload(self, names: Iterable[str] | None = None) -> list[str]:
        """End the workers of these pairs, or of all, and wait until their memory is free.

        Return the names of those that had a worker. Requests that still run fail.
        """
        pairs = [pair for pair in self.all if names is None or pair.name in names]
        unloaded = [pair.name for pair in pairs if pair.worker]
        for name in unloaded:
            self._evicted.pop(name, None)
        await asyncio.gather(*(pair.unload() for pair in pairs))
        return unloaded

    async def unload_idle(self, name: str | None = None) -> list[str]:
        """Unload the pair `name`, or all pairs, except those at work. Return the names of those unloaded.

        Raises:
            Conflict: Some pairs are busy. All others have been unloaded.
        """
        pairs = [pair for pair in self.all if name in (None, pair.name)]
        busy = [pair.name for pair in pairs if pair.busy]
        released = await self.unload({pair.name for pair in pairs if pair.name not in busy})
        if len(busy) > 1:
            raise errors.Conflict(
                f"These pairs are busy: {', '.join(busy)}; wait for their answers, then try again."
            )
        if busy:
            raise errors.Conflict(
                f"The pair {busy[0]} is busy; wait for its answer, then try again."
            )
        return released

    async def forget(self, conversation: str | None) -> None:
        """Drop everything of a conversation, or of all with None, from the engines and their files."""
        if conversation is None:
            self.clients.forget()
        await asyncio.gather(*(pair.forget(conversation) for pair in self.all))

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self.crashes.reset()
        if self.safe_mode.on:
            self.safe_mode.forget()
            for pair in self.all:
                pair.unload_soon()

    def drain(self) -> int:
        """Admit no more requests, and end all loads. Return how many requests are running."""
        self._draining = True
        for pair in self.all:
            pair.admission.close()
            pair.cancel_load()
        self.notify_change()
        return self.running()

    def check_open(self) -> None:
        """Raise Unavailable if the daemon is ending, which loads nothing any more."""
        if self._draining:
            raise errors.Unavailable("The daemon was stopped.", retry_after=2)

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail every request that runs or waits."""
        for pair in self.all:
            pair.abort(error)
        if self._upstreams:
            self._upstreams.abort(error)

    async def close(self) -> None:
        """End all workers and connections, and wait for them."""
        if self._upstreams:
            await self._upstreams.close()
        self._draining = True
        if self._give_back_task:
            self._give_back_task.cancel()
        self.clients.save()
        await asyncio.gather(*(pair.close() for pair in self.all))


def _holdings(engines: Iterable[LoadedEngine], spared: Collection[str] = ()) -> list[PairMemory]:
    """Return the memory of engines. Pairs in `spared` have nothing more to give up."""
    return [
        PairMemory.from_plan(
            engine.pair,
            engine.worker.pid,
            engine.planned,
            engine.config.context,
            0 if engine.pair.name in spared else engine.spare_bytes,
        )
        for engine in engines
    ]


def check_purpose(pair: PairFiles, request: Request) -> None:
    """Refuse a request that the model cannot serve, before it is loaded in vain. Raises InvalidRequest."""
    name, pooling = pair.name, pair.pooling
    is_reranker, reason = pooling == "rank", ""
    match request:
        case frames.Embed() | frames.Rerank() if pair.upstream:
            reason = f"'{name}' is served by another server, which only answers with text"
        case frames.Embed() if pooling is None:
            reason = f"'{name}' writes text and computes no embeddings; name an embedding model"
        case frames.Embed() if is_reranker:
            reason = f"'{name}' is a reranker and computes no embeddings: POST /v1/rerank"
        case frames.Rerank() if pooling is None:
            reason = f"'{name}' writes text and ranks no documents; name a reranker"
        case frames.Rerank() if not is_reranker:
            reason = f"'{name}' computes embeddings and ranks no documents; name a reranker"
        case frames.Generate() | frames.ApplyTemplate() | frames.CountTokens() if is_reranker:
            reason = f"'{name}' is a reranker and writes no text: POST /v1/rerank"
        case frames.Generate() | frames.ApplyTemplate() | frames.CountTokens() if pooling:
            reason = f"'{name}' is an embedding model and writes no text: POST /v1/embeddings"
    if reason:
        message = f"{reason}. To see what there is: localspec list"
        raise errors.InvalidRequest(message, param="model")
