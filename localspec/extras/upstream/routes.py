"""Endpoints for pairs that another server answers for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import json_response, read_body
from localspec.daemon.http.tcp import came_by_tcp
from localspec.daemon.state import state_of
from localspec.errors import Forbidden
from localspec.extras.upstream import pairs
from localspec.protocol.pairs import AddUpstreamRequest


async def add_upstream(request: Request) -> Response:
    """Add a pair that another server answers for.

    Raises:
        Forbidden: over TCP, for it may name a file whose content goes to that server.
    """
    body = await read_body(request, AddUpstreamRequest)
    if came_by_tcp(request.scope):
        raise Forbidden("Servers cannot be added over TCP; use the Unix socket: localspec add")
    daemon = state_of(request)
    return json_response(await daemon.long_work.run(pairs.add_upstream, daemon.registry, body), 201)


ROUTES = (("POST", "/localspec/upstreams", add_upstream),)
PATH_ALIASES: dict[str, str] = {}
