"""A question and its answer on their way into a kept conversation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import msgspec

from localspec.daemon.completion.answer import Choice
from localspec.daemon.completion.request import continued
from localspec.daemon.history.responses import Kept, Response
from localspec.daemon.history.store import Conversations
from localspec.errors import InvalidRequest
from localspec.protocol.conversations import Conversation, StoredMessage
from localspec.protocol.requests import ChatMessage, ChatRequest, GenerationRequest, Kind

NEW = "new"
_TITLE = 80  # characters
_CUT_OFF = ("length", "interrupted", "failed")  # how answers end that could go on
_PATIENCE = 5.0  # seconds; a disk that hangs holds up the end of an answer no longer


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer, on their way into `store`. `kept` are the messages from before."""

    store: Conversations
    id: str
    model: str
    kind: Kind
    asked: list[ChatMessage]
    kept: list[ChatMessage] = field(default_factory=list)
    continues: bool = False  # a conversation that was there
    begun: bool = False  # the last message that was sent is the beginning of the answer
    named: str | None = None  # by the client
    cut: StoredMessage | None = None  # the kept answer that goes on where it was cut off
    continued: str | None = None  # the id of the response that it goes on from
    began: float = field(default_factory=time.time)
    stored: list[Future[str]] = field(default_factory=list)

    @property
    def messages(self) -> list[ChatMessage]:
        """What the model reads; a new system message takes the old one's place."""
        replaced = any(message.role == "system" for message in self.asked)
        kept = [each for each in self.kept if not (replaced and each.role == "system")]
        system = [each for each in (*kept, *self.asked) if each.role == "system"]
        return system + [each for each in (*kept, *self.asked) if each.role != "system"]

    @property
    def title(self) -> str:
        """The first line of what the client calls it, else of the question."""
        asked = next((_text(each) for each in reversed(self.asked) if each.role == "user"), "")
        line = _first_line(self.named or "") or _first_words(asked)
        return line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"

    @contextlib.asynccontextmanager
    async def under_way(self, response: str | None = None) -> AsyncIterator[None]:
        """To be held until the answer has ended: who asks for the conversation, or for the answer by its id
        `response`, waits until then.

        Of an answer that is complete it is known then whether it is stored.
        """
        async with contextlib.AsyncExitStack() as held:
            for name in filter(None, (response, self.id)):
                await held.enter_async_context(self.store.answering(name))
            yield
        if self.stored:
            await asyncio.wait(map(asyncio.wrap_future, self.stored), timeout=_PATIENCE)

    @property
    def not_kept(self) -> str:
        """Why the answer could not be stored; nothing where it was, or is about to be."""
        return next((each.result() for each in self.stored if each.done()), "")

    def keep(self, choice: Choice, response: Response | None = None) -> None:
        """Store what was asked and what the client got of the answer, which has ended somehow.
        `response`: what makes the answer one that later requests continue by its id.
        """
        if not choice.begun:  # a request that was refused leaves nothing
            return
        asked = [_stored(each, self.began) for each in self.asked]
        answer = _answer(choice, self.model, self.kind)
        if self.begun and asked:  # stored with its beginning, where the client sent that
            begun = asked.pop()
            answer.content = begun.content + answer.content
            thoughts = (begun.reasoning_content or "") + (answer.reasoning_content or "")
            answer.reasoning_content = thoughts or None
        if self.cut:
            answer = _joined(self.cut, answer)
        added = Conversation(
            self.id, self.title, self.model, self.began, answer.created, [*asked, answer]
        )
        new = not self.continues
        self.stored.append(self.store.keep(added, new=new, cut=self.cut, response=response))

    def keep_as(self, name: str, body: Callable[[Choice], str]) -> Callable[[Choice], None]:
        """Return what stores the turn as a response of the id `name`, when its answer has ended.

        `body` makes the response's JSON of the answer.
        """
        return lambda choice: self.keep(choice, Response(name, body(choice), self.continued))


def _answer(choice: Choice, model: str, kind: Kind) -> StoredMessage:
    message = StoredMessage(
        "assistant",
        choice.content,
        time.time(),
        model=choice.stand_in or model,
        reasoning_content=choice.reasoning or None,
        tool_calls=[msgspec.to_builtins(call) for call in choice.calls] or None,
        kind=kind,
    )
    done = choice.done
    if done is None or done.finish_reason == "cancelled":
        message.finish = "failed" if choice.failed else "interrupted"
        return message
    message.finish = choice.finish
    message.tokens = done.completion_tokens
    message.seconds = done.timings.predicted_ms / 1000
    message.tokens_per_second = done.timings.predicted_per_second
    message.drafted = done.speculation.drafted
    message.accepted = done.speculation.accepted
    message.speed_up = done.speculation.speed_up
    return message


