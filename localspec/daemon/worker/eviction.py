"""Plan the load of a pair so that it fits in memory: context, draft, and layers on the GPU.

The plan is computed from the files' headers and from the memory that the pair could have now.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker.queue import EDITOR_PLACES
from localspec.files import write_atomically
from localspec.paths import Paths, read_file
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.pairs import FitView
from localspec.protocol.settings import SHORT_CONTEXT_TOKENS

if TYPE_CHECKING:
    from localspec.machine import Host
    from localspec.registry.header.fit import FreeMemory, LoadOptions, MemoryFit
    from localspec.registry.header.model import ModelInfo
    from localspec.registry.header.rate import MemorySpeeds


MIB = 1 << 20
# The longest pass, by its measured cost, as a fraction of the watchdog's time.
PASS_TIME_FRACTION = 0.25
# The fraction of a Mac's memory that its GPU may use (about Metal's recommended working set).
MAC_GPU_MEMORY_FRACTION = 0.7


class LoadPlan(NamedTuple):
    """The pair and the settings for the engine.

    notes: sentences on what had to be reduced.
    beyond: why the requested settings do not fit, or "".
    plan: the expected use of memory, None if it is unknown.
    read_gib: the GiB that a pass of the target reads on the GPU and in main memory, None if unknown.
    """

    pair: PairFiles
    settings: EngineSettings
    notes: tuple[str, ...] = ()
    beyond: str = ""
    plan: FitView | None = None
    read_gib: tuple[float, float] | None = None

    def without_draft(self, note: str) -> LoadPlan:
        """Return the plan with nothing that drafts but the text itself, and a note about it."""
        return self._replace(
            pair=msgspec.structs.replace(self.pair, draft=None, other_drafts=()),
            settings=msgspec.structs.replace(self.settings, own_heads=False),
            notes=(*self.notes, note),
        )


def engine_settings(config: Config, paths: Paths, *, safe_mode: bool = False) -> EngineSettings:
    """Return the engine's settings from the configuration."""
    return EngineSettings(
        n_ctx=config.context,
        parallel=config.parallel + EDITOR_PLACES,
        n_threads=config.threads,
        n_gpu_layers=config.gpu_layers,
        split_mode=config.split_mode,
        main_gpu=config.main_gpu,
        flash_attention=config.flash_attention,
        type_kv=config.kv_type,
        type_v=config.kv_type_v,
        extra_buffers=not safe_mode,
        exact=config.exact,
        loop_guard=config.loop_guard,
        depth=None if config.depth < 0 else config.depth,
        pass_s=config.watchdog * PASS_TIME_FRACTION,
        gap_s=config.longest_gap / 1e3,
        turns=str(paths.runtime / "turns"),
        state_dir=str(paths.state),
        prefix_bytes=config.prefix_memory * MIB,
        states_dir=str(paths.model_states),
        states_bytes=config.prefix_disk * MIB,
    )


def setting_notes(pair: PairFiles, settings: EngineSettings, workers: Collection[int]) -> list[str]:
    """Return sentences on the settings that a pair would not get here.

    The memory of the workers with these pids counts as free.
    """
    from localspec import machine

    free = free_memory(machine.Host.current(), workers)
    planned = plan_load(pair, settings, free, machine.installed_backend())
    return [note for note in (planned.beyond, *planned.notes) if note]


def plan_load(
    pair: PairFiles, settings: EngineSettings, free: FreeMemory, built: str | None
) -> LoadPlan:
    """Fit a pair into the free memory. `built` is the backend that llama.cpp was built for."""
    return LoadPlanner(pair, settings, built).plan(free)


