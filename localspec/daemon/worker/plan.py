"""Plan the load of a pair so that it fits in memory: settings, context, draft, and layers on the GPU.

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
from localspec.daemon.worker.queue import EDITOR_PLACES
from localspec.files import write_atomically
from localspec.paths import Paths, read_file
from localspec.protocol.frames import EngineSettings, PairFiles, PassCosts, PromptCost
from localspec.protocol.pairs import FitView, ForecastView
from localspec.protocol.settings import SHORT_CONTEXT_TOKENS
from localspec.registry.header import fit
from localspec.registry.header.fit import FreeMemory, LoadOptions
from localspec.registry.header.model import ModelInfo, read_local_model, shard_paths
from localspec.registry.header.projector import projector_bytes
from localspec.registry.header.rate import Placement, RateEstimate, forecast
from localspec.registry.header.speeds import (
    MAX_RECORDS,
    MEASURED_ROWS,
    READING,
    SPEEDS_FILE,
    LoadRecord,
    Part,
    load_speeds,
)
from localspec.registry.store.local import fit_view

if TYPE_CHECKING:
    from localspec.machine import Host

MIB = 1 << 20
# The longest pass, by its measured cost, as a fraction of the watchdog's time.
PASS_TIME_FRACTION = 0.25
# The fraction of a Mac's memory that its GPU may use (about Metal's recommended working set).
MAC_GPU_MEMORY_FRACTION = 0.7


class ExpectedPasses(NamedTuple):
    """What the passes of a planned load will read, and how fast it should be."""

    forecast: ForecastView | None
    parts: tuple[Part, ...]
    layers: float
    draft_parts: tuple[Part, ...]
    draft_layers: int


class LoadPlan(NamedTuple):
    """The pair and the settings for the engine."""

    pair: PairFiles
    settings: EngineSettings
    notes: tuple[str, ...] = ()  # sentences on what had to be reduced
    beyond: str = ""  # why the requested settings do not fit, or ""
    plan: FitView | None = None  # the expected use of memory, None if it is unknown
    passes: ExpectedPasses | None = None  # None if it is not known where the layers will be

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

    planner = LoadPlanner(pair, settings, machine.installed_backend())
    planned = planner.plan(free_memory(workers=workers))
    return [note for note in (planned.beyond, *planned.notes) if note]


class LoadPlanner:
    """A pair's plans for any amount of memory. Its headers are read once, at creation.

    Files that cannot be read, and pairs that seem too large, are left to the engine. It reports what is wrong
    with a file, and tries smaller plans if memory really runs out.
    """

    def __init__(self, pair: PairFiles, settings: EngineSettings, built: str | None) -> None:
        """Read the headers. `built` is the backend that llama.cpp was built for."""
        self.pair = pair
        self.settings = settings
        self._built = built
        self._speeds = load_speeds(settings.state_dir)
        self._models: tuple[ModelInfo, ModelInfo | None] | None = None
        with contextlib.suppress(errors.LocalspecError):
            draft = read_local_model(Path(pair.draft), as_draft=True) if pair.draft else None
            target = replace(read_local_model(Path(pair.target)), pooling=pair.pooling)
            self._models = target, draft

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
        if settings.exact is not True:
            load = msgspec.structs.replace(settings, n_ctx=chosen.context, exact=True)
            exact = fit.need_of_target(target, self._load(load)).total - chosen.target.total
        lacks = exact if chosen.needed + exact > chosen.free else 0
        changed = msgspec.structs.replace(settings, exact_lacks=lacks)
        if not chosen.draft and fit.has_drafts(target, draft):
            changed = msgspec.structs.replace(changed, own_heads=False)
        changes: dict[str, int] = {"n_ctx": chosen.context, "prefix_bytes": chosen.prefixes}
        if counted:
            changes["n_gpu_layers"] = chosen.gpu_layers
            changes["draft_gpu_layers"] = chosen.placed.draft_layers
            changes["cpu_experts"] = chosen.placed.cpu_experts
            changes["n_ubatch"] = chosen.rows if chosen.rows > settings.n_batch else 0
            changes["draft_cpu_experts"] = chosen.placed.draft_cpu_experts
        changed = msgspec.structs.replace(changed, **changes)
        if not chosen.draft:
            pair = msgspec.structs.replace(pair, draft=None, other_drafts=())
        passes = None
        if counted or self._built == "cpu":
            placed = chosen.placed if counted else Placement(0, draft_layers=0, drafts=chosen.draft)
            estimate = RateEstimate(target, draft, self._speeds)
            passes = ExpectedPasses(
                forecast(estimate, placed),
                estimate.list_parts(placed),
                estimate.count_parts(placed),
                estimate.list_draft_parts(placed),
                draft.layers if draft else 0,
            )
        return LoadPlan(pair, changed, chosen.notes, chosen.beyond, fit_view(chosen), passes)

    def _load(self, settings: EngineSettings) -> LoadOptions:
        projector = 0
        with contextlib.suppress(OSError):
            if self.pair.projector:
                projector = projector_bytes(Path(self.pair.projector).stat().st_size)
        load = memory_load(settings, self._built)
        return replace(load, speeds=self._speeds, projector=projector)

    def min_bytes(self) -> int:
        """Return the bytes that the smallest possible plan needs."""
        if self._models is None:
            return sum(file_sizes(self.pair).values())
        target, _ = self._models
        n_ctx = self.settings.n_ctx or target.context
        context = min(n_ctx, target.context, fit.SMALLEST_CONTEXT)
        return fit.min_need(target, replace(self._load(self.settings), context=context))


def file_sizes(pair: PairFiles) -> dict[str, int]:
    """Return the sizes of the existing files in bytes, shards included."""
    sizes: dict[str, int] = {}
    for name in filter(None, (pair.target, pair.draft)):
        with contextlib.suppress(errors.LocalspecError, OSError):
            sizes |= {str(path): path.stat().st_size for path in shard_paths(Path(name))}
    return sizes


def memory_load(settings: EngineSettings, built: str | None) -> LoadOptions:
    """Return the settings that cost memory. `built` is the backend, as for `plan`."""
    on_cpu = built in (None, "cpu") or settings.n_gpu_layers == 0
    # The context is not chosen yet; `fit` knows that a short one has flash attention.
    attention = (
        settings.cpu_flash_attention(SHORT_CONTEXT_TOKENS + 1)
        if on_cpu
        else settings.flash_attention
    )
    return LoadOptions(
        context=settings.n_ctx,
        kv_types=settings.kv_types,
        parallel=settings.parallel,
        attention=attention,
        chosen=attention != settings.flash_attention,
        exact=settings.exact is True,
        prefixes=settings.prefix_bytes,
        cuda=built == "cuda" and not on_cpu,
        speeds=load_speeds(settings.state_dir),
    )


def learn_load(planned: LoadPlan, costs: PassCosts | None) -> None:
    """Learn from the costs of passes that a load has measured."""
    for record in make_records(planned, costs):
        _store_record(planned, record)


def make_records(planned: LoadPlan, costs: PassCosts | None) -> list[LoadRecord]:
    """Return the records of a load's target and draft, as far as its passes were measured."""
    pair, passes = planned.pair, planned.passes
    if passes is None or costs is None or 1 not in costs.target_ms:
        return []
    ms = {str(rows): costs.target_ms[rows] for rows in MEASURED_ROWS if rows in costs.target_ms}
    ms["1"] += costs.overhead_ms
    records = [LoadRecord(pair.target, passes.parts, passes.layers, 1, ms)]
    if pair.draft and passes.draft_parts and 1 in costs.draft_ms:
        ms = {"1": costs.draft_ms[1]}
        records.append(LoadRecord(pair.draft, passes.draft_parts, passes.draft_layers, 0, ms))
    return records


