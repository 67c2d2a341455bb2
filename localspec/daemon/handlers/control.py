"""GET /localspec/status, POST /localspec/shutdown, /localspec/reset and /localspec/unload."""

from __future__ import annotations

import os
import time

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.context import answer, context
from localspec.protocol.http import Status


async def status(request: Request) -> Response:
    daemon = context(request)
    supervisor = daemon.supervisor
    return answer(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=supervisor.pair_status(daemon.config.pair),
            running=supervisor.admission.running,
            waiting=supervisor.admission.waiting,
            queue_limit=supervisor.admission.limit,
            worker_pid=supervisor.worker_pid,
            safe_mode=supervisor.safe_mode,
            draining=daemon.draining,
            counts=supervisor.counts,
            socket=str(daemon.paths.socket),
            log=str(daemon.paths.log),
            pulls=daemon.library.pulling,
            problems=daemon.problems,
        )
    )


async def shutdown(request: Request) -> Response:
    """Drain and end, as SIGTERM does; the answer comes first."""
    context(request).stop()
    return answer({"status": "draining"})


async def reset(request: Request) -> Response:
    context(request).supervisor.reset()
    return answer({"status": "ok"})


async def unload(request: Request) -> Response:
    """Give the pair's memory back now; 409 while it is at work."""
    return answer({"unloaded": await context(request).supervisor.release()})
