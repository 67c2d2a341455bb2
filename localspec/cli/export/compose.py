"""An exported pair as a compose file. What is a text there is JSON's, which is YAML's too."""

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
# As the images have their programs, where that is not on the path.
_PROGRAMS = {"llama-server": ["/app/llama-server"]}
# PyYAML and compose's own parser take JSON's texts but for these, which stand escaped.
_WIDE = 100
# Keys that are texts as they are: in YAML "0", "on" and "null" are none.
_PLAIN = re.compile(r"(?!(?:on|off|yes|no|true|false|null)$)[a-z][a-z_]+")


def compose(pair: Pair, place: Place, engine: str) -> str:
    """The file.

    Raises:
        UsageError: it is for one machine; or as the engine's.
    """
    if place.nodes > 1:
        raise UsageError(
            "A compose file is for one machine; for several: --to vllm or --to sglang."
        )
    mounts: list[dict[str, Any]] = []
    inside = replace(
        pair,
        target=_mounted(pair.target, "target", engine, mounts),
        draft=_mounted(pair.draft, "draft", engine, mounts) if pair.draft else None,
    )
    served = ENGINES[engine](inside, replace(place, host="0.0.0.0"))
    words = [*_PROGRAMS.get(engine, served.command[: served.program])]
    service: dict[str, Any] = {
        "image": IMAGES[engine],
        "entrypoint": words,
        "command": served.command[served.program :],
        "ports": [f"{'' if place.host else '127.0.0.1:'}{served.port}:{served.port}"],
        "volumes": [{"type": "volume", "source": "weights", "target": "/root/.cache"}, *mounts],
        "environment": ["HF_TOKEN"],  # the shell's, where it has one
        "ipc": "host",
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [_gpus(place)]}}},
    }
    whole: dict[str, Any] = {"services": {pair.served: service}, "volumes": {"weights": {}}}
    if served.files:
        whole["configs"] = {name: {"content": text} for name, text in served.files.items()}
        service["configs"] = [{"source": name, "target": f"/{name}"} for name in served.files]
        service["working_dir"] = "/"
    shown = [
        *comments([f"{pair.name} on {served.title}: docker compose up", *served.notes]),
        *_yaml(whole),
        *comments(connect.lines(pair, place, served)),
    ]
    return "\n".join(shown) + "\n"


def _gpus(place: Place) -> dict[str, Any]:
    return {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}


def _mounted(model: Model, role: str, engine: str, mounts: list[dict[str, Any]]) -> Model:
    """The model with its place inside, where it is a file or a folder of this machine."""
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
    for name, each in value.items():
        key = name if _PLAIN.fullmatch(name) else _scalar(name)
        if isinstance(each, dict) and each:
            yield f"{indent}{key}:"
            yield from _yaml(each, indent + "  ")
        elif isinstance(each, list) and len(_scalar(each)) > _WIDE:
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_scalar(item)}" for item in each)
        else:
            yield f"{indent}{key}: {_scalar(each)}"


def _scalar(value: Any) -> str:
    """JSON, in which compose finds none of the shell's variables."""
    return literals.yaml(value).replace("$", "$$")
