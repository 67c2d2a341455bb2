"""Models that are already on this disk, wherever other programs put them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.registry.model import shard_names
from localspec.registry.store import Store

_MANIFEST_LIMIT = 1 << 20
_OLLAMA_MODEL = "application/vnd.ollama.image.model"


@dataclass(frozen=True, slots=True)
class Found:
    """A model file (the first part of a sharded one), what to call it, and who put it there."""

    path: Path
    name: str
    origin: str


def hf_cache() -> Path:
    """The Hugging Face cache, found as huggingface_hub does, without importing it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def cached_file(repo: str, file: str, commit: str, sha256: str, size: int) -> Path | None:
    """The file in the Hugging Face cache, if it seems whole; its hash is still to be checked."""
    folder = hf_cache() / f"models--{repo.replace('/', '--')}"
    for path in (folder / "snapshots" / commit / file, folder / "blobs" / sha256):
        try:
            if path.resolve().name == sha256 and path.stat().st_size == size:
                return path
        except OSError:
            continue
    return None


def find_models(store: Store, folders: Iterable[Path] = ()) -> list[Found]:
    """Every GGUF model on this disk in the places we know and in `folders`, each once."""
    seen: set[tuple[int, int]] = set()
    models: list[Found] = []
    for found in _everywhere(store, folders):
        try:
            info = found.path.stat()
        except OSError:
            continue
        if (info.st_dev, info.st_ino) not in seen and _is_first_part(found.name):
            seen.add((info.st_dev, info.st_ino))
            models.append(found)
    return models


def _everywhere(store: Store, folders: Iterable[Path]) -> Iterator[Found]:
    for record in store.listing().records:
        for model in record.models:
            yield Found(store.part_path(model.parts[0]), model.file, f"pair {record.name}")
    yield from _in_folder(hf_cache(), "Hugging Face cache")
    for folder in (Path("~/.lmstudio/models"), Path("~/.cache/lm-studio/models")):
        yield from _in_folder(folder.expanduser(), "LM Studio")
    yield from _in_ollama()
    for folder in folders:
        yield from _in_folder(folder, str(folder))


def _is_first_part(name: str) -> bool:
    """Not a later part of a sharded model, and not the image half of one."""
    base = Path(name).name
    try:
        return shard_names(base)[0] == base and not base.lower().startswith("mmproj")
    except Exception:
        return False


def _in_folder(folder: Path, origin: str) -> Iterator[Found]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            if file.endswith(".gguf"):
                yield Found(Path(place) / file, file, origin)


def _in_ollama() -> Iterator[Found]:
    """Ollama names its files by hash; its manifests say which of them are models."""
    own = os.environ.get("OLLAMA_MODELS")
    homes = ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for home in [own] if own else homes:
        root = Path(home).expanduser()
        for place, folders, files in os.walk(root / "manifests"):
            folders.sort()
            for file in sorted(files):
                blob = _ollama_blob(root, Path(place) / file)
                if blob:
                    yield Found(blob, f"{Path(place).name}:{file}", "Ollama")


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    try:
        if manifest.stat().st_size > _MANIFEST_LIMIT:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next(each["digest"] for each in layers if each["mediaType"] == _OLLAMA_MODEL)
        kind, _, value = digest.partition(":")
        return root / "blobs" / f"{kind}-{value}" if value.isalnum() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
