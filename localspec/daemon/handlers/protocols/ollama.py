"""/api/…, Ollama's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localspec.daemon.completion.answer import Answer, Run
from localspec.daemon.completion.ollama import models
from localspec.daemon.completion.ollama import request as asked
from localspec.daemon.completion.ollama.answer import OllamaShape, line
from localspec.daemon.completion.reply import tools
from localspec.daemon.completion.request import completion_frames
from localspec.daemon.handlers import pulls
from localspec.daemon.handlers.completions import ready
from localspec.daemon.handlers.embeddings import calculated, numbers
from localspec.daemon.http.requests import answer, ignored, read, unheeded, unless_gone
from localspec.daemon.http.sse import Emit, LineStream
from localspec.daemon.pairs import views
from localspec.daemon.pairs.names import full_name, names_files
from localspec.daemon.state import State, state_of
from localspec.errors import LocalspecError, ModelNotFound, NotFound, NotOffered
from localspec.protocol.answers import Unheeded
from localspec.protocol.clients.ollama import (
    Asked,
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaModels,
    OllamaProgress,
)
from localspec.protocol.frames import Embed, Generate, PairFiles
from localspec.protocol.pairs import PairView, PullRequest
from localspec.protocol.requests import ChatRequest

if TYPE_CHECKING:
    from localspec.registry.pulls.running import Pull
    from localspec.registry.pulls.state import PullState

Found = TypeVar("Found")

_ADD = "to make a pair of files on this machine: localspec add NAME TARGET.gguf [DRAFT.gguf]"
_INSTEAD = {
    "create": _ADD,
    "copy": _ADD,
    "push": "pairs of models stay on this machine",
    "blobs": _ADD,
}

# ---------------------------------------------------------------------------- answers


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    body = await read(request, OllamaChatRequest)
    pair = await _pair(request, body.model)
    if not body.messages:
        return await _kept(request, body, pair, chat=True)
    return await _chat(request, body, asked.chat(body, pair.name), chat=True)


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    body = await read(request, OllamaGenerateRequest)
    pair = await _pair(request, body.model)
    if not body.prompt and not body.suffix:
        return await _kept(request, body, pair, chat=False)
    ours = asked.generate(body, pair.name)
    if isinstance(ours, ChatRequest):
        return await _chat(request, body, ours, chat=False)
    wanted = completion_frames(ours)
    return await _respond(request, body, pair, wanted, Answer(pair.name, wanted, n=1), chat=False)


async def _chat(request: Request, body: Asked, ours: ChatRequest, *, chat: bool) -> Response:
    if ours.tools:
        tools.check(ours)
    pair, wanted, answered = await ready(request, ours, None)
    return await _respond(request, body, pair, wanted, answered, chat=chat)


async def _respond(
    request: Request,
    body: Asked,
    pair: PairFiles,
    wanted: list[Generate],
    answered: Answer,
    *,
    chat: bool,
) -> Response:
    daemon = state_of(request)
    residents = daemon.supervisor.residents

    def without_effect() -> list[str]:
        info = residents.info(pair.name)
        return [*ignored(request), *asked.ignored(body, info.n_ctx if info else None)]

    shape = OllamaShape(
        answered,
        body.model or models.tagged(pair.name),
        chat=chat,
        note=residents.note,
        ignored=without_effect,
    )
    during = _unloading(daemon, pair.name) if asked.unloads(body) else nullcontext()
    run = Run(daemon.supervisor, pair, wanted, shape, during, events=LineStream)
    return await run.respond(request, body.stream)


@asynccontextmanager
async def _unloading(daemon: State, pair: str) -> AsyncIterator[None]:
    """Gives the pair's memory back once it has answered, unless somebody else is being answered."""
    yield
    await daemon.rest(pair)


async def _kept(request: Request, body: Asked, pair: PairFiles, *, chat: bool) -> Response:
    """Loads the pair, or unloads it, and asks it nothing."""
    daemon = state_of(request)
    if asked.unloads(body):
        await daemon.rest(pair.name)
    else:
        await unless_gone(request.receive, daemon.supervisor.ready(pair))
    reason = "unload" if asked.unloads(body) else "load"
    return answer(line(body.model, chat=chat, done=True, done_reason=reason))


# ---------------------------------------------------------------------------- embeddings


async def embed(request: Request) -> Response:
    """POST /api/embed."""
    body, began = await read(request, OllamaEmbedRequest), time.monotonic_ns()
    ignored(request).extend(asked.kept_alive(body))
    wanted = [body.input] if isinstance(body.input, str) else body.input or []
    frame = Embed(0, [*wanted], body.truncate, body.dimensions or 0)
    name, load, found = await _embedded(request, body, frame)

    def shaped() -> Response:
        vectors, tokens = [numbers(each) for each in found["vectors"]], sum(found["tokens"])
        spent = time.monotonic_ns() - began
        told = unheeded(request)
        return answer(OllamaEmbeddings(body.model or name, vectors, spent, load, tokens, told))

    return await asyncio.to_thread(shaped)


async def embed_one(request: Request) -> Response:
    """POST /api/embeddings."""
    body = await read(request, OllamaEmbeddingsRequest)
    ignored(request).extend(asked.kept_alive(body))
    frame = Embed(0, [body.prompt] if body.prompt else [], truncate=True, normalize=-1)
    _, _, found = await _embedded(request, body, frame)
    vector = [each for vector in found["vectors"] for each in numbers(vector)]
    return answer(OllamaEmbedding(vector, unheeded(request)))


