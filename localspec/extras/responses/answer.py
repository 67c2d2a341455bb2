"""Format a response: build its items as they arrive with the events of each step, streamed or whole."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, structs

from localspec.chat.tools import custom_input
from localspec.daemon.completion.answer import Choice, PendingAnswer, Shape, format_logprob
from localspec.daemon.http.sse import NamedEvent
from localspec.daemon.worker.process import Event
from localspec.errors import (
    Cancelled,
    InvalidRequest,
    LocalspecError,
    Unavailable,
    recognizable_message,
    stream_message,
)
from localspec.extras.responses import wire
from localspec.extras.responses.request import (
    ENCRYPTED_REASONING,
    ToolKind,
    ToolSet,
    encode_reasoning,
    requested_summary,
)
from localspec.extras.responses.wire import (
    CustomCall,
    FunctionCall,
    Incomplete,
    InputDetails,
    Message,
    OutputDetails,
    OutputItem,
    OutputText,
    OutputTokenLogprob,
    Reasoning,
    ReasoningText,
    ResponseError,
    ResponseExtra,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
    SummaryText,
)
from localspec.protocol import frames
from localspec.protocol.answers import PromptProgress, ToolCall
from localspec.protocol.pieces import Arguments, Call, Piece, Text, content_of


@dataclass(frozen=True, slots=True)
class ItemStyle:
    """How items are written: with ids that end in `key`, and reasoning as a `summary` or as text.

    `opaque` adds an encoded copy of the reasoning that clients send back.
    """

    key: str
    tools: ToolSet
    summary: bool = False
    opaque: bool = False


def item_style(request: ResponsesRequest, tools: ToolSet, key: str) -> ItemStyle:
    """Return how the items of the answer are written."""
    opaque = ENCRYPTED_REASONING in (request.include or [])
    return ItemStyle(key, tools, bool(requested_summary(request)), opaque)


class _OpenItem(ABC):
    """An item that is being written, at position `index` of the output."""

    def __init__(self, style: ItemStyle, index: int) -> None:
        self.style = style
        self.index = index
        self.text = ""

    @property
    def at(self) -> dict[str, Any]:
        return {"item_id": self.item("in_progress").id, "output_index": self.index}

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item as far as it is written; while it is in progress it has no content."""

    def begin(self) -> Iterator[wire.Event]:
        yield wire.ItemAdded(output_index=self.index, item=self.item("in_progress"))

    @abstractmethod
    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]: ...

    def end(self, status: Status) -> Iterator[wire.Event]:
        yield wire.ItemDone(output_index=self.index, item=self.item(status))


