"""Decide which pairs are in memory together, and which one is evicted for a new pair.

No processes are handled here. A pair takes what its load planned: weights, caches, buffers, and the cache
for prompts without a slot. A file that two pairs map counts once. The least recently used pair is evicted
first, but never one that is answering or that is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from localspec.daemon.worker import placement
from localspec.daemon.worker.placement import MIB, Planned, Plans
from localspec.protocol.frames import PairFiles

if TYPE_CHECKING:
    from localspec.registry.header.fit import Memory


@dataclass(frozen=True, slots=True)
class Holding:
    """A pair in memory and the bytes that it takes.

    needed: all of its memory.
    on_gpu: the part of `needed` on the GPU.
    least: what it would need at least if it were loaded again.
    files: the sizes of its files.
    spare: the part of `needed` for prompts without a slot that may be unused.
    """

    name: str
    pid: int
    needed: int
    on_gpu: int
    least: int
    files: dict[str, int]
    spare: int = 0

    @classmethod
    def of(cls, pair: PairFiles, pid: int, planned: Planned, n_ctx: int, spare: int = 0) -> Holding:
        """Return the memory of a loaded pair from its plan. Reads the sizes of its files.

        `n_ctx` is the requested context in tokens, 0 for any.
        """
        from localspec.registry.header.need import RUNTIME

        files, plan = placement.file_sizes(pair), planned.plan
        if plan is None:  # its headers could not be read
            needed = sum(files.values()) + RUNTIME
            return cls(pair.name, pid, needed, 0, needed, files)
        from localspec.registry.header.fit import USUAL_CONTEXT

        cache = plan.target.cache + plan.drafting.cache
        optional_cache = 0 if n_ctx else int(cache * max(0, 1 - USUAL_CONTEXT / plan.context))
        least = plan.needed - plan.prefixes - optional_cache
        return cls(pair.name, pid, plan.needed, plan.on_gpu, least, files, spare)


@dataclass(frozen=True, slots=True)
class Seen:
    """The memory that is free now, and the memory that each process of ours holds."""

    free: Memory
    own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def here(cls, holdings: Sequence[Holding]) -> Seen:
        """Measure this machine."""
        from localspec import machine

        host = machine.Host.here()
        own = {holding.pid: placement.held(host, holding.pid) for holding in holdings}
        return cls(placement.free_memory(host), own)

    def left(
        self, newcomer: dict[str, int], staying: Sequence[Holding], leaving: Sequence[Holding] = ()
    ) -> Left:
        """Return the memory for a pair of these files beside `staying`, once `leaving` are gone.

        With other pairs in memory, a margin is left to other programs.
        """
        from localspec.registry.header.fit import Memory

        ram = self.free.ram + sum(self.own.get(holding.pid, 0) for holding in leaving)
        vram = self.free.vram + sum(holding.on_gpu for holding in leaving)
        taken_bytes = 0
        for holding, shared in _with_shared_bytes(staying, newcomer):
            # The system counts mapped weights, and memory that is not filled yet, as free.
            unfilled = max(holding.needed - holding.on_gpu - self.own.get(holding.pid, 0), 0)
            ram -= unfilled - min(shared, unfilled)
            taken_bytes += holding.needed - min(shared, unfilled)
        free = Memory(max(ram, 0), max(vram, 0))
        return Left(free.shared if staying else free, taken_bytes)


def taken(staying: Sequence[Holding]) -> int:
    """Return the bytes that all of them take together."""
    return sum(holding.needed - shared for holding, shared in _with_shared_bytes(staying, ()))


def _with_shared_bytes(
    staying: Sequence[Holding], newcomer: Iterable[str]
) -> Iterator[tuple[Holding, int]]:
    """Yield each pair with the bytes of files that it shares with the new pair or an earlier one."""
    known = {*newcomer}
    for holding in staying:
        yield holding, sum(size for file, size in holding.files.items() if file in known)
        known |= {*holding.files}


class Left(NamedTuple):
    """The memory for a new pair, and the bytes that the staying pairs take."""

    free: Memory
    taken: int

    def reserving(self, reserved: Sequence[Holding], budget: int) -> Left:
        """Subtract the least memory of `reserved`, and limit all pairs to `budget` bytes (0: no limit)."""
        from localspec.registry.header.fit import Memory
        from localspec.registry.header.need import RUNTIME

        ram, vram = self.free.ram, self.free.vram
        for holding in reserved:
            ram -= RUNTIME if holding.on_gpu else holding.least
            vram -= min(holding.least, holding.on_gpu)
        taken_bytes = self.taken + sum(holding.least for holding in reserved)
        if budget:
            ram, vram = min(ram, budget - taken_bytes), min(vram, budget - taken_bytes)
        return Left(Memory(max(ram, 0), max(vram, 0)), taken_bytes)


class Leaves(NamedTuple):
    """The decision to evict this pair for the new one."""

    name: str


class Spares(NamedTuple):
    """The decision that these pairs give up unused memory, after which there may be enough."""

    names: Sequence[str]


class Waits(NamedTuple):
    """The decision to wait, because all pairs that could be evicted are answering. This pair gives way."""

    name: str


class Refused(NamedTuple):
    """The decision that the pair does not fit, with a message on what would have to go."""

    message: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The pairs in memory, each list with the least recently used first.

    driven_out: pairs that were evicted lately and may be loaded again, the most recently used first.
    """

    kept: Sequence[Holding] = ()
    idle: Sequence[Holding] = ()
    busy: Sequence[Holding] = ()
    driven_out: Sequence[Holding] = ()

    @property
    def all(self) -> list[Holding]:
        return [*self.kept, *self.idle, *self.busy]

    @property
    def sparing(self) -> Standing:
        """The same pairs as if all their memory for prompts without a slot were given up."""
        kept, idle, busy = (
            [replace(holding, needed=holding.needed - holding.spare) for holding in group]
            for group in (self.kept, self.idle, self.busy)
        )
        return Standing(kept, idle, busy, self.driven_out)


