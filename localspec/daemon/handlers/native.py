"""POST /infill and /completion, as llama-server has them."""

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
    body = await read(request, NativeCompletionRequest)
    return await _respond(request, body, llama_server.completion(body))


async def infill(request: Request) -> Response:
    arrival = state_of(request).editors.arrived()
    body = await read(request, InfillRequest)
    # A warm-up takes over from nobody, and a completion waits behind no warm-up.
    editor = None if body.n_predict == 0 else place_of(request, body, arrival)
    return await _respond(request, body, llama_server.infill(body), "fim", editor)


async def _respond(
    request: Request,
    body: NativeRequest,
    wanted: list[Generate],
    role: Role = "chat",
    editor: Place | None = None,
) -> Response:
    daemon = state_of(request)
    residents = daemon.supervisor.residents
    pair = await _pair(request, body.model, role, strict=OUR_CLIENT in request.headers)
    shape = llama_server.LlamaServerShape(
        Answer(
            pair.name,
            wanted,
            n=body.n or 1,
            ended=figures(daemon.conversations, body, pair.name),
        ),
        body,
        loaded=lambda: residents.info(pair.name),
        note=residents.note,
        ignored=ignored(request),
    )
    during = nullcontext() if editor is None else daemon.editors.typing(editor)
    run = Run(daemon.supervisor, pair, wanted, shape, during, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def _pair(request: Request, name: str, role: Role, *, strict: bool) -> PairFiles:
    """llama-server serves one model and ignores what it is called; plug-ins send any name.

    `strict`: it was our own client, where a name is a wish.
    """
    daemon = state_of(request)
    try:
        return await daemon.pair(name, request.receive, role)
    except ModelNotFound:
        if strict:
            raise
        return await daemon.pair("", request.receive, role)
