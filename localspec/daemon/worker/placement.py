"""How a pair is loaded so that it fits: context, draft and layers on the GPU.

From its headers, and from how much memory it could have on this machine now.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from localspec import errors
from localspec.config import Config
from localspec.daemon.worker.admission import EDITOR_PLACES
from localspec.paths import Paths
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.pairs import FitView

if TYPE_CHECKING:
    from localspec.machine import Host
    from localspec.registry.header.fit import Fit, Memory
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
        state_dir=str(paths.state),
        prefix_bytes=config.prefix_memory * MIB,
        states_dir=str(paths.states),
        states_bytes=config.prefix_disk * MIB,
    )


def plan_here(pair: PairFiles, settings: EngineSettings) -> Planned:
    """`plan` for this machine as it is now."""
    from localspec import machine

    return plan(pair, settings, free_memory(machine.Host.here()), machine.installed_backend())


def smaller_here(pair: PairFiles, settings: EngineSettings, before: Planned) -> Planned:
    """`plan_here` with half the context of a plan for which memory did not suffice."""
    half = before.settings.n_ctx // 2
    planned = plan_here(pair, msgspec.structs.replace(settings, n_ctx=half))
    said = (
        f"The context has {half} tokens: with {2 * half}, memory ran out while the pair was loaded. "
        "To load it with another one: localspec config set context N"
    )
    return planned._replace(notes=(*planned.notes, said))


def costs(pair: PairFiles, settings: EngineSettings, worker: int | None) -> list[str]:
    """What of its settings a pair would not get here, in sentences; the worker of that pid ends first."""
    from localspec import machine

    free = free_memory(machine.Host.here(), worker)
    planned = plan(pair, settings, free, machine.installed_backend())
    return [each for each in (planned.beyond, *planned.notes) if each]


def plan(pair: PairFiles, settings: EngineSettings, free: Memory, built: str | None) -> Planned:
    """Fit a pair into the memory that is free. `built`: the backend llama.cpp is built for.

    Files that cannot be read, and pairs that seem to need more than there is, are left to the
    engine: it says what is wrong with a file, and tries smaller plans where memory really runs out.
    """
    from localspec.registry.header import fit, need
    from localspec.registry.header.model import read_local_model

    # Only NVIDIA's driver tells how much is free; a Mac's GPU shares the machine's memory.
    counted = built in ("cuda", "vulkan") and settings.n_gpu_layers < 0 and free.vram > 0
    memory = free if counted else fit.Memory(free.ram)
    try:
        target = replace(read_local_model(Path(pair.target)), pooling=pair.pooling)
        draft = read_local_model(Path(pair.draft), as_draft=True) if pair.draft else None
        chosen = fit.fit(target, draft, memory, load_of(settings))
    except errors.DoesNotFit as error:
        return Planned(pair, settings, beyond=error.message)
    except errors.LocalspecError:
        return Planned(pair, settings)
    exact = 0
    if not settings.exact:
        load = msgspec.structs.replace(settings, n_ctx=chosen.context, exact=True)
        exact = need.need_of_target(target, load_of(load)).total - chosen.target.total
    lacks = exact if chosen.needed + exact > chosen.free else 0
    return _applied(pair, msgspec.structs.replace(settings, exact_lacks=lacks), chosen, counted)


def load_of(settings: EngineSettings) -> Load:
    """What of the settings costs memory."""
    from localspec.registry.header.need import Load

    return Load(
        context=settings.n_ctx,
        kv_types=settings.kv_types,
        parallel=settings.parallel,
        flash_attention=settings.flash_attention != "off",
        exact=settings.exact,
        prefixes=settings.prefix_bytes,
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


def free_memory(host: Host, worker: int | None = None) -> Memory:
    """What is free, counting what the engine worker of this pid holds: it would be unloaded first."""
    from localspec.machine import available_bytes, memory_bytes
    from localspec.registry.header.fit import Memory

    if host.system == "Darwin":
        return Memory(int(memory_bytes() * MAC_SHARE), 0)
    ram = available_bytes(host)
    return Memory(ram + (_held(host, worker) if worker else 0), _vram(host, worker))


def _held(host: Host, worker: int) -> int:
    """Caches and buffers of the worker; mapped weights count as available already."""
    found = re.search(r"^RssAnon:\s*(\d+) kB", host.read(f"/proc/{worker}/status"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _vram(host: Host, worker: int | None) -> int:
    """Free memory of the GPUs the worker would see, all together."""
    if not host.which("nvidia-smi"):
        return 0
    free = _query(host, "--query-gpu=memory.free")
    held = _query(host, "--query-compute-apps=pid,used_memory") if worker else []
    ours = sum(row[1] for row in held if len(row) == 2 and row[0] == worker)
    return (sum(row[0] for row in free) + ours) * MIB


def _query(host: Host, what: str) -> list[list[int]]:
    """Rows of numbers; rows with anything else ("[N/A]") are left out."""
    asked = host.run(["nvidia-smi", what, "--format=csv,noheader,nounits"])
    if asked.code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.out.splitlines()]
    return [[int(cell) for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
