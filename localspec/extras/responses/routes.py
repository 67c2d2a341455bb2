"""Handle OpenAI's Responses at /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import AnswerRun, PendingAnswer, respond
from localspec.daemon.completion.files import has_files
from localspec.daemon.handlers.completions import expand_chat, prepare_chat, prompt_tokens
from localspec.daemon.history.responses import StoredResponse
from localspec.daemon.history.turn import (
    ConversationTurn,
    continue_turn,
    kind_of,
    make_title,
    name_files,
    replay_message,
    replay_messages,
    stored_text,
)
from localspec.daemon.http.requests import (
    detach,
    ignored_extension,
    ignored_fields,
    json_response,
    query_flag,
    query_number,
    read_body,
    while_connected,
)
from localspec.daemon.state import DaemonState, state_of
from localspec.errors import InvalidRequest, LocalspecError, NotFound
from localspec.extras.responses import kept
from localspec.extras.responses.answer import ResponsesShape, item_style
from localspec.extras.responses.kept import BackgroundRun, recording_key, resume
from localspec.extras.responses.request import (
    ENCRYPTED_REASONING,
    ParsedInput,
    background_not_stored,
    chat_request,
    new_response,
    parse_input,
    refuse_unsupported,
)
from localspec.extras.responses.wire import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from localspec.protocol.conversations import Conversation
from localspec.protocol.frames import Generate, PairFiles
from localspec.protocol.requests import ChatMessage

_MAX_PAGE_ITEMS = 100


async def create(request: Request) -> Response:
    """Handle POST /v1/responses."""
    body = await read_body(request, ResponsesRequest)
    refuse_unsupported(body)
    with _original_field_names():
        return await respond(
            request,
            _run(request, body),
            ResponsesShape,
            stream=body.stream,
            ping_s=body.sse_ping_interval,
        )


async def _run(request: Request, body: ResponsesRequest) -> AnswerRun:
    with _original_field_names():
        return await _prepare(request, state_of(request), body)


async def _prepare(request: Request, daemon: DaemonState, body: ResponsesRequest) -> AnswerRun:
    if body.store is None:
        body.store = daemon.config.keep_responses
    if body.background and not body.store:
        raise background_not_stored("'keep_responses' in the configuration turns off")
    previous, parsed = await _read_input(request, body)
    turn, pair, requests, empty_answer, expand = await _prepare_chat(
        request, body, parsed, previous
    )
    id_key = secrets.token_hex(12)
    ignored = [*parsed.ignored, *ignored_fields(request)]
    empty_answer.notes.ignored = lambda: ignored
    shape = ResponsesShape(
        empty_answer,
        new_response(body, id_key, pair.name, ignored),
        item_style(body, parsed.tools, id_key),
    )
    if turn:
        empty_answer.choices[0].on_end = turn.store_answer_as(
            shape.response.id, shape.stored_body, always=bool(body.background)
        )
    parts = (daemon.pairs, pair, requests, shape, _under_way(daemon, shape, turn))
    reading = shape.reading if body.return_progress else None
    if not body.background:
        return AnswerRun(*parts, reading=reading)
    return BackgroundRun(
        *parts,
        reading=reading,
        opening=shape.queued,
        recordings=daemon.recordings,
        response=shape,
        expand=expand,
    )


async def _read_input(
    request: Request, body: ResponsesRequest
) -> tuple[StoredResponse | None, ParsedInput]:
    """Return the response that the request continues, if any, and its parsed input."""

    async def read() -> tuple[StoredResponse | None, ParsedInput]:
        previous, referenced = None, {}
        if body.previous_response_id:
            with _as_invalid_field("previous_response_id"):
                previous = await _stored_response(daemon, body.previous_response_id)
        for index, item in enumerate(body.input if isinstance(body.input, list) else []):
            if item.type == "item_reference" and item.id:
                with _as_invalid_field(f"input[{index}].id"):
                    referenced[item.id] = await _stored_item(daemon, item.id)
        return previous, await asyncio.to_thread(parse_input, body, referenced.__getitem__)

    daemon = state_of(request)
    previous, parsed = await while_connected(request.receive, read())
    body.model = body.model or (previous.model if previous else "")
    return previous, parsed


# The chat that a request asks for. The function, if there is one, has to complete the requests.
_PreparedChat = tuple[
    ConversationTurn | None,
    PairFiles,
    list[Generate],
    PendingAnswer,
    Callable[[], Awaitable[None]] | None,
]


async def _prepare_chat(
    request: Request, body: ResponsesRequest, parsed: ParsedInput, previous: StoredResponse | None
) -> _PreparedChat:
    """Prepare the chat. The files of a response in the background are expanded when it is under way.

    If the request repeats a stored response, they are expanded at once, to be compared with its text. That
    takes no time, because they were converted for that response.
    """
    daemon = state_of(request)
    chat = chat_request(body, parsed, replay_messages(previous))
    title = make_title(parsed.messages) if body.store else ""
    new_messages, repeated = parsed.messages, None
    if body.store and previous is None:
        repeated = await _find_repeated(daemon, body)
    pair, note, is_expanded = None, "", not await has_files(chat.messages)
    if not is_expanded and (repeated or not body.background):
        pair = await daemon.resolve_pair(chat.model, request.receive)
        note, is_expanded = await expand_chat(request, chat, pair), True
    if repeated and _continues(new_messages, repeated):
        previous, new_messages = repeated, new_messages[len(repeated.messages) :]
    turn = None
    if body.store:
        model, kind = body.model or daemon.config.pair, kind_of(chat)
        turn = continue_turn(
            daemon.conversations, new_messages, previous, model=model, kind=kind, title=title
        )
    if is_expanded:
        return turn, *await prepare_chat(request, chat, turn, pair, note), None
    without_files = structs.replace(chat, messages=name_files(chat.messages))
    pair, requests, answer = await prepare_chat(request, without_files, turn)

    async def expand() -> None:
        with _original_field_names():
            _, requests[:], expanded = await prepare_chat(detach(request), chat, turn, pair)
        answer.notes.request = expanded.notes.request

    return turn, pair, requests, answer, expand


async def _find_repeated(daemon: DaemonState, body: ResponsesRequest) -> StoredResponse | None:
    """Return the last stored response whose items the request repeats; None if there is none.

    Agents send everything again instead of `previous_response_id`. The ids of the items say which response
    that is.
    """
    for item in reversed(body.input if isinstance(body.input, list) else []):
        with contextlib.suppress(ValueError, NotFound):
            if item.id and (response := kept.ItemReference(item.id).response):
                return await _stored_response(daemon, response)
    return None


def _continues(messages: Sequence[ChatMessage], repeated: StoredResponse) -> bool:
    """Return whether messages begin with all those of a stored response, and go on.

    Otherwise each turn of an agent would become a conversation of its own. Files have to be expanded, as
    they are in stored text.
    """

    def comparable(message: ChatMessage) -> tuple[object, ...]:
        # Reasoning is left out, because clients may omit it.
        calls = [call.get("id") for call in message.tool_calls or []]
        return message.role, stored_text(message), calls, message.tool_call_id

    earlier = replay_messages(repeated)
    pairs = zip(earlier, messages, strict=False)
    is_equal = all(comparable(old) == comparable(new) for old, new in pairs)
    return is_equal and len(messages) > len(earlier)


async def _stored_response(daemon: DaemonState, name: str) -> StoredResponse:
    _check_id(name)
    return await daemon.conversations.get_response(name)


def _check_id(name: str) -> None:
    """Raise NotFound for an id of another protocol, whose answers are stored beside responses."""
    if not name.startswith("resp_"):
        raise NotFound(f"There is no response '{name[:80]}': it was not kept, or was deleted.")


async def _stored_item(daemon: DaemonState, name: str) -> ChatMessage:
    """Return the stored item of this id as a message. Raises NotFound if there is none."""
    with contextlib.suppress(ValueError, IndexError, NotFound):
        item = kept.ItemReference(name)
        stored: StoredResponse | Conversation
        if item.response:
            stored = await _stored_response(daemon, item.response)
        else:
            stored = await daemon.conversations.run(lambda store: store.get(item.conversation))
        return item.select_part(replay_message(stored.messages[item.index]))
    raise NotFound(f"There is no item '{name[:80]}': it was not kept, or was deleted.")


@contextlib.contextmanager
def _as_invalid_field(param: str) -> Iterator[None]:
    """Turn NotFound into an InvalidRequest about the field `param`."""
    try:
        yield
    except NotFound as error:
        message = error.message[:1].lower() + error.message[1:]
        raise InvalidRequest.at(param, f": {message}") from None


# Names of a chat's fields, and the names that this protocol has for them.
_FIELD_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format.json_schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    (".function.", "."),
    ("messages", "input"),
)


@contextlib.contextmanager
def _original_field_names() -> Iterator[None]:
    """Make errors name the fields of this request instead of those of the chat that it becomes."""
    try:
        yield
    except LocalspecError as error:
        if error.param:
            param = error.param
            for chat_name, own_name in _FIELD_NAMES:
                param = param.replace(chat_name, own_name)
            error.message = error.message.replace(f"'{error.param}", f"'{param}")
            error.param = param
        raise


@contextlib.asynccontextmanager
async def _under_way(
    daemon: DaemonState, shape: ResponsesShape, turn: ConversationTurn | None
) -> AsyncIterator[None]:
    # A cancellation must not interrupt the wait for the store, so it is for the inner context alone.
    stored: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if turn:
        stored = turn.under_way(shape.answer.choices[0], shape.response.id, shape.stored_body)
    async with stored, daemon.part(kept.RunningResponses).under_way(shape):
        yield


async def show(request: Request) -> Response:
    """Return a response that is stored, or the part of it that is written so far.

    ?stream=true returns the events of one in the background, from ?starting_after=NUMBER on.
    """
    stream, response = query_flag(request, "stream"), await _response(request)
    if not stream:
        return json_response(response)
    after = request.query_params.get("starting_after")
    return resume(state_of(request).recordings, response.id, after)


async def _response(request: Request) -> ResponseObject:
    daemon, name = state_of(request), request.path_params["name"]
    if running := daemon.part(kept.RunningResponses).get(name):
        return running
    stored = await _stored_response(daemon, name)
    opaque = ENCRYPTED_REASONING in request.query_params.values()
    return kept.load_response(stored.body, stored.messages[-1], opaque=opaque)


async def remove(request: Request) -> Response:
    """Remove a response with its question and answer, and its conversation if nothing else is in it."""
    daemon, name = state_of(request), request.path_params["name"]
    _check_id(name)
    running_responses = daemon.part(kept.RunningResponses)
    if (running := running_responses.get(name)) and running.background:
        await running_responses.cancel(name)
    await while_connected(request.receive, daemon.conversations.wait_until_settled(name))
    conversation = await daemon.conversations.run(lambda store: store.remove_response(name))
    await daemon.recordings.remove(recording_key(name))
    await daemon.forget_states(conversation)
    return json_response(DeletedResponse(name))


async def cancel(request: Request) -> Response:
    """Cancel a response that is being written.

    One in the background that has ended is returned as it is; another one is refused.
    """
    daemon, name = state_of(request), request.path_params["name"]
    if response := await while_connected(
        request.receive, daemon.part(kept.RunningResponses).cancel(name)
    ):
        return json_response(response)
    response = await _response(request)
    if response.status == "cancelled" or response.background:
        return json_response(response)
    raise InvalidRequest(f"The response {name} has ended; there is nothing to cancel.")


async def input_items(request: Request) -> Response:
    """List what the model read, with earlier responses; ?order=asc, ?limit=N and ?after=ID give a page."""
    query, daemon = request.query_params, state_of(request)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest.at("order", "must be 'asc' or 'desc'.")
    limit = query_number(request, "limit", 20, _MAX_PAGE_ITEMS)
    stored = await _stored_response(daemon, request.path_params["name"])
    items = kept.items(stored.conversation, stored.messages[:-1], stored.ids)
    if order == "desc":
        items.reverse()
    if after_id := query.get("after"):
        ids = [item.id for item in items]
        if after_id not in ids:
            raise InvalidRequest.at("after", f": there is no item '{after_id[:80]}'.")
        items = items[ids.index(after_id) + 1 :]
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ItemList(page, first, last, has_more=len(items) > len(page)))


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a request's input."""
    body = await read_body(request, ResponsesRequest)
    refuse_unsupported(body)
    previous, parsed = await _read_input(request, body)
    with _original_field_names():
        chat = chat_request(body, parsed, replay_messages(previous))
        tokens = await prompt_tokens(request, chat)
        return json_response(InputTokens(tokens, localspec=ignored_extension(request)))


ROUTES = (
    ("POST", "/v1/responses", create),
    ("POST", "/v1/responses/input_tokens", input_tokens),
    ("GET", "/v1/responses/{name}/input_items", input_items),
    ("POST", "/v1/responses/{name}/cancel", cancel),
    ("GET", "/v1/responses/{name}", show),
    ("DELETE", "/v1/responses/{name}", remove),
)
PATH_ALIASES = {
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
}