class LoadPlanner:
    """A pair's plans for any amount of memory. Its headers are read once, at creation.

    Files that cannot be read, and pairs that seem too large, are left to the engine. It reports what is wrong
    with a file, and tries smaller plans if memory really runs out.
    """

    def __init__(self, pair: PairFiles, settings: EngineSettings, built: str | None) -> None:
        from localspec.registry.header.model import read_local_model

        self.pair = pair
        self.settings = settings
        self._built = built
        self._speeds = load_speeds(settings.state_dir)
        self._models: tuple[ModelInfo, ModelInfo | None] | None = None
        with contextlib.suppress(errors.LocalspecError):
            draft = read_local_model(Path(pair.draft), as_draft=True) if pair.draft else None
            target = replace(read_local_model(Path(pair.target)), pooling=pair.pooling)
            self._models = target, draft

    @classmethod
    def for_this_machine(cls, pair: PairFiles, settings: EngineSettings) -> LoadPlanner:
        """Return the plans for the llama.cpp of this machine."""
        from localspec import machine

        return cls(pair, settings, machine.installed_backend())

    def with_half_context(self, failed: LoadPlan) -> tuple[LoadPlanner, str]:
        """Return plans with half the context of a plan that ran out of memory, and a note about it."""
        n_ctx = failed.settings.n_ctx // 2
        note = (
            f"The context has {n_ctx} tokens: with {2 * n_ctx}, memory ran out while the pair was loaded. "
            "To load it with another one: localspec config set context N"
        )
        smaller = copy.copy(self)
        smaller.settings = msgspec.structs.replace(self.settings, n_ctx=n_ctx)
        return smaller, note

    def plan(self, free: FreeMemory) -> LoadPlan:
        """Return the plan for the given amount of memory."""
        from localspec.registry.header import fit
        from localspec.registry.header.rate import share_on_gpu

        pair, settings = self.pair, self.settings
        if self._models is None:
            return LoadPlan(pair, settings)
        target, draft = self._models
        # Only NVIDIA's driver reports the free memory. A Mac's GPU shares the machine's memory.
        counted = self._built in ("cuda", "vulkan") and settings.n_gpu_layers < 0 and free.vram > 0
        memory = free if counted else fit.FreeMemory(free.ram)
        try:
            chosen = fit.fit_pair(target, draft, memory, self._load(settings))
        except errors.DoesNotFit as error:
            if pair.rpc:  # only the engine finds out how much memory the other machines have
                return LoadPlan(pair, msgspec.structs.replace(settings, rpc_needed=True))
            return LoadPlan(pair, settings, beyond=error.message)
        exact = 0
        if not settings.exact:
            load = msgspec.structs.replace(settings, n_ctx=chosen.context, exact=True)
            exact = fit.need_of_target(target, self._load(load)).total - chosen.target.total
        lacks = exact if chosen.needed + exact > chosen.free else 0
        changed = msgspec.structs.replace(settings, exact_lacks=lacks)
        if not chosen.draft and fit.has_drafts(target, draft):
            changed = msgspec.structs.replace(changed, own_heads=False)
        planned = _apply_fit(pair, changed, chosen, counted)
        if not counted and self._built != "cpu":
            return planned  # Where the layers will be is not known.
        share = share_on_gpu(target, chosen.gpu_layers if counted else 0)
        return planned._replace(read_gib=(share * self._pass_gib, (1 - share) * self._pass_gib))

    @cached_property
    def _pass_gib(self) -> float:
        """The GiB of the target's weights that a pass of one row reads."""
        from localspec.registry.header.rate import PassBytes

        return PassBytes(self._models[0]).count_gib() if self._models else 0.0

    def _load(self, settings: EngineSettings) -> LoadOptions:
        load = memory_load(settings, self._built)
        return replace(load, speeds=self._speeds, projector=_projector_bytes(self.pair))

    def min_bytes(self) -> int:
        """Return the bytes that the smallest possible plan needs."""
        from localspec.registry.header import fit

        if self._models is None:
            return sum(file_sizes(self.pair).values())
        target, _ = self._models
        n_ctx = self.settings.n_ctx or target.context
        context = min(n_ctx, target.context, fit.SMALLEST_CONTEXT)
        return fit.min_need(target, replace(self._load(self.settings), context=context))


def _projector_bytes(pair: PairFiles) -> int:
    """Return the memory that the projector of a pair needs, 0 without one."""
    from localspec.registry.header.projector import projector_bytes

    with contextlib.suppress(OSError):
        return projector_bytes(Path(pair.projector).stat().st_size) if pair.projector else 0
    return 0


