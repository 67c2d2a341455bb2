"""A pair and the worker that holds it: loading, changing and losing it.

Apart from the requests, because a load outlives whoever asked for it and a death is everybody's:
here is decided when the worker is started and ended, and whether it may be started once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker import placement, states
from localspec.daemon.worker.death import (
    CrashHistory,
    DeadlyTexts,
    Death,
    Mapped,
    blame,
    cause,
    deadly,
)
from localspec.daemon.worker.process import Again, Running, Worker
from localspec.daemon.worker.queue.admission import Admission
from localspec.daemon.worker.queue.forecast import Forecast
from localspec.daemon.worker.safe_mode import SafeMode
from localspec.daemon.worker.states import Engine, Loading, Ready, Unloaded
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus, Progress

log = logging.getLogger("localspec.loaded_pair")

_LEAST = 512  # tokens of a context that half of may do
_LOOK = 0.05  # seconds between two looks at a load that is watched


class Room(Protocol):
    """What loaded pairs share: memory, and what is known of the machine and of earlier deaths."""

    config: Config  # what changes here is used from the next request
    paths: Paths
    counts: Counts
    safe_mode: SafeMode
    crashes: CrashHistory
    deadly_texts: DeadlyTexts

    def place(
        self, pair: LoadedPair, loading: Loading, failed: Engine | None
    ) -> AbstractAsyncContextManager[placement.Planned]:
        """Room for a load, which the body is; how it fits. `failed`: a try that ran out of memory.

        Raises:
            LoadFailed: there is none, and none can be made.
        """

    async def spawn(self, pair: LoadedPair) -> Worker:
        """A new engine. Raises OSError: it cannot be started."""

    async def change(self) -> None:
        """Wait until some pair is not what it was."""

    def has_left(self) -> None:
        """The memory of a worker has come back."""

    def changed(self) -> None:
        """Have those look again who wait for a change."""

    def idle_seconds(self, name: str) -> float:
        """After which it is unloaded; 0: never."""

    def keeps(self, name: str) -> bool:
        """Whether it leaves for no other pair."""

    def waiting(self) -> int:
        """Requests that wait, for whatever pair."""


class LoadedPair:
    """A pair, in memory or not: one worker at most, the queue before it, and its idle time."""

    def __init__(self, name: str, room: Room) -> None:
        self.name = name
        self.state: Unloaded | Loading | Ready = Unloaded()
        self.forecast = Forecast()
        self.admission = Admission(
            room.config.parallel,
            room.config.queue,
            self.forecast,
            lambda: room.waiting() - self.admission.waiting,
        )
        self.used = 0.0  # when it was last asked (monotonic)
        self.gives_way = ""  # to this pair, which waits until nothing runs here any more
        self._room = room
        self._asking = 0  # those who wait for its load
        self._too_large: Engine | None = (
            None  # its load ran out of memory, and a smaller one is tried
        )
        self._ending: dict[Worker, asyncio.Task[None]] = {}  # those on their way out
        self._next: frames.PairFiles | None = None  # somebody waits for these other files of it
        self._idle_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ what it is doing

    @property
    def info(self) -> frames.Loaded | None:
        """What is loaded."""
        return self.state.info if isinstance(self.state, Ready) else None

    @property
    def worker(self) -> Worker | None:
        """The one worker, also while it loads."""
        return self.state.engine.worker if self.state.engine else None

    @property
    def answering(self) -> bool:
        """Whether it is being loaded, or a request runs in it or is about to."""
        loading = isinstance(self.state, Loading)
        return loading or self._asking > 0 or bool(self.worker and self.worker.busy)

    @property
    def busy(self) -> bool:
        """The same, or a request has a place in its queue."""
        return self.answering or self.admission.running > 0

    @property
    def running(self) -> int:
        """Requests that have a place, and those that need none."""
        return self.admission.running + (self.worker.embedding if self.worker else 0)

    @property
    def forgettable(self) -> bool:
        """Whether nothing of it is in use or on its way out."""
        held = self.busy or self.admission.waiting or self._ending
        return isinstance(self.state, Unloaded) and not held

    @property
    def unloads_in(self) -> float | None:
        """Seconds until it is unloaded, if nobody asks; None: never."""
        if self._idle_timer:
            return max(self._idle_timer.when() - asyncio.get_running_loop().time(), 0.0)
        return self._room.idle_seconds(self.name) or None

    @property
    def files(self) -> frames.PairFiles | None:
        """What is loaded, or being loaded."""
        if isinstance(self.state, Loading):
            return self.state.pair
        return self.state.engine.pair if self.state.engine else None

    def status(self) -> PairStatus:
        """What it is doing."""
        crashes, note = self._room.crashes, self._room.safe_mode.note()
        if any(self.cause(files) == aside for aside, files in crashes.aside(self.name)):
            return PairStatus(
                self.name, "set_aside", note="to try it again: localspec start --reset"
            )
        return msgspec.structs.replace(
            states.told(self.name, self.state, note),
            running=self.running,
            waiting=self.admission.waiting,
            unloads_in=self.unloads_in,
            keep=self._room.keeps(self.name),
        )

    def waits_for(self, pair: frames.PairFiles) -> Progress:
        """What a request for `pair`, files of this name, that has its place waits for."""
        if self.gives_way:
            return Progress("waiting", self.gives_way)
        return states.waits_for(self.name, self.state, pair, self._next)

    # ------------------------------------------------------------------ load and change

    async def ready(self, pair: frames.PairFiles) -> Ready:
        """`pair`, files of this name, loaded; many that ask while it loads wait for one load.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: why it is not.
        """
        while True:
            state = self.state
            if not isinstance(state, Loading):
                if isinstance(state, Ready) and self._serves(state.engine, pair):
                    return state
                if self._room.crashes.aside(self.name):
                    self._room.crashes.check(self.cause(pair))
                if state.engine and (self.gives_way or state.engine.worker.busy):
                    await self._turn_of(pair)
                    continue
                self._next = None
                state = Loading(pair, asyncio.create_task(self._load(pair)), state.engine)
                state.task.add_done_callback(self._load_ended)
                self.state = state
            with contextlib.suppress(Again):
                await self._loaded(state, pair)

    async def _loaded(self, state: Loading, pair: frames.PairFiles) -> None:
        """Wait for a load. Raises Again: it is to be tried once more."""
        self._asking += 1
        try:
            # Shielded: one client that leaves does not stop the load others wait for.
            await asyncio.shield(state.task)
        except errors.LocalspecError:
            if state.pair == pair:  # another one's end is nothing to whoever waits for this one
                raise
        finally:
            self._asking -= 1
            if not self._asking and not state.begun and not state.task.done():
                self._give_up(state)  # nobody waits for room any more

    def _give_up(self, state: Loading) -> None:
        state.task.cancel()
        if self.state is state:
            self.unload_soon()
            self.state = Unloaded()

    async def load(
        self, pair: frames.PairFiles, report: Callable[[PairStatus], Awaitable[None]]
    ) -> None:
        """As `ready`; how far it is is reported at once and when that changes, and that it is done.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: why it is not. What is refused before anything is
                tried is refused before any report.
        """
        ready = asyncio.ensure_future(self.ready(pair))
        shown = None
        try:
            await asyncio.sleep(0)  # its first step: it is refused, ready already, or has begun
            while not ready.done():
                state = self.status()
                if state.state != "loading":
                    # For answers that another one writes.
                    state = PairStatus(self.name, "loading", "waiting", 0.0)
                if state != shown:
                    await report(state)
                    shown = state
                await asyncio.wait({ready}, timeout=_LOOK)
            ready.result()
            await report(self.status())
        finally:
            ready.cancel()

    def _serves(self, engine: Engine, pair: frames.PairFiles) -> bool:
        """Whether a request for `pair` may go to the engine as it is."""
        mine = self._next in (None, pair) and not self.gives_way
        # After an edit of the configuration nobody is answered by the old one any more: whoever asks
        # waits for the answers that are being written, as for other files.
        config = self._room.config
        current = engine.config == config or self._settings(engine.config) == self._settings(config)
        return engine.worker.alive and engine.pair == pair and current and mine

    def _settings(self, config: Config) -> frames.EngineSettings:
        return placement.settings(config, self._room.paths, safe_mode=self._room.safe_mode.on)

    def cause(self, pair: frames.PairFiles) -> bytes:
        """By what a crash of `pair`, loaded as it would be now, is remembered."""
        return cause(pair, Mapped(pair), placement.settings(self._room.config, self._room.paths))

    def _cause_of(self, engine: Engine) -> bytes:
        settings = placement.settings(engine.config, self._room.paths)
        return cause(engine.pair, engine.mapped, settings)

    async def _turn_of(self, pair: frames.PairFiles) -> None:
        """Wait for what runs here, or for another pair to which this one gives way.

        Whoever asks for the present files meanwhile waits too, or a busy pair would never give way.
        """
        if not self.gives_way:
            self._next = self._next or pair
        try:
            await self._room.change()
        except asyncio.CancelledError:
            self._next = None  # whoever still waits for it asks again
            self._room.changed()
            raise

    async def _load(self, pair: frames.PairFiles) -> None:
        await self.unload()  # and what still saves: two engines of it may not fit in memory
        loading, room = self.state, self._room
        assert isinstance(loading, Loading)
        room.safe_mode.recall()
        failed, self._too_large = self._too_large, None
        failed = failed if failed and failed.pair == pair else None
        mapped = await asyncio.to_thread(Mapped, pair)
        async with room.place(self, loading, failed) as planned:
            loading.begun = True
            config = room.config
            try:
                worker = await room.spawn(self)
            except OSError as error:
                raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
            began = time.time()
            engine = Engine(worker, pair, config, mapped, planned, began, failed is not None)
            loading.engine = engine
            self.admission.parallel = config.parallel
            log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, engine.safe_mode)
            try:
                info = await worker.load(planned.pair, planned.settings)
            except errors.LoadFailed:
                await self.unload()
                raise
            if loading.engine is not engine:
                raise Again  # it ended just after
            self.state = Ready(engine, info)
            self.used = time.monotonic()

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also when every waiter has left
        if isinstance(self.state, Loading) and self.state.task is task:  # it has failed
            self.unload_soon()
            self.state = Unloaded()
        self.rest_if_idle()
        self._room.changed()

    # ------------------------------------------------------------------ unload

    async def unload(self) -> None:
        """End the worker; all its memory has gone back when this returns, also that of one which
        was told to end before. Whatever still runs in it fails.
        """
        self.unload_soon()
        await self.gone()

    def unload_soon(self) -> None:
        """Unload without waiting for it."""
        if engine := self._let_go():
            worker = engine.worker
            worker.fail(errors.Unavailable("The pair is being unloaded.", retry_after=2))
            # A task of its own: a worker is followed to its end though nobody waits for it.
            ending = self._ending[worker] = asyncio.create_task(worker.shut_down())
            ending.add_done_callback(lambda _: self._has_ended(worker))
            self._room.changed()

    def _has_ended(self, worker: Worker) -> None:
        self._ending.pop(worker, None)
        self._room.has_left()
        self._room.changed()

    def _let_go(self) -> Engine | None:
        """The engine, which is ours no longer."""
        engine = self.state.engine
        if isinstance(self.state, Loading):
            self.state.engine = None
        else:
            self.state = Unloaded()
        return engine

    async def gone(self) -> None:
        """Wait for what was told to end."""
        while self._ending:
            await asyncio.wait(self._ending.values())

    async def forget(self, conversation: str | None) -> None:
        """Nothing of a conversation, with None of any, stays in the engine or in its files.

        Nor in those of an engine that is ending.
        """
        workers = [*self._ending, *([self.worker] if self.worker else [])]
        await asyncio.gather(*(worker.forget(conversation) for worker in workers))

    async def spare(self, most: int) -> None:
        """Leave prompts without a slot room for `most` bytes, or for what they take."""
        worker = self.worker
        room = await worker.spare(most) if worker else None
        if room is not None and isinstance(self.state, Ready) and self.worker is worker:
            self.state = Ready(self.state.engine.with_room(room), self.state.info)

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail everything that runs or waits."""
        self.admission.abandon(error)
        if self.worker:
            self.worker.abort(error)

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        self._stop_resting()
        if isinstance(self.state, Loading):
            self.state.task.cancel()
        await self.unload()

    # ------------------------------------------------------------------ idle

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """It is not unloaded for want of work while the body runs."""
        self._stop_resting()
        self.used = time.monotonic()
        try:
            yield
        finally:
            self.used = time.monotonic()
            self.rest_if_idle()

    def rest_if_idle(self) -> None:
        """Count down to unloading once nothing runs."""
        self._stop_resting()
        seconds = self._room.idle_seconds(self.name)
        if not self.busy and self.worker and seconds:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(seconds, self._unload_if_idle, seconds)

    def _stop_resting(self) -> None:
        if self._idle_timer:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _unload_if_idle(self, seconds: float) -> None:
        if not self.busy:
            log.info("idle for %g s: %s is unloaded", seconds, self.name)
            self.unload_soon()

    # ------------------------------------------------------------------ what the worker tells

    def on_notice(self, text: str) -> None:
        log.warning("%s", text)

    def on_decoded(self, worker: Worker) -> None:
        """When that took safe mode, it is worth remembering."""
        engine = self.state.engine
        if engine and engine.worker is worker and engine.safe_mode:
            self._room.safe_mode.keep()

    def on_quiet(self) -> None:
        self._room.changed()

    def on_death(self, worker: Worker, death: Death) -> None:
        """Decide what it means, and tell whoever waits for the worker."""
        if worker is not self.worker:
            log.info("worker %d ended", worker.pid)
            return
        engine = self._let_go()
        assert engine is not None
        self._room.changed()
        self._room.counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        changed = engine.mapped.changed() if death.by_kernels else None
        suspects = worker.at("preparing")
        blamed = blame(
            death,
            file_changed=changed is not None,
            preparing=bool(suspects),
            decoded=worker.decoded,
            safe_mode=engine.safe_mode,
        )
        match blamed:
            case "file":
                assert changed is not None
                worker.fail(death.of_changed_file(changed))
            case "text":
                self._died_of_text(engine, suspects, death)
            case "kernels":
                assert death.signal is not None
                self._room.safe_mode.begin(f"{death.signal.name} at the first decode")
                worker.fail(Again())
            case "pair" if self._may_be_smaller(engine, death):
                self._too_large = engine
                worker.fail(Again())
            case "pair":
                if engine.safe_mode and not worker.decoded:
                    self._room.safe_mode.end()  # it did not help, so it is not the cure
                self._room.crashes.record(
                    engine.pair, self._cause_of(engine), time.monotonic(), death.summary
                )
                worker.fail(death.error(self._room.config.watchdog))

    def _may_be_smaller(self, engine: Engine, death: Death) -> bool:
        """Whether a load that ran out of memory is worth another try: where nobody chose the context."""
        loading = isinstance(self.state, Loading)
        free = not engine.config.context and engine.planned.settings.n_ctx > _LEAST
        return loading and death.for_memory and free and not engine.smaller

    def _died_of_text(self, engine: Engine, suspects: list[Running], death: Death) -> None:
        """Fail those whose text was becoming tokens; it is neither the pair's fault nor the kernels'.

        A text is remembered where it was the only one, and no first decode could have done it.
        """
        worker = engine.worker
        if len(suspects) == 1 and (worker.decoded or not worker.at("prepared")):
            self._room.deadly_texts.add(self._cause_of(engine), suspects[0].request, death)

        def outcome(running: Running) -> Exception:
            if running in suspects:
                return deadly(death.how)
            return death.error(self._room.config.watchdog) if running.shown else Again()

        worker.fail(outcome)
