"""Texts' states on disk, so that after a restart nobody's prompt is read twice.

One folder per conversation, and one for what all other clients have sent; in it files per pair and
settings: what target and draft remember, with the tokens they stand for. What is looked for is looked for
by its tokens, whoever has sent them. It is a cache: whoever deletes one costs us reading that text again,
and a file that is not whole, or not ours to read, is passed over with a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from localspec import files
from localspec.engine.cache import session_file
from localspec.engine.cache.prefixes import Prefix
from localspec.engine.cache.session_file import Kept, Stopped, Unusable
from localspec.paths import remove_tree
from localspec.protocol.frames import ANYONE

# Fewer are read again within seconds on any machine, and a file costs the disk its wear.
MIN_TOKENS = 256
# A text is written again when it has grown by this part, so that all of its writings together stay
# below ten times its last.
GROWTH = 1 / 8
# When the pair leaves memory, also where reading what has grown takes longer than writing the whole again:
# that is seldom, and then nobody else keeps it. Bytes a second that a disk takes, about.
WRITING = 1 << 30
# Seconds to read a text's tokens from one position to another.
Reading = Callable[[int, int], float]
# Bytes that may wait for the disk, or one state that is larger. They count for no limit of memory.
WAITING = 256 << 20
RESERVE = 1 << 30  # bytes of the disk left to everybody else
_CONVERSATION = re.compile(rf"[0-9a-f]{{1,64}}|{ANYONE}")


class SessionStore:
    """The states of one pair's texts. `load` may be called from any thread beside the loop's.

    folder None or limit 0: nothing is saved. notice: called with sentences for the log.
    """

    def __init__(
        self, folder: Path | None, identity: str, limit: int, notice: Callable[[str], None]
    ) -> None:
        self._folder = folder if limit > 0 else None
        self._identity = identity
        self._limit = limit
        self._notice = notice
        self._lock = threading.Lock()
        self._waiting = 0  # bytes of what is to be written and being written
        self._gone: set[str] = set()  # conversations of which nothing may be written any more
        self._all_gone = False  # of anything that was here until now
        self._loaded = weakref.WeakValueDictionary[Path, Prefix]()  # those who wait share it
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._saved: dict[Path, Kept] = {}  # what stands in our files, by their own word
        if self._folder is not None:
            for each in self._folder.glob("*"):
                files.sweep(each)
            self._saved = dict(self._read_heads(self._folder))

    def _read_heads(self, folder: Path) -> Iterator[tuple[Path, Kept]]:
        for path in folder.glob(f"*/{self._identity}*.state"):
            try:
                yield path, session_file.head(path, self._identity)
            except (OSError, Unusable) as error:
                self._notice(f"{_named(path)} is not used: {error}")

    # ------------------------------------------------------------------ reading

    def load(
        self,
        tokens: Sequence[int],
        held: int = 0,
        *,
        exact: bool = False,
        pays: Callable[[int, int], bool] = lambda _tokens, _size: True,
    ) -> Prefix | None:
        """What is saved of a text's beginning, where that is more than the `held` tokens in memory.

        pays: is reading so many tokens dearer than putting so many bytes back?
        """
        with self._lock:
            path, length = self._longest(list(tokens), exact)
            if path is None or length - held < MIN_TOKENS:
                return None
            if (known := self._loaded.get(path)) is not None:
                return known
        try:
            if not pays(length - held, path.stat().st_size):
                return None
            prefix = session_file.read(path, self._identity)
        except (OSError, Unusable) as error:
            with self._lock:
                self._saved.pop(path, None)
            if not isinstance(error, FileNotFoundError):
                self._notice(f"{_named(path)} is not used: {error}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the one used longest ago is given up first
        prefix = replace(prefix, conversation=path.parent.name, source="disk")
        with self._lock:
            if self._is_gone(prefix.conversation):
                return None
            self._loaded[path] = prefix
        return prefix

    def _longest(self, tokens: list[int], exact: bool) -> tuple[Path | None, int]:
        """The file that most of a text can be gone on from with, and how much; the lock is held."""
        found = (
            (path, each.usable(tokens))
            for path, each in self._saved.items()
            if each.exact == exact and not self._is_gone(path.parent.name)
        )
        return max(found, key=lambda one: one[1], default=(None, 0))

    # ------------------------------------------------------------------ writing

    def dropped(self, prefix: Prefix) -> None:
        """A prefix is no longer in memory: save it, beside the loop, unless it is nobody's.

        Where the disk is slower than texts come, it is given up: what waits is in memory, too.
        """
        if not self.wanted(prefix.conversation, prefix.tokens, prefix.exact):
            return
        with self._lock:
            fits = not self._waiting or self._waiting + prefix.size <= WAITING
            if fits:
                self._waiting += prefix.size
        if fits:
            self._writer.submit(self._write_waiting, prefix)

    def _write_waiting(self, prefix: Prefix) -> None:
        try:
            self._write(prefix, None)
        finally:
            with self._lock:
                self._waiting -= prefix.size

    def wanted(
        self,
        conversation: str | None,
        tokens: Sequence[int],
        exact: bool = False,
        reading: Reading | None = None,
    ) -> bool:
        """Is writing a conversation's text, or ANYONE's, worth the disk? `reading`: as the pair leaves."""
        if self._folder is None or conversation is None:
            return False
        if not _CONVERSATION.fullmatch(conversation):
            return False
        with self._lock:
            if self._is_gone(conversation):
                return False
            path, saved = self._longest(list(tokens), exact)
        if len(tokens) - saved >= max(MIN_TOKENS, saved * GROWTH):
            return True
        if reading is None or path is None or not 0 < saved < len(tokens):
            return False
        try:
            size = path.stat().st_size * len(tokens) / saved
        except OSError:  # somebody has deleted it
            return len(tokens) >= MIN_TOKENS
        return reading(saved, len(tokens)) > size / WRITING

    def save_all(
        self,
        prefixes: Iterable[Callable[[], Prefix]],
        seconds: float,
        reading: Reading | None = None,
    ) -> None:
        """Save each that is `wanted` in turn, the most wanted first, until the time is over."""
        deadline = time.monotonic() + seconds
        for make in prefixes:
            if time.monotonic() >= deadline:
                break
            self._writer.submit(self._write, make(), deadline, reading).result()

    def _write(
        self, prefix: Prefix, deadline: float | None, reading: Reading | None = None
    ) -> None:
        if not self.wanted(prefix.conversation, prefix.tokens, prefix.exact, reading):
            return
        path = self._path(prefix)
        try:
            if not self._make_room(prefix.size, path):
                return
            assert self._folder is not None
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with files.replacing(
                path, sync=False
            ) as file:  # a power cut's rest, the hash will tell
                self._fill(file, prefix, deadline)
        except Stopped:
            return
        except OSError as error:
            self._notice(f"{_named(path)} is not saved: {error}")
            return
        new = Kept.of(prefix)
        with self._lock:
            self._loaded.pop(path, None)
            self._saved[path] = new
            covered = [
                other
                for other, each in self._saved.items()
                if other != path
                and other.parent.name == ANYONE == prefix.conversation
                and new.covers(each)
            ]
        for other in covered:
            self._drop(other)

    def _fill(self, file: BinaryIO, prefix: Prefix, deadline: float | None) -> None:
        def over() -> bool:
            late = deadline is not None and time.monotonic() > deadline
            return late or self._is_gone(prefix.conversation)

        session_file.write(file, prefix, self._identity, over)
        if self._is_gone(prefix.conversation):
            raise Stopped

    def _make_room(self, size: int, path: Path) -> bool:
        """Delete what was used longest ago until `size` bytes fit into the limit. False: they never do."""
        assert self._folder is not None
        if size > self._limit:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = sorted(self._others(path), key=lambda item: item[1].st_mtime)
        used = sum(info.st_size for _, info in kept)
        for each, info in kept:
            if used + size <= self._limit:
                break
            if each.match(files.UNFINISHED):  # another pair's worker is writing it
                continue
            self._drop(each)
            used -= info.st_size
        return shutil.disk_usage(self._folder).free - size >= RESERVE

    def _others(self, path: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """All files but this one, also those of other pairs, whose workers delete some at any time."""
        assert self._folder is not None
        for each in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                if each != path:
                    yield each, each.lstat()

    def _drop(self, path: Path) -> None:
        with self._lock:
            self._saved.pop(path, None)
        path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ forgetting

    def forget(self, conversation: str | None, then: Callable[[], None] = lambda: None) -> None:
        """Delete what is saved of a conversation, and write nothing of it again; with None of all, until
        `forgotten`.

        From any thread, also while or after `close`. What is being written of it is broken off;
        `then` is called, in any thread, when it is gone.
        """
        with self._lock:
            if conversation is None:
                self._all_gone = True
            else:
                self._gone.add(conversation)
            for known in (self._saved, self._loaded):
                for path in [path for path in known if self._is_gone(path.parent.name)]:
                    known.pop(path, None)
        try:
            self._writer.submit(self._delete, conversation, then)
        except RuntimeError:  # closed: nobody writes any more
            self._delete(conversation, then)

    def forgotten(self) -> None:
        """Memory has nothing either of what was forgotten: what comes now may be saved."""

        def again() -> None:
            self._all_gone = False

        with contextlib.suppress(RuntimeError):
            self._writer.submit(again)

    def _is_gone(self, conversation: str | None) -> bool:
        return self._all_gone or conversation in self._gone

    def _delete(self, conversation: str | None, then: Callable[[], None]) -> None:
        if self._folder is None:
            pass
        elif conversation is None:
            for each in self._folder.glob("*"):
                remove_tree(each)
        elif _CONVERSATION.fullmatch(conversation):
            remove_tree(self._folder / conversation)
        then()

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()

    def _path(self, prefix: Prefix) -> Path:
        assert self._folder is not None
        assert prefix.conversation is not None
        name = self._identity
        if prefix.conversation == ANYONE:
            text = np.array(prefix.tokens, np.int32).tobytes()
            name += f"-{hashlib.sha256(text).hexdigest()[:16]}"
        return self._folder / prefix.conversation / f"{name}.state"


def _named(path: Path) -> str:
    """A file's name in a sentence of the log."""
    if path.parent.name == ANYONE:
        return "the saved state of a prompt"
    return f"the saved state of conversation {path.parent.name}"
