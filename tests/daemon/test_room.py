"""Who is in memory together, and who leaves for a newcomer: decisions about files of any size."""

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
    MIB,
    DoesNotFit,
    EvictPair,
    LoadPlan,
    LoadPlanner,
    MemorySnapshot,
    PairMemory,
    ResidentPairs,
    ShrinkCaches,
    WaitForPair,
    decide_eviction,
)
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles
from localspec.registry.header import fit
from tests.support import gguf_files

SETTINGS = eviction.engine_settings(Config(), Paths(*[Path("/nowhere")] * 5))
ENGINE = 128  # MiB of a worker itself
Files = Callable[..., PairFiles]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A pair of files of so many MiB, which take no room on the disk and say nothing in their headers."""

    def file(name: str, size: int) -> str:
        path = tmp_path / f"{name}.gguf"
        path.touch()
        os.truncate(path, size * MIB)
        return str(path)

    def made(name: str, target: int, draft: tuple[str, int] | None = None) -> PairFiles:
        return PairFiles(name, file(name, target), file(*draft) if draft else None)

    return made


def plans(pair: PairFiles) -> LoadPlanner:
    return LoadPlanner(pair, SETTINGS, "cpu")


def holding(pair: PairFiles, pid: int = 0) -> PairMemory:
    return PairMemory.from_plan(pair, pid, LoadPlan(pair, SETTINGS), 0)


def free(mib: int, **own: int) -> MemorySnapshot:
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
def test_whoever_leaves_is_the_least_recently_asked_that_may_and_nobody_leaves_in_vain(
    sizes: list[int], new: int, kinds: list[str], memory: int, budget: int
) -> None:
    def held(name: str, size: int) -> PairMemory:
        return PairMemory(name, 0, size * MIB, 0, size * MIB, {})

    class Fixed(LoadPlanner):
        def __init__(self) -> None:
            self.pair, self.settings = PairFiles("new", "/new"), SETTINGS

        def plan(self, free: fit.FreeMemory) -> LoadPlan:
            needed = new * MIB
            if needed > free.ram:
                return LoadPlan(self.pair, SETTINGS, beyond="It does not fit.")
            none = fit.NO_NEED
            chosen = fit.MemoryFit(512, False, 0, 0, needed, free.ram, none, none)
            return eviction._apply_fit(self.pair, SETTINGS, chosen, False)

        def min_bytes(self) -> int:
            return new * MIB

    all_of = [held(name, size) for name, size in zip(NAMES, sizes, strict=False)]
    by = {kind: [each for each, its in zip(all_of, kinds, strict=False) if its == kind]
          for kind in ("kept", "idle", "busy")}  # fmt: skip
    seen = MemorySnapshot(fit.FreeMemory(memory * MIB))
    left = ResidentPairs(by["kept"], by["idle"], by["busy"])
    gone: list[str] = []
    while isinstance(found := decide_eviction(Fixed(), left, seen, budget * MIB), EvictPair):
        assert found.name == left.idle[0].name  # the least recently asked of those that rest
        gone.append(found.name)
        # What mapped weights took is free again: nothing of it was the process's own.
        left = ResidentPairs(left.kept, left.idle[1:], left.busy)
    kept, busy = (sum(each.needed for each in by[kind]) // MIB for kind in ("kept", "busy"))
    staying = sum(each.needed for each in left.all) // MIB
    if isinstance(found, LoadPlan):
        assert not budget or staying + new <= budget
        # One that stays while another one left is needed, or had no part in it.
        if gone:
            last = next(each for each in all_of if each.name == gone[-1])
            before = ResidentPairs(left.kept, [last, *left.idle], left.busy)
            assert isinstance(decide_eviction(Fixed(), before, seen, budget * MIB), EvictPair)
    elif isinstance(found, WaitForPair):
        assert not left.idle
        assert found.name == left.busy[0].name
        assert busy
    else:
        assert isinstance(found, DoesNotFit)
        assert not gone  # before anybody had to leave
        assert kept or budget


def test_a_file_that_two_pairs_share_is_there_once(files: Files) -> None:
    one, two = (files(name, 100, ("draft", 500)) for name in ("one", "two"))
    both = [holding(one), holding(two)]
    assert eviction.total_bytes(both) == (600 + ENGINE + 100 + ENGINE) * MIB
    third = files("third", 100, ("draft", 500))
    left = free(2000).free_beside(eviction.file_sizes(third), both)
    # Of the draft's 500 MiB nothing is taken from what the third can have.
    assert left.taken == 2 * (100 + ENGINE) * MIB
    other = free(2000).free_beside(eviction.file_sizes(files("other", 1)), both)
    assert other.taken - left.taken == 500 * MIB


def test_what_is_mapped_or_not_filled_yet_is_not_free(files: Files) -> None:
    held = [
        holding(files("held", 872), pid=7)
    ]  # 1 000 MiB in all, of which 300 are its own already
    seen = free(5000, p7=300)
    assert seen.free_beside({}, held).free == fit.FreeMemory((5000 - 700) * MIB).shared
    assert seen.free_beside({}, [], held).free.ram == 5300 * MIB


@given(
    sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(["kept", "idle", "busy"]), min_size=5, max_size=5),
    new=st.integers(1, 900),
    budget=st.integers(1, 4000),
)
def test_room_that_nobody_uses_is_given_up_before_a_pair_leaves_and_never_in_vain(
    sizes: list[tuple[int, int]], kinds: list[str], new: int, budget: int
) -> None:
    all_of = [
        (kind, PairMemory(name, 0, (size + spare) * MIB, 0, size * MIB, {}, spare * MIB))
        for name, kind, (size, spare) in zip(NAMES, kinds, sizes, strict=False)
    ]
    by = {kind: [each for its, each in all_of if its == kind] for kind in ("kept", "idle", "busy")}
    standing = ResidentPairs(by["kept"], by["idle"], by["busy"])
    least = (sum(size for size, _ in sizes) + new + ENGINE) * MIB
    whole = least + sum(spare for _, spare in sizes) * MIB
    pair = PairFiles("new", f"/new/{new}")
    with mock.patch.object(eviction, "file_sizes", return_value={"/new": new * MIB}):
        found = decide_eviction(plans(pair), standing, free(100_000), budget * MIB)
    if budget * MIB >= whole:
        assert isinstance(found, LoadPlan)
    elif budget * MIB >= least:
        assert isinstance(found, ShrinkCaches)
        assert {*found.names} == {each.name for _, each in all_of if each.spare}
    else:
        assert isinstance(found, EvictPair | WaitForPair | DoesNotFit)


def test_those_that_are_kept_are_named_to_whom_they_leave_no_room(files: Files) -> None:
    kept, pair = holding(files("kept", 872)), files("new", 500)
    found = decide_eviction(plans(pair), ResidentPairs(kept=[kept]), free(1200), 0)
    assert isinstance(found, DoesNotFit)
    assert "new does not fit in memory: it needs at least 500 MiB" in found.message
    assert "beside the pairs that are kept loaded: kept (1000 MiB)" in found.message
    assert found.message.endswith("To make room: localspec unload kept")
    found = decide_eviction(plans(pair), ResidentPairs(), free(9000), 300 * MIB)
    assert isinstance(found, DoesNotFit)
    assert found.message.endswith(
        "within 'memory', 300 MiB. To make room: localspec config set memory auto"
    )


def test_one_that_is_alone_is_planned_as_if_there_was_no_room_to_share(tmp_path: Path) -> None:
    file = gguf_files.model().write(tmp_path / "model.gguf")
    pair = PairFiles("real", str(file))
    memory = fit.FreeMemory(8 << 30)
    alone = decide_eviction(plans(pair), ResidentPairs(), MemorySnapshot(memory), 0)
    assert alone == eviction.plan_load(pair, SETTINGS, memory, "cpu")


def test_who_was_driven_out_finds_room_when_it_comes_back(tmp_path: Path) -> None:
    """A context that is as long as fits would drive out whoever comes back, and so on for ever."""
    long = gguf_files.model().put("llama.context_length", gguf_files.U32, 1 << 20)
    file = long.write(tmp_path / "model.gguf")
    first, second = (PairFiles(name, str(file)) for name in ("first", "second"))
    seen = free(1200)
    alone = decide_eviction(plans(first), ResidentPairs(), seen, 0)
    assert isinstance(alone, LoadPlan)
    assert alone.plan
    held = PairMemory.from_plan(first, 1, alone, 0)
    assert decide_eviction(plans(second), ResidentPairs(idle=[held]), seen, 0) == EvictPair("first")
    beside = decide_eviction(plans(second), ResidentPairs(driven_out=[held]), seen, 0)
    assert isinstance(beside, LoadPlan)
    assert beside.plan
    assert fit.USUAL_CONTEXT <= beside.plan.context < alone.plan.context
    again = decide_eviction(
        plans(first), ResidentPairs(idle=[PairMemory.from_plan(second, 2, beside, 0)]), seen, 0
    )
    assert isinstance(again, LoadPlan)
