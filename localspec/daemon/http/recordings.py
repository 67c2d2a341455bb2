"""Record streams, so that a client that has lost its connection can read on where it stopped.

A recorded stream is written in a task of its own, whatever its readers do. What was written stays in memory,
within limits, until some time after its end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from starlette.types import Message

from localspec.daemon.http import errors
from localspec.daemon.http.sse import Emit, EventStream
from localspec.errors import Cancelled, InvalidRequest, LocalspecError, Unavailable

MAX_RECORDINGS = 32  # all of these bound memory; the time and the bytes are llama-server's
MAX_BYTES = 4 << 20  # of one stream: of a longer one its beginning is dropped
KEPT_S = 300.0  # after the end of a stream
RETRY_AFTER_S = 10
_EVENT_END = b"\n\n"

Key = tuple[str, str]  # the kind of a stream, and its name


class Recording:
    """The events of one stream. Its positions are bytes since its beginning, or numbers of events."""

    def __init__(self) -> None:
        self.conversation: str | None = None  # of the answer; None of a private one
        self.is_forgotten = False  # nobody new may read it
        self.started_at = int(time.time())
        self.is_done = False
        self.completed_at = 0  # 0 while it is written
        self.first_byte = 0  # the position of the first byte that is not dropped
        self._first_event = 0
        self._data = bytearray()
        self._ends: deque[int] = deque()  # the position behind each event that is not dropped
        self._error: LocalspecError | None = None  # why there is no stream
        self._changed = asyncio.Event()

    @property
    def total_bytes(self) -> int:
        """The length of the stream so far, with what was dropped of it."""
        return self.first_byte + len(self._data)

    async def write(self, message: Message) -> None:
        """Take what a response sends, as an ASGI server does."""
        self.append(message.get("body", b""))

    def append(self, events: bytes) -> None:
        """Add whole events to the stream."""
        for event in events.split(_EVENT_END)[:-1]:
            self._data += event + _EVENT_END
            self._ends.append(self.total_bytes)
        while len(self._data) > MAX_BYTES:
            end = self._ends.popleft()
            del self._data[: end - self.first_byte]
            self.first_byte = end
            self._first_event += 1
        self._notify()

    def finish(self, error: LocalspecError | None = None) -> None:
        """End the stream. `error` says why it never began."""
        self.is_done, self.completed_at, self._error = True, int(time.time()), error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def position_after(self, number: int) -> int:
        """Return the position behind an event, from 0. Raises InvalidRequest if it is not there."""
        index = number - self._first_event
        if index >= len(self._ends):
            raise InvalidRequest(f"There is no event {number} yet.")
        if index < -1:
            raise InvalidRequest(
                f"The events before {self._first_event} are no longer kept: the stream is too long."
            )
        return self.first_byte if index == -1 else self._ends[index]

    async def follow(self, position: int = 0) -> AsyncIterator[bytes]:
        """Yield the bytes from `position` on, until the stream ends.

        Raises:
            LocalspecError: There is no stream.
            InvalidRequest: Bytes were dropped that the reader has not read.
        """
        while True:
            while position < self.total_bytes:
                if position < self.first_byte:
                    raise InvalidRequest("The next part of the stream was dropped: it is too long.")
                data = bytes(self._data[position - self.first_byte :])
                position += len(data)
                yield data
            if self._error is not None:
                raise self._error
            if self.is_done:
                return
            await self._changed.wait()


class Recordings:
    """The recorded streams of a daemon."""

    def __init__(self) -> None:
        self._recordings: dict[Key, Recording] = {}  # the oldest one first
        self._tasks: dict[Recording, asyncio.Task[None]] = {}  # those that are being written
        self._timers: dict[Recording, asyncio.TimerHandle] = {}  # those that have ended

    def get(self, key: Key) -> Recording | None:
        return self._recordings.get(key)

    def find(self, kind: str) -> list[tuple[str, Recording]]:
        recordings = self._recordings.items()
        return [(name, recording) for (its_kind, name), recording in recordings if its_kind == kind]

    def start(self, key: Key, stream: EventStream) -> Recording:
        """Write a stream, in place of an earlier one with this key, which ends.

        Raises:
            Unavailable: Too many streams are being written.
        """
        self._remove(key)
        if len(self._recordings) >= MAX_RECORDINGS:
            ended = (key for key, recording in self._recordings.items() if recording.is_done)
            oldest = next(ended, None)
            if oldest is None:
                raise Unavailable(
                    f"{MAX_RECORDINGS} streams are being written that can be resumed. Cancel one, or try "
                    "again later.",
                    retry_after=RETRY_AFTER_S,
                )
            self._remove(oldest)
        recording = self._recordings[key] = Recording()
        task = self._tasks[recording] = asyncio.create_task(stream.run(recording.write))
        task.add_done_callback(partial(self._end, key, recording, stream))
        return recording

    def _end(
        self, key: Key, recording: Recording, stream: EventStream, task: asyncio.Task[None]
    ) -> None:
        cancellation = Cancelled("The stream was cancelled before its end.")
        failure = cancellation if task.cancelled() else task.exception()
        error = errors.as_localspec_error(failure) if isinstance(failure, Exception) else None
        if error is not None and recording.total_bytes:
            # Its readers would take a stream that just ends for a complete one.
            recording.append(stream.failure(error))
            error = None
        recording.finish(error)
        del self._tasks[recording]
        if self.get(key) is not recording:
            return
        if error is not None or recording.is_forgotten:
            self._remove(key)
            return
        loop = asyncio.get_running_loop()
        self._timers[recording] = loop.call_later(KEPT_S, self._remove, key)

    def _remove(self, key: Key) -> asyncio.Task[None] | None:
        """Forget a recording, and return its cancelled task if it is being written."""
        recording = self._recordings.pop(key, None)
        if recording is None:
            return None
        if timer := self._timers.pop(recording, None):
            timer.cancel()
        if task := self._tasks.get(recording):
            task.cancel()
        return task

    async def remove(self, key: Key) -> None:
        """Forget a recording, and end its stream first if it is being written."""
        if task := self._remove(key):
            await asyncio.gather(task, return_exceptions=True)

    def forget(self, conversation: str | None) -> None:
        """Forget the streams of a conversation that has been removed, or all with None.

        Private ones go with any: nothing says what they belong to. One that is being written is forgotten at
        its end.
        """
        for key, recording in [*self._recordings.items()]:
            if conversation is None or recording.conversation in (conversation, None):
                recording.is_forgotten = True
                if recording.is_done:
                    self._remove(key)

    async def close(self, timeout_s: float) -> None:
        """Wait until all streams are written, and cancel those that take longer."""
        if tasks := [*self._tasks.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)
        for key in [*self._recordings]:
            await self.remove(key)


def replay(
    recording: Recording, position: int = 0, *, begun: bool = True, ping_s: float = 0.0
) -> EventStream:
    """Return what a recording has from `position` on, and what is still to come.

    A stream that has not `begun` may still turn out to be an error with a status of its own.
    """

    async def work(emit: Emit) -> None:
        if begun:
            await emit()
        async for data in recording.follow(position):
            await emit(data)

    return EventStream(work, done=False, ping_s=ping_s)
