"""The pairs in memory: as many as it carries, each with a worker of its own.

One is loaded at a time, so that what is free can be measured with nothing half taken. Where a newcomer does
not fit, `room` says who leaves for it; here they are told to, and waited for.
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
from localspec.daemon.worker import placement, room
from localspec.daemon.worker.death import CrashHistory, DeadlyTexts
from localspec.daemon.worker.loaded import LoadedPair
from localspec.daemon.worker.placement import MIB, Planned, Plans
from localspec.daemon.worker.process import Worker, spawn
from localspec.daemon.worker.room import Holding, Standing
from localspec.daemon.worker.safe_mode import SafeMode
from localspec.daemon.worker.states import Engine, Loading, Ready, Unloaded
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus

log = logging.getLogger("localspec.residents")

_REMEMBERED = 64  # pairs that are not in memory, with what is known of their speed


class Stay(NamedTuple):
    """How long a pair stays in memory. keep: until it is told to leave. idle_unload: seconds without a
    request, 0 for ever; None as the configuration says.
    """

    keep: bool = False
    idle_unload: float | None = None


class Residents:
    """The pairs by their names, and the memory they share."""

    def __init__(
        self, config: Config, paths: Paths, counts: Counts, *, worker_command: Sequence[str]
    ) -> None:
        """`worker_command` starts an engine; `--fd N` is appended."""
        self.config = config
        self.paths = paths
        self.counts = counts
        self.safe_mode = SafeMode(paths.state / "safe-mode.json")
        self.crashes = CrashHistory()
        self.deadly_texts = DeadlyTexts()
        self.stay: Callable[[str], Stay] = lambda _: Stay()  # of a pair, by its name
        self.last: frames.Loaded | None = None  # what was loaded last, though it may rest by now
        self._command = worker_command
        self._pairs: dict[str, LoadedPair] = {}
        self._one_load = asyncio.Lock()
        self._loads = ""  # the pair that has it
        self._driven_out: dict[str, tuple[Holding, float]] = {}  # and when it was asked last
        self._watching: list[asyncio.Future[None]] = []
        self._giving: asyncio.Task[None] | None = None  # room back to those that gave it up
        self._beyond = False  # a smaller budget is kept once those who answer are done
        self._draining = False

    # ------------------------------------------------------------------ who is here

    def of(self, name: str) -> LoadedPair:
        """The pair of that name, loaded or not."""
        if name not in self._pairs:
            rest = [each for each in self._pairs.values() if each.forgettable]
            for each in sorted(rest, key=lambda each: each.used)[: -_REMEMBERED or None]:
                del self._pairs[each.name]
            self._pairs[name] = LoadedPair(name, self)
            if self._draining:
                self._pairs[name].admission.close()
        return self._pairs[name]

    @property
    def all(self) -> list[LoadedPair]:
        """Those that are asked, loaded or were lately."""
        return [*self._pairs.values()]

    @property
    def loaded(self) -> list[LoadedPair]:
        """Those in memory, the one that was asked last ahead."""
        return [each for each in self.present if isinstance(each.state, Ready)]

    @property
    def present(self) -> list[LoadedPair]:
        """The same, and those that are being loaded."""
        found = [each for each in self._pairs.values() if not isinstance(each.state, Unloaded)]
        return sorted(found, key=lambda each: each.used, reverse=True)

    @property
    def pids(self) -> list[int]:
        """The engine workers."""
        return [each.worker.pid for each in self._pairs.values() if each.worker]

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is being loaded."""
        return any(each.busy for each in self._pairs.values())

    def waiting(self) -> int:
        return sum(each.admission.waiting for each in self._pairs.values())

    def running(self) -> int:
        """Requests that are at work."""
        return sum(each.running for each in self._pairs.values())

    def uses(self, name: str) -> bool:
        """Whether the pair is loaded or being loaded."""
        return name in self._pairs and self._pairs[name].files is not None

    def holds(self, name: str) -> frames.PairFiles | None:
        """The files of the pair, if it is loaded."""
        return self._pairs[name].files if self.info(name) else None

    def info(self, name: str) -> frames.Loaded | None:
        """What is loaded of that name."""
        return self._pairs[name].info if name in self._pairs else None

    def note(self) -> str | None:
        """What a person should know about how an answer came about."""
        return self.safe_mode.note()

    def shown(self) -> LoadedPair:
        """The one that tells most of what goes on: asked last of those in memory, else the configured one."""
        present = self.present
        return present[0] if present else self.of(self.config.pair)

    def statuses(self) -> list[PairStatus]:
        """Of all in memory, and of those that come."""
        return [each.status() for each in self.present]

    # ------------------------------------------------------------------ Room, for each of them

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
        self._watching.append(change)
        try:
            await change
        finally:
            self._watching.remove(change)

    def changed(self) -> None:
        if self._beyond:
            self._keep_within(self.config.memory * MIB)
        for change in self._watching:
            if not change.done():
                change.set_result(None)

    @contextlib.asynccontextmanager
    async def place(
        self, pair: LoadedPair, loading: Loading, failed: Engine | None
    ) -> AsyncIterator[Planned]:
        try:
            while True:
                loading.behind = self._loads
                async with self._one_load:
                    loading.behind, self._loads = "", pair.name
                    try:
                        found = await self._room_for(pair, loading, failed)
                        if isinstance(found, Planned):
                            self._held_back_for(pair, None)
                            self._driven_out.pop(pair.name, None)
                            yield found
                            self.last = pair.info
                            return
                    finally:
                        self._loads = ""
                loading.behind = found.name
                self._held_back_for(pair, found.name)
                await self._until_one_is_quiet(pair)
        finally:
            self._held_back_for(pair, None)

    def _held_back_for(self, newcomer: LoadedPair, name: str | None) -> None:
        """The pair of that name, and no other, gives way to the newcomer."""
        for each in self._pairs.values():
            if each.name == name:
                each.gives_way = newcomer.name
            elif each.gives_way == newcomer.name:
                each.gives_way = ""
        self.changed()

    # ------------------------------------------------------------------ who leaves for a newcomer

    async def _room_for(
        self, newcomer: LoadedPair, loading: Loading, failed: Engine | None
    ) -> Planned | room.Waits:
        """A plan that there is room for, or who must answer first. Raises LoadFailed: there is neither."""
        spared: set[str] = set()
        while True:
            for each in self.all:
                await each.gone()  # its memory has not come back before
            config = self.config
            found = await self._decided(newcomer, loading.pair, failed, spared)
            if isinstance(found, room.Refused):
                raise errors.LoadFailed(found.message)
            if isinstance(found, room.Spares):
                spared.update(found.names)
                await asyncio.gather(*map(self._spare, found.names))
            elif isinstance(found, room.Leaves):
                self._drive_out(self._pairs[found.name])
            elif config is self.config:
                return found

    async def _decided(
        self,
        newcomer: LoadedPair,
        pair: frames.PairFiles,
        failed: Engine | None,
        spared: Collection[str],
    ) -> Planned | room.Spares | room.Leaves | room.Waits | room.Refused:
        """`spared`: who has been asked to give up what it does not use."""
        others = self._others(newcomer)
        pinned = [each for each in others if self.keeps(each.name)]
        answer = [each for each in others if each.answering and each not in pinned]
        rest = [each for each in others if not each.answering and each not in pinned]
        if failed and rest:  # memory has run out, whatever was counted
            return room.Leaves(rest[0].name)
        budget = self.config.memory * MIB
        settings = placement.settings(self.config, self.paths, safe_mode=self.safe_mode.on)
        engines = [
            [each.state.engine for each in some if isinstance(each.state, Ready)]
            for some in (pinned, rest, answer)
        ]
        back = [held for held, _ in self._may_be_back(newcomer)]

        def look() -> Planned | room.Spares | room.Leaves | room.Waits | room.Refused:
            kept, idle, busy = (_holdings(some, spared) for some in engines)
            standing = Standing(kept, idle, busy, back)
            plans, note = Plans.here(pair, settings), ""
            if failed:
                plans, note = plans.halved(failed.planned)
            found = room.decide(plans, standing, room.Seen.here(standing.all), budget)
            if note and isinstance(found, Planned):
                found = found._replace(notes=(*found.notes, note))
            return found

        return await asyncio.to_thread(look)

    def _others(self, newcomer: LoadedPair) -> list[LoadedPair]:
        """In memory, the one that was asked least recently first."""
        return [each for each in reversed(self.loaded) if each is not newcomer]

    def _may_be_back(self, newcomer: LoadedPair) -> list[tuple[Holding, float]]:
        """Who left for another one and would not have rested yet, the one that was asked last ahead."""
        now = time.monotonic()
        for name, (_, used) in [*self._driven_out.items()]:
            seconds = self.idle_seconds(name)
            if seconds and now - used > seconds:
                del self._driven_out[name]
        found = [each for name, each in self._driven_out.items() if name != newcomer.name]
        return sorted(found, key=lambda each: each[1], reverse=True)

    def _drive_out(self, pair: LoadedPair) -> None:
        """Unless somebody has asked it meanwhile."""
        if isinstance(pair.state, Ready) and not pair.answering:
            log.info("%s is unloaded: another pair needs the memory", pair.name)
            self._driven_out[pair.name] = _holding(pair.state.engine), pair.used
            pair.unload_soon()

    async def _spare(self, name: str) -> None:
        """Have the pair give up room for prompts that none has taken."""
        engine = self._pairs[name].state.engine
        if engine:
            log.info("%s gives up room for prompts: another pair needs the memory", name)
            await self._pairs[name].spare(engine.least_room)

    def has_left(self) -> None:
        """Those that gave up room for another pair may have it back once there is some."""
        if not self._giving and not self._draining:
            self._giving = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        async with self._one_load:
            self._giving = None
            for each in self.loaded:
                engine = each.state.engine
                if engine and engine.lacks:
                    left = await self._left_over()
                    # By what was there before: it may have ended meanwhile, and then is told nothing.
                    plan = engine.planned.plan
                    assert plan is not None
                    await each.spare(plan.prefixes + min(engine.lacks, left // 2))

    async def _left_over(self) -> int:
        """Bytes that nobody's load has planned."""
        budget = self.config.memory * MIB
        engines = [each.state.engine for each in self.loaded if each.state.engine]

        def look() -> int:
            held = _holdings(engines)
            return room.Seen.here(held).left({}, held).reserving((), budget).free.ram

        return await asyncio.to_thread(look)

    async def _until_one_is_quiet(self, newcomer: LoadedPair) -> None:
        while all(
            each.answering or self.keeps(each.name) for each in self._others(newcomer)
        ) and self._others(newcomer):
            await self.change()

    # ------------------------------------------------------------------ all of them

    def configure(self, config: Config) -> None:
        """Use another configuration: at once, or from the next request, which loads the pair anew."""
        self.config = config
        for each in self._pairs.values():
            each.admission.limit = config.queue
            each.rest_if_idle()  # by the new time
        self._keep_within(config.memory * MIB)
        self.changed()

    def _keep_within(self, budget: int) -> None:
        """Those that rest leave until the others are within the budget, 0: any; those that answer later."""
        self._beyond = False  # whoever leaves is a change, too
        for each in reversed(self.present) if budget else ():
            engines = [e.state.engine for e in self.present if e.state.engine]
            if room.taken(_holdings(engines)) <= budget:
                return
            if not each.answering and not self.keeps(each.name):
                self._drive_out(each)
        self._beyond = bool(budget) and any(each.answering for each in self.present)

    async def unload(self, names: Iterable[str] | None = None) -> list[str]:
        """End the workers of these pairs, else all; their memory has gone back when this returns. The
        names of those that had one. Whatever still runs in them fails.
        """
        chosen = [each for each in self.all if names is None or each.name in names]
        held = [each.name for each in chosen if each.worker]
        for name in held:
            self._driven_out.pop(name, None)
        await asyncio.gather(*(each.unload() for each in chosen))
        return held

    async def forget(self, conversation: str | None) -> None:
        """Nothing of a conversation, with None of any, stays in an engine or in its files."""
        await asyncio.gather(*(each.forget(conversation) for each in self.all))

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self.crashes.reset()
        self.deadly_texts.reset()
        if self.safe_mode.on:
            self.safe_mode.forget()
            for each in self.all:
                each.unload_soon()

    def drain(self) -> None:
        """Let nobody else in."""
        self._draining = True
        for each in self.all:
            each.admission.close()

    async def close(self) -> None:
        """The end: the workers are gone when this returns."""
        self._draining = True
        if self._giving:
            self._giving.cancel()
        await asyncio.gather(*(each.close() for each in self.all))


def _holding(engine: Engine, spared: Collection[str] = ()) -> Holding:
    """spared: those that have no room left to give up."""
    spare = 0 if engine.pair.name in spared else engine.spare
    context = engine.config.context
    return Holding.of(engine.pair, engine.worker.pid, engine.planned, context, spare)


def _holdings(engines: Iterable[Engine], spared: Collection[str] = ()) -> list[Holding]:
    return [_holding(engine, spared) for engine in engines]
