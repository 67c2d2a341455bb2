"""Tests of localspec.machine: which build of llama.cpp a machine gets, and why."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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


Tool = str | Callable[[Sequence[str]], CommandResult]


def make_host(
    tools: Mapping[str, Tool] | None = None,
    *,
    system: str = "Linux",
    arch: str = "x86_64",
    cpuinfo: str = RYZEN,
    env: Mapping[str, str] | None = None,
    amx: bool = True,
) -> Host:
    """Return a machine with these commands: each prints its text, or the result of its function.

    `amx` is whether the probe program for AMX succeeds.
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
        # A name with a folder is found only if the tools have it; all of ours are on PATH.
        return f"/usr/bin/{name}" if name in tools else None

    return Host(system, arch, env or {}, run, which, lambda _path: cpuinfo)


def nvidia(capability: str, driver_cuda: str) -> Callable[[Sequence[str]], CommandResult]:
    def smi(argv: Sequence[str]) -> CommandResult:
        version = f"    CUDA Version                              : {driver_cuda}\n"
        listed = f"NVIDIA L4, {capability}, 580.65.06\n"
        return CommandResult(0, version if argv[1] == "-q" else listed)

    return smi


def nvcc(argv: Sequence[str]) -> CommandResult:
    return CommandResult(0, ARCHITECTURES_13 if "--list-gpu-arch" in argv else NVCC_13)


def without_cublas(argv: Sequence[str]) -> CommandResult:
    missing = CommandResult(1, "cublas_v2.h: No such file or directory")
    return missing if "-E" in argv else nvcc(argv)


def broken(_argv: Sequence[str]) -> CommandResult:
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    return CommandResult(9, failed)


def gpu(nvcc: Tool, capability: str = "9.0", driver_cuda: str = "13.0", **more: str) -> Host:
    return make_host({"nvcc": nvcc, "nvidia-smi": nvidia(capability, driver_cuda), **more})


NO_GPU = "CPU: there is a CUDA 13.0 compiler, but no working NVIDIA GPU"
NO_NVCC = "CPU: there is an NVIDIA L4, but no CUDA compiler"
INSTALL_CUDA = "Run `sudo apt-get install nvidia-cuda-toolkit`, then run `scripts/setup --again`."
NO_CUBLAS = "CPU: CUDA 13.0 is installed without cuBLAS. Install the development files of cuBLAS"
TOO_NEW = "CPU: CUDA 13.0 no longer supports NVIDIA L4 (compute 7.0)."
OLD_DRIVER = "CPU: nvcc is CUDA 13.0, but the GPU's driver supports at most CUDA 12.4."
WITHOUT_NVCC: dict[str, Tool] = {"nvidia-smi": nvidia("8.9", "13.0"), "apt-get": ""}
BROKEN_NVCC: dict[str, Tool] = {"/usr/local/cuda/bin/nvcc": "", "nvidia-smi": nvidia("9.0", "13.0")}
APPLE = "Metal: this is a Mac with an Apple GPU."
INTEL_MAC = "CPU: llama.cpp's Metal code is for Apple's GPUs"


@pytest.mark.parametrize(
    ("host", "backend", "made", "reason"),
    [
        (make_host(), "cpu", "", "CPU: there is no working NVIDIA GPU"),
        (make_host({"nvcc": nvcc}), "cpu", "", NO_GPU),
        (make_host({"nvcc": nvcc, "nvidia-smi": broken}), "cpu", "", NO_GPU),
        (make_host(WITHOUT_NVCC), "cpu", "", f"{NO_NVCC} (nvcc). {INSTALL_CUDA}"),
        (make_host(BROKEN_NVCC), "cpu", "", NO_NVCC),
        (gpu(nvcc), "cuda", "90-real", "CUDA 13.0 for NVIDIA L4 (architecture 90-real)."),
        (
            gpu(nvcc, "13.5", "14.1"),
            "cuda",
            "120-virtual",
            "CUDA 13.0 for NVIDIA L4 (architecture 120",
        ),
        (gpu(nvcc, "7.0"), "cpu", "", TOO_NEW),
        (gpu(nvcc, "8.0", "12.4"), "cpu", "", OLD_DRIVER),
        (gpu(without_cublas), "cpu", "", NO_CUBLAS),
        (make_host(system="Darwin", arch="arm64"), "metal", "-DGGML_METAL=ON", APPLE),
        (make_host(system="Darwin"), "cpu", "-DGGML_METAL=OFF", INTEL_MAC),
    ],
)
def test_the_backend_is_one_that_works(
    host: Host, backend: Backend, made: str, reason: str
) -> None:
    """made: the architectures of CUDA, or flags."""
    flags = f"-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES={made}" if backend == "cuda" else made
    plan = plan_build(host, GCC)
    assert plan.backend == backend
    assert plan.cmake_args == f"-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF -DGGML_RPC=ON {flags}".strip()
    assert str(plan.reasons[0]).startswith(reason)


