"""Download one file from the hub into the store: in parallel ranges, resumable and verified."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from localspec.errors import FileChanged, HashMismatch
from localspec.files import sync_folder
from localspec.registry.hub.hub import Hub, RemoteFile
from localspec.registry.hub.journal import Journal, count_written_bytes
from localspec.registry.hub.remote import Flow
from localspec.registry.hub.retry import Interrupted, Patience, unreachable_error, wait_before_retry
from localspec.registry.store.files import (
    check_cancel,
    locked,
    open_own,
    sha256_of,
    store_error,
)
from localspec.registry.store.store import Store


@dataclass(frozen=True, slots=True)
class Tuning:
    """The parameters of a download. Sizes are in bytes.

    Segments are large, because each one costs a request to the hub, which redirects to a signed URL. They are
    small enough that all connections end at about the same time.
    """

    connections: int = 4
    segment: int = 32 << 20
    sync: int = 64 << 20
    patience: Patience = field(default_factory=Patience)


class Limit:
    """A limit in bytes per second for all connections of a pull together."""

    def __init__(self, rate: int) -> None:
        """Set the limit to `rate` bytes per second; 0 means no limit."""
        self._rate = rate
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, size: int, cancel: threading.Event) -> None:
        """Wait until `size` more bytes are within the limit, or until `cancel` is set."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._due, now)
            self._due = start + size / self._rate
        cancel.wait(start - now)


class _RangeIgnored(Exception):
    """The server sends the file from its start, whatever range is requested."""


