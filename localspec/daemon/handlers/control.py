"""GET /localspec/status, POST /localspec/config, /load, /unload, /reset and /shutdown beside it."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import EventStream
from localspec.daemon.state import State, state_of
from localspec.daemon.worker import placement
from localspec.daemon.worker.forecast import Job
from localspec.errors import LocalspecError
from localspec.protocol.answers import Configured, Status
from localspec.protocol.requests import LoadRequest

_PATIENCE = 5.0  # seconds: a pair that was never looked at is hashed, which nobody waits for here


async def status(request: Request) -> Response:
    daemon = state_of(request)
    supervisor, loaded = daemon.supervisor, daemon.supervisor.loaded
    return answer(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=loaded.status(daemon.config.pair),
            running=supervisor.admission.running,
            waiting=supervisor.admission.waiting,
            queue_limit=supervisor.admission.limit,
            worker_pid=loaded.worker_pid,
            safe_mode=loaded.safe_mode.on,
            draining=daemon.draining,
            counts=supervisor.metrics.counts,
            figures=supervisor.figures(),
            ahead=supervisor.admission.ahead(Job()),
            socket=str(daemon.paths.socket),
            log=str(daemon.paths.log),
            pulls=len(daemon.registry.pulling),
            hashing=daemon.registry.hashing,
            problems=daemon.problems,
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
        )
    )


async def shutdown(request: Request) -> Response:
    """Drain and end, as SIGTERM does; the answer comes first: it names the pulls that go on later."""
    daemon = state_of(request)
    pulls = daemon.registry.pulling
    daemon.stop()
    return answer({"status": "draining", "pulls": pulls})


async def reset(request: Request) -> Response:
    state_of(request).supervisor.loaded.reset()
    return answer({"status": "ok"})


async def configure(request: Request) -> Response:
    """Read config.toml again; whoever is answered afterwards is answered by it.

    The answer says what is wrong in it, and what it costs on this machine.
    """
    daemon = state_of(request)
    await daemon.configure()
    config = daemon.config
    return answer(
        Configured(
            problems=daemon.problems,
            notes=await _costs(daemon, request),
            origin={key: where for key, where in config.origin.items() if _not_a_file(where)},
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
        )
    )


def _not_a_file(where: str) -> bool:
    return where == "flag" or where.startswith("LOCALSPEC_")


async def _costs(daemon: State, request: Request) -> list[str]:
    """What of the configuration the pair does not get on this machine; nothing where that takes long."""
    loaded = daemon.supervisor.loaded
    settings = placement.settings(daemon.config, daemon.paths)
    try:
        async with asyncio.timeout(_PATIENCE):
            pair = await daemon.pair("", request.receive)
            return await asyncio.to_thread(placement.costs, pair, settings, loaded.worker_pid)
    except (TimeoutError, LocalspecError):  # the next question says why
        return []


async def load(request: Request) -> Response:
    """Load a pair; answers that are being written finish on the present one first.

    Events: how far it is, at once and whenever that changes, and at last that it is ready or why
    not. What is refused before anything is tried (a pair that is not here or was set aside) has a
    status.
    """
    body = await read(request, LoadRequest)
    daemon = state_of(request)
    pair = await daemon.pair(body.model, request.receive)
    return EventStream(partial(daemon.supervisor.loaded.load, pair))


async def unload(request: Request) -> Response:
    """Give the pair's memory back now; 409 while it is at work."""
    return answer({"unloaded": await state_of(request).supervisor.release()})
