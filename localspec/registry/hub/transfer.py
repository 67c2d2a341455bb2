"""Download one file from the hub into the store: in parallel ranges, resumable and verified.

A journal beside an unfinished file says which of its bytes are written, so a kill at any moment loses almost
nothing. Beside `SHA256.part` lies `SHA256.journal`. For each segment of the file it has the number of bytes
written, and the number of bytes known to be on the disk. What a killed process wrote stays in the system's
memory, so the first number is right as long as the machine has not been restarted. After a power cut only the
second one is right. The boot id in the journal shows which case it is.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from localspec.errors import FileChanged, HashMismatch
from localspec.files import sync_folder
from localspec.paths import read_file
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.offline import RemoteFile
from localspec.registry.hub.retry import (
    OnWait,
    RetryableError,
    RetryPolicy,
    Tuning,
    call_with_retries,
    ignore_wait,
    wait_before_retry,
)
from localspec.registry.store.files import (
    check_cancel,
    hold_lock,
    open_store_file,
    sha256_of,
    store_error,
)
from localspec.registry.store.store import Store

_HEAD = struct.Struct("<8sQQ40s")  # magic, file size, segment size, boot id
_MAGIC = b"LSPART01"
_ENTRY = struct.Struct("<QQ")  # bytes written, bytes on the disk
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """Return an id of the current run of the machine, or an empty value if the system has none."""
    try:
        return _BOOT_ID.read_bytes().strip()[:40]
    except OSError:
        return b""


class Journal:
    """An unfinished file and its journal, both open. Several threads may write to it."""

    def __init__(self, part: Path, size: int, segment: int) -> None:
        self.part = part
        self.path = part.with_suffix(".journal")
        self.size = size
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._unsynced = 0
        self._data = open_store_file(part, os.O_RDWR | os.O_CREAT)
        try:
            self._file = open_store_file(self.path, os.O_RDWR | os.O_CREAT)
        except BaseException:
            os.close(self._data)
            raise
        self.segment, self._done, self._durable = segment, [0], [0]
        if not self._load():
            self.segment = segment
            self.reset()
        self.total = sum(self._done)

    @property
    def segments(self) -> int:
        return len(self._done)

    def span(self, index: int) -> tuple[int, int]:
        """Return the start and end of a segment in the file."""
        start = index * self.segment
        return start, min(start + self.segment, self.size)

    def done(self, index: int) -> int:
        """Return how many bytes of the segment are written."""
        return self._done[index]

    def write(self, index: int, data: bytes) -> None:
        """Append data to a segment: first the bytes, then their entry in the journal."""
        start = index * self.segment + self._done[index]
        view = memoryview(data)
        while view:
            written = os.pwrite(self._data, view, start)
            start, view = start + written, view[written:]
        with self._lock:
            self._done[index] += len(data)
            self.total += len(data)
            self._unsynced += len(data)
            self._write_entry(index)

    def fill(self, offset: int, data: bytes) -> None:
        """Write the part of `data` that is missing and adjoins the written bytes.

        offset: the offset of `data` in the file.
        """
        for index in range(offset // self.segment, self.segments):
            start, end = self.span(index)
            if start >= offset + len(data):
                return
            missing = start + self._done[index]
            if offset <= missing < end and (chunk := data[missing - offset : end - offset]):
                self.write(index, chunk)

    def sync(self, threshold: int) -> None:
        """Force the data and the journal to the disk once `threshold` bytes are not yet synced."""
        if self._unsynced < threshold or not self._sync_lock.acquire(blocking=False):
            return  # another thread is syncing
        try:
            with self._lock:
                synced, self._unsynced = list(self._done), 0
            os.fdatasync(self._data)
            with self._lock:
                self._durable = synced
                self._write_journal()
            os.fdatasync(self._file)
        finally:
            self._sync_lock.release()

    def reset(self) -> None:
        """Start again with nothing written."""
        count = max(1, -(-self.size // self.segment))
        with self._lock:
            self._done, self._durable, self.total = [0] * count, [0] * count, 0
            os.ftruncate(self._file, 0)
            os.ftruncate(self._data, 0)
            os.ftruncate(self._data, self.size)
            self._write_journal()

    def finish(self, blob: Path) -> None:
        """Move the complete and verified file to its place."""
        os.fsync(self._data)
        self.part.replace(blob)
        self.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the unfinished file and its journal."""
        self.part.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._file)

    def _write_journal(self) -> None:
        head = _HEAD.pack(_MAGIC, self.size, self.segment, boot_id())
        entries = map(_ENTRY.pack, self._done, self._durable)
        os.pwrite(self._file, head + b"".join(entries), 0)

    def _write_entry(self, index: int) -> None:
        entry = _ENTRY.pack(self._done[index], self._durable[index])
        os.pwrite(self._file, entry, _HEAD.size + index * _ENTRY.size)

    def _load(self) -> bool:
        """Take over what an earlier process wrote; return False if it cannot be trusted."""
        if os.fstat(self._data).st_size != self.size:
            return False
        entries = _parse_journal(os.pread(self._file, os.fstat(self._file).st_size, 0), self.size)
        if entries is None:
            return False
        self.segment, self._done, self._durable = entries.segment, entries.done, entries.durable
        self._write_journal()  # the entries now belong to this run of the machine
        return True


