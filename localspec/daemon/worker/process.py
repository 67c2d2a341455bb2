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
from typing import TYPE_CHECKING, Literal

import msgspec

from localspec import errors
from localspec.children import engine_environment
from localspec.daemon.worker.death import Death, Ending
from localspec.daemon.worker.queue import Job
from localspec.ended import count_oom_kills
from localspec.protocol import frames

if TYPE_CHECKING:
    from localspec.daemon.worker.loaded import LoadedPair

log = logging.getLogger("localspec.worker")

# `--fd N` is appended, where N is the worker's end of the socket pair.
DEFAULT_COMMAND = (sys.executable, "-P", "-m", "localspec.engine")

_STDERR_TAIL_BYTES = 4096  # the cause of death is in the last line
_SHUTDOWN_GRACE_S = 2.0  # between the request to end and SIGKILL
_ORDER_TIMEOUT_S = 2.0  # enough to delete some files, or to wait for the end of a pass
_SAVE_TIMEOUT_S = 8.0  # added to the grace for saving conversations, which takes at most 6 s
# A large model may take long between two reports of progress, so a load gets this many times the watchdog's
# limit.
_LOAD_WATCHDOG_FACTOR = 5

Request = (
    frames.Generate
    | frames.Tokenize
    | frames.Detokenize
    | frames.ApplyTemplate
    | frames.CountTokens
    | frames.Embed
    | frames.Rerank
)
Order = frames.Forget | frames.Spare | frames.EndThoughts
Event = frames.Started | frames.Reading | frames.Delta | frames.Done
EventHandler = Callable[[Event], Awaitable[None]]


class RetryRequest(Exception):
    """The worker died for a reason that this request did not cause, so the request is sent again."""


class RunningRequest:
    """A request in the worker, and the events that have arrived for it.

    `stage` is "preparing" while its text is tokenized. `shown` is set once a client has part of the answer.
    """

    def __init__(self, request: Request, job: Job) -> None:
        self.request = request
        self.job = job
        self.stage: Literal["sent", "preparing", "prepared"] = "sent"
        self.shown = False
        self.inbox: asyncio.Queue[Event | frames.Reply | Exception] = asyncio.Queue()

    async def next(self) -> Event | frames.Reply:
        """Return the next event or reply. Raises RetryRequest or LocalspecError."""
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def pass_text(self, take: EventHandler) -> Event | frames.Reply:
        """Pass the next pieces of text to `take` and return the event after them. Raises as `next`."""
        while isinstance(event := await self.next(), frames.Delta):
            await take(event)
        return event


