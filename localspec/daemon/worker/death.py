"""Decide what the end of a worker means: its error, when a pair is set aside, and when safe mode is on."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import platform
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from localspec import files
from localspec.errors import (
    BadGguf,
    InvalidRequest,
    LocalspecError,
    PairSetAside,
    WorkerDied,
    WorkerOutOfMemory,
    WorkerTimeout,
)
from localspec.paths import read_file
from localspec.protocol import frames
from localspec.registry.header.model import shard_paths

log = logging.getLogger("localspec.safe_mode")

SAFE_MODE_VERSION = 1
MAX_CRASHES = 3  # crashes within CRASH_WINDOW_S after which a pair is set aside
CRASH_WINDOW_S = 600.0

# Signals that end a process whose kernels were compiled for another CPU, or wrongly. Some compilers
# produce such AMX kernels, see machine/host.py.
KERNEL_SIGNALS = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS)

# Signals that end a process while it tokenizes a fatal text: a stack overflow or a failed assertion.
TEXT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# Signals by which llama.cpp's own code ends a process.
CODE_SIGNALS = (*KERNEL_SIGNALS, signal.SIGABRT, signal.SIGFPE)
MAX_CAUSES = 64  # causes of crashes that are remembered

Ending = Literal["crash", "watchdog", "unload"]
Value = TypeVar("Value")
# llama.cpp's last message if another machine that holds layers is gone.
_REMOTE_LOST_MESSAGE = "Remote RPC server"
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "bad_alloc",
    "cannot allocate memory",
    "failed to allocate",
)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker."""

    ending: Ending
    returncode: int  # as that of subprocess
    last_words: str = ""  # the last line on stderr
    # Whether the kernel counted an out-of-memory kill during the worker's life, None if unknown.
    oom_kill: bool | None = None

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals(-self.returncode) if self.returncode < 0 else None
        except ValueError:
            return None

    @property
    def may_be_from_kernels(self) -> bool:
        """Whether kernels that do not suit this CPU may have caused it."""
        return self.ending == "crash" and self.signal in KERNEL_SIGNALS

    def may_be_from(self, signals: Collection[int]) -> bool:
        """Return whether it is a crash by one of these signals without another known cause."""
        known = self.out_of_memory or self.lost_remote_machine
        return self.ending == "crash" and self.signal in signals and not known

    @property
    def out_of_memory(self) -> bool:
        if self.ending != "crash":
            return False
        if any(words in self.last_words.lower() for words in _OUT_OF_MEMORY_MESSAGES):
            return True
        return self.signal is signal.SIGKILL and bool(self.oom_kill)

    @property
    def lost_remote_machine(self) -> bool:
        """Whether another machine that held layers of the pair was lost."""
        return self.ending == "crash" and _REMOTE_LOST_MESSAGE in self.last_words

    @property
    def description(self) -> str:
        """A description of the end in a few words."""
        if self.ending == "watchdog":
            return "no answer"
        if self.out_of_memory:
            return "out of memory"
        if self.lost_remote_machine:
            return "lost another machine"
        return f"signal {self.signal.name}" if self.signal else f"exit status {self.returncode}"

    @property
    def summary(self) -> str:
        """A description of the end with the last message of the worker."""
        return f"{self.description} {self.last_words}".rstrip()

    def error(self, watchdog_s: float) -> LocalspecError:
        """Return the error for the requests that were running."""
        last_message = f" Its last message: {self.last_words}" if self.last_words else ""
        if self.ending == "watchdog":
            return WorkerTimeout(
                f"The engine did not respond for {watchdog_s:g} s and was killed; the next request "
                "starts a new one."
            )
        if self.out_of_memory:
            return WorkerOutOfMemory(
                "The engine ran out of memory. Use a smaller pair or a smaller `context` in "
                f"config.toml.{last_message}"
            )
        if self.lost_remote_machine:
            return WorkerDied(
                "A machine that has layers of this pair (`rpc` in models.toml) is gone. The next request "
                "loads the pair without that machine if it fits, and otherwise reports which one is missing."
            )
        return WorkerDied(
            f"The engine crashed ({self.description}); the next request starts a new one.{last_message}"
        )

    def changed_file_error(self, file: Path) -> LocalspecError:
        """Return the error for the requests if a file of the model was changed while the engine read it."""
        return WorkerDied(
            f"The file {file} was changed or truncated while its model was loaded, which "
            f"crashed the engine ({self.description}); the next request loads the file as it is then. "
            "If you did not change it, download it again."
        )

    def text_error(self) -> LocalspecError:
        """Return the error for the sender of a text that crashed the engine."""
        return InvalidRequest(
            f"The text of this request crashed the engine ({self.description}) while it was being "
            "tokenized, so it is not tried again. A long run of characters without spaces is "
            "the likely cause; shorten or split it.",
            param="prompt",
        )


