"""Choose how llama.cpp is best built for this machine, and give the reasons."""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localspec.machine.gpu import (
    NEWER_VULKAN_HEADERS,
    CudaToolkit,
    Gpu,
    cuda_architectures,
    driver_cuda_version,
    find_cuda_toolkit,
    has_cublas,
    missing_for_vulkan,
    nvidia_complaint,
    nvidia_gpus,
    vulkan_gpus,
)
from localspec.machine.host import (
    NO_AMX,
    Compiler,
    Host,
    Requirement,
    detect_cpu,
    install_hint,
    try_amx,
)

Backend = Literal["cpu", "cuda", "vulkan", "metal", "user"]

# The multimodal library (LLAVA_BUILD) reads pictures, and runs no ffmpeg for films.
# RPC runs layers on other machines (localspec rpc-worker).
COMMON_FLAGS = ("-DLLAVA_BUILD=ON", "-DMTMD_VIDEO=OFF", "-DGGML_RPC=ON")

# Variables that change the compiler's output, and so the key of the wheel.
BUILD_VARIABLES = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDACXX",
    "CUDAFLAGS",
    "MACOSX_DEPLOYMENT_TARGET",
)

# scripts/setup exists in a checkout only. An installed package has no such file beside it.
CHECKOUT = Path(__file__).parents[2].joinpath("scripts", "setup").is_file()


@dataclass(frozen=True)
class BuildReason:
    """The reason for one decision of a build plan, and what would lead to a better one, if anything."""

    about: Literal["GPU", "AMX"]
    what: str
    first: str = ""

    @property
    def cure(self) -> str:
        """A sentence on how to get a better build, or nothing."""
        command = "scripts/setup --again" if CHECKOUT else "localspec doctor"
        return f"{self.first}, then run `{command}`." if self.first else ""

    def __str__(self) -> str:
        return f"{self.what} {self.cure}".rstrip()


@dataclass(frozen=True)
class BuildPlan:
    """How to build llama-cpp-python on this machine, with the reasons."""

    backend: Backend
    cmake_args: str
    reasons: tuple[BuildReason, ...]


def rebuild_command(plan: BuildPlan | None = None) -> str:
    """Return the command that rebuilds the installed llama.cpp as planned, or with pip's defaults."""
    if CHECKOUT:
        return "scripts/setup --again"
    import importlib.metadata  # takes 10 ms, which every start of the daemon would wait for

    try:
        pinned = f"llama-cpp-python=={importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        pinned = "llama-cpp-python"
    flags = f"CMAKE_ARGS={shlex.quote(plan.cmake_args)} " if plan else ""
    # Without --no-cache-dir pip would use a wheel that it built with other flags.
    options = "--force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python"
    return f"{flags}{shlex.quote(sys.executable)} -m pip install {options} {pinned}"


def plan_build(host: Host, compiler: Compiler, user_args: str | None = None) -> BuildPlan:
    """Choose the build for this machine. The user's own CMAKE_ARGS win over every choice."""
    if user_args is not None:
        return BuildPlan(
            "user",
            user_args,
            (BuildReason("GPU", f"CMAKE_ARGS is used as it is: {user_args or '(empty)'}"),),
        )
    backend, gpu_flags, gpu_reason = _choose_backend(host, compiler)
    cpu_flags, cpu_reasons = _choose_cpu_flags(host, compiler)
    return BuildPlan(
        backend, shlex.join([*COMMON_FLAGS, *gpu_flags, *cpu_flags]), (gpu_reason, *cpu_reasons)
    )


# A backend, its cmake flags, and the reason.
BackendChoice = tuple[Backend, list[str], BuildReason]


def _choose_backend(host: Host, compiler: Compiler) -> BackendChoice:
    if host.system == "Darwin":
        if host.arch == "arm64":
            reason = BuildReason("GPU", "Metal: this is a Mac with an Apple GPU.")
            return "metal", ["-DGGML_METAL=ON"], reason
        # llama.cpp's own releases for Intel Macs are built without Metal too.
        no_metal = "CPU: llama.cpp's Metal code is for Apple's GPUs, this is an Intel Mac."
        return "cpu", ["-DGGML_METAL=OFF"], BuildReason("GPU", no_metal)
    toolkit, gpus = find_cuda_toolkit(host), nvidia_gpus(host)
    cuda = _choose_cuda(host, toolkit, gpus) if gpus else None
    if cuda and cuda[0] == "cuda":
        return cuda
    vulkan = _choose_vulkan(host, compiler, bool(gpus))
    if vulkan and (vulkan[0] == "vulkan" or not cuda):
        return vulkan
    return cuda or ("cpu", [], _explain_no_gpu(host, toolkit))


def _explain_no_gpu(host: Host, toolkit: CudaToolkit | None) -> BuildReason:
    toolkit_note = f"a CUDA {toolkit.version} compiler, but " if toolkit else ""
    message = f"CPU: there is {toolkit_note}no working NVIDIA GPU"
    if complaint := nvidia_complaint(host):
        cure = "Restart the machine or reinstall NVIDIA's driver"
        return BuildReason("GPU", f"{message}: nvidia-smi says `{complaint}`.", cure)
    return BuildReason("GPU", f"{message} (nvidia-smi lists none).")


