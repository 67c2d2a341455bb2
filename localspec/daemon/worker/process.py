"""One engine process: its life, the frames to and from it, and the requests that run in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from localspec import errors
from localspec.children import engine_environment
from localspec.daemon.worker.death import Death, Ending
from localspec.daemon.worker.queue.forecast import Job
from localspec.ended import oom_kills
from localspec.protocol import frames

log = logging.getLogger("localspec.worker")

# `--fd N` is appended: the worker's end of the socketpair.
DEFAULT_COMMAND = (sys.executable, "-P", "-m", "localspec.engine")

_STDERR_TAIL = 4096  # bytes kept; the cause of death is in the last line
_GRACE = 2.0  # seconds between asking a worker to end and ending it
_PATIENCE = 2.0  # seconds for an order: for deleting some files, or until a pass is over
_SAVING = 8.0  # seconds more for what it saves then: conversations, 6 s at most
# A big model may take its time between two reports of progress, but not for ever.
_LOADING_PATIENCE = 5  # times the watchdog

Request = (
    frames.Generate
    | frames.Tokenize
    | frames.Detokenize
    | frames.ApplyTemplate
    | frames.CountTokens
    | frames.Embed
    | frames.Rerank
)
Event = frames.Started | frames.Reading | frames.Delta | frames.Done
Take = Callable[[Event], Awaitable[None]]


class Again(Exception):
    """The worker died of what is not this request's making: it is asked once more."""


class Running:
    """One request in the worker, and what has come for it.

    `stage`: "preparing" while its text becomes tokens. `shown`: somebody has seen part of the answer.
    """

    def __init__(self, request: Request, job: Job) -> None:
        self.request = request
        self.job = job
        self.stage: Literal["sent", "preparing", "prepared"] = "sent"
        self.shown = False
        self.inbox: asyncio.Queue[Event | frames.Reply | Exception] = asyncio.Queue()

    async def next(self) -> Event | frames.Reply:
        """What comes next for it.

        Raises:
            Again: it should be sent to another worker.
            LocalspecError: the worker refused it, or ended.
        """
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def text(self, take: Take) -> Event | frames.Reply:
        """Pass on the text that comes next, piece by piece; what comes after it. Raises as `next`."""
        while isinstance(event := await self.next(), frames.Delta):
            await take(event)
        return event


class Owner(Protocol):
    """Who keeps a worker, and is told what happens to it."""

    def on_notice(self, text: str) -> None:
        """It has a sentence for the log."""

    def on_decoded(self, worker: Worker) -> None:
        """Its first decode went well."""

    def on_quiet(self) -> None:
        """Nothing runs in it any more."""

    def on_death(self, worker: Worker, death: Death) -> None:
        """It has ended. What it was doing waits to be told: see `Worker.fail`."""