def decide(
    plans: Plans, standing: Standing, snapshot: Seen, budget: int
) -> Planned | Spares | Leaves | Waits | Refused:
    """Decide how a pair can be loaded: its plan, which pairs give up unused memory, or which one leaves."""
    decision = _decide_without_sparing(plans, standing, snapshot, budget)
    spares = [holding.name for holding in standing.all if holding.spare > 0]
    if not spares or isinstance(decision, Planned):
        return decision
    if_spared = _decide_without_sparing(plans, standing.sparing, snapshot, budget)
    return Spares(spares) if isinstance(if_spared, Planned) else decision


def _decide_without_sparing(
    plans: Plans, standing: Standing, snapshot: Seen, budget: int
) -> Planned | Leaves | Waits | Refused:
    files = placement.file_sizes(plans.pair)
    movable = [*standing.idle, *standing.busy]

    def free_beside(leaving: Sequence[Holding], reserved: Sequence[Holding] = ()) -> Left:
        staying = [holding for holding in standing.all if holding not in leaving]
        return snapshot.left(files, staying, leaving).reserving(reserved, budget)

    def plan(leaving: Sequence[Holding], reserved: Sequence[Holding] = ()) -> Planned | None:
        """Return the plan once `leaving` are gone, or None if the pair does not fit then."""
        free, taken_bytes = free_beside(leaving, reserved)
        planned = plans.within(free)
        needed = Holding.of(plans.pair, 0, planned, 0).needed
        lacks = not planned.plan and (bool(planned.beyond) or needed > free.ram)
        if (budget and needed > budget - taken_bytes) or (lacks and (budget or taken_bytes)):
            return None
        return planned

    best = plan(movable)
    if best is None:
        return Refused(_refusal(plans, free_beside(movable), standing, budget))
    for count in range(len(standing.driven_out), -1, -1):
        planned = plan((), standing.driven_out[:count])
        if planned and _is_as_good(planned, best, plans):
            return planned
    for count in range(1, len(movable)):
        planned = plan(movable[:count])
        if planned and _is_as_good(planned, best, plans):
            break
    else:
        count = len(movable)
    idle = [holding for holding in movable[:count] if holding in standing.idle]
    return Leaves(idle[0].name) if idle else Waits(movable[0].name)


def _is_as_good(planned: Planned, best: Planned, plans: Plans) -> bool:
    """Return whether evicting more pairs would gain nothing. A context beyond the usual one is no gain."""
    if best.plan is None or planned.plan is None:
        return best.plan is None
    from localspec.registry.header.fit import USUAL_CONTEXT

    min_context = best.plan.context
    if not plans.settings.n_ctx:
        min_context = min(min_context, USUAL_CONTEXT)
    same_placement = (
        planned.plan.draft == best.plan.draft and planned.plan.gpu_layers == best.plan.gpu_layers
    )
    return same_placement and planned.plan.context >= min_context


def _refusal(plans: Plans, memory: Left, standing: Standing, budget: int) -> str:
    needed, free = plans.least(), max(memory.free.ram, memory.free.vram)
    kept_pairs = ", ".join(f"{holding.name} ({_mib(holding.needed)})" for holding in standing.kept)
    message = (
        f"{plans.pair.name} does not fit in memory: it needs at least {_mib(needed)}, which is "
        f"{_mib(max(needed - free, MIB))} more than there is"
    )
    if kept_pairs:
        message += f" beside the pairs that are kept loaded: {kept_pairs}"
    if budget:
        message += (
            f" ('memory' is {_mib(budget)})" if kept_pairs else f" within 'memory', {_mib(budget)}"
        )
    cures = []
    if kept_pairs:
        cures.append(f"localspec unload {standing.kept[0].name}")
    if budget:
        cures.append("localspec config set memory auto")
    return f"{message}. To make room: {', or '.join(cures)}"


def _mib(count: int) -> str:
    return f"{-(-count // MIB)} MiB"
