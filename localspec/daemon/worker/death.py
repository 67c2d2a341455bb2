"""What the end of a worker means, and when a pair is set aside: decisions, no processes."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from localspec.errors import (
    BadGguf,
    InvalidRequest,
    LocalspecError,
    PairSetAside,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
)
from localspec.protocol import frames

LIMIT = 3
WINDOW = 600.0  # seconds

# A kernel compiled for another CPU, or wrongly, ends a process in one of these ways. Seen with
# the AMX kernels of some compilers, see machine/host.py.
KERNEL_SIGNALS = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS)

# How a text can end the process that turns it into tokens: the stack's end, or an assertion.
TEXT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
MAX_TEXTS = 256  # remembered; a hash each
MAX_CAUSES = 64  # of crashes; more settings than anybody tries

Ending = Literal["crash", "watchdog", "unload"]
Mark = tuple[int, int] | None  # size in bytes, time of the last change in ns; None: not there
_LOST = "Remote RPC server"  # llama.cpp's last words where another machine with layers is gone
_NO_MEMORY = ("out of memory", "bad_alloc", "cannot allocate memory", "failed to allocate")


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. `returncode` as subprocess has it; `last_words` its last line on stderr.

    `oom_kill`: the kernel counted an out-of-memory kill while the worker lived (None: not known).
    """

    ending: Ending
    returncode: int
    last_words: str = ""
    oom_kill: bool | None = None

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals(-self.returncode) if self.returncode < 0 else None
        except ValueError:
            return None

    @property
    def by_kernels(self) -> bool:
        return self.ending == "crash" and self.signal in KERNEL_SIGNALS

    @property
    def by_text(self) -> bool:
        """Whether a text may have done it, if one was becoming tokens."""
        lost = self.for_memory or self.lost_machine
        return self.ending == "crash" and self.signal in TEXT_SIGNALS and not lost

    @property
    def for_memory(self) -> bool:
        if self.ending != "crash":
            return False
        if any(words in self.last_words.lower() for words in _NO_MEMORY):
            return True
        return self.signal is signal.SIGKILL and bool(self.oom_kill)

    @property
    def lost_machine(self) -> bool:
        """Whether another machine that had layers of the pair went away."""
        return self.ending == "crash" and _LOST in self.last_words

    @property
    def how(self) -> str:
        """The end in two words."""
        if self.ending == "watchdog":
            return "no answer"
        if self.for_memory:
            return "out of memory"
        if self.lost_machine:
            return "lost another machine"
        return f"signal {self.signal.name}" if self.signal else f"exit status {self.returncode}"

    @property
    def summary(self) -> str:
        """The end and the last words, for whoever asks why later."""
        return f"{self.how} {self.last_words}".rstrip()

    def error(self, watchdog: float) -> LocalspecError:
        """What the requests that were running are told."""
        if self.ending == "watchdog":
            return WorkerTimeout(
                f"The engine did not respond for {watchdog:g} s and was killed; the next request "
                "starts a new one."
            )
        if self.for_memory:
            return WorkerOutOfMemory(
                "The engine ran out of memory. Use a smaller pair or a smaller `context` in "
                f"config.toml.{self._words()}"
            )
        if self.lost_machine:
            return WorkerDied(
                "A machine that has layers of this pair (`rpc` in models.toml) is gone. The next request "
                "loads the pair without it, where it fits, else it says which one is missing."
            )
        return WorkerDied(
            f"The engine crashed ({self.how}); the next request starts a new one.{self._words()}"
        )

    def of_changed_file(self, file: Path) -> LocalspecError:
        """What they are told when the engine died while a file it reads was being changed."""
        return WorkerDied(
            f"The file {file} was changed or truncated while its model was loaded, which "
            f"crashed the engine ({self.how}); the next request loads the file as it is then. "
            "If you did not change it, download it again."
        )

    def _words(self) -> str:
        return f" Its last message: {self.last_words}" if self.last_words else ""


def blame(
    death: Death, *, file_changed: bool, preparing: bool, decoded: bool, safe_mode: bool
) -> Literal["file", "text", "kernels", "pair"]:
    """What a worker died of.

    `file_changed`: a file it reads is not what it loaded. `preparing`: a text was becoming tokens.
    `decoded`: it had decoded before. A crash of the kernels at the first decode is tried again
    without them, once; what happens in safe mode too is the pair's own.
    """
    if death.by_kernels and file_changed:
        return "file"
    if death.by_text and preparing:
        return "text"
    if death.by_kernels and not decoded and not safe_mode:
        return "kernels"
    return "pair"


