"""Handle GET /v1/models, /health, /props and /slots, and /localspec/pulls, /pairs, /gc, /drafts and /disk.

A pull goes on when its client disconnects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localspec import extras
from localspec.chat.tools import describe_format
from localspec.children import Child, Deadline, helper_environment
from localspec.daemon.http.requests import json_response, read_body
from localspec.daemon.http.sse import EventStream, stream_reports
from localspec.daemon.http.tcp import came_by_tcp
from localspec.daemon.pairs import names, tasks, views
from localspec.daemon.pairs.names import hidden_file_errors
from localspec.daemon.pairs.tasks import verify_pair
from localspec.daemon.state import DaemonState, state_of
from localspec.daemon.worker.loaded import LoadedPair
from localspec.daemon.worker.queue import Job
from localspec.errors import (
    Forbidden,
    InvalidRequest,
    LocalspecError,
    ModelNotFound,
    NotOffered,
    Unavailable,
)
from localspec.protocol import pairs
from localspec.protocol.answers import Model, ModelList, ModelMeta, ModelStatus
from localspec.protocol.calls import UNKNOWN_FORMAT, CallFormat
from localspec.protocol.pairs import DiskRequest, DraftsRequest, PullRequest
from localspec.registry.pulls.messages import RUNNING_STATES, PullState
from localspec.registry.pulls.running import Pull
from localspec.registry.registry import BUILTIN, Registry, add_local_pair, is_file_name

_LEARN_TIMEOUT_S = 30.0  # for the processes to start and to render a few short chats
_RANDOM_SEED = (1 << 32) - 1  # llama-server's value for "draw a random seed"


async def models(request: Request) -> Response:
    """List the configured pair first, then the built-in one, the loaded ones and all pulled ones."""
    return json_response(ModelList(await list_models(state_of(request))))


async def model(request: Request) -> Response:
    """Return one model by its name, or a pair by another of its names."""
    return json_response(await find_model(request))


async def list_models(daemon: DaemonState) -> list[Model]:
    statuses = _model_statuses(daemon)

    def build() -> list[Model]:
        created = _creation_times(daemon)
        return [_model(daemon, name, seconds, statuses) for name, seconds in created.items()]

    return await asyncio.to_thread(build)


async def find_model(request: Request) -> Model:
    """Return the pair whose name is in a request's path. Raises ModelNotFound."""
    daemon, name = state_of(request), request.path_params["name"]
    statuses = _model_statuses(daemon)

    def build() -> Model:
        created = _creation_times(daemon).get(name)
        if created is None:  # `views.pair_details` knows further names.
            created = int(views.pair_details(daemon.registry, name, 0, daemon.config).created)
        return _model(daemon, name, created, statuses)

    return await asyncio.to_thread(build)


def _creation_times(daemon: DaemonState) -> dict[str, int]:
    """Return the names of all pairs, each with the Unix time since when it has been available."""
    started = int(time.time() - (time.monotonic() - daemon.started))
    loaded = [pair.name for pair in daemon.pairs.loaded]
    pair_names = [daemon.config.pair, BUILTIN, *loaded]
    records = daemon.registry.store.listing().records
    pair_names += daemon.registry.upstreams
    created = {record.name: int(record.created) for record in records}
    return dict.fromkeys(pair_names, started) | created


def _model(
    daemon: DaemonState, name: str, created: int, statuses: Mapping[str, ModelStatus]
) -> Model:
    entry = Model(name, created, status=statuses.get(name, ModelStatus("unloaded")))
    with suppress(LocalspecError):  # `localspec list` reports what is wrong with the pair.
        view = views.pair_details(daemon.registry, name, 0, daemon.config)
        info = daemon.pairs.info(view.name)
        n_ctx = info.n_ctx if info else view.fit.context if view.fit else view.context
        entry.capabilities = view.capabilities
        if n_ctx:  # unknown of another server's model
            entry.context_length = n_ctx
            entry.meta = ModelMeta(n_ctx, view.target.context, view.target.parameters, view.size)
    return entry


