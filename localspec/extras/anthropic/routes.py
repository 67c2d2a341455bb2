"""Handle POST /v1/messages and /v1/messages/count_tokens of Anthropic's protocol."""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import AnswerRun, respond
from localspec.daemon.completion.request import continued_part
from localspec.daemon.handlers import models
from localspec.daemon.handlers.completions import prepare_chat, prompt_tokens
from localspec.daemon.history.responses import StoredResponse
from localspec.daemon.history.turn import continue_turn, kind_of, make_title
from localspec.daemon.http.errors import add_shape
from localspec.daemon.http.requests import (
    ignored_extension,
    ignored_fields,
    json_response,
    read_body,
    while_connected,
)
from localspec.daemon.state import DaemonState, state_of
from localspec.errors import Conflict, NotFound, ThreadNotFound, ThreadUnsupported
from localspec.extras.anthropic import answer, threads
from localspec.extras.anthropic.answer import MessagesShape, as_model, model_page
from localspec.extras.anthropic.request import chat_request
from localspec.extras.anthropic.wire import (
    ContinueThread,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from localspec.protocol.fields import IgnoredFields
from localspec.protocol.requests import ChatMessage, ChatRequest

_MESSAGE_ID = re.compile(r"msg_[0-9a-f]{24}")
# Finish reasons of answers that the client did not get in full.
_INCOMPLETE = ("interrupted", "failed")


async def create(request: Request) -> Response:
    """Handle POST /v1/messages."""
    body = await read_body(request, MessagesRequest)
    response = await respond(request, _run(request, body), MessagesShape, stream=body.stream)
    response.headers["request-id"] = answer.new_request_id()
    return response


async def _run(request: Request, body: MessagesRequest) -> AnswerRun:
    daemon = state_of(request)
    if body.thread and not daemon.config.keep_responses:
        raise ThreadUnsupported(
            "There are no threads here, because 'keep_responses' is false in the configuration. Send the "
            "whole conversation without 'thread'.",
            param="thread",
        )
    previous = await while_connected(request.receive, _continued_message(daemon, body))
    # In a thread, because the files in the messages are decoded.
    chat, new_messages = await asyncio.to_thread(_chat, body, previous, ignored_fields(request))
    turn = None
    if body.thread:
        turn = continue_turn(
            daemon.conversations,
            threads.prepare_for_history(new_messages),
            previous,
            model=chat.model or daemon.config.pair,
            kind=kind_of(chat),
            title=make_title(new_messages),
            begun=bool(continued_part(chat)),
        )
    pair, requests, empty_answer = await prepare_chat(request, chat, turn)
    hidden = body.thinking is not None and body.thinking.display == "omitted"
    shape = MessagesShape(empty_answer, hidden=hidden)
    context: AbstractAsyncContextManager[object] = nullcontext()
    if turn:
        state, choice = threads.encode_state(body), empty_answer.choices[0]
        choice.on_end = turn.store_answer_as(shape.id, lambda _: state)
        context = turn.under_way(choice, shape.id, lambda _: state)
    return AnswerRun(daemon.pairs, pair, requests, shape, context)


async def count_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens."""
    body = await read_body(request, CountTokensRequest)
    previous = await while_connected(request.receive, _continued_message(state_of(request), body))
    chat, _ = await asyncio.to_thread(_chat, body, previous, ignored_fields(request))
    return json_response(TokenCount(await prompt_tokens(request, chat), ignored_extension(request)))


async def _continued_message(
    daemon: DaemonState, body: CountTokensRequest
) -> StoredResponse | None:
    """Return the stored answer that the request continues; None if it continues no thread.

    Raises:
        ThreadNotFound: the answer is not stored, or its client did not get all of it. Anthropic's clients
            then send the whole conversation.
    """
    if not isinstance(body.thread, ContinueThread):
        return None
    name, reason = body.thread.previous_message_id, "it was not stored, or was deleted"
    if _MESSAGE_ID.fullmatch(name):
        try:
            stored = await daemon.conversations.get_response(name)
        except NotFound:
            pass
        except Conflict as error:
            reason = error.message.rstrip(".")
        else:
            if stored.messages[-1].finish not in _INCOMPLETE:
                return stored
            reason = "its answer was cut off"
    raise ThreadNotFound(
        f"The thread cannot be continued from the message '{name[:80]}': {reason}. Send the whole "
        "conversation.",
        param="thread.previous_message_id",
    )


def _chat(
    body: CountTokensRequest, previous: StoredResponse | None, ignored: IgnoredFields
) -> tuple[ChatRequest, list[ChatMessage]]:
    """Return the chat that the request asks for and the messages it adds, and complete `ignored`."""
    earlier = threads.replay(previous.messages) if previous else []
    if previous:
        threads.inherit_tools(body, previous.body, earlier)
        body.model = body.model or previous.model
    return chat_request(body, ignored, earlier)


async def list_models(request: Request) -> Response:
    """List the models, in Anthropic's shape: its clients use the path of OpenAI's list."""
    query, entries = request.query_params, await models.list_models(state_of(request))
    lifecycles = [value for name, value in query.multi_items() if "lifecycle" in name]
    if lifecycles and "active" not in lifecycles:
        entries = []  # every model is active
    return json_response(model_page(entries, query))


async def show_model(request: Request) -> Response:
    """Describe one model, in Anthropic's shape."""
    return json_response(as_model(await models.find_model(request)))


ROUTES = (
    ("POST", "/v1/messages", create),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("GET", "/v1/models", list_models, "anthropic-version"),
    ("GET", "/v1/models/{name}", show_model, "anthropic-version"),
)
PATH_ALIASES = {"/models": "/v1/models"}
add_shape(answer.applies, answer.shape)
