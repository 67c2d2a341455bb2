"""POST /infill and /completion, as llama-server has them."""

from __future__ import annotations

from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion import llama_server
from localspec.daemon.completion.answer import Answer
from localspec.daemon.completion.run import Run
from localspec.daemon.completion.takeover import Place
from localspec.daemon.http.connection import UNIX
from localspec.daemon.http.requests import OUR_CLIENT, read
from localspec.daemon.state import state_of
from localspec.errors import ModelNotFound
from localspec.protocol.frames import Generate, PairFiles
from localspec.protocol.native import InfillRequest, NativeCompletionRequest, NativeRequest


async def complete(request: Request) -> Response:
    body = await read(request, NativeCompletionRequest)
    return await _respond(request, body, llama_server.completion(body))


async def infill(request: Request) -> Response:
    body = await read(request, InfillRequest)
    # A warm-up takes over from nobody, and a completion waits behind no warm-up.
    editor = None if body.n_predict == 0 or (body.n or 1) > 1 else _place(request, body)
    return await _respond(request, body, llama_server.infill(body), editor)


def _place(request: Request, body: InfillRequest) -> Place:
    """Who waits for this completion, and where: a newer one of the same makes it worthless.

    On the Unix socket an editor is the process at the other end, and over TCP whoever `user` names.
    Else it is a program on a host, which may run twice: there only the same text is the same editor.
    """
    client = request.client
    text = hash((body.input_prefix, body.input_suffix))
    slot = body.id_slot if body.id_slot >= 0 else hash(body.input_prefix)
    if client is not None and client.host == UNIX:
        return Place((UNIX, client.port, body.user, slot), text, sure=True)
    if body.user:
        return Place((body.user, slot), text, sure=True)
    host = client.host if client else None
    program = request.headers.get("user-agent")
    return Place((host, program, body.id_slot, text), text, sure=False)


async def _respond(
    request: Request, body: NativeRequest, wanted: list[Generate], editor: Place | None = None
) -> Response:
    daemon = state_of(request)
    loaded = daemon.supervisor.loaded
    pair = await _pair(request, body.model, strict=OUR_CLIENT in request.headers)
    shape = llama_server.LlamaServerShape(
        Answer(pair.name, wanted, n=body.n or 1),
        body,
        n_ctx=lambda: loaded.info.n_ctx if loaded.info else 0,
        note=loaded.note,
    )
    during = nullcontext() if editor is None else daemon.editors.typing(editor)
    return await Run(daemon.supervisor, pair, wanted, shape, during).respond(request, body.stream)


async def _pair(request: Request, name: str, *, strict: bool) -> PairFiles:
    """llama-server serves one model and ignores what it is called; plug-ins send any name.

    `strict`: it was our own client, where a name is a wish.
    """
    daemon = state_of(request)
    try:
        return await daemon.pair(name, request.receive)
    except ModelNotFound:
        if strict:
            raise
        return await daemon.pair("", request.receive)
