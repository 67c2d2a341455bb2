"""Decide which pairs are in memory together, and which one is evicted for a new pair.

No processes are handled here. A pair takes what its load planned: weights, caches, buffers, and the cache
for prompts without a slot. A file that two pairs map counts once. The least recently used pair is evicted
first, but never one that is answering or that is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from localspec.daemon.worker.plan import (
    MIB,
    LoadPlan,
    LoadPlanner,
    file_sizes,
    free_memory,
    worker_bytes,
)
from localspec.protocol.frames import PairFiles
from localspec.registry.header.fit import RUNTIME_BYTES, USUAL_CONTEXT, FreeMemory


@dataclass(frozen=True, slots=True)
class PairMemory:
    """A pair in memory and the bytes that it takes."""

    name: str
    pid: int
    needed: int  # all of its memory
    on_gpu: int  # the part of `needed` on the GPU
    least: int  # what it would need at least if it were loaded again
    files: dict[str, int]  # the sizes of its files
    spare: int = 0  # the part of `needed` for prompts without a slot that may be unused

    @classmethod
    def from_plan(
        cls, pair: PairFiles, pid: int, planned: LoadPlan, n_ctx: int, spare: int = 0
    ) -> PairMemory:
        """Return the memory of a loaded pair from its plan. Reads the sizes of its files.

        `n_ctx` is the requested context in tokens, 0 for any.
        """
        files, plan = file_sizes(pair), planned.plan
        if plan is None:  # its headers could not be read
            needed = sum(files.values()) + RUNTIME_BYTES
            return cls(pair.name, pid, needed, 0, needed, files)
        cache = plan.target.cache + plan.drafting.cache
        optional_cache = 0 if n_ctx else int(cache * max(0, 1 - USUAL_CONTEXT / plan.context))
        least = plan.needed - plan.prefixes - optional_cache
        return cls(pair.name, pid, plan.needed, plan.on_gpu, least, files, spare)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory that is free now, and the memory that each process of ours holds."""

    free: FreeMemory
    own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def measure(cls, holdings: Sequence[PairMemory]) -> MemorySnapshot:
        from localspec import machine

        host = machine.Host.current()
        own = {holding.pid: worker_bytes(host, holding.pid) for holding in holdings}
        return cls(free_memory(host), own)

    def free_beside(
        self,
        newcomer: dict[str, int],
        staying: Sequence[PairMemory],
        leaving: Sequence[PairMemory] = (),
    ) -> AvailableMemory:
        """Return the memory for a pair of these files beside `staying`, once `leaving` are gone.

        With other pairs in memory, a margin is left to other programs.
        """
        ram = self.free.ram + sum(self.own.get(holding.pid, 0) for holding in leaving)
        vram = self.free.vram + sum(holding.on_gpu for holding in leaving)
        taken_bytes = 0
        for holding, shared in _with_shared_bytes(staying, newcomer):
            # The system counts mapped weights, and memory that is not filled yet, as free.
            unfilled = max(holding.needed - holding.on_gpu - self.own.get(holding.pid, 0), 0)
            ram -= unfilled - min(shared, unfilled)
            taken_bytes += holding.needed - min(shared, unfilled)
        free = FreeMemory(max(ram, 0), max(vram, 0))
        return AvailableMemory(free.shared if staying else free, taken_bytes)


def total_bytes(staying: Sequence[PairMemory]) -> int:
    """Return the bytes that all of them take together."""
    return sum(holding.needed - shared for holding, shared in _with_shared_bytes(staying, ()))


def _with_shared_bytes(
    staying: Sequence[PairMemory], newcomer: Iterable[str]
) -> Iterator[tuple[PairMemory, int]]:
    """Yield each pair with the bytes of files that it shares with the new pair or an earlier one."""
    known = {*newcomer}
    for holding in staying:
        yield holding, sum(size for file, size in holding.files.items() if file in known)
        known |= {*holding.files}


class AvailableMemory(NamedTuple):
    """The memory for a new pair, and the bytes that the staying pairs take."""

    free: FreeMemory
    taken: int

    def reserve(self, reserved: Sequence[PairMemory], budget: int) -> AvailableMemory:
        """Subtract the least memory of `reserved`, and limit all pairs to `budget` bytes (0: no limit)."""
        ram, vram = self.free.ram, self.free.vram
        for holding in reserved:
            ram -= RUNTIME_BYTES if holding.on_gpu else holding.least
            vram -= min(holding.least, holding.on_gpu)
        taken_bytes = self.taken + sum(holding.least for holding in reserved)
        if budget:
            ram, vram = min(ram, budget - taken_bytes), min(vram, budget - taken_bytes)
        return AvailableMemory(FreeMemory(max(ram, 0), max(vram, 0)), taken_bytes)


class EvictPair(NamedTuple):
    """The decision to evict this pair for the new one."""

    name: str


class ShrinkCaches(NamedTuple):
    """The decision that these pairs give up unused memory, after which there may be enough."""

    names: Sequence[str]


class WaitForPair(NamedTuple):
    """The decision to wait, because all pairs that could be evicted are answering. This pair gives way."""

    name: str


