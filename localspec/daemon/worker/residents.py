"""The pairs in memory: as many as fit, each with a worker of its own.

Only one is loaded at a time, so that the free memory can be measured while no other load is taking it. If a
new pair does not fit, `room` decides which one leaves. This module makes it leave, and waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker import eviction
from localspec.daemon.worker.death import CrashHistory, DeadlyTexts, SafeMode
from localspec.daemon.worker.eviction import MIB, LoadPlan, LoadPlanner, PairMemory, ResidentPairs
from localspec.daemon.worker.loaded import LoadedEngine, LoadedPair, LoadingPair, Ready, Unloaded
from localspec.daemon.worker.process import Worker, spawn
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus

log = logging.getLogger("localspec.residents")

_MAX_UNLOADED_PAIRS = 64  # unloaded pairs that are remembered, for their measured speed


class RetentionPolicy(NamedTuple):
    """How long a pair stays in memory.

    keep: whether it stays until it is told to leave.
    idle_unload: seconds without a request, 0 for no limit, None for the configured time.
    """

    keep: bool = False
    idle_unload: float | None = None


class ResidentTable:
    """The pairs by name, and the memory that they share."""

    def __init__(
        self, config: Config, paths: Paths, counts: Counts, *, worker_command: Sequence[str]
    ) -> None:
        """Create the table of pairs. `worker_command` starts an engine, with `--fd N` appended."""
        self.config = config
        self.paths = paths
        self.counts = counts
        self.safe_mode = SafeMode(paths.state / "safe-mode.json")
        self.crashes = CrashHistory()
        self.deadly_texts = DeadlyTexts()
        # Returns the policy of a pair by its name.
        self.retention_policy: Callable[[str], RetentionPolicy] = lambda _: RetentionPolicy()
        self.last_loaded: frames.Loaded | None = (
            None  # the last load, even if it is unloaded by now
        )
        self._command = worker_command
        self._pairs: dict[str, LoadedPair] = {}
        self._load_lock = asyncio.Lock()
        self._loading_pair = ""  # the name of the pair that holds the lock
        self._evicted: dict[str, tuple[PairMemory, float]] = {}  # with the time of the last request
        self._change_waiters: list[asyncio.Future[None]] = []
        # Returns cache room to pairs that gave it up.
        self._give_back_task: asyncio.Task[None] | None = None
        self._over_budget = False  # the budget was lowered, and busy pairs must still leave
        self._draining = False

    # ------------------------------------------------------------------ the pairs

    def get(self, name: str) -> LoadedPair:
        """Return the pair of that name, loaded or not."""
        if name not in self._pairs:
            unused = [pair for pair in self._pairs.values() if pair.forgettable]
            for pair in sorted(unused, key=lambda pair: pair.used_at)[
                : -_MAX_UNLOADED_PAIRS or None
            ]:
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
        return [pair for pair in self.present if isinstance(pair.state, Ready)]

    @property
    def present(self) -> list[LoadedPair]:
        """The pairs in memory and those that are being loaded, the most recently used first."""
        pairs = [pair for pair in self._pairs.values() if not isinstance(pair.state, Unloaded)]
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
        return sum(pair.admission.waiting for pair in self._pairs.values())

    def running(self) -> int:
        """Return how many requests are running."""
        return sum(pair.running for pair in self._pairs.values())

    def is_loaded_or_loading(self, name: str) -> bool:
        """Return whether the pair is loaded or being loaded."""
        return name in self._pairs and self._pairs[name].files is not None

    def loaded_files(self, name: str) -> frames.PairFiles | None:
        """Return the files of the pair if it is loaded."""
        return self._pairs[name].files if self.info(name) else None

    def info(self, name: str) -> frames.Loaded | None:
        """Return the information on what is loaded under that name."""
        return self._pairs[name].info if name in self._pairs else None

    def note(self) -> str | None:
        """Return a note for a person about how answers come about, or None."""
        return self.safe_mode.note()

    def most_recent(self) -> LoadedPair:
        """Return the most recently used pair in memory, or the configured one."""
        present = self.present
        return present[0] if present else self.get(self.config.pair)

    def statuses(self) -> list[PairStatus]:
        """Return the statuses of all pairs in memory and of those being loaded."""
        return [pair.status() for pair in self.present]

    # ------------------------------------------------------------------ the Room protocol

    async def spawn(self, pair: LoadedPair) -> Worker:
        worker = await spawn(self._command, pair, self.config.watchdog)
        self.counts.worker_starts += 1
        return worker

    def idle_seconds(self, name: str) -> float:
        stay = self.retention_policy(name)
        if stay.idle_unload is not None:
            return stay.idle_unload
        return 0.0 if stay.keep else self.config.idle_unload

    def is_kept(self, name: str) -> bool:
        return self.retention_policy(name).keep

    async def wait_for_change(self) -> None:
        change = asyncio.get_running_loop().create_future()
        self._change_waiters.append(change)
        try:
            await change
        finally:
            self._change_waiters.remove(change)

    def notify_change(self) -> None:
        if self._over_budget:
            self._enforce_budget(self.config.memory * MIB)
        for change in self._change_waiters:
            if not change.done():
                change.set_result(None)

    @contextlib.asynccontextmanager
    async def make_room(
        self, pair: LoadedPair, loading: LoadingPair, failed: LoadedEngine | None
    ) -> AsyncIterator[LoadPlan]:
        try:
            while True:
                loading.behind = self._loading_pair
                async with self._load_lock:
                    loading.behind, self._loading_pair = "", pair.name
                    try:
                        decision = await self._make_room(pair, loading, failed)
                        if isinstance(decision, LoadPlan):
                            self._set_giving_way(pair, None)
                            self._evicted.pop(pair.name, None)
                            yield decision
                            self.last_loaded = pair.info
                            return
                    finally:
                        self._loading_pair = ""
                loading.behind = decision.name
                self._set_giving_way(pair, decision.name)
                await self._wait_for_quiet_pair(pair)
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

    # ------------------------------------------------------------------ eviction

    async def _make_room(
        self, newcomer: LoadedPair, loading: LoadingPair, failed: LoadedEngine | None
    ) -> LoadPlan | eviction.WaitForPair:
        """Return a plan that fits, or the pair to wait for. Raises LoadFailed if there is neither."""
        spared: set[str] = set()
        while True:
            for pair in self.all:
                await pair.wait_until_gone()  # the memory of an ending worker is not free before
            config = self.config
            decision = await self._decide(newcomer, loading.pair, failed, spared)
            if isinstance(decision, eviction.DoesNotFit):
                raise errors.LoadFailed(decision.message)
            if isinstance(decision, eviction.ShrinkCaches):
                spared.update(decision.names)
                await asyncio.gather(*map(self._give_up_room, decision.names))
            elif isinstance(decision, eviction.EvictPair):
                self._evict(self._pairs[decision.name])
            elif config is self.config:
                return decision

    async def _decide(
        self,
        newcomer: LoadedPair,
        pair: frames.PairFiles,
        failed: LoadedEngine | None,
        spared: Collection[str],
    ) -> (
        LoadPlan
        | eviction.ShrinkCaches
        | eviction.EvictPair
        | eviction.WaitForPair
        | eviction.DoesNotFit
    ):
        """Decide in a thread how to load a pair. `spared` are the pairs that gave up unused memory."""
        others = self._others(newcomer)
        kept = [pair for pair in others if self.is_kept(pair.name)]
        busy = [pair for pair in others if pair.answering and pair not in kept]
        idle = [pair for pair in others if not pair.answering and pair not in kept]
        if failed and idle:  # memory has run out, whatever was computed
            return eviction.EvictPair(idle[0].name)
        budget = self.config.memory * MIB
        settings = eviction.engine_settings(self.config, self.paths, safe_mode=self.safe_mode.on)
        engines = [
            [pair.state.engine for pair in group if isinstance(pair.state, Ready)]
            for group in (kept, idle, busy)
        ]
        evicted = [holding for holding, _ in self._evicted_lately(newcomer)]

        def measure_and_decide() -> (
            LoadPlan
            | eviction.ShrinkCaches
            | eviction.EvictPair
            | eviction.WaitForPair
            | eviction.DoesNotFit
        ):
            kept, idle, busy = (_holdings(group, spared) for group in engines)
            standing = ResidentPairs(kept, idle, busy, evicted)
            plans, note = LoadPlanner.for_this_machine(pair, settings), ""
            if failed:
                plans, note = plans.with_half_context(failed.planned)
            decision = eviction.decide_eviction(
                plans, standing, eviction.MemorySnapshot.measure(standing.all), budget
            )
            if note and isinstance(decision, LoadPlan):
                decision = decision._replace(notes=(*decision.notes, note))
            return decision

        return await asyncio.to_thread(measure_and_decide)

    def _others(self, newcomer: LoadedPair) -> list[LoadedPair]:
        """Return the other pairs in memory, the least recently used first."""
        return [pair for pair in reversed(self.loaded) if pair is not newcomer]

    def _evicted_lately(self, newcomer: LoadedPair) -> list[tuple[PairMemory, float]]:
        """Return the pairs that would still be in memory if they had not been evicted, with their last use.

        The most recently used is first.
        """
        now = time.monotonic()
        for name, (_, used) in [*self._evicted.items()]:
            seconds = self.idle_seconds(name)
            if seconds and now - used > seconds:
                del self._evicted[name]
        entries = [entry for name, entry in self._evicted.items() if name != newcomer.name]
        return sorted(entries, key=lambda entry: entry[1], reverse=True)

    def _evict(self, pair: LoadedPair) -> None:
        """Unload a pair for another one, unless it got a request meanwhile."""
        if isinstance(pair.state, Ready) and not pair.answering:
            log.info("%s is unloaded: another pair needs the memory", pair.name)
            self._evicted[pair.name] = _holding(pair.state.engine), pair.used_at
            pair.unload_soon()

    async def _give_up_room(self, name: str) -> None:
        """Make the pair give up unused memory for prompts without a slot."""
        engine = self._pairs[name].state.engine
        if engine:
            log.info("%s gives up room for prompts: another pair needs the memory", name)
            await self._pairs[name].limit_cache(engine.min_cache_bytes)

    def on_memory_freed(self) -> None:
        """Return memory to pairs that gave it up for another one."""
        if not self._give_back_task and not self._draining:
            self._give_back_task = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        async with self._load_lock:
            self._give_back_task = None
            for pair in self.loaded:
                engine = pair.state.engine
                if engine and engine.given_up_bytes:
                    unplanned = await self._measure_unplanned()
                    # Use the plan from before the measurement. If the engine is gone, nothing is sent.
                    plan = engine.planned.plan
                    assert plan is not None
                    await pair.limit_cache(
                        plan.prefixes + min(engine.given_up_bytes, unplanned // 2)
                    )

    async def _measure_unplanned(self) -> int:
        """Return the bytes that no load has planned."""
        budget = self.config.memory * MIB
        engines = [pair.state.engine for pair in self.loaded if pair.state.engine]

        def measure() -> int:
            holdings = _holdings(engines)
            return (
                eviction.MemorySnapshot.measure(holdings)
                .free_beside({}, holdings)
                .reserve((), budget)
                .free.ram
            )

        return await asyncio.to_thread(measure)

    async def _wait_for_quiet_pair(self, newcomer: LoadedPair) -> None:
        while all(
            pair.answering or self.is_kept(pair.name) for pair in self._others(newcomer)
        ) and self._others(newcomer):
            await self.wait_for_change()

    # ------------------------------------------------------------------ all pairs

    def configure(self, config: Config) -> None:
        """Use another configuration: at once where possible, else from the next request, which reloads."""
        self.config = config
        for pair in self._pairs.values():
            pair.admission.limit = config.queue
            pair.start_idle_timer()  # restarts the timer with the new time
        self._enforce_budget(config.memory * MIB)
        self.notify_change()

    def _enforce_budget(self, budget: int) -> None:
        """Evict idle pairs until all are within the budget in bytes (0: no limit). Busy ones leave later."""
        self._over_budget = (
            False  # an eviction calls `notify_change`, which must not call this again
        )
        for pair in reversed(self.present) if budget else ():
            engines = [e.state.engine for e in self.present if e.state.engine]
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

    async def forget(self, conversation: str | None) -> None:
        """Drop everything of a conversation, or of all with None, from the engines and their files."""
        await asyncio.gather(*(pair.forget(conversation) for pair in self.all))

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self.crashes.reset()
        self.deadly_texts.reset()
        if self.safe_mode.on:
            self.safe_mode.forget()
            for pair in self.all:
                pair.unload_soon()

    def drain(self) -> None:
        """Admit no more requests."""
        self._draining = True
        for pair in self.all:
            pair.admission.close()

    async def close(self) -> None:
        """End all workers and wait for them."""
        self._draining = True
        if self._give_back_task:
            self._give_back_task.cancel()
        await asyncio.gather(*(pair.close() for pair in self.all))


def _holding(engine: LoadedEngine, spared: Collection[str] = ()) -> PairMemory:
    """Return the memory of an engine. Pairs in `spared` have nothing more to give up."""
    spare = 0 if engine.pair.name in spared else engine.spare_bytes
    context = engine.config.context
    return PairMemory.from_plan(engine.pair, engine.worker.pid, engine.planned, context, spare)


def _holdings(engines: Iterable[LoadedEngine], spared: Collection[str] = ()) -> list[PairMemory]:
    return [_holding(engine, spared) for engine in engines]
