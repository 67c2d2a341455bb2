"""Decisions about memory: which pairs fit together, and which is evicted for a new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.config import Config
from localspec.daemon.worker import eviction
from localspec.daemon.worker.eviction import (
    DoesNotFit,
    EvictPair,
    MemorySnapshot,
    PairMemory,
    ResidentPairs,
    ShrinkCaches,
    WaitForPair,
    decide_eviction,
)
from localspec.daemon.worker.plan import MIB, LoadPlan, LoadPlanner, engine_settings, file_sizes
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles
from localspec.registry.header import fit
from localspec.registry.header.rate import Placement
from localspec.registry.store.local import fit_view
from tests.support import gguf_files

SETTINGS = engine_settings(Config(), Paths(*[Path("/nowhere")] * 5))
ENGINE = 128  # MiB that a worker itself takes
Files = Callable[..., PairFiles]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return a function that creates a pair of sparse files without headers; sizes in MiB."""

    def file(name: str, size: int) -> str:
        path = tmp_path / f"{name}.gguf"
        path.touch()
        os.truncate(path, size * MIB)
        return str(path)

    def create_pair(name: str, target: int, draft: tuple[str, int] | None = None) -> PairFiles:
        return PairFiles(name, file(name, target), file(*draft) if draft else None)

    return create_pair


def plan_pair(pair: PairFiles) -> LoadPlanner:
    return LoadPlanner(pair, SETTINGS, "cpu")


def hold_pair(pair: PairFiles, pid: int = 0) -> PairMemory:
    return PairMemory.from_plan(pair, pid, LoadPlan(pair, SETTINGS), 0)


def snapshot_memory(mib: int, **own: int) -> MemorySnapshot:
    return MemorySnapshot(
        fit.FreeMemory(mib * MIB), {int(pid[1:]): size * MIB for pid, size in own.items()}
    )


NAMES = "abcdef"


@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=6),
    new=st.integers(1, 900),
    kinds=st.lists(st.sampled_from(["kept", "idle", "busy"]), min_size=6, max_size=6),
    memory=st.integers(0, 4000),
    budget=st.one_of(st.just(0), st.integers(1, 4000)),
)
def test_eviction_is_least_recently_used_and_never_in_vain(
    sizes: list[int], new: int, kinds: list[str], memory: int, budget: int
) -> None:
    def create_resident(name: str, size: int) -> PairMemory:
        return PairMemory(name, 0, size * MIB, 0, size * MIB, {})

    class Fixed(LoadPlanner):
        def __init__(self) -> None:
            self.pair, self.settings = PairFiles("new", "/new"), SETTINGS

        def plan(self, free: fit.FreeMemory) -> LoadPlan:
            needed = new * MIB
            if needed > free.ram:
                return LoadPlan(self.pair, SETTINGS, beyond="It does not fit.")
            no_need = fit.NO_NEED
            placed = Placement(0, drafts=False)
            chosen = fit.MemoryFit(512, placed, needed, free.ram, no_need, no_need)
            return LoadPlan(self.pair, SETTINGS, plan=fit_view(chosen))

        def min_bytes(self) -> int:
            return new * MIB

    pairs = [create_resident(name, size) for name, size in zip(NAMES, sizes, strict=False)]
    by_kind = {kind: [pair for pair, pair_kind in zip(pairs, kinds, strict=False) if pair_kind == kind]
          for kind in ("kept", "idle", "busy")}  # fmt: skip
    memory_snapshot = MemorySnapshot(fit.FreeMemory(memory * MIB))
    residents = ResidentPairs(by_kind["kept"], by_kind["idle"], by_kind["busy"])
    evicted: list[str] = []
    while isinstance(
        decision := decide_eviction(Fixed(), residents, memory_snapshot, budget * MIB), EvictPair
    ):
        assert decision.name == residents.idle[0].name  # the least recently used idle pair
        evicted.append(decision.name)
        # Mapped weights are free again at once, because they were not the process's own.
        residents = ResidentPairs(residents.kept, residents.idle[1:], residents.busy)
    kept_mib, busy_mib = (
        sum(pair.needed for pair in by_kind[kind]) // MIB for kind in ("kept", "busy")
    )
    staying_mib = sum(pair.needed for pair in residents.all) // MIB
    if isinstance(decision, LoadPlan):
        assert not budget or staying_mib + new <= budget
        # Evicting all but the last evicted pair would not have been enough.
        if evicted:
            last_evicted = next(pair for pair in pairs if pair.name == evicted[-1])
            previous = ResidentPairs(
                residents.kept, [last_evicted, *residents.idle], residents.busy
            )
            assert isinstance(
                decide_eviction(Fixed(), previous, memory_snapshot, budget * MIB), EvictPair
            )
    elif isinstance(decision, WaitForPair):
        assert not residents.idle
        assert decision.name == residents.busy[0].name
        assert busy_mib
    else:
        assert isinstance(decision, DoesNotFit)
        assert not evicted  # the refusal comes before any eviction
        assert kept_mib or budget


