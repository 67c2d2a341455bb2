"""Handle GET /v1/models, /health, /props and /slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.anthropic import answer as anthropic
from localspec.daemon.http.requests import answer
from localspec.daemon.pairs import names, views
from localspec.daemon.pairs.names import BUILTIN
from localspec.daemon.state import State, state_of
from localspec.errors import InvalidRequest, LocalspecError, NotOffered, Unavailable
from localspec.protocol.answers import Model, ModelList, ModelMeta, ModelStatus

_RANDOM_SEED = (1 << 32) - 1  # llama-server's value for "draw a random seed"


async def models(request: Request) -> Response:
    """List the configured pair first, then the built-in one, the loaded ones and all pulled ones.

    The format is Anthropic's for its clients, which use the same path.
    """
    daemon = state_of(request)
    created = await asyncio.to_thread(_creation_times, daemon)
    if _is_anthropic_client(request):
        return answer(anthropic.models(created))

    statuses = _model_statuses(daemon)

    def build() -> list[Model]:
        return [_model(daemon, name, seconds, statuses) for name, seconds in created.items()]

    return answer(ModelList(await asyncio.to_thread(build)))


async def model(request: Request) -> Response:
    """Return one model by its name, or a pair by another of its names.

    Raises:
        ModelNotFound: there is no such model.
    """
    daemon, name = state_of(request), request.path_params["name"]
    created = await asyncio.to_thread(_creation_times, daemon)
    if name not in created:  # `views.details` knows further names, and its error lists the pairs.
        created[name] = await asyncio.to_thread(
            lambda: int(views.details(daemon.registry, name, 0, daemon.config).created)
        )
    if _is_anthropic_client(request):
        return answer(anthropic.models({name: created[name]}).data[0])
    statuses = _model_statuses(daemon)
    return answer(await asyncio.to_thread(_model, daemon, name, created[name], statuses))


def _is_anthropic_client(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _creation_times(daemon: State) -> dict[str, int]:
    """Return the names of all pairs, each with the Unix time since when it has been available."""
    started = int(time.time() - (time.monotonic() - daemon.started))
    loaded = [pair.name for pair in daemon.supervisor.residents.loaded]
    pair_names = [daemon.config.pair, BUILTIN, *loaded]
    records = daemon.registry.store.listing().records
    pair_names += daemon.registry.upstreams
    created = {record.name: int(record.created) for record in records}
    return dict.fromkeys(pair_names, started) | created


def _model(daemon: State, name: str, created: int, statuses: Mapping[str, ModelStatus]) -> Model:
    entry = Model(name, created, status=statuses.get(name, ModelStatus("unloaded")))
    with suppress(LocalspecError):  # `localspec list` reports what is wrong with the pair.
        view = views.details(daemon.registry, name, 0, daemon.config)
        info = daemon.supervisor.residents.info(view.name)
        n_ctx = info.n_ctx if info else view.fit.context if view.fit else view.context
        entry.context_length, entry.capabilities = n_ctx, view.capabilities
        entry.meta = ModelMeta(n_ctx, view.target.context, view.target.parameters, view.size)
    return entry


def _model_statuses(daemon: State) -> dict[str, ModelStatus]:
    """Return the status of every pair that is loaded or being loaded."""
    statuses = {}
    for pair in daemon.supervisor.residents.statuses():
        since = UNSET if pair.since is None else int(pair.since)
        memory = UNSET if pair.memory is None else pair.memory
        value: Literal["loaded", "loading"] = "loaded" if pair.state == "ready" else "loading"
        statuses[pair.name] = ModelStatus(value, since, memory)
    return statuses


async def health(request: Request) -> Response:
    """Handle GET /health in llama-server's format; a daemon with nothing loaded is healthy."""
    daemon = state_of(request)
    if daemon.draining:
        return answer(_unavailable("Shutting down"), 503)
    residents = daemon.supervisor.residents
    if residents.present and not residents.loaded:
        return answer(_unavailable("Loading model"), 503)
    return answer({"status": "ok"})


def _unavailable(message: str) -> dict[str, Any]:
    return {"error": {"code": 503, "message": message, "type": "unavailable_error"}}


async def props(request: Request) -> Response:
    """Handle GET /props in llama-server's format, for the pair that was used last.

    If no pair is loaded, the configured one is loaded to describe it, unless it was used last and is only
    idle.
    """
    daemon = state_of(request)
    residents = daemon.supervisor.residents
    loaded = residents.shown().info
    info = loaded or residents.last
    if info is None or (not loaded and info.name != names.full_name("", daemon.config)):
        info = await daemon.supervisor.ready(await daemon.pair("", request.receive))
    return answer(
        {
            "default_generation_settings": {
                "n_ctx": info.n_ctx,
                "params": {**info.sampling_defaults, "seed": _RANDOM_SEED},
            },
            "total_slots": daemon.config.parallel,
            "model_alias": info.name,
            "model_path": (await daemon.pair(info.name, request.receive)).target,
            "chat_template": info.chat_template or "",
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": info.backend,
            "modalities": {"vision": False, "audio": False},
            "is_sleeping": residents.info(info.name) is None,
        }
    )


async def slots(request: Request) -> Response:
    """Handle GET /slots in llama-server's format, for the pair that was used last.

    The slots are `parallel`, of which as many are busy as requests are running. No request has a slot of
    its own here (the longest cached prefix decides, and it may move), so there is nothing more to report of
    one. No pair is loaded for this.
    """
    daemon = state_of(request)
    recent = daemon.supervisor.residents.shown()
    queue, info = recent.admission, recent.info
    if request.query_params.get("fail_on_no_slot") == "1" and queue.running >= queue.parallel:
        raise Unavailable("No slot is idle.")
    shared = {
        "n_ctx": info.n_ctx if info else 0,
        "speculative": info is not None and info.speculation is None,
    }
    return answer(
        [
            {"id": slot_id, **shared, "is_processing": slot_id < queue.running}
            for slot_id in range(queue.parallel)
        ]
    )


async def slot_action(request: Request) -> Response:
    """Refuse to save, restore or erase a slot, as llama-server does without --slot-save-path."""
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest("'action' must be 'save', 'restore' or 'erase'.", param="action")
    raise NotOffered(
        f"A slot cannot be made to {action} its state: slots are not assigned to clients. What was "
        "read is kept by its content, in memory and on disk (`prefix_memory`, `prefix_disk`), and found "
        "again without being asked for."
    )
