"""States of texts on disk, so that no prompt has to be read again after a restart.

There is one folder per conversation, and one for the texts of all other clients. It holds files per pair and
settings, each with the states of target and draft and the tokens that they belong to. A state is found by its
tokens, whichever client sent them. A file `*.tokens` beside them holds the texts to draft from.

The folder is a cache: deleting a file only costs reading that text again, and a file that is damaged, or of
another user, is skipped with a reason in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from localspec import files
from localspec.engine.cache.prefixes import Prefix, free_memory
from localspec.engine.cache.slot import Mark
from localspec.engine.llama import State
from localspec.paths import open_file, remove_tree
from localspec.protocol.frames import ANONYMOUS_CLIENTS

# The file of a session: the states of target and draft, with the tokens that they belong to.
#
# Nothing of a file reaches llama.cpp before its hash was verified.

MAGIC = b"LSPREFIX"
VERSION = 2
_PIECE_BYTES = 16 << 20
_NO_STATE: State = np.empty(0, np.uint8)
_HEAD = struct.Struct("<8sII32s")  # magic, version, size of the header, hash of all that follows


class UnusableFile(Exception):
    """A file that cannot be used; the message gives the reason."""


class WritingStopped(Exception):
    """The time for writing is over, or the conversation was forgotten."""


class _Header(msgspec.Struct):
    """The header. identity: of files, settings and machine.

    `target`, `draft` and `marks` give the sizes in bytes of the states, in the order in which they follow.
    marks: for each, its number of tokens and its size.
    """

    identity: str
    tokens: list[int]
    n_draft: int
    least: int
    exact: bool
    target: int
    draft: int
    marks: list[tuple[int, int]]

    @property
    def sizes(self) -> list[int]:
        return [self.target, self.draft, *(size for _, size in self.marks)]


def read(path: Path, identity: str) -> Prefix:
    """Read the state in a file of this identity.

    Raises UnusableFile if the file is damaged, of another identity or version, or too large for the memory.
    Raises OSError if the file cannot be read.
    """
    with _open(path) as file:
        raw, digest, size = _read_raw_header(file)
        free = free_memory()
        if free is not None and size > free // 2:
            raise UnusableFile("there is too little free memory for it")
        if file.tell() >= size:
            raise UnusableFile("it is cut short")
        # Mapped, not read, because allocating hundreds of MiB costs more than all else here. A file is never
        # written to under its final name; where one is replaced or removed, the mapping stays valid.
        body: State = np.asarray(np.memmap(file, np.uint8, "r", file.tell()))
        hashed = hashlib.sha256(raw)
        hashed.update(body.data)
    if hashed.digest() != digest:
        raise UnusableFile("it is damaged")
    header = _parse_header(raw, identity, len(body))
    target, draft, *marks = np.split(body, np.cumsum(header.sizes)[:-1])
    return Prefix(
        header.tokens,
        target,
        draft if header.draft else None,
        header.n_draft,
        header.least,
        header.exact,
        marks=[Mark(entry[0], state) for entry, state in zip(header.marks, marks, strict=True)],
    )


def read_coverage(path: Path, identity: str) -> Prefix:
    """Read a prefix without its states from a header, whose hash is not verified. Raises as `read`."""
    with _open(path) as file:
        raw, _, size = _read_raw_header(file)
        header = _parse_header(raw, identity, size - file.tell())
    marks = [Mark(tokens, _NO_STATE) for tokens, _ in header.marks]
    return Prefix(header.tokens, _NO_STATE, least=header.least, exact=header.exact, marks=marks)


def _drop_states(prefix: Prefix) -> Prefix:
    """Return what a prefix can be reused for, as `read_coverage` does."""
    marks = [Mark(mark.tokens, _NO_STATE) for mark in prefix.marks]
    return replace(prefix, target=_NO_STATE, draft=None, marks=marks)


def _covers(prefix: Prefix, other: Prefix) -> bool:
    """Whether a prefix can be used for all that another one can."""
    is_included = prefix.exact == other.exact and prefix.usable(other.tokens) == len(other.tokens)
    places, others = ({mark.tokens for mark in each.marks} for each in (prefix, other))
    return is_included and (prefix.least <= other.least or others <= places)


def _parse_header(raw: bytes, identity: str, n_bytes: int) -> _Header:
    """Parse the header of a file with `n_bytes` behind it. Raises UnusableFile."""
    try:
        header = msgspec.msgpack.decode(raw, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableFile("it is damaged") from error
    if header.identity != identity:
        raise UnusableFile("it belongs to other files or settings")
    count, marks = len(header.tokens), [tokens for tokens, _ in header.marks]
    has_sizes = n_bytes == sum(header.sizes) and min(header.sizes) >= 0
    has_counts = 0 <= header.n_draft <= count and 0 <= header.least <= count
    if not has_sizes or not has_counts or not all(0 < tokens <= count for tokens in marks):
        raise UnusableFile("it is damaged")
    return header


def _open(path: Path) -> BinaryIO:
    return os.fdopen(open_file(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _read_raw_header(file: BinaryIO) -> tuple[bytes, bytes, int]:
    """Return the header, the hash of it and all that follows, and the file's size. Raises as `read`."""
    size, start = os.fstat(file.fileno()).st_size, file.read(_HEAD.size)
    if len(start) < _HEAD.size:
        raise UnusableFile("it is cut short")
    magic, version, length, digest = _HEAD.unpack(start)
    if magic != MAGIC:
        raise UnusableFile("it is not a saved state")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise UnusableFile(f"{age} localspec wrote it")
    if length > size:
        raise UnusableFile("it is damaged")
    return file.read(length), digest, size