class _OpenMessage(_OpenItem):
    def __init__(self, style: ItemStyle, index: int) -> None:
        super().__init__(style, index)
        self.logprobs: list[OutputTokenLogprob] = []

    def item(self, status: Status) -> Message:
        parts = [] if status == "in_progress" else [OutputText(self.text, [], self.logprobs)]
        return Message(f"msg_{self.style.key}", "assistant", [*parts], status)

    def begin(self) -> Iterator[wire.Event]:
        yield from super().begin()
        yield wire.PartAdded(part=OutputText(""), **self.at)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        self.logprobs += logprobs
        yield wire.OutputTextDelta(delta=text, logprobs=logprobs, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        yield wire.TextDone(text=self.text, logprobs=self.logprobs, **self.at)
        yield wire.PartDone(part=OutputText(self.text, [], self.logprobs), **self.at)
        yield from super().end(status)


# The part that reasoning consists of, and the events of its beginning, its text and its end.
_REASONING = (ReasoningText, wire.PartAdded, wire.ReasoningDelta, wire.ReasoningDone, wire.PartDone)
_SUMMARY = (
    *(SummaryText, wire.SummaryAdded, wire.SummaryDelta, wire.SummaryDone, wire.SummaryPartDone),
)


class _OpenReasoning(_OpenItem):
    def __init__(self, style: ItemStyle, index: int) -> None:
        super().__init__(style, index)
        self.part: Any
        kinds: tuple[Any, ...] = _SUMMARY if style.summary else _REASONING
        self.part, self.added, self.delta, self.done, self.part_done = kinds

    def item(self, status: Status) -> Reasoning:
        item = Reasoning(f"rs_{self.style.key}", [], status=status)
        if self.style.opaque:
            item.encrypted_content = encode_reasoning(self.text)
        if status != "in_progress":
            setattr(item, "summary" if self.style.summary else "content", [self.part(self.text)])
        return item

    def begin(self) -> Iterator[wire.Event]:
        yield from super().begin()
        yield self.added(part=self.part(""), **self.at)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        yield self.delta(delta=text, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        yield self.done(text=self.text, **self.at)
        yield self.part_done(part=self.part(self.text), **self.at)
        yield from super().end(status)


class _OpenCall(_OpenItem):
    def __init__(self, style: ItemStyle, index: int, call: Call) -> None:
        super().__init__(style, index)
        self.call = call
        self.kind: ToolKind = style.tools.kind(call.name)

    def item(self, status: Status) -> OutputItem:
        key, namespace = f"{self.style.key}_{self.call.index}", self.kind.namespace or UNSET
        if self.kind.custom:
            text = custom_input(self.text)
            return CustomCall(f"ctc_{key}", self.call.id, self.kind.name, text, status, namespace)
        return FunctionCall(f"fc_{key}", self.call.id, self.kind.name, self.text, status, namespace)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        if not self.kind.custom:  # text inside of JSON can only be decoded when it is complete
            yield wire.ArgumentsDelta(delta=text, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        if self.kind.custom:
            text = custom_input(self.text)
            yield wire.CustomToolInputDelta(delta=text, **self.at)
            yield wire.InputDone(input=text, **self.at)
        else:
            yield wire.ArgumentsDone(name=self.kind.name, arguments=self.text, **self.at)
        yield from super().end(status)


class _OpenClientCall(_OpenCall):
    """A call of a tool that OpenAI has defined, which is sent when its arguments are complete.

    If they do not have the shape of its item, it is sent as the call of a function.
    """

    def item(self, status: Status) -> OutputItem:
        assert self.kind.client_tool is not None
        key = f"{self.style.key}_{self.call.index}"
        item = self.kind.client_tool.build_item(key, self.call.id, self.text, status)
        return super().item(status) if item is None else item

    def begin(self) -> Iterator[wire.Event]:
        yield from ()

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        yield from ()

    def end(self, status: Status) -> Iterator[wire.Event]:
        item = self.item("in_progress")
        if isinstance(item, FunctionCall):
            text, self.text = self.text, ""
            yield from super().begin()
            yield from super().add(text, [])
            yield from super().end(status)
            return
        commands: list[str] = []
        if isinstance(item, wire.ShellCall):
            commands, item.action = item.action.commands, structs.replace(item.action, commands=[])
        yield wire.ItemAdded(output_index=self.index, item=item)
        for index, command in enumerate(commands):
            at: dict[str, Any] = {"output_index": self.index, "command_index": index}
            yield wire.CommandAdded(command="", **at)
            yield wire.CommandDelta(delta=command, **at)
            yield wire.CommandDone(command=command, **at)
        yield wire.ItemDone(output_index=self.index, item=self.item(status))


def build_items(
    style: ItemStyle,
    reasoning: str,
    content: str,
    calls: Sequence[ToolCall],
    *,
    cut: bool,
    logprobs: Sequence[OutputTokenLogprob] = (),
) -> list[OutputItem]:
    """Return the items of a whole answer; `logprobs` are those of its text."""
    output = Output(style)
    pieces: list[Piece] = [Text("reasoning", reasoning)] if reasoning else []
    pieces += [Text("content", content)] if content else []
    for index, call in enumerate(calls):
        pieces += [Call(call.id, call.function.name, index), Arguments(call.function.arguments)]
    for piece in pieces:
        # The generators have to run to their end, but their events are not needed.
        deque(output.take(piece, [*logprobs] if content_of(piece) else []), 0)
    deque(output.end(cut=cut), 0)
    return output.items


@dataclass(slots=True)
class Output:
    """The items so far; each method yields the events of what it does."""

    style: ItemStyle
    items: list[OutputItem] = field(default_factory=list)
    _open: _OpenItem | None = None

    def take(self, piece: Piece, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        """Add a piece of the answer."""
        if isinstance(piece, Call):
            is_defined = self.style.tools.kind(piece.name).client_tool is not None
            kind = _OpenClientCall if is_defined else _OpenCall
            yield from self._begin(kind(self.style, 0, piece))
            return
        if isinstance(piece, Text):
            text_kind = _OpenMessage if piece.kind == "content" else _OpenReasoning
            if type(self._open) is not text_kind:
                yield from self._begin(text_kind(self.style, 0))
        if self._open is not None:
            yield from self._open.add(piece.text, logprobs)

    def score(self, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        """Add log-probabilities of text that was sent already."""
        if logprobs and isinstance(self._open, _OpenMessage):
            yield from self._open.add("", logprobs)

    def end(self, *, cut: bool) -> Iterator[wire.Event]:
        """End the answer; `cut` means that its last item is not complete. One that is not cut has an item."""
        if not (self.items or self._open or cut):
            yield from self._begin(_OpenMessage(self.style, 0))
        yield from self._close("incomplete" if cut else "completed")

    def abandon(self) -> None:
        """Keep the item that is being written as incomplete, without the events of its end.

        Agents run a call as soon as its end comes, and repeat a text that has an end in their next request.
        """
        if self._open is not None:
            self.items.append(self._open.item("incomplete"))
            self._open = None

    def _begin(self, item: _OpenItem) -> Iterator[wire.Event]:
        yield from self._close("completed")
        item.index = len(self.items)
        self._open = item
        yield from item.begin()

    def _close(self, status: Status) -> Iterator[wire.Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item(status))
            self._open = None


class ResponsesShape(Shape):
    """Formats one response; `opening` is the response before anything of it is written."""

    def __init__(self, answer: PendingAnswer, opening: ResponseObject, style: ItemStyle) -> None:
        super().__init__(answer)
        self.response = opening
        self._output = Output(style)
        self._sent = 0  # number of events
        self._sent_logprobs = 0  # number of the content's tokens

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        if isinstance(event, frames.Started):
            return self._begin()
        new_events: list[wire.Event] = []
        for piece in pieces:
            logprobs = self._new_logprobs() if content_of(piece) else []
            new_events += self._output.take(piece, logprobs)
        if new_events and isinstance(event, frames.Delta) and event.timings is not None:
            new_events[-1].timings = event.timings
        return self._number_events(new_events)

    def queued(self) -> Sequence[object]:
        """Return the first events of a response in the background."""
        kinds = (wire.Created, wire.Queued)
        return self._number_events([kind(response=self.response) for kind in kinds])

    def _begin(self) -> list[object]:
        self.response.status = "in_progress"
        opening: list[wire.Event] = [] if self._sent else [wire.Created(response=self.response)]
        return self._number_events([*opening, wire.InProgress(response=self.response)])

    def pings(self) -> Sequence[object]:
        """Return an event that may come more than once: agents do not count a comment as life.

        Clients expect that the first event of a stream is `response.created`, so it comes before.
        """
        return self._begin()

    def _new_logprobs(self) -> list[OutputTokenLogprob]:
        """Return the log-probabilities of text that were not sent yet."""
        tokens = self.answer.choices[0].content_logprobs[self._sent_logprobs :]
        self._sent_logprobs += len(tokens)
        return [format_logprob(token, OutputTokenLogprob) for token in tokens]

    def reading(self, index: int, progress: PromptProgress) -> object:
        event = wire.InProgress(response=self.response, prompt_progress=progress)
        if self.answer.wants_timings:
            event.timings = self.answer.choices[index].timings
        return self._number_events([event])[0]

    def end(self) -> Sequence[object]:
        choice = self.answer.choices[0]
        new_events = [*self._output.score(self._new_logprobs())]
        new_events += self._output.end(cut=choice.finish_reason == "length")
        self._end(choice)
        return self._number_events([*new_events, self._last_event()])

    def _last_event(self) -> wire.Event:
        kind = wire.Completed if self.response.status == "completed" else wire.Incompleted
        return kind(response=self.response, timings=self.response.timings)

    @classmethod
    def failed_early(cls, error: LocalspecError) -> Sequence[object]:
        return [NamedEvent("error", _error_event(error))]

    def failed(self, error: LocalspecError) -> Sequence[object]:
        """Return the last events of a response that failed; its items so far are kept."""
        choice = self.answer.choices[0]
        if isinstance(error, Cancelled):
            new_events = [*self._output.end(cut=choice.done is None)]
            self._end(choice)
            return self._number_events([*new_events, self._last_event()])
        self._output.abandon()
        self._end(choice)
        self.response.status, self.response.error = "failed", _response_error(error)
        return self._number_events([_error_event(error), wire.Failed(response=self.response)])

    def complete(self) -> ResponseObject:
        choice = self.answer.choices[0]
        self._output.items = build_items(
            self._output.style,
            choice.reasoning,
            choice.content,
            choice.calls,
            cut=choice.finish_reason == "length",
            logprobs=self._new_logprobs(),
        )
        self._end(choice)
        return self.response

    def _end(self, choice: Choice) -> None:
        self.response = self.ended(choice)
        self.response.output = list(self._output.items)
        done = [choice.done] if choice.done else []
        self.response.localspec = self.answer.extension(ResponseExtra, done)

    def now(self, status: Status | None = None) -> ResponseObject:
        """Return the response as far as it is written, with the items that are complete."""
        status = status or self.response.status
        return structs.replace(self.response, status=status, output=list(self._output.items))

    def ended(self, choice: Choice) -> ResponseObject:
        """Return the response as `choice` ended, without its items and without one-time notices."""
        done = choice.done
        status: Status = "completed"
        if done is None or done.finish_reason == "cancelled":
            status = "failed" if choice.error else "cancelled"
        elif choice.finish_reason == "length":
            status = "incomplete"
        ended = structs.replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=_response_error(choice.error) if choice.error else None,
            incomplete_details=Incomplete("max_output_tokens") if status == "incomplete" else None,
            usage=self._usage(choice),
        )
        if done is not None:
            ended.timings = done.timings
        return ended

    def stored_body(self, choice: Choice) -> str:
        """Return the JSON of the response without its items, which the messages of its conversation hold.

        Before its end, it is what the response is if the daemon is killed.
        """
        ended = structs.replace(self.ended(choice), output=[])
        if not choice.is_finished:
            ended.status = "failed"
            message = "The daemon ended before this response did."
            ended.error = ResponseError("server_error", message)
        return msgspec.json.encode(ended).decode()

    def _usage(self, choice: Choice) -> ResponseUsage | None:
        if choice.done is None:
            return None
        usage = self.answer.usage()
        read, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        details = InputDetails(cached, read - cached), OutputDetails(choice.reasoning_tokens)
        return ResponseUsage(
            read, details[0], usage.completion_tokens, details[1], usage.total_tokens
        )

    def _number_events(self, new_events: Iterable[wire.Event]) -> list[object]:
        """Assign numbers to the events, and name each by its type."""
        named: list[object] = []
        for event in new_events:
            event.sequence_number = self._sent
            self._sent += 1
            named.append(NamedEvent(str(event.__struct_config__.tag), event))
        return named


def _error_event(error: LocalspecError) -> wire.ErrorEvent:
    return wire.ErrorEvent(code=error.code, message=stream_message(error), param=error.param)


def _response_error(error: LocalspecError) -> ResponseError:
    """Return an error with the nearest of the codes that OpenAI has published."""
    code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
    code = "rate_limit_exceeded" if isinstance(error, Unavailable) else code
    return ResponseError(code, recognizable_message(error), error.code)