class Transfer:
    """The download of one file.

    Other threads may read `done` and `hashed` while `run` works.
    """

    def __init__(
        self,
        hub: Hub,
        store: Store,
        remote: RemoteFile,
        tuning: Tuning,
        cancel: threading.Event,
        prefix: bytes = b"",
        limit: Limit | None = None,
        flow: Flow | None = None,
    ) -> None:
        self.remote = remote
        self._limit = limit or Limit(0)
        self._prefix = prefix  # bytes that were downloaded to read the header
        self._flow = flow  # an open download of the whole file, if the server ignores ranges
        self.hashed = 0
        self._hub = hub
        self._tuning = tuning
        self._cancel = cancel
        self._blob = store.blob(remote.sha256)
        self._part = store.unfinished(remote.sha256)
        self._lock = self._part.with_suffix(".lock")
        self._journal: Journal | None = None
        self._written = count_written_bytes(self._part, remote.size)
        self._finished = False

    @property
    def done(self) -> int:
        """The bytes of the file that are written."""
        if self._finished:
            return self.remote.size
        return self._journal.total if self._journal else self._written

    def run(self) -> None:
        """Download what is missing, verify it and put the file in its place.

        If another pull, in this process or another, downloads the same file, it waits for that one.

        Raises:
            HubError and below, DiskFull, StoreError, UnsafePath, PullCancelled.
        """
        with locked(self._lock, cancel=self._cancel, waiting=self._update_progress):
            if not self._is_complete():
                self._fetch()
            self._finished = True

    def _update_progress(self) -> None:
        """Read the progress of the pull that this one waits for."""
        self._written = count_written_bytes(self._part, self.remote.size)

    def _is_complete(self) -> bool:
        """Return whether the store has the file with the right hash. A link in its place is refused.

        Hashing it again lets a pull repair a damaged file that two pairs share.
        """
        if not os.path.lexists(self._blob):
            return False
        descriptor = open_own(self._blob, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != self.remote.size:
            return False
        self._written = size  # all bytes are there while it is hashed
        if self._hash_file(self._blob) == self.remote.sha256:
            return True
        self.hashed = 0
        self._update_progress()
        return False

    def _fetch(self) -> None:
        journal = Journal(self._part, self.remote.size, self._tuning.segment)
        self._journal = journal
        try:
            journal.fill(0, self._prefix)
            self._prefix = b""
            if self._flow:
                with suppress(Interrupted), closing(self._flow):
                    self._write_whole(journal, self._flow.at, self._flow)
            try:
                self._download_segments(journal, self._tuning.connections)
            except _RangeIgnored:
                self._download_segments(journal, 1)
            self._verify(journal)
            journal.finish(self._blob)
            sync_folder(self._blob.parent)
        except FileChanged:
            journal.discard()
            raise
        except OSError as error:
            missing = self.remote.size - journal.total
            raise store_error(error, self._part, needed=missing) from error
        finally:
            journal.close()
            self._journal = None
            self._update_progress()

    def _download_segments(self, journal: Journal, connections: int) -> None:
        """Download all segments, several at a time; the first failure stops the others.

        One worker starts first: a server that ignores ranges would send the whole file to each of them.
        """
        pending = deque(
            index
            for index in range(journal.segments)
            if journal.done(index) < journal.span(index)[1] - journal.span(index)[0]
        )
        count = min(connections, len(pending))
        stop = threading.Event()
        ranges_work = threading.Event() if count > 1 else None

        def run_worker(is_first: bool) -> None:
            try:
                if ranges_work and not is_first:
                    ranges_work.wait()
                while pending and not stop.is_set():
                    try:
                        index = pending.popleft()
                    except IndexError:
                        return
                    self._download_segment(journal, index, stop, ranges_work)
            except BaseException:
                stop.set()
                raise
            finally:
                if ranges_work:
                    ranges_work.set()

        if not count:
            return
        with ThreadPoolExecutor(count, thread_name_prefix="pull") as pool:
            workers = [pool.submit(run_worker, number == 0) for number in range(count)]
        failures = [error for worker in workers if (error := worker.exception())]
        ignored = [error for error in failures if isinstance(error, _RangeIgnored)]
        if failures:
            raise (ignored or failures)[0]

    def _download_segment(
        self,
        journal: Journal,
        index: int,
        stop: threading.Event,
        ranges_work: threading.Event | None,
    ) -> None:
        """Download one segment, and retry as long as there is progress."""
        start, end = journal.span(index)
        failures = 0
        while journal.done(index) < end - start and not stop.is_set():
            before = journal.done(index)
            try:
                self._download_range(journal, index, stop, ranges_work)
            except Interrupted as error:
                failures = 0 if journal.done(index) > before else failures + 1
                if failures >= error.tries(self._tuning.patience):
                    raise unreachable_error(error) from None
                wait_before_retry(max(0, failures - 1), error, self._tuning.patience, self._cancel)

    def _download_range(
        self,
        journal: Journal,
        index: int,
        stop: threading.Event,
        ranges_work: threading.Event | None,
    ) -> None:
        """Download the missing part of one segment over one connection.

        If the server ignores ranges and this is the only worker, download the whole file instead.
        ranges_work: set once the other workers run too; None if there are no others.
        """
        start, end = journal.span(index)
        start += journal.done(index)
        with self._hub.stream(self.remote, start, end) as response:
            if response.whole and ranges_work and ranges_work.is_set():
                raise _RangeIgnored
            if response.whole:
                self._write_whole(journal, 0, response.chunks)
                return
            if ranges_work:
                ranges_work.set()
            for chunk in response.chunks:
                self._limit.take(len(chunk), self._cancel)
                check_cancel(self._cancel)
                if stop.is_set():
                    return
                journal.write(index, chunk[: end - start])
                start += len(chunk)
                journal.sync(self._tuning.sync)
                if start >= end:
                    return
        raise Interrupted("the connection closed early")

    def _write_whole(self, journal: Journal, offset: int, chunks: Iterable[bytes]) -> None:
        """Write the file from `offset` to its end. No other thread may write."""
        for chunk in chunks:
            self._limit.take(len(chunk), self._cancel)
            check_cancel(self._cancel)
            journal.fill(offset, chunk)
            offset += len(chunk)
            journal.sync(self._tuning.sync)
            if journal.total == self.remote.size:
                return
        raise Interrupted("the connection closed early")

    def _verify(self, journal: Journal) -> None:
        """Compare the hash of the file; if it is wrong, delete all of it."""
        if self._hash_file(self._part) != self.remote.sha256:
            journal.discard()
            raise HashMismatch(
                f"{self.remote.repo}/{self.remote.file} was damaged in transit: its SHA-256 is "
                "not the one the hub states. Nothing was installed; pull again."
            )

    def _hash_file(self, path: Path) -> str:
        def progress(done: int) -> None:
            self.hashed = done

        return sha256_of(path, progress=progress, cancel=self._cancel)
