"""The table of endpoints, and the ASGI application made from it."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from localspec.daemon.http import errors
from localspec.daemon.http.requests import ClientGone, PlainPath, RequestId, SameVersion
from localspec.daemon.http.tcp import TcpAuthMiddleware
from localspec.daemon.state import State
from localspec.errors import LocalspecError
from localspec.protocol.reading import BadBody

# Method, path, and the handler function in handlers/.
ROUTES = (
    ("POST", "/v1/chat/completions", "completions.chat"),
    ("POST", "/v1/completions", "completions.complete"),
    ("POST", "/v1/messages", "protocols.messages.create"),
    ("POST", "/v1/messages/count_tokens", "protocols.messages.count_tokens"),
    ("POST", "/v1/responses", "protocols.responses.create"),
    ("POST", "/v1/responses/input_tokens", "protocols.responses.input_tokens"),
    ("GET", "/v1/responses/{name}/input_items", "protocols.responses.input_items"),
    ("POST", "/v1/responses/{name}/cancel", "protocols.responses.cancel"),
    ("GET", "/v1/responses/{name}", "protocols.responses.show"),
    ("DELETE", "/v1/responses/{name}", "protocols.responses.remove"),
    ("GET", "/v1/models", "models.models"),
    ("GET", "/v1/models/{name}", "models.model"),
    ("POST", "/infill", "native.infill"),
    ("POST", "/completion", "native.complete"),
    ("GET", "/health", "models.health"),
    ("GET", "/props", "models.props"),
    ("GET", "/metrics", "metrics.show"),
    ("GET", "/slots", "models.slots"),
    ("POST", "/slots/{name}", "models.slot_action"),
    ("GET", "/openapi.yaml", "description.openapi"),
    ("POST", "/tokenize", "tokens.tokenize"),
    ("POST", "/detokenize", "tokens.detokenize"),
    ("POST", "/apply-template", "tokens.apply_template"),
    ("POST", "/v1/embeddings", "embeddings.embed"),
    ("POST", "/embedding", "embeddings.native"),
    ("POST", "/v1/rerank", "embeddings.rerank"),
    ("GET", "/", "protocols.ollama.here"),
    ("POST", "/api/chat", "protocols.ollama.chat"),
    ("POST", "/api/generate", "protocols.ollama.generate"),
    ("GET", "/api/tags", "protocols.ollama.tags"),
    ("POST", "/api/show", "protocols.ollama.show"),
    ("GET", "/api/ps", "protocols.ollama.ps"),
    ("GET", "/api/version", "protocols.ollama.version"),
    ("POST", "/api/pull", "protocols.ollama.pull"),
    ("DELETE", "/api/delete", "protocols.ollama.delete"),
    ("POST", "/api/embed", "protocols.ollama.embed"),
    ("POST", "/api/embeddings", "protocols.ollama.embed_one"),
    ("POST", "/api/{name}", "protocols.ollama.not_offered"),
    ("POST", "/chat/completions/input_tokens", "tokens.count"),
    ("POST", "/v1/chat/completions/input_tokens", "tokens.count"),
    ("GET", "/localspec/status", "control.status"),
    ("POST", "/localspec/shutdown", "control.shutdown"),
    ("POST", "/localspec/reset", "control.reset"),
    ("POST", "/localspec/config", "control.configure"),
    ("POST", "/localspec/load", "control.load"),
    ("POST", "/localspec/unload", "control.unload"),
    ("GET", "/localspec/pairs", "pairs.listed"),
    ("POST", "/localspec/pairs", "pairs.add"),
    ("POST", "/localspec/upstreams", "pairs.add_upstream"),
    ("GET", "/localspec/pairs/{name}", "pairs.show"),
    ("DELETE", "/localspec/pairs/{name}", "pairs.remove"),
    ("POST", "/localspec/pairs/{name}/verify", "pairs.verify"),
    ("POST", "/localspec/gc", "pairs.collect"),
    ("POST", "/localspec/drafts", "pairs.drafts"),
    ("POST", "/localspec/disk", "pairs.on_disk"),
    ("GET", "/localspec/conversations", "conversations.listed"),
    ("DELETE", "/localspec/conversations", "conversations.remove_all"),
    ("GET", "/localspec/conversations/{name}", "conversations.show"),
    ("DELETE", "/localspec/conversations/{name}", "conversations.remove"),
    ("POST", "/localspec/conversations/{name}/undo", "conversations.undo"),
    ("GET", "/localspec/statistics", "conversations.statistics"),
    ("GET", "/localspec/pulls", "pulls.listed"),
    ("POST", "/localspec/pulls", "pulls.start"),
    ("GET", "/localspec/pulls/{name}/events", "pulls.events"),
    ("GET", "/localspec/pulls/{name}", "pulls.state"),
    ("DELETE", "/localspec/pulls/{name}", "pulls.cancel"),
)


def handler(qualified_name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the function in handlers/ that a row of ROUTES names."""
    module, _, name = qualified_name.rpartition(".")
    function = getattr(importlib.import_module(f"localspec.daemon.handlers.{module}"), name)
    return cast(Callable[[Request], Awaitable[Response]], function)


def _route(method: str, path: str, name: str) -> Route:
    # A name may contain slashes or be empty, so that the handler can report that it does not exist.
    return Route(path.replace("{name}", "{name:path}"), handler(name), methods=[method])


# Other paths of some clients and of llama-server for the same endpoints.
ALSO = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/embeddings": "/embedding",
    "/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/health": "/health",
}
_ROUTES = [_route(*row) for row in ROUTES]
_ROUTES += [
    _route(method, alias, name)
    for alias, original in ALSO.items()
    for method, path, name in ROUTES
    if path == original
]


# Paths without a parameter.
_FIXED_PATHS = frozenset(route.path for route in _ROUTES if "{" not in route.path) - {"/"}


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Handle an error of Starlette's, and answer OPTIONS with the methods of the path."""
    assert isinstance(error, HTTPException)
    all_routes = request.method == "OPTIONS" and request.scope["path"] == "*"
    methods = {
        method
        for route in _ROUTES
        if all_routes or route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    if methods:
        allow = {"allow": ", ".join(sorted({*methods, "OPTIONS"}))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        error.headers = {**(error.headers or {}), **allow}
    return await errors.on_http(request, error)


def application(state: State) -> ASGIApp:
    app = Starlette(
        routes=_ROUTES,
        exception_handlers={
            LocalspecError: errors.on_ours,
            BadBody: errors.on_body,
            ClientGone: errors.on_gone,
            HTTPException: _on_http_error,
        },
        middleware=[
            Middleware(RequestId),
            Middleware(errors.LastResort),
            Middleware(TcpAuthMiddleware, lambda: state.tcp),
            Middleware(SameVersion),
            Middleware(PlainPath, _FIXED_PATHS),
        ],
    )
    # A redirect would have no body, and use an untrusted Host header.
    app.router.redirect_slashes = False
    app.state.daemon = state
    return app