class DoesNotFit(NamedTuple):
    """The decision that the pair does not fit, with a message on what would have to go."""

    message: str


Decision = LoadPlan | ShrinkCaches | EvictPair | WaitForPair | DoesNotFit


@dataclass(frozen=True, slots=True)
class ResidentPairs:
    """The pairs in memory, each list with the least recently used first."""

    kept: Sequence[PairMemory] = ()
    idle: Sequence[PairMemory] = ()
    busy: Sequence[PairMemory] = ()
    # Pairs that were evicted lately and may be loaded again, the most recently used first.
    driven_out: Sequence[PairMemory] = ()

    @property
    def all(self) -> list[PairMemory]:
        return [*self.kept, *self.idle, *self.busy]

    @property
    def without_spare(self) -> ResidentPairs:
        """The same pairs as if all their memory for prompts without a slot were given up."""
        kept, idle, busy = (
            [replace(holding, needed=holding.needed - holding.spare) for holding in group]
            for group in (self.kept, self.idle, self.busy)
        )
        return ResidentPairs(kept, idle, busy, self.driven_out)


def decide_eviction(
    plans: LoadPlanner, standing: ResidentPairs, snapshot: MemorySnapshot, budget: int
) -> Decision:
    """Decide how a pair can be loaded: its plan, which pairs give up unused memory, or which one leaves."""
    decision = _decide_without_sparing(plans, standing, snapshot, budget)
    spares = [holding.name for holding in standing.all if holding.spare > 0]
    if not spares or isinstance(decision, LoadPlan):
        return decision
    if_spared = _decide_without_sparing(plans, standing.without_spare, snapshot, budget)
    return ShrinkCaches(spares) if isinstance(if_spared, LoadPlan) else decision


def _decide_without_sparing(
    plans: LoadPlanner, standing: ResidentPairs, snapshot: MemorySnapshot, budget: int
) -> Decision:
    files = file_sizes(plans.pair)
    movable = [*standing.idle, *standing.busy]

    def free_beside(
        leaving: Sequence[PairMemory], reserved: Sequence[PairMemory] = ()
    ) -> AvailableMemory:
        staying = [holding for holding in standing.all if holding not in leaving]
        return snapshot.free_beside(files, staying, leaving).reserve(reserved, budget)

    def plan(leaving: Sequence[PairMemory], reserved: Sequence[PairMemory] = ()) -> LoadPlan | None:
        """Return the plan once `leaving` are gone, or None if the pair does not fit then."""
        free, taken_bytes = free_beside(leaving, reserved)
        planned = plans.plan(free)
        needed = PairMemory.from_plan(plans.pair, 0, planned, 0).needed
        lacks = not planned.plan and (bool(planned.beyond) or needed > free.ram)
        if (budget and needed > budget - taken_bytes) or (lacks and (budget or taken_bytes)):
            return None
        return planned

    best = plan(movable)
    if best is None:
        return DoesNotFit(_refusal(plans, free_beside(movable), standing, budget))
    for count in range(len(standing.driven_out), -1, -1):
        planned = plan((), standing.driven_out[:count])
        if planned and _is_as_good(planned, best, plans):
            return planned
    for count in range(1, len(movable)):
        planned = plan(movable[:count])
        if planned and _is_as_good(planned, best, plans):
            movable = movable[:count]
            break
    idle = [holding for holding in movable if holding in standing.idle]
    return EvictPair(idle[0].name) if idle else WaitForPair(movable[0].name)


def _is_as_good(planned: LoadPlan, best: LoadPlan, plans: LoadPlanner) -> bool:
    """Return whether evicting more pairs would gain nothing. A context beyond the usual one is no gain."""
    if best.plan is None or planned.plan is None:
        return best.plan is None
    enough = best.plan.context
    if not plans.settings.n_ctx:
        enough = min(enough, USUAL_CONTEXT)
    return (
        planned.plan.draft == best.plan.draft
        and planned.plan.gpu_layers == best.plan.gpu_layers
        and planned.plan.cpu_moe_layers == best.plan.cpu_moe_layers
        and planned.plan.context >= enough
    )


def _refusal(
    plans: LoadPlanner, memory: AvailableMemory, standing: ResidentPairs, budget: int
) -> str:
    def mib(count: int) -> str:
        return f"{-(-count // MIB)} MiB"

    needed, free = plans.min_bytes(), max(memory.free.ram, memory.free.vram)
    message = (
        f"{plans.pair.name} does not fit in memory: it needs at least {mib(needed)}, which is "
        f"{mib(max(needed - free, MIB))} more than there is"
    )
    cures = []
    limit = f" within 'memory', {mib(budget)}"
    if standing.kept:
        kept_pairs = ", ".join(f"{pair.name} ({mib(pair.needed)})" for pair in standing.kept)
        message += f" beside the pairs that are kept loaded: {kept_pairs}"
        cures.append(f"localspec unload {standing.kept[0].name}")
        limit = f" ('memory' is {mib(budget)})"
    if budget:
        message += limit
        cures.append("localspec config set memory auto")
    return f"{message}. To make room: {', or '.join(cures)}"
