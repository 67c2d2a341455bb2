"""Plan the load of a pair so that it fits in memory: context, draft, and layers on the GPU.

The plan is computed from the files' headers and from the memory that the pair could have now.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker.queue.admission import EDITOR_PLACES
from localspec.paths import Paths
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.pairs import FitView
from localspec.protocol.settings import SHORT

if TYPE_CHECKING:
    from localspec.machine import Host
    from localspec.registry.header.fit import Fit, Memory
    from localspec.registry.header.model import Model
    from localspec.registry.header.need import Load

MIB = 1 << 20
# The longest pass, by its measured cost, as a fraction of the watchdog's time.
PASS_SHARE = 0.25
# The fraction of a Mac's memory that its GPU may use (about Metal's recommended working set).
MAC_SHARE = 0.7


class Planned(NamedTuple):
    """The pair and the settings for the engine.

    notes: sentences on what had to be reduced.
    beyond: why the requested settings do not fit, or "".
    plan: the expected use of memory, None if it is unknown.
    """

    pair: PairFiles
    settings: EngineSettings
    notes: tuple[str, ...] = ()
    beyond: str = ""
    plan: FitView | None = None


def settings(config: Config, paths: Paths, *, safe_mode: bool = False) -> EngineSettings:
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
        depth=None if config.depth < 0 else config.depth,
        pass_s=config.watchdog * PASS_SHARE,
        gap_s=config.longest_gap / 1e3,
        turns=str(paths.runtime / "turns"),
        state_dir=str(paths.state),
        prefix_bytes=config.prefix_memory * MIB,
        states_dir=str(paths.states),
        states_bytes=config.prefix_disk * MIB,
    )


def costs(pair: PairFiles, settings: EngineSettings, workers: Collection[int]) -> list[str]:
    """Return sentences on the settings that a pair would not get here.

    The memory of the workers with these pids counts as free.
    """
    from localspec import machine

    free = free_memory(machine.Host.here(), workers)
    planned = plan(pair, settings, free, machine.installed_backend())
    return [note for note in (planned.beyond, *planned.notes) if note]


def plan(pair: PairFiles, settings: EngineSettings, free: Memory, built: str | None) -> Planned:
    """Fit a pair into the free memory. `built` is the backend that llama.cpp was built for."""
    return Plans(pair, settings, built).within(free)


class Plans:
    """A pair's plans for any amount of memory. Its headers are read once, at creation.

    Files that cannot be read, and pairs that seem too large, are left to the engine. It reports what is wrong
    with a file, and tries smaller plans if memory really runs out.
    """

    def __init__(self, pair: PairFiles, settings: EngineSettings, built: str | None) -> None:
        from localspec.registry.header.model import read_local_model

        self.pair = pair
        self.settings = settings
        self._built = built
        self._models: tuple[Model, Model | None] | None = None
        with contextlib.suppress(errors.LocalspecError):
            draft = read_local_model(Path(pair.draft), as_draft=True) if pair.draft else None
            target = replace(read_local_model(Path(pair.target)), pooling=pair.pooling)
            self._models = target, draft

    @classmethod
    def here(cls, pair: PairFiles, settings: EngineSettings) -> Plans:
        """Return the plans for the llama.cpp of this machine."""
        from localspec import machine

        return cls(pair, settings, machine.installed_backend())

    def halved(self, failed: Planned) -> tuple[Plans, str]:
        """Return plans with half the context of a plan that ran out of memory, and a note about it."""
        n_ctx = failed.settings.n_ctx // 2
        note = (
            f"The context has {n_ctx} tokens: with {2 * n_ctx}, memory ran out while the pair was loaded. "
            "To load it with another one: localspec config set context N"
        )
        smaller = copy.copy(self)
        smaller.settings = msgspec.structs.replace(self.settings, n_ctx=n_ctx)
        return smaller, note

    def within(self, free: Memory) -> Planned:
        """Return the plan for the given amount of memory."""
        from localspec.registry.header import fit, need

        pair, settings = self.pair, self.settings
        if self._models is None:
            return Planned(pair, settings)
        target, draft = self._models
        # Only NVIDIA's driver reports the free memory. A Mac's GPU shares the machine's memory.
        counted = self._built in ("cuda", "vulkan") and settings.n_gpu_layers < 0 and free.vram > 0
        memory = free if counted else fit.Memory(free.ram)
        try:
            chosen = fit.fit(target, draft, memory, self._load(settings))
        except errors.DoesNotFit as error:
            if pair.rpc:  # only the engine finds out how much memory the other machines have
                return Planned(pair, msgspec.structs.replace(settings, rpc_needed=True))
            return Planned(pair, settings, beyond=error.message)
        exact = 0
        if not settings.exact:
            load = msgspec.structs.replace(settings, n_ctx=chosen.context, exact=True)
            exact = need.need_of_target(target, self._load(load)).total - chosen.target.total
        lacks = exact if chosen.needed + exact > chosen.free else 0
        changed = msgspec.structs.replace(settings, exact_lacks=lacks)
        return _apply_fit(pair, changed, chosen, counted)

    def _load(self, settings: EngineSettings) -> Load:
        return load_of(settings, self._built)

    def least(self) -> int:
        """Return the bytes that the smallest possible plan needs."""
        from localspec.registry.header import fit

        if self._models is None:
            return sum(file_sizes(self.pair).values())
        target, _ = self._models
        n_ctx = self.settings.n_ctx or target.context
        context = min(n_ctx, target.context, fit.SMALLEST_CONTEXT)
        return fit.needed(target, None, replace(self._load(self.settings), context=context))


def file_sizes(pair: PairFiles) -> dict[str, int]:
    """Return the sizes of the existing files in bytes, shards included."""
    from localspec.registry.header.model import shard_paths

    sizes: dict[str, int] = {}
    for name in filter(None, (pair.target, pair.draft)):
        with contextlib.suppress(errors.LocalspecError, OSError):
            sizes |= {str(path): path.stat().st_size for path in shard_paths(Path(name))}
    return sizes


def load_of(settings: EngineSettings, built: str | None) -> Load:
    """Return the settings that cost memory. `built` is the backend, as for `plan`."""
    from localspec.registry.header.need import Load

    on_cpu = built in (None, "cpu") or settings.n_gpu_layers == 0
    # Which attention this CPU uses is only known once llama.cpp is loaded, so assume the larger one.
    attention = settings.on_cpu(SHORT + 1, wide=False) if on_cpu else settings.flash_attention
    return Load(
        context=settings.n_ctx,
        kv_types=settings.kv_types,
        parallel=settings.parallel,
        attention=attention,
        chosen=attention != settings.flash_attention,
        exact=settings.exact,
        prefixes=settings.prefix_bytes,
        cuda=built == "cuda" and not on_cpu,
    )


def _apply_fit(pair: PairFiles, settings: EngineSettings, chosen: Fit, counted: bool) -> Planned:
    from localspec.registry.store.details import fit_view

    changes = {"n_ctx": chosen.context, "prefix_bytes": chosen.prefixes}
    if counted:
        changes["n_gpu_layers"] = chosen.gpu_layers
        changes["draft_gpu_layers"] = chosen.draft_gpu_layers
    if not chosen.draft:
        pair = msgspec.structs.replace(pair, draft=None)
    changed = msgspec.structs.replace(settings, **changes)
    return Planned(pair, changed, chosen.notes, chosen.beyond, fit_view(chosen))


def free_memory(host: Host, workers: Collection[int] = ()) -> Memory:
    """Return the free memory, as if the engine workers with these pids were unloaded."""
    from localspec.machine import available_bytes, memory_bytes
    from localspec.registry.header.fit import Memory

    if host.system == "Darwin":
        return Memory(int(memory_bytes() * MAC_SHARE), 0)
    ram = available_bytes(host) + sum(held(host, pid) for pid in workers)
    return Memory(ram, _vram(host, workers))


def held(host: Host, worker: int) -> int:
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
    return [[int(cell) for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
