"""Which pairs are in memory together, and who leaves for a newcomer: decisions, no processes.

What a pair takes is what its load planned: weights, caches, buffers, prompts without a slot. Files that two
of them map are there once. Whoever was asked least recently leaves first; nobody who answers, and nobody
who is to be kept.
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
    """A pair in memory, and what it takes of it, in bytes. on_gpu: of `needed`; files: their sizes;
    least: what it could make do with, were it loaded again; spare: of `needed`, room for prompts that
    none has taken, perhaps.
    """

    name: str
    pid: int
    needed: int
    on_gpu: int
    least: int
    files: dict[str, int]
    spare: int = 0

    @classmethod
    def of(cls, pair: PairFiles, pid: int, planned: Planned, asked: int, spare: int = 0) -> Holding:
        """By the plan of its load, for which a context of `asked` tokens was asked (0: any); looks at its
        files.
        """
        from localspec.registry.header.need import RUNTIME

        files, plan = placement.file_sizes(pair), planned.plan
        if plan is None:  # its headers tell nothing
            needed = sum(files.values()) + RUNTIME
            return cls(pair.name, pid, needed, 0, needed, files)
        from localspec.registry.header.fit import USUAL_CONTEXT

        cache = plan.target.cache + plan.drafting.cache
        beyond = 0 if asked else int(cache * max(0, 1 - USUAL_CONTEXT / plan.context))
        least = plan.needed - plan.prefixes - beyond
        return cls(pair.name, pid, plan.needed, plan.on_gpu, least, files, spare)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is free now, with every pair where it is, and by process what of it is its own already."""

    free: Memory
    own: dict[int, int] = field(default_factory=dict)

    @classmethod
    def here(cls, holdings: Sequence[Holding]) -> Seen:
        """On this machine."""
        from localspec import machine

        host = machine.Host.here()
        own = {each.pid: placement.held(host, each.pid) for each in holdings}
        return cls(placement.free_memory(host), own)

    def left(
        self, newcomer: dict[str, int], staying: Sequence[Holding], leaving: Sequence[Holding] = ()
    ) -> Left:
        """What a pair of these files can have beside those that stay, once the others have left. Beside
        others a margin is left to other programs.
        """
        from localspec.registry.header.fit import Memory

        ram = self.free.ram + sum(self.own.get(each.pid, 0) for each in leaving)
        vram = self.free.vram + sum(each.on_gpu for each in leaving)
        taken = 0
        for each, shared in _shared(staying, newcomer):
            # Mapped weights count as free, and so does what it has not filled yet.
            rest = max(each.needed - each.on_gpu - self.own.get(each.pid, 0), 0)
            ram -= rest - min(shared, rest)
            taken += each.needed - min(shared, rest)
        free = Memory(max(ram, 0), max(vram, 0))
        return Left(free.shared if staying else free, taken)


def taken(staying: Sequence[Holding]) -> int:
    """Bytes of all together."""
    return sum(each.needed - shared for each, shared in _shared(staying, ()))


def _shared(staying: Sequence[Holding], newcomer: Iterable[str]) -> Iterator[tuple[Holding, int]]:
    """Each with the bytes of its files that the newcomer, or one before it, has too."""
    known = {*newcomer}
    for each in staying:
        yield each, sum(size for file, size in each.files.items() if file in known)
        known |= {*each.files}


class Left(NamedTuple):
    """Memory for a newcomer, and the bytes that those have who stay."""

    free: Memory
    taken: int

    def reserving(self, reserved: Sequence[Holding], budget: int) -> Left:
        """With what these need at least kept free, and all pairs within `budget` bytes (0: any)."""
        from localspec.registry.header.fit import Memory
        from localspec.registry.header.need import RUNTIME

        ram, vram = self.free.ram, self.free.vram
        for each in reserved:
            ram -= RUNTIME if each.on_gpu else each.least
            vram -= min(each.least, each.on_gpu)
        taken = self.taken + sum(each.least for each in reserved)
        if budget:
            ram, vram = min(ram, budget - taken), min(vram, budget - taken)
        return Left(Memory(max(ram, 0), max(vram, 0)), taken)


class Leaves(NamedTuple):
    """This one is to leave for the newcomer."""

    name: str


