"""Prepare a question that continues a stored conversation, and store it with its answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.chat.notations.call_readers import replace_halves
from localspec.daemon.completion.answer import Choice
from localspec.daemon.completion.files import PLACEHOLDER
from localspec.daemon.completion.request import PREFIX_SEPARATOR, content_text, continued_part
from localspec.daemon.history.responses import NewResponse, StoredResponse
from localspec.daemon.history.store import ConversationStore
from localspec.daemon.history.unfinished import Turn
from localspec.errors import InvalidRequest, LocalspecError, WorkerDied, WorkerTimeout
from localspec.protocol.conversations import Conversation, StoredMessage
from localspec.protocol.requests import (
    AnswerKind,
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerationRequest,
)

NEW = "new"
_MAX_TITLE_CHARS = 80
# A title is looked for in this part of a text, since the event loop does it while others wait.
_MAX_READ_CHARS = 1 << 16
# Finish reasons of answers that can be continued.
_CONTINUABLE = ("length", "interrupted", "failed")
_STORE_TIMEOUT_S = 5.0  # A disk that hangs delays the end of an answer by at most this long.
_BEGIN_TIMEOUT_S = 1.0  # The same for its beginning; the history may also be busy with a deletion.
# A killed daemon loses what was written of an answer since it was saved last: at most this fraction of the
# time since it began, within these limits in seconds.
_UNSAVED_FRACTION, _MIN_SAVE_INTERVAL_S, _MAX_SAVE_INTERVAL_S = 0.25, 0.1, 0.5


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One question and its answer, on their way into `store`.

    `new_messages` are those of the request, and `stored_messages` those that the conversation already has.
    """

    store: ConversationStore
    id: str
    model: str
    kind: AnswerKind
    new_messages: list[ChatMessage]
    stored_messages: list[ChatMessage] = field(default_factory=list)
    continues: bool = False  # the conversation exists already
    begun: bool = False  # the last message of the request is the beginning of the answer
    title: str = ""  # of a new conversation
    cut_answer: StoredMessage | None = None  # the stored answer that was cut off and is continued
    continued: str | None = None  # the id of the response that is continued
    created: float = field(default_factory=time.time)
    stored: list[Future[str]] = field(default_factory=list)
    key: str = field(default_factory=lambda: secrets.token_hex(8))  # while it is unfinished

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages that the model reads; a new system message replaces the stored one."""
        new_system = [message for message in self.new_messages if message.role == "system"]
        stored_system = [message for message in self.stored_messages if message.role == "system"]
        messages = [*self.stored_messages, *self.new_messages]
        others = [message for message in messages if message.role != "system"]
        return [*(new_system or stored_system), *others]

    @contextlib.asynccontextmanager
    async def under_way(
        self,
        choice: Choice,
        response: str | None = None,
        body: Callable[[Choice], str] | None = None,
    ) -> AsyncIterator[None]:
        """Keep the question, and the answer from time to time, until the answer ends.

        Meanwhile readers of the conversation, and of the response `response` with the JSON `body`, are held
        back. The context ends after the answer was stored, so that a complete answer can say whether it was.
        """
        opening = _stored_answer(choice, self.model, self.kind)

        def keep_question(store: ConversationStore) -> None:
            new = NewResponse(response, body(choice), self.continued) if response and body else None
            store.begin_turn(self.key, self._with_answer(opening, new))

        async with contextlib.AsyncExitStack() as stack:
            for name in filter(None, (response, self.id)):
                await stack.enter_async_context(self.store.answering(name))
            begun = asyncio.wrap_future(self.store.submit(keep_question, newest=True))
            saving = asyncio.create_task(self._save(choice))
            try:
                await asyncio.wait({begun}, timeout=_BEGIN_TIMEOUT_S)
                yield
            finally:
                saving.cancel()
                if not self.stored:
                    self.store.submit(lambda store: store.drop_turn(self.key))
        if self.stored:
            await asyncio.wait(map(asyncio.wrap_future, self.stored), timeout=_STORE_TIMEOUT_S)

    async def _save(self, choice: Choice) -> None:
        """Keep the part of the answer that is written, again and again until the task is cancelled."""
        saved, first = (0, 0), math.inf
        while True:
            interval = max(_UNSAVED_FRACTION * (time.monotonic() - first), _MIN_SAVE_INTERVAL_S)
            await asyncio.sleep(min(interval, _MAX_SAVE_INTERVAL_S))
            calls = sum(len(call.function.arguments) + 1 for call in choice.calls)
            length = len(choice.content) + len(choice.reasoning), calls
            if length == saved:
                continue
            first = min(first, time.monotonic())
            answer, saved = _stored_answer(choice, self.model, self.kind), length

            def update(store: ConversationStore, answer: StoredMessage = answer) -> None:
                store.update_turn(self.key, self._with_beginning(answer))

            with contextlib.suppress(LocalspecError):  # the end of the answer reports it
                await self.store.run(update)

    @property
    def store_error(self) -> str:
        """The reason why the answer could not be stored; "" if it was stored, or still may be."""
        return next((future.result() for future in self.stored if future.done()), "")

    def store_answer(
        self, choice: Choice, response: NewResponse | None = None, *, always: bool = False
    ) -> None:
        """Store the question and the part of the answer that the client got, however the answer ended.

        `response` makes the answer one that later requests can continue by its id. A request that was refused
        leaves nothing, unless `always` is true. A question whose engine died before the answer began is no
        such request: it can be answered again.
        """
        died = response is None and isinstance(choice.error, WorkerDied | WorkerTimeout)
        if not (choice.has_output or always or died):
            return
        answer = _stored_answer(choice, self.model, self.kind)

        def store_turn(store: ConversationStore) -> None:
            store.end_turn(self.key, self._with_answer(answer, response))

        self.stored.append(self.store.submit(store_turn, newest=True))

    def _with_answer(self, answer: StoredMessage, response: NewResponse | None = None) -> Turn:
        """Return the turn as it is stored with this answer. Long questions take time, so a thread does it."""
        messages = [
            StoredMessage(
                message.role,
                stored_text(message),
                self.created,
                reasoning_content=message.reasoning_content,
                tool_calls=message.tool_calls,
                tool_call_id=message.tool_call_id,
                name=message.name,
            )
            for message in (self.new_messages[:-1] if self.begun else self.new_messages)
        ]
        messages.append(self._with_beginning(answer))
        addition = Conversation(
            self.id, self.title, self.model, self.created, answer.created, messages
        )
        return Turn(addition, not self.continues, self.cut_answer, response)

    def _with_beginning(self, answer: StoredMessage) -> StoredMessage:
        """Return the answer with its beginning, where the client sent that or it was stored before."""
        if self.begun and self.new_messages:
            beginning = self.new_messages[-1]
            thoughts = (beginning.reasoning_content or "") + (answer.reasoning_content or "")
            content = stored_text(beginning, PREFIX_SEPARATOR) + answer.content
            answer = msgspec.structs.replace(
                answer, content=content, reasoning_content=thoughts or None
            )
        return _join_answers(self.cut_answer, answer) if self.cut_answer else answer

    def store_answer_as(
        self, name: str, body: Callable[[Choice], str], *, always: bool = False
    ) -> Callable[[Choice], None]:
        """Return a callback that stores the turn as the response `name` when its answer has ended.

        `body` makes the response's JSON from the answer, and `always` is as in `store_answer`.
        """
        return lambda choice: self.store_answer(
            choice, NewResponse(name, body(choice), self.continued), always=always
        )


def _stored_answer(choice: Choice, model: str, kind: AnswerKind) -> StoredMessage:
    message = StoredMessage(
        "assistant",
        choice.content,
        time.time(),
        model=choice.fallback_pair or model,
        reasoning_content=choice.reasoning or None,
        tool_calls=[msgspec.to_builtins(call) for call in choice.calls] or None,
        kind=kind,
    )
    end = choice.done
    if end is None or end.finish_reason == "cancelled":
        message.finish = "failed" if choice.error else "interrupted"
        return message
    message.finish = choice.finish_reason
    message.tokens = end.completion_tokens
    message.seconds = end.timings.predicted_ms / 1000
    message.tokens_per_second = end.timings.predicted_per_second
    message.drafted = end.speculation.drafted
    message.accepted = end.speculation.accepted
    message.speed_up = end.speculation.speed_up
    return message


def _join_answers(first: StoredMessage, second: StoredMessage) -> StoredMessage:
    """Return an answer that was cut off and its continuation as one answer."""

    sums: dict[str, Any] = {}
    for name in ("content", "reasoning_content", "tokens", "seconds", "drafted", "accepted"):
        before, after = getattr(first, name), getattr(second, name)
        both = None not in (before, after)
        sums[name] = before + after if both else after if before is None else before
    answer = msgspec.structs.replace(second, **sums)
    if answer.tokens and answer.seconds:
        answer.tokens_per_second = answer.tokens / answer.seconds
    return answer


def figures_callback(
    store: ConversationStore, request: GenerationRequest, model: str
) -> Callable[[Choice], None] | None:
    """Return a callback that stores the figures of an ended answer; None if the request asks for none."""
    if request.localspec is None or request.localspec.kind is None:
        return None
    kind = kind_of(request)

    def keep(choice: Choice) -> None:
        answer = _stored_answer(choice, model, kind)
        if answer.tokens is not None:
            store.submit(lambda conversations: conversations.add_figures(answer))

    return keep


def kind_of(request: GenerationRequest) -> AnswerKind:
    """Return the kind of work of an answer; it is "json" whenever the answer has to be JSON."""
    response_format = request.response_format
    if request.json_schema is not None or (response_format and response_format.type != "text"):
        return "json"
    if request.localspec and request.localspec.kind:
        return request.localspec.kind
    return "edit" if request.prediction else "other"


async def begin_turn(
    store: ConversationStore, request: ChatRequest, model: str
) -> ConversationTurn | None:
    """Return the turn that `request` asks to store; None if it asks for nothing.

    `model` is the configured pair's name. For a conversation that is continued, `request.model` is filled
    in from it and `request.messages` is preceded by its messages.

    Raises InvalidRequest if the request continues an answer that cannot be continued, and as `store.get`.
    """
    name = request.localspec and request.localspec.conversation
    if not name:
        return None
    # "developer" is OpenAI's newer name of the role "system".
    messages = [
        msgspec.structs.replace(message, role="system") if message.role == "developer" else message
        for message in request.messages
    ]
    continues_stored = not messages and name != NEW and bool(request.continue_final_message)
    begun = not continues_stored and bool(continued_part(request))
    kind = kind_of(request)
    if name == NEW:
        name = secrets.token_hex(4)
        title = make_title(messages, request.localspec.title if request.localspec else None)
        model = request.model or model
        return ConversationTurn(store, name, model, kind, messages, begun=begun, title=title)
    await store.wait_until_settled(name)
    stored = await store.run(lambda conversations: conversations.get(name))
    request.model = request.model or stored.model
    earlier = [replay_message(message) for message in stored.messages]
    turn = ConversationTurn(
        store, stored.id, request.model, kind, messages, earlier, continues=True, begun=begun
    )
    if continues_stored:
        cut = stored.messages[-1] if stored.messages else None
        if cut is None or cut.role != "assistant" or cut.finish not in _CONTINUABLE:
            raise InvalidRequest(
                f"The last answer of conversation {stored.id} is complete: there is nothing to continue. "
                "Ask a question instead.",
                param="messages",
            )
        turn = dataclasses.replace(turn, cut_answer=cut)
        if not (cut.content or cut.reasoning_content or cut.tool_calls):
            # The answer had not begun, so there is nothing that a model could continue.
            earlier.pop()
            request.continue_final_message = None
    request.messages = turn.messages
    return turn


def continue_turn(
    store: ConversationStore,
    asked: list[ChatMessage],
    before: StoredResponse | None,
    *,
    model: str,
    kind: AnswerKind,
    title: str,
    begun: bool = False,
) -> ConversationTurn:
    """Return the turn of a response that continues `before`, or of a first response if that is None.

    A turn that continues an older answer than the last one goes into a conversation of its own. Whatever is
    logged or saved of it then has that name, and is removed with it.
    """
    name = before.conversation if before and before.is_last else secrets.token_hex(4)
    continued = before.id if before else None
    turn = ConversationTurn(
        store, name, model, kind, asked, replay_messages(before), continues=before is not None
    )
    return dataclasses.replace(turn, begun=begun, continued=continued, title=title)


def replay_messages(before: StoredResponse | None) -> list[ChatMessage]:
    """Return the messages up to a stored response, as a client would send them."""
    return [replay_message(message) for message in before.messages] if before else []


def make_title(messages: Sequence[ChatMessage], requested: str | None = None) -> str:
    """Return the first line of the title that the client gave, or of the last question if it gave none.

    A file in the question counts by its name, and only if there are no words. So its text must not be in the
    messages yet.
    """
    questions = (message.content or "" for message in reversed(messages) if message.role == "user")
    content = next(questions, "")
    parts = [ContentPart("text", content)] if isinstance(content, str) else content
    words, names, pictures = "", list[str](), list[str]()
    for part in parts[:_MAX_READ_CHARS]:
        if part.type == "text" and len(words) < _MAX_READ_CHARS:
            words += f"{(part.text or '')[:_MAX_READ_CHARS]}\n"
        elif part.type == "file":
            names.append(_file_name(part)[:_MAX_READ_CHARS])
        elif part.type == "image_url":
            pictures.append(PLACEHOLDER)
    line = _first_line(requested or "") or _first_words(words)
    line = line or _first_line("\n".join([*names, *pictures]))
    return line if len(line) <= _MAX_TITLE_CHARS else f"{line[: _MAX_TITLE_CHARS - 1]}…"


def _first_line(text: str) -> str:
    lines = text[:_MAX_READ_CHARS].splitlines()
    return next((line.strip() for line in lines if line.strip()), "")


def _first_words(text: str) -> str:
    """Return the first line outside fenced blocks, which are mostly pasted; else the first line."""
    fence, prose = "", []
    for line in map(str.strip, text[:_MAX_READ_CHARS].splitlines()):
        mark = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            fence = "" if line == mark and len(mark) >= len(fence) else fence
        elif len(mark) >= 3:
            fence = mark
        else:
            prose.append(line)
    return _first_line("\n".join(prose)) or _first_line(text)


def replay_message(message: StoredMessage) -> ChatMessage:
    """Return a stored message as the client would send it; a call that was cut off is left out."""
    calls = [call for call in message.tool_calls or [] if _is_complete(call)]
    return ChatMessage(
        message.role,
        None if calls and not message.content else message.content,
        message.name,
        calls or None,
        message.tool_call_id,
        message.reasoning_content,
    )


def _is_complete(call: dict[str, object]) -> bool:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return True
    try:
        msgspec.json.decode(replace_halves(arguments))
    except msgspec.DecodeError:
        return False
    return True


def name_files(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with the name of each file in its place."""

    def name_file(part: ContentPart) -> ContentPart:
        return ContentPart("text", f"[{_file_name(part)}]") if part.type == "file" else part

    return [
        msgspec.structs.replace(message, content=[*map(name_file, message.content)])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]


def _file_name(part: ContentPart) -> str:
    return str((part.file or {}).get("filename") or "document")


def stored_text(message: ChatMessage, between: str = "\n") -> str:
    """Return what the model reads of a message, with a word in place of each picture.

    A file is still there only if it could not be read. Then its name is in its place.
    """
    [message] = name_files([message])
    return content_text(
        message.content or "",
        "content",
        message.role,
        between,
        read_picture=lambda _part, _path: PLACEHOLDER,
    )
