"""The user's own files: checked as a pull checks, and used where they lie."""

from __future__ import annotations

import dataclasses
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from localspec.errors import BadGguf, Conflict, InvalidRequest, ModelNotFound
from localspec.protocol.settings import Pooling
from localspec.registry.catalogue import NAME, reserved
from localspec.registry.header.model import Model, read_local_model, shard_paths
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.weights import check_weights
from localspec.registry.store import integrity
from localspec.registry.store.files import Hashes
from localspec.registry.store.records import Record, StoredModel, roles_of
from localspec.registry.store.store import Store, local_parts

_SAME = (
    "Target and draft are the same file: such a draft costs as much as it saves. "
    "Leave out the draft, or use a smaller model of the same family (to find one: "
    "localspec drafts FILE)."
)


def add(
    store: Store,
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    pooling: Pooling | None = None,
    summary: str = "",
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
            f"'{name[:80]}' is not a valid pair name; use at most 64 lowercase letters, "
            "digits, '.', '_' and '-', starting with a letter or digit.",
            param="name",
        )
    if what := reserved(name):
        raise InvalidRequest(f"'{name}' cannot be a pair's name: {what}.", param="name")
    if not replace and _exists(store, name):
        raise Conflict(f"A pair '{name}' already exists; to replace it, add: --replace")
    if draft and target.exists() and draft.exists() and target.samefile(draft):
        raise InvalidRequest(_SAME, param="draft")
    hashes = store.hashes if hash_now else None
    record = describe_files(name, target, draft, roles=roles, pooling=pooling, hashes=hashes)
    if record.draft and _content(record.draft) == _content(record.target):
        raise InvalidRequest(_SAME, param="draft")
    if draft and record.draft and record.draft.size > record.target.size:
        record = msgspec.structs.replace(
            record, notes=(*record.notes, _swapped(record, target, draft))
        )
    draft_here = _shared(store, record.draft) if record.draft else None
    record = msgspec.structs.replace(
        record, target=_shared(store, record.target), draft=draft_here, summary=summary
    )
    store.put_new(record)
    return record


def refreshed(
    store: Store,
    record: Record,
    cancel: threading.Event | None = None,
    progress: Callable[[int, int], None] = lambda done, size: None,
) -> tuple[Record, str]:
    """A pair of own files as they are now, and what to say of it where they have changed: it is the
    person's file, so another one in its place is a newer version and no damage.

    `progress(done, total)` in bytes hears of the hashing of what seems to have changed.

    Raises:
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: what is there now cannot be used.
        StoreError: it cannot be written down. PullCancelled: `cancel` was set meanwhile.
    """
    if record.source != "own":
        return record, ""
    changed, done = [], 0
    for part in record.parts:
        told = integrity.shifted(progress, done, record.size)
        if integrity.changed(store, part, cancel, told):
            changed.append(part.file)
        done += part.size
    if not changed:
        return record, ""
    target = Path(record.target.parts[0].path)
    draft = Path(record.draft.parts[0].path) if record.draft else None
    writes = record.target.pooling is None  # what was told by the file may be otherwise now
    roles = record.roles if writes else ("chat",)
    now = describe_files(record.name, target, draft, roles=roles, pooling=record.pooling)
    now = msgspec.structs.replace(now, created=record.created, summary=record.summary)
    store.put(now)
    verb = "has" if len(changed) == 1 else "have"
    return now, f"{' and '.join(changed)} {verb} changed since the pair was added or last used."


def describe_files(
    name: str,
    target: Path,
    draft: Path | None = None,
    *,
    roles: Sequence[str] = ("chat",),
    pooling: Pooling | None = None,
    hashes: Hashes | None = None,
) -> Record:
    """The record of such a pair, checked and not stored (the pair inside the package uses this).
    pooling: what a person has chosen.
    """
    ours = _checked(target)
    ours = dataclasses.replace(ours, pooling=pooling or ours.pooling)
    theirs = _checked(draft, as_draft=True) if draft else None
    notes = check_pair(ours, theirs)
    return Record(
        name=name,
        target=_stored(ours, target, hashes),
        draft=_stored(theirs, draft, hashes) if theirs and draft else None,
        source="own",
        created=time.time(),
        roles=roles_of(ours.pooling) or tuple(roles),
        notes=notes,
        template_sha256=ours.template_hash,
        pooling=pooling,
    )


def _shared(store: Store, model: StoredModel) -> StoredModel:
    """Files that lie in the store already are kept while one pair of those that use them is there."""
    return msgspec.structs.replace(
        model,
        parts=tuple(
            msgspec.structs.replace(part, path="")
            if part.sha256 and Path(part.path) == store.blob(part.sha256).absolute()
            else part
            for part in model.parts
        ),
    )


def _content(model: StoredModel) -> list[str]:
    """What its files are told apart by; their paths where they are not hashed yet."""
    return [part.sha256 or part.path for part in model.parts]


def _swapped(record: Record, target: Path, draft: Path) -> str:
    files = f"--target {shlex.quote(str(draft))} --draft {shlex.quote(str(target))}"
    return (
        f"The draft {draft.name} is larger than the target {target.name}, so it costs more than it "
        f"can save. If the two are swapped: localspec add {record.name} {files} --replace"
    )


def _exists(store: Store, name: str) -> bool:
    try:
        store.get(name)
    except ModelNotFound:
        return False
    return True


def _checked(path: Path, *, as_draft: bool = False) -> Model:
    for part in shard_paths(path):
        if not part.exists():
            raise BadGguf(f"{part} does not exist.")
    model = read_local_model(path, as_draft=as_draft)
    for part in shard_paths(path):
        check_weights(part)
    return model


def _stored(model: Model, path: Path, hashes: Hashes | None) -> StoredModel:
    return StoredModel(
        parts=local_parts(path, hashes),
        architecture=model.architecture,
        parameters=model.parameters,
        heads=model.drafting_heads,
        pooling=model.pooling,
    )
