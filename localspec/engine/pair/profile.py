"""What is kept of a pair between loads: its costs, and what was learned of its drafts."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from localspec import files
from localspec.engine.llama import Model
from localspec.engine.llama.waiting import read_busy_s
from localspec.engine.speculation.acceptance import Calibration
from localspec.engine.speculation.cost import (
    NO_CHANGE,
    SETTLING_PASSES,
    ChangeCost,
    Clock,
    CostProfile,
    parse_cost_table,
    parse_pair_of_ms,
)
from localspec.engine.speculation.drafters.base import Drafter
from localspec.paths import read_file
from localspec.protocol.frames import PromptCost

# The cost of reading prompts on this machine, learned from the passes that read them.
#
# The token at position p takes a + b·p seconds. The weights' part a is the same everywhere. Attention's part
# grows with the text before it, and exceeds a many times in a long text. Both are fitted to the passes, where
# older ones count less. Until deep passes were observed, the ratio of b to a comes from the model's sizes.

MEMORY_TOKENS = 16384  # after this many tokens, earlier observations weigh e times less
# The expected ratio of b to a weighs as much as this many tokens read at the end of the context. So passes
# over short prompts, whose times vary a little, cannot determine what deep ones cost.
EXPECTATION_TOKENS = 16
SLOWDOWN_DECAY = 0.2  # how fast a slowdown is forgotten; a new one is believed at once


def estimate_depth_ratio(model: Model) -> float:
    """Return b / a: the cost that each token before adds to a token, relative to that of the first.

    It compares attention's multiplications with those of the weights. This is a first guess, because some
    models attend only in some layers, or use only a part of their weights for a token.
    """
    if model.recurrent:
        return 0.0
    return 2 * model.n_layer * model.n_state / max(model.n_params, 1)


class PrefillCost:
    """The cost of a prompt's tokens by their position.

    first_s: seconds per token until one was read. deeper: b / a, until deep passes were observed. n_ctx: how
    deep a text can be. learned: `learned_ms` of an earlier load, which replaces the first two.
    """

    def __init__(
        self,
        first_s: float,
        deeper: float,
        n_ctx: int,
        learned: tuple[float, float] | None = None,
    ) -> None:
        self._is_known = learned is not None and learned[0] > 0
        if learned is not None and self._is_known:
            first_s, deeper = learned[0] / 1e3, learned[1] / learned[0]
        # The average, to predict how long a prompt takes.
        self.expected = PromptCost(first_s, deeper * first_s)
        self._deeper = deeper
        # The expectation that b is `deeper` · a, as a sum of squares like those of the passes.
        self._trust = EXPECTATION_TOKENS * float(n_ctx) ** 2
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums, by tokens
        self._slowdown = 1.0  # of recent passes, relative to the expected time

    @property
    def learned_ms(self) -> tuple[float, float] | None:
        """The milliseconds of a text's first token, and what each token before one adds; None: not known."""
        cost = self.expected
        return (1e3 * cost.token_s, 1e3 * cost.deeper_s) if self._is_known or self._n else None

    def planned_s(self, position: float) -> float:
        """Return the seconds to plan for the token at a position."""
        return self._slowdown * self.expected.token_seconds(position)

    def observe(self, tokens: int, position: float, spent_s: float) -> None:
        """Learn from a pass over `tokens` tokens at `position` on average, which took `spent_s`."""
        is_first, keep, token_s = self._n == 0, math.exp(-tokens / MEMORY_TOKENS), spent_s / tokens
        self._n = self._n * keep + tokens
        self._x = self._x * keep + tokens * position
        self._y = self._y * keep + tokens * token_s
        self._xx = self._xx * keep + tokens * position**2
        self._xy = self._xy * keep + tokens * position * token_s
        self.expected = self._fit()
        ratio = token_s / self.expected.token_seconds(position)
        slowdown = ratio if is_first else self._slowdown
        self._slowdown = max(ratio, slowdown + SLOWDOWN_DECAY * (ratio - slowdown))

    def _fit(self) -> PromptCost:
        """Fit a + b·x to the passes, and b − deeper·a, by least squares; neither is ever below zero."""
        k, trust = self._deeper, self._trust
        aa, ab, bb = self._n + trust * k**2, self._x - trust * k, self._xx + trust
        det = aa * bb - ab**2
        a, b = (self._y * bb - self._xy * ab) / det, (self._xy * aa - self._y * ab) / det
        # The machine was busy in between, so take the average for all positions.
        if b < 0 or a <= 0:
            return PromptCost(self._y / self._n)
        return PromptCost(a, b)


