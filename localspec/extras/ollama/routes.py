"""Handle Ollama's endpoints below /api."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localspec import extras
from localspec.daemon.completion.answer import AnswerRun, PendingAnswer, respond
from localspec.daemon.completion.request import completion_frames
from localspec.daemon.handlers import models as pulls
from localspec.daemon.handlers.completions import answer_notes, prepare_chat
from localspec.daemon.http.errors import add_shape
from localspec.daemon.http.requests import (
    ignored_extension,
    ignored_fields,
    json_response,
    read_body,
    while_connected,
)
from localspec.daemon.http.sse import Emit, LineStream
from localspec.daemon.pairs import views
from localspec.daemon.pairs.names import Role, resolve_default
from localspec.daemon.state import DaemonState, state_of
from localspec.errors import (
    LocalspecError,
    ModelNotFound,
    NotFound,
    NotOffered,
    recognizable_message,
)
from localspec.extras.ollama import answer as shapes
from localspec.extras.ollama import request as translation
from localspec.extras.ollama.answer import OllamaShape, line
from localspec.extras.ollama.wire import (
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaModels,
    OllamaProgress,
    OllamaRequest,
)
from localspec.protocol.answers import Unheeded
from localspec.protocol.frames import Embed, PairFiles
from localspec.protocol.pairs import PairView, PullRequest
from localspec.protocol.requests import ChatRequest, CompletionRequest
from localspec.registry.pulls.messages import PullState
from localspec.registry.pulls.running import Pull
from localspec.registry.registry import is_file_name

Found = TypeVar("Found")

_ADD_HINT = "to make a pair of files on this machine: localspec add NAME TARGET.gguf [DRAFT.gguf]"
_ALTERNATIVES = {
    "create": _ADD_HINT,
    "copy": _ADD_HINT,
    "push": "pairs of models stay on this machine",
    "blobs": _ADD_HINT,
}


async def chat(request: Request) -> Response:
    """Handle POST /api/chat."""
    body = await read_body(request, OllamaChatRequest)
    if not body.messages:
        return await _load_or_unload(request, body, chat=True)
    return await respond(request, _run(request, body), OllamaShape, stream=body.stream)


async def generate(request: Request) -> Response:
    """Handle POST /api/generate."""
    body = await read_body(request, OllamaGenerateRequest)
    if not body.prompt and not body.suffix:
        return await _load_or_unload(request, body, chat=False)
    return await respond(request, _run(request, body), OllamaShape, stream=body.stream)


async def _run(request: Request, body: OllamaChatRequest | OllamaGenerateRequest) -> AnswerRun:
    daemon, pair = state_of(request), await _pair(request, body.model)
    is_chat = isinstance(body, OllamaChatRequest)
    # In a thread, because the pictures in the messages are decoded.
    translate: Callable[..., ChatRequest | CompletionRequest] = (
        translation.chat if is_chat else translation.generate
    )
    translated = await asyncio.to_thread(translate, body, pair.name)
    if isinstance(translated, ChatRequest):
        _, requests, answer = await prepare_chat(request, translated, None, pair)
    else:
        requests = completion_frames(translated)
        answer = PendingAnswer(pair.name, requests, n=1, notes=answer_notes(request, pair))

    def list_ignored() -> list[str]:
        info = daemon.pairs.info(pair.name)
        own = translation.ignored_fields(body, info.n_ctx if info else None)
        return [*ignored_fields(request), *own]

    answer.notes.news, answer.notes.ignored = None, list_ignored
    shape = OllamaShape(answer, body.model or shapes.tagged(pair.name), chat=is_chat)
    context = _unloading(daemon, pair.name) if translation.unloads(body) else nullcontext()
    return AnswerRun(daemon.pairs, pair, requests, shape, context)


@asynccontextmanager
async def _unloading(daemon: DaemonState, pair: str) -> AsyncIterator[None]:
    """Unload the pair after its answer, unless another request is being answered."""
    yield
    await daemon.unload_if_idle(pair)


async def _load_or_unload(request: Request, body: OllamaRequest, *, chat: bool) -> Response:
    """Load the pair, or unload it, without asking it anything."""
    daemon, pair, reason = state_of(request), await _pair(request, body.model), "load"
    if translation.unloads(body):
        reason = "unload"
        await daemon.unload_if_idle(pair.name)
    else:
        await while_connected(request.receive, daemon.pairs.ready(pair))
    return json_response(line(body.model, chat=chat, done=True, done_reason=reason))


async def embed(request: Request) -> Response:
    """Handle POST /api/embed."""
    body, started_ns = await read_body(request, OllamaEmbedRequest), time.monotonic_ns()
    ignored_fields(request).extend(translation.ignored_keep_alive(body))
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    frame = Embed(0, [*texts], body.truncate, body.dimensions or 0)
    decode_vector = _embedding_routes().decode_vector
    name, load_ns, result = await _compute_embeddings(request, body, frame)

    def encode() -> Response:
        vectors, tokens = [*map(decode_vector, result["vectors"])], sum(result["tokens"])
        total_ns, extra = time.monotonic_ns() - started_ns, ignored_extension(request)
        shown = OllamaEmbeddings(body.model or name, vectors, total_ns, load_ns, tokens, extra)
        return json_response(shown)

    return await asyncio.to_thread(encode)


async def embed_one(request: Request) -> Response:
    """Handle POST /api/embeddings."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    ignored_fields(request).extend(translation.ignored_keep_alive(body))
    frame = Embed(0, [body.prompt] if body.prompt else [], truncate=True, normalize=-1)
    _, _, result = await _compute_embeddings(request, body, frame)
    decode_vector = _embedding_routes().decode_vector
    vector = [value for vector in result["vectors"] for value in decode_vector(vector)]
    return json_response(OllamaEmbedding(vector, ignored_extension(request)))