class CrashHistory:
    """Crashes per cause: a pair's files and settings, see `cause`.

    After LIMIT of them within WINDOW a cause is not tried until reset. Whoever changes a setting, or a
    file, has another one, and gets the pair at once; whoever changes it back is told again.
    """

    def __init__(self) -> None:
        self._crashes: dict[bytes, list[float]] = {}
        self._aside: dict[bytes, tuple[frames.PairFiles, str]] = {}

    def record(self, pair: frames.PairFiles, cause: bytes, now: float, reason: str) -> None:
        """Note a crash at monotonic time `now`; where another machine went away, it is nobody's fault."""
        if _LOST in reason:
            return
        while len(self._crashes) >= MAX_CAUSES:
            del self._crashes[next(iter(self._crashes))]
        recent = [at for at in self._crashes.pop(cause, []) if now - at < WINDOW] + [now]
        self._crashes[cause] = recent
        if len(recent) >= LIMIT:
            while len(self._aside) >= MAX_CAUSES:
                del self._aside[next(iter(self._aside))]
            self._aside[cause] = pair, reason

    def aside(self, pair: str) -> list[tuple[bytes, frames.PairFiles]]:
        """The causes for which `pair` was set aside, each with its files."""
        found = self._aside.items()
        return [(cause, files) for cause, (files, _) in found if files.name == pair]

    def check(self, cause: bytes) -> None:
        """Whether it may be tried.

        Raises:
            PairSetAside: it crashed too often.
        """
        if cause in self._aside:
            files, reason = self._aside[cause]
            raise PairSetAside(
                f"The pair '{files.name}' is set aside: its engine crashed {LIMIT} times within "
                f"{WINDOW / 60:.0f} minutes with these settings and files (last crash: {reason}). "
                "Change a setting back (localspec config), or try it again: localspec start "
                "--reset"
            )

    def reset(self) -> None:
        self._crashes.clear()
        self._aside.clear()


class DeadlyTexts:
    """The texts that ended an engine while it turned them into tokens, until reset.

    They would end the next one too, and everybody's answers with it.
    """

    def __init__(self) -> None:
        self.hashes: dict[bytes, str] = {}  # to how the engine ended

    def add(self, cause: bytes, frame: frames.Frame, death: Death) -> None:
        """`cause`: of the engine, see `cause`."""
        while len(self.hashes) >= MAX_TEXTS:
            del self.hashes[next(iter(self.hashes))]
        self.hashes[_text_hash(cause, frame)] = death.how

    def check(self, cause: bytes, frame: frames.Frame) -> None:
        """Whether a request may be sent.

        Raises:
            InvalidRequest: its text has ended an engine of this pair, with these settings and files.
        """
        if how := self.hashes.get(_text_hash(cause, frame)):
            raise deadly(how)

    def reset(self) -> None:
        self.hashes.clear()


def deadly(how: str) -> InvalidRequest:
    """What the sender of a text is told that ended the engine."""
    return InvalidRequest(
        f"The text of this request crashed the engine ({how}) while it was being "
        "tokenized, so it is not tried again. A long run of characters without spaces is "
        "the likely cause; shorten or split it.",
        param="prompt",
    )


def _text_hash(cause: bytes, frame: frames.Frame) -> bytes:
    """Of all that becomes tokens; other fields may differ between two tries."""
    texts: object = msgspec.structs.replace(frame, id=0)
    if isinstance(frame, frames.Generate):
        asked = frame.sampling.text_bias, frame.speculative.prediction, frame.constraint
        texts = [frame.prompt, *asked, frame.tools, frame.shown]
    return hashlib.sha256(msgspec.msgpack.encode([cause, texts])).digest()


# --- what there is to see of it beside the exit status


class Mapped:
    """The files of a pair as they are now: whether an engine's weights are still what it loaded.

    llama.cpp maps them: one that is cut meanwhile ends the process at the next read of what is gone
    (SIGBUS), and that is no fault of pair or kernels. One replaced by another name is no danger:
    what was mapped stays until the engine ends.
    """

    def __init__(self, pair: frames.PairFiles) -> None:
        from localspec.registry.header.model import shard_paths

        files: list[Path] = []
        for name in (pair.target, pair.draft):
            with contextlib.suppress(BadGguf):  # the load will say it
                files += shard_paths(Path(name)) if name else []
        self.marks = {file: _mark(file) for file in files}

    def changed(self) -> Path | None:
        """The first that is not what it was."""
        return next((file for file, mark in self.marks.items() if _mark(file) != mark), None)


def cause(pair: frames.PairFiles, mapped: Mapped, settings: frames.EngineSettings) -> bytes:
    """What an engine's crash is remembered by: which files it read, and how it was told to load them."""
    marks = [(str(file), mark) for file, mark in mapped.marks.items()]
    return hashlib.sha256(msgspec.msgpack.encode([pair, marks, settings])).digest()


def _mark(file: Path) -> Mark:
    try:
        info = file.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns
