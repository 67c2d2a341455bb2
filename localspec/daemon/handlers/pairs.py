"""Handle /localspec/pairs, /gc and /drafts."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.reply.seen import notation
from localspec.daemon.completion.reply.tools import described
from localspec.daemon.http.requests import answer, read
from localspec.daemon.http.sse import EventStream, reported
from localspec.daemon.http.tcp import came_by_tcp
from localspec.daemon.pairs import disk, local, measure, upstreams, views
from localspec.daemon.pairs.names import names_files, unseen
from localspec.daemon.pairs.verify import verify_files, verify_pair
from localspec.daemon.state import state_of
from localspec.errors import Forbidden, InvalidRequest
from localspec.protocol import pairs
from localspec.protocol.disk import DiskRequest, DraftsRequest


async def listed(request: Request) -> Response:
    """List the pairs on this machine, and with ?all=1 those of the catalogue."""
    daemon = state_of(request)
    with_catalogue = request.query_params.get("all", "0") not in ("", "0", "false")
    listing = await asyncio.to_thread(views.listing, daemon.registry, with_catalogue)
    listing.configured = await asyncio.to_thread(daemon.registry.own_name, daemon.config.pair)
    listing.problems += [problem for problem in daemon.problems if problem not in listing.problems]
    loaded = {status.name: status for status in daemon.supervisor.residents.statuses()}
    for entry in listing.pairs:
        if status := loaded.get(entry.name):
            entry.takes, entry.since = status.memory, status.since
    return answer(listing)


async def show(request: Request) -> Response:
    """Describe one pair; ?context=N estimates its memory for N tokens.

    Raises:
        InvalidRequest: `context` is not a number.
        ModelNotFound: there is no such pair.
        BadGguf: a file of the pair is not a valid model.
        StoreError: a file of the pair cannot be read.
    """
    daemon = state_of(request)
    text = request.query_params.get("context", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest("'context' must be a whole number of tokens.", param="context")
    name, config = request.path_params["name"], daemon.config
    by_tcp = came_by_tcp(request.scope)

    def describe() -> pairs.PairView:
        view = views.details(daemon.registry, name, int(text), config, by_tcp=by_tcp)
        preset = daemon.registry.catalogue.presets.get(view.name)
        template = view.target.template.text if view.target.template else ""
        if preset and preset.chat_template:
            template = preset.chat_template
        may_call = template and not view.target.pooling
        view.calls = described(notation(template)) if may_call else ""
        return view

    return answer(await asyncio.to_thread(describe))


async def add(request: Request) -> Response:
    """Make a pair of files on this machine."""
    body = await read(request, pairs.AddRequest)
    daemon = state_of(request)
    registry = daemon.registry
    if body.replace:
        await daemon.rest(body.name)
    with unseen():
        record = await daemon.errands.run(local.add, registry, body)
    return answer(views.entry(record, registry.in_use), 201)


async def add_upstream(request: Request) -> Response:
    """Add a pair that another server serves.

    Raises:
        Forbidden: the request came over TCP. Such a pair may name a file whose content is sent to that
            server.
    """
    body = await read(request, pairs.AddUpstreamRequest)
    if came_by_tcp(request.scope):
        raise Forbidden("Servers cannot be added over TCP; use the Unix socket: localspec add")
    daemon = state_of(request)
    return answer(await daemon.errands.run(upstreams.add, daemon.registry, body), 201)


async def remove(request: Request) -> Response:
    """Remove a pair."""
    daemon = state_of(request)
    requested_name = request.path_params["name"]
    if removed := await asyncio.to_thread(upstreams.remove, daemon.registry, requested_name):
        return answer(removed)
    name = await asyncio.to_thread(daemon.registry.removable, requested_name)
    await daemon.rest(name)
    return answer(await asyncio.to_thread(daemon.registry.remove, name))


async def verify(request: Request) -> Response:
    """Hash the files of a pair; the events are the bytes hashed so far and, in the last one, the result."""
    daemon, name = state_of(request), request.path_params["name"]
    if names_files(name):
        files = await daemon.named(name, request.receive)  # refuses the same files as a load
        return EventStream(reported(daemon.errands, partial(verify_files, files)))
    return EventStream(reported(daemon.errands, partial(verify_pair, daemon.registry, name)))


async def collect(request: Request) -> Response:
    """Delete files and saved states that nothing uses."""
    body = await read(request, pairs.CollectRequest)
    daemon = state_of(request)
    collected = await asyncio.to_thread(daemon.registry.collect, dry_run=body.dry_run)
    states = await daemon.conversations.run(
        lambda conversations: conversations.collect(dry_run=body.dry_run)
    )
    collected.freed += sum(size for _, size in states)
    collected.files += tuple(name for name, _ in states)
    return answer(collected)


async def drafts(request: Request) -> Response:
    """List draft models for a target; the events are the current measurement and, in the last one, the list.

    Raises:
        Forbidden: `folders` came over TCP.
        Conflict: the engine is busy.
        LocalspecError: the target cannot be used, see `State.named`.
    """
    body = await read(request, DraftsRequest)
    if body.folders and came_by_tcp(request.scope):
        raise Forbidden(
            "'folders' cannot be searched over TCP; use the Unix socket: localspec drafts",
            param="folders",
        )
    daemon = state_of(request)
    pair = await daemon.named(body.target, request.receive)
    if pair.upstream is not None:
        raise InvalidRequest(
            f"'{pair.name}' is served by another server, which has drafts of its own.",
            param="target",
        )
    trials = measure.Trials(daemon.supervisor) if body.measure else None
    return EventStream(
        reported(
            daemon.errands,
            lambda report: views.drafts(daemon.registry, pair.target, body.folders, trials, report),
        )
    )


async def on_disk(request: Request) -> Response:
    """Search the disk for models; the events are what is being read and, in the last one, the findings.

    Raises:
        Forbidden: the request came over TCP.
    """
    if came_by_tcp(request.scope):
        raise Forbidden(
            "The disk cannot be searched over TCP; use the Unix socket: localspec import"
        )
    body = await read(request, DiskRequest)
    registry, errands = state_of(request).registry, state_of(request).errands
    return EventStream(
        reported(
            errands, lambda report: disk.look(registry, body.folders, body.environment, report)
        )
    )
