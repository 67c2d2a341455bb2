"""localspec.machine: which build of llama.cpp a machine gets, and why."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from localspec.machine import (
    AMX_PROBE,
    BUILD_VARIABLES,
    NO_AMX,
    Backend,
    BuildPlan,
    CommandResult,
    Compiler,
    Host,
    build_jobs,
    detect_cpu,
    find_compiler,
    install_hint,
    nvidia_gpus,
    plan_build,
    run_command,
    wheel_key,
)

GCC = Compiler(("c++",), "c++ (Debian 12.2.0-14) 12.2.0")
XEON = (
    "processor\t: 0\nmodel name\t: Intel Xeon\nflags\t\t: sse2 avx512f amx_tile\n\nprocessor\t: 1\n"
)
RYZEN = "model name\t: AMD Ryzen\nflags\t\t: sse2 avx2\n"
NVCC_13 = "Cuda compilation tools, release 13.0, V13.0.88\n"
ARCHITECTURES_13 = "compute_75\ncompute_80\ncompute_90\ncompute_120\n"


def pose(
    tools: Mapping[str, str | Callable[[Sequence[str]], CommandResult]] | None = None,
    *,
    system: str = "Linux",
    arch: str = "x86_64",
    cpuinfo: str = RYZEN,
    env: Mapping[str, str] | None = None,
    amx: bool = True,
) -> Host:
    """A machine with these commands: each gives its text, or what its function says.

    `amx` is whether the probe program for AMX ends well.
    """
    tools = {"c++": GCC.version, **(tools or {})}
    compiled: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> CommandResult:
        name = Path(argv[0]).name
        if name == "probe":
            return CommandResult(0 if amx or "-mamx-tile" not in compiled[-1] else -11, "")
        if name not in tools:
            return CommandResult(127, "")
        if "-o" in argv:
            compiled.append(argv)
        answer = tools[name]
        return CommandResult(0, answer) if isinstance(answer, str) else answer(argv)

    def which(name: str) -> str | None:
        # A name with a folder is found only where the tools say so; all of ours are on PATH.
        return f"/usr/bin/{name}" if name in tools else None

    return Host(system, arch, env or {}, run, which, lambda _path: cpuinfo)


def nvidia(capability: str, driver_cuda: str) -> Callable[[Sequence[str]], CommandResult]:
    def smi(argv: Sequence[str]) -> CommandResult:
        if argv[1] == "-q":
            return CommandResult(
                0, f"    CUDA Version                              : {driver_cuda}\n"
            )
        return CommandResult(0, f"NVIDIA L4, {capability}, 580.65.06\n")

    return smi


def nvcc(argv: Sequence[str]) -> CommandResult:
    return CommandResult(0, ARCHITECTURES_13 if "--list-gpu-arch" in argv else NVCC_13)


def without_cublas(argv: Sequence[str]) -> CommandResult:
    return (
        CommandResult(1, "cublas_v2.h: No such file or directory") if "-E" in argv else nvcc(argv)
    )


def broken(_argv: Sequence[str]) -> CommandResult:
    return CommandResult(
        9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )


@pytest.mark.parametrize(
    ("host", "backend", "flags", "reason"),
    [
        pytest.param(pose(), "cpu", "", "CPU: there is no working NVIDIA GPU", id="plain"),
        pytest.param(
            pose({"nvcc": nvcc}),
            "cpu",
            "",
            "CPU: there is a CUDA 13.0 compiler, but no working NVIDIA GPU",
            id="CUDA without GPU",
        ),
        pytest.param(
            pose({"nvcc": nvcc, "nvidia-smi": broken}),
            "cpu",
            "",
            "CPU: there is a CUDA 13.0 compiler, but no working NVIDIA GPU",
            id="driver does not answer",
        ),
        pytest.param(
            pose({"nvidia-smi": nvidia("8.9", "13.0"), "apt-get": ""}),
            "cpu",
            "",
            "CPU: there is an NVIDIA L4, but no CUDA compiler (nvcc). "
            "Run `sudo apt-get install nvidia-cuda-toolkit`, then run `scripts/setup --again`.",
            id="GPU without CUDA",
        ),
        pytest.param(
            pose({"nvcc": nvcc, "nvidia-smi": nvidia("9.0", "13.0")}),
            "cuda",
            "-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real",
            "CUDA 13.0 for NVIDIA L4 (architecture 90-real).",
            id="CUDA and GPU",
        ),
        pytest.param(
            pose({"nvcc": nvcc, "nvidia-smi": nvidia("13.5", "14.1")}),
            "cuda",
            "-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=120-virtual",
            "CUDA 13.0 for NVIDIA L4 (architecture 120-virtual).",
            id="GPU newer than the toolkit",
        ),
        pytest.param(
            pose({"nvcc": nvcc, "nvidia-smi": nvidia("7.0", "13.0")}),
            "cpu",
            "",
            "CPU: CUDA 13.0 no longer supports NVIDIA L4 (compute 7.0).",
            id="GPU older than the toolkit",
        ),
        pytest.param(
            pose({"nvcc": nvcc, "nvidia-smi": nvidia("8.0", "12.4")}),
            "cpu",
            "",
            "CPU: nvcc is CUDA 13.0, but the GPU's driver supports at most CUDA 12.4.",
            id="driver older than the toolkit",
        ),
        pytest.param(
            pose({"nvcc": without_cublas, "nvidia-smi": nvidia("9.0", "13.0")}),
            "cpu",
            "",
            "CPU: CUDA 13.0 is installed without cuBLAS. Install the development files of cuBLAS",
            id="a toolkit without cuBLAS",
        ),
        pytest.param(
            pose({"/usr/local/cuda/bin/nvcc": "", "nvidia-smi": nvidia("9.0", "13.0")}),
            "cpu",
            "",
            "CPU: there is an NVIDIA L4, but no CUDA compiler",
            id="an nvcc that does not run",
        ),
        pytest.param(
            pose(system="Darwin", arch="arm64"),
            "metal",
            "-DGGML_METAL=ON",
            "Metal: this is a Mac with an Apple GPU.",
            id="Apple silicon",
        ),
        pytest.param(
            pose(system="Darwin", arch="x86_64"),
            "cpu",
            "-DGGML_METAL=OFF",
            "CPU: llama.cpp's Metal code is for Apple's GPUs",
            id="Intel Mac",
        ),
    ],
)
def test_backend_follows_what_really_works(
    host: Host, backend: Backend, flags: str, reason: str
) -> None:
    plan = plan_build(host, GCC)
    assert plan.backend == backend
    assert plan.cmake_args == f"-DLLAVA_BUILD=OFF -DGGML_RPC=ON {flags}".strip()
    assert str(plan.reasons[0]).startswith(reason)


def test_nvcc_off_the_path_is_named_to_cmake() -> None:
    host = pose({"nvidia-smi": nvidia("9.0", "13.0")}, env={"CUDA_HOME": "/opt/cuda-13"})
    run = host.run
    there = Host(
        host.system,
        host.arch,
        host.env,
        lambda argv: nvcc(argv) if argv[0].endswith("nvcc") else run(argv),
        lambda name: name if name == "/opt/cuda-13/bin/nvcc" else host.which(name),
        host.read,
    )
    assert "-DCMAKE_CUDA_COMPILER=/opt/cuda-13/bin/nvcc" in plan_build(there, GCC).cmake_args


def test_a_driver_too_old_to_tell_the_capability_still_has_its_gpu_seen() -> None:
    def smi(argv: Sequence[str]) -> CommandResult:
        listed = "GPU 0: Tesla T4 (UUID: GPU-1)\n"
        return (
            CommandResult(0, listed)
            if argv[1] == "-L"
            else CommandResult(2, 'Field "compute_cap" is not valid')
        )

    host = pose({"nvidia-smi": smi, "nvcc": nvcc})
    assert [gpu.name for gpu in nvidia_gpus(host)] == ["Tesla T4"]
    assert "-DCMAKE_CUDA_ARCHITECTURES=native" in plan_build(host, GCC).cmake_args


def test_amx_is_left_out_where_the_probe_fails() -> None:
    plan = plan_build(pose(cpuinfo=XEON, amx=False), GCC)
    assert f"'-DCMAKE_C_FLAGS={NO_AMX}' '-DCMAKE_CXX_FLAGS={NO_AMX}'" in plan.cmake_args
    assert str(plan.reasons[1]).startswith(f"AMX: off, {GCC.version} miscompiles it (tested")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64")
def test_amx_probe_loses_its_stores_under_a_flawed_intrinsic(tmp_path: Path) -> None:
    """The probe can only tell if the flaw shows in it, whatever the CPU this test runs on."""
    # The operand as GCC 12 declares it, and the one that names all 64 bytes.
    operands = {"flawed": "*(const void *const *)&tiles", "right": "tiles"}
    instructions = {}
    for name, operand in operands.items():
        source = tmp_path / f"{name}.cpp"
        loaded = f'__asm__ volatile ("ldtilecfg %0" :: "m" ({operand}))'
        source.write_text(AMX_PROBE.replace("_tile_loadconfig(&tiles)", loaded))
        made = run_command(["c++", "-O2", "-mamx-tile", "-S", "-o", "-", str(source)])
        if made.code:
            pytest.skip("this compiler does not know AMX")
        instructions[name] = made.out.split("load", 1)[1].count("\n")
    assert instructions["flawed"] < instructions["right"]


def test_a_compiler_that_does_not_know_amx_is_not_told_to_leave_it_out() -> None:
    def old(argv: Sequence[str]) -> CommandResult:
        return CommandResult(1 if "-mamx-tile" in argv else 0, "unrecognized option '-mamx-tile'")

    plan = plan_build(pose({"c++": old}, cpuinfo=XEON), GCC)
    assert "amx" not in plan.cmake_args
    assert str(plan.reasons[1]) == f"AMX: off, {GCC.version} does not support it."


def test_amx_is_kept_where_the_probe_passes() -> None:
    plan = plan_build(pose(cpuinfo=XEON, amx=True), GCC)
    assert "amx" not in plan.cmake_args
    assert str(plan.reasons[1]).startswith("AMX: on")


def test_amx_is_not_tried_on_a_cpu_without_it() -> None:
    plan = plan_build(pose(cpuinfo=RYZEN, amx=False), GCC)
    assert len(plan.reasons) == 1


def test_the_users_compiler_flags_survive_the_ones_against_amx() -> None:
    host = pose(cpuinfo=XEON, amx=False, env={"CFLAGS": "-g"})
    assert f"-DCMAKE_C_FLAGS=-g {NO_AMX}" in plan_build(host, GCC).cmake_args


@pytest.mark.parametrize("given", ["-DGGML_VULKAN=ON", ""])
def test_cmake_args_of_the_user_are_used_as_they_are(given: str) -> None:
    plan = plan_build(pose({"nvcc": nvcc}, cpuinfo=XEON, amx=False), GCC, given)
    assert (plan.backend, plan.cmake_args) == ("user", given)
    assert tuple(map(str, plan.reasons)) == (f"CMAKE_ARGS is used as it is: {given or '(empty)'}",)


def test_a_compiler_counts_only_if_it_makes_a_program() -> None:
    def cannot(argv: Sequence[str]) -> CommandResult:
        return CommandResult(0 if "--version" in argv else 1, "xcode-select: no developer tools")

    assert find_compiler(pose({"c++": cannot})) is None
    found = find_compiler(pose({"c++": cannot, "g++": "g++ 14.2"}))
    assert found == Compiler(("g++",), "g++ 14.2")


def test_cxx_names_the_compiler_and_no_other_is_tried() -> None:
    assert find_compiler(pose(env={"CXX": "icpx"})) is None
    found = find_compiler(pose({"ccache": "ccache 4"}, env={"CXX": "ccache g++"}))
    assert found == Compiler(("ccache", "g++"), "ccache 4")


def test_cpu_is_read_from_its_first_core() -> None:
    assert detect_cpu(pose(cpuinfo=XEON)).flags == {"sse2", "avx512f", "amx_tile"}
    arm = detect_cpu(
        pose(cpuinfo="CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nFeatures\t: fp asimd\n")
    )
    assert arm.model == "0x41 0xd0c"
    assert arm.flags == {"fp", "asimd"}
    assert detect_cpu(pose({"sysctl": "Apple M4\n"}, system="Darwin")).model == "Apple M4"


def test_wheel_key_changes_with_everything_the_wheel_depends_on() -> None:
    plan = plan_build(pose(), GCC)
    usual = wheel_key(pose(), plan, GCC, "0.3.36")
    assert usual == wheel_key(pose(env={"EDITOR": "vi"}), plan, GCC, "0.3.36")
    others = {
        wheel_key(pose(), plan, GCC, "0.3.37"),
        wheel_key(pose(), plan, Compiler(("c++",), "14.2"), "0.3.36"),
        wheel_key(pose(), BuildPlan("cpu", "-DGGML_NATIVE=OFF", ()), GCC, "0.3.36"),
        wheel_key(pose(cpuinfo=XEON), plan, GCC, "0.3.36"),
        wheel_key(pose(cpuinfo=RYZEN.replace("avx2", "avx2 vnni")), plan, GCC, "0.3.36"),
        *(wheel_key(pose(env={name: "x"}), plan, GCC, "0.3.36") for name in BUILD_VARIABLES),
    }
    assert len(others) == 5 + len(BUILD_VARIABLES)
    assert usual not in others


@pytest.mark.parametrize(
    ("manager", "hint"),
    [
        ("apt-get", "Run `sudo apt-get install build-essential`"),
        ("dnf", "Run `sudo dnf install gcc-c++`"),
        ("pacman", "Run `sudo pacman -S base-devel`"),
        ("zypper", "Run `sudo zypper install gcc-c++`"),
        ("nothing known", "Install a C++ compiler (g++ or clang++)"),
    ],
)
def test_install_hint_speaks_the_systems_language(manager: str, hint: str) -> None:
    assert install_hint(pose({manager: ""}), "compiler") == hint


def test_install_hint_on_a_mac() -> None:
    assert install_hint(pose(system="Darwin"), "compiler") == "Run `xcode-select --install`"


@pytest.mark.parametrize(
    ("cores", "gibibytes", "backend", "jobs"),
    [(8, 64, "cpu", 8), (16, 8, "cpu", 8), (16, 8, "cuda", 4), (4, 1, "cuda", 1), (4, 0, "cpu", 4)],
)
def test_build_jobs_fit_cores_and_memory(
    cores: int, gibibytes: int, backend: Backend, jobs: int
) -> None:
    assert build_jobs(cores, gibibytes * 1024**3, backend) == jobs


def test_a_command_that_is_not_there_is_an_answer_not_an_exception() -> None:
    assert run_command(["localspec-no-such-command"]).code == 127
