"""Which bytes of an unfinished file are there, so that a kill at any moment loses next to nothing.

Beside `SHA256.part` lies `SHA256.journal`: for each segment of the file how many bytes of it were
written, and how many of those are known to be on the disk. A killed process leaves what it wrote in
the system's memory, so the first number is right as long as the machine has not been restarted;
after a power cut only the second is. The boot id tells which of the two applies.
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
    """Tells one run of the machine from another; empty where the system has none."""
    try:
        return _BOOT_ID.read_bytes().strip()[:40]
    except OSError:
        return b""


class Journal:
    """The file under way and its journal, both open. Written from several threads."""

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
        """Start and end of a segment in the file."""
        start = index * self.segment
        return start, min(start + self.segment, self.size)

    def done(self, index: int) -> int:
        """Bytes of this segment that are there."""
        return self._done[index]

    def write(self, index: int, data: bytes) -> None:
        """Append to a segment. First the bytes, then the note that they are there."""
        start = index * self.segment + self._done[index]
        view = memoryview(data)
        while view:
            written = os.pwrite(self._data, view, start)
            start, view = start + written, view[written:]
        with self._lock:
            self._done[index] += len(data)
            self.total += len(data)
            self._unsynced += len(data)
            self._note(index)

    def fill(self, at: int, data: bytes) -> None:
        """Take over the file's bytes from `at` on, as far as they are missing and join what is there."""
        for index in range(at // self.segment, self.segments):
            start, end = self.span(index)
            if start >= at + len(data):
                return
            missing = start + self._done[index]
            if at <= missing < end and (piece := data[missing - at : end - at]):
                self.write(index, piece)

    def sync(self, after: int) -> None:
        """Once `after` bytes have come since the last time, force them to the disk and note it."""
        if self._unsynced < after or not self._sync_lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            with self._lock:
                safe, self._unsynced = list(self._done), 0
            os.fdatasync(self._data)
            with self._lock:
                self._durable = safe
                for index in range(len(safe)):
                    self._note(index)
            os.fdatasync(self._file)
        finally:
            self._sync_lock.release()

    def reset(self) -> None:
        """Nothing is there."""
        count = max(1, -(-self.size // self.segment))
        with self._lock:
            self._done, self._durable, self.total = [0] * count, [0] * count, 0
            os.ftruncate(self._file, 0)
            os.ftruncate(self._data, 0)
            os.ftruncate(self._data, self.size)
            body = b"".join(_ENTRY.pack(0, 0) for _ in range(count))
            os.pwrite(self._file, self._head() + body, 0)

    def finish(self, blob: Path) -> None:
        """Everything is there and right: put the file in its place."""
        os.fsync(self._data)
        self.part.replace(blob)
        self.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Throw away what is there."""
        self.part.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._data)
        os.close(self._file)

    def _head(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.size, self.segment, boot_id())

    def _note(self, index: int) -> None:
        entry = _ENTRY.pack(self._done[index], self._durable[index])
        os.pwrite(self._file, entry, _HEAD.size + index * _ENTRY.size)

    def _load(self) -> bool:
        """Take over what an earlier process left; False when it cannot be trusted."""
        if os.fstat(self._data).st_size != self.size:
            return False
        left = _parse(os.pread(self._file, os.fstat(self._file).st_size, 0), self.size)
        if left is None:
            return False
        self.segment, self._done, self._durable = left.segment, left.done, left.durable
        os.pwrite(self._file, self._head(), 0)  # from now on this run of the machine counts
        for index in range(self.segments):
            self._note(index)
        return True


@dataclass(frozen=True, slots=True)
class _Left:
    """What a journal says, as far as it can be trusted. Bytes per segment."""

    segment: int
    done: list[int]
    durable: list[int]


def _parse(data: bytes, size: int) -> _Left | None:
    """Read a journal; None when it is broken or another file's."""
    if len(data) < _HEAD.size:
        return None
    magic, stated, segment, boot = _HEAD.unpack_from(data)
    if magic != _MAGIC or stated != size or segment <= 0:
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
    return _Left(segment, done, durable)


def _left(part: Path, size: int) -> _Left | None:
    """What an earlier pull left, without touching it."""
    try:
        if part.is_symlink() or part.stat().st_size != size:
            return None
        return _parse(read_file(part.with_suffix(".journal")), size)
    except OSError:
        return None


def bytes_there(part: Path, size: int) -> int:
    """How many bytes of a file an earlier pull left."""
    left = _left(part, size)
    return sum(left.done) if left else 0


def prefix_there(part: Path, size: int) -> bytes:
    """The bytes an earlier pull left at the start of the file, as far as they have no gap.

    At most the first segment: that is where the header is.
    """
    left = _left(part, size)
    if left is None or not left.done[0]:
        return b""
    try:
        with part.open("rb") as file:
            return file.read(left.done[0])
    except OSError:
        return b""
