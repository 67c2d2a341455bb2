"""What a pass costs on this machine, by width: measured when a pair is loaded, corrected by the rounds.

A target pass of width w (rows) takes t_v(w) milliseconds: a staircase, and not even monotonic, since
kernels work in groups of rows. So the table is of measured widths, `padded(n)` is the cheapest width
that holds n rows, and the policy compares whole candidates.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from localspec.engine.pair.company import Company
from localspec.paths import read_file

Clock = Callable[[], float]  # seconds, as time.perf_counter; a replay has one that its costs move

VERSION = 1
WIDTHS = tuple(range(1, 17))
FIRST_WIDTHS = (1, 2, 4, 8)
BUDGET_S = 2.0
REPEATS = 5
# Up to here a measurement is taken for one of a quiet machine: medians lie some percent above the
# shortest runs there, and one busy program on eight cores moves costs by less than rounds correct.
QUIET = 0.125
WIDEST = 64  # wider passes are prompts, not rounds


# A pass that took so much longer than expected, or shorter, says no more than this: one that another
# program disturbed is as likely, and a wrong cost is corrected by many.
STRANGE = 1.65


class CostTable:
    """Milliseconds of a pass by width, of one model.

    Every observed round moves its own width slowly and a common factor faster: the context grows or
    the machine gets busy for all widths at once, so what is seen at one width is news for the others.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or 1 not in measured or min(measured.values()) <= 0:
            raise ValueError("a cost table needs a positive time for width 1")
        self._widths = np.array(sorted(measured))
        self._ms = np.array([measured[w] for w in sorted(measured)])
        self._drift = 1.0
        self._table: npt.NDArray[np.float64] | None = None
        self._observed = 0

    def ms(self, width: int) -> float:
        """Expected milliseconds of a pass of this width; between measured widths, linear."""
        at = int(self._widths.searchsorted(width))
        if at < len(self._widths) and self._widths[at] == width:
            return float(self._ms[at]) * self._drift
        return float(self._shape(np.array([width]))[0]) * self._drift

    def per_token_ms(self, width: int) -> float:
        """Milliseconds per row of a pass of this width."""
        return self.ms(width) / width

    def _shape(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Milliseconds without drift, by number of rows (n,)."""
        widths, ms = self._widths, self._ms
        # beyond the widest: per row what it costs on average, never a cliff downwards
        slope = max((ms[-1] - ms[0]) / max(int(widths[-1]) - 1, 1), 0.0)
        beyond = np.maximum(rows - widths[-1], 0) * slope
        return np.asarray(np.interp(rows, widths, ms) + beyond)

    def padded(self, rows: int) -> int:
        """The cheapest measured width ≥ rows (`rows` itself if none is cheaper)."""
        own = float(self._shape(np.array([rows]))[0])
        at = int(np.searchsorted(self._widths, rows, side="right"))
        if at == len(self._widths):
            return rows
        best = at + int(np.argmin(self._ms[at:]))
        # 2 %: less is noise, and padding is not free
        return int(self._widths[best]) if self._ms[best] < own * 0.98 else rows

    def padded_ms(self, rows: int) -> npt.NDArray[np.float64]:
        """Milliseconds (rows + 1,) of a pass that must hold 0…rows rows, padded where that is cheaper.

        Entry 0 is zero: no pass.
        """
        if self._table is None or len(self._table) <= rows:
            counts = np.arange(max(rows, 64) + 1)
            own = self._shape(counts)
            cheapest = np.append(np.minimum.accumulate(self._ms[::-1])[::-1], np.inf)
            wider = cheapest[np.searchsorted(self._widths, counts, side="right")]
            own = np.where(wider < own * 0.98, wider, own)
            own[0] = 0.0
            self._table = own
        return np.asarray(self._table[: rows + 1] * self._drift)

    def observe(self, width: int, ms: float) -> None:
        """One pass of `width` took `ms`. Outliers count as STRANGE times the expected at most."""
        at = int(np.searchsorted(self._widths, width))
        known = at < len(self._widths) and self._widths[at] == width
        expected = self.ms(width)
        ratio = min(max(ms / expected, 1 / 3), 3.0)
        if not known:
            if width <= WIDEST:
                self._widths = np.insert(self._widths, at, width)
                self._ms = np.insert(self._ms, at, expected * ratio / self._drift)
                self._table = None
            return
        ratio = min(max(ratio, 1 / STRANGE), STRANGE)
        self._drift *= ratio**0.08
        self._ms[at] *= ratio**0.04
        self._observed += 1
        if self._observed % 16 == 0:
            self._table = None

    def as_dict(self) -> dict[int, float]:
        """Width → milliseconds as they stand now."""
        pairs = zip(self._widths.tolist(), (self._ms * self._drift).tolist(), strict=True)
        return {width: round(ms, 4) for width, ms in pairs}


class CostProfile:
    """Both models' tables and the overhead of a round outside llama.cpp, in milliseconds."""

    def __init__(self, target: CostTable, draft: CostTable | None, overhead_ms: float) -> None:
        self.target = target
        self.draft = draft
        self.overhead_ms = overhead_ms

    @property
    def plain_ms(self) -> float:
        """One token of plain decoding."""
        return self.target.ms(1) + self.overhead_ms

    def observe_overhead(self, ms: float) -> None:
        self.overhead_ms += 0.05 * (min(ms, 3 * self.overhead_ms + 0.1) - self.overhead_ms)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target_ms": self.target.as_dict(),
            "draft_ms": self.draft.as_dict() if self.draft else None,
            "overhead_ms": round(self.overhead_ms, 4),
        }


