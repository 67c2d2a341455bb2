"""Pull a pair: check the headers, download all files, and add the pair once they are complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from localspec.errors import FileChanged, PullCancelled
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.header.projector import ARCHITECTURE
from localspec.registry.hub.hub import RemoteFile
from localspec.registry.hub.repository import Offer
from localspec.registry.hub.retry import Retry
from localspec.registry.hub.transfer import RateLimit, Transfer
from localspec.registry.pulls.plan import (
    PlannedModel,
    PlannedProjector,
    Planner,
    PullPlan,
    find_in_cache,
)
from localspec.registry.store.files import check_cancel, sha256_of
from localspec.registry.store.store import (
    Part,
    Record,
    StoredModel,
    list_local_parts,
    roles_for_pooling,
)

# ------------------------------------------------------------------------ state
# The state of a pull, in one form from the downloading threads to the terminal.


State = Literal[
    "checking", "downloading", "verifying", "done", "failed", "cancelled", "interrupted"
]
RUNNING_STATES = ("checking", "downloading", "verifying")


class FileState(msgspec.Struct, frozen=True):
    """One file of a pull. Numbers are in bytes."""

    file: str
    done: int
    size: int
    hashed: int = 0


class PullState(msgspec.Struct, frozen=True, kw_only=True):
    """A pull at one moment. `rate` is in bytes per second, `seconds_left` is None while unknown.

    While `state` is "verifying", `hashed` is the progress. An "interrupted" pull was stopped by the end of
    the daemon and resumes at its next start. `retry`: a request failed and will be tried again; if several
    will, the first of them. `message` is the error's sentence and `code` its code. `notes` are remarks of
    the checks. `offers`: the available quantizations, if none was named. `said`: what was chosen, and why.
    """

    name: str
    state: State
    done: int = 0
    size: int = 0
    hashed: int = 0
    rate: float = 0
    seconds_left: float | None = None
    files: tuple[FileState, ...] = ()
    notes: tuple[str, ...] = ()
    offers: tuple[Offer, ...] = ()
    said: tuple[str, ...] = ()
    message: str = ""
    code: str = ""
    retry: Retry | None = None


# ------------------------------------------------------------------------ pull


_REPORT_INTERVAL_S = 0.25
_MAX_PLANS = 3  # a pull is planned again if a file changes on the hub meanwhile

Report = Callable[[tuple[FileState, ...]], None]


@dataclass(slots=True)
class Puller(Planner):
    """Pulls pairs into a store. `asked` is written into the record."""

    limit: RateLimit = field(default_factory=lambda: RateLimit(0))
    asked: str = ""

    def pull(
        self,
        name: str,
        pair: CataloguePair,
        report: Report = lambda files: None,
        cancel: threading.Event | None = None,
        planned: Callable[[PullPlan], None] = lambda plan: None,
        known: Mapping[HubFile, PlannedModel] | None = None,
    ) -> Record:
        """Check, download, verify and store a pair. It blocks, so call it in a thread.

        report: called with the state of all files. planned: called with the plan. known: models whose
        headers are read already.

        Raises:
            RegistryError and below. What was downloaded is kept for the next try.
        """
        cancel = cancel or threading.Event()
        self.store.prepare()
        with self.store.pulling():
            for attempt in range(_MAX_PLANS):
                try:
                    plan = self.preflight(name, pair, cancel, known)
                    known = None  # if a file changes, all headers are read again
                    planned(plan)
                    record = self._make_record(plan, _Fetch(self, plan, report, cancel).run())
                    self.store.put_new(record)  # last, because a pair exists once its record does
                    return record
                except FileChanged:
                    if attempt + 1 == _MAX_PLANS:
                        raise
        raise AssertionError("unreachable: the loop returns or raises")

    def _make_record(self, plan: PullPlan, cached_paths: Mapping[str, Path]) -> Record:
        return Record(
            name=plan.name,
            target=self._to_stored(plan.target, cached_paths),
            draft=self._to_stored(plan.draft, cached_paths) if plan.draft else None,
            projector=self._to_stored_projector(plan.projector, cached_paths),
            created=time.time(),
            summary=plan.pair.summary,
            licence=plan.pair.licence,
            roles=roles_for_pooling(plan.target.model.pooling) or plan.pair.roles,
            notes=plan.notes,
            template_sha256=plan.target.model.template_hash,
            asked=self.asked,
            other_projector=plan.pair.other_projector,
        )

    def _to_stored(self, planned: PlannedModel, cached_paths: Mapping[str, Path]) -> StoredModel:
        if planned.stored:
            return planned.stored
        return StoredModel(
            parts=tuple(self._to_part(file.remote, cached_paths) for file in planned.files),
            architecture=planned.model.architecture,
            repo=planned.weights.repo,
            revision=planned.files[0].remote.commit,
            parameters=planned.model.parameters,
            heads=planned.model.drafting_heads,
            pooling=planned.model.pooling,
            sidecar=planned.model.sidecar,
        )

    def _to_stored_projector(
        self, planned: PlannedProjector | None, cached_paths: Mapping[str, Path]
    ) -> StoredModel | None:
        if planned is None:
            return None
        if not planned.files:
            parts = list_local_parts(Path(planned.weights.file))
            return StoredModel(parts=parts, architecture=ARCHITECTURE)
        return StoredModel(
            parts=tuple(self._to_part(file.remote, cached_paths) for file in planned.files),
            architecture=ARCHITECTURE,
            repo=planned.weights.repo,
            revision=planned.files[0].remote.commit,
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

    def __init__(
        self, puller: Puller, plan: PullPlan, report: Report, cancel: threading.Event
    ) -> None:
        self._puller, self._plan = puller, plan
        self._report, self._cancel = report, cancel
        self._cached_paths: dict[str, Path] = {}
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
        stop = threading.Event()  # set if the user cancels or another file fails
        transfers: list[Transfer] = []
        for file in self._plan.files:
            if path := self._find_verified(file.remote):
                self._cached_paths[file.remote.sha256] = path
            else:
                transfers.append(
                    Transfer(
                        self._puller.hub,
                        self._puller.store,
                        file.remote,
                        self._puller.tuning,
                        stop,
                        file.prefix,
                        self._puller.limit,
                        file.flow,
                    )
                )
        if transfers:
            self._transfer(transfers, stop)
        return self._cached_paths

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

        check_cancel(self._cancel)
        sha256 = sha256_of(path, progress=report_progress, cancel=self._cancel)
        return path if sha256 == remote.sha256 else None

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
                    if self._cancel.is_set() or any(future.exception() for future in done):
                        stop.set()
                    for transfer in transfers:
                        self._set_progress(transfer.remote, transfer.done, transfer.hashed)
                    self._report(tuple(self._files.values()))
            except BaseException:  # a callback failed, or the program is ending
                stop.set()
                raise
        failures = [error for future in futures if (error := future.exception())]
        # The file that failed comes before those that were cancelled because of it.
        failures.sort(key=lambda error: isinstance(error, PullCancelled))
        if failures:
            raise failures[0]

    def _set_progress(self, remote: RemoteFile, done: int, hashed: int) -> None:
        self._files[remote.sha256] = FileState(remote.name, done, remote.size, hashed)
