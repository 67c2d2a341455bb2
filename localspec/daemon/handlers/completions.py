"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon import conversations, translate
from localspec.daemon.answers import ChatComposer, Composer, TextComposer
from localspec.daemon.context import Context, context, read
from localspec.daemon.generation import EventStream, events_of, whole_answer
from localspec.protocol.frames import Generate
from localspec.protocol.http import ChatRequest, CompletionRequest, GenerationRequest


async def chat(request: Request) -> Response:
    body = await read(request, ChatRequest)
    daemon = context(request)
    turn = await conversations.begin(daemon.conversations, body, daemon.config.pair)
    return await _respond(request, body, translate.chat(body), ChatComposer, turn)


async def complete(request: Request) -> Response:
    body = await read(request, CompletionRequest)
    return await _respond(request, body, translate.completion(body), TextComposer)


async def _respond(
    request: Request,
    body: GenerationRequest,
    wanted: list[Generate],
    shape: type[Composer],
    turn: conversations.Turn | None = None,
) -> Response:
    daemon: Context = context(request)
    pair = await daemon.pair(body.model)
    composer = shape(pair.name, wanted, n=body.n or 1, note=daemon.supervisor.note)
    events = events_of(daemon.supervisor, pair, wanted)
    if turn:
        composer.conversation = turn.id
        events = turn.recorded(events, daemon.conversations)
    if body.stream:
        options = body.stream_options
        return EventStream(events, composer, usage=bool(options and options.include_usage))
    return await whole_answer(request, events, composer)
