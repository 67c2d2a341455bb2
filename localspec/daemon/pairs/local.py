"""Make a pair of the person's own files. Blocks, so call it in a thread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localspec.daemon.pairs import names
from localspec.daemon.pairs.registry import Registry
from localspec.errors import Conflict, InvalidRequest
from localspec.protocol.pairs import AddRequest

if TYPE_CHECKING:
    from localspec.registry.store.records import Record


def add(registry: Registry, request: AddRequest) -> Record:
    """Make the pair.

    Raises:
        InvalidRequest: The name of the pair or of a file is not allowed.
        Conflict: The name is taken, or the pair is in use.
        ModelNotFound: A file does not exist.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: The files cannot be used.
    """
    from localspec.registry.store import local

    name = request.name
    registry.refuse_reserved(name)
    if request.replace and registry.in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    file_names = [file for file in (request.target, request.draft) if file]
    for file in file_names:
        if not file.startswith("/") and ":" not in file:
            raise InvalidRequest(
                f"{file} must be an absolute path, or the name of a model in Ollama."
            )
    paths = [Path(file) if file.startswith("/") else names.one_file(file) for file in file_names]
    # Ollama names its files by their hashes, so the summary says which models they are.
    from_ollama = any(not file.startswith("/") for file in file_names)
    return local.add(
        registry.store,
        name,
        *paths,
        roles=request.roles,
        pooling=request.pooling,
        replace=request.replace,
        summary=" with ".join(file_names) if from_ollama else "",
        hash_now=request.hash_now,
    )
