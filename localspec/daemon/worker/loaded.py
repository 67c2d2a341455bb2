"""The pair in memory and the worker that holds it: loading, changing, losing and watching it.

Apart from the requests, because a load outlives whoever asked for it and a death is everybody's:
here is decided which pair the one worker holds, and whether it may be started once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from localspec import errors, machine
from localspec.config import Config
from localspec.daemon.worker.admission import EDITOR_PLACES, Admission
from localspec.daemon.worker.death import CrashHistory, DeadlyTexts, Death, deadly
from localspec.daemon.worker.in_flight import Again, Answering, InFlight, Running
from localspec.daemon.worker.mapped import Mapped
from localspec.daemon.worker.placement import MIB, Planned, free_memory, plan
from localspec.daemon.worker.process import Worker, spawn
from localspec.daemon.worker.safe_mode import Memory
from localspec.protocol import frames
from localspec.protocol.http import Counts, PairStatus

log = logging.getLogger("localspec.loaded_pair")

# A big model may take its time between two reports of progress, but not for ever.
LOADING_PATIENCE = 5  # times the watchdog
PASS_SHARE = (
    0.25  # of the watchdog's time: what a pass of a slow engine may take by its measured costs
)
SAFE_NOTE = (
    "Safe mode: llama.cpp's fast kernels crashed on this machine, so slower ones are used. "
    "Rebuilding llama-cpp-python for this machine (scripts/setup) cures it."
)


def _plan(pair: frames.PairFiles, settings: frames.EngineSettings) -> Planned:
    free = free_memory(machine.Host.here())
    return plan(pair, settings, free, machine.installed_backend())


class LoadedPair:
    """One worker and one pair at a time: two may not fit in memory."""

    def __init__(
        self,
        config: Config,
        memory: Memory,
        in_flight: InFlight,
        admission: Admission,
        counts: Counts,
        *,
        state_dir: str,
        states_dir: str,
        worker_command: Sequence[str],
        clock: Callable[[], float],
        load_is_over: Callable[[], None],
    ) -> None:
        """A load sets `admission`'s places; `load_is_over` is called after it, however it went."""
        self.config = config  # what changes here is used from the next load
        self.info: frames.PairInfo | None = None
        self._memory = memory
        self._in_flight = in_flight
        self._admission = admission
        self._counts = counts
        self._state_dir = state_dir
        self._states_dir = states_dir
        self._command = worker_command
        self._clock = clock
        self._load_is_over = load_is_over
        self._history = CrashHistory()
        self._deadly = DeadlyTexts()
        self._safe_reason: str | None = None  # why the fast kernels are off
        self._pair: frames.PairFiles | None = None
        self._worker: Worker | None = None
        self._alive: set[Worker] = set()  # that one, and those that are ending
        self._ending: set[asyncio.Task[None]] = set()  # workers on their way out
        self._progress: frames.Loading | None = None
        self._loading: asyncio.Task[Worker] | None = None
        self._loaded: asyncio.Future[frames.PairInfo] | None = None
        self._loaded_with: frames.EngineSettings | None = None
        self._mapped: Mapped | None = None  # the files as they were at the load
        self._notes: tuple[str, ...] = ()  # what had to give so that it fits
        self._proven = False  # this worker has decoded
        self._recalled = False
        self._next_pair: frames.PairFiles | None = None  # somebody waits for this other one
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what it is doing

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    @property
    def has_worker(self) -> bool:
        return self._worker is not None

    @property
    def loading(self) -> bool:
        return self._loading is not None

    @property
    def safe_mode(self) -> bool:
        return self._safe_reason is not None

    def uses(self, name: str) -> bool:
        """Whether the pair is loaded or being loaded."""
        held = self._worker is not None or self._loading is not None
        return held and self._pair is not None and self._pair.name == name

    def holds(self, name: str) -> frames.PairFiles | None:
        """The files of the pair, if it is the one that is loaded."""
        return self._pair if self.info and self.uses(name) else None

    def check_text(self, frame: frames.Frame) -> None:
        """Raise InvalidRequest for a text that has ended an engine of this pair."""
        if self._pair is not None:
            self._deadly.check(self._pair.name, frame)

    def note(self) -> str | None:
        """What a person should know about how the answer came about."""
        return SAFE_NOTE if self.safe_mode else None

    def status(self, name: str) -> PairStatus:
        """What `name`, the configured pair, or the loaded one is doing."""
        name = self._pair.name if self._pair and self._worker else name
        note = self.note()
        if self._history.is_set_aside(name):
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
            note=note or " ".join((*self._notes, *info.notes)) or info.speculation,
        )

    # ------------------------------------------------------------------ load and change

    async def worker_for(self, pair: frames.PairFiles) -> Worker:
        """A live worker that has loaded `pair`; many that ask while it loads wait for one load."""
        while True:
            if self._loading is None:
                self._history.check(pair.name)
                # An edit of the configuration waits for the answers that are being written.
                current = self._in_flight or self._loaded_with == self._settings()
                mine = self._next_pair in (None, pair)
                if self._worker and self._worker.alive and self._pair == pair and current and mine:
                    return self._worker
                if self._worker and self._in_flight:
                    await self._turn_of(pair)
                    continue
                self._next_pair = None
                self._loading = asyncio.create_task(self._load(pair))
                self._loading.add_done_callback(self._load_ended)
            with contextlib.suppress(Again):
                # Shielded: one client that leaves does not stop the load others wait for.
                await asyncio.shield(self._loading)

    async def _turn_of(self, pair: frames.PairFiles) -> None:
        """Wait until what runs on the present pair has finished: two pairs may not fit in memory.

        Whoever asks for the present pair meanwhile waits too, or a busy one would never give way.
        """
        self._next_pair = self._next_pair or pair
        try:
            await self._in_flight.quiet()
        except asyncio.CancelledError:
            self._next_pair = None  # whoever still waits for it asks again
            self._in_flight.wake()
            raise

    def _load_ended(self, task: asyncio.Task[Worker]) -> None:
        self._loading = self._progress = self._loaded = None
        if not task.cancelled():
            task.exception()  # seen, also when every waiter has left
        self._load_is_over()

    async def _load(self, pair: frames.PairFiles) -> Worker:
        await self.unload()  # and what still saves: two engines may not fit in memory
        if not self._recalled:
            self._recalled = True
            self._safe_reason = self._memory.recall()
        self._pair, self._proven = pair, False
        self._loaded_with = self._settings()
        self._mapped = await asyncio.to_thread(Mapped, pair)
        planned = await asyncio.to_thread(_plan, pair, self._loaded_with)
        self._notes = planned.notes
        self._loaded = asyncio.get_running_loop().create_future()
        try:
            worker = await spawn(self._command, self._on_frame, self._on_death)
        except OSError as error:
            raise errors.LoadFailed(f"The engine cannot be started: {error}.") from error
        self._worker = worker
        self._alive.add(worker)
        self._counts.worker_starts += 1
        self._later(self._watch(worker))
        self._admission.parallel = self.config.parallel
        worker.send(frames.Load(planned.pair, planned.settings))
        log.info("worker %d loads %s, safe mode %s", worker.pid, pair.name, self.safe_mode)
        try:
            self.info = await self._loaded
        except errors.LoadFailed:
            await self.unload()
            raise
        return worker

    def _settings(self) -> frames.EngineSettings:
        config = self.config
        return frames.EngineSettings(
            n_ctx=config.context,
            parallel=config.parallel + EDITOR_PLACES,
            n_threads=config.threads,
            n_gpu_layers=config.gpu_layers,
            split_mode=config.split_mode,
            main_gpu=config.main_gpu,
            flash_attention=config.flash_attention,
            type_kv=config.kv_type,
            extra_buffers=not self.safe_mode,
            exact=config.exact,
            depth=None if config.depth < 0 else config.depth,
            pass_s=config.watchdog * PASS_SHARE,
            state_dir=self._state_dir,
            prefix_bytes=config.prefix_memory * MIB,
            states_dir=self._states_dir,
            states_bytes=config.prefix_disk * MIB,
        )

    # ------------------------------------------------------------------ unload

    def reset(self) -> None:
        """Try everything again: pairs set aside, and the fast kernels at the next load."""
        self._history.reset()
        self._deadly.reset()
        if self.safe_mode:
            self._safe_reason = None
            self._memory.forget()
            self.unload_soon()

    async def unload(self) -> None:
        """End the worker; all its memory has gone back when this returns, also that of one which
        was told to end before. Whatever still runs in it fails.
        """
        worker, self._worker = self._worker, None
        self.info = None
        if worker:
            self._fail_all(errors.Unavailable("The pair is being unloaded.", retry_after=2))
            # A task of its own: a worker is followed to its end though nobody waits for it.
            ending = asyncio.create_task(worker.shut_down())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        while self._ending:
            await asyncio.wait(self._ending)

    async def forget(self, conversation: str | None) -> None:
        """Let the worker, and one that is ending, drop what they keep of a conversation, or all."""
        await asyncio.gather(*(worker.forget(conversation) for worker in self._alive))

    def unload_soon(self) -> None:
        """Unload without waiting for it."""
        self._later(self.unload())

    async def close(self) -> None:
        """The end: the worker is gone when this returns."""
        if self._loading:
            self._loading.cancel()
        await self.unload()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ what the worker does

    def _on_frame(self, worker: Worker, frame: frames.FromWorker) -> None:
        if isinstance(frame, frames.Notice):
            log.warning("%s", frame.text)
            return
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
                worker.still_s = frame.still_s
            case frames.Forgotten():
                pass  # the worker's own affair
            case frames.Preparing():
                self._in_flight.note(frame)
            case _:
                self._answered(frame)

    def _settle(self, outcome: frames.PairInfo | Exception) -> None:
        """End the wait for a load."""
        if self._loaded is None or self._loaded.done():
            return
        if isinstance(outcome, Exception):
            self._loaded.set_exception(outcome)
        else:
            self._loaded.set_result(outcome)

    def _answered(self, frame: Answering) -> None:
        if isinstance(frame, frames.Delta) or (
            isinstance(frame, frames.Done) and frame.completion_tokens
        ):
            self._prove()
        self._in_flight.deliver(frame)

    def _prove(self) -> None:
        """The first decode went well; when that took safe mode, it is worth remembering."""
        if self._proven:
            return
        self._proven = True
        if self._safe_reason is not None:
            self._memory.remember(self._safe_reason)

    def _on_death(self, worker: Worker, death: Death) -> None:
        self._alive.discard(worker)
        if worker is not self._worker:
            log.info("worker %d ended", worker.pid)
            return
        self._worker = self.info = None
        if death.ending == "unload":
            return
        self._counts.worker_deaths += 1
        log.error("worker %d died: %s", worker.pid, death)
        assert self._pair is not None
        changed = self._mapped.changed() if self._mapped and death.by_kernels else None
        if changed:
            self._fail_all(death.of_changed_file(changed))
            return
        suspects = self._in_flight.at("preparing")
        if suspects and death.by_text:
            self._died_of_text(suspects, death)
            return
        outcome: Exception
        if death.by_kernels and not self._proven and not self.safe_mode:
            assert death.signal is not None
            self._safe_reason = f"{death.signal.name} at the first decode"
            outcome = Again()
        else:
            if self.safe_mode and not self._proven:
                self._safe_reason = None  # it did not help, so it is not the cure
            outcome = death.error(self.config.watchdog)
            reason = f"{death.how} {death.last_words}".rstrip()
            self._history.record(self._pair.name, self._clock(), reason)
        self._fail_all(outcome)

    def _died_of_text(self, suspects: list[Running], death: Death) -> None:
        """Fail those whose text was becoming tokens; it is neither the pair's fault nor the kernels'.

        A text is remembered where it was the only one, and no first decode could have done it.
        """
        assert self._pair is not None
        if len(suspects) == 1 and (self._proven or not self._in_flight.at("prepared")):
            self._deadly.add(self._pair.name, suspects[0].frame, death)

        def outcome(running: Running) -> Exception:
            if running in suspects:
                return deadly(death.how)
            return death.error(self.config.watchdog) if running.shown else Again()

        self._in_flight.fail(outcome)

    def _fail_all(self, outcome: Exception) -> None:
        """End the load and every request of a worker that is gone."""
        self._settle(outcome)
        self._in_flight.fail(outcome)

    async def _watch(self, worker: Worker) -> None:
        """End a worker that is silent, or comes no step further, while it has something to do."""
        limit = self.config.watchdog
        while worker.alive:
            await asyncio.sleep(min(limit / 4, 5.0))
            if self._in_flight or self._loading:
                patience = limit * LOADING_PATIENCE if self._loading else limit
                if max(time.monotonic() - worker.heard, worker.still_s) > patience:
                    worker.kill("watchdog")
                    return
                worker.send(frames.Ping(0))

    def _later(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
