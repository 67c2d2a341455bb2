"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import Run
from localspec.daemon.completion.anthropic import threads
from localspec.daemon.completion.anthropic.answer import MessagesShape
from localspec.daemon.completion.anthropic.request import chat_request
from localspec.daemon.completion.reply import tools
from localspec.daemon.completion.request import continued
from localspec.daemon.handlers.completions import ready
from localspec.daemon.handlers.tokens import prompt_tokens
from localspec.daemon.history.responses import Kept
from localspec.daemon.history.turn import Turn, continuing, kind_of
from localspec.daemon.http.errors import messages_request
from localspec.daemon.http.requests import answer, ignored, read, unheeded, unless_gone
from localspec.daemon.state import State, state_of
from localspec.errors import Conflict, NotFound, ThreadNotFound, ThreadUnsupported
from localspec.protocol.clients.anthropic import (
    ContinueThread,
    CountTokensRequest,
    InputTokens,
    MessagesRequest,
)
from localspec.protocol.fields import Ignored
from localspec.protocol.requests import ChatMessage, ChatRequest

_MESSAGE_ID = re.compile(r"msg_[0-9a-f]{24}")
_INCOMPLETE = ("interrupted", "failed")  # how answers end whose client did not get all of them


async def create(request: Request) -> Response:
    body = await read(request, MessagesRequest)
    daemon = state_of(request)
    if body.thread and not daemon.config.keep_responses:
        raise ThreadUnsupported(
            "There are no threads here, because 'keep_responses' is false in the configuration. Send the "
            "whole conversation without 'thread'.",
            param="thread",
        )
    before = await unless_gone(request.receive, _continued_message(daemon, body))
    chat, found, added = _chat(body, before, ignored(request))
    tools.check(chat)
    turn = _turn(daemon, chat, added, before) if body.thread else None
    pair, wanted, made = await ready(request, chat, turn)
    shape = MessagesShape(
        made,
        ignored=found,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        hidden=body.thinking is not None and body.thinking.display == "omitted",
        not_kept=(lambda: turn.not_kept) if turn else str,
    )
    if turn:
        state = threads.encode_state(body)
        made.choices[0].ended = turn.keep_as(shape.id, lambda _: state)
    during = turn.under_way(shape.id) if turn else nullcontext()
    given = await Run(daemon.supervisor, pair, wanted, shape, during).respond(request, body.stream)
    given.headers["request-id"] = messages_request()
    return given


async def count_tokens(request: Request) -> Response:
    body = await read(request, CountTokensRequest)
    before = await unless_gone(request.receive, _continued_message(state_of(request), body))
    chat, _, _ = _chat(body, before, ignored(request))
    tools.check(chat)
    return answer(InputTokens(await prompt_tokens(request, chat), unheeded(request)))


async def _continued_message(daemon: State, body: CountTokensRequest) -> Kept | None:
    """Return the stored answer that the request continues, if it continues a thread.

    Raises:
        ThreadNotFound: no such answer is stored, or its client did not get all of it. Anthropic's clients
            then send the whole conversation.
    """
    if not isinstance(body.thread, ContinueThread):
        return None
    name = body.thread.previous_message_id
    why = "it was not stored, or was deleted"
    if _MESSAGE_ID.fullmatch(name):
        try:
            found = await daemon.conversations.kept_response(name)
        except NotFound:
            pass
        except Conflict as error:
            why = error.message.rstrip(".")
        else:
            if found.messages[-1].finish not in _INCOMPLETE:
                return found
            why = "its answer was cut off"
    raise ThreadNotFound(
        f"The thread cannot be continued from the message '{name[:80]}': {why}. Send the whole "
        "conversation.",
        param="thread.previous_message_id",
    )


def _chat(
    body: CountTokensRequest, before: Kept | None, ignored: Ignored
) -> tuple[ChatRequest, Ignored, list[ChatMessage]]:
    """Return the chat that the request asks for, what of it is ignored, and the messages it adds.

    Raises:
        ThreadMismatch: the request changes what its thread was created with.
    """
    replayed = threads.replay(before.messages) if before else []
    if before:
        threads.inherit(body, before.body, replayed)
        body.model = body.model or before.model
    return chat_request(body, replayed, ignored)


def _turn(daemon: State, chat: ChatRequest, added: list[ChatMessage], before: Kept | None) -> Turn:
    """Return the turn of a thread's conversation that `added` and its answer will be."""
    return continuing(
        daemon.conversations,
        threads.to_store(added),
        before,
        model=chat.model or daemon.config.pair,
        kind=kind_of(chat),
        begun=bool(continued(chat)),
    )
