"""/localspec/pulls: start, watch, cancel. A pull goes on whoever leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import EventStream
from localspec.daemon.http.tcp import came_by_tcp
from localspec.daemon.pairs import pulls
from localspec.daemon.pairs.registry import Registry
from localspec.daemon.state import state_of
from localspec.errors import Forbidden, ModelNotFound, Unavailable
from localspec.protocol.pairs import PullRequest

if TYPE_CHECKING:
    from localspec.registry.pulls.running import Pull
    from localspec.registry.pulls.state import PullState

# What is hashed fast changes hundreds of times a second; nobody reads as fast.
_PAUSE = 0.1  # seconds between two states
_CANCEL_SECONDS = 5.0  # how long whoever cancels waits to be told that it is over


async def listed(request: Request) -> Response:
    registry = state_of(request).registry
    states = await asyncio.to_thread(lambda: registry.pulls.states())
    return answer({"pulls": states})


async def start(request: Request) -> Response:
    """202 and the pull's state; of one that runs already, that one's.

    Raises:
        Forbidden: a network or endpoint over TCP. As `begin`.
    """
    body = await read(request, PullRequest)
    if came_by_tcp(request.scope):
        _refuse_network(body)
    return answer((await begin(request, body)).state, 202)


async def begin(request: Request, wanted: PullRequest) -> Pull:
    """A pull that runs now, whichever protocol asked for it.

    Raises:
        Unavailable: the daemon is ending. As pairs.pulls.start.
    """
    daemon = state_of(request)
    if daemon.draining:
        raise Unavailable("The daemon is shutting down; try again.", retry_after=2)
    ours = not came_by_tcp(request.scope)  # over TCP no answer tells which files there are
    return await asyncio.to_thread(pulls.start, daemon.registry, wanted, whole_disk=ours)


def _refuse_network(body: PullRequest) -> None:
    """Whoever holds the token may not choose whom the daemon asks, nor which files it reads."""
    for name in ("endpoint", "network"):
        if getattr(body, name):
            raise Forbidden(
                f"'{name}' is not accepted over TCP, because the daemon would contact any address "
                "it names; set HF_ENDPOINT and proxies in the daemon's own environment.",
                param=name,
            )


async def state(request: Request) -> Response:
    return answer((await _pull(request)).state)


async def cancel(request: Request) -> Response:
    pull = await _pull(request)
    pull.cancel()

    async def unseen(_state: object) -> None:
        pass

    with suppress(TimeoutError):  # what hangs at the hub ends by itself some time
        await asyncio.wait_for(states(pull, unseen), _CANCEL_SECONDS)
    return answer(pull.state)


async def events(request: Request) -> Response:
    """Every state the pull comes to, the present one first and the final one last."""
    return EventStream(partial(states, await _pull(request)))


async def states(pull: Pull, emit: Callable[[PullState], Awaitable[object]]) -> None:
    """Has `emit` called with every state that a pull comes to, the present one first."""
    from localspec.registry.pulls.state import RUNNING

    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop has ended with the daemon
            loop.call_soon_threadsafe(changed.set)

    with pull.watched(tell):
        while True:
            changed.clear()
            state = pull.state
            await emit(state)
            if state.state not in RUNNING:
                return
            await changed.wait()
            await asyncio.sleep(_PAUSE)


async def _pull(request: Request) -> Pull:
    registry: Registry = state_of(request).registry
    return await asyncio.to_thread(_find, registry, request.path_params["name"])


def _find(registry: Registry, name: str) -> Pull:
    """The pull, by the pair's own name or another name the catalogue has for it."""
    with suppress(ModelNotFound):  # it may have left the catalogue since
        name, _ = registry.catalogue.find(name)
    return registry.pulls.get(name) if "/" not in name else registry.pulls.of_repository(name)
