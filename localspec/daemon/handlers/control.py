"""GET /localspec/status, POST /localspec/config, /load, /unload, /reset and /shutdown beside it."""

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

_PATIENCE = 5.0  # seconds: a pair that was never looked at is hashed, which nobody waits for here


async def status(request: Request) -> Response:
    daemon = state_of(request)
    supervisor, residents = daemon.supervisor, daemon.supervisor.residents
    shown = residents.shown()
    configured = daemon.config.pair
    if configured not in {each.name for each in residents.present}:  # perhaps an alias
        configured = await asyncio.to_thread(daemon.registry.own_name, configured)
    return answer(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=shown.status(),
            running=residents.running(),
            waiting=residents.waiting(),
            queue_limit=daemon.config.queue,
            worker_pid=shown.worker.pid if shown.worker else None,
            safe_mode=residents.safe_mode.on,
            draining=daemon.draining,
            counts=supervisor.metrics.counts,
            figures=supervisor.figures(),
            ahead=shown.admission.ahead(Job()),
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
    """Drain and end, as SIGTERM does; the answer comes first: it names the pulls that go on later."""
    daemon = state_of(request)
    pulls = daemon.registry.pulling
    daemon.stop()
    return answer({"status": "draining", "pulls": pulls})


async def reset(request: Request) -> Response:
    state_of(request).supervisor.residents.reset()
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
    workers = daemon.supervisor.residents.pids
    settings = placement.settings(daemon.config, daemon.paths)
    try:
        async with asyncio.timeout(_PATIENCE):
            pair = await daemon.pair("", request.receive)
            if pair.upstream is not None:
                return []
            return await asyncio.to_thread(placement.costs, pair, settings, workers)
    except (TimeoutError, LocalspecError):  # the next question says why
        return []


async def load(request: Request) -> Response:
    """Load a pair. Where memory holds no more, others leave for it once they have answered.

    Events: how far it is, at once and whenever that changes, and at last that it is ready or why
    not. What is refused before anything is tried (a pair that is not here or was set aside) has a
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
    """Another server answers; it is asked when there is a request for it."""
    target, backend = info.target_description, info.backend
    await report(PairStatus(info.name, "ready", target=target, n_ctx=info.n_ctx, backend=backend))


async def unload(request: Request) -> Response:
    """Give a pair's memory back now, without a name that of all; 409 while it is at work.

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
