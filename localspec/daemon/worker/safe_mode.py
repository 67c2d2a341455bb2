"""Remember on which machines llama.cpp's repacked kernels must be switched off.

Some compilers build kernels that end the process at the first decode. A worker that dies like this is tried
once more without them. If that helps, it is remembered per CPU and build of llama.cpp, so that a rebuilt one
is trusted again. If a GPU's driver may have crashed instead, safe mode is only tried and not remembered.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import platform
from pathlib import Path

import msgspec

from localspec import files
from localspec.paths import read_file

log = logging.getLogger("localspec.safe_mode")

VERSION = 1


class Record(msgspec.Struct):
    """The file. `reasons`: why safe mode was needed, by machine and build."""

    version: int
    reasons: dict[str, str] = {}


class SafeMode:
    """Whether the fast kernels are off, and the file that remembers why they had to be.

    A file of a newer release is neither read nor changed.
    """

    def __init__(self, file: Path, key: str | None = None, built: str | None = None) -> None:
        """Use `file`. `key` (machine and build) and `built` (its backend) are detected if they are None."""
        self._file = file
        self._key = key
        self._built = built
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

        if not self._has_no_driver():
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
            record = self._read() if self._has_no_driver() else None
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
        record = self._read() if self._reason and self._has_no_driver() else None
        if record and self._reason:
            record.reasons[self._identity()] = self._reason
            self._write(record)

    def forget(self) -> None:
        """Switch safe mode off in this run and the next ones."""
        self._reason = None
        record = self._read()
        if record and record.reasons.pop(self._identity(), None):
            self._write(record)

    def _has_no_driver(self) -> bool:
        """Return whether only llama.cpp's own kernels can have crashed, because no GPU driver is used."""
        if self._built is None:
            from localspec.machine import installed_backend

            self._built = installed_backend() or "cpu"
        return self._built == "cpu"

    def _write(self, record: Record) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self._file, msgspec.json.encode(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error)

    def _read(self) -> Record | None:
        try:
            record = msgspec.json.decode(read_file(self._file), type=Record)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return Record(VERSION)
        if record.version > VERSION:
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