def write(file: BinaryIO, prefix: Prefix, identity: str, should_stop: Callable[[], bool]) -> None:
    """Write a prefix, piece by piece, calling `should_stop` before each piece.

    Raises WritingStopped if `should_stop` returned True. Raises OSError if the file cannot be written.
    """
    draft = prefix.draft if prefix.draft is not None else _NO_STATE
    marks = [(mark.tokens, mark.state.nbytes) for mark in prefix.marks]
    kept, sizes = (prefix.n_draft, prefix.least, prefix.exact), (prefix.target.nbytes, draft.nbytes)
    header = msgspec.msgpack.encode(_Header(identity, list(prefix.tokens), *kept, *sizes, marks))
    hashed = hashlib.sha256(header)
    file.write(_HEAD.pack(MAGIC, VERSION, len(header), bytes(32)))
    file.write(header)
    for state in (prefix.target, draft, *(mark.state for mark in prefix.marks)):
        for offset in range(0, state.nbytes, _PIECE_BYTES):
            if should_stop():
                raise WritingStopped
            piece = state[offset : offset + _PIECE_BYTES].data
            hashed.update(piece)
            file.write(piece)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, VERSION, len(header), hashed.digest()))


# Shorter texts are read again within seconds on any machine, and every file wears the disk.
MIN_TOKENS = 256
# A text is written again when it has grown by this part, so that all of its writings together stay below
# ten times the size of the last.
MIN_GROWTH = 1 / 8
# When the pair is unloaded, a text is also written if reading what has grown takes longer than writing all of
# it at this assumed speed of the disk: unloading is rare, and then nothing else keeps the text.
DISK_BYTES_PER_S = 1 << 30
# Seconds to read a text's tokens from one position to another.
ReadingTime = Callable[[int, int], float]
# Limit of what waits for the disk, except that a single state may be larger. It counts toward no other limit
# of memory.
MAX_QUEUED_BYTES = 256 << 20
RESERVED_BYTES = 1 << 30  # disk space that is left free for others
_TEXTS_SUFFIX = ".tokens"
_END_OF_TEXT = -1  # between two texts of a conversation
_CONVERSATION = re.compile(rf"[0-9a-f]{{1,64}}|{ANONYMOUS_CLIENTS}")