def _model_statuses(daemon: DaemonState) -> dict[str, ModelStatus]:
    """Return the status of every pair that is loaded or being loaded."""
    statuses = {}
    for pair in daemon.pairs.statuses():
        since = UNSET if pair.since is None else int(pair.since)
        memory = UNSET if pair.memory is None else pair.memory
        value: Literal["loaded", "loading"] = "loaded" if pair.state == "ready" else "loading"
        statuses[pair.name] = ModelStatus(value, since, memory)
    return statuses


async def health(request: Request) -> Response:
    """Handle GET /health in llama-server's format; a daemon with nothing loaded is healthy."""
    daemon = state_of(request)
    if daemon.draining:
        return json_response(_unavailable("Shutting down"), 503)
    table = daemon.pairs
    if table.present and not table.loaded:
        return json_response(_unavailable("Loading model"), 503)
    return json_response({"status": "ok"})


def _unavailable(message: str) -> dict[str, Any]:
    return {"error": {"code": 503, "message": message, "type": "unavailable_error"}}


async def props(request: Request) -> Response:
    """Handle GET /props in llama-server's format, for the pair that was used last.

    If no pair is loaded, the configured one is loaded to describe it, unless it was used last and is only
    idle.
    """
    daemon = state_of(request)
    table = daemon.pairs
    loaded = table.most_recent().info
    info = loaded or table.last_loaded
    if info is None or (not loaded and info.name != names.resolve_default("", daemon.config)):
        info = await daemon.pairs.ready(await daemon.resolve_pair("", request.receive))
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": info.n_ctx,
                "params": {**info.sampling_defaults, "seed": _RANDOM_SEED},
            },
            "total_slots": daemon.config.parallel,
            "model_alias": info.name,
            "model_path": (await daemon.resolve_pair(info.name, request.receive)).target,
            "chat_template": info.chat_template or "",
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": info.backend,
            "modalities": {"vision": info.reads_pictures, "audio": False},
            "is_sleeping": table.info(info.name) is None,
        }
    )


async def slots(request: Request) -> Response:
    """Handle GET /slots in llama-server's format, for the pair that was used last.

    The slots are `parallel`, of which as many are busy as requests are running. No request has a slot of
    its own here (the longest cached prefix decides, and it may move), so the first slots have the running
    requests. No pair is loaded for this.
    """
    daemon = state_of(request)
    recent = daemon.pairs.most_recent()
    queue, info = recent.admission, recent.info
    if request.query_params.get("fail_on_no_slot") == "1" and queue.running >= queue.parallel:
        raise Unavailable("No slot is idle.")
    shared = {
        "n_ctx": info.n_ctx if info else 0,
        "speculative": info is not None and info.speculation is None,
    }
    return json_response(
        [
            {
                "id": slot_id,
                **shared,
                "is_processing": slot_id < queue.running,
                **(_prompt_of(queue.jobs[slot_id], recent) if slot_id < queue.running else {}),
            }
            for slot_id in range(queue.parallel)
        ]
    )


def _prompt_of(job: Job, pair: LoadedPair) -> dict[str, Any]:
    """Return how much of a running request's prompt is read, and how long the rest will take."""
    seconds = pair.forecast.reading_s(job) if job.prompt else None
    return {
        "n_prompt_tokens": job.prompt,
        "n_prompt_tokens_processed": job.read,
        "prompt_remaining_ms": None if seconds is None else int(1e3 * seconds),
    }


async def slot_action(request: Request) -> Response:
    """Refuse to save, restore or erase a slot, as llama-server does without --slot-save-path."""
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest.at("action", "must be 'save', 'restore' or 'erase'.")
    raise NotOffered(
        f"A slot cannot be made to {action} its state: slots are not assigned to clients. What was "
        "read is kept by its content, in memory and on disk (`prefix_memory`, `prefix_disk`), and found "
        "again without being asked for."
    )


# Fast hashing changes the state hundreds of times a second, more often than anybody can read.
_STATE_INTERVAL_S = 0.1
_CANCEL_TIMEOUT_S = 5.0  # how long the answer to a cancellation waits for the end of the pull


async def list_pulls(request: Request) -> Response:
    registry = state_of(request).registry
    states = await asyncio.to_thread(lambda: registry.pulls.states())
    return json_response({"pulls": states})