def _embedding_routes() -> ModuleType:
    """Return the routes of the extra that computes embeddings. Raises NotOffered without it."""
    routes = extras.load("embeddings", "routes")
    if routes is None:
        raise NotOffered("This installation of localspec lacks the extra 'embeddings'.")
    return routes


async def _compute_embeddings(
    request: Request, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, frame: Embed
) -> tuple[str, int, dict[str, Any]]:
    """Return the pair's name, its load time in nanoseconds, and {"vectors", "tokens"}.

    A request without any input loads the model, or unloads it.
    """
    daemon, started_ns = state_of(request), time.monotonic_ns()
    result = dict[str, Any](vectors=[], tokens=[])
    pair = await _pair(request, body.model, "embed")
    unloads = translation.unloads(body)
    if not frame.inputs and unloads:
        await daemon.unload_if_idle(pair.name)
        return shapes.tagged(pair.name), 0, result
    await while_connected(request.receive, daemon.pairs.ready(pair))
    load_ns = time.monotonic_ns() - started_ns
    async with _unloading(daemon, pair.name) if unloads else nullcontext():
        if frame.inputs:
            result = await _embedding_routes().compute(request, pair, frame)
    return shapes.tagged(pair.name), load_ns, result


async def tags(request: Request) -> Response:
    """Handle GET /api/tags: list the configured pair first, then all others on this machine."""
    daemon = state_of(request)

    def read_views() -> list[PairView]:
        listing = views.list_pairs(daemon.registry, False, daemon.config)
        pair_names = [resolve_default("", daemon.config), *(pair.name for pair in listing.pairs)]
        pair_views = []
        for name in dict.fromkeys(pair_names):
            with suppress(LocalspecError):  # `localspec list` reports what is wrong with the pair.
                pair_views.append(views.pair_details(daemon.registry, name, 0, daemon.config))
        return pair_views

    pair_views = await asyncio.to_thread(read_views)
    return json_response(OllamaModels([shapes.list_entry(view) for view in pair_views]))


async def show(request: Request) -> Response:
    """Handle POST /api/show."""
    body = await read_body(request, OllamaModelRequest)
    view = await _view(request, body.model or body.name)
    n_ctx, defaults = view.fit.context if view.fit else view.context, {}
    if info := state_of(request).pairs.info(view.name):
        n_ctx, defaults = info.n_ctx, info.sampling_defaults
    model = shapes.describe_model(view, n_ctx, defaults)
    model.localspec = ignored_extension(request)
    return json_response(model)