class SessionStore:
    """The saved states of one pair's texts. `load` may be called from any thread.

    folder None or limit 0: nothing is saved. notice: called with sentences for the log.
    """

    def __init__(
        self, folder: Path | None, identity: str, limit: int, notice: Callable[[str], None]
    ) -> None:
        self._folder, self._limit = folder if limit > 0 else None, limit
        self._identity, self._notice = identity, notice
        self._lock = threading.Lock()
        self._queued_bytes = 0  # bytes that wait to be written or are being written
        self._forgotten: set[str] = set()  # conversations of which nothing more may be written
        self._all_forgotten = False  # whether nothing that was here until now may be written
        # Requests that wait with the same state share it.
        self._loaded = weakref.WeakValueDictionary[Path, Prefix]()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._saved: dict[Path, Prefix] = {}  # what the files hold, without the states
        self._n_saved_tokens: dict[str, int] = {}  # of the texts to draft from, per conversation
        if self._folder is not None:
            for conversation_folder in self._folder.glob("*"):
                files.delete_unfinished(conversation_folder)
            for path in self._folder.glob(f"*/{identity}*.state"):
                try:
                    self._saved[path] = read_coverage(path, identity)
                except (OSError, UnusableFile) as error:
                    notice(f"{_describe(path)} is not used: {error}")

    def load(
        self,
        tokens: Sequence[int],
        n_held: int = 0,
        *,
        exact: bool = False,
        pays: Callable[[int, int], bool] = lambda _tokens, _size: True,
    ) -> Prefix | None:
        """Load the saved state of a text's beginning, if it covers more than `n_held` tokens in memory.

        pays(tokens, size): whether reading so many tokens costs more than restoring so many bytes.
        """
        with self._lock:
            path, length = self._find_longest(list(tokens), exact)
            if path is None or length - n_held < MIN_TOKENS:
                return None
            if (loaded := self._loaded.get(path)) is not None:
                return loaded
        try:
            if not pays(length - n_held, path.stat().st_size):
                return None
            prefix = read(path, self._identity)
        except (OSError, UnusableFile) as error:
            with self._lock:
                self._saved.pop(path, None)
            if not isinstance(error, FileNotFoundError):
                self._notice(f"{_describe(path)} is not used: {error}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used file is deleted first
        prefix = replace(prefix, conversation=path.parent.name, source="disk")
        with self._lock:
            if self._is_gone(prefix.conversation):
                return None
            self._loaded[path] = prefix
        return prefix

    def _find_longest(self, tokens: list[int], exact: bool) -> tuple[Path | None, int]:
        """Return the file that most of a text can reuse, and how much. The caller holds the lock."""
        candidates = (
            (path, saved.usable(tokens))
            for path, saved in self._saved.items()
            if saved.exact == exact and not self._is_gone(path.parent.name)
        )
        return max(candidates, key=lambda candidate: candidate[1], default=(None, 0))

    def save_dropped(self, prefix: Prefix) -> None:
        """Save a prefix that is no longer in memory, in another thread, if it belongs to a conversation.

        It is given up if the disk is slower than texts come, because what waits is in memory, too.
        """
        if not self.is_worth_saving(prefix.conversation, prefix.tokens, prefix.exact):
            return
        with self._lock:
            fits = not self._queued_bytes or self._queued_bytes + prefix.size <= MAX_QUEUED_BYTES
            if fits:
                self._queued_bytes += prefix.size

        def write() -> None:
            try:
                self._write(prefix, None)
            finally:
                with self._lock:
                    self._queued_bytes -= prefix.size

        if fits:
            self._writer.submit(write)

    def is_worth_saving(
        self,
        conversation: str | None,
        tokens: Sequence[int],
        exact: bool = False,
        reading_time: ReadingTime | None = None,
    ) -> bool:
        """Whether a text is worth writing to disk. `reading_time` is given when the pair is unloaded."""
        if self._folder is None or not _CONVERSATION.fullmatch(conversation or ""):
            return False
        with self._lock:
            if self._is_gone(conversation):
                return False
            path, n_saved = self._find_longest(list(tokens), exact)
        if len(tokens) - n_saved >= max(MIN_TOKENS, n_saved * MIN_GROWTH):
            return True
        if reading_time is None or path is None or not 0 < n_saved < len(tokens):
            return False
        try:
            size = path.stat().st_size * len(tokens) / n_saved
        except OSError:  # somebody has deleted the file
            return len(tokens) >= MIN_TOKENS
        return reading_time(n_saved, len(tokens)) > size / DISK_BYTES_PER_S

    def save_all(
        self, prefixes: Iterable[Prefix], seconds: float, reading_time: ReadingTime | None = None
    ) -> None:
        """Save the prefixes that are worth it, in this order, until the time is over."""
        deadline, remaining = time.monotonic() + seconds, iter(prefixes)
        while time.monotonic() < deadline and (prefix := next(remaining, None)) is not None:
            self._writer.submit(self._write, prefix, deadline, reading_time).result()

    def _write(
        self, prefix: Prefix, deadline: float | None, reading_time: ReadingTime | None = None
    ) -> None:
        if not self.is_worth_saving(prefix.conversation, prefix.tokens, prefix.exact, reading_time):
            return
        path = self._path(prefix)
        try:
            if not self._make_room(prefix.size, path):
                return
            assert self._folder is not None
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # No sync: after a power cut the hash shows a damaged file.
            with files.replace_atomically(path, sync=False) as file:
                self._write_file(file, prefix, deadline)
        except WritingStopped:
            return
        except OSError as error:
            self._notice(f"{_describe(path)} is not saved: {error}")
            return
        saved = _drop_states(prefix)
        with self._lock:
            self._loaded.pop(path, None)
            self._saved[path] = saved
            known = self._saved.items() if prefix.conversation == ANONYMOUS_CLIENTS else ()
            covered = [
                other
                for other, coverage in known
                if other != path and other.parent == path.parent and _covers(saved, coverage)
            ]
        for other in covered:
            self._delete_file(other)

    def _write_file(self, file: BinaryIO, prefix: Prefix, deadline: float | None) -> None:
        def is_over() -> bool:
            is_overdue = deadline is not None and time.monotonic() > deadline
            return is_overdue or self._is_gone(prefix.conversation)

        write(file, prefix, self._identity, is_over)
        if self._is_gone(prefix.conversation):
            raise WritingStopped

    def _make_room(self, size: int, path: Path) -> bool:
        """Delete the least recently used files until `size` bytes fit. Return False if they never do."""
        assert self._folder is not None
        if size > self._limit:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        infos: dict[
            Path, os.stat_result
        ] = {}  # also those of other pairs, whose workers may delete some
        for other in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                infos[other] = other.lstat()
        infos.pop(path, None)
        used = sum(info.st_size for info in infos.values())
        for stored, info in sorted(infos.items(), key=lambda item: item[1].st_mtime):
            if used + size <= self._limit:
                break
            if not stored.match(
                files.UNFINISHED_PATTERN
            ):  # else another pair's worker is writing it
                self._delete_file(stored)
                used -= info.st_size
        return shutil.disk_usage(self._folder).free - size >= RESERVED_BYTES

    def _delete_file(self, path: Path) -> None:
        with self._lock:
            self._saved.pop(path, None)
        path.unlink(missing_ok=True)

    def load_texts(self, limit: int, n_vocab: int) -> list[tuple[str, list[int]]]:
        """Load the texts that `save_texts` saved, oldest first, each with its conversation.

        limit: of the tokens of all texts; the latest are loaded. n_vocab: a file with tokens outside this
        vocabulary is skipped.
        """
        texts: list[tuple[str, list[int]]] = []
        for path in reversed(self._list_texts()):
            try:
                tokens = np.frombuffer(read(path, self._identity).target.tobytes(), np.int32)
                if not -1 <= tokens.min() <= tokens.max() < n_vocab:
                    raise UnusableFile("it is damaged")
            except (OSError, ValueError, UnusableFile) as error:
                self._notice(f"{_describe(path)} are not used: {error}")
                continue
            limit -= len(tokens)
            if limit < 0:
                break
            self._n_saved_tokens[path.parent.name] = len(tokens)
            ends = np.flatnonzero(tokens == _END_OF_TEXT)
            texts += [
                (path.parent.name, text[text != _END_OF_TEXT].tolist())
                for text in reversed(np.split(tokens, ends))
            ]
        return texts[::-1]

    def save_texts(self, texts: Iterable[tuple[str | None, Sequence[int]]]) -> None:
        """Save texts to draft from, oldest first, each with its conversation, in place of those saved before.

        Those of a conversation that is short are not saved, because every file wears the disk.
        """
        by_conversation: dict[str, list[int]] = {}
        for conversation, tokens in texts:
            if conversation is not None and _CONVERSATION.fullmatch(conversation):
                # The end of the dict has the conversation with the latest text.
                saved = by_conversation.pop(conversation, [])
                saved += [_END_OF_TEXT, *tokens] if saved else tokens
                by_conversation[conversation] = saved
        if self._folder is not None:
            with contextlib.suppress(RuntimeError):  # the store is closed
                self._writer.submit(self._write_texts, by_conversation).result()

    def _write_texts(self, by_conversation: dict[str, list[int]]) -> None:
        assert self._folder is not None
        long = {name: text for name, text in by_conversation.items() if len(text) >= MIN_TOKENS}
        for path in self._list_texts():
            if path.parent.name not in long:
                path.unlink(missing_ok=True)
        with self._lock:
            changed = [
                name
                for name, tokens in long.items()
                if self._n_saved_tokens.get(name) != len(tokens) and not self._is_gone(name)
            ]
        n_bytes = sum(len(long[name]) * np.dtype(np.int32).itemsize for name in changed)
        try:
            if not changed or not self._make_room(n_bytes, self._folder):
                return
            for name in changed:
                path = self._folder / name / f"{self._identity}{_TEXTS_SUFFIX}"
                path.parent.mkdir(mode=0o700, exist_ok=True)
                content = np.array(long[name], np.int32).view(np.uint8)
                replacing = files.replace_atomically(path, sync=False)
                with contextlib.suppress(WritingStopped), replacing as file:
                    self._write_file(file, Prefix([], content, conversation=name), None)
        except OSError as error:
            self._notice(f"texts to draft from are not saved: {error}")

    def _list_texts(self) -> list[Path]:
        """Return the files with texts, the oldest first."""
        if self._folder is None:
            return []
        times: dict[Path, int] = {}
        for path in self._folder.glob(f"*/{self._identity}{_TEXTS_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                times[path] = path.lstat().st_mtime_ns
        return sorted(times, key=times.__getitem__)

    def forget(self, conversation: str | None, done: Callable[[], None] = lambda: None) -> None:
        """Delete what is saved of a conversation, and write nothing of it again.

        None means all conversations, and then writing is allowed again after `allow_saving`. May be called
        from any thread, also while or after `close`. A file that is being written is abandoned. `done` is
        called, in any thread, when all is deleted.
        """
        with self._lock:
            if conversation is None:
                self._all_forgotten = True
            else:
                self._forgotten.add(conversation)
            for path in {*self._saved, *self._loaded}:
                if self._is_gone(path.parent.name):
                    self._saved.pop(path, None)
                    self._loaded.pop(path, None)
        try:
            self._writer.submit(self._delete, conversation, done)
        except RuntimeError:  # the store is closed, so nothing is written any more
            self._delete(conversation, done)

    def allow_saving(self) -> None:
        """Allow saving again, because memory no longer holds what was forgotten."""

        with contextlib.suppress(RuntimeError):  # the store is closed
            self._writer.submit(setattr, self, "_all_forgotten", False)

    def _is_gone(self, conversation: str | None) -> bool:
        return self._all_forgotten or conversation in self._forgotten

    def _delete(self, conversation: str | None, done: Callable[[], None]) -> None:
        if self._folder is not None and (
            conversation is None or _CONVERSATION.fullmatch(conversation)
        ):
            for conversation_folder in self._folder.glob(conversation or "*"):
                remove_tree(conversation_folder)
        done()

    def close(self) -> None:
        """Wait until what is being written is on disk."""
        self._writer.shutdown()

    def _path(self, prefix: Prefix) -> Path:
        assert self._folder is not None
        assert prefix.conversation is not None
        name = self._identity
        if prefix.conversation == ANONYMOUS_CLIENTS:
            text = np.array(prefix.tokens, np.int32).tobytes()
            name += f"-{hashlib.sha256(text).hexdigest()[:16]}"
        return self._folder / prefix.conversation / f"{name}.state"


def _describe(path: Path) -> str:
    """Return the subject of a sentence about a file in the log."""
    texts = path.suffix == _TEXTS_SUFFIX
    what, owner = ("texts", "programs") if texts else ("state", "a prompt")
    if path.parent.name != ANONYMOUS_CLIENTS:
        owner = f"conversation {path.parent.name}"
    return f"the saved {what} of {owner}"