async def _embedded(
    request: Request, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, frame: Embed
) -> tuple[str, int, dict[str, Any]]:
    """Who has done it, the nanoseconds of a load, and {"vectors", "tokens"}. Without any input the model is
    loaded, or unloaded.
    """
    daemon, began, nothing = (
        state_of(request),
        time.monotonic_ns(),
        dict[str, Any](vectors=[], tokens=[]),
    )
    pair = await _found(body.model, lambda each: daemon.pair(each, request.receive, "embed"))
    unloads = asked.unloads(body)
    if not frame.inputs and unloads:
        await daemon.rest(pair.name)
        return models.tagged(pair.name), 0, nothing
    await unless_gone(request.receive, daemon.supervisor.ready(pair))
    load = time.monotonic_ns() - began
    async with _unloading(daemon, pair.name) if unloads else nullcontext():
        found = await calculated(request, pair, frame) if frame.inputs else nothing
    return models.tagged(pair.name), load, found


# ---------------------------------------------------------------------------- models


async def tags(request: Request) -> Response:
    """GET /api/tags: the configured pair first, then all that are here."""
    daemon = state_of(request)

    def look() -> list[PairView]:
        here = [each.name for each in views.listing(daemon.registry, everything=False).pairs]
        found = []
        for name in dict.fromkeys([full_name("", daemon.config), *here]):
            with suppress(LocalspecError):  # `localspec list` says what is wrong with it
                found.append(views.details(daemon.registry, name, 0, daemon.config))
        return found

    return answer(OllamaModels([models.listed(each) for each in await asyncio.to_thread(look)]))


async def show(request: Request) -> Response:
    """POST /api/show."""
    body = await read(request, OllamaModelRequest)
    view = await _view(request, body.model or body.name)
    daemon = state_of(request)
    if info := daemon.supervisor.residents.info(view.name):
        found = models.shown(view, info.n_ctx, info.sampling_defaults)
    else:
        found = models.shown(view, view.fit.context if view.fit else view.context, {})
    found.localspec = unheeded(request)
    return answer(found)


async def ps(request: Request) -> Response:
    """GET /api/ps: the pairs that are loaded, the one that was asked last ahead."""
    found = []
    for pair in state_of(request).supervisor.residents.loaded:
        view = await _view(request, pair.name)
        found.append(models.running(view, pair.status()))
    return answer(OllamaModels(found))


async def pull(request: Request) -> Response:
    """POST /api/pull: of a pair of the catalogue or a repository of the hub, as `localspec pull`."""
    body = await read(request, OllamaModelRequest)
    begun = await pulls.begin(request, PullRequest(models.untagged(body.model or body.name)))
    if body.stream:
        return LineStream(partial(_pulled, begun, unheeded(request)), done=False)

    async def unseen(*_lines: object) -> None:
        pass

    await unless_gone(request.receive, _pulled(begun, UNSET, unseen))
    return answer(OllamaProgress("success", localspec=unheeded(request)))


async def _pulled(pull: Pull, told: Unheeded | UnsetType, emit: Emit) -> None:
    async def tell(state: PullState) -> None:
        lines = models.progress(state)
        if lines and lines[-1].status == "success":
            lines[-1].localspec = told
        await emit(*lines)

    await pulls.states(pull, tell)
    if pull.error:
        raise pull.error


async def delete(request: Request) -> Response:
    """DELETE /api/delete."""
    body = await read(request, OllamaModelRequest)
    daemon = state_of(request)
    named = models.untagged(body.model or body.name)
    name = await asyncio.to_thread(daemon.registry.removable, named)
    await daemon.rest(name)
    await asyncio.to_thread(daemon.registry.remove, name)
    return Response()


async def version(_request: Request) -> Response:
    """GET /api/version."""
    return answer(models.VERSION)


async def here(_request: Request) -> Response:
    """GET /: what clients ask to see whether anybody is there."""
    return PlainTextResponse("localspec is running")


async def not_offered(request: Request) -> Response:
    """What Ollama has below /api and localspec has not.

    Raises:
        NotOffered: always, with what there is instead. NotFound: Ollama has it neither.
    """
    name = request.path_params["name"].partition("/")[0]
    if name not in _INSTEAD:
        raise NotFound(f"{request.method} {request.scope['path']}: Not Found.")
    raise NotOffered(f"/api/{name} is not supported; {_INSTEAD[name]}")


async def _pair(request: Request, name: str) -> PairFiles:
    return await _found(name, lambda each: state_of(request).pair(each, request.receive))


async def _view(request: Request, name: str) -> PairView:
    daemon = state_of(request)

    async def look(name: str) -> PairView:
        return await asyncio.to_thread(views.details, daemon.registry, name, 0, daemon.config)

    return await _found(name or full_name("", daemon.config), look)


async def _found(name: str, look: Callable[[str], Awaitable[Found]]) -> Found:
    """What `look` finds by a pair's name, with a tag or without, else by that of a model of Ollama's own.

    Raises:
        ModelNotFound: as `look`.
    """
    plain = models.untagged(name)
    try:
        return await look(plain)
    except ModelNotFound:
        if not plain or names_files(plain):
            raise
        with suppress(ModelNotFound):
            return await look(models.tagged(plain))
        raise
