"""Look up files in the Hugging Face cache on this disk, for when there is no network."""

from __future__ import annotations

import re
from pathlib import Path

from localspec.paths import hf_cache
from localspec.registry.hub.hub import Listed, RemoteFile

_SHA256 = re.compile(r"[0-9a-f]{64}")


def cached_file(repo: str, file: str, commit: str, sha256: str, size: int) -> Path | None:
    """Return the file in the Hugging Face cache if its size matches.

    Its hash still has to be checked.
    """
    folder = hf_cache() / f"models--{repo.replace('/', '--')}"
    for path in (folder / "snapshots" / commit / file, folder / "blobs" / sha256):
        try:
            if path.resolve().name == sha256 and path.stat().st_size == size:
                return path
        except OSError:
            continue
    return None


def resolve_in_cache(repo: str, file: str, revision: str = "main") -> RemoteFile | None:
    """Return what the Hugging Face cache knows of a file on the hub, if the cache has all of it.

    The cache names large files by their SHA-256, and `refs` has the commit of each revision.
    """
    folder = hf_cache() / f"models--{repo.replace('/', '--')}"
    try:
        ref = folder / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        blob = (folder / "snapshots" / commit / file).resolve(strict=True)
        size = blob.stat().st_size
    except (OSError, ValueError, RuntimeError):
        return None
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return RemoteFile(repo, file, commit, blob.name, size)


def list_in_cache(repo: str, revision: str = "main") -> tuple[Listed, ...]:
    """Return the models of a repository that are complete in the Hugging Face cache."""
    folder = hf_cache() / f"models--{repo.replace('/', '--')}"
    try:
        ref = folder / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        snapshot = folder / "snapshots" / commit
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    except (OSError, ValueError):
        return ()
    resolved = [resolve_in_cache(repo, name, revision) for name in sorted(names)]
    return tuple(Listed(remote.file, remote.size) for remote in resolved if remote)