def blame(
    death: Death,
    *,
    file_changed: bool,
    preparing: bool,
    decoded: bool,
    safe_mode: bool,
    drafting: bool,
) -> Literal["file", "text", "kernels", "draft", "pair"]:
    """Return what caused the death of a worker.

    file_changed: a file it reads has changed since the load. preparing: a text was being tokenized. decoded:
    it had decoded before. drafting: a draft was loaded, or the heads in the target's file.

    After a crash of the kernels at the first decode, safe mode is tried once. After any other crash, the
    target is tried without what drafts for it. If that crashes too, the pair is the cause.
    """
    if death.may_be_from_kernels and file_changed:
        return "file"
    if death.may_be_from(TEXT_SIGNALS) and preparing:
        return "text"
    if death.may_be_from_kernels and not decoded and not safe_mode:
        return "kernels"
    return "draft" if death.may_be_from(CODE_SIGNALS) and drafting else "pair"


class CrashHistory:
    """The crashes of each cause. A cause is a pair's files and settings, see `MappedFiles.crash_cause`.

    After MAX_CRASHES crashes within CRASH_WINDOW_S a cause is refused until reset. A changed setting or file
    makes a new cause, so the pair can be used at once. If the change is undone, the cause is refused again.
    """

    def __init__(self) -> None:
        self._crashes: dict[bytes, list[float]] = {}
        self._aside: dict[bytes, tuple[frames.PairFiles, str]] = {}
        self._draft_problems: dict[bytes, str] = {}

    def drop_draft(self, pair: frames.PairFiles, cause: bytes, reason: str) -> str:
        """Leave out what drafts when this cause is loaded again. Return a sentence about it."""
        name = Path(pair.draft).name if pair.draft else "What drafts for its target"
        problem = (
            f"{name} is left out, because the engine crashed with it ({reason}). To try it again: "
            "localspec start --reset"
        )
        _remember(self._draft_problems, cause, problem)
        return problem

    def draft_problem(self, cause: bytes) -> str:
        """Return why a cause is loaded without what drafts for its target, as a sentence, or ""."""
        return self._draft_problems.get(cause, "")

    def record(self, pair: frames.PairFiles, cause: bytes, now: float, reason: str) -> None:
        """Record a crash at monotonic time `now`. The loss of another machine does not count."""
        if _REMOTE_LOST_MESSAGE in reason:
            return
        recent = [at for at in self._crashes.pop(cause, []) if now - at < CRASH_WINDOW_S] + [now]
        _remember(self._crashes, cause, recent)
        if len(recent) >= MAX_CRASHES:
            _remember(self._aside, cause, (pair, reason))

    def causes_set_aside(self, pair: str) -> list[tuple[bytes, frames.PairFiles]]:
        """Return the causes for which `pair` was set aside, each with its files."""
        causes = self._aside.items()
        return [(cause, pair_files) for cause, (pair_files, _) in causes if pair_files.name == pair]

    def check(self, cause: bytes) -> None:
        """Refuse a cause that crashed too often. Raises PairSetAside."""
        if cause in self._aside:
            pair_files, reason = self._aside[cause]
            raise PairSetAside(
                f"The pair '{pair_files.name}' is set aside: its engine crashed {MAX_CRASHES} times within "
                f"{CRASH_WINDOW_S / 60:.0f} minutes with these settings and files (last crash: {reason}). "
                "Change a setting back (localspec config), or try it again: localspec start "
                "--reset"
            )

    def reset(self) -> None:
        self._crashes.clear()
        self._aside.clear()
        self._draft_problems.clear()


def _remember(table: dict[bytes, Value], cause: bytes, value: Value) -> None:
    """Remember a value of a cause, and forget the oldest ones if there are too many."""
    while len(table) >= MAX_CAUSES:
        del table[next(iter(table))]
    table[cause] = value


class MappedFiles:
    """The state of a pair's files at the load, to see whether they have changed since.

    llama.cpp maps them. If a mapped file is truncated, the next read of the missing part ends the process
    with SIGBUS, which neither the pair nor the kernels caused. A file that is replaced by another one of
    its name does no harm, because the mapped one stays until the engine ends.
    """

    def __init__(self, pair: frames.PairFiles) -> None:
        model_files: list[Path] = []
        for name in (pair.target, pair.draft, *pair.other_drafts):
            with contextlib.suppress(BadGguf):  # the load reports it
                model_files += shard_paths(Path(name)) if name else []
        self._marks = {file: _file_mark(file) for file in model_files}

    def changed_file(self) -> Path | None:
        return next((file for file, mark in self._marks.items() if _file_mark(file) != mark), None)

    def crash_cause(self, pair: frames.PairFiles, settings: frames.EngineSettings) -> bytes:
        """Return a hash of what an engine read and of its settings, to recognize repeated crashes."""
        marks = [(str(file), mark) for file, mark in self._marks.items()]
        return hashlib.sha256(msgspec.msgpack.encode([pair, marks, settings])).digest()