async def start_pull(request: Request) -> Response:
    """Start a pull and return 202 with its state, or the state of the same pull if that runs already."""
    body = await read_body(request, PullRequest)
    # A client over TCP may not choose which servers the daemon contacts.
    for name in ("endpoint", "network"):
        if came_by_tcp(request.scope) and getattr(body, name):
            raise Forbidden(
                f"'{name}' is not accepted over TCP, because the daemon would contact any address "
                "it names; set HF_ENDPOINT and proxies in the daemon's own environment.",
                param=name,
            )
    return json_response((await begin_pull(request, body)).state, 202)


async def begin_pull(request: Request, body: PullRequest) -> Pull:
    """Start a pull for a request of any protocol, and return it. Raises as `pairs.tasks.start_pull`."""
    daemon = state_of(request)
    if daemon.draining:
        raise Unavailable("The daemon is shutting down; try again.", retry_after=2)
    # Over TCP no answer may reveal which files this machine has.
    local = not came_by_tcp(request.scope)
    return await asyncio.to_thread(tasks.start_pull, daemon.registry, body, whole_disk=local)


async def show_pull(request: Request) -> Response:
    return json_response((await _pull(request)).state)


async def cancel_pull(request: Request) -> Response:
    """Cancel a pull; one that has ended is no longer listed."""
    pull = await _pull(request)
    state_of(request).registry.pulls.forget(pull.name)
    pull.cancel()
    await asyncio.to_thread(pull.wait, _CANCEL_TIMEOUT_S)
    return json_response(pull.state)


async def pull_events(request: Request) -> Response:
    """Stream every state of the pull, the present one first and the final one last."""
    return EventStream(partial(report_states, await _pull(request)))


async def report_states(pull: Pull, emit: Callable[[PullState], Awaitable[object]]) -> None:
    """Call `emit` with every state of the pull, the present one first and the final one last."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop has ended with the daemon
            loop.call_soon_threadsafe(changed.set)

    with pull.watched(notify):
        while True:
            changed.clear()
            state = pull.state
            await emit(state)
            if state.state not in RUNNING_STATES:
                return
            await changed.wait()
            await asyncio.sleep(_STATE_INTERVAL_S)


async def _pull(request: Request) -> Pull:
    registry: Registry = state_of(request).registry

    def find() -> Pull:
        """Find the pull by the pair's own name, another name in the catalogue, or a repository."""
        name: str = request.path_params["name"]
        with suppress(ModelNotFound):  # The pair may have been removed from the catalogue since.
            name, _ = registry.catalogue.find(name)
        return registry.pulls.find(name)

    return await asyncio.to_thread(find)


async def list_pairs(request: Request) -> Response:
    """List the pairs on this machine, and with ?all=1 those of the catalogue."""
    daemon = state_of(request)
    with_catalogue = request.query_params.get("all", "0") not in ("", "0", "false")
    listing = await asyncio.to_thread(
        views.list_pairs, daemon.registry, with_catalogue, daemon.config
    )
    listing.configured = await asyncio.to_thread(daemon.registry.listed_name, daemon.config.pair)
    listing.problems += [problem for problem in daemon.problems if problem not in listing.problems]
    loaded = {status.name: status for status in daemon.pairs.statuses()}
    for entry in listing.pairs:
        if status := loaded.get(entry.name):
            entry.takes, entry.since = status.memory, status.since
    return json_response(listing)


