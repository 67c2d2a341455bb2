"""The speeds of this machine's memories, learned from the passes and answers of the pairs loaded here.

How long a pass takes is not decided by bytes alone: a CPU needs longer for a GiB of some types of weights
than of others, and experts have kernels of their own. So each load is recorded with what its passes read, by
memory and type, and with what they took. The speeds are those factors for memories, for types in them and for
experts of these types that explain all records best. A type that no load has had is as fast as its memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from localspec.paths import read_file

Memory = Literal["gpu", "ram"]
# What every row reads, what some rows choose, and what a row whose token is wanted reads.
Use = Literal["layers", "experts", "output"]
MEMORIES: tuple[Memory, ...] = get_args(Memory)
USES: tuple[Use, ...] = get_args(Use)
# What is learned apart, each beginning with what was learned of the one before: passes of so many rows, and a
# row of a pass of hundreds.
MEASURED_ROWS = (1, 2, 4, 8)
READING = "read"
QUANTITIES = (*map(str, MEASURED_ROWS), READING)
# Milliseconds for each layer of a pass, whatever its size, and of a round around its passes. Measured on an
# H200, where a draft of 24 layers takes 1.0 ms a token for 0.3 GiB of weights.
LAYER_MS, ROUND_MS = 0.04, 0.5
LAYER, ROUND = "layer", "round"
SPEEDS_FILE = "memory_speeds.json"  # a list of `LoadRecord`, in the folder of states
MAX_RECORDS = 24
# Gauss-Newton steps, and the variance of a record's time ÷ that of a factor: (0.1 ÷ 0.5)². With 0.01, loads
# on a busy machine that contradict each other had factors of 30 and forecasts ten times off.
_STEPS, _RIDGE = 5, 0.04
# A model that has not been loaded deviates so many times more than those that have, by leaving each out.
_LEFT_OUT = 1.6
# The standard deviation of the logarithm of measured ÷ forecast: in a memory that no load has measured; of a
# type that none has had; and before any was compared, which counts as much as two loads.
_UNKNOWN_MEMORY, _UNKNOWN_TYPE, _USUAL, _USUAL_LOADS = 0.7, 0.3, 0.1, 2


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """The speed of passes over weights in one memory.

    gib_ms: milliseconds per GiB that a pass of one row reads. row_share: the cost of each further row that
    uses the same weights, as a share of that. widths: what passes of these rows cost, compared with that.
    row_ms: milliseconds per GiB that a row uses where a pass has hundreds of them; 0: as further rows.
    """

    gib_ms: Annotated[float, Meta(gt=0, lt=1e6)]
    row_share: Annotated[float, Meta(ge=0, le=1)]
    widths: tuple[tuple[int, float], ...] = ()
    row_ms: float = 0.0

    def pass_ms(self, gib: float, rows: int, wide_gib: float | None = None) -> float:
        """Return the milliseconds of a pass of `rows` rows.

        gib: GiB that one row reads. wide_gib: what all rows read together, if that is more. Where each row
        reads experts of its own, none of them is read for several rows.
        """
        read = gib if wide_gib is None else wide_gib
        return self.gib_ms * (read + (rows * gib - read) * self.row_share) * self._correct(rows)

    def reading_ms(self, gib: float) -> float:
        """Return the milliseconds of a row that uses `gib` GiB, where a pass has hundreds of rows."""
        return gib * (self.row_ms or self.gib_ms * self.row_share)

    def _correct(self, rows: int) -> float:
        """Return the correction for a number of rows, interpolated between those that are known."""
        below, factor = 1, 1.0
        for width, known in self.widths:
            if width >= rows:
                return factor + (rows - below) / (width - below) * (known - factor)
            below, factor = width, known
        return factor


class Part(Struct, frozen=True, array_like=True):
    """What passes of a model read of one type in one memory: GiB for each of MEASURED_ROWS.

    use: the output is computed for the last row of a prompt alone.
    """

    memory: Memory
    use: Use
    kind: str
    gib: tuple[float, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its factors, the most general first."""
        return _list_keys(self.memory, self.use, self.kind)

    def guess_ms(self, quantity: str) -> float:
        """Return the milliseconds that it would take in a usual workstation."""
        speed = GUESSED[self.memory]
        if quantity == READING:
            return speed.reading_ms(self.gib[0]) if self.use != "output" else 0.0
        rows = int(quantity)
        return speed.pass_ms(self.gib[0], rows, self.gib[MEASURED_ROWS.index(rows)])


