"""Format for Anthropic's clients: answers as content blocks, streamed or whole, errors, and models."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.types import Scope

from localspec.chat.notations.call_readers import replace_halves
from localspec.daemon.completion.answer import Choice, PendingAnswer, Shape
from localspec.daemon.http.sse import NamedEvent
from localspec.daemon.worker.process import Event
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    ThreadMismatch,
    ThreadNotFound,
    ThreadUnsupported,
    stream_message,
)
from localspec.extras.anthropic.request import CALL_ID_PREFIX
from localspec.extras.anthropic.wire import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    InputJsonDelta,
    MessageDelta,
    MessagesAnswer,
    MessagesError,
    MessagesErrorDetail,
    MessagesEvent,
    MessagesExtra,
    MessagesModel,
    MessagesModelPage,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    SignatureDelta,
    Stopped,
    StopReason,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from localspec.protocol import frames
from localspec.protocol.answers import Model
from localspec.protocol.pieces import Arguments, Call, Piece, Text

# Anthropic's types of errors by status. Other statuses get a general type for 4xx or 5xx.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: LocalspecError) -> MessagesError:
    """Return an error in Anthropic's shape, and where clients compare messages, in Anthropic's words."""
    default_type = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    message = error.message
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        # agents shorten their conversation when they find this sentence
        message = (
            f"prompt is too long: {error.n_prompt_tokens} tokens > {error.n_ctx} maximum. {message}"
        )
    elif error.code == ContextExceeded.code:
        message = f"prompt is too long. {message}"
    # Claude Code repeats a request with an `overloaded_error`, whatever else a response says.
    kind = default_type if error.permanent else _TYPES.get(error.status, default_type)
    detail = MessagesErrorDetail(kind, message, error.code, error.param)
    if isinstance(error, ThreadUnsupported):
        detail.details = {"error_code": error.code, "unsupported": ["thread"]}
    elif isinstance(error, ThreadNotFound | ThreadMismatch):
        detail.details = {"error_code": error.code}
    return MessagesError(detail, new_request_id())


def stream_error(error: LocalspecError) -> MessagesError:
    """Return an error in Anthropic's shape for a stream that has begun."""
    body = messages_error(error)
    if error.status >= 500:
        body.error.message = stream_message(error)
    return body


def new_request_id() -> str:
    """Return a new id for a request, which every response of Anthropic's has in its head."""
    return f"req_{secrets.token_hex(12)}"