class _Link(asyncio.Protocol):
    """Our end of the socket.

    A frame is processed in the iteration of the event loop that receives its last byte. An asyncio stream
    would need one more iteration for each token of each answer.
    """

    transport: asyncio.Transport  # set by connection_made

    def __init__(self) -> None:
        self._unread = bytearray()
        self._take: Callable[[bytes], None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def deliver_frames(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with each frame's body until the socket closes. Raises what either of them raises."""
        self._take = take
        self.data_received(b"")
        await self._closed

    def send(self, data: bytes) -> None:
        """Queue data. Once the socket is closed, the data is dropped."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._take is None or self._closed.done():
            return
        try:
            for body in frames.take_frames(self._unread):
                self._take(body)
        except Exception as error:  # the data after an invalid frame has no known beginning
            self._closed.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed.done():
            return
        if exc is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(exc)


class Worker:
    """A running engine: its load, then its requests, each with a number."""

    def __init__(self, process: Process, link: _Link, owner: LoadedPair, watchdog: float) -> None:
        """Follow the process. A busy worker is killed after `watchdog` seconds of silence."""
        self.pid = process.pid
        self.decoded = False
        self.progress: frames.Loading | None = None  # of the current load
        self._process = process
        self._link = link
        self._owner = owner
        self._heard_at = time.monotonic()  # when the last frame came
        self._still_s = 0.0  # how long it has made no progress, by its last Pong
        self._numbers = itertools.count(1)
        self._load_result: asyncio.Future[frames.Loaded] | None = None
        self._is_loaded = False
        self._running: dict[int, RunningRequest] = {}
        self._orders: dict[int, asyncio.Future[frames.Reply]] = {}
        self._ending: Ending = "crash"
        self._stderr_tail = bytearray()
        self._oom_kills = count_oom_kills()
        self._life = asyncio.create_task(self._live(watchdog))

    @property
    def alive(self) -> bool:
        # Only None means that the process still runs: the code may also be 0 or negative.
        return self._process.returncode is None and not self._life.done()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def embedding_requests(self) -> int:
        """The number of requests for vectors or rankings, which need no place in a queue."""
        kinds = (frames.Embed, frames.Rerank)
        return sum(isinstance(running.request, kinds) for running in self._running.values())

    def in_stage(self, stage: str) -> list[RunningRequest]:
        return [running for running in self._running.values() if running.stage == stage]

    async def load(self, pair: frames.PairFiles, settings: frames.EngineSettings) -> frames.Loaded:
        """Load a pair. Raises LoadFailed, or the outcome that `fail` was called with."""
        self._load_result = asyncio.get_running_loop().create_future()
        self._send(frames.Load(pair, settings))
        try:
            return await self._load_result
        finally:
            self._load_result = self.progress = None

    @contextlib.contextmanager
    def running(self, request: Request, job: Job | None = None) -> Iterator[RunningRequest]:
        """Send a request, and cancel it if the block ends early. Raises InvalidRequest."""
        if not self._running:
            self._heard_at = time.monotonic()  # silence counts from now
        number = request.id = next(self._numbers)
        running = self._running[number] = RunningRequest(request, job or Job())
        try:
            try:
                self._send(request)
            except OverflowError as error:  # from values that are passed to a template unchecked
                raise errors.InvalidRequest(
                    "The request contains a whole number of more than 64 bits."
                ) from error
            yield running
        finally:
            # The request is still in the table if no Done, Failed or Reply has come.
            unfinished = self._running.pop(number, None)
            if not self._running:
                self._owner.on_quiet()
            if unfinished and self.alive:
                self._send(frames.Cancel(number))

    async def forget(self, conversation: str | None) -> None:
        """Make the worker drop everything it keeps of a conversation, or of all with None.

        It has done so when this returns, unless it ended or did not respond in time.
        """
        await self._send_order(frames.Forget(0, conversation))

    async def end_thoughts(self, request: Request) -> bool:
        """End the thoughts of a running request. Return False if it does not run here, or has none now."""
        if not any(running.request is request for running in self._running.values()):
            return False
        reply = await self._send_order(frames.EndThoughts(0, request.id))
        return reply is not None and bool(reply.value["ended"])

    async def limit_cache(self, max_bytes: int) -> int | None:
        """Limit the cache for prompts without a slot to `max_bytes` bytes, or to the bytes in use.

        Return the new limit, or None if the worker did not respond and keeps the old one.
        """
        reply = await self._send_order(frames.Spare(0, max_bytes))
        return None if reply is None else int(reply.value["room"])

    async def _send_order(self, order: Order) -> frames.Reply | None:
        """Send an order with a new number and return the reply, or None after _ORDER_TIMEOUT_S."""
        order.id = next(self._numbers)
        done = self._orders[order.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            await asyncio.wait(
                {done, self._life}, timeout=_ORDER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            return done.result() if done.done() else None
        finally:
            del self._orders[order.id]

    def fail(self, outcome: Exception | Callable[[RunningRequest], Exception]) -> None:
        """End the load and every request with an outcome, which may differ between requests."""
        if isinstance(outcome, Exception):
            self._fail_load(outcome)
        doomed, self._running = self._running, {}
        for running in doomed.values():
            own = outcome if isinstance(outcome, Exception) else outcome(running)
            running.inbox.put_nowait(own)

    def abort(self, error: errors.LocalspecError) -> None:
        """Fail the requests of a live worker. They stay in the table, so that each is cancelled there."""
        for running in self._running.values():
            running.inbox.put_nowait(error)

    async def shut_down(self) -> None:
        """Ask the worker to end, and kill it if it does not do so in time, or at once while it loads."""
        self._ending = "unload"
        if not self._is_loaded:  # it has nothing to save, and would answer after its load
            self._kill("unload")
        self._send(frames.Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._life), _SHUTDOWN_GRACE_S + _SAVE_TIMEOUT_S)
        self._kill("unload")
        await self._life

    def _kill(self, ending: Ending) -> None:
        """Kill the worker. SIGKILL also ends a stopped process."""
        if self._process.returncode is None:
            self._ending = ending
            self._kill_group()

    def _kill_group(self) -> None:
        """Kill the process group of the worker (`start_new_session`), which includes its helpers."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _live(self, watchdog: float) -> None:
        """Follow the worker from its first frame to its exit code."""
        stderr_task = asyncio.create_task(self._read_stderr())
        watchdog_task = asyncio.create_task(self._watch(watchdog))
        try:
            await self._link.deliver_frames(self._on_body)
        except (ValueError, msgspec.DecodeError):
            log.exception("the engine sent an invalid frame")
        except OSError as error:
            log.info("the engine's socket broke: %s", error)
        finally:
            self._link.transport.close()  # after the queued data is sent
        try:
            # Without its socket the worker ends by itself.
            returncode = await asyncio.wait_for(self._process.wait(), _SHUTDOWN_GRACE_S)
        except TimeoutError:
            self._kill_group()
            returncode = await self._process.wait()
        self._kill_group()  # processes that it started
        await asyncio.wait({stderr_task}, timeout=0.5)  # a grandchild may hold the pipe open
        stderr_task.cancel()
        watchdog_task.cancel()
        now, before = count_oom_kills(), self._oom_kills
        oom_kill = None if now is None or before is None else now > before
        lines = self._stderr_tail.decode("utf-8", "replace").splitlines()
        messages = [line.strip() for line in lines if line.strip()]
        last_words = messages[-1][:300] if messages else ""
        self._owner.on_death(self, Death(self._ending, returncode, last_words, oom_kill))

    async def _watch(self, limit: float) -> None:
        """Kill the worker if it is silent or makes no progress while it has work."""
        while self.alive:
            await asyncio.sleep(min(limit / 4, 5.0))
            if self._running or self._load_result:
                patience = limit * _LOAD_WATCHDOG_FACTOR if self._load_result else limit
                if max(time.monotonic() - self._heard_at, self._still_s) > patience:
                    self._kill("watchdog")
                    return
                self._send(frames.Ping(0))

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr_tail += data
            del self._stderr_tail[:-_STDERR_TAIL_BYTES]
            log.debug("engine: %s", data.decode("utf-8", "replace").rstrip())

    def _send(self, frame: frames.Frame) -> None:
        """Queue a frame. For a worker that is gone it is dropped, and the owner learns of the end."""
        self._link.send(frames.encode_frame(frame))

    def _on_body(self, body: bytes) -> None:
        """Pass a frame to the request or order that it belongs to, if that still exists."""
        self._heard_at, self._still_s = time.monotonic(), 0.0
        match frame := frames.from_worker_decoder.decode(body):
            case frames.Delta():  # first, because nearly all frames are
                self._on_result(frame.id, frame)
            case frames.Failed():
                lengths = {"n_prompt_tokens": frame.n_prompt_tokens, "n_ctx": frame.n_ctx}
                refusal = errors.error_from_code(
                    frame.code, frame.message, param=frame.param, **lengths
                )
                self._on_result(frame.id, refusal)
            case frames.Preparing():
                if running := self._running.get(frame.id):
                    running.stage = "preparing" if frame.begins else "prepared"
            case frames.Loading():
                self.progress = frame
            case frames.Loaded():
                self._is_loaded = True
                if self._load_result and not self._load_result.done():
                    self._load_result.set_result(frame)
            case frames.LoadError():
                self._fail_load(errors.LoadFailed(frame.message))
            case frames.Pong():
                self._still_s = frame.still_s
            case frames.Reply() if done := self._orders.get(frame.id):
                if not done.done():
                    done.set_result(frame)
            case frames.Notice():
                log.warning("%s", frame.text)
            case _:
                self._on_result(frame.id, frame)

    def _fail_load(self, reason: Exception) -> None:
        if self._load_result and not self._load_result.done():
            self._load_result.set_exception(reason)

    def _on_result(self, number: int, item: Event | frames.Reply | Exception) -> None:
        shown = isinstance(item, frames.Delta)
        decoded = shown or (isinstance(item, frames.Done) and item.completion_tokens > 0)
        if isinstance(item, frames.Reply) and (embedded := self._running.get(number)):
            decoded = isinstance(embedded.request, frames.Embed | frames.Rerank)
        if decoded and not self.decoded:
            self.decoded = True
            self._owner.on_decoded(self)
        is_last = not isinstance(item, frames.Started | frames.Reading | frames.Delta)
        running = self._running.pop(number, None) if is_last else self._running.get(number)
        if running:
            running.shown = running.shown or shown
            running.job.update(item)
            running.inbox.put_nowait(item)


async def spawn(command: Sequence[str], owner: LoadedPair, watchdog: float) -> Worker:
    """Start an engine in a session of its own, so that a Ctrl-C in the daemon's terminal does not end it.

    Raises OSError if the program does not exist or cannot be started.
    """
    our_end, worker_end = socket.socketpair()
    try:
        with worker_end:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--fd", str(worker_end.fileno())),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=(worker_end.fileno(),),
                start_new_session=True,
                env=engine_environment(),
            )
        _, link = await asyncio.get_running_loop().create_connection(_Link, sock=our_end)
    except BaseException:
        our_end.close()
        raise
    return Worker(process, link, owner, watchdog)