def test_nvcc_outside_the_path_is_passed_to_cmake() -> None:
    host = make_host({"nvidia-smi": nvidia("9.0", "13.0")}, env={"CUDA_HOME": "/opt/cuda-13"})
    path = "/opt/cuda-13/bin/nvcc"
    with_cuda = replace(
        host,
        run=lambda argv: nvcc(argv) if argv[0].endswith("nvcc") else host.run(argv),
        which=lambda name: name if name == path else host.which(name),
    )
    assert f"-DCMAKE_CUDA_COMPILER={path}" in plan_build(with_cuda, GCC).cmake_args


def test_a_gpu_with_an_old_driver_is_found_without_its_capability() -> None:
    def smi(argv: Sequence[str]) -> CommandResult:
        if argv[1] == "-L":
            return CommandResult(0, "GPU 0: Tesla T4 (UUID: GPU-1)\n")
        return CommandResult(2, 'Field "compute_cap" is not valid')

    host = make_host({"nvidia-smi": smi, "nvcc": nvcc})
    assert [gpu.name for gpu in nvidia_gpus(host)] == ["Tesla T4"]
    assert "-DCMAKE_CUDA_ARCHITECTURES=native" in plan_build(host, GCC).cmake_args


def test_amx_is_disabled_if_the_probe_fails() -> None:
    plan = plan_build(make_host(cpuinfo=XEON, amx=False), GCC)
    assert f"'-DCMAKE_C_FLAGS={NO_AMX}' '-DCMAKE_CXX_FLAGS={NO_AMX}'" in plan.cmake_args
    assert str(plan.reasons[1]).startswith(f"AMX: off, {GCC.version} miscompiles it (tested")
    # The user's own flags survive.
    host = make_host(cpuinfo=XEON, amx=False, env={"CFLAGS": "-g"})
    assert f"-DCMAKE_C_FLAGS=-g {NO_AMX}" in plan_build(host, GCC).cmake_args


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64")
def test_amx_probe_loses_its_stores_under_a_flawed_intrinsic(tmp_path: Path) -> None:
    """The probe works only if the flaw affects it, whatever the CPU of this test."""
    # The operand as GCC 12 declares it, and one that covers all 64 bytes.
    operands = {"flawed": "*(const void *const *)&tiles", "right": "tiles"}
    instructions = {}
    for name, operand in operands.items():
        source = tmp_path / f"{name}.cpp"
        loaded = f'__asm__ volatile ("ldtilecfg %0" :: "m" ({operand}))'
        source.write_text(AMX_PROBE.replace("_tile_loadconfig(&tiles)", loaded))
        assembly = run_command(["c++", "-O2", "-mamx-tile", "-S", "-o", "-", str(source)])
        if assembly.code:
            pytest.skip("this compiler does not know AMX")
        instructions[name] = assembly.out.split("load", 1)[1].count("\n")
    assert instructions["flawed"] < instructions["right"]


def test_a_compiler_without_amx_gets_no_flag_against_it() -> None:
    def old(argv: Sequence[str]) -> CommandResult:
        return CommandResult(1 if "-mamx-tile" in argv else 0, "unrecognized option '-mamx-tile'")

    plan = plan_build(make_host({"c++": old}, cpuinfo=XEON), GCC)
    assert "amx" not in plan.cmake_args
    assert str(plan.reasons[1]) == f"AMX: off, {GCC.version} does not support it."


def test_amx_is_tried_on_a_cpu_that_has_it_and_stays_enabled_if_that_works() -> None:
    plan = plan_build(make_host(cpuinfo=XEON, amx=True), GCC)
    assert "amx" not in plan.cmake_args
    assert str(plan.reasons[1]).startswith("AMX: on")
    assert len(plan_build(make_host(cpuinfo=RYZEN, amx=False), GCC).reasons) == 1


