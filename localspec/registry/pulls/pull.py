"""Pull a pair: plan it by the headers of its files, download them, and add it once they are complete."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from localspec.errors import (
    BadGguf,
    DiskFull,
    FileChanged,
    NotMatched,
    Offline,
    PullCancelled,
    Unreachable,
)
from localspec.files import format_size
from localspec.protocol.pairs import ForecastView
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.header import fit
from localspec.registry.header.fit import LoadOptions
from localspec.registry.header.gguf import FileSource, Source
from localspec.registry.header.model import ModelInfo, read_local_model, read_model
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.projector import (
    ARCHITECTURE,
    ProjectorInfo,
    check_projector,
    read_local_projector,
    read_projector,
)
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.offline import RemoteFile, find_in_cache, resolve_in_cache
from localspec.registry.hub.repository import list_parts
from localspec.registry.hub.retry import (
    DEFAULT_TUNING,
    OnWait,
    RetryPolicy,
    Tuning,
    call_with_retries,
    ignore_wait,
)
from localspec.registry.hub.transfer import (
    Flow,
    RateLimit,
    RemoteSource,
    Transfer,
    count_written_bytes,
    read_written_prefix,
)
from localspec.registry.pulls.messages import FileState
from localspec.registry.store.files import describe_free_space, sha256_of
from localspec.registry.store.store import (
    Part,
    Record,
    Store,
    StoredModel,
    list_local_parts,
    roles_for_pooling,
    store_model,
)

# Bytes that must stay free on the disk besides the files, for logs, state and other programs.
DISK_RESERVE_BYTES = 64 << 20
FROM_CACHE = "Offline: using the files in the Hugging Face cache; the hub may have newer ones."
# A user waits for the first response of the hub, and without a network it never comes.
_MAX_FIRST_TRIES = 4
_REPORT_INTERVAL_S = 0.25
_MAX_PLANS = 3  # a pull is planned again if a file changes on the hub meanwhile

Report = Callable[[tuple[FileState, ...]], None]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to download.

    prefix: the bytes that were read to check its header, which are not downloaded again. flow: an open
    download of the whole file, if the server ignores ranges.
    """

    remote: RemoteFile
    prefix: bytes = b""
    flow: Flow | None = None


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A target or draft before its weights are downloaded.

    files: several if the model is sharded, none if it is on this disk. stored: the model on this disk that
    is used as it is. from_cache: the hub could not be reached, so its local cache was used.
    """

    weights: HubFile
    files: tuple[PlannedFile, ...]
    model: ModelInfo
    stored: StoredModel | None = None
    from_cache: bool = False


@dataclass(frozen=True, slots=True)
class PlannedProjector:
    """The file by which a target reads pictures, before it is downloaded."""

    weights: HubFile
    files: tuple[PlannedFile, ...]
    projector: ProjectorInfo


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A pair that passed every check that headers allow.

    files: each file once, even if target and draft share it. fetch: the bytes still to download. forecast:
    how fast it should be, if that can be told.
    """

    name: str
    pair: CataloguePair
    target: PlannedModel
    draft: PlannedModel | None
    projector: PlannedProjector | None
    files: tuple[PlannedFile, ...]
    fetch: int
    notes: tuple[str, ...]
    forecast: ForecastView | None