# Measuring what passes cost, and whether other programs disturbed the measurement.

HoldCpu = Callable[[], AbstractContextManager[object]]  # inside it this process has the processors

WIDTHS = tuple(range(1, 17))
FIRST_WIDTHS = (1, 2, 4, 8)
WIDE_WIDTHS = (32, 64)  # passes that copy text; a row costs less there than narrower passes suggest
BUDGET_S = 2.0
MIN_REPEATS, MAX_REPEATS = 5, 25
EXTRA_REPEATS_S = 0.25  # after this time no width is run more than MIN_REPEATS times
# A change of the width counts from this share of a pass of one row and this time on. CPUs have none to speak
# of. It is the difference between the shortest of some times, which disturbances do not make.
MIN_CHANGE_SHARE, MIN_CHANGE_MS = 0.25, 0.3
CHANGE_REPEATS = 3


class Contention:
    """The share of the processors that others have used since this object was made."""

    def __init__(
        self,
        all_used_s: Callable[[], float] = read_busy_s,
        own_used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = (all_used_s, own_used_s, clock)
        self._start = self._now()

    def _now(self) -> Sequence[float] | None:
        try:
            return [read() for read in self._readers]
        except (OSError, ValueError):
            return None

    @property
    def share(self) -> float:
        """The share from 0 to 1; 0 also where the system does not report it."""
        start, end = self._start, self._now()
        if start is None or end is None:
            return 0.0
        used_s, own_s, elapsed_s = (b - a for a, b in zip(start, end, strict=True))
        all_s = elapsed_s * (os.cpu_count() or 1)
        return min(max((used_s - own_s) / all_s, 0.0), 1.0) if all_s > 0 else 0.0


class PassTimes(NamedTuple):
    """Milliseconds by width, and how much others disturbed the measurement, from 0 to 1."""

    ms: dict[int, float]
    noise: float
    change: ChangeCost = NO_CHANGE


def measure_passes(
    run: Callable[[int], None],
    widths: Iterable[int],
    deadline: float,
    clock: Clock = time.perf_counter,
    turn: HoldCpu = nullcontext,
    *,
    change: ChangeCost = NO_CHANGE,
) -> PassTimes:
    """Return the median milliseconds of `run(width)` per width, measured until `deadline` (time.monotonic).

    All widths are run in rounds, so that a disturbance does not hit one of them alone: the comparison is what
    matters. Each is run warm at least once, up to five times while there is time, and more often if that
    takes next to none, because a disturbance hits several of such short runs. Each run is made inside a
    `turn`, whose wait is not counted.

    llama.cpp keeps the graph of a pass for the next one of the same width, and CUDA records it at the second
    one. So passes of one row, which follow each other in practice, are timed after SETTLING_PASSES others
    like them. Those tell what a change of the width costs. Where that is much, all widths are timed so.

    change: what a change costs, if that is known, as from an earlier measurement.
    """
    widths = list(widths)
    contention = Contention()
    for width in widths:
        with turn():
            run(width)
    price, times = change, {width: list[float]() for width in widths}
    settling: list[list[float]] = []  # each a first, a second and a third pass of one row
    extra_deadline = min(time.monotonic() + EXTRA_REPEATS_S, deadline)
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and time.monotonic() > extra_deadline:
            break
        for width in widths:
            if times[width] and time.monotonic() > deadline:
                continue
            n_settling = SETTLING_PASSES if width == 1 or change != NO_CHANGE else 0
            spent = _time_runs(run, [width] * (n_settling + 1), clock, turn)
            times[width].append(spent[-1])
            if width == 1:
                settling.append(spent)
        if repeat == CHANGE_REPEATS - 1 and settling and change == NO_CHANGE:
            change = price = _find_change(settling)
            if change != NO_CHANGE:
                times = {width: times[width] if width == 1 else [] for width in widths}
                price = _measure_return(run, widths[-1], clock, turn)
    ms = {width: statistics.median(spent) for width, spent in times.items()}
    # A disturbance makes single runs longer. On a quiet machine the median is near the shortest run.
    spread = statistics.median(ms[width] / max(min(times[width]), 1e-9) - 1 for width in widths)
    return PassTimes(ms, min(max(spread, contention.share, _find_excess(ms)), 1.0), price)


def _find_excess(ms: Mapping[int, float]) -> float:
    """Return by which share a pass took longer than its rows one by one.

    That is a disturbance, even one that has hit all passes of a width alike.
    """
    return max(ms[width] / width for width in ms) / max(ms.get(1, math.inf), 1e-9) - 1


def _time_runs(
    run: Callable[[int], None], widths: Iterable[int], clock: Clock, turn: HoldCpu
) -> list[float]:
    with turn():
        times = [clock()]
        for width in widths:
            run(width)
            times.append(clock())
    return [(end - start) * 1e3 for start, end in pairwise(times)]


def _measure_return(
    run: Callable[[int], None], other: int, clock: Clock, turn: HoldCpu
) -> ChangeCost:
    """Return what a change to a width costs that was in use before the `other` one.

    A build may keep the graphs of a few widths, but not of all that are measured.
    """
    settled = [1] * (SETTLING_PASSES + 1)
    passes = [*settled, other, *settled]
    times = [_time_runs(run, passes, clock, turn) for _ in range(CHANGE_REPEATS)]
    return _find_change([spent[-len(settled) :] for spent in times])


def _find_change(settling: Sequence[Sequence[float]]) -> ChangeCost:
    """Return what a change of the width costs, from the times of passes of one row after a wider one."""
    first, second, later = (min(times) for times in zip(*settling, strict=True))
    change = ChangeCost(max(first - later, 0.0), max(second - later, 0.0))
    return change if change.total_ms > max(MIN_CHANGE_SHARE * later, MIN_CHANGE_MS) else NO_CHANGE


def measure_widths(
    run: Callable[[int], None],
    budget_s: float,
    turn: HoldCpu = nullcontext,
    clock: Clock = time.perf_counter,
) -> PassTimes:
    """Measure all widths up to 16 if the budget allows, else only 1, 2, 4 and 8.

    The WIDE_WIDTHS follow if they cost no more than that again.
    """
    begin = time.monotonic()
    with turn():
        start = time.monotonic()
        run(1)
        run(8)
        pass_s = time.monotonic() - start  # an overestimate, because both were cold
    # All widths take about as long as sixteen passes of the mean width, run at least twice.
    fits = pass_s * len(WIDTHS) < budget_s
    widths = WIDTHS if fits else FIRST_WIDTHS
    measured = measure_passes(run, widths, begin + budget_s, clock, turn)
    noise = measured.noise
    # Each wide width is run twice, which takes less than this.
    if 2 * measured.ms[8] / 8 * sum(WIDE_WIDTHS) < 2e3 * budget_s:
        wide = measure_passes(run, WIDE_WIDTHS, 0.0, clock, turn, change=measured.change)
        measured.ms.update(wide.ms)
        noise = min(max(noise, wide.noise, _find_excess(measured.ms)), 1.0)
    return PassTimes(dict(sorted(measured.ms.items())), noise, measured.change)


VERSION = 4
# A measurement with at most this noise counts as one of a quiet machine. Medians lie some per cent above the
# shortest runs there, and one busy program on eight cores changes costs by less than rounds correct.
MAX_QUIET_NOISE = 0.125


@dataclass
class StoredProfile:
    """What an earlier load left: costs by width (None if not known), and what it had learned.

    noise: of the measurement; 1 if it is not known.
    """

    target: PassTimes | None
    draft: PassTimes | None
    noise: float
    overhead_ms: float = 0.3
    calibrations: Mapping[str, Any] = field(default_factory=dict)
    editor_calibrations: Mapping[str, Any] = field(default_factory=dict)
    exact_width: int | None = None
    attention: tuple[float, float] | None = None
    reading: tuple[float, float] | None = None  # as `PrefillCost.learned_ms`

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> StoredProfile:
        """Return the valid parts of a file's content."""
        noise, overhead = content.get("noise"), content.get("overhead_ms")
        noise = float(noise) if isinstance(noise, int | float) and 0 <= noise <= 1 else 1.0
        answers, editors = content.get("calibration"), content.get("editor_calibration")
        width = content.get("exact_width")

        def parse_times(model: str) -> PassTimes | None:
            table = parse_cost_table(content.get(f"{model}_ms"))
            change = parse_pair_of_ms(content.get(f"{model}_change_ms"))
            return PassTimes(table, noise, ChangeCost(*change)) if table and change else None

        return cls(
            parse_times("target"),
            parse_times("draft"),
            noise,
            overhead if isinstance(overhead, float) and 0 < overhead < 1e3 else cls.overhead_ms,
            answers if isinstance(answers, dict) else {},
            editors if isinstance(editors, dict) else {},
            width if isinstance(width, int) else None,
            parse_pair_of_ms(content.get("attention_ms")),
            parse_pair_of_ms(content.get("reading_ms")),
        )

    def load_calibrations(self, kinds: Iterable[type[Drafter]]) -> Calibrations:

        def load(stored: Mapping[str, Any]) -> dict[str, Calibration]:
            return {
                drafter.kind: Calibration.from_dict(
                    stored.get(drafter.kind, drafter.learned),
                    drafter.initial_acceptance,
                    drafter.certain,
                )
                for drafter in kinds
            }

        editors = load(self.editor_calibrations) if self.editor_calibrations else {}
        return Calibrations(load(self.calibrations), editors)


@dataclass
class Calibrations:
    """Hold what was learned of each kind of drafts, by its name.

    Editors' completions have their own, because drafts of one model may be accepted half as often there as in
    answers. They begin with what answers have shown.
    """

    answers: dict[str, Calibration]
    editors: dict[str, Calibration] = field(default_factory=dict)

    def select(self, priority: str) -> Mapping[str, Calibration]:
        """Return those for requests of a `priority`, as in `Generate`."""
        if priority != "editor":
            return self.answers
        if not self.editors:
            self.editors = copy.deepcopy(self.answers)
        return self.editors


@dataclass
class LearnedProfile:
    """What the rounds correct while a pair is loaded.

    noise: of the last measurement.
    """

    costs: CostProfile
    calibrations: Calibrations
    noise: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        answers, editors = self.calibrations.answers, self.calibrations.editors
        return {
            **self.costs.as_dict(),
            "noise": round(self.noise, 4),
            "calibration": {kind: known.as_dict() for kind, known in answers.items()},
            "editor_calibration": {kind: known.as_dict() for kind, known in editors.items()},
        }


def hash_identity(files: Iterable[str], settings: Mapping[str, Any], build: str) -> str:
    """Return a hash of all that a profile depends on: machine, files, backend, settings, llama.cpp."""
    infos = [(os.path.realpath(file), Path(file).stat()) for file in files]
    stats = [(path, info.st_size, info.st_mtime_ns) for path, info in infos]
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        cpu = next(names, cpu)
    machine = [platform.machine(), platform.node(), cpu, os.cpu_count()]
    content = json.dumps([VERSION, machine, stats, dict(settings), build], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class ProfileStore:
    """One small JSON file per identity, with what was measured and learned about the pair.

    Losing it costs a second at the next load, so a file that cannot be read or written is not an error.
    """

    def __init__(self, folder: Path | None, key: str, *, kind: str = "profile") -> None:
        self._file = folder / f"{kind}-{key}.json" if folder else None

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
            files.write_atomically(self._file, text.encode(), sync=False)
