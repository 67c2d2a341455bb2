"""What a pair is doing: unloaded, loading or ready, and how that is told."""

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

_LEAST_ROOM = 8  # one part of the room for prompts without a slot stays


@dataclass(frozen=True, slots=True)
class Engine:
    """A worker and what it was told to load."""

    worker: Worker
    pair: frames.PairFiles  # as it was asked for
    config: Config  # as it was then
    mapped: Mapped  # the files as they were at the load
    planned: placement.Planned
    since: float  # Unix time
    smaller: bool = False  # than planned at first, for which there was no memory

    @property
    def spare(self) -> int:
        """Bytes of its room for prompts without a slot that it could do without, as far as it is empty."""
        plan = self.planned.plan
        return plan.prefixes - self.least_room if plan else 0

    @property
    def lacks(self) -> int:
        """Bytes of that room that it has given up."""
        plan = self.planned.plan
        return self.planned.settings.prefix_bytes - plan.prefixes if plan else 0

    @property
    def least_room(self) -> int:
        """Of what it had at its load, what it keeps of that room though it is empty."""
        return self.planned.settings.prefix_bytes // _LEAST_ROOM

    def with_room(self, prefixes: int) -> Engine:
        """The same with so many bytes for prompts without a slot."""
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
    """`engine`: the one before until that is told to end, then none, then the one that loads. `begun`: there
    is room for it; until then `behind` is the pair that it waits for, where there is one.
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
    """As a person is told. `note`: what counts for every pair."""
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
                costs=_costs(info.profile),
            )


def _costs(profile: Mapping[str, Any]) -> PassCosts | None:
    """What a worker says passes cost; an encoder has none that write."""
    if not profile.get("target_ms"):
        return None
    overhead = float(profile.get("overhead_ms") or 0.0)
    return PassCosts(_table(profile, "target_ms"), _table(profile, "draft_ms"), overhead)


def _table(profile: Mapping[str, Any], name: str) -> dict[int, float]:
    return {int(width): float(ms) for width, ms in (profile.get(name) or {}).items()}


def waits_for(
    name: str, state: State, pair: frames.PairFiles, following: frames.PairFiles | None
) -> Progress:
    """What a request for `pair` waits for. `following`: other files of the name, which come next."""
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