class Spares(NamedTuple):
    """These are to give up room that they do not use: then there is enough, perhaps."""

    names: Sequence[str]


class Waits(NamedTuple):
    """All that could leave are answering: the newcomer waits, and this one gives way."""

    name: str


class Refused(NamedTuple):
    """It does not fit, and says what would have to go."""

    message: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Those in memory, each the least recently asked first. driven_out: who left for others lately and may
    be back, the most recently asked first.
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
        """Were all the room empty that they have for prompts."""
        kept, idle, busy = (
            [replace(each, needed=each.needed - each.spare) for each in some]
            for some in (self.kept, self.idle, self.busy)
        )
        return Standing(kept, idle, busy, self.driven_out)


def decide(
    plans: Plans, standing: Standing, seen: Seen, budget: int
) -> Planned | Spares | Leaves | Waits | Refused:
    """What is to be done so that a pair can be loaded: how, who gives up what it does not use, or who must
    leave before.
    """
    found = _decided(plans, standing, seen, budget)
    spares = [each.name for each in standing.all if each.spare > 0]
    if not spares or isinstance(found, Planned):
        return found
    then = _decided(plans, standing.sparing, seen, budget)
    return Spares(spares) if isinstance(then, Planned) else found


def _decided(
    plans: Plans, standing: Standing, seen: Seen, budget: int
) -> Planned | Leaves | Waits | Refused:
    files = placement.file_sizes(plans.pair)
    movable = [*standing.idle, *standing.busy]

    def left(leaving: Sequence[Holding], reserved: Sequence[Holding] = ()) -> Left:
        staying = [each for each in standing.all if each not in leaving]
        return seen.left(files, staying, leaving).reserving(reserved, budget)

    def plan(leaving: Sequence[Holding], reserved: Sequence[Holding] = ()) -> Planned | None:
        """None: it does not fit, and something is to be done about that."""
        free, taken = left(leaving, reserved)
        planned = plans.within(free)
        needed = Holding.of(plans.pair, 0, planned, 0).needed
        lacks = not planned.plan and (bool(planned.beyond) or needed > free.ram)
        if (budget and needed > budget - taken) or (lacks and (budget or taken)):
            return None
        return planned

    best = plan(movable)
    if best is None:
        return Refused(_refusal(plans, left(movable), standing, budget))
    for count in range(len(standing.driven_out), -1, -1):
        now = plan((), standing.driven_out[:count])
        if now and _as_good(now, best, plans):
            return now
    for count in range(1, len(movable)):
        found = plan(movable[:count])
        if found and _as_good(found, best, plans):
            break
    else:
        count = len(movable)
    idle = [each for each in movable[:count] if each in standing.idle]
    return Leaves(idle[0].name) if idle else Waits(movable[0].name)


def _as_good(planned: Planned, best: Planned, plans: Plans) -> bool:
    """Whether it is worth no more to have others leave. A longer context than the usual one is not."""
    if best.plan is None or planned.plan is None:
        return best.plan is None
    from localspec.registry.header.fit import USUAL_CONTEXT

    enough = best.plan.context
    if not plans.settings.n_ctx:
        enough = min(enough, USUAL_CONTEXT)
    same = planned.plan.draft == best.plan.draft and planned.plan.gpu_layers == best.plan.gpu_layers
    return same and planned.plan.context >= enough


def _refusal(plans: Plans, left: Left, standing: Standing, budget: int) -> str:
    least, free = plans.least(), max(left.free.ram, left.free.vram)
    beside = ", ".join(f"{each.name} ({_mib(each.needed)})" for each in standing.kept)
    said = (
        f"{plans.pair.name} does not fit in memory: it needs at least {_mib(least)}, which is "
        f"{_mib(max(least - free, MIB))} more than there is"
    )
    if beside:
        said += f" beside the pairs that are kept loaded: {beside}"
    if budget:
        said += f" ('memory' is {_mib(budget)})" if beside else f" within 'memory', {_mib(budget)}"
    cures = []
    if beside:
        cures.append(f"localspec unload {standing.kept[0].name}")
    if budget:
        cures.append("localspec config set memory auto")
    return f"{said}. To make room: {', or '.join(cures)}"


def _mib(count: int) -> str:
    return f"{-(-count // MIB)} MiB"
