"""Before any weight is fetched: which files a pair takes, and all that their headers can tell."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from localspec.errors import BadGguf, DiskFull, NotMatched, Offline, Unreachable
from localspec.registry.catalogue import Pair, Weights
from localspec.registry.header import fit
from localspec.registry.header.model import Model, read_local_model, read_model
from localspec.registry.header.need import Load
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.source import FileSource, Source
from localspec.registry.hub.cache import cached_file, resolve_in_cache
from localspec.registry.hub.hub import Hub, RemoteFile
from localspec.registry.hub.journal import bytes_there, prefix_there
from localspec.registry.hub.remote import Flow, RemoteSource
from localspec.registry.hub.repository import parts_of
from localspec.registry.hub.retry import Patience, patiently
from localspec.registry.hub.transfer import Tuning
from localspec.registry.store.files import free_sentence
from localspec.registry.store.records import StoredModel
from localspec.registry.store.store import Store, local_parts

# Left free on the disk beyond the files themselves: logs, state and other programs live there too.
DISK_RESERVE = 64 << 20
FROM_CACHE = "Offline: using the files in the Hugging Face cache; the hub may have newer ones."
# A person waits for the first word of the hub, and without a network it never comes.
_FIRST_TRIES = 4


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to fetch. `prefix`: the bytes read to check it, which are not fetched again; `flow`: the
    rest, where the server sends it all the same.
    """

    remote: RemoteFile
    prefix: bytes = b""
    flow: Flow | None = None


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A target or draft before its weights are fetched; several `files` when it is sharded.

    `stored`: it is on this disk and used as it is; there are no `files` then.
    """

    weights: Weights
    files: tuple[PlannedFile, ...]
    model: Model
    stored: StoredModel | None = None
    from_cache: bool = False  # what the hub has was not to be learned


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair that passed every check that headers allow.

    `files`: each once, even if target and draft share one. `fetch`: bytes still to come.
    """

    name: str
    pair: Pair
    target: PlannedModel
    draft: PlannedModel | None
    files: tuple[PlannedFile, ...]
    fetch: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class Planner:
    """Plans pulls into a store. `memory` None leaves the memory check out."""

    store: Store
    hub: Hub = field(default_factory=Hub)
    tuning: Tuning = field(default_factory=Tuning)
    memory: Callable[[], fit.Memory] | None = None

    @property
    def first_contact(self) -> Patience:
        """For the first word of the hub, which a person waits for."""
        usual = self.tuning.patience
        return replace(usual, tries=min(usual.tries, _FIRST_TRIES))

    def preflight(
        self,
        name: str,
        pair: Pair,
        cancel: threading.Event | None = None,
        known: Mapping[Weights, PlannedModel] | None = None,
    ) -> Plan:
        """Everything that headers can tell, before any weight is fetched.

        Raises:
            NotMatched, CannotRollBack, DoesNotFit, DiskFull, BadGguf, HubError and below.
        """
        target, draft, notes = self._models(pair, cancel, known or {})
        models = (target, draft) if draft else (target,)
        chosen = self._fits(target.model, draft.model if draft else None)
        notes += chosen.notes if chosen else ()
        notes += [note for model in models for note in _differs_from_catalogue(model)]
        if any(model.from_cache for model in models):
            notes.append(FROM_CACHE)
        if pair.kind == "mtp-embedded" and (why := target.model.no_heads):
            notes.append(f"{why[:1].upper()}{why[1:]}; drafts come from the text itself (n-gram).")
        files = {each.remote.sha256: each for model in models for each in model.files}
        fetch = sum(self.missing(each.remote) for each in files.values())
        self._check_disk(fetch)
        return Plan(
            name=name,
            pair=pair,
            target=target,
            draft=draft,
            files=tuple(files.values()),
            fetch=fetch,
            notes=tuple(notes),
        )

    def _models(
        self,
        pair: Pair,
        cancel: threading.Event | None,
        known: Mapping[Weights, PlannedModel],
    ) -> tuple[PlannedModel, PlannedModel | None, list[str]]:
        """Target, what drafts, and what is to be known of the two. Without heads that are of no use: they are
        nothing that a person has named.
        """
        drafts = pair.draft or pair.heads

        def look(weights: Weights) -> PlannedModel:
            as_draft = weights is drafts
            return known.get(weights) or self.look(weights, cancel, as_draft=as_draft)

        with ThreadPoolExecutor(2, thread_name_prefix="header") as pool:
            ours = pool.submit(look, pair.target)
            theirs = pool.submit(look, drafts) if drafts else None
        target, said = ours.result(), list[str]()
        try:
            draft = theirs.result() if theirs else None
            return target, draft, list(check_pair(target.model, draft.model if draft else None))
        except (BadGguf, NotMatched) as error:
            if pair.draft or not drafts:
                raise
            said.append(f"{error.message} Drafts come from the text itself (n-gram).")
        return target, None, [*check_pair(target.model, None), *said]

    def look(
        self,
        weights: Weights,
        cancel: threading.Event | None = None,
        *,
        as_draft: bool = False,
    ) -> PlannedModel:
        """Resolve a model's files and read their headers; without a repository, of a file here. as_draft: as
        `read_model`.
        """
        if not weights.repo:
            path = Path(weights.file)
            model = read_local_model(path, as_draft=as_draft)
            return PlannedModel(weights, (), model, self._stored_here(path, model))
        remotes, from_cache = self._resolve(weights, cancel)
        sources = [self._source(remote, cancel) for remote in remotes]
        model = read_model(sources, as_draft=as_draft)
        files = tuple(
            PlannedFile(remote, bytes(source.prefix), source.flow)
            if isinstance(source, RemoteSource)
            else PlannedFile(remote)
            for remote, source in zip(remotes, sources, strict=True)
        )
        return PlannedModel(weights, files, model, from_cache=from_cache)

    def _resolve(
        self, weights: Weights, cancel: threading.Event | None
    ) -> tuple[tuple[RemoteFile, ...], bool]:
        """A model's files as the hub has them; without a network as its cache here has all of them."""
        files = parts_of(weights.file)
        try:
            return tuple(
                patiently(
                    partial(self.hub.resolve, weights.repo, file, weights.revision),
                    self.first_contact,
                    cancel,
                )
                for file in files
            ), False
        except (Offline, Unreachable):
            cached = [resolve_in_cache(weights.repo, each, weights.revision) for each in files]
            known = tuple(each for each in cached if each)
            if len(known) < len(files):
                raise
            return known, True

    def _stored_here(self, path: Path, read: Model) -> StoredModel:
        """A file of the store with all that is known of it; any other is hashed when it is loaded."""
        for record in self.store.listing().records:
            for model in record.models:
                if self.store.part_path(model.parts[0]) == path:
                    return model
        parts = local_parts(path)
        return StoredModel(parts=parts, architecture=read.architecture, pooling=read.pooling)

    def _source(self, remote: RemoteFile, cancel: threading.Event | None) -> Source:
        """Where to read a header: the disk when the file is there, else the hub."""
        for path in (self.store.blob(remote.sha256), in_cache(remote)):
            if path and path.is_file() and path.stat().st_size == remote.size:
                source = FileSource(path)
                source.name = remote.name
                return source
        prefix = prefix_there(self.store.unfinished(remote.sha256), remote.size)
        return RemoteSource(self.hub, remote, prefix, self.tuning.patience, cancel)

    def _fits(self, target: Model, draft: Model | None) -> fit.Fit | None:
        return fit.fit(target, draft, self.memory(), Load()) if self.memory else None

    def missing(self, remote: RemoteFile) -> int:
        """Bytes of a file that neither the store nor the Hugging Face cache has."""
        blob = self.store.blob(remote.sha256)
        if in_cache(remote) or (blob.is_file() and blob.stat().st_size == remote.size):
            return 0
        return remote.size - bytes_there(self.store.unfinished(remote.sha256), remote.size)

    def _check_disk(self, fetch: int) -> None:
        folder = self.store.root
        while not folder.exists():
            folder = folder.parent
        info = os.statvfs(folder)
        free = info.f_bavail * info.f_frsize
        if fetch and fetch + DISK_RESERVE > free:
            raise DiskFull(
                f"Not enough disk space: {fetch} more bytes are needed (and {DISK_RESERVE} in "
                f"reserve), {free_sentence(folder)}. Free some space (localspec gc) and pull "
                "again."
            )


def in_cache(remote: RemoteFile) -> Path | None:
    return cached_file(remote.repo, remote.file, remote.commit, remote.sha256, remote.size)


def _differs_from_catalogue(model: PlannedModel) -> list[str]:
    weights, notes = model.weights, []
    if not model.files:
        return []
    stated, found = weights.sha256, model.files[0].remote.sha256
    if stated and stated != found:
        notes.append(
            f"{weights.file} differs from the catalogue's (SHA-256 {stated[:12]}… there, "
            f"{found[:12]}… on the hub); the hub's is verified and used."
        )
    stated, found = weights.template_sha256, model.model.template_hash
    if stated and stated != found:
        notes.append(
            f"The chat template in {weights.file} differs from the catalogue's (SHA-256 "
            f"{stated[:12]}… there, {found[:12] or 'nothing'}… in the file); answers may "
            "differ."
        )
    return notes
