"""Detect the GPUs of this machine and their compilers, and whether the code of a build runs on them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.machine.host import Host, try_program


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    """Compute capability, such as "9.0"; empty if the driver is too old to report it."""
    driver: str


def nvidia_gpus(host: Host) -> list[Gpu]:
    """Return the NVIDIA GPUs that the driver can use now."""
    if not host.which("nvidia-smi"):
        return []
    rows = _query_gpus(host, "name,compute_cap,driver_version", "csv,noheader")
    if rows is not None:
        is_known = re.compile(r"\d+\.\d+").fullmatch
        return [Gpu(name, cap if is_known(cap) else "", driver) for name, cap, driver in rows]
    # Drivers before version 510 do not know compute_cap.
    listed = host.run(["nvidia-smi", "-L"])
    names = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed.out, re.MULTILINE)
    return [Gpu(name, "", "") for name in names] if listed.code == 0 else []


def _query_gpus(host: Host, columns: str, form: str) -> list[list[str]] | None:
    """Return one row per GPU from nvidia-smi, complete rows only, or None if it does not know a column."""
    result = host.run(["nvidia-smi", f"--query-gpu={columns}", f"--format={form}"])
    if result.code != 0:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in result.out.splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]


def driver_cuda_version(host: Host) -> str:
    """Return the newest CUDA version that the installed driver runs ("12.4"), or "" if it is unknown."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", host.run(["nvidia-smi", "-q"]).out)
    return match[1] if match else ""


@dataclass(frozen=True)
class CudaToolkit:
    nvcc: str
    version: str
    on_path: bool
    """Whether cmake finds this nvcc without a flag."""


def find_cuda_toolkit(host: Host) -> CudaToolkit | None:
    """Return the CUDA compiler, which is on PATH or where its installers put it."""
    homes = [host.env.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda", "/opt/cuda") if home]
    for name in filter(None, (host.env.get("CUDACXX"), "nvcc", *candidates)):
        if nvcc := host.which(name):
            release = re.search(r"release ([\d.]+)", host.run([nvcc, "--version"]).out)
            if release:
                on_path = name == "nvcc" or name == host.env.get("CUDACXX")
                return CudaToolkit(nvcc, release[1], on_path)
    return None


def has_cublas(host: Host, toolkit: CudaToolkit) -> bool:
    """Return whether cuBLAS, which llama.cpp needs, can be compiled against.

    cmake would notice its absence late and with a confusing message.
    """
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        source = Path(folder, "probe.cu")
        source.write_text("#include <cublas_v2.h>\n")
        result = host.run([toolkit.nvcc, "-E", "-o", f"{folder}/probe.ii", str(source)])
        return result.code == 0


def cuda_architectures(host: Host, toolkit: CudaToolkit, gpus: Sequence[Gpu]) -> str | None:
    """Return CMAKE_CUDA_ARCHITECTURES for exactly these GPUs, or None if the toolkit supports none of them.

    Each architecture is compiled separately, so fewer of them build sooner. A GPU newer than the toolkit
    gets the toolkit's newest architecture as PTX, which its driver compiles at the first run.
    """
    listing = host.run([toolkit.nvcc, "--list-gpu-arch"])
    known = sorted(int(arch) for arch in re.findall(r"compute_(\d+)\b", listing.out))
    present = sorted({int(gpu.capability.replace(".", "")) for gpu in gpus if gpu.capability})
    if not known or not present:
        return "native"
    architectures = [f"{arch}-real" for arch in present if arch in known]
    if present[-1] > known[-1]:
        architectures.append(f"{known[-1]}-virtual")
    return ";".join(architectures) or None


def nvidia_complaint(host: Host) -> str:
    """Return nvidia-smi's error if it exists but the driver does not respond, or ""."""
    if not host.which("nvidia-smi"):
        return ""
    listing = host.run(["nvidia-smi", "-L"])
    if listing.code == 0:
        return ""
    return listing.out.strip().partition("\n")[0] or "it exits with an error"


def gpus_are_hidden(host: Host) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every GPU."""
    return host.env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU, in MiB."""

    name: str
    free: int
    total: int


def nvidia_memory(host: Host) -> list[GpuMemory]:
    """Return the free memory of each NVIDIA GPU. A GPU that does not report it is left out."""
    if not host.which("nvidia-smi"):
        return []
    rows = _query_gpus(host, "name,memory.free,memory.total", "csv,noheader,nounits")
    return [
        GpuMemory(name, int(free), int(total))
        for name, free, total in rows or ()
        if free.isdecimal() and total.isdecimal()
    ]


def architectures_run_on(architectures: str, capability: str) -> bool:
    """Return whether code for these CMAKE_CUDA_ARCHITECTURES ("80-real;90") runs on a GPU ("8.6").

    Machine code ("-real") runs on GPUs of its own generation with the same or a higher minor version.
    PTX ("-virtual") also runs on everything newer. An architecture without a suffix has both, and
    "native" was built for the GPUs of the build machine.
    """
    if not capability:
        return True
    major, minor = map(int, capability.split("."))

    def runs(architecture: str) -> bool:
        match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture.strip())
        if not match:
            return True  # "native", "all", "all-major"
        built, suffix, kind = (int(match[1]), int(match[2])), match[3], match[4]
        if suffix == "a":
            return built == (major, minor)
        is_newer = built <= (major, minor)
        return is_newer and (built[0] == major or (kind != "-real" and not suffix))

    return any(runs(name) for name in architectures.split(";"))


# Programs that test for what a Vulkan build needs. cmake would fail in the middle of the build.
_VULKAN_PROGRAM = """
#include <vulkan/vulkan.h>
int main() { return vkEnumerateInstanceVersion(nullptr) == VK_SUCCESS; }
"""
# llama.cpp uses VK_EXT_layer_settings, which the headers of Debian 12 do not have. Without this test
# the build would fail after minutes.
_LAYERS_PROGRAM = """
#include <vulkan/vulkan.h>
#if defined(VK_EXT_layer_settings) && __has_include(<vulkan/vulkan.hpp>)
int main() { return 0; }
#else
#error
#endif
"""
NEWER_VULKAN_HEADERS = "newer Vulkan headers (with VK_EXT_layer_settings)"
_SPIRV_PROGRAM = """
#if __has_include(<spirv/unified1/spirv.hpp>)
int main() { return 0; }
#else
#error
#endif
"""


def vulkan_gpus(host: Host) -> list[str]:
    """Return the names of the GPUs that Vulkan finds. Software renderers are left out."""
    if not host.which("vulkaninfo"):
        return []
    summary = host.run(["vulkaninfo", "--summary"])
    if summary.code != 0:
        return []
    devices = re.findall(r"deviceType\s*=\s*(\w+)\s+deviceName\s*=\s*(.+)", summary.out)
    return [name.strip() for kind, name in devices if kind.endswith("_GPU")]


def missing_for_vulkan(host: Host, compiler: Sequence[str]) -> list[str]:
    """Return what a Vulkan build needs and this machine does not have."""
    missing = [] if host.which("glslc") else ["glslc"]
    if try_program(host, compiler, _VULKAN_PROGRAM, "-lvulkan") == "not compiled":
        missing.append("Vulkan's headers and loader")
    elif try_program(host, compiler, _LAYERS_PROGRAM) == "not compiled":
        missing.append(NEWER_VULKAN_HEADERS)
    if try_program(host, compiler, _SPIRV_PROGRAM) == "not compiled":
        missing.append("the SPIR-V headers")
    return missing