async def show_pair(request: Request) -> Response:
    """Describe one pair; ?context=N estimates its memory for N tokens."""
    daemon = state_of(request)
    text = request.query_params.get("context", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest.at("context", "must be a whole number of tokens.")
    name, config, by_tcp = request.path_params["name"], daemon.config, came_by_tcp(request.scope)

    def describe() -> pairs.PairView:
        view = views.pair_details(daemon.registry, name, int(text), config, by_tcp=by_tcp)
        preset = daemon.registry.catalogue.presets.get(view.name)
        template = view.target.template.text if view.target.template else ""
        if preset and preset.chat_template:
            template = preset.chat_template
        if template and not view.target.pooling:
            info = daemon.pairs.info(view.name)
            is_loaded = info is not None and info.chat_template == template
            calls = info.dialect.calls if info and is_loaded else _learn_calls(template)
            view.calls = describe_format(calls)
        return view

    return json_response(await asyncio.to_thread(describe))


def _learn_calls(template: str) -> CallFormat:
    """Return the notation of calls of a pair that is not loaded; blocks while a process learns it."""
    learner = Child("localspec.engine.prompt.dialect", environment=helper_environment())
    try:
        with learner:
            reply = learner.ask(template.encode(), Deadline(_LEARN_TIMEOUT_S))
        return msgspec.json.decode(reply, type=CallFormat)
    except (EOFError, OSError, msgspec.DecodeError):
        return UNKNOWN_FORMAT


async def add_pair(request: Request) -> Response:
    """Make a pair of files on this machine."""
    body = await read_body(request, pairs.AddRequest)
    daemon = state_of(request)
    registry = daemon.registry
    if body.replace:
        await daemon.unload_if_idle(body.name)
    with hidden_file_errors():
        record = await daemon.long_work.run(add_local_pair, registry, body)
    return json_response(views.pair_entry(record, registry.in_use), 201)


async def remove_pair(request: Request) -> Response:
    daemon, name = state_of(request), request.path_params["name"]
    if upstreams := extras.load("upstream", "pairs"):
        removed = await asyncio.to_thread(upstreams.remove_upstream, daemon.registry, name)
        if removed:
            daemon.pairs.forget_upstream(removed.name)
            return json_response(removed)
    name = await asyncio.to_thread(daemon.registry.check_removable, name)
    await daemon.unload_if_idle(name)
    return json_response(await asyncio.to_thread(daemon.registry.remove, name))


async def verify_stored(request: Request) -> Response:
    """Hash the files of a pair; the events are the bytes hashed so far and, in the last one, the result."""
    daemon, pair = state_of(request), request.path_params["name"]
    if is_file_name(pair):  # refuse the same files as a load
        pair = await daemon.resolve_named(pair, request.receive)
    verify = partial(verify_pair, daemon.registry, pair)
    return EventStream(stream_reports(daemon.long_work, verify))


async def collect_garbage(request: Request) -> Response:
    """Delete files and saved states that nothing uses."""
    body = await read_body(request, pairs.CollectRequest)
    daemon = state_of(request)
    collected = await asyncio.to_thread(daemon.registry.collect_garbage, dry_run=body.dry_run)
    states = await daemon.conversations.run(lambda store: store.collect(dry_run=body.dry_run))
    collected.freed += sum(size for _, size in states)
    collected.files += tuple(name for name, _ in states)
    return json_response(collected)


async def find_drafts(request: Request) -> Response:
    """List draft models for a target; the events are the current measurement and, in the last one, the list.

    Raises:
        Forbidden: `folders` came over TCP.
        Conflict: the engine is busy.
    """
    body = await read_body(request, DraftsRequest)
    if body.folders and came_by_tcp(request.scope):
        message = "'folders' cannot be searched over TCP; use the Unix socket: localspec drafts"
        raise Forbidden(message, param="folders")
    daemon = state_of(request)
    pair = await daemon.resolve_named(body.target, request.receive)
    if pair.upstream is not None:
        message = f"'{pair.name}' is served by another server, which has drafts of its own."
        raise InvalidRequest(message, param="target")
    trials = tasks.DraftTrials(daemon.pairs) if body.measure else None
    rank = partial(
        views.rank_drafts_for, daemon.registry, pair, body.folders, daemon.config, trials
    )
    return EventStream(stream_reports(daemon.long_work, rank))


async def search_disk(request: Request) -> Response:
    """Search the disk for models; the events are what is being read and, in the last one, the findings."""
    if came_by_tcp(request.scope):
        message = "The disk cannot be searched over TCP; use the Unix socket: localspec import"
        raise Forbidden(message)
    body, daemon = await read_body(request, DiskRequest), state_of(request)
    search = partial(views.search_disk, daemon.registry, body.folders, body.environment)
    return EventStream(stream_reports(daemon.long_work, search))
