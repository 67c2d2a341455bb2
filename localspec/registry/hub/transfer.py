"""One file from the hub into the store: in parallel ranges, resumable, verified."""

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
from localspec.registry.hub.journal import Journal, bytes_there
from localspec.registry.hub.remote import Flow
from localspec.registry.hub.retry import Interrupted, Patience, gave_up, pause
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
    """How a file is fetched. Sizes in bytes.

    Segments are large, so that the hub is asked seldom (each one is a redirect to a signed
    address), and small enough that the connections end at about the same time.
    """

    connections: int = 4
    segment: int = 32 << 20
    sync: int = 64 << 20
    patience: Patience = field(default_factory=Patience)


class Limit:
    """Bytes per second for all connections of a pull together."""

    def __init__(self, rate: int) -> None:
        """`rate` 0: no limit."""
        self._rate = rate
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, size: int, cancel: threading.Event) -> None:
        """Wait until `size` more bytes are within the limit, or `cancel` is set."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._due, now)
            self._due = start + size / self._rate
        cancel.wait(start - now)


class _RangeIgnored(Exception):
    """The server sends the file from its start, whatever is asked."""


class Transfer:
    """Fetches one file. `done` and `hashed` may be read from other threads while `run` works."""

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
        self._prefix = prefix  # bytes that are known already, from reading the header
        self._flow = flow  # and the rest of the file, where it is on its way
        self.hashed = 0
        self._hub = hub
        self._tuning = tuning
        self._cancel = cancel
        self._blob = store.blob(remote.sha256)
        self._part = store.unfinished(remote.sha256)
        self._lock = self._part.with_suffix(".lock")
        self._journal: Journal | None = None
        self._elsewhere = bytes_there(self._part, remote.size)
        self._finished = False

    @property
    def done(self) -> int:
        """Bytes of the file that are here."""
        if self._finished:
            return self.remote.size
        return self._journal.total if self._journal else self._elsewhere

    def run(self) -> None:
        """Fetch what is missing, verify, put in place.

        Another pull of the same file, in this process or another, is waited for instead.

        Raises:
            HubError and below, DiskFull, StoreError, UnsafePath, PullCancelled.
        """
        with locked(self._lock, cancel=self._cancel, waiting=self._look):
            if not self._there():
                self._fetch()
            self._finished = True

    def _look(self) -> None:
        """Progress of the one we wait for."""
        self._elsewhere = bytes_there(self._part, self.remote.size)

    def _there(self) -> bool:
        """Whether the store has the file, and it is right; a link in its place is refused.

        Hashing it again is how a pull mends a damaged file that two pairs share.
        """
        if not os.path.lexists(self._blob):
            return False
        descriptor = open_own(self._blob, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != self.remote.size:
            return False
        self._elsewhere = size  # while it is hashed nothing is missing
        if self._hash(self._blob) == self.remote.sha256:
            return True
        self.hashed = 0
        self._look()
        return False

    def _fetch(self) -> None:
        journal = Journal(self._part, self.remote.size, self._tuning.segment)
        self._journal = journal
        try:
            journal.fill(0, self._prefix)
            self._prefix = b""
            if self._flow:
                with suppress(Interrupted), closing(self._flow):
                    self._whole(journal, self._flow.at, self._flow)
            try:
                self._segments(journal, self._tuning.connections)
            except _RangeIgnored:
                self._segments(journal, 1)
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
            self._look()

    def _segments(self, journal: Journal, connections: int) -> None:
        """All segments, several at a time; the first failure ends the others.

        One worker asks first: a server that ignores ranges would send the whole file to each.
        """
        todo = deque(
            index
            for index in range(journal.segments)
            if journal.done(index) < journal.span(index)[1] - journal.span(index)[0]
        )
        count = min(connections, len(todo))
        stop = threading.Event()
        ranges = threading.Event() if count > 1 else None

        def work(first: bool) -> None:
            try:
                if ranges and not first:
                    ranges.wait()
                while todo and not stop.is_set():
                    try:
                        index = todo.popleft()
                    except IndexError:
                        return
                    self._segment(journal, index, stop, ranges)
            except BaseException:
                stop.set()
                raise
            finally:
                if ranges:
                    ranges.set()

        if not count:
            return
        with ThreadPoolExecutor(count, thread_name_prefix="pull") as pool:
            workers = [pool.submit(work, number == 0) for number in range(count)]
        failures = [error for worker in workers if (error := worker.exception())]
        ignored = [error for error in failures if isinstance(error, _RangeIgnored)]
        if failures:
            raise (ignored or failures)[0]

    def _segment(
        self, journal: Journal, index: int, stop: threading.Event, ranges: threading.Event | None
    ) -> None:
        """One segment, tried again as long as it gets further."""
        start, end = journal.span(index)
        failures = 0
        while journal.done(index) < end - start and not stop.is_set():
            before = journal.done(index)
            try:
                self._range(journal, index, stop, ranges)
            except Interrupted as error:
                failures = 0 if journal.done(index) > before else failures + 1
                if failures >= error.tries(self._tuning.patience):
                    raise gave_up(error) from None
                pause(max(0, failures - 1), error, self._tuning.patience, self._cancel)

    def _range(
        self, journal: Journal, index: int, stop: threading.Event, ranges: threading.Event | None
    ) -> None:
        """The rest of one segment over one connection, or of the file where ranges are ignored.

        `ranges` is set once others are at work too; without it nobody else is.
        """
        start, end = journal.span(index)
        start += journal.done(index)
        with self._hub.stream(self.remote, start, end) as answer:
            if answer.whole and ranges and ranges.is_set():
                raise _RangeIgnored
            if answer.whole:
                self._whole(journal, 0, answer.chunks)
                return
            if ranges:
                ranges.set()
            for chunk in answer.chunks:
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

    def _whole(self, journal: Journal, at: int, chunks: Iterable[bytes]) -> None:
        """The file from `at` to its end, from a server that knows no ranges; nobody else writes."""
        for chunk in chunks:
            self._limit.take(len(chunk), self._cancel)
            check_cancel(self._cancel)
            journal.fill(at, chunk)
            at += len(chunk)
            journal.sync(self._tuning.sync)
            if journal.total == self.remote.size:
                return
        raise Interrupted("the connection closed early")

    def _verify(self, journal: Journal) -> None:
        """Compare the hash; a wrong one means that none of it can be trusted."""
        if self._hash(self._part) != self.remote.sha256:
            journal.discard()
            raise HashMismatch(
                f"{self.remote.repo}/{self.remote.file} was damaged in transit: its SHA-256 is "
                "not the one the hub states. Nothing was installed; pull again."
            )

    def _hash(self, path: Path) -> str:
        def progress(done: int) -> None:
            self.hashed = done

        return sha256_of(path, progress=progress, cancel=self._cancel)
