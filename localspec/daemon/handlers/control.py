"""GET /localspec/status, POST /localspec/shutdown, /localspec/reset and /localspec/unload."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.state import State, state_of
from localspec.protocol.answers import PairStatus, Status
from localspec.protocol.frames import PairFiles
from localspec.protocol.requests import LoadRequest

_LOOK = 0.05  # seconds between two looks at a load


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
    return EventStream(partial(_loading, daemon, await daemon.pair(body.model, request.receive)))


async def _loading(daemon: State, pair: PairFiles, emit: Emit) -> None:
    ready = asyncio.ensure_future(daemon.supervisor.loaded.ready(pair))
    shown = None
    try:
        await asyncio.sleep(0)  # its first step: it is refused, ready already, or has begun
        while not ready.done():
            state = _progress(daemon, pair)
            if state != shown:
                await emit(state)
                shown = state
            await asyncio.wait({ready}, timeout=_LOOK)
        ready.result()
        await emit(daemon.supervisor.loaded.status(pair.name))
    finally:
        ready.cancel()


def _progress(daemon: State, pair: PairFiles) -> PairStatus:
    state = daemon.supervisor.loaded.status(pair.name)
    if state.name == pair.name and state.state == "loading":
        return state
    return PairStatus(pair.name, "loading", "waiting", 0.0)  # for answers that another one writes


async def unload(request: Request) -> Response:
    """Give the pair's memory back now; 409 while it is at work."""
    return answer({"unloaded": await state_of(request).supervisor.release()})
