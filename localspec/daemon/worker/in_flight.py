"""The requests that are in the worker now, each with the frames that have come for it.

Apart from worker and pair, because both need it: whoever asks reads its frames here, and whoever
keeps the worker delivers them, ends them all when it dies, and waits for quiet before it changes
pairs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Literal

from localspec.errors import LocalspecError
from localspec.protocol import frames

Answering = frames.Started | frames.Delta | frames.Done | frames.Failed | frames.Reply


class Again(Exception):
    """The worker died of what is not this request's making: it is asked once more."""


class Running:
    """One request in the worker: its frames, or the exception that ended it.

    `stage`: "preparing" while its text becomes tokens. `shown`: somebody has seen part of the answer.
    """

    def __init__(self, frame: frames.Frame) -> None:
        self.frame = frame
        self.stage: Literal["sent", "preparing", "prepared"] = "sent"
        self.shown = False
        self.inbox: asyncio.Queue[Answering | Exception] = asyncio.Queue()

    async def next(self) -> Answering:
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item


class InFlight:
    """All of them by the number that the worker knows them by; true while there are any."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._until_quiet: list[asyncio.Future[None]] = []
        self._ids = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._running)

    def enter(self, make: Callable[[int], frames.Frame]) -> tuple[int, Running]:
        """A new request and its number, with which its frame is made."""
        number = next(self._ids)
        running = Running(make(number))
        self._running[number] = running
        return number, running

    def note(self, frame: frames.Preparing) -> None:
        """How far a request has come."""
        if running := self._running.get(frame.id):
            running.stage = "preparing" if frame.begins else "prepared"

    def at(self, stage: str) -> list[Running]:
        """The requests that are there now."""
        return [running for running in self._running.values() if running.stage == stage]

    def leave(self, number: int) -> bool:
        """Nobody reads its frames any more; True when the worker has not ended it."""
        unfinished = self._running.pop(number, None) is not None
        if not self._running:
            self.wake()
        return unfinished

    def deliver(self, frame: Answering) -> None:
        """Hand a frame to the request it is for, if that is still there."""
        over = isinstance(frame, frames.Done | frames.Failed | frames.Reply)
        running = self._running.pop(frame.id, None) if over else self._running.get(frame.id)
        if running:
            running.shown = running.shown or isinstance(frame, frames.Delta)
            running.inbox.put_nowait(frame)

    def fail(self, outcome: Exception | Callable[[Running], Exception]) -> None:
        """End every request of a worker that is gone, each with its own outcome if these differ."""
        doomed, self._running = self._running, {}
        for running in doomed.values():
            running.inbox.put_nowait(
                outcome if isinstance(outcome, Exception) else outcome(running)
            )

    def abort(self, error: LocalspecError) -> None:
        """Fail them while the worker lives: they stay, so that each is cancelled there."""
        for running in self._running.values():
            running.inbox.put_nowait(error)

    async def quiet(self) -> None:
        """Wait until nothing runs any more, or somebody calls `wake`."""
        quiet = asyncio.get_running_loop().create_future()
        self._until_quiet.append(quiet)
        try:
            await quiet
        finally:
            self._until_quiet.remove(quiet)

    def wake(self) -> None:
        """Let those who wait for quiet look again."""
        for quiet in self._until_quiet:
            if not quiet.done():
                quiet.set_result(None)
