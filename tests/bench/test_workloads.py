"""What is decoded: names, shapes, texts; and whether the machine is quiet."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from localspec.bench import quiet, synthetic
from localspec.bench.workloads import BIG, TINY, WORKLOADS, build, shape, text, workload


def test_workloads_by_name() -> None:
    assert [w.name for w in WORKLOADS] == ["0.95", "0.9", "0.7", "0.4", "0.2", "0", "bursty"]
    assert all(workload(w.name) == w for w in WORKLOADS)
    assert workload("0.9/0.3").mean == pytest.approx(0.6)


@pytest.mark.parametrize("name", ["1.5", "-0.1", "0.1/0.2/0.3", "fast"])
def test_no_such_workload(name: str) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1|could not convert"):
        workload(name)


def test_a_shape_is_changed_by_name() -> None:
    changed = shape("layers=32,width=4096,kv-heads=8,quant=q8_0", BIG.target)
    assert (changed.n_layer, changed.n_embd, changed.n_head_kv, changed.quant) == (
        32,
        4096,
        8,
        "q8_0",
    )
    assert changed.n_vocab == BIG.target.n_vocab


@pytest.mark.parametrize("wrong", ["depth=3", "layers=many", "quant=q2_k", "layers"])
def test_an_unknown_change_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        shape(wrong, BIG.target)


def test_a_pair_is_written_once_and_its_text_follows_the_cycle(tmp_path: Path) -> None:
    said: list[str] = []
    files = build(tmp_path, TINY, workload("0.7"), said.append)
    build(tmp_path, TINY, workload("0.7"), said.append)
    assert len(said) == 2
    assert not list(tmp_path.rglob("*.part"))
    found = text(files, 8, 400, random.Random(1))
    whole = [*found.prompt, *found.expected]
    assert whole == [whole[0], *synthetic.follow(files.cycle, whole[0], len(whole) - 1)]
    assert found.acceptance == pytest.approx(0.7, abs=0.08)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_our_own_work_is_not_that_of_others() -> None:
    others = quiet.Others()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    cores = others.cores(())
    assert cores is not None
    assert 0 <= cores <= (os.cpu_count() or 1) - 0.5 or os.cpu_count() == 1


def test_a_report_on_the_load_is_one_line() -> None:
    line = quiet.report(0.05)
    assert "load average" in line
    assert "\n" not in line
