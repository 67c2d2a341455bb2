"""GET /openapi.yaml."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


async def openapi(_request: Request) -> Response:
    """What this table of endpoints takes and gives."""
    text = resources.files("localspec").joinpath("openapi.yaml").read_bytes()
    return Response(text, media_type="application/yaml")
