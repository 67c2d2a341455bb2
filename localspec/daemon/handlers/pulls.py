"""Handle /localspec/pulls: start, watch and cancel pulls, which go on when their client disconnects."""

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

# Fast hashing changes the state hundreds of times a second, more often than anybody can read.
_STATE_INTERVAL_S = 0.1
_CANCEL_TIMEOUT_S = 5.0  # how long the answer to a cancellation waits for the end of the pull


async def listed(request: Request) -> Response:
    """List all pulls."""
    registry = state_of(request).registry
    states = await asyncio.to_thread(lambda: registry.pulls.states())
    return answer({"pulls": states})


async def start(request: Request) -> Response:
    """Start a pull and return 202 with its state, or the state of the same pull if that runs already.

    Raises:
        Forbidden: the request names a network or endpoint and came over TCP.
        LocalspecError: see `begin`.
    """
    body = await read(request, PullRequest)
    if came_by_tcp(request.scope):
        _refuse_network(body)
    return answer((await begin(request, body)).state, 202)


async def begin(request: Request, body: PullRequest) -> Pull:
    """Start a pull for a request of any protocol, and return it.

    Raises:
        Unavailable: the daemon is shutting down.
        LocalspecError: see `pairs.pulls.start`.
    """
    daemon = state_of(request)
    if daemon.draining:
        raise Unavailable("The daemon is shutting down; try again.", retry_after=2)
    # Over TCP no answer may reveal which files this machine has.
    local = not came_by_tcp(request.scope)
    return await asyncio.to_thread(pulls.start, daemon.registry, body, whole_disk=local)


def _refuse_network(body: PullRequest) -> None:
    """Refuse to let a client over TCP choose which servers the daemon contacts."""
    for name in ("endpoint", "network"):
        if getattr(body, name):
            raise Forbidden(
                f"'{name}' is not accepted over TCP, because the daemon would contact any address "
                "it names; set HF_ENDPOINT and proxies in the daemon's own environment.",
                param=name,
            )


async def state(request: Request) -> Response:
    """Return the state of a pull."""
    return answer((await _pull(request)).state)


async def cancel(request: Request) -> Response:
    """Cancel a pull and return its state."""
    pull = await _pull(request)
    pull.cancel()

    async def discard(_state: object) -> None:
        pass

    with suppress(TimeoutError):  # A request to the hub that hangs ends by itself later.
        await asyncio.wait_for(states(pull, discard), _CANCEL_TIMEOUT_S)
    return answer(pull.state)


async def events(request: Request) -> Response:
    """Stream every state of the pull, the present one first and the final one last."""
    return EventStream(partial(states, await _pull(request)))


async def states(pull: Pull, emit: Callable[[PullState], Awaitable[object]]) -> None:
    """Call `emit` with every state of the pull, the present one first and the final one last."""
    from localspec.registry.pulls.state import RUNNING

    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop has ended with the daemon
            loop.call_soon_threadsafe(changed.set)

    with pull.watched(notify):
        while True:
            changed.clear()
            state = pull.state
            await emit(state)
            if state.state not in RUNNING:
                return
            await changed.wait()
            await asyncio.sleep(_STATE_INTERVAL_S)


async def _pull(request: Request) -> Pull:
    registry: Registry = state_of(request).registry
    return await asyncio.to_thread(_find, registry, request.path_params["name"])


def _find(registry: Registry, name: str) -> Pull:
    """Find the pull by the pair's own name, another name in the catalogue, or a repository."""
    with suppress(ModelNotFound):  # The pair may have been removed from the catalogue since.
        name, _ = registry.catalogue.find(name)
    return registry.pulls.get(name) if "/" not in name else registry.pulls.of_repository(name)
