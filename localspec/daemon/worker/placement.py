"""How a pair is loaded so that it fits: context, draft and layers on the GPU.

From its headers, and from how much memory it could have on this machine now.
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
# Of the watchdog's time: what a pass of a slow engine may take by its measured costs.
PASS_SHARE = 0.25
# Of a Mac's memory its GPU may take about this share (Metal's recommended working set).
MAC_SHARE = 0.7


class Planned(NamedTuple):
    """What to hand to the engine; `notes` say in sentences what had to give, and `beyond` where more was
    asked for than there can be. plan: what is expected to be used; None where that cannot be told.
    """

    pair: PairFiles
    settings: EngineSettings
    notes: tuple[str, ...] = ()
    beyond: str = ""
    plan: FitView | None = None


def settings(config: Config, paths: Paths, *, safe_mode: bool = False) -> EngineSettings:
    """What the configuration says of a load."""
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
    """What of its settings a pair would not get here, in sentences; the workers of those pids end first."""
    from localspec import machine

    free = free_memory(machine.Host.here(), workers)
    planned = plan(pair, settings, free, machine.installed_backend())
    return [each for each in (planned.beyond, *planned.notes) if each]


def plan(pair: PairFiles, settings: EngineSettings, free: Memory, built: str | None) -> Planned:
    """Fit a pair into the memory that is free. `built`: the backend llama.cpp is built for."""
    return Plans(pair, settings, built).within(free)


class Plans:
    """A pair's plans by how much memory there is; its headers are read once, when this is made.

    Files that cannot be read, and pairs that seem to need more than there is, are left to the
    engine: it says what is wrong with a file, and tries smaller plans where memory really runs out.
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
        """For this machine's llama.cpp."""
        from localspec import machine

        return cls(pair, settings, machine.installed_backend())

    def halved(self, before: Planned) -> tuple[Plans, str]:
        """Those with half the context of a plan for which memory did not suffice, and a note that says so."""
        half = before.settings.n_ctx // 2
        said = (
            f"The context has {half} tokens: with {2 * half}, memory ran out while the pair was loaded. "
            "To load it with another one: localspec config set context N"
        )
        fewer = copy.copy(self)
        fewer.settings = msgspec.structs.replace(self.settings, n_ctx=half)
        return fewer, said

    def within(self, free: Memory) -> Planned:
        """The plan for so much memory."""
        from localspec.registry.header import fit, need

        pair, settings = self.pair, self.settings
        if self._models is None:
            return Planned(pair, settings)
        target, draft = self._models
        # Only NVIDIA's driver tells how much is free; a Mac's GPU shares the machine's memory.
        counted = self._built in ("cuda", "vulkan") and settings.n_gpu_layers < 0 and free.vram > 0
        memory = free if counted else fit.Memory(free.ram)
        try:
            chosen = fit.fit(target, draft, memory, self._load(settings))
        except errors.DoesNotFit as error:
            if pair.rpc:  # how much the other machines hold, the engine finds out
                return Planned(pair, msgspec.structs.replace(settings, rpc_needed=True))
            return Planned(pair, settings, beyond=error.message)
        exact = 0
        if not settings.exact:
            load = msgspec.structs.replace(settings, n_ctx=chosen.context, exact=True)
            exact = need.need_of_target(target, self._load(load)).total - chosen.target.total
        lacks = exact if chosen.needed + exact > chosen.free else 0
        changed = msgspec.structs.replace(settings, exact_lacks=lacks)
        return _applied(pair, changed, chosen, counted)

    def _load(self, settings: EngineSettings) -> Load:
        return load_of(settings, self._built)

    def least(self) -> int:
        """Bytes that the smallest of all plans needs, in whatever memory."""
        from localspec.registry.header import fit

        if self._models is None:
            return sum(file_sizes(self.pair).values())
        target, _ = self._models
        asked = self.settings.n_ctx or target.context
        context = min(asked, target.context, fit.SMALLEST_CONTEXT)
        return fit.needed(target, None, replace(self._load(self.settings), context=context))


def file_sizes(pair: PairFiles) -> dict[str, int]:
    """Bytes of the files that are there, shards among them."""
    from localspec.registry.header.model import shard_paths

    found: dict[str, int] = {}
    for name in filter(None, (pair.target, pair.draft)):
        with contextlib.suppress(errors.LocalspecError, OSError):
            found |= {str(each): each.stat().st_size for each in shard_paths(Path(name))}
    return found


def load_of(settings: EngineSettings, built: str | None) -> Load:
    """What of the settings costs memory. `built`: as of `plan`."""
    from localspec.registry.header.need import Load

    on_cpu = built in (None, "cpu") or settings.n_gpu_layers == 0
    # What this CPU's vectors choose is known when llama.cpp is loaded: until then, what needs more memory.
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


def _applied(pair: PairFiles, settings: EngineSettings, chosen: Fit, counted: bool) -> Planned:
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
    """What is free, counting what the engine workers of these pids hold, as if they were unloaded."""
    from localspec.machine import available_bytes, memory_bytes
    from localspec.registry.header.fit import Memory

    if host.system == "Darwin":
        return Memory(int(memory_bytes() * MAC_SHARE), 0)
    ram = available_bytes(host) + sum(held(host, each) for each in workers)
    return Memory(ram, _vram(host, workers))


def held(host: Host, worker: int) -> int:
    """Caches and buffers of the worker; mapped weights count as available already."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", host.read(f"/proc/{worker}/status"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _vram(host: Host, workers: Collection[int]) -> int:
    """Free memory of the GPUs the workers would see, all together."""
    if not host.which("nvidia-smi"):
        return 0
    free = _query(host, "--query-gpu=memory.free")
    used = _query(host, "--query-compute-apps=pid,used_memory") if workers else []
    ours = sum(row[1] for row in used if len(row) == 2 and row[0] in workers)
    return (sum(row[0] for row in free) + ours) * MIB


def _query(host: Host, what: str) -> list[list[int]]:
    """Rows of numbers; rows with anything else ("[N/A]") are left out."""
    asked = host.run(["nvidia-smi", what, "--format=csv,noheader,nounits"])
    if asked.code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.out.splitlines()]
    return [[int(cell) for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
