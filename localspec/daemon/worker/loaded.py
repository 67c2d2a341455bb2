"""The pair in memory and the worker that holds it: loading, changing and losing it.

Apart from the requests, because a load outlives whoever asked for it and a death is everybody's:
here is decided which pair the one worker holds, and whether it may be started once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker import placement
from localspec.daemon.worker.admission import Admission
from localspec.daemon.worker.death import (
    CrashHistory,
    DeadlyTexts,
    Death,
    Mapped,
    blame,
    cause,
    deadly,
)
from localspec.daemon.worker.process import Again, Running, Worker, spawn
from localspec.daemon.worker.safe_mode import SafeMode
from localspec.paths import Paths
from localspec.protocol import frames
from localspec.protocol.answers import Counts, PairStatus, Progress

log = logging.getLogger("localspec.loaded_pair")

_LEAST = 512  # tokens of a context that half of may do
_LOOK = 0.05  # seconds between two looks at a load that is watched


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker and what it was told to load."""

    worker: Worker
    pair: frames.PairFiles  # as it was asked for
    config: Config  # as it was then
    mapped: Mapped  # the files as they were at the load
    planned: placement.Planned
    smaller: bool = False  # than planned at first, for which there was no memory


@dataclass(frozen=True, slots=True)
class Unloaded:
    """No worker."""

    engine: None = None


@dataclass(slots=True)
class Loading:
    """`engine`: the one before until that is told to end, then none, then the one that loads."""

    pair: frames.PairFiles
    task: asyncio.Task[None]
    engine: Engine | None


@dataclass(frozen=True, slots=True)
class Ready:
    engine: Engine
    info: frames.Loaded


