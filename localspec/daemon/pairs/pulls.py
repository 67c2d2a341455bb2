"""From a request to a running pull. Blocks; for threads."""

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

    `whole_disk` False: no draft is looked for among the files of other programs.

    Raises:
        ModelNotFound: it is not in the catalogue. Offline
        InvalidRequest: the endpoint is no address, what is to be pulled no repository.
        Conflict: another pair has the name, or another pull.
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
    wanted = _joined(registry, request) or _wanted(registry, request, hub.endpoint, whole_disk)
    if not is_cached(wanted):
        hub.check_online()
    return registry.pulls.start(wanted, hub)


def _network(request: PullRequest) -> Network:
    """The asking shell's, or this process's own where none came along."""
    from localspec.registry.hub.network import Network

    variables: dict[str, str | None] = dict(os.environ)
    if request.network is not None:
        variables = msgspec.to_builtins(request.network)
    network = Network.of({name: value for name, value in variables.items() if value is not None})
    return replace(network, offline="HF_HUB_OFFLINE") if request.offline else network


def _joined(registry: Registry, request: PullRequest) -> Wanted | None:
    """What is being pulled, or still wanted, under a plain name."""
    if request.draft or request.no_draft or request.pair:
        return None
    return registry.pulls.wanted(request.name.strip().lower())


def _wanted(registry: Registry, request: PullRequest, endpoint: str, whole_disk: bool) -> Wanted:
    """What a request asks for, under a name that it may have."""
    from localspec.registry.pulls.wanted import asked, wanted
    from localspec.registry.store.store import own_sentence

    found = wanted(
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
    registry.refuse_reserved(found.name)
    here = registry.whole_record(found.name)
    if here and here.source == "own":
        raise Conflict(own_sentence(found.name))
    if here and here.asked != found.asked:
        raise Conflict(
            f"A pair '{found.name}' already exists; it was pulled as "
            f"{here.asked or here.name}, not as {asked(found)}. Choose another name (--name "
            f"NAME), or run: localspec rm {found.name}"
        )
    return found
