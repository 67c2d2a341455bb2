"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion import request as translate
from localspec.daemon.completion.answer import Composer, TextComposer
from localspec.daemon.completion.chat import ChatComposer
from localspec.daemon.completion.reply import tools
from localspec.daemon.completion.run import events_of, streamed, whole_answer
from localspec.daemon.history import turn as turns
from localspec.daemon.http.requests import read, unless_gone
from localspec.daemon.state import Context, context
from localspec.protocol.frames import Generate
from localspec.protocol.http import ChatRequest, CompletionRequest, GenerationRequest


async def chat(request: Request) -> Response:
    body = await read(request, ChatRequest)
    daemon = context(request)
    tools.check(body)
    turn = await unless_gone(
        request.receive, turns.begin(daemon.conversations, body, daemon.config.pair)
    )
    template = None
    if translate.uses_tools(body):  # how a call is written is the model's own matter
        template = (
            await daemon.supervisor.loaded.ready(await daemon.pair(body.model, request.receive))
        ).info.chat_template
    wanted = translate.chat(body, template)
    if turn:
        wanted[0].conversation = turn.id
    shape = partial(ChatComposer, parser=partial(translate.parser, body, template))
    return await _respond(request, body, wanted, shape, turn)


async def complete(request: Request) -> Response:
    body = await read(request, CompletionRequest)
    return await _respond(request, body, translate.completion(body), TextComposer)


async def _respond(
    request: Request,
    body: GenerationRequest,
    wanted: list[Generate],
    shape: Callable[..., Composer],
    turn: turns.Turn | None = None,
) -> Response:
    daemon: Context = context(request)
    pair = await daemon.pair(body.model, request.receive)
    composer = shape(pair.name, wanted, n=body.n or 1, note=daemon.supervisor.loaded.note)
    composer.news = partial(daemon.registry.news, pair.name)
    events = events_of(daemon.supervisor, pair, wanted)
    if turn and isinstance(composer, ChatComposer):
        composer.conversation = turn.id
        events = turn.recorded(events, composer, daemon.conversations)
    if body.stream:
        options = body.stream_options
        return streamed(events, composer, usage=bool(options and options.include_usage))
    return await whole_answer(request, events, composer)
