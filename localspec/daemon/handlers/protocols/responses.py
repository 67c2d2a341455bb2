"""OpenAI's Responses: /v1/responses."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import Run, waiting
from localspec.daemon.completion.responses import kept
from localspec.daemon.completion.responses.request import (
    OPAQUE,
    Asked,
    asked,
    chat_request,
    opening,
    refuse,
    style,
)
from localspec.daemon.completion.responses.shape import ResponsesShape
from localspec.daemon.handlers.completions import ready
from localspec.daemon.handlers.tokens import prompt_tokens
from localspec.daemon.history.responses import Kept
from localspec.daemon.history.turn import Turn, continuing, kind_of, one_to_send, to_send
from localspec.daemon.http.requests import answer, ignored, read, unheeded, unless_gone
from localspec.daemon.state import State, state_of
from localspec.errors import InvalidRequest, LocalspecError, NotFound
from localspec.protocol.clients.responses.items import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from localspec.protocol.clients.responses.requests import ResponsesRequest
from localspec.protocol.requests import ChatMessage, ChatRequest

_MOST_ITEMS = 100  # of a page


async def create(request: Request) -> Response:
    body = await read(request, ResponsesRequest)
    daemon = state_of(request)
    refuse(body)
    if body.store is None:
        body.store = daemon.config.keep_responses
    before, found = await unless_gone(request.receive, _asked(daemon, body))
    body.model = body.model or (before.model if before else "")
    turn, key = None, secrets.token_hex(12)
    with _in_its_words():
        chat = chat_request(body, found, to_send(before))
        if body.store:
            model, kind = body.model or daemon.config.pair, kind_of(chat)
            added = found.messages
            if before is None and (before := await _repeated(daemon, body, added)):
                added = added[len(before.messages) :]
            turn = continuing(daemon.conversations, added, before, model=model, kind=kind)
        pair, wanted, made = await ready(request, chat, turn)
    shape = ResponsesShape(
        made,
        opening(body, key, pair.name, [*found.ignored, *ignored(request)]),
        style(body, found.tools, key),
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        not_kept=(lambda: turn.not_kept) if turn else str,
    )
    if turn:
        name = shape.response.id
        made.choices[0].ended = turn.keep_as(name, lambda choice: kept.body(shape.ended(choice)))
    during = _under_way(daemon, shape, turn)
    run = Run(daemon.supervisor, pair, wanted, shape, during, **waiting(body, shape))
    with _in_its_words():
        return await run.respond(request, body.stream)


async def _asked(daemon: State, body: ResponsesRequest) -> tuple[Kept | None, Asked]:
    """What the request goes on from, and what it says."""
    before = None
    if body.previous_response_id:
        with _at("previous_response_id"):
            before = await _kept(daemon, body.previous_response_id)
    meant = {}
    for index, item in enumerate(body.input if isinstance(body.input, list) else []):
        if item.type == "item_reference" and item.id:
            with _at(f"input[{index}].id"):
                meant[item.id] = await _meant(daemon, item.id)
    return before, asked(body, meant.__getitem__)


async def _repeated(
    daemon: State, body: ResponsesRequest, messages: list[ChatMessage]
) -> Kept | None:
    """The kept response that a request goes on from that sends everything again, as agents do: its items
    say which, and it is their beginning. Else each turn of an agent would be a conversation.
    """
    items = body.input if isinstance(body.input, list) else []
    for name in (each.id for each in reversed(items) if each.id):
        with contextlib.suppress(ValueError, NotFound):
            if response := kept.Reference(name).response:
                found = await _kept(daemon, response)
                begin = [_same(each) for each in to_send(found)]
                again = [_same(each) for each in messages[: len(begin)]]
                return found if again == begin and len(messages) > len(begin) else None
    return None


def _same(message: ChatMessage) -> tuple[object, ...]:
    """What two messages have in common that say the same; thoughts may have been left out."""
    calls = [each.get("id") for each in message.tool_calls or []]
    return message.role, message.content or "", calls, message.tool_call_id


async def _kept(daemon: State, name: str) -> Kept:
    _check_id(name)
    return await daemon.conversations.kept_response(name)


def _check_id(name: str) -> None:
    """Refuse ids of other protocols, whose answers are kept beside responses.

    Raises:
        NotFound: `name` is not the id of a response.
    """
    if not name.startswith("resp_"):
        raise NotFound(f"There is no response '{name[:80]}': it was not kept, or was deleted.")


async def _meant(daemon: State, name: str) -> ChatMessage:
    """The kept item of this id."""
    with contextlib.suppress(ValueError, IndexError, NotFound):
        reference = kept.Reference(name)
        if reference.response:
            messages = (await _kept(daemon, reference.response)).messages
        else:
            store = daemon.conversations
            messages = (await store.run(lambda each: each.get(reference.conversation))).messages
        return reference.part(one_to_send(messages[reference.index]))
    raise NotFound(f"There is no item '{name[:80]}': it was not kept, or was deleted.")


@contextlib.contextmanager
def _at(param: str) -> Iterator[None]:
    """What is not found is a mistake in this field."""
    try:
        yield
    except NotFound as error:
        said = error.message[:1].lower() + error.message[1:]
        raise InvalidRequest(f"'{param}': {said}", param=param) from None


# Fields of a chat as this request has them.
_WORDS = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format.json_schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    (".function.", "."),
    ("messages", "input"),
)


@contextlib.contextmanager
def _in_its_words() -> Iterator[None]:
    """Errors name the fields of this request, and not those of the chat that it becomes."""
    try:
        yield
    except LocalspecError as error:
        if error.param:
            param = error.param
            for theirs, ours in _WORDS:
                param = param.replace(theirs, ours)
            error.message = error.message.replace(f"'{error.param}", f"'{param}")
            error.param = param
        raise


@contextlib.asynccontextmanager
async def _under_way(
    daemon: State, shape: ResponsesShape, turn: Turn | None
) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(daemon.responses.under_way(shape))
        if turn:
            await held.enter_async_context(turn.under_way(shape.response.id))
        yield


async def show(request: Request) -> Response:
    """A response that is kept, or that is being written, as far as it is."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("'stream' must be false: a response is streamed once.", param="stream")
    return answer(await _response(request))


