"""The GPUs of this machine, the compilers for them, and whether a build's code runs on them."""

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
    """Compute capability, "9.0"; empty where the driver is too old to tell."""
    driver: str


def nvidia_gpus(host: Host) -> list[Gpu]:
    """The NVIDIA GPUs the driver can use now."""
    if not host.which("nvidia-smi"):
        return []
    rows = _rows(host, "name,compute_cap,driver_version", "csv,noheader")
    if rows is not None:
        return [
            Gpu(name, capability if re.fullmatch(r"\d+\.\d+", capability) else "", driver)
            for name, capability, driver in rows
        ]
    # A driver before 510 does not know compute_cap.
    listed = host.run(["nvidia-smi", "-L"])
    names = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed.out, re.MULTILINE)
    return [Gpu(name, "", "") for name in names] if listed.code == 0 else []


def _rows(host: Host, columns: str, form: str) -> list[list[str]] | None:
    """What nvidia-smi says of each GPU, whole rows only; None where it does not know a column."""
    asked = host.run(["nvidia-smi", f"--query-gpu={columns}", f"--format={form}"])
    if asked.code != 0:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.out.splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]


def driver_cuda(host: Host) -> str:
    """The newest CUDA the installed driver can run ("12.4"); empty where it does not say."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", host.run(["nvidia-smi", "-q"]).out)
    return found[1] if found else ""


@dataclass(frozen=True)
class CudaToolkit:
    nvcc: str
    version: str
    on_path: bool
    """Whether cmake finds this nvcc without being told."""


def cuda_toolkit(host: Host) -> CudaToolkit | None:
    """The CUDA compiler, on PATH or where its installers put it."""
    homes = [host.env.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    elsewhere = [f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda", "/opt/cuda") if home]
    for name in filter(None, (host.env.get("CUDACXX"), "nvcc", *elsewhere)):
        if nvcc := host.which(name):
            release = re.search(r"release ([\d.]+)", host.run([nvcc, "--version"]).out)
            if release:
                on_path = name == "nvcc" or name == host.env.get("CUDACXX")
                return CudaToolkit(nvcc, release[1], on_path)
    return None


def cuda_can_build(host: Host, toolkit: CudaToolkit) -> bool:
    """Whether cuBLAS, which llama.cpp needs, is there to build with; cmake says it late and oddly."""
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        source = Path(folder, "probe.cu")
        source.write_text("#include <cublas_v2.h>\n")
        made = host.run([toolkit.nvcc, "-E", "-o", f"{folder}/probe.ii", str(source)])
        return made.code == 0


def cuda_architectures(host: Host, toolkit: CudaToolkit, gpus: Sequence[Gpu]) -> str | None:
    """CMAKE_CUDA_ARCHITECTURES for just these GPUs; None where the toolkit has none for any.

    Each architecture is compiled anew, so fewer build sooner. A GPU newer than the toolkit gets the
    toolkit's newest as PTX, which its driver compiles at the first run.
    """
    told = host.run([toolkit.nvcc, "--list-gpu-arch"])
    known = sorted(int(arch) for arch in re.findall(r"compute_(\d+)\b", told.out))
    present = sorted({int(gpu.capability.replace(".", "")) for gpu in gpus if gpu.capability})
    if not known or not present:
        return "native"
    wanted = [f"{arch}-real" for arch in present if arch in known]
    if present[-1] > known[-1]:
        wanted.append(f"{known[-1]}-virtual")
    return ";".join(wanted) or None


def nvidia_complaint(host: Host) -> str:
    """What nvidia-smi says where it is there and the driver does not answer; "" otherwise."""
    if not host.which("nvidia-smi"):
        return ""
    told = host.run(["nvidia-smi", "-L"])
    return "" if told.code == 0 else told.out.strip().partition("\n")[0] or "it exits with an error"


def hidden(host: Host) -> bool:
    """Whether CUDA_VISIBLE_DEVICES lets no program see a GPU."""
    return host.env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU, in MiB."""

    name: str
    free: int
    total: int


def nvidia_memory(host: Host) -> list[GpuMemory]:
    """How much of each NVIDIA GPU's memory is free now; one that does not say is left out."""
    if not host.which("nvidia-smi"):
        return []
    rows = _rows(host, "name,memory.free,memory.total", "csv,noheader,nounits")
    return [
        GpuMemory(name, int(free), int(total))
        for name, free, total in rows or ()
        if free.isdigit() and total.isdigit()
    ]


# --- what a build holds


def runs_on(architectures: str, capability: str) -> bool:
    """Whether code for these CMAKE_CUDA_ARCHITECTURES ("80-real;90") runs on a GPU ("8.6").

    Machine code ("-real") runs on its own generation from its minor version on, PTX ("-virtual") on
    everything newer too; without a suffix both are there, and "native" was built for what was there.
    """
    if not capability:
        return True
    major, minor = map(int, capability.split("."))
    return any(_runs(each, major, minor) for each in architectures.split(";"))


def _runs(architecture: str, major: int, minor: int) -> bool:
    found = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture.strip())
    if not found:
        return True  # "native", "all", "all-major"
    own, step, exact, kind = int(found[1]), int(found[2]), found[3], found[4]
    if exact == "a":
        return (own, step) == (major, minor)
    same = own == major and step <= minor
    return same or (kind != "-real" and not exact and (own, step) <= (major, minor))


# --- Vulkan, for every other GPU and where there is no CUDA compiler

# cmake finds all three or ends with an error in the middle of the build.
_VULKAN_PROGRAM = """
#include <vulkan/vulkan.h>
int main() { return vkEnumerateInstanceVersion(nullptr) == VK_SUCCESS; }
"""
# llama.cpp's code names it, and stops there after minutes: Debian 12's headers are from before.
_LAYERS_PROGRAM = """
#include <vulkan/vulkan.h>
#if defined(VK_EXT_layer_settings) && __has_include(<vulkan/vulkan.hpp>)
int main() { return 0; }
#else
#error
#endif
"""
NEWER_VULKAN = "newer Vulkan headers (with VK_EXT_layer_settings)"
_SPIRV_PROGRAM = """
#if __has_include(<spirv/unified1/spirv.hpp>)
int main() { return 0; }
#else
#error
#endif
"""


def vulkan_gpus(host: Host) -> list[str]:
    """Names of the GPUs Vulkan reaches; programs that draw on the CPU are none."""
    if not host.which("vulkaninfo"):
        return []
    told = host.run(["vulkaninfo", "--summary"])
    if told.code != 0:
        return []
    devices = re.findall(r"deviceType\s*=\s*(\w+)\s+deviceName\s*=\s*(.+)", told.out)
    return [name.strip() for kind, name in devices if kind.endswith("_GPU")]


def missing_for_vulkan(host: Host, compiler: Sequence[str]) -> list[str]:
    """What a Vulkan build needs and this machine has not."""
    missing = [] if host.which("glslc") else ["glslc"]
    if try_program(host, compiler, _VULKAN_PROGRAM, "-lvulkan") == "not compiled":
        missing.append("Vulkan's headers and loader")
    elif try_program(host, compiler, _LAYERS_PROGRAM) == "not compiled":
        missing.append(NEWER_VULKAN)
    if try_program(host, compiler, _SPIRV_PROGRAM) == "not compiled":
        missing.append("the SPIR-V headers")
    return missing
