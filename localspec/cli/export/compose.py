"""An exported pair as a compose file. Its strings are JSON, which is also valid YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from localspec import literals
from localspec.cli.export import connect
from localspec.cli.export.engines import ENGINES, Place
from localspec.cli.export.pair import Model, Pair
from localspec.cli.export.script import comments
from localspec.errors import UsageError

IMAGES = {
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
    "llama-server": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}
# Programs that are not on the path of their image.
_PROGRAMS = {"llama-server": ["/app/llama-server"]}
_MAX_LIST_CHARACTERS = 100  # a longer list gets one line for each item
# Keys that need no quotes. In YAML, "0", "on" and "null" would not be strings.
_PLAIN_KEY = re.compile(r"(?!(?:on|off|yes|no|true|false|null)$)[a-z][a-z_]+")


def compose(pair: Pair, place: Place, engine: str) -> str:
    """Return the compose file.

    Raises:
        UsageError: the place has several machines, or the engine cannot serve the pair.
    """
    if place.nodes > 1:
        raise UsageError(
            "A compose file is for one machine; for several: --to vllm or --to sglang."
        )
    mounts: list[dict[str, Any]] = []
    mounted = replace(
        pair,
        target=_mount(pair.target, "target", engine, mounts),
        draft=_mount(pair.draft, "draft", engine, mounts) if pair.draft else None,
    )
    served = ENGINES[engine](mounted, replace(place, host="0.0.0.0"))
    program = [*_PROGRAMS.get(engine, served.command[: served.program])]
    service: dict[str, Any] = {
        "image": IMAGES[engine],
        "entrypoint": program,
        "command": served.command[served.program :],
        "ports": [f"{'' if place.host else '127.0.0.1:'}{served.port}:{served.port}"],
        "volumes": [{"type": "volume", "source": "weights", "target": "/root/.cache"}, *mounts],
        "environment": ["HF_TOKEN"],  # passed on from the shell, if it is set there
        "ipc": "host",
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [_gpus(place)]}}},
    }
    document: dict[str, Any] = {"services": {pair.served: service}, "volumes": {"weights": {}}}
    if served.files:
        document["configs"] = {name: {"content": text} for name, text in served.files.items()}
        service["configs"] = [{"source": name, "target": f"/{name}"} for name in served.files]
        service["working_dir"] = "/"
    lines = [
        *comments([f"{pair.name} on {served.title}: docker compose up", *served.notes]),
        *_yaml(document),
        *comments(connect.lines(pair, place, served)),
    ]
    return "\n".join(lines) + "\n"


def _gpus(place: Place) -> dict[str, Any]:
    return {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}


def _mount(model: Model, role: str, engine: str, mounts: list[dict[str, Any]]) -> Model:
    """Return the model with its path in the container, and add a mount for it if necessary."""
    if engine == "llama-server":
        if model.repo:
            return model
        path, inside = PurePath(model.path), f"/models/{role}/{PurePath(model.path).name}"
        source, model = path.parent, replace(model, path=inside)
    elif model.original.startswith("/"):
        source, model = PurePath(model.original), replace(model, original=f"/models/{role}")
    else:
        return model
    bind = {"type": "bind", "source": str(source), "target": f"/models/{role}", "read_only": True}
    mounts.append(bind)
    return model


def _yaml(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, item in value.items():
        key = name if _PLAIN_KEY.fullmatch(name) else _scalar(name)
        if isinstance(item, dict) and item:
            yield f"{indent}{key}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and len(_scalar(item)) > _MAX_LIST_CHARACTERS:
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_scalar(element)}" for element in item)
        else:
            yield f"{indent}{key}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    """Return a value as JSON, with dollar signs escaped, which compose would expand."""
    return literals.yaml(value).replace("$", "$$")