def _list_keys(memory: Memory, use: Use, kind: str) -> tuple[str, ...]:
    typed = f"{memory} {kind}"
    return (memory, typed, f"{typed} experts") if use == "experts" else (memory, typed)


class LoadRecord(Struct, frozen=True):
    """One model as it was loaded here: what its passes read, and the milliseconds that they took.

    name: of its file. layers: their number, each counted as often as it is divided. rounds: 1 for a target,
    of which "1" is a plain token of an answer, and 0 for a draft. ms: by QUANTITIES, as far as is known.
    """

    name: str
    parts: tuple[Part, ...]
    layers: float
    rounds: int
    ms: dict[str, float]


GUESSED: Mapping[Memory, PassSpeed] = {"gpu": PassSpeed(1.6, 0.15), "ram": PassSpeed(25.0, 0.3)}


@dataclass(frozen=True, slots=True)
class MemorySpeeds:
    """The speeds of both memories. Until loads have measured them, those of a usual workstation.

    factors: logarithms of what these are multiplied by, for each of QUANTITIES by `Part.keys`. deviation: of
    the logarithm of measured ÷ expected milliseconds, by quantity. loads: how many models it is learned from.
    """

    gpu: PassSpeed = GUESSED["gpu"]
    ram: PassSpeed = GUESSED["ram"]
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    deviation: Mapping[str, float] = field(default_factory=dict)
    layer_ms: float = LAYER_MS
    round_ms: float = ROUND_MS
    loads: int = 0

    @classmethod
    def learn(cls, records: Sequence[LoadRecord]) -> MemorySpeeds:
        """Return the speeds that explain the records."""
        if not records:
            return cls()
        factors: dict[str, dict[str, float]] = {}
        deviation, known = dict[str, float](), dict[str, float]()
        for quantity in QUANTITIES:
            seen = [record for record in records if record.ms.get(quantity, 0) > 0]
            known = factors[quantity] = _fit(seen, quantity, known)
            errors = [
                math.log(record.ms[quantity] / expect_ms(record, quantity, known))
                for record in seen
            ]
            variance = sum(error**2 for error in errors) + _USUAL_LOADS * _USUAL**2
            deviation[quantity] = _LEFT_OUT * math.sqrt(variance / (len(seen) + _USUAL_LOADS))
        one = factors["1"]
        return cls(
            factors=factors,
            deviation=deviation,
            layer_ms=LAYER_MS * math.exp(one.get(LAYER, 0.0)),
            round_ms=ROUND_MS * math.exp(one.get(ROUND, 0.0)),
            loads=len(records),
        )

    def of(self, memory: Memory, use: Use, kinds: Mapping[str, float]) -> PassSpeed:
        """Return the speed of passes over weights of several types. kinds: bytes by type."""
        base: PassSpeed = getattr(self, memory)
        if not self.factors or not (whole := sum(kinds.values())):
            return base
        ratios = dict.fromkeys(QUANTITIES, 0.0)
        for kind, size in kinds.items():
            keys = _list_keys(memory, use, kind)
            for quantity, factors in self.factors.items():
                ratios[quantity] += size / whole * math.exp(_sum(factors, keys))
        return PassSpeed(
            base.gib_ms * ratios["1"],
            base.row_share,
            tuple((rows, ratios[str(rows)] / ratios["1"]) for rows in MEASURED_ROWS[1:]),
            base.reading_ms(1.0) * ratios[READING],
        )

    def expect_deviation(self, parts: Iterable[Part], quantity: str) -> float:
        """Return the deviation of what passes over these parts will take from what is expected."""
        ms, unknown = 0.0, 0.0
        for part in parts:
            part_ms = part.guess_ms(quantity)
            known = self.factors.get(quantity, {})
            least = 0.0 if part.keys[-1] in known else _UNKNOWN_TYPE
            unknown += part_ms * (least if part.memory in known else _UNKNOWN_MEMORY)
            ms += part_ms
        return math.hypot(self.deviation.get(quantity, _USUAL), unknown / ms if ms else 0.0)


def load_speeds(state_dir: str) -> MemorySpeeds:
    """Return the speeds that earlier loads have measured, or those of a usual workstation."""
    with contextlib.suppress(OSError):
        if state_dir:
            return _learn_file(read_file(Path(state_dir) / SPEEDS_FILE))
    return MemorySpeeds()


