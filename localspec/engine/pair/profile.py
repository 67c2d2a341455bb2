"""What is kept of a pair between loads: its cost profile and what was learned of its drafts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec import files
from localspec.engine.pair.measuring import Measured
from localspec.engine.speculation.cost import table_from
from localspec.paths import read_file

VERSION = 1
# Up to here a measurement is taken for one of a quiet machine: medians lie some percent above the
# shortest runs there, and one busy program on eight cores moves costs by less than rounds correct.
QUIET = 0.125


@dataclass
class Stock:
    """What an earlier load measured of both models, and how far it can be trusted.

    noise: that of its measuring, 1 where it is not known. A profile of a busy day is measured again at
    a load that finds the machine quiet, and replaced by what was disturbed less.
    """

    target: dict[int, float] | None
    draft: dict[int, float] | None
    noise: float

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Stock:
        noise = stored.get("noise")
        sound = isinstance(noise, int | float) and 0 <= noise <= 1
        return cls(
            table_from(stored.get("target_ms")),
            table_from(stored.get("draft_ms")),
            float(noise) if sound and noise is not None else 1.0,
        )

    def will_do(self, table: dict[int, float] | None, company: float) -> bool:
        """Is a stored table to be used as it is? `company`: how much others use the machine now."""
        return table is not None and (self.noise <= QUIET or company > QUIET)

    def better(self, table: dict[int, float] | None, found: Measured) -> Measured:
        """The one of both that was disturbed less."""
        if table is None or found.noise <= self.noise:
            return found
        return Measured(table, self.noise)


def identity(files: Iterable[str], settings: Mapping[str, Any], build: str) -> str:
    """What a profile depends on, as one hash: machine, files, backend, settings, llama.cpp."""
    stats = []
    for file in files:
        info = Path(file).stat()
        stats.append([os.path.realpath(file), info.st_size, info.st_mtime_ns])
    machine = [platform.machine(), platform.node(), _cpu_model(), os.cpu_count()]
    content = json.dumps([VERSION, machine, stats, dict(settings), build], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


class ProfileStore:
    """One small JSON file per identity: the cost profile and what was learned about the pair.

    Losing it costs a second at the next load, so a file that cannot be read or written is no error.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self._file = folder / f"profile-{key}.json" if folder else None

    def read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            found = json.loads(read_file(self._file))
        except (OSError, ValueError, RecursionError):
            return {}
        valid = isinstance(found, dict) and found.get("version") == VERSION
        return found if valid else {}

    def write(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        text = json.dumps({"version": VERSION, **content})
        with contextlib.suppress(OSError):  # a full or read-only disk must not stop an answer
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self._file, text.encode(), sync=False)