def file_sizes(pair: PairFiles) -> dict[str, int]:
    """Return the sizes of the existing files in bytes, shards included."""
    from localspec.registry.header.model import shard_paths

    sizes: dict[str, int] = {}
    for name in filter(None, (pair.target, pair.draft)):
        with contextlib.suppress(errors.LocalspecError, OSError):
            sizes |= {str(path): path.stat().st_size for path in shard_paths(Path(name))}
    return sizes


def memory_load(settings: EngineSettings, built: str | None) -> LoadOptions:
    """Return the settings that cost memory. `built` is the backend, as for `plan`."""
    from localspec.registry.header.fit import LoadOptions

    on_cpu = built in (None, "cpu") or settings.n_gpu_layers == 0
    # Which attention this CPU uses is only known once llama.cpp is loaded, so assume the larger one.
    attention = (
        settings.cpu_flash_attention(SHORT_CONTEXT_TOKENS + 1, wide=False)
        if on_cpu
        else settings.flash_attention
    )
    return LoadOptions(
        context=settings.n_ctx,
        kv_types=settings.kv_types,
        parallel=settings.parallel,
        attention=attention,
        chosen=attention != settings.flash_attention,
        exact=settings.exact,
        prefixes=settings.prefix_bytes,
        cuda=built == "cuda" and not on_cpu,
    )


def _apply_fit(
    pair: PairFiles, settings: EngineSettings, chosen: MemoryFit, counted: bool
) -> LoadPlan:
    from localspec.registry.store.local import fit_view

    changes = {"n_ctx": chosen.context, "prefix_bytes": chosen.prefixes}
    if counted:
        changes["n_gpu_layers"] = chosen.gpu_layers
        changes["draft_gpu_layers"] = chosen.draft_gpu_layers
    if not chosen.draft:
        pair = msgspec.structs.replace(pair, draft=None, other_drafts=())
    changed = msgspec.structs.replace(settings, **changes)
    return LoadPlan(pair, changed, chosen.notes, chosen.beyond, fit_view(chosen))


# ------------------------------------------------------------------------ speeds
# What passes over weights in each memory cost here, as the loads of pairs have measured it.


_SPEEDS_FILE = "memory_speeds.json"
_MAX_MEASURED_ROWS = 8


def load_speeds(state_dir: str) -> MemorySpeeds:
    """Return the speeds that earlier loads have measured, or those of a usual workstation."""
    from localspec.registry.header.rate import MemorySpeeds

    if not state_dir:
        return MemorySpeeds()
    try:
        return msgspec.json.decode(read_file(Path(state_dir) / _SPEEDS_FILE), type=MemorySpeeds)
    except (OSError, ValueError):
        return MemorySpeeds()


def learn_speeds(planned: LoadPlan, profile: Mapping[str, Any]) -> None:
    """Learn from the costs of passes that a load has measured, as in `Loaded.profile`."""
    measured = {int(rows): float(ms) for rows, ms in (profile.get("target_ms") or {}).items()}
    rows = max((rows for rows in measured if 1 < rows <= _MAX_MEASURED_ROWS), default=0)
    state_dir = planned.settings.state_dir
    if not planned.read_gib or not rows or 1 not in measured or not state_dir or planned.pair.rpc:
        return
    speeds = load_speeds(state_dir).learn(*planned.read_gib, measured[1], measured[rows], rows)
    with contextlib.suppress(OSError):  # a full disk costs a good estimate, not the pair
        write_atomically(Path(state_dir) / _SPEEDS_FILE, msgspec.json.encode(speeds), sync=False)


# ------------------------------------------------------------------------ free memory


def free_memory(host: Host, workers: Collection[int] = ()) -> FreeMemory:
    """Return the free memory, as if the engine workers with these pids were unloaded."""
    from localspec.machine import available_bytes, memory_bytes
    from localspec.registry.header.fit import FreeMemory

    if host.system == "Darwin":
        return FreeMemory(int(memory_bytes() * MAC_GPU_MEMORY_FRACTION), 0)
    ram = available_bytes(host) + sum(worker_bytes(host, pid) for pid in workers)
    return FreeMemory(ram, _vram(host, workers))