@pytest.mark.parametrize("arguments", ["-DGGML_VULKAN=ON", ""])
def test_cmake_args_of_the_user_are_used_as_they_are(arguments: str) -> None:
    plan = plan_build(make_host({"nvcc": nvcc}, cpuinfo=XEON, amx=False), GCC, arguments)
    assert (plan.backend, plan.cmake_args) == ("user", arguments)
    assert tuple(map(str, plan.reasons)) == (
        f"CMAKE_ARGS is used as it is: {arguments or '(empty)'}",
    )


def test_a_compiler_must_make_a_program() -> None:
    def cannot(argv: Sequence[str]) -> CommandResult:
        return CommandResult(0 if "--version" in argv else 1, "xcode-select: no developer tools")

    assert find_compiler(make_host({"c++": cannot})) is None
    compiler = find_compiler(make_host({"c++": cannot, "g++": "g++ 14.2"}))
    assert compiler == Compiler(("g++",), "g++ 14.2")


def test_cxx_is_the_only_compiler_that_is_tried() -> None:
    assert find_compiler(make_host(env={"CXX": "icpx"})) is None
    compiler = find_compiler(make_host({"ccache": "ccache 4"}, env={"CXX": "ccache g++"}))
    assert compiler == Compiler(("ccache", "g++"), "ccache 4")


def test_cpu_is_read_from_its_first_core() -> None:
    assert detect_cpu(make_host(cpuinfo=XEON)).flags == {"sse2", "avx512f", "amx_tile"}
    info = "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nFeatures\t: fp asimd\n"
    arm = detect_cpu(make_host(cpuinfo=info))
    assert arm.model == "0x41 0xd0c"
    assert arm.flags == {"fp", "asimd"}
    assert detect_cpu(make_host({"sysctl": "Apple M4\n"}, system="Darwin")).model == "Apple M4"


def test_wheel_key_changes_with_everything_the_wheel_depends_on() -> None:
    plan = plan_build(make_host(), GCC)
    usual = wheel_key(make_host(), plan, GCC, "0.3.36")
    assert usual == wheel_key(make_host(env={"EDITOR": "vi"}), plan, GCC, "0.3.36")
    other_keys = {
        wheel_key(make_host(), plan, GCC, "0.3.37"),
        wheel_key(make_host(), plan, Compiler(("c++",), "14.2"), "0.3.36"),
        wheel_key(make_host(), BuildPlan("cpu", "-DGGML_NATIVE=OFF", ()), GCC, "0.3.36"),
        wheel_key(make_host(cpuinfo=XEON), plan, GCC, "0.3.36"),
        wheel_key(make_host(cpuinfo=RYZEN.replace("avx2", "avx2 vnni")), plan, GCC, "0.3.36"),
        *(wheel_key(make_host(env={name: "x"}), plan, GCC, "0.3.36") for name in BUILD_VARIABLES),
    }
    assert len(other_keys) == 5 + len(BUILD_VARIABLES)
    assert usual not in other_keys


def test_the_install_hint_uses_the_systems_package_manager() -> None:
    for manager, hint in (
        ("apt-get", "Run `sudo apt-get install build-essential`"),
        ("dnf", "Run `sudo dnf install gcc-c++`"),
        ("pacman", "Run `sudo pacman -S base-devel`"),
        ("zypper", "Run `sudo zypper install gcc-c++`"),
        ("nothing known", "Install a C++ compiler (g++ or clang++)"),
    ):
        assert install_hint(make_host({manager: ""}), "compiler") == hint
    assert install_hint(make_host(system="Darwin"), "compiler") == "Run `xcode-select --install`"


@pytest.mark.parametrize(
    ("cores", "gibibytes", "backend", "jobs"),
    [(8, 64, "cpu", 8), (16, 8, "cpu", 8), (16, 8, "cuda", 4), (4, 1, "cuda", 1), (4, 0, "cpu", 4)],
)
def test_build_jobs_fit_the_machine(
    cores: int, gibibytes: int, backend: Backend, jobs: int
) -> None:
    assert build_jobs(cores, gibibytes * 1024**3, backend) == jobs


def test_a_missing_command_returns_a_result() -> None:
    assert run_command(["localspec-no-such-command"]).code == 127