def _choose_cuda(host: Host, toolkit: CudaToolkit | None, gpus: Sequence[Gpu]) -> BackendChoice:
    if not toolkit:
        no_compiler = f"CPU: there is an {gpus[0].name}, but no CUDA compiler (nvcc)."
        return "cpu", [], BuildReason("GPU", no_compiler, install_hint(host, "cuda"))
    runnable = driver_cuda_version(host)
    if runnable and int(toolkit.version.split(".")[0]) > int(runnable.split(".")[0]):
        too_old = (
            f"CPU: nvcc is CUDA {toolkit.version}, but the GPU's driver supports at most CUDA "
            f"{runnable}."
        )
        cure = f"Update the driver or install a CUDA {runnable} toolkit"
        return "cpu", [], BuildReason("GPU", too_old, cure)
    if not has_cublas(host, toolkit):
        without = f"CPU: CUDA {toolkit.version} is installed without cuBLAS."
        return "cpu", [], BuildReason("GPU", without, install_hint(host, "cublas"))
    architectures = cuda_architectures(host, toolkit, gpus)
    if architectures is None:
        too_new = (
            f"CPU: CUDA {toolkit.version} no longer supports {gpus[0].name} (compute "
            f"{gpus[0].capability})."
        )
        return "cpu", [], BuildReason("GPU", too_new, "Install an older CUDA toolkit")
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    if not toolkit.on_path:
        flags.append(f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}")
    reason = f"CUDA {toolkit.version} for {gpus[0].name} (architecture {architectures})."
    return "cuda", flags, BuildReason("GPU", reason)


def _choose_vulkan(host: Host, compiler: Compiler, has_nvidia: bool) -> BackendChoice | None:
    """Return the choice of Vulkan, or None where Vulkan finds no GPU."""
    names = vulkan_gpus(host)
    if not names:
        return None
    if missing := missing_for_vulkan(host, compiler.command):
        lacks = f"a Vulkan build needs {', '.join(missing)}"
        without = f"CPU: there is an {names[0]}, but {lacks}."
        need: Requirement = "newer vulkan" if missing == [NEWER_VULKAN_HEADERS] else "vulkan"
        return "cpu", [], BuildReason("GPU", without, install_hint(host, need))
    slower = ", because CUDA cannot be built here; it would be faster" if has_nvidia else ""
    return "vulkan", ["-DGGML_VULKAN=ON"], BuildReason("GPU", f"Vulkan for {names[0]}{slower}.")


def _choose_cpu_flags(host: Host, compiler: Compiler) -> tuple[list[str], list[BuildReason]]:
    if "amx_tile" not in detect_cpu(host).flags:
        return [], []
    trial = try_amx(host, compiler)
    if trial == "not compiled":
        return [], [BuildReason("AMX", f"AMX: off, {compiler.version} does not support it.")]
    if trial == "works":
        return [], [
            BuildReason("AMX", f"AMX: on, {compiler.version} compiles it correctly (tested).")
        ]
    # CMAKE_C_FLAGS replaces the user's own CFLAGS, so they are repeated in it.
    flags = [
        f"-DCMAKE_{language}_FLAGS={' '.join(filter(None, (host.env.get(variable), NO_AMX)))}"
        for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS"))
    ]
    problem = f"AMX: off, {compiler.version} miscompiles it (tested; llama.cpp #20824)."
    return flags, [BuildReason("AMX", problem, "Install a newer compiler")]


def wheel_key(host: Host, plan: BuildPlan, compiler: Compiler, version: str) -> str:
    """Return a folder name that is unique to a version, its flags, the compiler and the CPU.

    llama.cpp is built with -march=native, so on another CPU it may die of an illegal instruction.
    """
    processor = detect_cpu(host)
    toolkit = find_cuda_toolkit(host) if plan.backend in ("cuda", "user") else None
    parts = [
        version,
        plan.cmake_args,
        compiler.version,
        toolkit.version if toolkit else "",
        host.system,
        host.arch,
        processor.model,
        " ".join(sorted(processor.flags)),
        *(f"{name}={host.env.get(name, '')}" for name in BUILD_VARIABLES),
    ]
    return (
        f"{version}-{plan.backend}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
    )


def build_jobs(cores: int, memory_bytes: int, backend: Backend) -> int:
    """Return how many compilers may run at once: one per core, but no more than fit in memory."""
    # g++ needs up to 1 GiB for llama.cpp's largest files, and nvcc about twice that.
    job_bytes = (2 if backend == "cuda" else 1) * 1024**3
    return max(1, min(cores, memory_bytes // job_bytes)) if memory_bytes else cores


def installed_backend() -> str | None:
    """Return the backend of the installed llama.cpp, or None if none is installed.

    The library files tell it, because importing llama_cpp would load them.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    names = " ".join(path.name for path in (Path(spec.origin).parent / "lib").glob("*"))
    return next((kind for kind in ("cuda", "metal", "vulkan") if f"ggml-{kind}" in names), "cpu")
