"""Handle POST /infill and /completion in llama-server's format."""

from __future__ import annotations

from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion import llama_server
from localspec.daemon.completion.answer import Answer, Run, waiting
from localspec.daemon.completion.takeover import Place, place_of
from localspec.daemon.history.turn import figures
from localspec.daemon.http.requests import OUR_CLIENT, ignored, read
from localspec.daemon.pairs.names import Role
from localspec.daemon.state import state_of
from localspec.errors import ModelNotFound
from localspec.protocol.frames import Generate, PairFiles
from localspec.protocol.requests import InfillRequest, NativeCompletionRequest, NativeRequest


async def complete(request: Request) -> Response:
    """Handle POST /completion."""
    body = await read(request, NativeCompletionRequest)
    return await _respond(request, body, llama_server.completion(body))


async def infill(request: Request) -> Response:
    """Handle POST /infill."""
    arrival = state_of(request).editors.arrived()
    body = await read(request, InfillRequest)
    # A warm-up request (n_predict 0) must not cancel the editor's completion under way.
    editor = None if body.n_predict == 0 else place_of(request, body, arrival)
    return await _respond(request, body, llama_server.infill(body), "fim", editor)


async def _respond(
    request: Request,
    body: NativeRequest,
    requests: list[Generate],
    role: Role = "chat",
    editor: Place | None = None,
) -> Response:
    daemon = state_of(request)
    residents = daemon.supervisor.residents
    pair = await _pair(request, body.model, role, strict=OUR_CLIENT in request.headers)
    shape = llama_server.LlamaServerShape(
        Answer(
            pair.name,
            requests,
            n=body.n or 1,
            ended=figures(daemon.conversations, body, pair.name),
        ),
        body,
        loaded=lambda: residents.info(pair.name),
        note=residents.note,
        ignored=ignored(request),
    )
    context = nullcontext() if editor is None else daemon.editors.typing(editor)
    run = Run(daemon.supervisor, pair, requests, shape, context, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def _pair(request: Request, name: str, role: Role, *, strict: bool) -> PairFiles:
    """Return the pair called `name`, or the default pair if there is none of that name.

    llama-server serves one model and ignores the name in a request, so plug-ins send any name. `strict`
    (a request of our own client) raises ModelNotFound instead.
    """
    daemon = state_of(request)
    try:
        return await daemon.pair(name, request.receive, role)
    except ModelNotFound:
        if strict:
            raise
        return await daemon.pair("", request.receive, role)
