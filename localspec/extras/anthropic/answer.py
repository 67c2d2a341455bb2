"""Format an answer for Anthropic's clients: content blocks in order, streamed or whole, and models."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import UNSET

from localspec.chat.notations.call_readers import replace_halves
from localspec.daemon.completion.answer import Choice, PendingAnswer, Shape
from localspec.daemon.http.sse import NamedEvent
from localspec.daemon.worker.process import Event
from localspec.errors import InvalidRequest, LocalspecError
from localspec.extras.anthropic.errors import stream_error
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

    # ------------------------------------------------------------------------ streamed

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started():
                return [_as_named(MessageStart(self._message()))]
            case frames.Done():
                stream_events = [*self._piece_events(pieces), *self._close_block()]
                stream_events.append(
                    MessageDelta(self._stop_delta(), self._usage(), self._extra(event))
                )
                return [*map(_as_named, stream_events)]
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
        """Return the events of some pieces; each block is opened before its first piece."""
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
                    stream_events += self._open_block(
                        ToolUseBlock(CALL_ID_PREFIX + piece.id, piece.name, {})
                    )
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

    # ------------------------------------------------------------------------ whole

    def complete(self) -> MessagesAnswer:
        message = self._message()
        stop = self._stop_delta()
        message.content = self._blocks()
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        message.localspec = self._extra(self._choice.done)
        return message

    @property
    def _choice(self) -> Choice:
        return self.answer.choices[0]

    def _message(self) -> MessagesAnswer:
        ignored = [*self.answer.notes.ignored()]
        extra = MessagesExtra(ignored) if ignored else UNSET
        return MessagesAnswer(self.id, [], self.answer.model, self._usage(), localspec=extra)

    def _blocks(self) -> list[Block]:
        choice = self._choice
        blocks: list[Block] = []
        if choice.reasoning:
            blocks.append(ThinkingBlock("" if self._hidden else choice.reasoning, SIGNATURE))
        if choice.content:
            blocks.append(TextBlock(choice.content))
        for call in choice.calls:
            function = call.function
            blocks.append(
                ToolUseBlock(
                    CALL_ID_PREFIX + call.id, function.name, call_input(function.arguments)
                )
            )
        return blocks

    def _usage(self) -> MessagesUsage:
        choice = self._choice
        output_tokens = choice.done.completion_tokens if choice.done else 0
        cached = choice.cached_tokens
        return MessagesUsage(choice.prompt_tokens - cached, cached, output_tokens)

    def _stop_delta(self) -> Stopped:
        done = self._choice.done
        assert done is not None
        return Stopped(_reason(self._choice, done), done.stop_string)

    def _extra(self, done: frames.Done | None) -> MessagesExtra:
        return self.answer.extension(MessagesExtra, [done] if done else [])


def _reason(choice: Choice, done: frames.Done) -> StopReason:
    match choice.finish_reason:
        case "length":
            return "model_context_window_exceeded" if done.truncated else "max_tokens"
        case "tool_calls":
            return "tool_use"
        case _:
            return "stop_sequence" if done.stop_string is not None else "end_turn"


def as_model(model: Model) -> MessagesModel:
    """Return a model in Anthropic's shape. An answer may be as long as the context."""
    created = f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%dT%H:%M:%SZ}"
    context = model.context_length if isinstance(model.context_length, int) else None
    return MessagesModel(model.id, model.id, created, context, context)


def model_page(models: Sequence[Model], query: Mapping[str, str]) -> MessagesModelPage:
    """Return the page of models that a query asks for with `limit`, `after_id` and `before_id`.

    Raises:
        InvalidRequest: `limit` is no number from 1 to 1000, or there is no model of an id.
    """
    limit = query.get("limit", str(MAX_MODELS))
    if not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MAX_MODELS):
        message = f"'limit' must be a whole number from 1 to {MAX_MODELS}."
        raise InvalidRequest(message, param="limit")
    data, size, is_before = [as_model(model) for model in models], int(limit), False
    for name in ("after_id", "before_id"):
        if (cursor := query.get(name)) is None:
            continue
        index = next((n for n, model in enumerate(data) if model.id == cursor), None)
        if index is None:
            raise InvalidRequest(f"'{name}': there is no model '{cursor[:80]}'.", param=name)
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
