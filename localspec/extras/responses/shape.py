"""Format a response, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import structs

from localspec.chat.parser import Piece, Text
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
from localspec.extras.responses.output import ItemStyle, Output, build_items
from localspec.extras.responses.wire import (
    Incomplete,
    InputDetails,
    OutputDetails,
    OutputTokenLogprob,
    ResponseError,
    ResponseExtra,
    ResponseObject,
    ResponseUsage,
    Status,
)
from localspec.protocol import frames
from localspec.protocol.answers import PromptProgress


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
            is_content = isinstance(piece, Text) and piece.kind == "content"
            new_events += self._output.take(piece, self._new_logprobs() if is_content else [])
        if new_events and isinstance(event, frames.Delta) and event.timings is not None:
            new_events[-1].timings = event.timings
        return self._number_events(new_events)

    def queued(self) -> Sequence[object]:
        """Return the first events of a response in the background."""
        response = self.response
        return self._number_events(
            [wire.Created(response=response), wire.Queued(response=response)]
        )

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
            ended.error = ResponseError(
                "server_error", "The daemon ended before this response did."
            )
        return msgspec.json.encode(ended).decode()

    def _usage(self, choice: Choice) -> ResponseUsage | None:
        if choice.done is None:
            return None
        usage = self.answer.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(cached, usage.prompt_tokens - cached),
            usage.completion_tokens,
            OutputDetails(choice.reasoning_tokens),
            usage.total_tokens,
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
    return ResponseError(_published_code(error), recognizable_message(error), error.code)


def _published_code(error: LocalspecError) -> str:
    """Return the nearest of the error codes that OpenAI has published."""
    if isinstance(error, Unavailable):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