class _Link(asyncio.Protocol):
    """Our end of the socket. A frame is taken in the turn of the loop that brings its last byte: with
    each token of each answer, a stream of asyncio's would cost a turn more.
    """

    _transport: asyncio.Transport  # from the first of asyncio's calls on

    def __init__(self) -> None:
        self._unread = bytearray()
        self._take: Callable[[bytes], None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def bring(self, take: Callable[[bytes], None]) -> None:
        """Have `take` called with the body of each frame until the socket closes.

        Raises:
            Exception: what `take` has raised, or why the socket broke.
        """
        self._take = take
        self._deliver()
        await self._closed

    def send(self, data: bytes) -> None:
        """Queue it; once the socket is closed it goes nowhere."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Once what is queued is sent."""
        self._transport.close()

    def _deliver(self) -> None:
        if self._take is None or self._closed.done():
            return
        try:
            for body in frames.taken(self._unread):
                self._take(body)
        except Exception as error:  # what comes after it has no beginning
            self._closed.set_exception(error)

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed.done():
            return
        if exc is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(exc)


class Worker:
    """A running engine, and what it does: a load, then requests, each by its number."""

    def __init__(
        self,
        process: Process,
        link: _Link,
        owner: Owner,
        watchdog: float,
    ) -> None:
        """`watchdog`: seconds of silence after which one that has something to do is ended."""
        self.pid = process.pid
        self.decoded = False
        self.progress: frames.Loading | None = None  # of the load
        self._process = process
        self._link = link
        self._owner = owner
        self._heard = time.monotonic()  # when the last frame came
        self._still_s = 0.0  # how long it has come no step further, where that was its last word
        self._numbers = itertools.count(1)
        self._loaded: asyncio.Future[frames.Loaded] | None = None
        self._running: dict[int, Running] = {}
        self._orders: dict[int, asyncio.Future[frames.Forgotten | frames.Spared]] = {}
        self._ending: Ending = "crash"
        self._stderr_tail = bytearray()
        self._oom_kills = oom_kills()
        self._life = asyncio.create_task(self._live(watchdog))

    @property
    def alive(self) -> bool:
        # Not the sign of the code: None alone means that it still runs.
        return self._process.returncode is None and not self._life.done()

    @property
    def busy(self) -> bool:
        """Whether a request runs in it."""
        return bool(self._running)

    @property
    def embedding(self) -> int:
        """Requests for vectors or rankings, which wait for no place in a queue."""
        of_those = (frames.Embed, frames.Rerank)
        return sum(isinstance(each.request, of_those) for each in self._running.values())

    def at(self, stage: str) -> list[Running]:
        """The requests that have come as far as that."""
        return [running for running in self._running.values() if running.stage == stage]

    # ------------------------------------------------------------------ what it is to do

    async def load(self, pair: frames.PairFiles, settings: frames.EngineSettings) -> frames.Loaded:
        """Load a pair.

        Raises:
            LoadFailed: why it cannot be loaded.
            Exception: what `fail` was told.
        """
        self._loaded = asyncio.get_running_loop().create_future()
        self._send(frames.Load(pair, settings))
        try:
            return await self._loaded
        finally:
            self._loaded = self.progress = None

    @contextlib.contextmanager
    def running(self, request: Request, job: Job | None = None) -> Iterator[Running]:
        """Send a request, under a number of its own; when the body ends early it is cancelled. How far
        it is stands in `job`.

        Raises:
            InvalidRequest: it cannot be sent.
        """
        if not self._running:
            self._heard = time.monotonic()  # silence counts from now
        number = request.id = next(self._numbers)
        running = self._running[number] = Running(request, job or Job())
        try:
            self._send_request(request)
            yield running
        finally:
            # Still there: no Done, Failed or Reply has come.
            unfinished = self._running.pop(number, None)
            if not self._running:
                self._owner.on_quiet()
            if unfinished and self.alive:
                self._send(frames.Cancel(number))

    def _send_request(self, request: Request) -> None:
        try:
            self._send(request)
        except OverflowError as error:  # in what a template is given as it is
            raise errors.InvalidRequest(
                "The request contains a whole number of more than 64 bits."
            ) from error

    async def forget(self, conversation: str | None) -> None:
        """Let it drop what it keeps of a conversation, with None of all.

        When this returns it has, or has ended; one that does not answer is not waited for long.
        """
        await self._told(lambda number: frames.Forget(number, conversation))

    async def spare(self, most: int) -> int | None:
        """Leave prompts without a slot room for `most` bytes, or for what they take; how many that is.

        None: it does not say, and has what it had.
        """
        told = await self._told(lambda number: frames.Spare(number, most))
        return told.room if isinstance(told, frames.Spared) else None

    async def _told(
        self, order: Callable[[int], frames.Forget | frames.Spare]
    ) -> frames.Forgotten | frames.Spared | None:
        """Its answer to an order of this number, once it has carried that out; not waited for long."""
        number = next(self._numbers)
        done = self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(order(number))
            await asyncio.wait(
                {done, self._life}, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED
            )
            return done.result() if done.done() else None
        finally:
            del self._orders[number]

    # ------------------------------------------------------------------ how it ends

    def fail(self, outcome: Exception | Callable[[Running], Exception]) -> None:
        """End its load and every request, each with its own outcome if these differ."""
        if isinstance(outcome, Exception):
            self._load_failed(outcome)
        doomed, self._running = self._running, {}
        for running in doomed.values():
            running.inbox.put_nowait(
                outcome if isinstance(outcome, Exception) else outcome(running)
            )

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail the requests while it lives: they stay, so that each is cancelled there."""
        for running in self._running.values():
            running.inbox.put_nowait(error)

    async def shut_down(self) -> None:
        """Ask it to end, wait a little, end it."""
        self._ending = "unload"
        self._send(frames.Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._life), _GRACE + _SAVING)
        self._kill("unload")
        await self._life

    def _kill(self, ending: Ending) -> None:
        """End it now. SIGKILL also ends a stopped process."""
        if self._process.returncode is None:
            self._ending = ending
            self._kill_group()

    def _kill_group(self) -> None:
        """The worker leads a group of its own (`start_new_session`), its helpers are in it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ its life

    async def _live(self, watchdog: float) -> None:
        """From the first frame to the exit code."""
        stderr = asyncio.create_task(self._read_stderr())
        watching = asyncio.create_task(self._watch(watchdog))
        try:
            await self._link.bring(self._heard_from)
        except (ValueError, msgspec.DecodeError):
            log.exception("the engine sent something that is no frame")
        except OSError as error:
            log.info("the engine's socket broke: %s", error)
        finally:
            self._link.close()
        try:
            # Without its socket it has nothing to live for.
            returncode = await asyncio.wait_for(self._process.wait(), _GRACE)
        except TimeoutError:
            self._kill_group()
            returncode = await self._process.wait()
        self._kill_group()  # whatever it started has nobody to work for
        await asyncio.wait({stderr}, timeout=0.5)  # a grandchild may hold the pipe open
        stderr.cancel()
        watching.cancel()
        kills = oom_kills()
        known = None if kills is None or self._oom_kills is None else kills > self._oom_kills
        self._owner.on_death(self, Death(self._ending, returncode, self._last_words(), known))

    async def _watch(self, limit: float) -> None:
        """End it when it is silent, or comes no step further, while it has something to do."""
        while self.alive:
            await asyncio.sleep(min(limit / 4, 5.0))
            if self._running or self._loaded:
                patience = limit * _LOADING_PATIENCE if self._loaded else limit
                if max(time.monotonic() - self._heard, self._still_s) > patience:
                    self._kill("watchdog")
                    return
                self._send(frames.Ping(0))

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr_tail += data
            del self._stderr_tail[:-_STDERR_TAIL]
            log.debug("engine: %s", data.decode("utf-8", "replace").rstrip())

    def _last_words(self) -> str:
        lines = self._stderr_tail.decode("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else ""

    # ------------------------------------------------------------------ frames

    def _send(self, frame: frames.Frame) -> None:
        """Queue a frame; for a worker that is gone it goes nowhere, and its owner hears the rest."""
        self._link.send(frames.encode(frame))

    def _heard_from(self, body: bytes) -> None:
        self._heard, self._still_s = time.monotonic(), 0.0
        self._take(frames.from_worker_decoder.decode(body))

    def _take(self, frame: frames.FromWorker) -> None:
        """Hand a frame to whom it is for, if that is still there."""
        match frame:
            case (
                frames.Started()
                | frames.Reading()
                | frames.Delta()
                | frames.Done()
                | frames.Reply()
            ):
                self._answered(frame.id, frame)
            case frames.Failed():
                refusal = errors.from_code(
                    frame.code,
                    frame.message,
                    param=frame.param,
                    n_prompt_tokens=frame.n_prompt_tokens,
                    n_ctx=frame.n_ctx,
                )
                self._answered(frame.id, refusal)
            case frames.Preparing():
                if running := self._running.get(frame.id):
                    running.stage = "preparing" if frame.begins else "prepared"
            case frames.Loading():
                self.progress = frame
            case frames.Loaded():
                if self._loaded and not self._loaded.done():
                    self._loaded.set_result(frame)
            case frames.LoadError():
                self._load_failed(errors.LoadFailed(frame.message))
            case frames.Pong():
                self._still_s = frame.still_s
            case frames.Forgotten() | frames.Spared():
                done = self._orders.get(frame.id)
                if done and not done.done():
                    done.set_result(frame)
            case frames.Notice():
                self._owner.on_notice(frame.text)

    def _load_failed(self, reason: Exception) -> None:
        if self._loaded and not self._loaded.done():
            self._loaded.set_exception(reason)

    def _answered(self, number: int, item: Event | frames.Reply | Exception) -> None:
        shown = isinstance(item, frames.Delta)
        decoded = shown or (isinstance(item, frames.Done) and item.completion_tokens > 0)
        if isinstance(item, frames.Reply) and (asked := self._running.get(number)):
            decoded = isinstance(asked.request, frames.Embed | frames.Rerank)
        if decoded and not self.decoded:
            self.decoded = True
            self._owner.on_decoded(self)
        over = not isinstance(item, frames.Started | frames.Reading | frames.Delta)
        running = self._running.pop(number, None) if over else self._running.get(number)
        if running:
            running.shown = running.shown or shown
            running.job.sees(item)
            running.inbox.put_nowait(item)


async def spawn(command: Sequence[str], owner: Owner, watchdog: float) -> Worker:
    """Start an engine, in a session of its own: a Ctrl-C in the daemon's terminal is not for it.

    Raises:
        OSError: there is no such program, or it cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=engine_environment(),
            )
        _, link = await asyncio.get_running_loop().create_connection(_Link, sock=ours)
    except BaseException:
        ours.close()
        raise
    return Worker(process, link, owner, watchdog)
