"""The states of a pair (unloaded, loading, ready), and how they are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from localspec.config import Config
from localspec.daemon.worker import placement
from localspec.daemon.worker.death import Mapped
from localspec.daemon.worker.process import Worker
from localspec.protocol import frames
from localspec.protocol.answers import PairStatus, PassCosts, Progress

# An eighth of the cache for prompts without a slot is kept even if another pair needs memory.
_MIN_CACHE_DIVISOR = 8


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker and the load that it got."""

    worker: Worker
    pair: frames.PairFiles  # as requested, before the plan changed it
    config: Config  # at the load
    mapped: Mapped  # the state of the files at the load
    planned: placement.Planned
    since: float  # Unix time
    smaller: bool = False  # whether a larger plan ran out of memory before

    @property
    def spare(self) -> int:
        """Bytes of its cache for prompts without a slot that it could give up, as far as they are unused."""
        plan = self.planned.plan
        return plan.prefixes - self.least_room if plan else 0

    @property
    def lacks(self) -> int:
        """Bytes of that cache that it has given up."""
        plan = self.planned.plan
        return self.planned.settings.prefix_bytes - plan.prefixes if plan else 0

    @property
    def least_room(self) -> int:
        """Bytes of that cache, as configured at the load, that it keeps even if they are unused."""
        return self.planned.settings.prefix_bytes // _MIN_CACHE_DIVISOR

    def with_room(self, prefixes: int) -> Engine:
        """Return the engine with `prefixes` bytes for prompts without a slot."""
        plan = self.planned.plan
        assert plan is not None
        needed = plan.needed + prefixes - plan.prefixes
        changed = msgspec.structs.replace(plan, prefixes=prefixes, needed=needed)
        return replace(self, planned=self.planned._replace(plan=changed))

    @property
    def safe_mode(self) -> bool:
        return not self.planned.settings.extra_buffers


@dataclass(frozen=True, slots=True)
class Unloaded:
    """No worker."""

    engine: None = None


@dataclass(slots=True)
class Loading:
    """A load.

    `engine` is the previous one until it is told to end, then None, then the one that loads. `begun` is set
    once there is memory for the load. Until then `behind` is the pair that it waits for, if any.
    """

    pair: frames.PairFiles
    task: asyncio.Task[None]
    engine: Engine | None
    begun: bool = False
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    engine: Engine
    info: frames.Loaded


State = Unloaded | Loading | Ready


def told(name: str, state: State, note: str | None) -> PairStatus:
    """Return the status of a pair. `note` is one that applies to every pair."""
    match state:
        case Unloaded():
            return PairStatus(name, "unloaded", note=note)
        case Loading(begun=False):
            return PairStatus(name, "loading", "waiting", 0.0, note=note)
        case Loading(engine=engine):
            progress = engine.worker.progress if engine else None
            stage, fraction = (progress.stage, progress.fraction) if progress else ("starting", 0.0)
            pid = engine.worker.pid if engine else None
            return PairStatus(name, "loading", stage, fraction, note=note, pid=pid)
        case Ready(engine, info):
            plan = engine.planned.plan
            return PairStatus(
                name,
                "ready",
                target=info.target_description,
                draft=info.draft_description,
                n_ctx=info.n_ctx,
                backend=info.backend,
                plan=plan,
                note=note or " ".join((*engine.planned.notes, *info.notes)) or info.speculation,
                pid=engine.worker.pid,
                since=engine.since,
                memory=plan.needed if plan else None,
                costs=_pass_costs(info.profile),
            )


def _pass_costs(profile: Mapping[str, Any]) -> PassCosts | None:
    """Return the costs of a pass that the worker measured. An encoder generates nothing, so has none."""
    if not profile.get("target_ms"):
        return None
    overhead = float(profile.get("overhead_ms") or 0.0)
    return PassCosts(
        _milliseconds_by_width(profile, "target_ms"),
        _milliseconds_by_width(profile, "draft_ms"),
        overhead,
    )


def _milliseconds_by_width(profile: Mapping[str, Any], name: str) -> dict[int, float]:
    return {int(width): float(ms) for width, ms in (profile.get(name) or {}).items()}


def waits_for(
    name: str, state: State, pair: frames.PairFiles, following: frames.PairFiles | None
) -> Progress:
    """Return what a request for `pair` waits for. `following` are the next files of the name."""
    match state:
        case Loading(behind=behind) if behind or state.pair != pair:
            return Progress("waiting", behind or name)
        case Loading():
            return Progress("loading", name, told(name, state, None).progress or 0.0)
        case Unloaded():
            return Progress("loading", name)
        case Ready(engine, _) if engine.pair != pair or following not in (None, pair):
            return Progress("waiting", name)
    return Progress("reading", name)