@dataclass(slots=True)
class Puller:
    """Pulls pairs into a store.

    memory: None if it is not checked. load: how the pair would be loaded into it. limit: of all connections
    together. asked: written into the record.
    """

    store: Store
    hub: Hub = field(default_factory=Hub)
    tuning: Tuning = DEFAULT_TUNING
    memory: fit.FreeMemory | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    on_wait: OnWait = ignore_wait
    limit: RateLimit = field(default_factory=RateLimit)
    asked: str = ""

    def pull(
        self,
        name: str,
        pair: CataloguePair,
        report: Report = lambda files: None,
        planned: Callable[[PullPlan], None] = lambda plan: None,
        known: Mapping[HubFile, PlannedModel] | None = None,
    ) -> Record:
        """Check, download, verify and store a pair.

        report: called with the state of all files. planned: called with the plan. known: models whose
        headers are read already.

        Raises:
            RegistryError and below. What was downloaded is kept for the next try.
        """
        self.store.prepare()
        with self.store.pulling():
            for attempt in range(_MAX_PLANS):
                try:
                    plan = self.preflight(name, pair, known)
                    known = None  # if a file changes, all headers are read again
                    planned(plan)
                    record = self._make_record(plan, _Fetch(self, plan, report).run())
                    self.store.put_new(record)  # last, because a pair exists once its record does
                    return record
                except FileChanged:
                    if attempt + 1 == _MAX_PLANS:
                        raise
        raise AssertionError("unreachable: the loop returns or raises")

    def _make_record(self, plan: PullPlan, cached_paths: Mapping[str, Path]) -> Record:
        target = plan.target.model
        return Record(
            name=plan.name,
            target=self._to_stored(plan.target, cached_paths),
            draft=self._to_stored(plan.draft, cached_paths) if plan.draft else None,
            projector=self._to_stored(plan.projector, cached_paths) if plan.projector else None,
            created=time.time(),
            summary=plan.pair.summary,
            licence=plan.pair.licence,
            roles=roles_for_pooling(target.pooling) or plan.pair.roles,
            notes=plan.notes,
            template_sha256=target.template_hash,
            asked=self.asked,
            other_projector=plan.pair.other_projector,
        )

    def _to_stored(
        self, planned: PlannedModel | PlannedProjector, cached_paths: Mapping[str, Path]
    ) -> StoredModel:
        if isinstance(planned, PlannedModel) and planned.stored:
            return planned.stored
        if not planned.files:
            parts = list_local_parts(Path(planned.weights.file))
            return StoredModel(parts=parts, architecture=ARCHITECTURE)
        parts = tuple(self._to_part(file.remote, cached_paths) for file in planned.files)
        repo, revision = planned.weights.repo, planned.files[0].remote.commit
        if isinstance(planned, PlannedProjector):
            return StoredModel(parts=parts, architecture=ARCHITECTURE, repo=repo, revision=revision)
        return store_model(planned.model, parts, repo, revision)

    def _to_part(self, remote: RemoteFile, cached_paths: Mapping[str, Path]) -> Part:
        path = cached_paths.get(remote.sha256)
        return Part(
            file=remote.file,
            size=remote.size,
            sha256=remote.sha256,
            path=str(path.absolute()) if path else "",
            checked=(path or self.store.blob(remote.sha256)).stat().st_mtime_ns,
        )

    @property
    def first_contact(self) -> RetryPolicy:
        """The retry policy for the first response of the hub, for which a user waits."""
        usual = self.tuning.retry_policy
        return msgspec.structs.replace(usual, tries=min(usual.tries, _MAX_FIRST_TRIES))

    def preflight(
        self, name: str, pair: CataloguePair, known: Mapping[HubFile, PlannedModel] | None = None
    ) -> PullPlan:
        """Return the plan of a pull after all checks that headers allow.

        known: models whose headers are read already.

        Raises:
            NotMatched, CannotRollBack, DoesNotFit, DiskFull, BadGguf, HubError and below.
        """
        target, draft, notes = self._read_models(pair, known or {})
        models, expected = (target, draft) if draft else (target,), None
        projector = self.look_projector(pair.projector) if pair.projector else None
        if projector:
            check_projector(target.model, projector.projector)
        if self.memory:
            load = replace(
                self.load, projector=projector.projector.needed_bytes if projector else 0
            )
            draft_model = draft.model if draft else None
            fitted = fit.fit_pair(target.model, draft_model, self.memory, load)
            notes += fitted.notes
            expected = fit.forecast_fit(target.model, draft_model, fitted, load)
        notes += [note for model in models for note in _catalogue_differences(model)]
        if any(model.from_cache for model in models):
            notes.append(FROM_CACHE)
        if pair.draft_kind == "mtp-embedded" and (reason := target.model.unusable_heads_reason):
            notes.append(
                f"{reason[:1].upper()}{reason[1:]}; drafts come from the text itself (n-gram)."
            )
        planned = (*models, projector) if projector else models
        files = {file.remote.sha256: file for entry in planned for file in entry.files}
        fetch = sum(self.missing(file.remote) for file in files.values())
        self._check_disk(fetch)
        return PullPlan(
            name,
            pair,
            target,
            draft,
            projector,
            tuple(files.values()),
            fetch,
            tuple(notes),
            expected,
        )

    def _read_models(
        self, pair: CataloguePair, known: Mapping[HubFile, PlannedModel]
    ) -> tuple[PlannedModel, PlannedModel | None, list[str]]:
        """Return the target, the model that drafts, and notes about the two.

        A sidecar that turns out to be unusable is left out, since the user did not name it.
        """
        draft_weights = pair.draft or pair.sidecar

        def read(weights: HubFile) -> PlannedModel:
            return known.get(weights) or self.look(weights, as_draft=weights is draft_weights)

        with ThreadPoolExecutor(2, thread_name_prefix="header") as pool:
            target_future = pool.submit(read, pair.target)
            draft_future = pool.submit(read, draft_weights) if draft_weights else None
        target, sidecar_notes = target_future.result(), list[str]()
        try:
            draft = draft_future.result() if draft_future else None
            return target, draft, list(check_pair(target.model, draft.model if draft else None))
        except (BadGguf, NotMatched) as error:
            if pair.draft or not draft_weights:
                raise
            sidecar_notes.append(f"{error.message} Drafts come from the text itself (n-gram).")
        return target, None, [*check_pair(target.model, None), *sidecar_notes]

    def look(self, weights: HubFile, *, as_draft: bool | None = False) -> PlannedModel:
        """Find a model's files and read their headers; without a repository, those of a local file.

        as_draft: as `read_model`.
        """
        if not weights.repo:
            path = Path(weights.file)
            model = read_local_model(path, as_draft=as_draft)
            return PlannedModel(weights, (), model, self._find_stored(path, model))
        remotes, from_cache = self._resolve(weights)
        sources = [self._open_source(remote) for remote in remotes]
        model = read_model(sources, as_draft=as_draft)
        files = tuple(map(_planned_file, remotes, sources))
        return PlannedModel(weights, files, model, from_cache=from_cache)

    def look_projector(self, weights: HubFile) -> PlannedProjector:
        """Find a projector's file and read its header. Raises BadGguf, HubError and below."""
        if not weights.repo:
            return PlannedProjector(weights, (), read_local_projector(Path(weights.file)))
        (remote,), _ = self._resolve(weights)
        source = self._open_source(remote)
        projector = read_projector(source)
        return PlannedProjector(weights, (_planned_file(remote, source),), projector)

    def _resolve(self, weights: HubFile) -> tuple[tuple[RemoteFile, ...], bool]:
        """Return a model's files on the hub, and whether they come from its local cache."""
        repo, revision, files = weights.repo, weights.revision, list_parts(weights.file)
        try:
            return tuple(
                call_with_retries(
                    partial(self.hub.resolve, repo, file, revision),
                    self.first_contact,
                    self.on_wait,
                )
                for file in files
            ), False
        except (Offline, Unreachable):
            known = [resolve_in_cache(repo, file, revision) for file in files]
            cached = tuple(file for file in known if file)
            if len(cached) < len(files):
                raise
            return cached, True

    def _find_stored(self, path: Path, header_model: ModelInfo) -> StoredModel:
        """Return the store's entry for a local file.

        A file that is not in the store is hashed when it is loaded.
        """
        for record in self.store.listing().records:
            for model in record.models:
                if self.store.part_path(model.parts[0]) == path:
                    return model
        return store_model(header_model, list_local_parts(path))

    def _open_source(self, remote: RemoteFile) -> Source:
        """Return the source for a header: the disk if the file is there, else the hub."""
        for path in (self.store.blob(remote.sha256), find_in_cache(remote)):
            if path and path.is_file() and path.stat().st_size == remote.size:
                source = FileSource(path)
                source.name = remote.name
                return source
        prefix = read_written_prefix(self.store.unfinished(remote.sha256), remote.size)
        policy = self.tuning.retry_policy
        return RemoteSource(self.hub, remote, prefix, retry_policy=policy, on_wait=self.on_wait)

    def missing(self, remote: RemoteFile) -> int:
        """Return how many bytes of a file are neither in the store nor in the Hugging Face cache."""
        blob = self.store.blob(remote.sha256)
        if find_in_cache(remote) or (blob.is_file() and blob.stat().st_size == remote.size):
            return 0
        return remote.size - count_written_bytes(self.store.unfinished(remote.sha256), remote.size)

    def _check_disk(self, fetch: int) -> None:
        folder = self.store.root
        while not folder.exists():
            folder = folder.parent
        info = os.statvfs(folder)
        free = info.f_bavail * info.f_frsize
        if fetch and fetch + DISK_RESERVE_BYTES > free:
            raise DiskFull(
                f"Not enough disk space: {format_size(fetch)} more are needed (and "
                f"{format_size(DISK_RESERVE_BYTES)} in reserve), {describe_free_space(folder)}. Free some "
                "space (localspec gc) and pull again."
            )