async def ps(request: Request) -> Response:
    """Handle GET /api/ps: list the loaded pairs, the one that was used last first."""
    running_models = []
    for pair in state_of(request).pairs.loaded:
        view = await _view(request, pair.name)
        running_models.append(shapes.running_entry(view, pair.status()))
    return json_response(OllamaModels(running_models))


async def pull(request: Request) -> Response:
    """Handle POST /api/pull for a pair of the catalogue or a repository of the hub."""
    body = await read_body(request, OllamaModelRequest)
    name = shapes.untagged(body.model or body.name)
    running_pull = await pulls.begin_pull(request, PullRequest(name))
    if body.stream:
        report = partial(_report_pull, running_pull, ignored_extension(request))
        return LineStream(report, done=False)

    async def discard(*_lines: object) -> None:
        pass

    await while_connected(request.receive, _report_pull(running_pull, UNSET, discard))
    return json_response(OllamaProgress("success", localspec=ignored_extension(request)))


async def _report_pull(pull: Pull, ignored_extra: Unheeded | UnsetType, emit: Emit) -> None:
    async def emit_progress(state: PullState) -> None:
        lines = shapes.progress_lines(state)
        if lines and lines[-1].status == "success":
            lines[-1].localspec = ignored_extra
        await emit(*lines)

    await pulls.report_states(pull, emit_progress)
    if pull.error:
        raise pull.error


async def delete(request: Request) -> Response:
    """Handle DELETE /api/delete."""
    body = await read_body(request, OllamaModelRequest)
    daemon, requested_name = state_of(request), shapes.untagged(body.model or body.name)
    name = await asyncio.to_thread(daemon.registry.check_removable, requested_name)
    await daemon.unload_if_idle(name)
    await asyncio.to_thread(daemon.registry.remove, name)
    return Response()


async def version(_request: Request) -> Response:
    """Handle GET /api/version."""
    return json_response(shapes.VERSION)


async def alive(_request: Request) -> Response:
    """Handle GET /, which clients use to see whether the server is running."""
    return PlainTextResponse("localspec is running")


async def not_offered(request: Request) -> Response:
    """Refuse an endpoint that Ollama has below /api and localspec has not, and name an alternative."""
    name = request.path_params["name"].partition("/")[0]
    if name not in _ALTERNATIVES:
        raise NotFound(f"{request.method} {request.scope['path']}: Not Found.")
    raise NotOffered(f"/api/{name} is not supported; {_ALTERNATIVES[name]}")


async def _pair(request: Request, name: str, role: Role = "chat") -> PairFiles:
    resolve = state_of(request).resolve_pair
    return await _look_up(name, lambda candidate: resolve(candidate, request.receive, role))


async def _view(request: Request, name: str) -> PairView:
    daemon = state_of(request)

    async def read_details(name: str) -> PairView:
        return await asyncio.to_thread(views.pair_details, daemon.registry, name, 0, daemon.config)

    return await _look_up(name or resolve_default("", daemon.config), read_details)


async def _look_up(name: str, find: Callable[[str], Awaitable[Found]]) -> Found:
    """Look up a pair by its name without a tag, then by that of a model of Ollama's own."""
    untagged = shapes.untagged(name)
    try:
        return await find(untagged)
    except ModelNotFound:
        if not untagged or is_file_name(untagged):
            raise
        with suppress(ModelNotFound):
            return await find(shapes.tagged(untagged))
        raise


ROUTES = (
    ("GET", "/", alive),
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("GET", "/api/tags", tags),
    ("POST", "/api/show", show),
    ("GET", "/api/ps", ps),
    ("GET", "/api/version", version),
    ("POST", "/api/pull", pull),
    ("DELETE", "/api/delete", delete),
    ("POST", "/api/embed", embed),
    ("POST", "/api/embeddings", embed_one),
    ("POST", "/api/{name}", not_offered),
)
PATH_ALIASES: dict[str, str] = {}
add_shape(
    lambda scope: scope["path"].startswith("/api/"),
    lambda error: (OllamaError(recognizable_message(error)), {}),
)
