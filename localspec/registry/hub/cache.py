"""What the Hugging Face cache on this disk has of the hub, for when there is no network."""

from __future__ import annotations

import re
from pathlib import Path

from localspec.paths import hf_cache
from localspec.registry.hub.hub import Listed, RemoteFile

_SHA256 = re.compile(r"[0-9a-f]{64}")


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


def resolve_in_cache(repo: str, file: str, revision: str = "main") -> RemoteFile | None:
    """What the Hugging Face cache knows of a file of the hub, where it is there whole.

    Large files lie there under their SHA-256, `refs` has each revision's commit.
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
    """The models of a repository that the Hugging Face cache has whole."""
    folder = hf_cache() / f"models--{repo.replace('/', '--')}"
    try:
        ref = folder / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        snapshot = folder / "snapshots" / commit
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    except (OSError, ValueError):
        return ()
    known = [resolve_in_cache(repo, name, revision) for name in sorted(names)]
    return tuple(Listed(each.file, each.size) for each in known if each)
