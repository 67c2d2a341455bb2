"""GET /localspec/status, POST /localspec/shutdown, /localspec/reset and /localspec/unload."""

from __future__ import annotations

import os
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import EventStream
from localspec.daemon.state import state_of
from localspec.protocol.answers import Status
from localspec.protocol.requests import LoadRequest


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
            figures=supervisor.metrics.figures(),
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
