"""GET /v1/models, /health and /props."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.anthropic import answer as anthropic
from localspec.daemon.http.requests import answer
from localspec.daemon.pairs.names import BUILTIN
from localspec.daemon.state import state_of
from localspec.protocol.answers import Model, ModelList


async def models(request: Request) -> Response:
    """The configured pair first, then the shipped one, the loaded one and all that were pulled.

    In Anthropic's shape for its clients, who ask by this path, too.
    """
    daemon = state_of(request)
    began = int(time.time() - (time.monotonic() - daemon.started))
    info = daemon.supervisor.loaded.info
    names = [daemon.config.pair, BUILTIN, *([info.name] if info else [])]
    created = dict.fromkeys(names, began)
    listed = await asyncio.to_thread(lambda: daemon.registry.store.listing())
    created |= {record.name: int(record.created) for record in listed.records}
    if "anthropic-version" in request.headers:
        return answer(anthropic.models(created))
    return answer(ModelList([Model(name, when) for name, when in created.items()]))


async def health(request: Request) -> Response:
    """llama-server's shape; a daemon with nothing loaded is well, it loads on demand."""
    daemon = state_of(request)
    if daemon.draining:
        return answer(_unavailable("Shutting down"), 503)
    if daemon.supervisor.loaded.status(daemon.config.pair).state == "loading":
        return answer(_unavailable("Loading model"), 503)
    return answer({"status": "ok"})


def _unavailable(message: str) -> dict[str, Any]:
    return {"error": {"code": 503, "message": message, "type": "unavailable_error"}}


async def props(request: Request) -> Response:
    """llama-server's /props, loading the configured pair if nothing is loaded."""
    daemon = state_of(request)
    loaded = daemon.supervisor.loaded
    info = loaded.info or (await loaded.ready(await daemon.pair("", request.receive))).info
    return answer(
        {
            "default_generation_settings": {
                "n_ctx": info.n_ctx,
                "params": info.sampling_defaults,
            },
            "total_slots": info.parallel,
            "model_alias": info.name,
            "model_path": (await daemon.pair(info.name, request.receive)).target,
            "chat_template": info.chat_template or "",
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": info.backend,
            "modalities": {"vision": False, "audio": False},
        }
    )