def worker_bytes(host: Host, worker: int) -> int:
    """Return the bytes of the worker's caches and buffers. Mapped weights count as available already."""
    match = re.search(r"^RssAnon:\s*(\d+) kB", host.read(f"/proc/{worker}/status"), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def _vram(host: Host, workers: Collection[int]) -> int:
    """Return the free memory of all GPUs that the workers would use, in bytes."""
    if not host.which("nvidia-smi"):
        return 0
    free = _query_gpus(host, "--query-gpu=memory.free")
    used = _query_gpus(host, "--query-compute-apps=pid,used_memory") if workers else []
    used_by_workers = sum(row[1] for row in used if len(row) == 2 and row[0] in workers)
    return (sum(row[0] for row in free) + used_by_workers) * MIB


def _query_gpus(host: Host, query: str) -> list[list[int]]:
    """Return rows of numbers from nvidia-smi. Rows with anything else ("[N/A]") are left out."""
    result = host.run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if result.code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.out.splitlines()]
    return [[int(cell) for cell in row] for row in rows if all(cell.isdecimal() for cell in row)]


# ------------------------------------------------------------------------ room
# Decide which pairs are in memory together, and which one is evicted for a new pair.
#
# No processes are handled here. A pair takes what its load planned: weights, caches, buffers, and the cache
# for prompts without a slot. A file that two pairs map counts once. The least recently used pair is evicted
# first, but never one that is answering or that is to be kept.


@dataclass(frozen=True, slots=True)
class PairMemory:
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
    def from_plan(
        cls, pair: PairFiles, pid: int, planned: LoadPlan, n_ctx: int, spare: int = 0
    ) -> PairMemory:
        """Return the memory of a loaded pair from its plan. Reads the sizes of its files.

        `n_ctx` is the requested context in tokens, 0 for any.
        """
        from localspec.registry.header.fit import RUNTIME_BYTES

        files, plan = file_sizes(pair), planned.plan
        if plan is None:  # its headers could not be read
            needed = sum(files.values()) + RUNTIME_BYTES
            return cls(pair.name, pid, needed, 0, needed, files)
        from localspec.registry.header.fit import USUAL_CONTEXT

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
        """Measure this machine."""
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
        from localspec.registry.header.fit import FreeMemory

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
        from localspec.registry.header.fit import RUNTIME_BYTES, FreeMemory

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


@dataclass(frozen=True, slots=True)
class ResidentPairs:
    """The pairs in memory, each list with the least recently used first.

    driven_out: pairs that were evicted lately and may be loaded again, the most recently used first.
    """

    kept: Sequence[PairMemory] = ()
    idle: Sequence[PairMemory] = ()
    busy: Sequence[PairMemory] = ()
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
) -> LoadPlan | ShrinkCaches | EvictPair | WaitForPair | DoesNotFit:
    """Decide how a pair can be loaded: its plan, which pairs give up unused memory, or which one leaves."""
    decision = _decide_without_sparing(plans, standing, snapshot, budget)
    spares = [holding.name for holding in standing.all if holding.spare > 0]
    if not spares or isinstance(decision, LoadPlan):
        return decision
    if_spared = _decide_without_sparing(plans, standing.without_spare, snapshot, budget)
    return ShrinkCaches(spares) if isinstance(if_spared, LoadPlan) else decision


def _decide_without_sparing(
    plans: LoadPlanner, standing: ResidentPairs, snapshot: MemorySnapshot, budget: int
) -> LoadPlan | EvictPair | WaitForPair | DoesNotFit:
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
            break
    else:
        count = len(movable)
    idle = [holding for holding in movable[:count] if holding in standing.idle]
    return EvictPair(idle[0].name) if idle else WaitForPair(movable[0].name)


def _is_as_good(planned: LoadPlan, best: LoadPlan, plans: LoadPlanner) -> bool:
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


def _refusal(
    plans: LoadPlanner, memory: AvailableMemory, standing: ResidentPairs, budget: int
) -> str:
    needed, free = plans.min_bytes(), max(memory.free.ram, memory.free.vram)
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
