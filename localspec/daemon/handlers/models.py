"""GET /v1/models, /health, /props and /slots."""

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

_NO_SEED = (1 << 32) - 1  # llama-server's: one is drawn


async def models(request: Request) -> Response:
    """The configured pair first, then the shipped one, the loaded one and all that were pulled.

    In Anthropic's shape for its clients, who ask by this path, too.
    """
    daemon = state_of(request)
    created = await asyncio.to_thread(_created, daemon)
    if _is_anthropics(request):
        return answer(anthropic.models(created))

    statuses = _statuses(daemon)

    def look() -> list[Model]:
        return [_model(daemon, name, when, statuses) for name, when in created.items()]

    return answer(ModelList(await asyncio.to_thread(look)))


async def model(request: Request) -> Response:
    """One of them, or a pair by another of its names.

    Raises:
        ModelNotFound: there is none.
    """
    daemon, name = state_of(request), request.path_params["name"]
    created = await asyncio.to_thread(_created, daemon)
    if name not in created:  # says what there is instead
        created[name] = await asyncio.to_thread(
            lambda: int(views.details(daemon.registry, name, 0, daemon.config).created)
        )
    if _is_anthropics(request):
        return answer(anthropic.models({name: created[name]}).data[0])
    statuses = _statuses(daemon)
    return answer(await asyncio.to_thread(_model, daemon, name, created[name], statuses))


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _created(daemon: State) -> dict[str, int]:
    """Names of pairs, each with the time since when it is here."""
    began = int(time.time() - (time.monotonic() - daemon.started))
    loaded = [each.name for each in daemon.supervisor.residents.loaded]
    first = [daemon.config.pair, BUILTIN, *loaded]
    listed = daemon.registry.store.listing().records
    first += daemon.registry.upstreams
    return dict.fromkeys(first, began) | {each.name: int(each.created) for each in listed}


def _model(daemon: State, name: str, created: int, statuses: Mapping[str, ModelStatus]) -> Model:
    found = Model(name, created, status=statuses.get(name, ModelStatus("unloaded")))
    with suppress(LocalspecError):  # `localspec list` says what is wrong with it
        view = views.details(daemon.registry, name, 0, daemon.config)
        info = daemon.supervisor.residents.info(view.name)
        served = info.n_ctx if info else view.fit.context if view.fit else view.context
        found.context_length, found.capabilities = served, view.capabilities
        found.meta = ModelMeta(served, view.target.context, view.target.parameters, view.size)
    return found


def _statuses(daemon: State) -> dict[str, ModelStatus]:
    """Of the pairs in memory, and of those that come."""
    found = {}
    for each in daemon.supervisor.residents.statuses():
        since = UNSET if each.since is None else int(each.since)
        memory = UNSET if each.memory is None else each.memory
        value: Literal["loaded", "loading"] = "loaded" if each.state == "ready" else "loading"
        found[each.name] = ModelStatus(value, since, memory)
    return found


async def health(request: Request) -> Response:
    """llama-server's shape; a daemon with nothing loaded is well, it loads on demand."""
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
    """llama-server's /props, of the pair that was asked last. Where none is loaded the configured one is, to
    describe it, unless it only rests.
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
                "params": {**info.sampling_defaults, "seed": _NO_SEED},
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
    """llama-server's /slots, of the pair that was asked last: `parallel` requests at once, and how many of
    them there are now.

    No request has a slot of its own here (the longest cached prefix decides, and it may move), so there
    is no more to be said of one; and nothing is loaded to say it.
    """
    daemon = state_of(request)
    shown = daemon.supervisor.residents.shown()
    queue, info = shown.admission, shown.info
    if request.query_params.get("fail_on_no_slot") == "1" and queue.running >= queue.parallel:
        raise Unavailable("No slot is idle.")
    same = {
        "n_ctx": info.n_ctx if info else 0,
        "speculative": info is not None and info.speculation is None,
    }
    return answer(
        [
            {"id": number, **same, "is_processing": number < queue.running}
            for number in range(queue.parallel)
        ]
    )


async def slot_action(request: Request) -> Response:
    """What llama-server does with a slot's state, as one that was started without --slot-save-path."""
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest("'action' must be 'save', 'restore' or 'erase'.", param="action")
    raise NotOffered(
        f"A slot cannot be made to {action} its state: slots are not assigned to clients. What was "
        "read is kept by its content, in memory and on disk (`prefix_memory`, `prefix_disk`), and found "
        "again without being asked for."
    )
