"""/localspec/pairs, /gc and /drafts."""

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
    """What is here; with ?all=1 the catalogue too."""
    daemon = state_of(request)
    everything = request.query_params.get("all", "0") not in ("", "0", "false")
    found = await asyncio.to_thread(views.listing, daemon.registry, everything)
    found.configured = await asyncio.to_thread(daemon.registry.own_name, daemon.config.pair)
    found.problems += [each for each in daemon.problems if each not in found.problems]
    loaded = {each.name: each for each in daemon.supervisor.residents.statuses()}
    for entry in found.pairs:
        if status := loaded.get(entry.name):
            entry.takes, entry.since = status.memory, status.since
    return answer(found)


async def show(request: Request) -> Response:
    """?context=N counts the memory for N tokens.

    Raises:
        InvalidRequest: that is no number. ModelNotFound, BadGguf, StoreError: the pair.
    """
    daemon = state_of(request)
    text = request.query_params.get("context", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest("'context' must be a whole number of tokens.", param="context")
    name, config = request.path_params["name"], daemon.config
    by_tcp = came_by_tcp(request.scope)

    def found() -> pairs.PairView:
        view = views.details(daemon.registry, name, int(text), config, by_tcp=by_tcp)
        preset = daemon.registry.catalogue.presets.get(view.name)
        template = view.target.template.text if view.target.template else ""
        if preset and preset.chat_template:
            template = preset.chat_template
        writes = template and not view.target.pooling
        view.calls = described(notation(template)) if writes else ""
        return view

    return answer(await asyncio.to_thread(found))


async def add(request: Request) -> Response:
    body = await read(request, pairs.AddRequest)
    daemon = state_of(request)
    registry = daemon.registry
    if body.replace:
        await daemon.rest(body.name)
    with unseen():
        record = await daemon.errands.run(local.add, registry, body)
    return answer(views.entry(record, registry.in_use), 201)


async def add_upstream(request: Request) -> Response:
    """A pair that another server answers for.

    Raises:
        Forbidden: over TCP, for it may name a file whose content goes to that server.
    """
    body = await read(request, pairs.AddUpstreamRequest)
    if came_by_tcp(request.scope):
        raise Forbidden("Servers cannot be added over TCP; use the Unix socket: localspec add")
    daemon = state_of(request)
    return answer(await daemon.errands.run(upstreams.add, daemon.registry, body), 201)


async def remove(request: Request) -> Response:
    daemon = state_of(request)
    named = request.path_params["name"]
    if removed := await asyncio.to_thread(upstreams.remove, daemon.registry, named):
        return answer(removed)
    name = await asyncio.to_thread(daemon.registry.removable, request.path_params["name"])
    await daemon.rest(name)
    return answer(await asyncio.to_thread(daemon.registry.remove, name))


async def verify(request: Request) -> Response:
    """Events: bytes hashed so far, and in the last one what was found."""
    daemon, name = state_of(request), request.path_params["name"]
    if names_files(name):
        files = await daemon.named(name, request.receive)  # as for a load: refused, or there
        return EventStream(reported(daemon.errands, partial(verify_files, files)))
    return EventStream(reported(daemon.errands, partial(verify_pair, daemon.registry, name)))


async def collect(request: Request) -> Response:
    body = await read(request, pairs.CollectRequest)
    daemon = state_of(request)
    found = await asyncio.to_thread(daemon.registry.collect, dry_run=body.dry_run)
    states = await daemon.conversations.run(lambda each: each.collect(dry_run=body.dry_run))
    found.freed += sum(size for _, size in states)
    found.files += tuple(name for name, _ in states)
    return answer(found)


async def drafts(request: Request) -> Response:
    """Events: what is being measured, and in the last one the list.

    Raises:
        Forbidden: folders over TCP. Conflict: the engine is at work. As for a load: the target.
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
    """Events: what is being read, and in the last one the models and the pairs worth making.

    Raises:
        Forbidden: over TCP.
    """
    if came_by_tcp(request.scope):
        raise Forbidden(
            "The disk cannot be searched over TCP; use the Unix socket: localspec import"
        )
    body = await read(request, DiskRequest)
    registry, errands = state_of(request).registry, state_of(request).errands
    told = body.environment
    return EventStream(
        reported(errands, lambda report: disk.look(registry, body.folders, told, report))
    )
