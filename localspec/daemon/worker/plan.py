"""How a pair is loaded so that it fits: context, draft and layers on the GPU, from its headers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from localspec import errors
from localspec.daemon.worker.memory import Free
from localspec.protocol.frames import EngineSettings, PairFiles

if TYPE_CHECKING:
    from localspec.registry.header.fit import Fit
    from localspec.registry.header.model import Model

# What the engine takes where nothing is asked (engine.pair.DEFAULT_CONTEXT).
USUAL_CONTEXT = 8192


class Planned(NamedTuple):
    """What to hand to the engine; `notes` say in sentences what had to give."""

    pair: PairFiles
    settings: EngineSettings
    notes: tuple[str, ...] = ()


def plan(pair: PairFiles, settings: EngineSettings, free: Free, built: str | None) -> Planned:
    """Fit a pair into the memory that is free. `built`: the backend llama.cpp is built for.

    Files that cannot be read, and pairs that seem to need more than there is, are left to the
    engine: it says what is wrong with a file, and tries smaller plans where memory really runs out.
    """
    from localspec.registry.header import fit
    from localspec.registry.header.model import read_local_model

    # Only NVIDIA's driver tells how much is free; a Mac's GPU shares the machine's memory.
    counted = built in ("cuda", "vulkan") and settings.n_gpu_layers < 0 and free.vram > 0
    memory = fit.Memory(free.ram, free.vram if counted else 0)
    try:
        target = read_local_model(Path(pair.target))
        draft = read_local_model(Path(pair.draft)) if pair.draft else None
        wanted = settings.n_ctx or USUAL_CONTEXT
        chosen = fit.fit(target, draft, memory, context=wanted, kv_type=settings.type_kv)
    except errors.LocalspecError:
        return Planned(pair, settings)
    return _applied(pair, settings, chosen, counted, _trained(target, draft))


def _trained(target: Model, draft: Model | None) -> int:
    from localspec.registry.header.fit import longest_context

    return longest_context(target, draft)


def _applied(
    pair: PairFiles, settings: EngineSettings, chosen: Fit, counted: bool, trained: int
) -> Planned:
    changes: dict[str, int] = {}
    if chosen.context < min(settings.n_ctx or USUAL_CONTEXT, trained):
        changes["n_ctx"] = chosen.context
    if counted:
        changes["n_gpu_layers"] = chosen.gpu_layers
        changes["draft_gpu_layers"] = chosen.draft_gpu_layers
    if not chosen.draft:
        pair = msgspec.structs.replace(pair, draft=None)
    # A context longer than the models know is cut by the engine as ever.
    notes = tuple(note for note in chosen.notes if not note.startswith("The models know"))
    return Planned(pair, msgspec.structs.replace(settings, **changes), notes)
