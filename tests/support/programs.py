"""A home in which every program that stores models has left some."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.gguf_files import Gguf, model, sha256, shards

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LAYER = "application/vnd.ollama.image.model"


def in_hub(cache: Path, repo: str, file: str, data: bytes, commit: str = COMMIT) -> Path:
    """Write a file to the Hugging Face cache as huggingface_hub and llama.cpp do; return its link."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / sha256(data)
    link = folder / "snapshots" / commit / file
    for path in (blob, link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    (folder / "refs" / "main").write_text(commit)
    link.symlink_to(Path(*[".."] * (2 + file.count("/")), "blobs", blob.name))
    return link


def in_ollama(home: Path, manifest: str, data: bytes, *others: tuple[str, bytes]) -> Path:
    """Write a model as Ollama does; `manifest` is its path below `manifests`. Returns the blob.

    others: the kind and the content of each other layer.
    """
    blob = home / "blobs" / f"sha256-{sha256(data)}"
    file = home / "manifests" / manifest
    for path in (blob, file):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0"},
        {"mediaType": LAYER, "digest": f"sha256:{sha256(data)}", "size": len(data)},
    ]
    for kind, content in others:
        media_type = f"application/vnd.ollama.image.{kind}"
        layers.append({"mediaType": media_type, "digest": f"sha256:{sha256(content)}"})
        (blob.parent / f"sha256-{sha256(content)}").write_bytes(content)
    file.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def large(seed: int) -> Gguf:
    return model(layers=8, width=32, seed=seed)


def small(seed: int) -> Gguf:
    return model(layers=1, seed=seed)


def furnish(home: Path) -> dict[str, str]:
    """Write models of every program to `home`; return their names by path."""
    share = home / ".local/share"
    files = {
        ".cache/llama.cpp/bartowski_Big-7B-GGUF_Big-7B-Q4_K_M.gguf": "Big-7B-Q4_K_M.gguf",
        ".cache/llama.cpp/my_org_plain_Plain-1B.gguf": "Plain-1B.gguf",
        ".lmstudio/models/someone/Studio-GGUF/Studio-7B.Q8_0.GGUF": "Studio-7B.Q8_0.GGUF",
        "downloads/someone/Moved-GGUF/Moved-3B.gguf": "Moved-3B.gguf",
        ".cache/lm-studio/models/a/b/Older-1B.gguf": "Older-1B.gguf",
        ".local/share/Jan/data/llamacpp/models/Jan-v1-4B/model.gguf": "Jan-v1-4B",
        "jan/models/jan-nano/jan-nano.gguf": "jan-nano.gguf",
        ".local/share/nomic.ai/GPT4All/Meta-Llama-3-8B.Q4_0.gguf": "Meta-Llama-3-8B.Q4_0.gguf",
        ".cache/gpt4all/orca-mini.gguf": "orca-mini.gguf",
        "imported/Outside.gguf": "outside",
    }
    for seed, path in enumerate(files):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        small(seed).write(home / path)
    (home / ".cache/llama.cpp/manifest=my_org=plain=latest.json").write_text("{}")
    (home / ".lmstudio/settings.json").write_text(
        json.dumps({"downloadsFolder": str(home / "downloads")})
    )
    outside = share / "Jan/data/llamacpp/models/outside/model.yml"
    outside.parent.mkdir()
    outside.write_text(f"name: outside\nmodel_path: {home}/imported/Outside.gguf\nsize_bytes: 1\n")
    names = {str(home / path): name for path, name in files.items()}
    hub = home / ".cache/huggingface/hub"
    names[str(in_hub(hub, "Qwen/Q-7B-GGUF", "q-7b.gguf", large(20).data()))] = "q-7b.gguf"
    in_hub(hub, "Qwen/Q-7B-GGUF", "q-7b.gguf", large(20).data(), commit="f" * 40)
    link = in_hub(hub, "ggml-org/tiny-GGUF", "Q8_0/ggml-model-q8_0.gguf", small(21).data())
    names[str(link)] = "tiny-GGUF"
    link = in_hub(hub, "ggml-org/only-GGUF", "model.gguf", small(22).data())
    names[str(link)] = "only-GGUF"
    for part, data in shards(small(23), 2, "split").items():
        link = in_hub(hub, "a/split-GGUF", part, data)
        if "00001" in part:
            names[str(link)] = part
    ollama = home / ".ollama/models"
    for seed, (manifest, name) in enumerate(
        {
            "registry.ollama.ai/library/qwen2.5/7b": "qwen2.5:7b",
            "registry.ollama.ai/library/qwen2.5/0.5b": "qwen2.5:0.5b",
            "registry.ollama.ai/someone/mine/latest": "someone/mine:latest",
            "hf.co/bartowski/X-GGUF/Q4_K_M": "hf.co/bartowski/X-GGUF:Q4_K_M",
        }.items(),
        start=30,
    ):
        data = (large if name == "qwen2.5:7b" else small)(seed).data()
        names[str(in_ollama(ollama, manifest, data))] = name
    return names