def _file_mark(file: Path) -> tuple[int, int] | None:
    """Return the size of a file and the time of its last change in ns, None if there is no such file."""
    try:
        info = file.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns


class SafeModeRecord(msgspec.Struct):
    """The content of the safe-mode file. `reasons`: why safe mode was needed, by machine and build."""

    version: int
    reasons: dict[str, str] = {}


class SafeMode:
    """Whether llama.cpp's repacked kernels are off, and the file that remembers why they had to be.

    Some compilers build kernels that end the process at the first decode. A worker that dies like this is
    tried once more without them. If that helps, it is remembered per CPU and build of llama.cpp, so that a
    rebuilt one is trusted again. If a GPU's driver may have crashed instead, safe mode is only tried and not
    remembered. A file of a newer release is neither read nor changed.
    """

    def __init__(self, file: Path, key: str | None = None, backend: str | None = None) -> None:
        """Use `file`. `key` (machine and build) and the `backend` of the build are detected if None."""
        self._file = file
        self._key = key
        self._backend = backend
        self._reason: str | None = None
        self._recalled = False

    @property
    def on(self) -> bool:
        return self._reason is not None

    def note(self) -> str | None:
        """Return a note on safe mode for a person, or None."""
        if not self.on:
            return None
        from localspec.machine import CHECKOUT

        if not self._uses_cpu_only():
            return (
                "Safe mode: the engine crashed at its first pass. Until the daemon ends, llama.cpp's fast "
                "kernels for the CPU are not used. If the GPU's driver was the cause, update it, or do not "
                "use the GPU: localspec config set gpu_layers 0"
            )
        advice = "scripts/setup" if CHECKOUT else "see: localspec doctor"
        return (
            "Safe mode: llama.cpp's fast kernels crashed on this machine, so slower ones are "
            f"used. To fix it, rebuild llama-cpp-python for this machine ({advice})."
        )

    def recall(self) -> str | None:
        """Restore the state that the last run ended with. Return the reason if safe mode is on."""
        if not self._recalled:
            self._recalled = True
            record = self._read() if self._uses_cpu_only() else None
            self._reason = record.reasons.get(self._identity()) if record else None
        return self._reason

    def begin(self, reason: str) -> None:
        """Switch safe mode on as a try."""
        self._reason = reason

    def end(self) -> None:
        """Switch safe mode off in this run, because it did not help."""
        self._reason = None

    def keep(self) -> None:
        """Remember for the next runs that safe mode helped, if it is on."""
        record = self._read() if self._reason and self._uses_cpu_only() else None
        if record and self._reason:
            record.reasons[self._identity()] = self._reason
            self._write(record)

    def forget(self) -> None:
        """Switch safe mode off in this run and the next ones."""
        self._reason = None
        record = self._read()
        if record and record.reasons.pop(self._identity(), None):
            self._write(record)

    def _uses_cpu_only(self) -> bool:
        """Return whether only llama.cpp's own kernels can have crashed, because no GPU driver is used."""
        if self._backend is None:
            from localspec.machine import installed_backend

            self._backend = installed_backend() or "cpu"
        return self._backend == "cpu"

    def _write(self, record: SafeModeRecord) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomically(self._file, msgspec.json.encode(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error)

    def _read(self) -> SafeModeRecord | None:
        try:
            record = msgspec.json.decode(read_file(self._file), type=SafeModeRecord)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return SafeModeRecord(SAFE_MODE_VERSION)
        if record.version > SAFE_MODE_VERSION:
            log.warning("%s is of a newer release; it is left alone", self._file)
            return None
        return record

    def _identity(self) -> str:
        if self._key is None:
            self._key = f"{_cpu()} / {_build()}"
        return self._key


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.system()} {platform.machine()}"


def _build() -> str:
    """Return an id of the installed llama.cpp from its library files, without importing it."""
    spec = importlib.util.find_spec("llama_cpp")
    digest = hashlib.sha256()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder, "lib").glob("*")):
            info = file.stat()
            digest.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return f"llama.cpp {digest.hexdigest()[:16]}"
