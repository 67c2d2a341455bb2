"""Handle GET /localspec/status, and POST /localspec/config, /load, /unload, /reset and /shutdown."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import EventStream
from localspec.daemon.state import State, state_of
from localspec.daemon.worker import placement
from localspec.daemon.worker.placement import MIB
from localspec.daemon.worker.queue.forecast import Job
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import Configured, PairStatus, Status
from localspec.protocol.requests import LoadRequest

# A pair that was never read before is hashed first, and the answer of /config does not wait longer for it.
_COSTS_TIMEOUT_S = 5.0


async def status(request: Request) -> Response:
    """Handle GET /localspec/status."""
    daemon = state_of(request)
    supervisor, residents = daemon.supervisor, daemon.supervisor.residents
    recent = residents.shown()
    configured = daemon.config.pair
    if configured not in {pair.name for pair in residents.present}:  # it may be an alias
        configured = await asyncio.to_thread(daemon.registry.own_name, configured)
    return answer(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=recent.status(),
            running=residents.running(),
            waiting=residents.waiting(),
            queue_limit=daemon.config.queue,
            worker_pid=recent.worker.pid if recent.worker else None,
            safe_mode=residents.safe_mode.on,
            draining=daemon.draining,
            counts=supervisor.metrics.counts,
            figures=supervisor.figures(),
            ahead=recent.admission.ahead(Job()),
            socket=str(daemon.paths.socket),
            log=str(daemon.paths.log),
            pulls=len(daemon.registry.pulling),
            hashing=daemon.registry.hashing,
            problems=daemon.problems,
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
            pairs=residents.statuses(),
            upstreams=supervisor.upstreams(),
            memory=daemon.config.memory * MIB or None,
            configured=configured,
        )
    )


async def shutdown(request: Request) -> Response:
    """Drain and end like SIGTERM, and name the pulls that the next daemon resumes."""
    daemon = state_of(request)
    pulls = daemon.registry.pulling
    daemon.stop()
    return answer({"status": "draining", "pulls": pulls})


async def reset(request: Request) -> Response:
    """Handle POST /localspec/reset."""
    state_of(request).supervisor.residents.reset()
    return answer({"status": "ok"})


async def configure(request: Request) -> Response:
    """Read config.toml again; requests that arrive after the answer use the new configuration.

    The answer contains the problems of the file and what the configuration costs on this machine.
    """
    daemon = state_of(request)
    await daemon.configure()
    config = daemon.config
    return answer(
        Configured(
            problems=daemon.problems,
            notes=await _costs(daemon, request),
            origin={key: source for key, source in config.origin.items() if _not_a_file(source)},
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
        )
    )


def _not_a_file(source: str) -> bool:
    return source == "flag" or source.startswith("LOCALSPEC_")


async def _costs(daemon: State, request: Request) -> list[str]:
    """Return which settings this machine cannot give the pair; [] if that takes too long to find out."""
    workers = daemon.supervisor.residents.pids
    settings = placement.settings(daemon.config, daemon.paths)
    try:
        async with asyncio.timeout(_COSTS_TIMEOUT_S):
            pair = await daemon.pair("", request.receive)
            if pair.upstream is not None:
                return []
            return await asyncio.to_thread(placement.costs, pair, settings, workers)
    except (TimeoutError, LocalspecError):  # The next request for an answer reports the error.
        return []


async def load(request: Request) -> Response:
    """Load a pair; if memory is full, other pairs are unloaded once they have answered.

    Events: the pair's status at once and whenever it changes, and at last that it is ready or why not. A
    request that is refused before anything was tried (an unknown pair, one that was set aside) has an error
    status.
    """
    body = await read(request, LoadRequest)
    daemon = state_of(request)
    pair = await daemon.pair(body.model, request.receive)
    if pair.upstream is not None:
        return EventStream(partial(_nothing_to_load, await daemon.supervisor.ready(pair)))
    return EventStream(partial(daemon.supervisor.residents.of(pair.name).load, pair))


async def _nothing_to_load(
    info: frames.Loaded, report: Callable[[PairStatus], Awaitable[None]]
) -> None:
    """Report a pair of another server as ready; that server is only contacted when a request comes."""
    target, backend = info.target_description, info.backend
    await report(PairStatus(info.name, "ready", target=target, n_ctx=info.n_ctx, backend=backend))


async def unload(request: Request) -> Response:
    """Free the memory of one pair, or of all pairs without a name; the status is 409 while one is busy.

    Raises:
        ModelNotFound: there is no such pair.
    """
    daemon = state_of(request)
    body = await read(request, LoadRequest, empty=LoadRequest())
    name = None
    if body.model:
        name = (await daemon.named(body.model, request.receive)).name
    pairs = await daemon.supervisor.release(name)
    return answer({"unloaded": bool(pairs), "pairs": pairs})