class _Entries(NamedTuple):
    """The trustworthy content of a journal, in bytes per segment."""

    segment: int
    done: list[int]
    durable: list[int]


def _parse_journal(data: bytes, size: int) -> _Entries | None:
    """Parse a journal; return None if it is broken or belongs to another file."""
    if len(data) < _HEAD.size:
        return None
    magic, stated_size, segment, boot = _HEAD.unpack_from(data)
    if magic != _MAGIC or stated_size != size or segment <= 0:
        return None
    count = max(1, -(-size // segment))
    if len(data) != _HEAD.size + count * _ENTRY.size:
        return None
    entries = list(_ENTRY.iter_unpack(data[_HEAD.size :]))
    durable = [entry[1] for entry in entries]
    same_boot = bool(boot_id()) and boot.rstrip(b"\0") == boot_id()
    done = [entry[0] for entry in entries] if same_boot else list(durable)
    for index in range(count):
        length = min(segment, size - index * segment)
        if max(done[index], durable[index]) > length:
            return None
    return _Entries(segment, done, durable)


def _read_entries(part: Path, size: int) -> _Entries | None:
    """Return what an earlier pull wrote, without changing it."""
    try:
        if part.is_symlink() or part.stat().st_size != size:
            return None
        return _parse_journal(read_file(part.with_suffix(".journal")), size)
    except OSError:
        return None


def count_written_bytes(part: Path, size: int) -> int:
    """Return how many bytes of a file an earlier pull wrote."""
    entries = _read_entries(part, size)
    return sum(entries.done) if entries else 0


def read_written_prefix(part: Path, size: int) -> bytes:
    """Return the start of the file that an earlier pull wrote without a gap.

    It is at most the first segment, which contains the header.
    """
    entries = _read_entries(part, size)
    if entries is None or not entries.done[0]:
        return b""
    try:
        with part.open("rb") as file:
            return file.read(entries.done[0])
    except OSError:
        return b""


class Flow:
    """A download of a whole file from a server that ignores ranges. Its next bytes begin at `at`.

    The connection stays open after the header, so that the file is transferred only once.
    """

    def __init__(self, chunks: Iterator[bytes], connection: ExitStack) -> None:
        self._chunks, self._connection = chunks, connection
        self.at = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.at += len(chunk)
            yield chunk

    def close(self) -> None:
        self._connection.close()


class RemoteSource:
    """The start of a file on the hub, as a gguf.Source.

    `prefix` holds the bytes that are known from an earlier pull or were read here. A header that was read is
    thus not downloaded again with the other bytes.
    """

    def __init__(
        self,
        hub: Hub,
        remote: RemoteFile,
        prefix: bytes = b"",
        *,
        retry_policy: RetryPolicy,
        on_wait: OnWait = ignore_wait,
    ) -> None:
        self._hub, self._remote = hub, remote
        self._retry_policy, self._on_wait = retry_policy, on_wait
        self.prefix = bytearray(prefix)
        self.name = remote.name
        self.size = remote.size
        self.flow: Flow | None = None

    def read(self, offset: int, size: int) -> bytes:
        """Return one range. A server that ignores ranges is read from the start to its end."""
        end = min(offset + size, self.size)
        start = max(offset, min(end, len(self.prefix)))
        data = bytes(self.prefix[offset:start])
        if start < end:
            data += call_with_retries(
                lambda: self._read(start, end), self._retry_policy, self._on_wait
            )
        if offset <= len(self.prefix) < end:
            self.prefix[offset:] = data
        return data

    def _read(self, start: int, end: int) -> bytes:
        if self.flow is None:
            with ExitStack() as connection:
                response = connection.enter_context(self._hub.stream(self._remote, start, end))
                if not response.whole:
                    data = bytearray()
                    for chunk in response.chunks:
                        data += chunk
                        if len(data) >= end - start:
                            return bytes(data[: end - start])
                    raise RetryableError("the connection closed early")
                self.flow = Flow(response.chunks, connection.pop_all())
        try:
            return self._read_flow(self.flow, start, end)
        except BaseException:
            self.flow.close()
            self.flow = None
            raise

    def _read_flow(self, flow: Flow, start: int, end: int) -> bytes:
        """Read from the flow up to `end`, and keep everything in the prefix."""
        chunks = iter(flow)
        while len(self.prefix) < end:
            if (chunk := next(chunks, None)) is None:
                raise RetryableError("the connection closed early")
            known = len(self.prefix) - (flow.at - len(chunk))
            self.prefix += chunk[known:]
        return bytes(self.prefix[start:end])


class RateLimit:
    """A limit in bytes per second for all connections of a pull together; 0 means no limit."""

    def __init__(self, rate: int = 0) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, size: int, stop: threading.Event) -> None:
        """Wait until `size` more bytes are within the limit, or until `stop` is set."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._due, now)
            self._due = start + size / self._rate
        stop.wait(start - now)


class _RangeIgnored(Exception):
    """The server sends the file from its start, whatever range is requested."""


class Transfer:
    """The download of one file.

    Other threads may read `done` and `hashed` while `run` works. prefix: bytes that were downloaded to read
    the header. flow: an open download of the whole file, if the server ignores ranges. stop: set if another
    file of the pull failed.
    """

    def __init__(
        self,
        hub: Hub,
        store: Store,
        remote: RemoteFile,
        tuning: Tuning,
        stop: threading.Event,
        *,
        prefix: bytes = b"",
        limit: RateLimit,
        flow: Flow | None = None,
        on_wait: OnWait = ignore_wait,
    ) -> None:
        self.remote = remote
        self.hashed = 0
        self._hub = hub
        self._tuning = tuning
        self._stop = stop
        self._prefix, self._flow = prefix, flow
        self._limit, self._on_wait = limit, on_wait
        self._blob = store.blob(remote.sha256)
        self._part = store.unfinished(remote.sha256)
        self._journal: Journal | None = None
        self._written = 0
        self._finished = False
        self._update_progress()

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
        lock = self._part.with_suffix(".lock")
        with hold_lock(lock, cancel=self._stop, waiting=self._update_progress):
            if not self._is_complete():
                self._fetch()
            self._finished = True

    def _update_progress(self) -> None:
        """Read what is written, by an earlier pull or by the one that this one waits for."""
        self._written = count_written_bytes(self._part, self.remote.size)

    def _is_complete(self) -> bool:
        """Return whether the store has the file with the right hash. A link in its place is refused.

        Hashing it again lets a pull repair a damaged file that two pairs share.
        """
        if not os.path.lexists(self._blob):
            return False
        descriptor = open_store_file(self._blob, os.O_RDONLY)
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
                with suppress(RetryableError), closing(self._flow):
                    self._write_whole(journal, self._flow.at, self._flow)
            try:
                self._download_segments(journal, self._tuning.connections)
            except _RangeIgnored:
                self._download_segments(journal, 1)
            if self._hash_file(self._part) != self.remote.sha256:
                journal.discard()
                raise HashMismatch(
                    f"{self.remote.repo}/{self.remote.file} was damaged in transit: its SHA-256 is "
                    "not the one the hub states. Nothing was installed; pull again."
                )
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
        failed = threading.Event()
        ranges_work = threading.Event() if count > 1 else None

        def run_worker(is_first: bool) -> None:
            try:
                if ranges_work and not is_first:
                    ranges_work.wait()
                while not failed.is_set():
                    try:
                        index = pending.popleft()
                    except IndexError:
                        return
                    self._download_segment(journal, index, failed, ranges_work)
            except BaseException:
                failed.set()
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
        failed: threading.Event,
        ranges_work: threading.Event | None,
    ) -> None:
        """Download one segment, and retry as long as there is progress."""
        start, end = journal.span(index)
        failures = 0
        while journal.done(index) < end - start and not failed.is_set():
            before = journal.done(index)
            try:
                self._download_range(journal, index, failed, ranges_work)
            except RetryableError as error:
                failures = 0 if journal.done(index) > before else failures + 1
                wait_before_retry(
                    failures, error, self._tuning.retry_policy, self._on_wait, self._stop
                )
                check_cancel(self._stop)

    def _download_range(
        self,
        journal: Journal,
        index: int,
        failed: threading.Event,
        ranges_work: threading.Event | None,
    ) -> None:
        """Download the missing part of one segment over one connection.

        If the server ignores ranges and this is the only worker, download the whole file instead.
        ranges_work: set once the other workers run too; None if there are no others.
        """
        start, end = journal.span(index)
        start += journal.done(index)
        with self._hub.stream(self.remote, start, end) as response:
            if response.whole:
                if ranges_work and ranges_work.is_set():
                    raise _RangeIgnored
                self._write_whole(journal, 0, response.chunks)
                return
            if ranges_work:
                ranges_work.set()
            for chunk in self._limited(response.chunks):
                if failed.is_set():
                    return
                journal.write(index, chunk[: end - start])
                start += len(chunk)
                journal.sync(self._tuning.sync)
                if start >= end:
                    return
        raise RetryableError("the connection closed early")

    def _write_whole(self, journal: Journal, offset: int, chunks: Iterable[bytes]) -> None:
        """Write the file from `offset` to its end. No other thread may write."""
        for chunk in self._limited(chunks):
            journal.fill(offset, chunk)
            offset += len(chunk)
            journal.sync(self._tuning.sync)
            if journal.total == self.remote.size:
                return
        raise RetryableError("the connection closed early")

    def _limited(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._limit.take(len(chunk), self._stop)
            check_cancel(self._stop)
            yield chunk

    def _hash_file(self, path: Path) -> str:
        def progress(done: int) -> None:
            self.hashed = done

        return sha256_of(path, progress=progress, cancel=self._stop)
