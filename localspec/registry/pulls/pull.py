"""Pulling a pair: look at the headers first, fetch all files, show it when they are whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from localspec.errors import FileChanged, PullCancelled
from localspec.registry.catalogue import Pair, Weights
from localspec.registry.hub.hub import RemoteFile
from localspec.registry.hub.transfer import Limit, Transfer
from localspec.registry.pulls.plan import Plan, PlannedModel, Planner, in_cache
from localspec.registry.pulls.state import FileState
from localspec.registry.store.files import check_cancel, sha256_of
from localspec.registry.store.records import Part, Record, StoredModel, roles_of

_TICK = 0.25  # seconds between two reports of progress
_CHANGES = 3  # how often a file may change on the hub during one pull

Report = Callable[[tuple[FileState, ...]], None]


@dataclass(slots=True)
class Puller(Planner):
    """Pulls pairs into a store. `asked` goes into the record."""

    limit: Limit = field(default_factory=lambda: Limit(0))
    asked: str = ""

    def pull(
        self,
        name: str,
        pair: Pair,
        report: Report = lambda files: None,
        cancel: threading.Event | None = None,
        planned: Callable[[Plan], None] = lambda plan: None,
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
                    planned(plan)
                    record = self._record(plan, _Fetch(self, plan, report, cancel).run())
                    self.store.put_new(record)  # the record appears last
                    return record
                except FileChanged:
                    if change + 1 == _CHANGES:
                        raise
        raise AssertionError("unreachable: the loop returns or raises")

    def _record(self, plan: Plan, used: Mapping[str, Path]) -> Record:
        return Record(
            name=plan.name,
            target=self._stored(plan.target, used),
            draft=self._stored(plan.draft, used) if plan.draft else None,
            created=time.time(),
            summary=plan.pair.summary,
            licence=plan.pair.licence,
            roles=roles_of(plan.target.model.pooling) or plan.pair.roles,
            notes=plan.notes,
            template_sha256=plan.target.model.template_hash,
            asked=self.asked,
        )

    def _stored(self, planned: PlannedModel, used: Mapping[str, Path]) -> StoredModel:
        if planned.stored:
            return planned.stored
        return StoredModel(
            parts=tuple(self._part(each.remote, used) for each in planned.files),
            architecture=planned.model.architecture,
            repo=planned.weights.repo,
            revision=planned.files[0].remote.commit,
            parameters=planned.model.parameters,
            heads=planned.model.drafting_heads,
            pooling=planned.model.pooling,
        )

    def _part(self, remote: RemoteFile, used: Mapping[str, Path]) -> Part:
        path = used.get(remote.sha256)
        return Part(
            file=remote.file,
            size=remote.size,
            sha256=remote.sha256,
            path=str(path.absolute()) if path else "",
            checked=(path or self.store.blob(remote.sha256)).stat().st_mtime_ns,
        )


class _Fetch:
    """What a plan lacks, on its way. `report` hears where each file stands."""

    def __init__(self, puller: Puller, plan: Plan, report: Report, cancel: threading.Event) -> None:
        self._puller, self._plan = puller, plan
        self._report, self._cancel = report, cancel
        self._used: dict[str, Path] = {}
        self._files = {
            each.remote.sha256: FileState(
                each.remote.name, each.remote.size - puller.missing(each.remote), each.remote.size
            )
            for each in plan.files
        }

    def run(self) -> dict[str, Path]:
        """By hash the files that the Hugging Face cache has and that are used there; all others are in
        the store afterwards.
        """
        stop = threading.Event()  # the person cancels, or another file failed
        transfers: list[Transfer] = []
        for each in self._plan.files:
            if path := self._whole_in_cache(each.remote):
                self._used[each.remote.sha256] = path
            else:
                transfers.append(
                    Transfer(
                        self._puller.hub,
                        self._puller.store,
                        each.remote,
                        self._puller.tuning,
                        stop,
                        each.prefix,
                        self._puller.limit,
                        each.flow,
                    )
                )
        if transfers:
            self._transfer(transfers, stop)
        return self._used

    def _whole_in_cache(self, remote: RemoteFile) -> Path | None:
        """The file in the Hugging Face cache, hash checked: its own download does not check it."""
        path = in_cache(remote)
        if path is None or self._puller.store.blob(remote.sha256).exists():
            return None

        def hashed(read: int) -> None:
            self._told(remote, remote.size, read)
            self._report(tuple(self._files.values()))

        check_cancel(self._cancel)
        found = sha256_of(path, progress=hashed, cancel=self._cancel)
        return path if found == remote.sha256 else None

    def _transfer(self, transfers: list[Transfer], stop: threading.Event) -> None:
        """All files at once; when one fails the others stop and keep what they have."""
        with ThreadPoolExecutor(len(transfers), thread_name_prefix="file") as pool:
            futures: list[Future[None]] = [pool.submit(each.run) for each in transfers]
            pending: set[Future[None]] = set(futures)
            try:
                while pending:
                    done, pending = wait(pending, timeout=_TICK, return_when=FIRST_EXCEPTION)
                    if self._cancel.is_set() or any(future.exception() for future in done):
                        stop.set()
                    for each in transfers:
                        self._told(each.remote, each.done, each.hashed)
                    self._report(tuple(self._files.values()))
            except BaseException:  # a callback failed, or the program is ending
                stop.set()
                raise
        failures = [error for future in futures if (error := future.exception())]
        failures.sort(key=lambda error: isinstance(error, PullCancelled))  # the cause first
        if failures:
            raise failures[0]

    def _told(self, remote: RemoteFile, done: int, hashed: int) -> None:
        self._files[remote.sha256] = FileState(remote.name, done, remote.size, hashed)
