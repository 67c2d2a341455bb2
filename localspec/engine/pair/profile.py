"""What is kept of a pair between loads: its costs, and what was learned of its drafts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localspec import files
from localspec.engine.pair.measuring import Measured
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.attention import attention_from
from localspec.engine.speculation.cost import CostProfile, table_from
from localspec.engine.speculation.drafters.base import Drafter
from localspec.paths import read_file

VERSION = 3
# A measurement with at most this noise counts as one of a quiet machine. Medians lie some per cent above the
# shortest runs there, and one busy program on eight cores changes costs by less than rounds correct.
MAX_QUIET_NOISE = 0.125


@dataclass
class Stored:
    """What an earlier load left: costs by width (None if not known), and what it had learned.

    noise: of the measurement; 1 if it is not known. A profile from a busy machine is measured again at a load
    that finds the machine quiet, and replaced by the one that was disturbed less.
    """

    target: dict[int, float] | None
    draft: dict[int, float] | None
    noise: float
    overhead_ms: float = 0.3
    calibrations: Mapping[str, Any] = field(default_factory=dict)
    exact_width: int | None = None
    attention: tuple[float, float] | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Stored:
        """Return the valid parts of a file's content."""
        noise, overhead = content.get("noise"), content.get("overhead_ms")
        learned, width = content.get("calibration"), content.get("exact_width")
        is_valid = isinstance(noise, int | float) and 0 <= noise <= 1
        return cls(
            table_from(content.get("target_ms")),
            table_from(content.get("draft_ms")),
            float(noise) if is_valid and noise is not None else 1.0,
            overhead if isinstance(overhead, float) and 0 < overhead < 1e3 else cls.overhead_ms,
            learned if isinstance(learned, dict) else {},
            width if isinstance(width, int) else None,
            attention_from(content.get("attention_ms")),
        )

    def will_do(self, table: dict[int, float] | None, contention: float) -> bool:
        """Whether a stored table can be used as it is. contention: the share of the machine in use now."""
        return table is not None and (self.noise <= MAX_QUIET_NOISE or contention > MAX_QUIET_NOISE)

    def better(self, table: dict[int, float] | None, measured: Measured) -> Measured:
        """Return the table that was disturbed less."""
        if table is None or measured.noise <= self.noise:
            return measured
        return Measured(table, self.noise)

    def or_measured(
        self,
        table: dict[int, float] | None,
        contention: float,
        measure: Callable[[], Measured],
    ) -> Measured:
        """Return a stored table if it is good enough, else measure now and return the better one."""
        if table is not None and self.will_do(table, contention):
            return Measured(table, self.noise)
        return self.better(table, measure())

    def known_of(self, kinds: Iterable[type[Drafter]]) -> dict[str, Calibration]:
        """Return what was learned of each kind of drafts, by its name."""
        return {
            drafter.kind: Calibration.from_dict(
                self.calibrations.get(drafter.kind, drafter.learned),
                drafter.initial_acceptance,
                drafter.certain,
            )
            for drafter in kinds
        }


@dataclass
class Learned:
    """What the rounds correct while a pair is loaded. noise: of the measurement that it began with."""

    costs: CostProfile
    calibrations: dict[str, Calibration]
    noise: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.costs.as_dict(),
            "noise": round(self.noise, 4),
            "calibration": {kind: c.as_dict() for kind, c in self.calibrations.items()},
        }


def identity(files: Iterable[str], settings: Mapping[str, Any], build: str) -> str:
    """Return a hash of all that a profile depends on: machine, files, backend, settings, llama.cpp."""
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
    """One small JSON file per identity, with the cost profile and what was learned about the pair.

    Losing it costs a second at the next load, so a file that cannot be read or written is not an error.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self._file = folder / f"profile-{key}.json" if folder else None

    def read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            content = json.loads(read_file(self._file))
        except (OSError, ValueError, RecursionError):
            return {}
        valid = isinstance(content, dict) and content.get("version") == VERSION
        return content if valid else {}

    def write(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        text = json.dumps({"version": VERSION, **content})
        with contextlib.suppress(OSError):  # a full or read-only disk must not stop an answer
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self._file, text.encode(), sync=False)
