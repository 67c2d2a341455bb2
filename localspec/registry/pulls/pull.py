"""Pulling a pair: look at the headers first, fetch both files, show it when both are whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from localspec.errors import (
    DiskFull,
    FileChanged,
    Offline,
    PullCancelled,
    Unreachable,
)
from localspec.registry.catalogue import Pair, Weights
from localspec.registry.header import fit
from localspec.registry.header.gguf import FileSource, Source
from localspec.registry.header.model import Model, read_local_model, read_model, shard_names
from localspec.registry.header.pairing import check_pair
from localspec.registry.hub.cache import cached_file, resolve_in_cache
from localspec.registry.hub.hub import Hub, RemoteFile
from localspec.registry.hub.journal import bytes_there, prefix_there
from localspec.registry.hub.remote import Flow, RemoteSource
from localspec.registry.hub.retry import Patience, patiently
from localspec.registry.hub.transfer import Limit, Transfer, Tuning
from localspec.registry.store.files import check_cancel, free_sentence, sha256_of
from localspec.registry.store.records import Part, Record, StoredModel
from localspec.registry.store.store import Store, local_parts

# Left free on the disk beyond the files themselves: logs, state and other programs live there too.
DISK_RESERVE = 64 << 20
HEADS_UNUSED = (
    "This model's own heads (MTP) are not run yet: it drafts from the text itself (n-gram)."
)
FROM_CACHE = (
    "Without a network: the files are those of the Hugging Face cache; the hub may have newer ones."
)
_TICK = 0.25  # seconds between two reports of progress
# A person waits for the first word of the hub, and without a network it never comes.
_FIRST_TRIES = 4
_CHANGES = 3  # how often a file may change on the hub during one pull


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A target or draft before its weights are fetched; several `remotes` when it is sharded.

    `prefixes`: the bytes read to check each of them, which are not fetched again; `flows`: the rest,
    where the server sends it all the same. `stored`: it is on this disk and used as it is; there are
    no `remotes` then.
    """

    weights: Weights
    remotes: tuple[RemoteFile, ...]
    model: Model
    prefixes: tuple[bytes, ...]
    header_bytes: int  # of them over the network, this time
    stored: StoredModel | None = None
    flows: tuple[Flow | None, ...] = ()
    from_cache: bool = False  # what the hub has was not to be learned


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair that passed every check that headers allow.

    `fetch`: bytes still to come; `header_bytes`: bytes the checks themselves fetched.
    """

    name: str
    pair: Pair
    target: PlannedModel
    draft: PlannedModel | None
    remotes: tuple[RemoteFile, ...]
    fit: fit.Fit | None
    fetch: int
    header_bytes: int
    notes: tuple[str, ...]

    @property
    def prefixes(self) -> dict[str, bytes]:
        """The known first bytes of each file, by hash."""
        models = (self.target, self.draft) if self.draft else (self.target,)
        return {
            remote.sha256: prefix
            for model in models
            for remote, prefix in zip(model.remotes, model.prefixes, strict=True)
        }

    @property
    def flows(self) -> dict[str, Flow | None]:
        """The files that are on their way, by hash."""
        models = (self.target, self.draft) if self.draft else (self.target,)
        pairs = [each for model in models for each in zip(model.remotes, model.flows, strict=False)]
        return {remote.sha256: flow for remote, flow in pairs}


@dataclass(frozen=True, slots=True)
class FileProgress:
    """One file: bytes there, bytes hashed, bytes in all."""

    file: str
    done: int
    hashed: int
    size: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a pull stands."""

    files: tuple[FileProgress, ...]

    @property
    def done(self) -> int:
        return sum(file.done for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def hashed(self) -> int:
        return sum(file.hashed for file in self.files)

    @property
    def verifying(self) -> bool:
        return self.done == self.size


@dataclass(slots=True)
class Puller:
    """Pulls pairs into a store. `memory` None leaves the memory check out; `asked` goes into the
    record."""

    store: Store
    hub: Hub = field(default_factory=Hub)
    tuning: Tuning = field(default_factory=Tuning)
    memory: Callable[[], fit.Memory] | None = None
    limit: Limit = field(default_factory=lambda: Limit(0))
    asked: str = ""

    @property
    def first_contact(self) -> Patience:
        """For the first word of the hub, which a person waits for."""
        usual = self.tuning.patience
        return replace(usual, tries=min(usual.tries, _FIRST_TRIES))

    def pull(
        self,
        name: str,
        pair: Pair,
        progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        planned: Callable[[Plan], None] | None = None,
        known: Mapping[Weights, PlannedModel] | None = None,
    ) -> Record:
        """Check, fetch, verify, show. Blocks; call it in a thread.

        `known`: models whose headers were read already.

        Raises:
            RegistryError and below: one sentence; what was fetched is kept for the next try.
        """
        cancel = cancel or threading.Event()
        self.store.prepare()
        with self.store.pulling():
            for change in range(_CHANGES):
                try:
                    plan = self.preflight(name, pair, cancel, known)
                    known = None  # should a file change, all is read again
                    if planned:
                        planned(plan)
                    return self.run(plan, progress, cancel)
                except FileChanged:
                    if change + 1 == _CHANGES:
                        raise
        raise AssertionError("unreachable: the loop returns or raises")

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
        wanted = [pair.target, pair.draft] if pair.draft else [pair.target]
        with ThreadPoolExecutor(len(wanted), thread_name_prefix="header") as pool:
            models = list(
                pool.map(lambda each: (known or {}).get(each) or self.look(each, cancel), wanted)
            )
        target, draft = models[0], models[1] if len(models) > 1 else None
        notes = list(check_pair(target.model, draft.model if draft else None))
        chosen = self._fits(target.model, draft.model if draft else None)
        notes += chosen.notes if chosen else ()
        notes += [note for model in models for note in _differs_from_catalogue(model)]
        if any(model.from_cache for model in models):
            notes.append(FROM_CACHE)
        if pair.kind in ("mtp-embedded", "mtp-sidecar"):
            notes.append(HEADS_UNUSED)
        remotes = _distinct(models)
        fetch = sum(self._missing(remote) for remote in remotes)
        self._check_disk(fetch)
        return Plan(
            name=name,
            pair=pair,
            target=target,
            draft=draft,
            remotes=remotes,
            fit=chosen,
            fetch=fetch,
            header_bytes=sum(model.header_bytes for model in models),
            notes=tuple(notes),
        )

    def run(
        self, plan: Plan, progress: Callable[[Progress], None] | None, cancel: threading.Event
    ) -> Record:
        """Fetch what a plan lacks; the record appears last."""
        used: dict[str, Path] = {}
        transfers: list[Transfer] = []
        stop = _Either(cancel)
        for remote in plan.remotes:
            path = self._whole_in_cache(
                remote, cancel, partial(self._looking, plan, used, remote, progress)
            )
            if path:
                used[remote.sha256] = path
            else:
                prefix = plan.prefixes.get(remote.sha256, b"")
                flow = plan.flows.get(remote.sha256)
                transfers.append(
                    Transfer(
                        self.hub, self.store, remote, self.tuning, stop, prefix, self.limit, flow
                    )
                )
        if transfers:
            self._transfer(plan, transfers, used, progress, stop)
        record = self._record(plan, used)
        self.store.put_new(record)
        return record

    def _transfer(
        self,
        plan: Plan,
        transfers: list[Transfer],
        used: dict[str, Path],
        progress: Callable[[Progress], None] | None,
        stop: _Either,
    ) -> None:
        """All files at once; when one fails the others stop and keep what they have."""

        def report() -> None:
            if progress:
                progress(_progress(plan, transfers, used))

        with ThreadPoolExecutor(len(transfers), thread_name_prefix="file") as pool:
            futures: list[Future[None]] = [pool.submit(each.run) for each in transfers]
            pending: set[Future[None]] = set(futures)
            try:
                while pending:
                    done, pending = wait(pending, timeout=_TICK, return_when=FIRST_EXCEPTION)
                    if any(future.exception() for future in done):
                        stop.mine.set()
                    report()
            except BaseException:  # a callback failed, or the program is ending
                stop.mine.set()
                raise
        failures = [error for future in futures if (error := future.exception())]
        failures.sort(key=lambda error: isinstance(error, PullCancelled))  # the cause first
        if failures:
            raise failures[0]

    def look(self, weights: Weights, cancel: threading.Event | None = None) -> PlannedModel:
        """Resolve a model's files and read their headers; without a repository, of a file here."""
        if not weights.repo:
            path = Path(weights.file)
            stored = self._stored_here(path)
            return PlannedModel(weights, (), read_local_model(path), (), 0, stored)
        remotes, from_cache = self._resolve(weights, cancel)
        sources = [self._source(remote, cancel) for remote in remotes]
        model = read_model(sources)
        far = [each if isinstance(each, RemoteSource) else None for each in sources]
        return PlannedModel(
            weights=weights,
            remotes=remotes,
            model=model,
            prefixes=tuple(bytes(each.prefix) if each else b"" for each in far),
            header_bytes=sum(each.fetched for each in far if each),
            flows=tuple(each.flow if each else None for each in far),
            from_cache=from_cache,
        )

    def _resolve(
        self, weights: Weights, cancel: threading.Event | None
    ) -> tuple[tuple[RemoteFile, ...], bool]:
        """A model's files as the hub has them; without a network as its cache here has all of them."""
        files = _files(weights.file)
        try:
            return tuple(
                patiently(
                    lambda file=file: self.hub.resolve(  # type: ignore[misc]
                        weights.repo, file, weights.revision
                    ),
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

    def _stored_here(self, path: Path) -> StoredModel:
        """A file of the store with all that is known of it; any other is hashed when it is loaded."""
        for record in self.store.listing().records:
            for model in record.models:
                if self.store.part_path(model.parts[0]) == path:
                    return model
        parts = local_parts(path)
        return StoredModel(parts=parts, architecture=read_local_model(path).architecture)

    def _source(self, remote: RemoteFile, cancel: threading.Event | None) -> Source:
        """Where to read a header: the disk when the file is there, else the hub."""
        for path in (self.store.blob(remote.sha256), _cached(remote)):
            if path and path.is_file() and path.stat().st_size == remote.size:
                source = FileSource(path)
                source.name = remote.name
                return source
        prefix = prefix_there(self._part_path(remote), remote.size)
        return RemoteSource(self.hub, remote, prefix, self.tuning.patience, cancel)

    def _part_path(self, remote: RemoteFile) -> Path:
        return self.store.parts / f"{remote.sha256}.part"

    def _fits(self, target: Model, draft: Model | None) -> fit.Fit | None:
        return fit.fit(target, draft, self.memory()) if self.memory else None

    def _missing(self, remote: RemoteFile) -> int:
        """Bytes of a file that neither the store nor the Hugging Face cache has."""
        blob = self.store.blob(remote.sha256)
        if _cached(remote) or (blob.is_file() and blob.stat().st_size == remote.size):
            return 0
        return remote.size - bytes_there(self._part_path(remote), remote.size)

    def _check_disk(self, fetch: int) -> None:
        folder = self.store.root
        while not folder.exists():
            folder = folder.parent
        info = os.statvfs(folder)
        free = info.f_bavail * info.f_frsize
        if fetch and fetch + DISK_RESERVE > free:
            raise DiskFull(
                f"The disk is too full: {fetch} more bytes are needed (and {DISK_RESERVE} in "
                f"reserve), {free_sentence(folder)}. Make room (localspec gc) and pull again."
            )

    def _looking(
        self,
        plan: Plan,
        used: dict[str, Path],
        now: RemoteFile,
        progress: Callable[[Progress], None] | None,
        read: int,
    ) -> None:
        """Report how much of the file `now`, which is here, was hashed."""
        files = []
        for each in plan.remotes:
            size = each.size
            hashed = read if each is now else size if each.sha256 in used else 0
            there = size if hashed else size - self._missing(each)
            files.append(FileProgress(each.name, there, hashed, size))
        if progress:
            progress(Progress(tuple(files)))

    def _whole_in_cache(
        self, remote: RemoteFile, cancel: threading.Event, told: Callable[[int], None]
    ) -> Path | None:
        """The file in the Hugging Face cache, hash checked: its own download does not check it."""
        path = _cached(remote)
        if path is None or self.store.blob(remote.sha256).exists():
            return None
        check_cancel(cancel)
        return path if sha256_of(path, progress=told, cancel=cancel) == remote.sha256 else None

    def _record(self, plan: Plan, used: dict[str, Path]) -> Record:
        return Record(
            name=plan.name,
            target=self._stored(plan.target, used),
            draft=self._stored(plan.draft, used) if plan.draft else None,
            created=time.time(),
            summary=plan.pair.summary,
            licence=plan.pair.licence,
            roles=plan.pair.roles,
            notes=plan.notes,
            template_sha256=plan.target.model.template_hash,
            asked=self.asked,
        )

    def _stored(self, planned: PlannedModel, used: dict[str, Path]) -> StoredModel:
        if planned.stored:
            return planned.stored
        return StoredModel(
            parts=tuple(self._part(remote, used) for remote in planned.remotes),
            architecture=planned.model.architecture,
            repo=planned.weights.repo,
            revision=planned.remotes[0].commit,
            parameters=planned.model.parameters,
        )

    def _part(self, remote: RemoteFile, used: dict[str, Path]) -> Part:
        path = used.get(remote.sha256)
        return Part(
            file=remote.file,
            size=remote.size,
            sha256=remote.sha256,
            path=str(path.absolute()) if path else "",
            checked=(path or self.store.blob(remote.sha256)).stat().st_mtime_ns,
        )


class _Either(threading.Event):
    """Set when the person cancels, or when another file of the same pull failed."""

    def __init__(self, theirs: threading.Event) -> None:
        super().__init__()
        self.theirs = theirs
        self.mine = threading.Event()

    def is_set(self) -> bool:
        return self.theirs.is_set() or self.mine.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until either is set or `timeout` seconds are over."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (end is None or time.monotonic() < end):
            time.sleep(min(0.1, max(0.0, end - time.monotonic())) if end else 0.1)
        return self.is_set()


def _files(file: str) -> list[str]:
    """All parts of a file on the hub, in its folder there."""
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shard_names(name)]


def _distinct(models: list[PlannedModel]) -> tuple[RemoteFile, ...]:
    """Every file once, even if target and draft share one."""
    files = {remote.sha256: remote for model in models for remote in model.remotes}
    return tuple(files.values())


def _cached(remote: RemoteFile) -> Path | None:
    return cached_file(remote.repo, remote.file, remote.commit, remote.sha256, remote.size)


def _differs_from_catalogue(model: PlannedModel) -> list[str]:
    weights, notes = model.weights, []
    if not model.remotes:
        return []
    stated, found = weights.sha256, model.remotes[0].sha256
    if stated and stated != found:
        notes.append(
            f"{weights.file} is not the file the catalogue knows (SHA-256 {stated[:12]}… there, "
            f"{found[:12]}… on the hub); the hub's is verified and used."
        )
    stated, found = weights.template_sha256, model.model.template_hash
    if stated and stated != found:
        notes.append(
            f"The chat template in {weights.file} is not the one the catalogue knows (SHA-256 "
            f"{stated[:12]}… there, {found[:12] or 'nothing'}… in the file); answers may differ."
        )
    return notes


def _progress(plan: Plan, transfers: list[Transfer], used: dict[str, Path]) -> Progress:
    under_way = {each.remote.sha256: each for each in transfers}
    files = []
    for remote in plan.remotes:
        each = under_way.get(remote.sha256)
        done, hashed = (each.done, each.hashed) if each else (remote.size, remote.size)
        files.append(FileProgress(remote.name, done, hashed, remote.size))
    return Progress(tuple(files))