class LoadedPair:
    """One worker and one pair at a time: two may not fit in memory."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        admission: Admission,
        counts: Counts,
        *,
        worker_command: Sequence[str],
        load_is_over: Callable[[], None],
    ) -> None:
        """A load sets `admission`'s places; `load_is_over` is called after it, however it went.

        `worker_command` starts an engine; `--fd N` is appended.
        """
        self.config = config  # what changes here is used from the next request
        self.state: Unloaded | Loading | Ready = Unloaded()
        self.last: frames.Loaded | None = None  # what was loaded last, though it may rest by now
        self.safe_mode = SafeMode(paths.state / "safe-mode.json")
        self.deadly_texts = DeadlyTexts()
        self._paths = paths
        self._admission = admission
        self._counts = counts
        self._command = worker_command
        self._load_is_over = load_is_over
        self._crashes = CrashHistory()
        self._too_large: Engine | None = (
            None  # its load ran out of memory, and a smaller one is tried
        )
        self._ending: dict[Worker, asyncio.Task[None]] = {}  # those on their way out
        self._next_pair: frames.PairFiles | None = None  # somebody waits for this other one

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
    def worker_pid(self) -> int | None:
        return self.worker.pid if self.worker else None

    @property
    def busy(self) -> bool:
        """Whether it is being loaded, or a request runs in it."""
        return isinstance(self.state, Loading) or bool(self.worker and self.worker.busy)

    def uses(self, name: str) -> bool:
        """Whether the pair is loaded or being loaded."""
        loading = isinstance(self.state, Loading) and self.state.pair.name == name
        return loading or bool(self.state.engine and self.state.engine.pair.name == name)

    def holds(self, name: str) -> frames.PairFiles | None:
        """The files of the pair, if it is the one that is loaded."""
        pair = self.state.engine.pair if isinstance(self.state, Ready) else None
        return pair if pair and pair.name == name else None

    def note(self) -> str | None:
        """What a person should know about how the answer came about."""
        return self.safe_mode.note()

    def status(self, name: str) -> PairStatus:
        """What `name`, the configured pair, or the loaded one is doing."""
        state, note = self.state, self.note()
        if isinstance(state, Loading):
            name = state.pair.name  # the engine may be the one before
        elif state.engine:
            name = state.engine.pair.name
        if any(self.cause(files) == aside for aside, files in self._crashes.aside(name)):
            return PairStatus(name, "set_aside", note="to try it again: localspec start --reset")
        match state:
            case Unloaded():
                return PairStatus(name, "unloaded", note=note)
            case Loading():
                progress = self.worker.progress if self.worker else None
                stage, fraction = ("starting", 0.0)
                if progress:
                    stage, fraction = progress.stage, progress.fraction
                return PairStatus(name, "loading", stage, fraction, note=note)
            case Ready(engine, info):
                return PairStatus(
                    name,
                    "ready",
                    target=info.target_description,
                    draft=info.draft_description,
                    n_ctx=info.n_ctx,
                    backend=info.backend,
                    plan=engine.planned.plan,
                    note=note or " ".join((*engine.planned.notes, *info.notes)) or info.speculation,
                )

    def waits_for(self, pair: frames.PairFiles) -> Progress:
        """What a request for `pair` that has its place waits for."""
        state = self.state
        if isinstance(state, Loading) and state.pair == pair:
            return Progress("loading", pair.name, self.status(pair.name).progress or 0.0)
        if isinstance(state, Loading):
            return Progress("waiting", state.pair.name)
        if self._next_pair not in (None, pair):
            return Progress("waiting", self._next_pair.name)
        if isinstance(state, Unloaded):
            return Progress("loading", pair.name)
        if state.engine.pair != pair:
            return Progress("waiting", state.engine.pair.name)
        return Progress("reading", pair.name)

    # ------------------------------------------------------------------ load and change

    async def ready(self, pair: frames.PairFiles) -> Ready:
        """`pair`, loaded; many that ask while it loads wait for one load.

        Raises:
            LoadFailed, PairSetAside, WorkerDied…: why it is not.
        """
        while True:
            state = self.state
            if not isinstance(state, Loading):
                if isinstance(state, Ready) and self._serves(state.engine, pair):
                    return state
                if self._crashes.aside(pair.name):
                    self._crashes.check(self.cause(pair))
                if state.engine and state.engine.worker.busy:
                    await self._turn_of(pair, state.engine.worker)
                    continue
                self._next_pair = None
                state = Loading(pair, asyncio.create_task(self._load(pair)), state.engine)
                state.task.add_done_callback(self._load_ended)
                self.state = state
            try:
                # Shielded: one client that leaves does not stop the load others wait for.
                await asyncio.shield(state.task)
            except Again:
                pass
            except errors.LocalspecError:
                if state.pair == pair:  # another one's end is nothing to whoever waits for this one
                    raise

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
                state = self.status(pair.name)
                if (state.name, state.state) != (pair.name, "loading"):
                    # For answers that another one writes.
                    state = PairStatus(pair.name, "loading", "waiting", 0.0)
                if state != shown:
                    await report(state)
                    shown = state
                await asyncio.wait({ready}, timeout=_LOOK)
            ready.result()
            await report(self.status(pair.name))
        finally:
            ready.cancel()

    def _serves(self, engine: Engine, pair: frames.PairFiles) -> bool:
        """Whether a request for `pair` may go to the engine as it is."""
        mine = self._next_pair in (None, pair)
        # After an edit of the configuration nobody is answered by the old one any more: whoever asks
        # waits for the answers that are being written, as for another pair.
        current = engine.config == self.config or (
            self._settings(engine.config) == self._settings(self.config)
        )
        return engine.worker.alive and engine.pair == pair and current and mine

    def _settings(self, config: Config) -> frames.EngineSettings:
        return placement.settings(config, self._paths, safe_mode=self.safe_mode.on)

    def cause(self, pair: frames.PairFiles) -> bytes:
        """By what a crash of `pair`, loaded as it would be now, is remembered."""
        return cause(pair, Mapped(pair), placement.settings(self.config, self._paths))

    def _cause_of(self, engine: Engine) -> bytes:
        return cause(engine.pair, engine.mapped, placement.settings(engine.config, self._paths))

    async def _turn_of(self, pair: frames.PairFiles, worker: Worker) -> None:
        """Wait until what runs on the present pair has finished: two pairs may not fit in memory.

        Whoever asks for the present pair meanwhile waits too, or a busy one would never give way.
        """
        self._next_pair = self._next_pair or pair
        try:
            await worker.quiet()
        except asyncio.CancelledError:
            self._next_pair = None  # whoever still waits for it asks again
            worker.wake()
            raise

    async def _load(self, pair: frames.PairFiles) -> None:
        await self.unload()  # and what still saves: two engines may not fit in memory
        loading = self.state
        assert isinstance(loading, Loading)
        self.safe_mode.recall()
        config = self.config
        settings = self._settings(config)
        mapped = await asyncio.to_thread(Mapped, pair)
        failed, self._too_large = self._too_large, None
        failed = failed if failed and failed.pair == pair else None
        plan = (
            partial(placement.smaller_here, before=failed.planned)
            if failed
            else placement.plan_here
        )
        planned = await asyncio.to_thread(plan, pair, settings)
        try:
            worker = await spawn(self._command, self, config.watchdog)
        except OSError as error:
            raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
        loading.engine = engine = Engine(worker, pair, config, mapped, planned, failed is not None)
        self._counts.worker_starts += 1
        self._admission.parallel = config.parallel
        log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, self.safe_mode.on)
        try:
            info = await worker.load(planned.pair, planned.settings)
        except errors.LoadFailed:
            await self.unload()
            raise
        if loading.engine is not engine:
            raise Again  # it ended just after
        self.state, self.last = Ready(engine, info), info

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also when every waiter has left
        if isinstance(self.state, Loading) and self.state.task is task:  # it has failed
            self.unload_soon()
            self.state = Unloaded()
        self._load_is_over()

    # ------------------------------------------------------------------ unload

    async def unload(self) -> None:
        """End the worker; all its memory has gone back when this returns, also that of one which
        was told to end before. Whatever still runs in it fails.
        """
        self.unload_soon()
        while self._ending:
            await asyncio.wait(self._ending.values())

    def unload_soon(self) -> None:
        """Unload without waiting for it."""
        if engine := self._let_go():
            worker = engine.worker
            worker.fail(errors.Unavailable("The pair is being unloaded.", retry_after=2))
            # A task of its own: a worker is followed to its end though nobody waits for it.
            ending = self._ending[worker] = asyncio.create_task(worker.shut_down())
            ending.add_done_callback(lambda _: self._ending.pop(worker, None))

    def _let_go(self) -> Engine | None:
        """The engine, which is ours no longer."""
        engine = self.state.engine
        if isinstance(self.state, Loading):
            self.state.engine = None
        else:
            self.state = Unloaded()
        return engine

    async def forget(self, conversation: str | None) -> None:
        """Nothing of a conversation, with None of any, stays in the engine or in its files.

        Nor in those of an engine that is ending.
        """
        workers = [*self._ending, *([self.worker] if self.worker else [])]
        await asyncio.gather(*(worker.forget(conversation) for worker in workers))

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self._crashes.reset()
        self.deadly_texts.reset()
        if self.safe_mode.on:
            self.safe_mode.forget()
            self.unload_soon()

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail what runs in the worker."""
        if self.worker:
            self.worker.abort(error)

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        if isinstance(self.state, Loading):
            self.state.task.cancel()
        await self.unload()

    # ------------------------------------------------------------------ what the worker tells

    def on_notice(self, text: str) -> None:
        log.warning("%s", text)

    def on_decoded(self, worker: Worker) -> None:
        """When that took safe mode, it is worth remembering."""
        if worker is self.worker:
            self.safe_mode.keep()

    def on_death(self, worker: Worker, death: Death) -> None:
        """Decide what it means, and tell whoever waits for the worker."""
        if worker is not self.worker:
            log.info("worker %d ended", worker.pid)
            return
        engine = self._let_go()
        assert engine is not None
        self._counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        changed = engine.mapped.changed() if death.by_kernels else None
        suspects = worker.at("preparing")
        blamed = blame(
            death,
            file_changed=changed is not None,
            preparing=bool(suspects),
            decoded=worker.decoded,
            safe_mode=self.safe_mode.on,
        )
        match blamed:
            case "file":
                assert changed is not None
                worker.fail(death.of_changed_file(changed))
            case "text":
                self._died_of_text(engine, suspects, death)
            case "kernels":
                assert death.signal is not None
                self.safe_mode.begin(f"{death.signal.name} at the first decode")
                worker.fail(Again())
            case "pair" if self._may_be_smaller(engine, death):
                self._too_large = engine
                worker.fail(Again())
            case "pair":
                if not worker.decoded:
                    self.safe_mode.end()  # it did not help, so it is not the cure
                self._crashes.record(
                    engine.pair, self._cause_of(engine), time.monotonic(), death.summary
                )
                worker.fail(death.error(self.config.watchdog))

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
            self.deadly_texts.add(self._cause_of(engine), suspects[0].request, death)

        def outcome(running: Running) -> Exception:
            if running in suspects:
                return deadly(death.how)
            return death.error(self.config.watchdog) if running.shown else Again()

        worker.fail(outcome)