@functools.lru_cache(maxsize=4)
def _learn_file(content: bytes) -> MemorySpeeds:
    with contextlib.suppress(ValueError):
        return MemorySpeeds.learn(msgspec.json.decode(content, type=list[LoadRecord]))
    return MemorySpeeds()


def _sum(factors: Mapping[str, float], keys: Iterable[str]) -> float:
    return sum(factors.get(key, 0.0) for key in keys)


def _list_guesses(record: LoadRecord, quantity: str) -> list[tuple[tuple[str, ...], float]]:
    """Return the milliseconds of each part of a pass in a usual workstation, with its factors' names."""
    guesses = [(part.keys, part.guess_ms(quantity)) for part in record.parts]
    if quantity != READING:
        guesses.append(((LAYER,), record.layers * LAYER_MS))
    if quantity == "1" and record.rounds:
        guesses.append(((ROUND,), ROUND_MS))
    return guesses


def expect_ms(record: LoadRecord, quantity: str, factors: Mapping[str, float]) -> float:
    """Return what passes over the parts of a record should take. factors: of this quantity."""
    guesses = _list_guesses(record, quantity)
    return sum(ms * math.exp(_sum(factors, keys)) for keys, ms in guesses)


def _fit(
    records: Sequence[LoadRecord], quantity: str, known: Mapping[str, float]
) -> dict[str, float]:
    """Return the factors for one quantity, beginning with `known` ones.

    They are the most probable ones if logarithms of factors deviate from `known` ones by half, and those of
    times by a tenth: least squares with a ridge, by Gauss-Newton steps, solved in the space of records.
    So what no record speaks of does not change. A layer's factor is that of passes of one row.
    """
    times = [(math.log(each.ms[quantity]), _list_guesses(each, quantity)) for each in records]
    prior = {key: 0.0 for _, guesses in times for keys, _ in guesses for key in keys} | dict(known)
    factors = prior
    for _ in range(_STEPS):
        shares, wanted = list[dict[str, float]](), list[float]()
        for measured, guesses in times:
            whole_ms, row = _derive(guesses, factors)
            if quantity != "1":
                row.pop(LAYER, None)
            moved = sum(share * (factors[key] - prior[key]) for key, share in row.items())
            shares.append(row)
            wanted.append(min(max(measured - math.log(whole_ms), -1.0), 1.0) + moved)
        weights = _solve([[_multiply(one, other) for other in shares] for one in shares], wanted)
        factors = dict(prior)
        for row, weight in zip(shares, weights, strict=True):
            for key, share in row.items():
                factors[key] += weight * share
    for memory in MEMORIES:  # what all types have in common is the memory's, and so a new type's
        parts = [part for record in records for part in record.parts if part.memory == memory]
        typed = {part.keys[1] for part in parts}
        common = sum(factors[key] for key in typed) / max(len(typed), 1)
        factors |= {key: factors[key] - common for key in typed}
        if typed:
            factors[memory] += common
    return factors


def _derive(
    guesses: Iterable[tuple[Iterable[str], float]], factors: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of all parts, and the derivative of their logarithm by each factor."""
    times = [(keys, ms * math.exp(_sum(factors, keys))) for keys, ms in guesses]
    whole_ms = sum(ms for _, ms in times)
    shares: dict[str, float] = {}
    for keys, ms in times:
        for key in keys:
            shares[key] = shares.get(key, 0.0) + ms / whole_ms
    return whole_ms, shares


def _multiply(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return sum(value * other.get(key, 0.0) for key, value in one.items())


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Return the solution of a symmetric system with _RIDGE added to its diagonal, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for index, pivot in enumerate(rows):
        pivot[index] += _RIDGE
        for row in rows[index + 1 :]:
            ratio = row[index] / pivot[index]
            row[index:] = [
                one - ratio * other for one, other in zip(row[index:], pivot[index:], strict=True)
            ]
    solution = list[float]()  # the last ones first
    for pivot in reversed(rows):
        known = zip(reversed(pivot[:-1]), solution, strict=False)
        solution.append(
            (pivot[-1] - sum(one * other for one, other in known))
            / pivot[len(rows) - 1 - len(solution)]
        )
    return solution[::-1]