class _Fetch:
    """The download of what a plan lacks. `report` is called with the state of each file."""

    def __init__(self, puller: Puller, plan: PullPlan, report: Report) -> None:
        self._puller, self._plan, self._report = puller, plan, report
        self._files = {
            file.remote.sha256: FileState(
                file.remote.name, file.remote.size - puller.missing(file.remote), file.remote.size
            )
            for file in plan.files
        }

    def run(self) -> dict[str, Path]:
        """Download the missing files into the store.

        Returns:
            The files that stay in the Hugging Face cache, by hash.
        """
        puller = self._puller
        cached_paths: dict[str, Path] = {}
        transfers: list[Transfer] = []
        stop = threading.Event()
        for file in self._plan.files:
            if path := self._find_verified(file.remote):
                cached_paths[file.remote.sha256] = path
                continue
            transfer = Transfer(
                puller.hub,
                puller.store,
                file.remote,
                puller.tuning,
                stop,
                prefix=file.prefix,
                limit=puller.limit,
                flow=file.flow,
                on_wait=puller.on_wait,
            )
            transfers.append(transfer)
        if transfers:
            self._transfer(transfers, stop)
        return cached_paths

    def _find_verified(self, remote: RemoteFile) -> Path | None:
        """Return the file in the Hugging Face cache if its hash is right.

        The cache's own download does not check the hash.
        """
        path = find_in_cache(remote)
        if path is None or self._puller.store.blob(remote.sha256).exists():
            return None

        def report_progress(bytes_read: int) -> None:
            self._set_progress(remote, remote.size, bytes_read)
            self._report(tuple(self._files.values()))

        return path if sha256_of(path, progress=report_progress) == remote.sha256 else None

    def _transfer(self, transfers: list[Transfer], stop: threading.Event) -> None:
        """Download all files at once; if one fails, the others stop and keep their bytes."""
        with ThreadPoolExecutor(len(transfers), thread_name_prefix="file") as pool:
            futures: list[Future[None]] = [pool.submit(transfer.run) for transfer in transfers]
            pending: set[Future[None]] = set(futures)
            try:
                while pending:
                    done, pending = wait(
                        pending, timeout=_REPORT_INTERVAL_S, return_when=FIRST_EXCEPTION
                    )
                    if any(future.exception() for future in done):
                        stop.set()
                    for transfer in transfers:
                        self._set_progress(transfer.remote, transfer.done, transfer.hashed)
                    self._report(tuple(self._files.values()))
            except BaseException:  # a callback failed, or the program is ending
                stop.set()
                raise
        failures = [error for future in futures if (error := future.exception())]
        # The file that failed comes before those that were stopped because of it.
        failures.sort(key=lambda error: isinstance(error, PullCancelled))
        if failures:
            raise failures[0]

    def _set_progress(self, remote: RemoteFile, done: int, hashed: int) -> None:
        self._files[remote.sha256] = FileState(remote.name, done, remote.size, hashed)


def _planned_file(remote: RemoteFile, source: Source) -> PlannedFile:
    if isinstance(source, RemoteSource):
        return PlannedFile(remote, bytes(source.prefix), source.flow)
    return PlannedFile(remote)


def _catalogue_differences(model: PlannedModel) -> list[str]:
    weights, notes = model.weights, []
    if not model.files:
        return []
    stated, actual = weights.sha256, model.files[0].remote.sha256
    if stated and stated != actual:
        notes.append(
            f"{weights.file} differs from the catalogue's (SHA-256 {stated[:12]}… there, "
            f"{actual[:12]}… on the hub); the hub's is verified and used."
        )
    stated, actual = weights.template_sha256, model.model.template_hash
    if stated and stated != actual:
        notes.append(
            f"The chat template in {weights.file} differs from the catalogue's (SHA-256 "
            f"{stated[:12]}… there, {actual[:12] or 'nothing'}… in the file); answers may "
            "differ."
        )
    return notes
