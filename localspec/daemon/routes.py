"""The table of endpoints, and the ASGI application made from it."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import cast

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from localspec import extras
from localspec.daemon.http import errors
from localspec.daemon.http.requests import (
    ClientGone,
    PathMiddleware,
    RequestIdMiddleware,
    VersionMiddleware,
)
from localspec.daemon.http.tcp import TcpAuthMiddleware
from localspec.daemon.state import DaemonState
from localspec.errors import LocalspecError
from localspec.protocol.reading import BadBody

# Method, path, and the handler function in handlers/. These are the core's; extras add their own.
ROUTES = (
    ("POST", "/v1/chat/completions", "completions.chat"),
    ("POST", "/v1/chat/completions/control", "completions.control"),
    ("GET", "/v1/stream", "streams.resume"),
    ("DELETE", "/v1/stream", "streams.stop"),
    ("POST", "/v1/streams/lookup", "streams.look_up"),
    ("POST", "/v1/completions", "completions.complete"),
    ("GET", "/v1/models", "models.models"),
    ("GET", "/v1/models/{name}", "models.model"),
    ("POST", "/infill", "completions.infill"),
    ("POST", "/completion", "completions.native_completion"),
    ("GET", "/health", "models.health"),
    ("GET", "/props", "models.props"),
    ("GET", "/metrics", "control.show"),
    ("GET", "/slots", "models.slots"),
    ("POST", "/slots/{name}", "models.slot_action"),
    ("GET", "/openapi.yaml", "control.openapi"),
    ("POST", "/tokenize", "completions.tokenize"),
    ("POST", "/detokenize", "completions.detokenize"),
    ("POST", "/apply-template", "completions.apply_template"),
    ("POST", "/chat/completions/input_tokens", "completions.count"),
    ("POST", "/v1/chat/completions/input_tokens", "completions.count"),
    ("GET", "/localspec/status", "control.status"),
    ("POST", "/localspec/shutdown", "control.shutdown"),
    ("POST", "/localspec/reset", "control.reset"),
    ("POST", "/localspec/config", "control.configure"),
    ("POST", "/localspec/load", "control.load"),
    ("POST", "/localspec/unload", "control.unload"),
    ("GET", "/localspec/pairs", "models.list_pairs"),
    ("POST", "/localspec/pairs", "models.add_pair"),
    ("GET", "/localspec/pairs/{name}", "models.show_pair"),
    ("DELETE", "/localspec/pairs/{name}", "models.remove_pair"),
    ("POST", "/localspec/pairs/{name}/verify", "models.verify_stored"),
    ("POST", "/localspec/gc", "models.collect_garbage"),
    ("POST", "/localspec/drafts", "models.find_drafts"),
    ("POST", "/localspec/disk", "models.search_disk"),
    ("GET", "/localspec/conversations", "conversations.list_conversations"),
    ("DELETE", "/localspec/conversations", "conversations.remove_all"),
    ("GET", "/localspec/conversations/{name}", "conversations.show"),
    ("DELETE", "/localspec/conversations/{name}", "conversations.remove"),
    ("POST", "/localspec/conversations/{name}/undo", "conversations.undo"),
    ("GET", "/localspec/statistics", "conversations.statistics"),
    ("GET", "/localspec/pulls", "models.list_pulls"),
    ("POST", "/localspec/pulls", "models.start_pull"),
    ("GET", "/localspec/pulls/{name}/events", "models.pull_events"),
    ("GET", "/localspec/pulls/{name}", "models.show_pull"),
    ("DELETE", "/localspec/pulls/{name}", "models.cancel_pull"),
)

# Other paths of some clients and of llama-server for the same endpoints.
PATH_ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/models": "/v1/models",
    "/v1/health": "/health",
}
Handler = Callable[[Request], Awaitable[Response]]


# A method, a path, its handler, and a header that a request must have, or "".
Endpoint = tuple[str, str, Handler, str]


def _import_handler(qualified_name: str) -> Handler:
    module, _, name = qualified_name.rpartition(".")
    function = getattr(importlib.import_module(f"localspec.daemon.handlers.{module}"), name)
    return cast(Handler, function)


def _endpoints() -> Iterator[tuple[Sequence[Endpoint], Mapping[str, str]]]:
    """Yield the endpoints of each extra and of the core, with further paths for the same endpoints."""
    for module in extras.route_modules():
        yield [(*row, *[""] * (4 - len(row))) for row in module.ROUTES], module.PATH_ALIASES
    yield [(method, path, _import_handler(name), "") for method, path, name in ROUTES], PATH_ALIASES


class _HeaderRoute(Route):
    """A route for requests that have a header; others go on to the next route."""

    def __init__(self, path: str, endpoint: Handler, methods: list[str], header: str) -> None:
        super().__init__(path, endpoint, methods=methods)
        self._header = header

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self._header in Headers(scope=scope):
            return super().matches(scope)
        return Match.NONE, {}


class _AnyName(PathConvertor):
    regex = r"(?s:.*)"  # Starlette's own has no line ends


register_url_convertor("any", _AnyName())


def _route(method: str, path: str, function: Handler, header: str) -> Route:
    # A name may be anything, so that the handler can report that it does not exist.
    path = path.replace("{name}", "{name:any}")
    if header:
        return _HeaderRoute(path, function, [method], header)
    return Route(path, function, methods=[method])


_GROUPS = [*_endpoints()]
# All endpoints, each by its first path.
ENDPOINTS = [endpoint for endpoints, _ in _GROUPS for endpoint in endpoints]
_ROUTES = [_route(*endpoint) for endpoint in ENDPOINTS]
_ROUTES += [
    _route(method, alias, function, header)
    for endpoints, aliases in _GROUPS
    for alias, original in aliases.items()
    for method, path, function, header in endpoints
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
    return await errors.on_http_error(request, error)


def create_app(state: DaemonState) -> ASGIApp:
    app = Starlette(
        routes=_ROUTES,
        exception_handlers={
            LocalspecError: errors.on_localspec_error,
            BadBody: errors.on_bad_body,
            ClientGone: errors.on_client_gone,
            HTTPException: _on_http_error,
        },
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(errors.ErrorMiddleware),
            Middleware(TcpAuthMiddleware, lambda: state.tcp),
            Middleware(VersionMiddleware),
            Middleware(PathMiddleware, _FIXED_PATHS),
        ],
    )
    # A redirect would have no body, and use an untrusted Host header.
    app.router.redirect_slashes = False
    app.state.daemon = state
    return app