def _joined(first: StoredMessage, rest: StoredMessage) -> StoredMessage:
    """An answer that was cut off and what it went on with, as one answer."""

    def both(name: str) -> Any:
        values = [getattr(each, name) for each in (first, rest)]
        known = [value for value in values if value is not None]
        return reduce(add, known) if known else None

    names = ("content", "reasoning_content", "tokens", "seconds", "drafted", "accepted")
    joined = msgspec.structs.replace(rest, **{name: both(name) for name in names})
    if joined.tokens and joined.seconds:
        joined.tokens_per_second = joined.tokens / joined.seconds
    return joined


def figures(
    store: Conversations, request: GenerationRequest, model: str
) -> Callable[[Choice], None] | None:
    """What keeps the answer's figures when it has ended; None where that was not asked for."""
    if request.localspec is None or request.localspec.kind is None:
        return None
    kind = kind_of(request)

    def keep(choice: Choice) -> None:
        answer = _answer(choice, model, kind)
        if answer.tokens is not None:
            store.soon(lambda store: store.add_figures(answer))

    return keep


def kind_of(request: GenerationRequest) -> Kind:
    """What an answer is for: JSON where that is its form, whoever asks for it."""
    shape = request.response_format
    if request.json_schema is not None or (shape and shape.type != "text"):
        return "json"
    if request.localspec and request.localspec.kind:
        return request.localspec.kind
    return "edit" if request.prediction else "other"


async def begin(store: Conversations, request: ChatRequest, model: str) -> Turn | None:
    """The turn `request` asks for, None when it asks to keep nothing.

    `model` is the configured pair's name. `request.model` is filled in from a conversation that is
    continued, and `request.messages` with what was said before.

    Raises:
        NotFound: there is no such conversation.
        Conflict: the file cannot be read.
        InvalidRequest: an answer is to go on that cannot.
    """
    wanted = request.localspec and request.localspec.conversation
    if not wanted:
        return None
    asked = [_one_name(each) for each in request.messages]
    goes_on_kept = not asked and wanted != NEW and bool(request.continue_final_message)
    goes_on = not goes_on_kept and bool(continued(request))
    kind = kind_of(request)
    if wanted == NEW:
        name = secrets.token_hex(4)
        title = request.localspec.title if request.localspec else None
        model = request.model or model
        return Turn(store, name, model, kind, asked, begun=goes_on, named=title)
    await store.settled(wanted)
    found = await store.run(lambda each: each.get(wanted))
    request.model = request.model or found.model
    kept = [one_to_send(each) for each in found.messages]
    turn = Turn(store, found.id, request.model, kind, asked, kept, continues=True, begun=goes_on)
    if goes_on_kept:
        turn = dataclasses.replace(turn, cut=_cut_off(found))
    request.messages = turn.messages
    return turn


def continuing(
    store: Conversations,
    asked: list[ChatMessage],
    before: Kept | None,
    *,
    model: str,
    kind: Kind,
    begun: bool = False,
) -> Turn:
    """Return the turn of a response that continues `before`; with None, of the first one.

    A turn that continues an older answer than the last goes into a conversation of its own. Whatever is
    logged or saved of it then has that name, and is removed with it.
    """
    name = before.conversation if before and before.is_last else secrets.token_hex(4)
    continued = before.id if before else None
    turn = Turn(store, name, model, kind, asked, to_send(before), continues=before is not None)
    return dataclasses.replace(turn, begun=begun, continued=continued)


def to_send(before: Kept | None) -> list[ChatMessage]:
    """What was said up to a kept response."""
    return [one_to_send(each) for each in before.messages] if before else []


def _cut_off(found: Conversation) -> StoredMessage:
    """The last answer, which is not complete.

    Raises:
        InvalidRequest: there is none, or it is complete.
    """
    last = found.messages[-1] if found.messages else None
    if last is None or last.role != "assistant" or last.finish not in _CUT_OFF:
        raise InvalidRequest(
            f"The last answer of conversation {found.id} is complete: there is nothing to continue. "
            "Ask a question instead.",
            param="messages",
        )
    return last


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _first_words(text: str) -> str:
    """The first line that is in no fenced block, which is rather pasted than said; else the first."""
    fence, said = "", []
    for line in map(str.strip, text.splitlines()):
        mark = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            fence = "" if line == mark and len(mark) >= len(fence) else fence
        elif len(mark) >= 3:
            fence = mark
        else:
            said.append(line)
    return _first_line("\n".join(said)) or _first_line(text)


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


def one_to_send(message: StoredMessage) -> ChatMessage:
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