async def _response(request: Request) -> ResponseObject:
    daemon, name = state_of(request), request.path_params["name"]
    if found := daemon.responses.get(name):
        return found
    stored = await _kept(daemon, name)
    opaque = OPAQUE in request.query_params.values()
    return kept.response(stored.body, stored.messages[-1], opaque=opaque)


async def remove(request: Request) -> Response:
    """Forget a response, what was asked for it and its answer; a conversation of nothing else goes too."""
    daemon, name = state_of(request), request.path_params["name"]
    _check_id(name)
    await unless_gone(request.receive, daemon.conversations.settled(name))
    conversation = await daemon.conversations.run(lambda each: each.remove_response(name))
    await daemon.forget_states(conversation)
    return answer(DeletedResponse(name))


async def cancel(request: Request) -> Response:
    """End a response that is being written; one that has ended is refused."""
    daemon, name = state_of(request), request.path_params["name"]
    if found := await unless_gone(request.receive, daemon.responses.cancel(name)):
        return answer(found)
    found = await _response(request)
    if found.status == "cancelled":
        return answer(found)
    raise InvalidRequest(f"The response {name} has ended; there is nothing to cancel.")


async def input_items(request: Request) -> Response:
    """What the model read, also of the responses before; ?order=asc, ?limit=N, ?after=ID for a page."""
    query, daemon = request.query_params, state_of(request)
    order, text = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    short = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_ITEMS))
    if not (short and 1 <= int(text) <= _MOST_ITEMS):
        message = f"'limit' must be a whole number from 1 to {_MOST_ITEMS}."
        raise InvalidRequest(message, param="limit")
    found = await _kept(daemon, request.path_params["name"])
    items = kept.items(found.conversation, found.messages[:-1], found.ids)
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        ids = [each.id for each in items]
        if after not in ids:
            raise InvalidRequest(f"'after': there is no item '{after[:80]}'.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(text)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return answer(ItemList(page, first, last, has_more=len(items) > len(page)))


async def input_tokens(request: Request) -> Response:
    """How many tokens a request's input would be."""
    body = await read(request, ResponsesRequest)
    refuse(body)
    before, found = await unless_gone(request.receive, _asked(state_of(request), body))
    body.model = body.model or (before.model if before else "")
    with _in_its_words():
        chat: ChatRequest = chat_request(body, found, to_send(before))
        tokens = await prompt_tokens(request, chat)
        return answer(InputTokens(tokens, localspec=unheeded(request)))
