"""Answer responses in the background, while clients come and go."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import AnswerRun
from localspec.daemon.http.recordings import KEPT_S, Key, Recording, Recordings, replay
from localspec.daemon.http.requests import json_response
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.worker.queue import Job
from localspec.errors import InvalidRequest
from localspec.extras.responses.answer import ResponsesShape
from localspec.protocol.requests import PING_INTERVAL_S

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRun(AnswerRun):
    """A response that goes on when its client leaves. Its events are recorded, streamed or not.

    `expand` completes the requests with the files of the input, which may take a while or fail.
    """

    recordings: Recordings
    response: ResponsesShape
    expand: Callable[[], Awaitable[None]] | None = None

    async def respond(self, request: Request, stream: bool) -> Response:
        """Return the events of the response, or the response that has just been queued."""
        recording = self._start()
        if stream:
            return replay(recording, ping_s=self.ping_s)
        await anext(recording.follow())  # from then on it can be read and cancelled by its id
        return json_response(self.response.now())

    async def stream(self, emit: Emit) -> None:
        """Emit the events of the response, which needs nobody to do so."""
        async for data in self._start().follow():
            await emit(data)

    def _start(self) -> Recording:
        """Begin to answer.

        Raises:
            QueueFull, Unavailable: there is no room for another request.
        """
        self.supervisor.check_room(self.pair, self.requests[0])
        stream = EventStream(partial(AnswerRun.stream, self), done=False, failed=self.shape.failed)
        recording = self.recordings.start(recording_key(self.response.response.id), stream)
        recording.conversation = self.requests[0].conversation
        return recording

    async def _follow(self, index: int, emit: Emit | None, job: Job) -> None:
        if self.expand is not None:
            await self.expand()
            job = Job.of(self.requests[index])
        await AnswerRun._follow(self, index, emit, job)


def recording_key(name: str) -> Key:
    """Return the key under which the events of a response are recorded."""
    return "response", name


def resume(recordings: Recordings, name: str, starting_after: str | None) -> Response:
    """Return the events of a response after the one with this number, as far as they are kept.

    Raises:
        InvalidRequest: they are not kept, or there is no such event.
    """
    recording = recordings.get(recording_key(name))
    if recording is None:
        raise InvalidRequest(
            f"There are no events of the response {name}: they are kept of responses with 'background', for "
            f"{KEPT_S:.0f} s after their end. Retrieve it without 'stream'.",
            param="stream",
        )
    if starting_after is None:
        number = -1
    elif _NUMBER.fullmatch(starting_after):
        number = int(starting_after)
    else:
        raise InvalidRequest(
            "'starting_after' must be the sequence number of an event.", param="starting_after"
        )
    try:
        position = recording.position_after(number)
    except InvalidRequest as error:
        raise InvalidRequest(f"'starting_after': {error.message}", param="starting_after") from None
    return replay(recording, position, ping_s=PING_INTERVAL_S)
