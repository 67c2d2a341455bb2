"""A pair of the person's own files. Blocks; for threads."""

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
        InvalidRequest: the name, or how a file is named. Conflict: the name is taken, or in use.
        ModelNotFound: no such file. BadGguf, UnsafeModel, NotMatched, CannotRollBack: the files.
    """
    from localspec.registry.store import local

    name = request.name
    registry.refuse_reserved(name)
    if request.replace and registry.in_use(name):
        raise Conflict(f"The pair '{name}' is in use; wait until it is idle, then try again.")
    named = [each for each in (request.target, request.draft) if each]
    for each in named:
        if not each.startswith("/") and ":" not in each:
            raise InvalidRequest(
                f"{each} must be an absolute path, or the name of a model in Ollama."
            )
    paths = [Path(each) if each.startswith("/") else names.one_file(each) for each in named]
    ollamas = any(not each.startswith("/") for each in named)  # its files are named by hashes
    return local.add(
        registry.store,
        name,
        *paths,
        roles=request.roles,
        pooling=request.pooling,
        replace=request.replace,
        summary=" with ".join(named) if ollamas else "",
        hash_now=request.hash_now,
    )
