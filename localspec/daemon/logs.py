"""The daemon's log, one rotated file with prompts only if `log_prompts` is set, and its threads."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import re
import threading
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from localspec.paths import open_file, read_file
from localspec.registry.store.files import write_atomically

log = logging.getLogger("localspec.prompts")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

MAX_LOG_BYTES = 1 << 20
BACKUP_COUNT = 3
# A line of `prompt`. It names no conversation if the request asked not to be kept.
_PROMPT_LINE = re.compile(
    rb"[-0-9]+ [:,0-9]+ INFO localspec[.\w]*\[\d+\]: prompt(?: of conversation (\w+))?: "
)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A rotated log file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_file)

    def rewrite(self, keep: Callable[[bytes], bool]) -> None:
        """Remove all lines for which `keep` returns False, also from rotated files."""
        self.acquire()
        try:
            self.flush()
            for file in Path(self.baseFilename).parent.glob(f"{Path(self.baseFilename).name}*"):
                lines = read_file(file).splitlines(keepends=True)
                kept_lines = [line for line in lines if keep(line)]
                if len(kept_lines) < len(lines):
                    self.close()  # the next record reopens it
                    write_atomically(file, b"".join(kept_lines))
        finally:
            self.release()


def start(file: Path, *, verbose: bool = False) -> None:
    """Send every log record to `file`. A full or read-only disk does not stop the daemon."""
    logging.raiseExceptions = False
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler: logging.Handler = _PrivateFile(
            file, maxBytes=MAX_LOG_BYTES, backupCount=BACKUP_COUNT, encoding="utf-8", delay=True
        )
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    # The HTTP library logs every URL at INFO, and URLs of storage services contain a signature.
    for name in ("asyncio", "httpx2", "httpcore2", "huggingface_hub", "watchfiles"):
        logging.getLogger(name).setLevel(logging.WARNING)


def log_prompt(conversation: str | None, text: str) -> None:
    """Log a prompt in one line, so that it can be removed with its conversation."""
    log.info("prompt%s: %s", f" of conversation {conversation}" if conversation else "", text)


def forget_prompts(conversation: str | None) -> None:
    """Remove a conversation's prompts from the log, or all with None. Raises OSError or StoreError."""

    def keep(line: bytes) -> bool:
        match = _PROMPT_LINE.match(line)
        if match is None:
            return True
        return conversation is not None and match[1] != conversation.encode()

    for handler in logging.getLogger().handlers:
        if isinstance(handler, _PrivateFile):
            handler.rewrite(keep)


class ThreadPool:
    """A pool for one kind of blocking work, so that none delays another.

    The event loop's own pool is for short disk operations. Hashing a model takes minutes.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix=name)

    async def run(
        self,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*arguments, **keywords))


class SharedWork(Generic[Result]):
    """Long work by name. Callers share the result of running work, which ends once all of them have left."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        self._running: dict[str, _Work[Result]] = {}

    @property
    def names(self) -> Set[str]:
        """The names of the work that callers wait for."""
        return self._running.keys()

    async def get(self, name: str, work: Callable[[threading.Event], Result]) -> Result:
        """Return the result of `work`. Its argument is an event that is set when no caller waits any more."""
        running = self._running.get(name)
        if running is None:
            running = self._running[name] = _Work(self._threads, work)
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.cancelled.set()
                if self._running.get(name) is running:
                    del self._running[name]

    def close(self) -> None:
        """Cancel all running work."""
        for running in self._running.values():
            running.cancelled.set()


class _Work(Generic[Result]):
    def __init__(self, threads: ThreadPool, work: Callable[[threading.Event], Result]) -> None:
        self.waiting = 0
        self.cancelled = threading.Event()
        self.task = asyncio.ensure_future(threads.run(work, self.cancelled))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())