class Measured(NamedTuple):
    """Milliseconds by width, and how much others disturbed the measuring: 0 not at all, 1 very much."""

    ms: dict[int, float]
    noise: float


def measure(run: Callable[[int], None], widths: Iterable[int], deadline: float) -> dict[int, float]:
    """Median milliseconds of `run(width)` per width, warm; stops at `deadline` (time.monotonic)."""
    return examine(run, widths, deadline).ms


def examine(
    run: Callable[[int], None],
    widths: Iterable[int],
    deadline: float,
    clock: Clock = time.perf_counter,
) -> Measured:
    """As `measure`, and how quiet it was.

    All widths take turns, so that a disturbance does not fall on one of them alone: what counts is
    how they compare. Each is run at least once warm; up to five times while there is time.
    """
    widths = list(widths)
    company = Company()
    for width in widths:
        run(width)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(REPEATS):
        for width in widths:
            if turn and time.monotonic() > deadline:
                break
            start = clock()
            run(width)
            times[width].append((clock() - start) * 1e3)
    ms = {width: statistics.median(spent) for width, spent in times.items()}
    # What disturbs makes single runs longer: on a quiet machine the median is near the shortest.
    spread = statistics.median(ms[width] / max(min(times[width]), 1e-9) - 1 for width in widths)
    return Measured(ms, min(max(spread, company.share), 1.0))


def measure_widths(run: Callable[[int], None], budget_s: float) -> Measured:
    """All widths up to 16 where that fits into the budget; first 1, 2, 4, 8 where passes are slow."""
    start = time.monotonic()
    run(1)
    run(8)
    pass_s = time.monotonic() - start  # both cold: an overestimate
    # all widths: about as long as sixteen passes of the mean width, twice at least
    fits = pass_s * len(WIDTHS) < budget_s
    found = examine(run, WIDTHS if fits else FIRST_WIDTHS, start + budget_s)
    return Measured(dict(sorted(found.ms.items())), found.noise)


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


# ------------------------------------------------------------------------------------- storage


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


class Notebook:
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
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"version": VERSION, **content}), encoding="utf-8")
            part.replace(self._file)
        except OSError:  # a full or read-only disk must not stop an answer
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def table_from(stored: Any) -> dict[int, float] | None:
    """A stored table back; None if it is not one."""
    if not isinstance(stored, dict):
        return None
    try:
        table = {int(width): float(ms) for width, ms in stored.items()}
    except (TypeError, ValueError):
        return None
    good = 1 in table and all(0 < ms < 1e7 and 0 < width <= WIDEST for width, ms in table.items())
    return table if good else None
