"""Which machines need llama.cpp's repacked kernels switched off, remembered between runs.

Some compilers build kernels that end the process at the first decode. A worker that dies that way
is tried once more without them; what helped is kept per CPU and build of llama.cpp, so that a
rebuilt one is trusted again. Where a GPU's driver may have crashed instead, it is a try, and kept by nobody.
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
    """`reasons`: why safe mode was needed, by machine and build."""

    version: int
    reasons: dict[str, str] = {}


class SafeMode:
    """Whether the fast kernels are off, and the file that remembers why they had to be.

    A file of a newer release is neither read nor touched.
    """

    def __init__(self, file: Path, key: str | None = None, built: str | None = None) -> None:
        """`key`: the machine and build, `built`: its backend, where they are not to be found out."""
        self._file = file
        self._key = key
        self._built = built
        self._reason: str | None = None
        self._recalled = False

    @property
    def on(self) -> bool:
        return self._reason is not None

    def note(self) -> str | None:
        """What a person should know about answers that come about so."""
        if not self.on:
            return None
        from localspec.machine import CHECKOUT

        if not self._by_kernels():
            return (
                "Safe mode: the engine crashed at its first pass. Until the daemon ends, llama.cpp's fast "
                "kernels for the CPU are not used. If it was the GPU's driver, update that, or do without: "
                "localspec config set gpu_layers 0"
            )
        how = "scripts/setup" if CHECKOUT else "see: localspec doctor"
        return (
            "Safe mode: llama.cpp's fast kernels crashed on this machine, so slower ones are "
            f"used. To fix it, rebuild llama-cpp-python for this machine ({how})."
        )

    def recall(self) -> str | None:
        """Begin as the last run ended: on where it had to be. Why it is on, None where it is off."""
        if not self._recalled:
            self._recalled = True
            record = self._read() if self._by_kernels() else None
            self._reason = record.reasons.get(self._identity()) if record else None
        return self._reason

    def begin(self, reason: str) -> None:
        """Switch it on, as a try."""
        self._reason = reason

    def end(self) -> None:
        """Switch it off in this run: it did not help."""
        self._reason = None

    def keep(self) -> None:
        """It has helped, if it is on: the next runs begin with it."""
        record = self._read() if self._reason and self._by_kernels() else None
        if record and self._reason:
            record.reasons[self._identity()] = self._reason
            self._write(record)

    def forget(self) -> None:
        """Switch it off in this run and the next ones."""
        self._reason = None
        record = self._read()
        if record and record.reasons.pop(self._identity(), None):
            self._write(record)

    def _by_kernels(self) -> bool:
        """Whether only llama.cpp's own kernels can have crashed: no driver takes part."""
        if self._built is None:
            from localspec.machine import installed_backend

            self._built = installed_backend() or "cpu"
        return self._built == "cpu"

    def _write(self, record: Record) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self._file, msgspec.json.encode(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error)  # serving goes on

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
    """The installed llama.cpp by its libraries, without importing it."""
    spec = importlib.util.find_spec("llama_cpp")
    digest = hashlib.sha256()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder, "lib").glob("*")):
            info = file.stat()
            digest.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return f"llama.cpp {digest.hexdigest()[:16]}"
