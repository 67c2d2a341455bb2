"""Embeddings, in whichever protocol: there is no model for them yet."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localspec.errors import NotOffered


async def embed(_request: Request) -> Response:
    """Refuses.

    Raises:
        NotOffered: always.
    """
    raise NotOffered(
        "localspec cannot compute embeddings: its models write text. Use an embedding model of "
        "another program, for example llama-server --embeddings."
    )
