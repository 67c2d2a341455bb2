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
from typing import BinaryIO, NamedTuple

import numpy as np

from localspec import files
from localspec.engine.cache import session_file
from localspec.engine.cache.prefixes import Prefix, common_prefix
from localspec.engine.cache.session_file import Kept, Stopped, Unusable
from localspec.paths import remove_tree

# Fewer are read again within seconds on any machine, and a file costs the disk its wear.
MIN_TOKENS = 256
# A text is written again when it has grown by this part, so that all of its writings together stay
# below ten times its last.
GROWTH = 1 / 8
# Bytes that may wait for the disk, or one state that is larger. They count for no limit of memory.
WAITING = 256 << 20
RESERVE = 1 << 30  # bytes of the disk left to everybody else
ANYONE = "clients"  # in place of a conversation: of nobody's that has a name
_CONVERSATION = re.compile(rf"[0-9a-f]{{1,64}}|{ANYONE}")


class SessionStore:
    """The states of one pair's conversations. `load` may be called from any one thread beside the loop's.

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
        self._held: dict[str, int] = {}  # conversations in memory, and their tokens on disk
        self._waiting = 0  # bytes of what is to be written and being written
        self._gone: set[str] = set()  # conversations of which nothing may be written any more
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")
        if self._folder is not None:
            for each in self._folder.glob("*"):
                files.sweep(each)

    # ------------------------------------------------------------------ reading

    def load(self, conversation: str) -> Prefix | None:
        """What is saved of a conversation, unless it is in memory."""
        if self._folder is None or not _CONVERSATION.fullmatch(conversation):
            return None
        with self._lock:
            if conversation in self._held:
                return None
            self._held[conversation] = 0
        path = self._path(conversation)
        try:
            prefix = session_file.read(path, self._identity)
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as error:
            self._notice(f"the saved state of conversation {conversation} is not used: {error}")
            return None
        with self._lock:
            self._held[conversation] = len(prefix.tokens)
        with contextlib.suppress(OSError):
            os.utime(path)  # the one used longest ago is given up first
        return replace(prefix, conversation=conversation, source="disk")

    # ------------------------------------------------------------------ writing

    def dropped(self, prefix: Prefix) -> None:
        """A prefix is no longer in memory: save it, beside the loop, if it is a conversation's.

        Where the disk is slower than conversations come, it is given up: what waits is in memory, too.
        """
        if prefix.conversation is None:
            return
        with self._lock:
            fits = not self._waiting or self._waiting + prefix.size <= WAITING
            if fits:
                self._waiting += prefix.size
        if fits:
            self._writer.submit(self._write_waiting, prefix)
        self._writer.submit(self._let_go, prefix.conversation)

    def _write_waiting(self, prefix: Prefix) -> None:
        try:
            self._write(prefix, None)
        finally:
            with self._lock:
                self._waiting -= prefix.size

    def _let_go(self, conversation: str) -> None:
        with self._lock:
            self._held.pop(conversation, None)

    def wanted(self, conversation: str | None, tokens: int) -> bool:
        """Is writing so many tokens of it worth the disk?"""
        if self._folder is None or conversation is None:
            return False
        if not _CONVERSATION.fullmatch(conversation):
            return False
        with self._lock:
            if conversation in self._gone:
                return False
            saved = self._held.get(conversation, 0)
        return tokens - saved >= max(MIN_TOKENS, saved * GROWTH)

    def save_all(self, prefixes: Iterable[Callable[[], Prefix]], seconds: float) -> None:
        """Save each in turn, the most wanted first, until the time is over."""
        deadline = time.monotonic() + seconds
        for make in prefixes:
            if time.monotonic() >= deadline:
                break
            self._writer.submit(self._write, make(), deadline).result()

    def _write(self, prefix: Prefix, deadline: float | None) -> None:
        conversation = prefix.conversation
        if conversation is None or not self.wanted(conversation, len(prefix.tokens)):
            return
        path = self._path(conversation)
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
            self._notice(f"the state of conversation {conversation} is not saved: {error}")
            return
        with self._lock:
            self._held[conversation] = len(prefix.tokens)

    def _fill(self, file: BinaryIO, prefix: Prefix, deadline: float | None) -> None:
        def over() -> bool:
            late = deadline is not None and time.monotonic() > deadline
            return late or prefix.conversation in self._gone

        session_file.write(file, prefix, self._identity, over)
        if prefix.conversation in self._gone:
            raise Stopped

    def _make_room(self, size: int, path: Path) -> bool:
        """Delete what was used longest ago until `size` bytes fit into the limit. False: they never do."""
        assert self._folder is not None
        if size > self._limit:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [each for each in self._folder.glob("*/*") if each != path]
        kept = sorted(((each, each.lstat()) for each in others), key=lambda item: item[1].st_mtime)
        used = sum(info.st_size for _, info in kept)
        for each, info in kept:
            if used + size <= self._limit:
                break
            each.unlink(missing_ok=True)
            used -= info.st_size
        return shutil.disk_usage(self._folder).free - size >= RESERVE

    # ------------------------------------------------------------------ forgetting

    def forget(self, conversation: str | None, then: Callable[[], None] = lambda: None) -> None:
        """Delete what is saved of a conversation, with None of all, and write nothing of it again.

        From any thread, also while or after `close`. What is being written of it is broken off;
        `then` is called, in any thread, when it is gone.
        """
        with self._lock:
            gone = set(self._held) if conversation is None else {conversation}
            self._gone |= gone
            for each in gone:
                self._held.pop(each, None)
        try:
            self._writer.submit(self._delete, conversation, then)
        except RuntimeError:  # closed: nobody writes any more
            self._delete(conversation, then)

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

    def _path(self, conversation: str) -> Path:
        assert self._folder is not None
        return self._folder / conversation / f"{self._identity}.state"
