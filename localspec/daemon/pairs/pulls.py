"""Start a pull for a request. Blocks, so call it in a thread."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from localspec.daemon.pairs.registry import Registry
from localspec.errors import Conflict, InvalidRequest
from localspec.protocol.pairs import PullRequest

if TYPE_CHECKING:
    from localspec.registry.hub.network import Network
    from localspec.registry.pulls.running import Pull
    from localspec.registry.pulls.wanted import Wanted


def start(registry: Registry, request: PullRequest, *, whole_disk: bool = True) -> Pull:
    """Start a pull or join the running one.

    With `whole_disk` False, no draft is searched for among the files of other programs.

    Raises:
        ModelNotFound: The pair is not in the catalogue.
        Offline: The network may not be used, but is needed.
        InvalidRequest: The endpoint is not an address, or the name is not a repository.
        Conflict: Another pair or another pull has the name.
    """
    from localspec.registry.hub.hub import Hub
    from localspec.registry.hub.network import is_address
    from localspec.registry.pulls.wanted import is_cached

    registry.refuse_reserved(request.name)
    hub = Hub(request.endpoint, token=request.token, network=_network(request))
    if not is_address(hub.endpoint):
        raise InvalidRequest(
            "The hub's endpoint (HF_ENDPOINT) must begin with http:// or https://.",
            param="endpoint",
        )
    target = _running_target(registry, request) or _new_target(
        registry, request, hub.endpoint, whole_disk
    )
    if not is_cached(target):
        hub.check_online()
    return registry.pulls.start(target, hub)


def _network(request: PullRequest) -> Network:
    """Return the network settings of the client's shell, or of this process if the request has none."""
    from localspec.registry.hub.network import Network

    variables: dict[str, str | None] = dict(os.environ)
    if request.network is not None:
        variables = msgspec.to_builtins(request.network)
    network = Network.of({name: value for name, value in variables.items() if value is not None})
    return replace(network, offline="HF_HUB_OFFLINE") if request.offline else network


def _running_target(registry: Registry, request: PullRequest) -> Wanted | None:
    """Return the target of a pull under a plain name that is running or unfinished."""
    if request.draft or request.no_draft or request.pair:
        return None
    return registry.pulls.wanted(request.name.strip().lower())


def _new_target(
    registry: Registry, request: PullRequest, endpoint: str, whole_disk: bool
) -> Wanted:
    """Return the target of a request, under a name that is not taken."""
    from localspec.registry.pulls.wanted import asked, wanted
    from localspec.registry.store.store import own_sentence

    target = wanted(
        request.name,
        registry.catalogue,
        registry.whole_record,
        registry.store.part_path,
        draft=request.draft,
        no_draft=request.no_draft,
        pair=request.pair,
        endpoint=endpoint,
        limit_rate=request.limit_rate,
        whole_disk=whole_disk,
    )
    registry.refuse_reserved(target.name)
    record = registry.whole_record(target.name)
    if record and record.source == "own":
        raise Conflict(own_sentence(target.name))
    if record and record.asked != target.asked:
        raise Conflict(
            f"A pair '{target.name}' already exists; it was pulled as "
            f"{record.asked or record.name}, not as {asked(target)}. Choose another name (--name "
            f"NAME), or run: localspec rm {target.name}"
        )
    return target
