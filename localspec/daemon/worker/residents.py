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
from localspec.daemon.worker.eviction import MIB, Holding, Planned, Plans, Standing
from localspec.daemon.worker.loaded import Engine, LoadedPair, Loading, Ready, Unloaded
from localspec.daemon.worker.process import Worker, spawn
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus

log = logging.getLogger("localspec.residents")

_MAX_UNLOADED_PAIRS = 64  # unloaded pairs that are remembered, for their measured speed


class Stay(NamedTuple):
    """How long a pair stays in memory.

    keep: whether it stays until it is told to leave.
    idle_unload: seconds without a request, 0 for no limit, None for the configured time.
    """

    keep: bool = False
    idle_unload: float | None = None


class Residents:
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
        self.stay: Callable[[str], Stay] = lambda _: Stay()
        self.last: frames.Loaded | None = None  # the last load, even if it is unloaded by now
        self._command = worker_command
        self._pairs: dict[str, LoadedPair] = {}
        self._load_lock = asyncio.Lock()
        self._loading_pair = ""  # the name of the pair that holds the lock
        self._evicted: dict[str, tuple[Holding, float]] = {}  # with the time of the last request
        self._change_waiters: list[asyncio.Future[None]] = []
        # Returns cache room to pairs that gave it up.
        self._give_back_task: asyncio.Task[None] | None = None
        self._over_budget = False  # the budget was lowered, and busy pairs must still leave
        self._draining = False

    # ------------------------------------------------------------------ the pairs

    def of(self, name: str) -> LoadedPair:
        """Return the pair of that name, loaded or not."""
        if name not in self._pairs:
            unused = [pair for pair in self._pairs.values() if pair.forgettable]
            for pair in sorted(unused, key=lambda pair: pair.used)[: -_MAX_UNLOADED_PAIRS or None]:
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
        return sorted(pairs, key=lambda pair: pair.used, reverse=True)

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

    def uses(self, name: str) -> bool:
        """Return whether the pair is loaded or being loaded."""
        return name in self._pairs and self._pairs[name].files is not None

    def holds(self, name: str) -> frames.PairFiles | None:
        """Return the files of the pair if it is loaded."""
        return self._pairs[name].files if self.info(name) else None

    def info(self, name: str) -> frames.Loaded | None:
        """Return the information on what is loaded under that name."""
        return self._pairs[name].info if name in self._pairs else None

    def note(self) -> str | None:
        """Return a note for a person about how answers come about, or None."""
        return self.safe_mode.note()

    def shown(self) -> LoadedPair:
        """Return the most recently used pair in memory, or the configured one."""
        present = self.present
        return present[0] if present else self.of(self.config.pair)

    def statuses(self) -> list[PairStatus]:
        """Return the statuses of all pairs in memory and of those being loaded."""
        return [pair.status() for pair in self.present]

    # ------------------------------------------------------------------ the Room protocol

    async def spawn(self, pair: LoadedPair) -> Worker:
        worker = await spawn(self._command, pair, self.config.watchdog)
        self.counts.worker_starts += 1
        return worker

    def idle_seconds(self, name: str) -> float:
        stay = self.stay(name)
        if stay.idle_unload is not None:
            return stay.idle_unload
        return 0.0 if stay.keep else self.config.idle_unload

    def keeps(self, name: str) -> bool:
        return self.stay(name).keep

    async def change(self) -> None:
        change = asyncio.get_running_loop().create_future()
        self._change_waiters.append(change)
        try:
            await change
        finally:
            self._change_waiters.remove(change)

    def changed(self) -> None:
        if self._over_budget:
            self._enforce_budget(self.config.memory * MIB)
        for change in self._change_waiters:
            if not change.done():
                change.set_result(None)

    @contextlib.asynccontextmanager
    async def place(
        self, pair: LoadedPair, loading: Loading, failed: Engine | None
    ) -> AsyncIterator[Planned]:
        try:
            while True:
                loading.behind = self._loading_pair
                async with self._load_lock:
                    loading.behind, self._loading_pair = "", pair.name
                    try:
                        decision = await self._make_room(pair, loading, failed)
                        if isinstance(decision, Planned):
                            self._set_giving_way(pair, None)
                            self._evicted.pop(pair.name, None)
                            yield decision
                            self.last = pair.info
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
        self.changed()

    # ------------------------------------------------------------------ eviction

    async def _make_room(
        self, newcomer: LoadedPair, loading: Loading, failed: Engine | None
    ) -> Planned | eviction.Waits:
        """Return a plan that fits, or the pair to wait for. Raises LoadFailed if there is neither."""
        spared: set[str] = set()
        while True:
            for pair in self.all:
                await pair.gone()  # the memory of an ending worker is not free before
            config = self.config
            decision = await self._decide(newcomer, loading.pair, failed, spared)
            if isinstance(decision, eviction.Refused):
                raise errors.LoadFailed(decision.message)
            if isinstance(decision, eviction.Spares):
                spared.update(decision.names)
                await asyncio.gather(*map(self._give_up_room, decision.names))
            elif isinstance(decision, eviction.Leaves):
                self._evict(self._pairs[decision.name])
            elif config is self.config:
                return decision

    async def _decide(
        self,
        newcomer: LoadedPair,
        pair: frames.PairFiles,
        failed: Engine | None,
        spared: Collection[str],
    ) -> Planned | eviction.Spares | eviction.Leaves | eviction.Waits | eviction.Refused:
        """Decide in a thread how to load a pair. `spared` are the pairs that gave up unused memory."""
        others = self._others(newcomer)
        kept = [pair for pair in others if self.keeps(pair.name)]
        busy = [pair for pair in others if pair.answering and pair not in kept]
        idle = [pair for pair in others if not pair.answering and pair not in kept]
        if failed and idle:  # memory has run out, whatever was computed
            return eviction.Leaves(idle[0].name)
        budget = self.config.memory * MIB
        settings = eviction.settings(self.config, self.paths, safe_mode=self.safe_mode.on)
        engines = [
            [pair.state.engine for pair in group if isinstance(pair.state, Ready)]
            for group in (kept, idle, busy)
        ]
        evicted = [holding for holding, _ in self._evicted_lately(newcomer)]

        def measure_and_decide() -> (
            Planned | eviction.Spares | eviction.Leaves | eviction.Waits | eviction.Refused
        ):
            kept, idle, busy = (_holdings(group, spared) for group in engines)
            standing = Standing(kept, idle, busy, evicted)
            plans, note = Plans.here(pair, settings), ""
            if failed:
                plans, note = plans.halved(failed.planned)
            decision = eviction.decide(plans, standing, eviction.Seen.here(standing.all), budget)
            if note and isinstance(decision, Planned):
                decision = decision._replace(notes=(*decision.notes, note))
            return decision

        return await asyncio.to_thread(measure_and_decide)

    def _others(self, newcomer: LoadedPair) -> list[LoadedPair]:
        """Return the other pairs in memory, the least recently used first."""
        return [pair for pair in reversed(self.loaded) if pair is not newcomer]

    def _evicted_lately(self, newcomer: LoadedPair) -> list[tuple[Holding, float]]:
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
            self._evicted[pair.name] = _holding(pair.state.engine), pair.used
            pair.unload_soon()

    async def _give_up_room(self, name: str) -> None:
        """Make the pair give up unused memory for prompts without a slot."""
        engine = self._pairs[name].state.engine
        if engine:
            log.info("%s gives up room for prompts: another pair needs the memory", name)
            await self._pairs[name].spare(engine.least_room)

    def has_left(self) -> None:
        """Return memory to pairs that gave it up for another one."""
        if not self._give_back_task and not self._draining:
            self._give_back_task = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        async with self._load_lock:
            self._give_back_task = None
            for pair in self.loaded:
                engine = pair.state.engine
                if engine and engine.lacks:
                    unplanned = await self._measure_unplanned()
                    # Use the plan from before the measurement. If the engine is gone, nothing is sent.
                    plan = engine.planned.plan
                    assert plan is not None
                    await pair.spare(plan.prefixes + min(engine.lacks, unplanned // 2))

    async def _measure_unplanned(self) -> int:
        """Return the bytes that no load has planned."""
        budget = self.config.memory * MIB
        engines = [pair.state.engine for pair in self.loaded if pair.state.engine]

        def measure() -> int:
            holdings = _holdings(engines)
            return eviction.Seen.here(holdings).left({}, holdings).reserving((), budget).free.ram

        return await asyncio.to_thread(measure)

    async def _wait_for_quiet_pair(self, newcomer: LoadedPair) -> None:
        while all(
            pair.answering or self.keeps(pair.name) for pair in self._others(newcomer)
        ) and self._others(newcomer):
            await self.change()

    # ------------------------------------------------------------------ all pairs

    def configure(self, config: Config) -> None:
        """Use another configuration: at once where possible, else from the next request, which reloads."""
        self.config = config
        for pair in self._pairs.values():
            pair.admission.limit = config.queue
            pair.rest_if_idle()  # restarts the timer with the new time
        self._enforce_budget(config.memory * MIB)
        self.changed()

    def _enforce_budget(self, budget: int) -> None:
        """Evict idle pairs until all are within the budget in bytes (0: no limit). Busy ones leave later."""
        self._over_budget = False  # an eviction calls `changed`, which must not call this again
        for pair in reversed(self.present) if budget else ():
            engines = [e.state.engine for e in self.present if e.state.engine]
            if eviction.taken(_holdings(engines)) <= budget:
                return
            if not pair.answering and not self.keeps(pair.name):
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


def _holding(engine: Engine, spared: Collection[str] = ()) -> Holding:
    """Return the memory of an engine. Pairs in `spared` have nothing more to give up."""
    spare = 0 if engine.pair.name in spared else engine.spare
    context = engine.config.context
    return Holding.of(engine.pair, engine.worker.pid, engine.planned, context, spare)


def _holdings(engines: Iterable[Engine], spared: Collection[str] = ()) -> list[Holding]:
    return [_holding(engine, spared) for engine in engines]
