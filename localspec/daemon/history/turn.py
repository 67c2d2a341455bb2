"""A question and its answer on their way into a kept conversation."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from localspec.daemon.completion import request as translate
from localspec.daemon.completion.chat import ChatComposer, Said
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.conversations import StoredMessage
from localspec.protocol.http import ChatMessage, ChatRequest

if TYPE_CHECKING:
    from localspec.daemon.history.store import Conversations
    from localspec.daemon.worker.process import Event

NEW = "new"
_TITLE = 80  # characters of the first question


@dataclass
class Turn:
    """One question and its answer, as they happen. `kept` are the messages from before."""

    id: str
    model: str
    asked: list[ChatMessage]
    kept: list[ChatMessage] = field(default_factory=list)
    continues: bool = False  # a conversation that was there
    begun: bool = False  # the last message that was sent is the beginning of the answer
    began: float = field(default_factory=time.time)
    said: Said | None = None
    done: frames.Done | None = None
    failed: bool = False
    _answered: bool = False
    _stored: bool = False

    @property
    def messages(self) -> list[ChatMessage]:
        """What the model reads; a new system message takes the old one's place."""
        replaced = any(message.role == "system" for message in self.asked)
        kept = [each for each in self.kept if not (replaced and each.role == "system")]
        system = [each for each in (*kept, *self.asked) if each.role == "system"]
        return system + [each for each in (*kept, *self.asked) if each.role != "system"]

    @property
    def title(self) -> str:
        """The first line of the question."""
        text = next((_text(each) for each in reversed(self.asked) if each.role == "user"), "")
        line = next((line.strip() for line in text.splitlines() if line.strip()), "")
        return line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"

    async def recorded(
        self,
        events: AsyncGenerator[tuple[int, Event], None],
        composer: ChatComposer,
        store: Conversations,
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """`events` as they are; when they end, in whatever way, what the client got is stored."""
        self.said = composer.said[0]
        composer.when_done = lambda: self._store(store)  # it may ask again at once
        with store.answering(self.id):
            try:
                async with contextlib.aclosing(events):
                    async for index, event in events:
                        if index == 0:
                            self._note(event)
                        yield index, event
            except LocalspecError:
                self.failed = True
                raise
            finally:
                if self._answered:  # a request that was refused leaves nothing
                    self._store(store)

    def _note(self, event: Event) -> None:
        match event:
            case frames.Delta():
                self._answered = True
            case frames.Done():
                self._answered = True
                self.done = event

    def _store(self, store: Conversations) -> None:
        if not self._stored and self.said is not None:
            self._stored = True
            self.said.end()
            store.soon(lambda each: each.add(self))

    def to_store(self) -> tuple[list[StoredMessage], StoredMessage]:
        """What was asked, and the answer: with its beginning, where the client sent that."""
        asked, answer = [_stored(each, self.began) for each in self.asked], self._answer()
        if self.begun and asked:
            begun = asked.pop()
            answer.content = begun.content + answer.content
            thoughts = (begun.reasoning_content or "") + (answer.reasoning_content or "")
            answer.reasoning_content = thoughts or None
        return asked, answer

    def _answer(self) -> StoredMessage:
        assert self.said is not None
        message = StoredMessage(
            "assistant",
            self.said.content,
            time.time(),
            model=self.model,
            reasoning_content=self.said.reasoning or None,
            tool_calls=[msgspec.to_builtins(call) for call in self.said.calls] or None,
        )
        if self.done is None or self.done.finish_reason == "cancelled":
            message.finish = "failed" if self.failed else "interrupted"
            return message
        message.finish = self.done.finish_reason
        if message.finish == "stop" and message.tool_calls:
            message.finish = "tool_calls"
        message.tokens = self.done.completion_tokens
        message.tokens_per_second = self.done.timings.predicted_per_second
        message.drafted = self.done.speculation.drafted
        message.accepted = self.done.speculation.accepted
        message.speed_up = self.done.speculation.speed_up
        return message


async def begin(store: Conversations, request: ChatRequest, model: str) -> Turn | None:
    """The turn `request` asks for, None when it asks to keep nothing.

    `model` is the configured pair's name. `request.model` is filled in from a conversation that is
    continued, and `request.messages` with what was said before.

    Raises:
        NotFound: there is no such conversation.
        Conflict: the file cannot be read.
    """
    wanted = request.localspec and request.localspec.conversation
    if not wanted:
        return None
    asked = [_one_name(each) for each in request.messages]
    goes_on = bool(translate.continued(request))
    if wanted == NEW:
        return Turn(secrets.token_hex(4), request.model or model, asked, begun=goes_on)
    await store.settled(wanted)
    found = await store.run(lambda each: each.get(wanted))
    request.model = request.model or found.model
    kept = [_to_send(each) for each in found.messages]
    turn = Turn(found.id, request.model, asked, kept, continues=True, begun=goes_on)
    request.messages = turn.messages
    return turn


def _one_name(message: ChatMessage) -> ChatMessage:
    """OpenAI's two names of one role as one: a conversation has one such message."""
    same = message.role != "developer"
    return message if same else msgspec.structs.replace(message, role="system")


def _stored(message: ChatMessage, when: float) -> StoredMessage:
    return StoredMessage(
        message.role,
        _text(message),
        when,
        reasoning_content=message.reasoning_content,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _to_send(message: StoredMessage) -> ChatMessage:
    """As the client would send it back; a call that was cut off in the middle is none."""
    calls = [each for each in message.tool_calls or [] if _whole(each)]
    return ChatMessage(
        message.role,
        None if calls and not message.content else message.content,
        message.name,
        calls or None,
        message.tool_call_id,
        message.reasoning_content,
    )


def _whole(call: dict[str, object]) -> bool:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return True
    try:
        msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return False
    return True


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""
