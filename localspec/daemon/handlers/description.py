"""Handle GET /openapi.yaml."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


async def openapi(_request: Request) -> Response:
    """Return the OpenAPI description of every endpoint."""
    text = resources.files("localspec").joinpath("openapi.yaml").read_bytes()
    return Response(text, media_type="application/yaml")
