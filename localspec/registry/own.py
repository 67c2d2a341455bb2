"""The user's own files: checked as a pull checks, and used where they lie."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from localspec.errors import Conflict, InvalidRequest, ModelNotFound
from localspec.registry.catalogue import NAME, reserved
from localspec.registry.errors import BadGguf
from localspec.registry.model import Model, check_weights, read_local_model, shard_paths
from localspec.registry.pairing import check_pair
from localspec.registry.records import Record, StoredModel
from localspec.registry.store import Store, local_parts


def add(
    store: Store,
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    hash_now: bool = True,
    replace: bool = False,
) -> Record:
    """Make a pair of files that lie anywhere on this disk.

    `hash_now` False puts the hashing off until the pair is first loaded.

    Raises:
        InvalidRequest: the name. Conflict: it is taken. BadGguf, UnsafeModel, NotMatched,
        CannotRollBack: the files.
    """
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{name[:80]}' cannot be a pair's name: small letters, digits, '.', '_' and '-', at "
            "most 64, beginning with a letter or digit.",
            param="name",
        )
    if what := reserved(name):
        raise InvalidRequest(f"'{name}' cannot be a pair's name: {what}.", param="name")
    if not replace and _exists(store, name):
        raise Conflict(f"There is a pair '{name}' already; run: localspec rm {name}")
    record = describe_files(name, target, draft, roles=roles, hash_now=hash_now)
    store.put_new(record)
    return record


def describe_files(
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    hash_now: bool = True,
) -> Record:
    """The record of such a pair, checked and not stored (the pair inside the package uses this)."""
    ours = _checked(target)
    theirs = _checked(draft) if draft else None
    notes = check_pair(ours, theirs)
    return Record(
        name=name,
        target=_stored(ours, target, hash_now),
        draft=_stored(theirs, draft, hash_now) if theirs and draft else None,
        source="own",
        created=time.time(),
        roles=tuple(roles),
        notes=notes,
        template_sha256=ours.template_hash,
    )


def _exists(store: Store, name: str) -> bool:
    try:
        store.get(name)
    except ModelNotFound:
        return False
    return True


def _checked(path: Path) -> Model:
    for part in shard_paths(path):
        if not part.exists():
            raise BadGguf(f"{part} does not exist.")
    model = read_local_model(path)
    for part in shard_paths(path):
        check_weights(part)
    return model


def _stored(model: Model, path: Path, hash_now: bool) -> StoredModel:
    return StoredModel(
        parts=local_parts(path, hash_now=hash_now),
        architecture=model.architecture,
        parameters=model.parameters,
    )
