"""Record which bytes of an unfinished download are written.

A kill at any moment thus loses almost nothing. Beside `SHA256.part` lies `SHA256.journal`. For each segment
of the file it has the number of bytes written, and the number of bytes known to be on the disk. What a killed
process wrote stays in the system's memory, so the first number is right as long as the machine has not been
restarted. After a power cut only the second one is right. The boot id in the journal shows which case it is.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from localspec.paths import read_file
from localspec.registry.store.files import open_own

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
        self._data = open_own(part, os.O_RDWR | os.O_CREAT)
        try:
            self._file = open_own(self.path, os.O_RDWR | os.O_CREAT)
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

        at: the offset of `data` in the file.
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
                for index in range(len(synced)):
                    self._write_entry(index)
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
            body = b"".join(_ENTRY.pack(0, 0) for _ in range(count))
            os.pwrite(self._file, self._pack_head() + body, 0)

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

    def _pack_head(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.size, self.segment, boot_id())

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
        # The entries now belong to this run of the machine.
        os.pwrite(self._file, self._pack_head(), 0)
        for index in range(self.segments):
            self._write_entry(index)
        return True


@dataclass(frozen=True, slots=True)
class _Entries:
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