def test_a_shared_file_is_counted_once(files: Files) -> None:
    first, second = (files(name, 100, ("draft", 500)) for name in ("one", "two"))
    residents = [hold_pair(first), hold_pair(second)]
    assert eviction.total_bytes(residents) == (600 + ENGINE + 100 + ENGINE) * MIB
    third = files("third", 100, ("draft", 500))
    available = snapshot_memory(2000).free_beside(file_sizes(third), residents)
    # The third pair shares the draft's 500 MiB, so they do not count against it.
    assert available.taken == 2 * (100 + ENGINE) * MIB
    unshared = snapshot_memory(2000).free_beside(file_sizes(files("other", 1)), residents)
    assert unshared.taken - available.taken == 500 * MIB


def test_reserved_memory_that_is_not_used_yet_is_not_free(files: Files) -> None:
    # 1000 MiB in all, of which the process has used 300 already.
    residents = [hold_pair(files("held", 872), pid=7)]
    snapshot = snapshot_memory(5000, p7=300)
    assert snapshot.free_beside({}, residents).free == fit.FreeMemory((5000 - 700) * MIB).shared
    assert snapshot.free_beside({}, [], residents).free.ram == 5300 * MIB


@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(["kept", "idle", "busy"]), min_size=5, max_size=5),
    new=st.integers(1, 900),
    budget=st.integers(1, 4000),
)
def test_spare_caches_shrink_before_a_pair_is_evicted(
    sizes: list[tuple[int, int]], kinds: list[str], new: int, budget: int
) -> None:
    pairs = [
        (kind, PairMemory(name, 0, (size + spare) * MIB, 0, size * MIB, {}, spare * MIB))
        for name, kind, (size, spare) in zip(NAMES, kinds, sizes, strict=False)
    ]
    by_kind = {
        kind: [pair for pair_kind, pair in pairs if pair_kind == kind]
        for kind in ("kept", "idle", "busy")
    }
    residents = ResidentPairs(by_kind["kept"], by_kind["idle"], by_kind["busy"])
    needed_bytes = (sum(size for size, _ in sizes) + new + ENGINE) * MIB
    used_bytes = needed_bytes + sum(spare for _, spare in sizes) * MIB
    pair = PairFiles("new", f"/new/{new}")
    with mock.patch.object(eviction, "file_sizes", return_value={"/new": new * MIB}):
        decision = decide_eviction(
            plan_pair(pair), residents, snapshot_memory(100_000), budget * MIB
        )
    if budget * MIB >= used_bytes:
        assert isinstance(decision, LoadPlan)
    elif budget * MIB >= needed_bytes:
        assert isinstance(decision, ShrinkCaches)
        assert {*decision.names} == {pair.name for _, pair in pairs if pair.spare}
    else:
        assert isinstance(decision, EvictPair | WaitForPair | DoesNotFit)


def test_a_refusal_names_the_pairs_that_are_kept(files: Files) -> None:
    pinned, pair = hold_pair(files("kept", 872)), files("new", 500)
    decision = decide_eviction(
        plan_pair(pair), ResidentPairs(kept=[pinned]), snapshot_memory(1200), 0
    )
    assert isinstance(decision, DoesNotFit)
    assert "new does not fit in memory: it needs at least 500 MiB" in decision.message
    assert "beside the pairs that are kept loaded: kept (1000 MiB)" in decision.message
    assert decision.message.endswith("To make room: localspec unload kept")
    decision = decide_eviction(plan_pair(pair), ResidentPairs(), snapshot_memory(9000), 300 * MIB)
    assert isinstance(decision, DoesNotFit)
    assert decision.message.endswith(
        "within 'memory', 300 MiB. To make room: localspec config set memory auto"
    )


def test_a_single_pair_is_planned_for_all_of_the_memory(tmp_path: Path) -> None:
    file = gguf_files.model().write(tmp_path / "model.gguf")
    pair = PairFiles("real", str(file))
    memory = fit.FreeMemory(8 << 30)
    alone = decide_eviction(plan_pair(pair), ResidentPairs(), MemorySnapshot(memory), 0)
    assert alone == plan_pair(pair).plan(memory)


def test_evicted_pairs_do_not_evict_each_other_forever(tmp_path: Path) -> None:
    """A context as long as fits would evict the other pair each time one of them comes back."""
    long = gguf_files.model().put("llama.context_length", gguf_files.U32, 1 << 20)
    file = long.write(tmp_path / "model.gguf")
    first, second = (PairFiles(name, str(file)) for name in ("first", "second"))
    snapshot = snapshot_memory(1200)
    alone = decide_eviction(plan_pair(first), ResidentPairs(), snapshot, 0)
    assert isinstance(alone, LoadPlan)
    assert alone.plan
    resident = PairMemory.from_plan(first, 1, alone, 0)
    assert decide_eviction(
        plan_pair(second), ResidentPairs(idle=[resident]), snapshot, 0
    ) == EvictPair("first")
    second_plan = decide_eviction(
        plan_pair(second), ResidentPairs(driven_out=[resident]), snapshot, 0
    )
    assert isinstance(second_plan, LoadPlan)
    assert second_plan.plan
    assert fit.USUAL_CONTEXT <= second_plan.plan.context < alone.plan.context
    first_plan = decide_eviction(
        plan_pair(first),
        ResidentPairs(idle=[PairMemory.from_plan(second, 2, second_plan, 0)]),
        snapshot,
        0,
    )
    assert isinstance(first_plan, LoadPlan)
