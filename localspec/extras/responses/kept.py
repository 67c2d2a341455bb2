"""Read stored responses by the ids of their items, and responses that are under way."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import AnswerRun
from localspec.daemon.http.recordings import KEPT_S, Key, Recording, Recordings, replay
from localspec.daemon.http.requests import json_response
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.worker.queue import Job
from localspec.errors import Cancelled, InvalidRequest
from localspec.extras.responses.answer import ItemStyle, ResponsesShape, build_items
from localspec.extras.responses.request import ToolSet, translate_tools
from localspec.extras.responses.wire import (
    AnyItem,
    FunctionOutput,
    InputText,
    Message,
    OutputItem,
    ResponseObject,
)
from localspec.protocol.answers import ToolCall
from localspec.protocol.conversations import StoredMessage
from localspec.protocol.requests import PING_INTERVAL_S, ChatMessage

# The length of a response's id after its prefix. The id of a conversation is shorter.
_RESPONSE_KEY_CHARS = 24
_ITEM_ID = re.compile(
    r"(?P<kind>msg|rs|fc|ctc|sh|lsh|apc|cu|tsc|fco)_(?P<key>[0-9a-f]+?)(?:at(?P<at>\d+))?(?:_(?P<n>\d+))?"
)


def load_response(body: str, answer: StoredMessage, *, opaque: bool) -> ResponseObject:
    """Return a stored response with the items of its answer; `opaque` is as in `ItemStyle`."""
    stored = msgspec.json.decode(body, type=ResponseObject)
    summary = bool(stored.reasoning.get("summary"))
    key, tools = stored.id.removeprefix("resp_"), translate_tools(stored.tools, None)
    style = ItemStyle(key, tools, summary, opaque)
    stored.output = _answer_items(answer, style, cut=stored.status != "completed")
    return stored


def _answer_items(
    message: StoredMessage, style: ItemStyle, *, cut: bool = False
) -> list[OutputItem]:
    calls = msgspec.convert(message.tool_calls or [], list[ToolCall])
    return build_items(style, message.reasoning_content or "", message.content, calls, cut=cut)


def items(
    conversation: str, messages: Sequence[StoredMessage], ids: Mapping[int, str]
) -> list[AnyItem]:
    """Return the items of messages; `ids` maps the index of each answer to the id of its response."""
    all_items: list[AnyItem] = []
    for index, message in enumerate(messages):
        key = f"{conversation}at{index}"
        if message.role == "assistant":
            key = ids[index].removeprefix("resp_") if index in ids else key
            all_items += _answer_items(message, ItemStyle(key, ToolSet()))
        elif message.role == "tool":
            call_id = message.tool_call_id or ""
            all_items.append(FunctionOutput(f"fco_{key}", call_id, message.content))
        else:
            all_items.append(Message(f"msg_{key}", message.role, [InputText(message.content)]))
    return all_items


class ItemReference:
    """The meaning of an item's id: the answer of a response, or a message of a conversation.

    Raises:
        ValueError: the id does not have localspec's format.
    """

    def __init__(self, name: str) -> None:
        match = _ITEM_ID.fullmatch(name)
        if match is None or (match["at"] is None and len(match["key"]) != _RESPONSE_KEY_CHARS):
            raise ValueError(name)
        self._kind, self._call = match["kind"], int(match["n"] or 0)
        self.conversation = match["key"] if match["at"] else ""
        self.index = int(match["at"] or -1)
        self.response = "" if match["at"] else f"resp_{match['key']}"

    def select_part(self, message: ChatMessage) -> ChatMessage:
        """Return the part of the message that the id means. Raises ValueError if there is none."""
        if message.role != "assistant":
            return message
        part: dict[str, Any] = {"role": "assistant"}
        match self._kind:
            case "msg":
                part["content"] = message.content
            case "rs":
                part["reasoning_content"] = message.reasoning_content
            case _:
                part["tool_calls"] = (message.tool_calls or [])[self._call : self._call + 1]
        if not any(part[field] for field in part if field != "role"):
            raise ValueError(self._kind)
        return ChatMessage(**part)


class RunningResponses:
    """The responses under way in one daemon, which can be read and cancelled by their ids."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[ResponsesShape, asyncio.Timeout, asyncio.Event]] = {}

    @contextlib.asynccontextmanager
    async def under_way(self, shape: ResponsesShape) -> AsyncIterator[None]:
        """Mark a response as under way until it has ended. Raises Cancelled if `cancel` was called for it."""
        name, timeout, finished = shape.response.id, asyncio.timeout(None), asyncio.Event()
        self._under_way[name] = shape, timeout, finished
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise Cancelled(f"The response {name} was cancelled.") from None
        finally:
            del self._under_way[name]
            finished.set()

    def get(self, name: str) -> ResponseObject | None:
        """Return a response as far as it is written; None if it is not under way."""
        entry = self._under_way.get(name)
        return entry[0].now() if entry else None

    async def cancel(self, name: str) -> ResponseObject | None:
        """End a response and return what is written of it; None if it is not under way, or ended itself."""
        entry = self._under_way.get(name)
        if entry is None:
            return None
        shape, timeout, finished = entry
        if not timeout.expired():  # another caller may have ended it already, and wait as well
            timeout.reschedule(asyncio.get_running_loop().time())
        await finished.wait()
        ended = shape.ended(shape.answer.choices[0])
        return shape.now("cancelled") if ended.status == "cancelled" else None


_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRun(AnswerRun):
    """A response that goes on when its client leaves. Its events are recorded, streamed or not.

    `expand` completes the requests with the files of the input, which may take a while or fail.
    """

    recordings: Recordings
    response: ResponsesShape
    expand: Callable[[], Awaitable[None]] | None = None

    async def respond(self, request: Request) -> Response:
        """Return the response that has just been queued."""
        recording = self._start()
        await anext(recording.follow())  # from then on it can be read and cancelled by its id
        return json_response(self.response.now())

    async def stream(self, emit: Emit) -> None:
        """Emit the events of the response, which needs nobody to do so."""
        async for data in self._start().follow():
            await emit(data)

    def _start(self) -> Recording:
        """Begin to answer. Raises QueueFull or Unavailable if there is no room for another request."""
        self.pairs.check_room(self.pair, self.requests[0])
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
    """Return the events of a response after the one with this number, as far as they are kept."""
    recording = recordings.get(recording_key(name))
    if recording is None:
        raise InvalidRequest(
            f"There are no events of the response {name}: they are kept of responses with 'background', for "
            f"{KEPT_S:.0f} s after their end. Retrieve it without 'stream'.",
            param="stream",
        )
    if starting_after is not None and not _NUMBER.fullmatch(starting_after):
        raise InvalidRequest.at("starting_after", "must be the sequence number of an event.")
    try:
        position = recording.position_after(int(starting_after or -1))
    except InvalidRequest as error:
        raise InvalidRequest.at("starting_after", f": {error.message}") from None
    return replay(recording, position, ping_s=PING_INTERVAL_S)
