"""What is kept of a pair between loads: its cost profile and what was learned of its drafts."""

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
# Up to here a measurement is taken for one of a quiet machine: medians lie some percent above the
# shortest runs there, and one busy program on eight cores moves costs by less than rounds correct.
QUIET = 0.125


@dataclass
class Stored:
    """What an earlier load left: costs by width, None where not known, and what it had learned.

    noise: that of the measuring, 1 where it is not known. A profile of a busy day is measured again at
    a load that finds the machine quiet, and replaced by what was disturbed less.
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
        """What of a file's content is sound."""
        noise, overhead = content.get("noise"), content.get("overhead_ms")
        learned, width = content.get("calibration"), content.get("exact_width")
        sound = isinstance(noise, int | float) and 0 <= noise <= 1
        return cls(
            table_from(content.get("target_ms")),
            table_from(content.get("draft_ms")),
            float(noise) if sound and noise is not None else 1.0,
            overhead if isinstance(overhead, float) and 0 < overhead < 1e3 else cls.overhead_ms,
            learned if isinstance(learned, dict) else {},
            width if isinstance(width, int) else None,
            attention_from(content.get("attention_ms")),
        )

    def will_do(self, table: dict[int, float] | None, contention: float) -> bool:
        """Is a stored table to be used as it is? `contention`: what share of the machine others use now."""
        return table is not None and (self.noise <= QUIET or contention > QUIET)

    def better(self, table: dict[int, float] | None, found: Measured) -> Measured:
        """The one of both that was disturbed less."""
        if table is None or found.noise <= self.noise:
            return found
        return Measured(table, self.noise)

    def or_measured(
        self,
        table: dict[int, float] | None,
        contention: float,
        measure: Callable[[], Measured],
    ) -> Measured:
        """A stored table where it will do; else what is measured now, or the better one of both."""
        if table is not None and self.will_do(table, contention):
            return Measured(table, self.noise)
        return self.better(table, measure())

    def known_of(self, kinds: Iterable[type[Drafter]]) -> dict[str, Calibration]:
        """What was learned of each kind of drafts, by its name."""
        return {
            each.kind: Calibration.from_dict(
                self.calibrations.get(each.kind, each.learned),
                each.initial_acceptance,
                each.certain,
            )
            for each in kinds
        }


@dataclass
class Learned:
    """What the rounds correct while a pair is loaded. noise: of the measuring it began with."""

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
