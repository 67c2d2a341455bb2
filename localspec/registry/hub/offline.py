"""What is known of the hub without asking it: its address, its files, and their cache on this disk.

The daemon imports this. What speaks to the network (hub.py, network.py, transfer.py) is a pull's process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from localspec.errors import Offline
from localspec.paths import hf_cache_folder

HUB_URL = "https://huggingface.co"
SHA256 = re.compile(r"[0-9a-f]{64}")
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def find_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the hub in an environment."""
    return (environ.get("HF_ENDPOINT") or HUB_URL).rstrip("/")


def is_hub_url(endpoint: str) -> bool:
    """Return whether the text has the form of a hub's address."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def check_online(environ: Mapping[str, str] = os.environ) -> None:
    """Raise Offline if a variable forbids the network."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(variable, "").upper() in _TRUE_VALUES:
            raise Offline(
                f"{variable} is set, so nothing can be pulled; installed pairs still work."
            )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file on the hub, pinned to a commit and a hash. The size is in bytes."""

    repo: str
    file: str
    commit: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.file.rsplit("/", 1)[-1]


class ListedFile(msgspec.Struct, frozen=True):
    """One file in the hub's list of a repository, or a folder (see `type`). The size is in bytes.

    oid: the same for files of the same content, empty if unknown.
    """

    file: str = msgspec.field(name="path")
    size: int = 0
    type: str = "file"
    oid: str = ""


def find_in_cache(remote: RemoteFile) -> Path | None:
    """Return the file in the Hugging Face cache if its size matches; its hash still has to be checked."""
    folder = _cache_folder(remote.repo, os.environ)
    for path in (
        folder / "snapshots" / remote.commit / remote.file,
        folder / "blobs" / remote.sha256,
    ):
        try:
            if path.resolve().name == remote.sha256 and path.stat().st_size == remote.size:
                return path
        except OSError:
            continue
    return None


def resolve_in_cache(
    repo: str, file: str, revision: str = "main", environ: Mapping[str, str] = os.environ
) -> RemoteFile | None:
    """Return what the Hugging Face cache knows of a file on the hub, if the cache has all of it.

    The cache names large files by their SHA-256, and `refs` has the commit of each revision.
    """
    folder = _cache_folder(repo, environ)
    try:
        commit = _read_commit(folder, revision)
        blob = (folder / "snapshots" / commit / file).resolve(strict=True)
        size = blob.stat().st_size
    except (OSError, ValueError, RuntimeError):
        return None
    if blob.parent.name != "blobs" or not SHA256.fullmatch(blob.name):
        return None
    return RemoteFile(repo, file, commit, blob.name, size)


def list_in_cache(
    repo: str, revision: str = "main", environ: Mapping[str, str] = os.environ
) -> tuple[ListedFile, ...]:
    """Return the models of a repository that are complete in the Hugging Face cache."""
    folder = _cache_folder(repo, environ)
    try:
        snapshot = folder / "snapshots" / _read_commit(folder, revision)
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    except (OSError, ValueError):
        return ()
    resolved = [resolve_in_cache(repo, name, revision, environ) for name in sorted(names)]
    return tuple(
        ListedFile(remote.file, remote.size, oid=remote.sha256) for remote in resolved if remote
    )


def _cache_folder(repo: str, environ: Mapping[str, str]) -> Path:
    return hf_cache_folder(environ) / f"models--{repo.replace('/', '--')}"


def _read_commit(folder: Path, revision: str) -> str:
    ref = folder / "refs" / revision
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
