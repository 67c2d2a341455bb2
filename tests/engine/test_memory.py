"""The registry's estimate agrees with llama.cpp: exactly for caches, as an upper bound for buffers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from benchmarks.synthetic import Shape, write_pair
from benchmarks.synthetic_heads import Architecture, write_heads
from benchmarks.synthetic_sidecar import write_with_sidecar
from localspec.engine.cache.slot import TAIL_STATES
from localspec.engine.llama import Context, ContextSettings, Model, gpus
from localspec.engine.pair.load import LEFT_OUT, load_pair
from localspec.engine.pair.models import ROLLBACK_SNAPSHOTS
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.settings import CPU_PASS_ROWS, KvType
from localspec.registry.header import fit
from localspec.registry.header.model import read_local_model
from tests.support import architectures
from tests.support.rpc import rpc_worker
from tests.support.running import running

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
CELLS, SEQUENCES = 4096, 3
PLAIN = "llama gemma3 gemma3n gemma4 qwen35 falcon-h1 nemotron_h lfm2 mamba2 rwkv7".split()
EXPERTS = "gpt-oss deepseek2 kimi-linear qwen3next".split()


def sum_buffers_mib(lines: list[str], kinds: str) -> float:
    """Return the MiB of the allocated buffers of such kinds."""
    sizes = re.findall(rf"({kinds}) buffer size = +([\d.]+) MiB", "".join(lines))
    return sum(float(size) for _, size in sizes)


def make_context(model: Model, kv_types: tuple[KvType, KvType] = fit.F16, **other: Any) -> Context:
    settings = ContextSettings(
        n_ctx=CELLS,
        n_batch=fit.PASS_ROWS,
        n_seq=SEQUENCES,
        n_outputs=SEQUENCES * 16 + 64,
        n_threads=1,
        kv_types=kv_types,
        n_rollback=0 if model.cuttable else ROLLBACK_SNAPSHOTS,
        **other,
    )
    return Context(model, settings)


@pytest.mark.parametrize("architecture", PLAIN + EXPERTS)
def test_caches_states_and_buffers_of_every_kind_of_model(
    architecture: str, tmp_path: Path, log_lines: list[str]
) -> None:
    path = architectures.write(architecture, tmp_path, experts=architecture in EXPERTS)
    local_model = read_local_model(path)
    load = fit.LoadOptions(context=CELLS, cuda=bool(gpus()))
    need = fit._compute_need(local_model, load, SEQUENCES, SEQUENCES * 16 + 64)
    with Model(str(path)) as model:
        log_lines.clear()
        with make_context(model):
            cache_mib = sum_buffers_mib(log_lines, "KV|RS")
            compute_mib = sum_buffers_mib(log_lines, "compute")
    assert need.cache / MIB == pytest.approx(cache_mib, abs=0.02)
    assert need.compute / MIB >= compute_mib


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("architecture", [*PLAIN[:4], *EXPERTS[:2]])
def test_buffers_without_flash_attention(
    architecture: str, chosen: bool, tmp_path: Path, log_lines: list[str]
) -> None:
    """If the engine chose that for a CPU, it computes fewer rows at once."""
    path = architectures.write(architecture, tmp_path, experts=architecture in EXPERTS)
    load = fit.LoadOptions(context=CELLS, attention="off", chosen=chosen)
    need = fit._compute_need(read_local_model(path), load, SEQUENCES, SEQUENCES * 16 + 64)
    with Model(str(path)) as model:
        log_lines.clear()
        with make_context(model, flash_attention="off", n_ubatch=CPU_PASS_ROWS if chosen else 0):
            assert need.compute / MIB >= sum_buffers_mib(log_lines, "compute") > 0


@pytest.mark.parametrize("length", [16, 32, 64, 80, 128, 160])
def test_gpu_without_a_kernel_for_the_heads_computes_scores(
    length: int, tmp_path: Path, log_lines: list[str]
) -> None:
    """llama.cpp then allocates what it needs without flash attention."""
    shape = Shape(1, 4 * length, 64, 4, 512, n_ctx=CELLS)
    path, _ = write_pair(tmp_path, shape, shape)
    local_model = read_local_model(path)

    def estimate_compute(**more: Any) -> int:
        load = fit.LoadOptions(context=CELLS, **more)
        return fit._compute_need(local_model, load, SEQUENCES, SEQUENCES * 16 + 64).compute

    kernel = length in (64, 80, 128)
    assert estimate_compute(cuda=True) == estimate_compute(attention="auto" if kernel else "off")
    assert estimate_compute(cuda=True, attention="on") == estimate_compute(attention="on")
    with Model(str(path)) as model:
        log_lines.clear()
        with make_context(model, flash_attention="auto" if kernel else "off"):
            assert estimate_compute(cuda=True) / MIB >= sum_buffers_mib(log_lines, "compute") > 0


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35", "deepseek2", "deepseek4", "step35"])
def test_cache_and_buffer_of_heads(architecture: str, tmp_path: Path, log_lines: list[str]) -> None:
    if architecture in get_args(Architecture):
        path = write_heads(tmp_path / "m.gguf", architecture=cast(Architecture, architecture))
    else:
        count = 3 if architecture == "step35" else 1
        path = architectures.write(architecture, tmp_path, experts=True, heads=count)
    info = read_local_model(path)
    need = fit.need_of_heads(info, fit.LoadOptions(context=CELLS, parallel=1))
    with Model(str(path), heads=True) as model:
        log_lines.clear()
        settings = ContextSettings(CELLS, fit.PASS_ROWS, SEQUENCES, 16, 1, heads=True)
        with Context(model, settings):
            cache_mib = sum_buffers_mib(log_lines, "KV|RS")
            compute_mib = sum_buffers_mib(log_lines, "compute")
    states = 4 * info.width * (fit.PASS_ROWS + 3 * TAIL_STATES)
    assert (need.cache - states) / MIB == pytest.approx(cache_mib, abs=0.02)
    assert need.compute / MIB >= compute_mib


def test_heads_in_a_separate_file_need_buffers_only(tmp_path: Path, log_lines: list[str]) -> None:
    target_file, sidecar_file = write_with_sidecar(tmp_path)
    local_model = read_local_model(sidecar_file, as_draft=True)
    options = fit.LoadOptions(context=CELLS, parallel=1)
    need = fit.need_of_draft(local_model, options)
    exact_need = fit.need_of_draft(local_model, replace(options, exact=True))
    assert (need.cache, exact_need.compute) == (0, 2 * need.compute)
    with (
        Model(str(target_file)) as model,
        Model(str(sidecar_file), heads=True) as heads,
        make_context(model) as target,
    ):
        log_lines.clear()
        sizes = CELLS, fit.PASS_ROWS, SEQUENCES, 16, 1
        with Context(heads, ContextSettings(*sizes, heads=True, target=target)):
            assert not any("KV buffer" in line for line in log_lines)
            assert need.compute / MIB >= sum_buffers_mib(log_lines, "compute")


@pytest.mark.parametrize(
    "kv_types", [*zip(fit.KV_BYTES, fit.KV_BYTES, strict=True), ("q8_0", "q4_0"), ("f16", "q5_1")]
)
def test_size_of_each_cache_type(
    kv_types: tuple[KvType, KvType], tmp_path: Path, log_lines: list[str]
) -> None:
    target, _ = write_pair(tmp_path, Shape(2, 64, 128, 2, 512), Shape(1, 64, 128, 2, 512))
    local_model = read_local_model(target)
    with Model(str(target)) as model:
        log_lines.clear()
        with make_context(model, kv_types):
            cache_mib = sum_buffers_mib(log_lines, "KV")
    need = fit._compute_need(local_model, fit.LoadOptions(context=CELLS, kv_types=kv_types), 1, 16)
    assert need.cache / MIB == pytest.approx(cache_mib, abs=0.02)


def test_unsupported_cache_type_is_refused_for_targets_only(tmp_path: Path) -> None:
    """The attention heads of the two models have 32 and 16 numbers."""
    shapes = Shape(2, 64, 128, 2, 512, n_ctx=512), Shape(1, 64, 128, 4, 512, n_ctx=512)
    even, odd = write_pair(tmp_path, *shapes)
    settings = EngineSettings(n_ctx=512, type_kv="q4_0")

    def load_notes(target: Path, draft: Path) -> list[str]:
        pair = load_pair(PairFiles("p", str(target), str(draft)), settings, lambda *_: None)
        notes = pair.info().notes
        pair.close()
        return notes

    reason = "its attention heads have 16 numbers, and q4_0 keeps them in blocks of 32"
    assert load_notes(even, odd) == [f"The draft's KV cache is f16: {reason}."]
    with pytest.raises(LoadFailed, match=f"does not take `kv_type` q4_0: {reason}. To use f16:"):
        load_notes(odd, even)
    assert fit.supports_kv_types(read_local_model(even), ("q4_0", "q4_0"))
    for types in (("q4_0", "f16"), ("f16", "q4_0")):
        assert not fit.supports_kv_types(read_local_model(odd), types)
    settings = EngineSettings(n_ctx=512, type_v="q4_0")
    with pytest.raises(LoadFailed, match=f"does not take `kv_type_v` q4_0: {reason}. To use f16:"):
        load_notes(odd, even)


# The context is half as long for q4_0, whose attention takes a CPU four times as long.
@pytest.mark.parametrize(("kv_type", "tokens"), [("f16", 16384), ("q4_0", 8192)])
def test_full_context_takes_the_planned_memory(kv_type: str, tokens: int, tmp_path: Path) -> None:
    """The system's count for a loaded pair with a full context is within the plan."""
    shape = Shape(4, 512, 1024, 4, 4096, "q4_0", n_ctx=16384)
    target, _ = write_pair(tmp_path, shape, Shape(1, 64, 128, 2, 4096, n_ctx=512))
    program = [sys.executable, "-m", "tests.support.full_context", str(target), kv_type]
    program += [str(tokens)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    planned, loaded, full = map(int, ran.stdout.split())
    assert loaded <= full <= planned + fit.RUNTIME_BYTES
    # The weights are mapped or repacked and the runtime takes some dozen MiB; the rest is as planned.
    assert full >= 0.8 * planned


@pytest.mark.parametrize("own_heads", [True, False])
def test_a_plan_leaves_heads_out(own_heads: bool, tmp_path: Path, log_lines: list[str]) -> None:
    """Half of the target is on another machine, which llama.cpp treats as a GPU."""
    path = write_heads(tmp_path / "t.gguf", architecture="qwen35")
    n_layers = read_local_model(path).layers // 2
    with rpc_worker() as (endpoint, _):
        files = PairFiles("heads", str(path), rpc=(endpoint,))
        with running(files, n_gpu_layers=n_layers, own_heads=own_heads) as engine:
            assert re.search(rf"offloaded {n_layers}/\d+ layers to GPU", "".join(log_lines))
            assert engine.pair.models.target.n_heads == own_heads
            assert (engine.pair.drafter is not None) == own_heads
            if not own_heads:
                assert engine.pair.why_no_drafts("mtp") == LEFT_OUT
            assert len(engine.ask([1], 12).tokens) == 12