def learn_answer(planned: LoadPlan, plain_ms: float | None, reading: PromptCost | None) -> None:
    """Learn from answers, so that the next forecasts are better.

    plain_ms: of a token without drafts. reading: what tokens of prompts take.
    """
    ms = {"1": plain_ms} if plain_ms else {}
    if reading:
        ms[READING] = 1e3 * reading.token_s
    if (passes := planned.passes) and ms:
        record = LoadRecord(planned.pair.target, passes.parts, passes.layers, 1, ms)
        _store_record(planned, record)


def _store_record(planned: LoadPlan, record: LoadRecord) -> None:
    """Store a record. What an earlier one of the same model has measured as well counts half."""
    state_dir = planned.settings.state_dir
    if not state_dir or planned.pair.rpc:
        return
    file, records = Path(state_dir) / SPEEDS_FILE, list[LoadRecord]()
    with contextlib.suppress(OSError, ValueError):
        records = msgspec.json.decode(read_file(file), type=list[LoadRecord])
    known = next((each for each in records if each.name == record.name), None)
    if known and known.parts == record.parts:
        ms = {key: (known.ms.get(key, value) + value) / 2 for key, value in record.ms.items()}
        record = msgspec.structs.replace(record, ms=known.ms | ms)
    records = [*(each for each in records if each is not known), record][-MAX_RECORDS:]
    with contextlib.suppress(OSError):  # a full disk costs a good estimate, not the pair
        write_atomically(file, msgspec.json.encode(records), sync=False)


def free_memory(host: Host | None = None, workers: Collection[int] = ()) -> FreeMemory:
    """Return the free memory, as if the engine workers with these pids were unloaded."""
    from localspec.machine import Host, available_bytes, memory_bytes

    host = host or Host.current()
    if host.system == "Darwin":
        return FreeMemory(int(memory_bytes() * MAC_GPU_MEMORY_FRACTION), 0)
    ram = available_bytes(host) + sum(worker_bytes(host, pid) for pid in workers)
    if not host.which("nvidia-smi"):
        return FreeMemory(ram, 0)
    free = sum(row[0] for row in _query_gpus(host, "--query-gpu=memory.free"))
    used = _query_gpus(host, "--query-compute-apps=pid,used_memory") if workers else []
    used_by_workers = sum(row[1] for row in used if len(row) == 2 and row[0] in workers)
    return FreeMemory(ram, (free + used_by_workers) * MIB)


def worker_bytes(host: Host, worker: int) -> int:
    """Return the bytes of the worker's caches and buffers. Mapped weights count as available already."""
    match = re.search(r"^RssAnon:\s*(\d+) kB", host.read(f"/proc/{worker}/status"), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def _query_gpus(host: Host, query: str) -> list[list[int]]:
    """Return rows of numbers from nvidia-smi. Rows with anything else ("[N/A]") are left out."""
    result = host.run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if result.code != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.out.splitlines()]
    return [[int(cell) for cell in row] for row in rows if all(cell.isdecimal() for cell in row)]
