"""Plans for the engine by the free memory, also on simulated systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.synthetic import Shape, write_pair
from localspec.daemon.worker.plan import (
    MIB,
    LoadPlan,
    LoadPlanner,
    free_memory,
    learn_answer,
    learn_load,
    memory_load,
)
from localspec.machine import CommandResult, Host
from localspec.protocol.frames import EngineSettings, PairFiles, PassCosts, PromptCost
from localspec.registry.header import fit
from localspec.registry.header.model import read_local_model
from localspec.registry.header.speeds import LoadRecord, MemorySpeeds, Part, load_speeds
from tests.support import architectures

TARGET = Shape(8, 256, 512, 4, 2048, n_ctx=16384)
DRAFT = Shape(1, 64, 128, 2, 2048, n_ctx=16384)
GIB = 1 << 30
PLENTY = 64 * GIB


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairFiles:
    target, draft = write_pair(tmp_path_factory.mktemp("plan"), TARGET, DRAFT)
    return PairFiles(name="p", target=str(target), draft=str(draft))


ASKED = EngineSettings(n_ctx=8192)


def plan_load(
    pair: PairFiles, settings: EngineSettings, free: fit.FreeMemory, built: str
) -> LoadPlan:
    return LoadPlanner(pair, settings, built).plan(free)


def weights(pair: PairFiles, context: int = 8192, built: str = "cpu") -> tuple[int, int]:
    """Return the bytes that each model needs in all with this context."""
    assert pair.draft
    load = replace(memory_load(ASKED, built), context=context)
    target, draft = (read_local_model(Path(path)) for path in (pair.target, pair.draft))
    return fit.need_of_target(target, load).total, fit.need_of_draft(draft, load).total


def test_both_models_are_on_the_gpu_if_they_fit(pair: PairFiles) -> None:
    planned = plan_load(pair, EngineSettings(), fit.FreeMemory(PLENTY, PLENTY), "cuda")
    assert (planned.settings.n_gpu_layers, planned.settings.draft_gpu_layers) == (-1, -1)
    assert planned.pair == pair
    assert planned.notes == ()


def test_a_load_says_whether_cudas_kernels_compute() -> None:
    """It depends on the build and on the layers that a setting keeps on the CPU."""
    assert memory_load(ASKED, "cuda").cuda
    assert not any(memory_load(ASKED, built).cuda for built in (None, "cpu", "metal", "vulkan"))
    assert not memory_load(EngineSettings(n_gpu_layers=0), "cuda").cuda


def test_on_a_gpu_that_is_too_small_for_both_the_faster_placement_is_taken(
    pair: PairFiles, tmp_path: Path
) -> None:
    whole = plan_load(pair, ASKED, fit.FreeMemory(PLENTY, PLENTY), "cuda").plan
    assert whole
    vram = whole.on_gpu - 10 * MIB
    free = fit.FreeMemory(PLENTY, vram)
    placements = set()
    for ram_ms in (1.0, 25.0, 1e5):
        parts = [
            (Part("gpu", "layers", "Q8_0", (1.0,) * 4), 0.5),
            (Part("ram", "layers", "Q8_0", (1.0,) * 4), ram_ms),
        ]
        records = [LoadRecord(part.memory, (part,), 0, 0, {"1": ms}) for part, ms in parts]
        (tmp_path / "memory_speeds.json").write_bytes(msgspec.json.encode(records))
        settings = msgspec.structs.replace(ASKED, state_dir=str(tmp_path))
        planned = plan_load(pair, settings, free, "cuda")
        plan = planned.plan
        assert plan
        assert planned.settings.n_gpu_layers == plan.gpu_layers
        assert (planned.pair.draft is None) == (not plan.draft)
        assert planned.settings.own_heads == plan.draft
        assert plan.on_gpu <= vram
        placements.add((plan.draft, planned.settings.draft_gpu_layers))
        if plan.gpu_layers > 0:
            assert "layers of the target go to the GPU" in planned.notes[-1]
    assert len(placements) > 1


def test_experts_leave_a_gpu_that_is_too_small_for_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = architectures.Shape(embd=256, heads=2, ff=1536, layers=6)
    monkeypatch.setattr(architectures, "shape", lambda _: shape)
    path = architectures.write("qwen3moe", tmp_path, experts=True)
    mixture = PairFiles("mixture", str(path))
    whole = plan_load(mixture, ASKED, fit.FreeMemory(PLENTY, PLENTY), "cuda")
    assert whole.plan
    assert whole.plan.cpu_moe_layers == whole.settings.cpu_experts == 0
    vram = whole.plan.on_gpu - MIB
    planned = plan_load(mixture, ASKED, fit.FreeMemory(PLENTY, vram), "cuda")
    assert planned.plan
    assert planned.plan.on_gpu <= vram
    assert (planned.settings.n_gpu_layers, planned.settings.cpu_experts) == (-1, 2)
    assert planned.plan.cpu_moe_layers == 1
    assert planned.notes[-1].startswith(
        "The experts of the first 1 layers lie in main memory: about"
    )
    read = [
        {
            memory: sum(p.gib[0] for p in plan.passes.parts if p.memory == memory)
            for memory in ("gpu", "ram")
        }
        for plan in (whole, planned)
        if plan.passes
    ]
    assert sum(read[1].values()) == pytest.approx(sum(read[0].values()))
    assert read[1]["ram"] > read[0]["ram"] == 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"gpu": {"gib_ms": -1, "row_share": 0}}', b"[]"])
def test_a_damaged_file_of_speeds_is_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "memory_speeds.json").write_bytes(content)
    assert load_speeds(str(tmp_path)) == MemorySpeeds()


def test_a_load_and_answers_teach_the_speed_of_its_memory(pair: PairFiles, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(ASKED, state_dir=str(tmp_path))
    for built, vram in (("cpu", 0), ("cuda", PLENTY)):
        free = fit.FreeMemory(PLENTY, vram)
        planned = plan_load(pair, settings, free, built)
        assert planned.passes
        assert planned.passes.forecast
        assert planned.passes.forecast.drafted
        slow_ms = 2e3 / (planned.passes.forecast.plain.likely or 1)
        # The draft has one layer and the target eight. If the draft took an eighth as long, the faster
        # answers below would contradict it, and a forecast would lie between both.
        learn_load(planned, PassCosts({1: slow_ms, 4: 2 * slow_ms}, {1: slow_ms / 16}, 0.0))
        learned = plan_load(pair, settings, free, built).passes
        assert learned
        assert learned.forecast
        assert learned.forecast.plain.likely == pytest.approx(1e3 / slow_ms, rel=0.25)
        assert learned.forecast.loads == 2
        answer_ms = slow_ms / 1.5
        for _ in range(8):
            learn_answer(planned, answer_ms, PromptCost(answer_ms / 1e4))
        learned = plan_load(pair, settings, free, built).passes
        assert learned
        assert learned.forecast
        assert learned.forecast.plain.likely == pytest.approx(1e3 / answer_ms, rel=0.25)
        assert learned.forecast.reading
        assert learned.forecast.reading.likely == pytest.approx(1e4 / answer_ms, rel=0.3)
    before = load_speeds(str(tmp_path))
    learn_load(planned, None)
    learn_answer(planned, None, None)
    assert load_speeds(str(tmp_path)) == before


@pytest.mark.parametrize(
    ("built", "settings"),
    [
        pytest.param("cpu", EngineSettings(), id="a build for the CPU"),
        pytest.param("metal", EngineSettings(), id="a GPU that shares the memory"),
        pytest.param("cuda", EngineSettings(n_gpu_layers=3), id="layers a person chose"),
    ],
)
def test_layers_are_left_alone(pair: PairFiles, built: str, settings: EngineSettings) -> None:
    planned = plan_load(pair, settings, fit.FreeMemory(PLENTY, 100 * MIB), built)
    assert planned.settings.n_gpu_layers == settings.n_gpu_layers
    assert planned.settings.draft_gpu_layers == -1


def test_with_little_memory_the_context_shrinks_before_the_draft(pair: PairFiles) -> None:
    needed_bytes = sum(weights(pair)) + fit.RUNTIME_BYTES
    plan = plan_load(pair, ASKED, fit.FreeMemory(needed_bytes - MIB, 0), "cpu")
    assert plan.settings.n_ctx == 7168
    assert plan.pair.draft == pair.draft
    assert "7168 tokens of context instead of 8192" in plan.notes[0]
    least = weights(pair, 2048)[0] + fit.RUNTIME_BYTES
    plan = plan_load(pair, ASKED, fit.FreeMemory(least, 0), "cpu")
    assert plan.pair.draft is None
    assert "There is not enough memory for the draft model; decoding will be plain." in plan.notes


def test_without_a_number_the_context_is_what_the_target_was_trained_for(pair: PairFiles) -> None:
    planned = plan_load(pair, EngineSettings(prefix_bytes=GIB), fit.FreeMemory(PLENTY), "cpu")
    assert planned.settings.n_ctx == 16384
    assert planned.settings.prefix_bytes == GIB
    assert planned.plan
    assert planned.plan.context == 16384
    assert planned.plan.needed <= planned.plan.free == PLENTY
    short = plan_load(pair, EngineSettings(prefix_bytes=GIB), fit.FreeMemory(600 * MIB), "cpu")
    assert 2048 <= short.settings.n_ctx < 16384
    assert short.settings.prefix_bytes < GIB
    assert short.plan
    assert short.plan.others["q8_0"] > short.settings.n_ctx
    assert 'With kv_type = "' in short.notes[0]


def test_exact_mode_of_one_request_is_refused_where_memory_does_not_hold_its_cache(
    pair: PairFiles,
) -> None:
    def lacks(free: int, *, exact: bool = False) -> int:
        settings = EngineSettings(n_ctx=8192, exact=exact)
        return plan_load(pair, settings, fit.FreeMemory(free), "cpu").settings.exact_lacks

    enough = sum(weights(pair)) + fit.RUNTIME_BYTES + MIB
    assert lacks(PLENTY) == 0
    assert lacks(enough) > MIB
    assert lacks(enough, exact=True) == 0  # the requested context shrinks


def test_unreadable_or_too_large_files_are_left_to_the_engine(
    pair: PairFiles, tmp_path: Path
) -> None:
    nothing = PairFiles(name="n", target=str(tmp_path / "no.gguf"), draft=None)
    assert plan_load(nothing, EngineSettings(), fit.FreeMemory(PLENTY, 0), "cpu").pair == nothing
    too_large = plan_load(pair, EngineSettings(), fit.FreeMemory(MIB, 0), "cpu")
    assert too_large.settings == EngineSettings()


def host(files: dict[str, str], gpu: dict[str, str] | None = None, system: str = "Linux") -> Host:
    """Return a simulated host; `gpu` has the answers of nvidia-smi by query."""

    def run(argv: Sequence[str]) -> CommandResult:
        assert gpu is not None
        return CommandResult(*((0, gpu[argv[1]]) if argv[1] in gpu else (9, "no such query")))

    def which(name: str) -> str | None:
        return f"/usr/bin/{name}" if gpu is not None else None

    return Host(system, "x86_64", {}, run, which, lambda path: files.get(path, ""))


MEMINFO = {"/proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"}


def test_in_a_container_its_limit_counts() -> None:
    """Both versions of control groups count, the tightest of nested ones, and unreadable files do not."""
    container = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n",
    }
    assert free_memory(host(MEMINFO | container)).ram == 3 * GIB
    service = {
        "/proc/self/cgroup": "0::/user.slice/app.service\n",
        "/sys/fs/cgroup/user.slice/memory.max": f"{2 * GIB}\n",
        "/sys/fs/cgroup/user.slice/memory.current": f"{GIB}\n",
        "/sys/fs/cgroup/user.slice/app.service/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/app.service/memory.current": "5\n",
    }
    assert free_memory(host(MEMINFO | service)).ram == GIB
    old = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/7\n0::/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
        "/sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {2 * GIB}\n",
    }
    assert free_memory(host(MEMINFO | old)).ram == GIB
    unlimited = old | {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert free_memory(host(MEMINFO | unlimited)).ram == 16 * GIB


FREE = "--query-gpu=memory.free"
USED = {"--query-compute-apps=pid,used_memory": "41, 2048\n42, 4096\n43, [N/A]\n"}
WORKER = {"/proc/42/status": "VmRSS: 9999999 kB\nRssAnon:  1048576 kB\n"}


@pytest.mark.parametrize(
    ("files", "gpu", "workers", "ram_gib", "vram_gib"),
    [
        pytest.param({}, None, (), 16, 0, id="no GPU"),
        pytest.param({}, {FREE: "8192\n16384\n"}, (), 16, 24, id="GPUs are added up"),
        pytest.param(WORKER, {FREE: "1024\n"} | USED, [42], 17, 5, id="a worker of ours"),
        pytest.param({}, {}, (), 16, 0, id="a driver that does not respond"),
        pytest.param({}, {FREE: "[N/A]\n"}, (), 16, 0, id="a driver without a figure"),
    ],
)
def test_the_free_memory_of_a_machine(
    files: dict[str, str],
    gpu: dict[str, str] | None,
    workers: Sequence[int],
    ram_gib: int,
    vram_gib: int,
) -> None:
    free = free_memory(host(MEMINFO | files, gpu), workers)
    assert free == fit.FreeMemory(ram_gib * GIB, vram_gib * GIB)


def test_a_mac_shares_its_memory() -> None:
    memory = free_memory(host({}, system="Darwin"))
    assert memory.ram > 0
    assert memory.vram == 0
