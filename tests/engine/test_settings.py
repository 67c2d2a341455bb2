"""The engine checks its settings, so that llama.cpp gets no number on which it would abort."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localspec.engine.pair import load as loading
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.models import usable_cores
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.settings import KvType

NUMBERS = st.integers(-(1 << 40), 1 << 40) | st.integers(-3, 300)
FIELDS = (
    "n_ctx parallel n_threads n_batch n_ubatch n_gpu_layers cpu_experts draft_gpu_layers "
    "draft_cpu_experts main_gpu"
).split()


def is_valid(changes: dict[str, Any]) -> bool:
    try:
        msgspec.convert(changes, EngineSettings)
    except msgspec.ValidationError:
        return False
    return True


def get_load_error(files: PairFiles, changes: dict[str, Any]) -> LoadFailed:
    """Return the error with which such settings are refused."""
    try:
        load_pair(files, EngineSettings(**changes), lambda *_: None).close()
    except LoadFailed as error:
        return error
    raise AssertionError(changes)


@given(
    st.dictionaries(st.sampled_from(FIELDS), NUMBERS, min_size=1).filter(lambda c: not is_valid(c))
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
def test_a_number_beyond_its_limit_is_refused_at_once(
    changes: dict[str, Any],
) -> None:
    error = get_load_error(PairFiles("nothing", "/nowhere/a.gguf"), changes)
    assert "The engine's settings are wrong: Expected `int`" in error.message


@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "n_ctx": st.integers(0, 1 << 24) | st.integers(0, 600),
            "parallel": st.integers(1, 128),
            "n_threads": st.integers(0, 512),
            "n_batch": st.integers(64, 600),
            "n_gpu_layers": st.integers(-1, 10_000),
            "n_ubatch": st.integers(0, 600),
            "cpu_experts": st.integers(0, 10_000),
            "main_gpu": st.integers(0, 15),
            "split_mode": st.sampled_from(["layer", "row", "none"]),
            "flash_attention": st.sampled_from(["auto", "on", "off"]),
            "type_kv": st.sampled_from(get_args(KvType)),
            "type_v": st.sampled_from(["same", *get_args(KvType)]),
            "exact": st.booleans(),
            "depth": st.none() | st.integers(0, 64),
        },
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
def test_settings_within_the_limits_load_or_are_refused(
    cycle_files: PairFiles, changes: dict[str, Any]
) -> None:
    """An abort would end the tests."""
    assert is_valid(changes)
    if {changes.get("type_kv", "f16"), changes.get("type_v", "same")} - {"f16", "same"}:
        with contextlib.suppress(LoadFailed):  # a head may not be a multiple of blocks wide
            load_pair(cycle_files, EngineSettings(**changes), lambda *_: None).close()
        return
    pair = load_pair(cycle_files, EngineSettings(**changes), lambda *_: None)
    assert pair.models.threads <= usable_cores()
    pair.close()


def test_no_more_threads_run_than_there_are_cores(cycle_files: PairFiles) -> None:
    pair = load_pair(cycle_files, EngineSettings(n_ctx=512, n_threads=512), lambda *_: None)
    cores, notes = usable_cores(), pair.info().notes
    assert pair.models.threads == cores
    assert any(f"512 threads were requested, but only {cores} are used" in note for note in notes)
    pair.close()


def test_missing_gpu_is_named(cycle_files: PairFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "gpus", lambda: ["A GPU"])
    assert get_load_error(cycle_files, {"main_gpu": 3}).message == (
        "`main_gpu` is 3, and this machine has 1: 0 is the first. To restore the default: "
        "localspec config unset main_gpu"
    )