def applies(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's clients, whatever path they use."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def shape(error: LocalspecError) -> tuple[object, dict[str, str]]:
    """Return an error as the body of a response, and its headers."""
    body = messages_error(error)
    return body, {"request-id": body.request_id}


# Clients drop thinking blocks without a signature, and the model needs its own reasoning again.
SIGNATURE = "localspec"
MAX_MODELS = 1000  # of one page


class MessagesShape(Shape):
    """Formats one answer; with `hidden` its thinking blocks are empty."""

    def __init__(self, answer: PendingAnswer, *, hidden: bool = False) -> None:
        super().__init__(answer)
        self._hidden = hidden
        self.id = f"msg_{secrets.token_hex(12)}"
        self._open: type[Block] | None = None  # the block that is being written
        self._index = -1  # its index, or the index of the block before

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started():
                return [_as_named(MessageStart(self._message()))]
            case frames.Done():
                end = MessageDelta(self._stop_delta(), self._usage(), self._extra(event))
                return [*map(_as_named, [*self._piece_events(pieces), *self._close_block(), end])]
            case _:
                return [*map(_as_named, self._piece_events(pieces))]

    def end(self) -> Sequence[object]:
        return [_as_named(MessageStop())]

    @classmethod
    def failed_early(cls, error: LocalspecError) -> Sequence[object]:
        return [NamedEvent("error", stream_error(error))]

    @classmethod
    def pings_early(cls) -> Sequence[object]:
        """Return what Anthropic's own stream has in a long silence."""
        return [_as_named(Ping())]

    def _piece_events(self, pieces: Sequence[Piece]) -> list[MessagesEvent]:
        stream_events: list[MessagesEvent] = []
        for piece in pieces:
            match piece:
                case Text("content"):
                    stream_events += self._open_block(TextBlock(""))
                    stream_events.append(self._delta(TextBlockDelta(piece.text)))
                case Text():
                    stream_events += self._open_block(ThinkingBlock("", ""))
                    if not self._hidden:
                        stream_events.append(self._delta(ThinkingDelta(piece.text)))
                case Call():
                    stream_events += self._close_block()
                    block = ToolUseBlock(CALL_ID_PREFIX + piece.id, piece.name, {})
                    stream_events += self._open_block(block)
                case Arguments():
                    stream_events.append(self._delta(InputJsonDelta(piece.text)))
        return stream_events

    def _open_block(self, block: Block) -> list[MessagesEvent]:
        if self._open is type(block):
            return []
        stream_events = self._close_block()
        self._open = type(block)
        self._index += 1
        stream_events.append(BlockStart(self._index, block))
        return [*stream_events, Ping()] if self._index == 0 else stream_events

    def _close_block(self) -> list[MessagesEvent]:
        block_type, self._open = self._open, None
        if block_type is None:
            return []
        signature = [self._delta(SignatureDelta(SIGNATURE))] if block_type is ThinkingBlock else []
        return [*signature, BlockStop(self._index)]

    def _delta(self, delta: Delta) -> BlockDelta:
        return BlockDelta(self._index, delta)

    def complete(self) -> MessagesAnswer:
        choice, message, stop = self._choice, self._message(), self._stop_delta()
        if choice.reasoning:
            thoughts = "" if self._hidden else choice.reasoning
            message.content.append(ThinkingBlock(thoughts, SIGNATURE))
        if choice.content:
            message.content.append(TextBlock(choice.content))
        for call in choice.calls:
            name, arguments = call.function.name, call_input(call.function.arguments)
            message.content.append(ToolUseBlock(CALL_ID_PREFIX + call.id, name, arguments))
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        message.localspec = self._extra(choice.done)
        return message

    @property
    def _choice(self) -> Choice:
        return self.answer.choices[0]

    def _message(self) -> MessagesAnswer:
        ignored = [*self.answer.notes.ignored()]
        extra = MessagesExtra(ignored) if ignored else UNSET
        return MessagesAnswer(self.id, [], self.answer.model, self._usage(), localspec=extra)

    def _usage(self) -> MessagesUsage:
        done, cached = self._choice.done, self._choice.cached_tokens
        output_tokens = done.completion_tokens if done else 0
        return MessagesUsage(self._choice.prompt_tokens - cached, cached, output_tokens)

    def _stop_delta(self) -> Stopped:
        done, reason = self._choice.done, self._choice.finish_reason
        assert done is not None
        stop: StopReason = "tool_use" if reason == "tool_calls" else "end_turn"
        if reason == "length":
            stop = "model_context_window_exceeded" if done.truncated else "max_tokens"
        elif reason != "tool_calls" and done.stop_string is not None:
            stop = "stop_sequence"
        return Stopped(stop, done.stop_string)

    def _extra(self, done: frames.Done | None) -> MessagesExtra:
        return self.answer.extension(MessagesExtra, [done] if done else [])


def as_model(model: Model) -> MessagesModel:
    """Return a model in Anthropic's shape. An answer may be as long as the context."""
    created = f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%dT%H:%M:%SZ}"
    context = model.context_length if isinstance(model.context_length, int) else None
    return MessagesModel(model.id, model.id, created, context, context)


def model_page(models: Sequence[Model], query: Mapping[str, str]) -> MessagesModelPage:
    """Return the page of models that a query asks for with `limit`, `after_id` and `before_id`."""
    limit = query.get("limit", str(MAX_MODELS))
    if not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MAX_MODELS):
        raise InvalidRequest.at("limit", f"must be a whole number from 1 to {MAX_MODELS}.")
    data, size, is_before = [as_model(model) for model in models], int(limit), False
    for name in ("after_id", "before_id"):
        if (cursor := query.get(name)) is None:
            continue
        index = next((n for n, model in enumerate(data) if model.id == cursor), None)
        if index is None:
            raise InvalidRequest.at(name, f": there is no model '{cursor[:80]}'.")
        is_before = name == "before_id"
        data = data[:index] if is_before else data[index + 1 :]
    page = data[-size:] if is_before else data[:size]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return MessagesModelPage(page, first, last, has_more=len(data) > len(page))


def call_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, which is empty if they were cut off and are not JSON."""
    try:
        value = msgspec.json.decode(replace_halves(arguments))
    except (msgspec.DecodeError, RecursionError):
        value = None
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _as_named(event: MessagesEvent) -> NamedEvent:
    return NamedEvent(str(event.__struct_config__.tag), event)
