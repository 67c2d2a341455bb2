"""Our answer as Anthropic's clients read it: content blocks in their order, streamed or whole, and models."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import UNSET

from localspec.daemon.completion.answer import Answer, Choice
from localspec.daemon.completion.anthropic.request import ID
from localspec.daemon.completion.reply.calls import Arguments, Call
from localspec.daemon.completion.reply.parser import Piece, Text
from localspec.daemon.http.errors import messages_error
from localspec.daemon.http.sse import Named
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.clients.anthropic import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    InputDelta,
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
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

SIGNATURE = "localspec"  # clients drop thoughts without one, and the model is to have its own again


class MessagesShape:
    """One answer. `hidden`: its thoughts are not shown, only that there were some."""

    def __init__(
        self,
        answer: Answer,
        *,
        ignored: list[str],
        note: Callable[[], str | None],
        news: Callable[[], str],
        hidden: bool = False,
        not_kept: Callable[[], str] = str,
    ) -> None:
        """`ignored`: what of the request changed nothing; `note`, `news` and `not_kept` as in OpenAIShape."""
        self.answer = answer
        self._ignored = ignored
        self._note = note
        self._news = news
        self._hidden = hidden
        self._not_kept = not_kept
        self.id = f"msg_{secrets.token_hex(12)}"
        self._open: type[Block] | None = None  # the block that is being written
        self._index = -1  # its number, or the last one's

    # ------------------------------------------------------------------------ streamed

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started():
                return [_named(MessageStart(self._message()))]
            case frames.Done():
                found = [*self._written(pieces), *self._closed()]
                found.append(MessageDelta(self._stopped(), self._usage(), self._extra(event)))
                return [*map(_named, found)]
            case _:
                return [*map(_named, self._written(pieces))]

    def end(self) -> Sequence[object]:
        return [_named(MessageStop())]

    def failed(self, error: LocalspecError) -> Sequence[object]:
        return [Named("error", messages_error(error))]

    def _written(self, pieces: Sequence[Piece]) -> list[MessagesEvent]:
        """The events of what was written, each block opened before its first piece."""
        found: list[MessagesEvent] = []
        for piece in pieces:
            match piece:
                case Text("content"):
                    found += self._in_block(TextBlock(""))
                    found.append(self._delta(TextDelta(piece.text)))
                case Text():
                    found += self._in_block(ThinkingBlock("", ""))
                    if not self._hidden:
                        found.append(self._delta(ThinkingDelta(piece.text)))
                case Call():
                    found += self._closed()
                    found += self._in_block(ToolUseBlock(ID + piece.id, piece.name, {}))
                case Arguments():
                    found.append(self._delta(InputDelta(piece.text)))
        return found

    def _in_block(self, block: Block) -> list[MessagesEvent]:
        if self._open is type(block):
            return []
        found = self._closed()
        self._open = type(block)
        self._index += 1
        found.append(BlockStart(self._index, block))
        return [*found, Ping()] if self._index == 0 else found

    def _closed(self) -> list[MessagesEvent]:
        was, self._open = self._open, None
        if was is None:
            return []
        signed = [self._delta(SignatureDelta(SIGNATURE))] if was is ThinkingBlock else []
        return [*signed, BlockStop(self._index)]

    def _delta(self, delta: Delta) -> BlockDelta:
        return BlockDelta(self._index, delta)

    # ------------------------------------------------------------------------ whole

    def whole(self) -> MessagesAnswer:
        found = self._message()
        stopped = self._stopped()
        found.content = self._blocks()
        found.stop_reason, found.stop_sequence = stopped.stop_reason, stopped.stop_sequence
        found.localspec = self._extra(self._choice.done)
        return found

    @property
    def _choice(self) -> Choice:
        return self.answer.choices[0]

    def _message(self) -> MessagesAnswer:
        told = MessagesExtra(self._ignored) if self._ignored else UNSET
        return MessagesAnswer(self.id, [], self.answer.model, self._usage(), localspec=told)

    def _blocks(self) -> list[Block]:
        choice = self._choice
        found: list[Block] = []
        if choice.reasoning:
            found.append(ThinkingBlock("" if self._hidden else choice.reasoning, SIGNATURE))
        if choice.content:
            found.append(TextBlock(choice.content))
        for call in choice.calls:
            function = call.function
            found.append(ToolUseBlock(ID + call.id, function.name, call_input(function.arguments)))
        return found

    def _usage(self) -> MessagesUsage:
        choice = self._choice
        written = choice.done.completion_tokens if choice.done else 0
        cached = choice.cached_tokens
        return MessagesUsage(choice.prompt_tokens - cached, cached, written)

    def _stopped(self) -> Stopped:
        done = self._choice.done
        assert done is not None
        return Stopped(_reason(self._choice, done), done.stop_string)

    def _extra(self, done: frames.Done | None) -> MessagesExtra:
        return MessagesExtra(
            self._ignored or UNSET,
            done.speculation if done else UNSET,
            self.answer.note(self._note()) or UNSET,
            self.answer.news(self._news()) or UNSET,
            self._not_kept() or UNSET,
        )


def _reason(choice: Choice, done: frames.Done) -> StopReason:
    match choice.finish:
        case "length":
            return "model_context_window_exceeded" if done.truncated else "max_tokens"
        case "tool_calls":
            return "tool_use"
        case _:
            return "stop_sequence" if done.stop_string is not None else "end_turn"


def models(created: Mapping[str, int]) -> MessagesModelPage:
    """The list of models, of names and the seconds since 1970 when each was made."""
    data = [
        MessagesModel(name, name, f"{datetime.fromtimestamp(when, UTC):%Y-%m-%dT%H:%M:%SZ}")
        for name, when in created.items()
    ]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessagesModelPage(data, first, last)


def call_input(arguments: str) -> dict[str, Any]:
    """Return a call's input, which is empty for a call that was cut off and is not JSON."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _named(event: MessagesEvent) -> Named:
    return Named(str(event.__struct_config__.tag), event)
