"""One engine process and the socket to it."""

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
from collections.abc import Callable, Sequence

import msgspec

from localspec.daemon.worker.death import Death, Ending, oom_kills
from localspec.protocol import frames

log = logging.getLogger("localspec.worker")

# `--fd N` is appended: the worker's end of the socketpair.
DEFAULT_COMMAND = (sys.executable, "-m", "localspec.engine")

_numbers = itertools.count(1)  # of what is to be forgotten

_STDERR_TAIL = 4096  # bytes kept; the cause of death is in the last line
_GRACE = 2.0  # seconds between asking a worker to end and ending it
_FORGETTING = 2.0  # seconds for deleting some files; it answers at once unless it is stopped
_SAVING = 8.0  # seconds more for what it saves then: conversations, 6 s at most


class Worker:
    """A running engine. `on_frame` gets every frame; `on_death` is called once, after its exit."""

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_frame: Callable[[Worker, frames.FromWorker], None],
        on_death: Callable[[Worker, Death], None],
    ) -> None:
        self.pid = process.pid
        self.heard = time.monotonic()  # when the last frame came
        self.still_s = 0.0  # for how long it has come no step further, where that was its last word
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_frame = on_frame
        self._on_death = on_death
        self._ending: Ending = "crash"
        self._tail = bytearray()
        self._oom_kills = oom_kills()
        self._forgetting: dict[int, asyncio.Event] = {}
        self._life = asyncio.create_task(self._live())

    @property
    def alive(self) -> bool:
        # Not the sign of the code: None alone means that it still runs.
        return self._process.returncode is None and not self._life.done()

    def send(self, frame: frames.Frame) -> None:
        """Queue a frame; to a worker that is gone it goes nowhere, and `on_death` says the rest."""
        if not self._writer.is_closing():
            self._writer.write(frames.encode(frame))

    async def forget(self, conversation: str | None) -> None:
        """Let it drop what it keeps of a conversation, with None of all.

        When this returns it has, or has ended; one that does not answer is not waited for long.
        """
        number = next(_numbers)
        forgotten = self._forgetting[number] = asyncio.Event()
        waiting = asyncio.create_task(forgotten.wait())
        try:
            self.send(frames.Forget(number, conversation))
            await asyncio.wait(
                {waiting, self._life}, timeout=_FORGETTING, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
            del self._forgetting[number]

    def kill(self, ending: Ending) -> None:
        """End it now. SIGKILL also ends a stopped process."""
        if self._process.returncode is None:
            self._ending = ending
            self._kill_group()

    async def shut_down(self) -> None:
        """Ask it to end, wait a little, end it."""
        self._ending = "unload"
        self.send(frames.Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._life), _GRACE + _SAVING)
        self.kill("unload")
        await self._life

    async def _live(self) -> None:
        """From the first frame to the exit code."""
        stderr = asyncio.create_task(self._read_stderr())
        try:
            await self._read_frames()
        except (ValueError, msgspec.DecodeError):
            log.exception("the engine sent something that is no frame")
        except OSError as error:
            log.info("the engine's socket broke: %s", error)
        finally:
            self._writer.close()
        try:
            # Without its socket it has nothing to live for.
            returncode = await asyncio.wait_for(self._process.wait(), _GRACE)
        except TimeoutError:
            self._kill_group()
            returncode = await self._process.wait()
        self._kill_group()  # whatever it started has nobody to work for
        await asyncio.wait({stderr}, timeout=0.5)  # a grandchild may hold the pipe open
        stderr.cancel()
        kills = oom_kills()
        known = None if kills is None or self._oom_kills is None else kills > self._oom_kills
        self._on_death(self, Death(self._ending, returncode, self._last_words(), known))

    def _kill_group(self) -> None:
        """The worker leads a group of its own (`start_new_session`), its helpers are in it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read_frames(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                header = await self._reader.readexactly(frames.HEADER_SIZE)
                body = await self._reader.readexactly(frames.frame_length(header))
                self.heard, self.still_s = time.monotonic(), 0.0
                frame = frames.from_worker_decoder.decode(body)
                if not isinstance(frame, frames.Forgotten):
                    self._on_frame(self, frame)
                elif forgotten := self._forgetting.get(frame.id):
                    forgotten.set()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._tail += data
            del self._tail[:-_STDERR_TAIL]
            log.debug("engine: %s", data.decode("utf-8", "replace").rstrip())

    def _last_words(self) -> str:
        lines = self._tail.decode("utf-8", "replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else ""


async def spawn(
    command: Sequence[str],
    on_frame: Callable[[Worker, frames.FromWorker], None],
    on_death: Callable[[Worker, Death], None],
) -> Worker:
    """Start an engine, in a session of its own: a Ctrl-C in the daemon's terminal is not for it."""
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
                env=dict(os.environ),
            )
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        raise
    return Worker(process, reader, writer, on_frame, on_death)
