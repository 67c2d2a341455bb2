"""Pull a pair: check the headers, download all files, and add the pair once they are complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from localspec.errors import FileChanged, PullCancelled
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.header.projector import ARCHITECTURE
from localspec.registry.hub.offline import RemoteFile, find_in_cache
from localspec.registry.hub.transfer import RateLimit, Transfer
from localspec.registry.pulls.messages import FileState
from localspec.registry.pulls.plan import PlannedModel, PlannedProjector, Planner, PullPlan
from localspec.registry.store.files import sha256_of
from localspec.registry.store.store import (
    Part,
    Record,
    StoredModel,
    list_local_parts,
    roles_for_pooling,
)

_REPORT_INTERVAL_S = 0.25
_MAX_PLANS = 3  # a pull is planned again if a file changes on the hub meanwhile

Report = Callable[[tuple[FileState, ...]], None]


@dataclass(slots=True)
class Puller(Planner):
    """Pulls pairs into a store. `asked` is written into the record."""

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
        return StoredModel(
            parts=parts,
            architecture=planned.model.architecture,
            repo=repo,
            revision=revision,
            parameters=planned.model.parameters,
            heads=planned.model.drafting_heads,
            pooling=planned.model.pooling,
            sidecar=planned.model.sidecar,
        )

    def _to_part(self, remote: RemoteFile, cached_paths: Mapping[str, Path]) -> Part:
        path = cached_paths.get(remote.sha256)
        return Part(
            file=remote.file,
            size=remote.size,
            sha256=remote.sha256,
            path=str(path.absolute()) if path else "",
            checked=(path or self.store.blob(remote.sha256)).stat().st_mtime_ns,
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
