"""What this machine is and how llama.cpp is best built for it.

`scripts/setup` uses it before anything is installed, so it needs the standard library alone, and
`localspec doctor` afterwards. Everything is asked through a `Host`: a test can pose as any machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["cpu", "cuda", "metal", "user"]
Trial = Literal["not compiled", "fails", "works"]
Need = Literal["compiler", "venv", "cuda"]

# Nothing here answers a question about a picture, so the multimodal library is not built.
COMMON_FLAGS = ("-DLLAVA_BUILD=OFF",)

# `doctor` and `setup` ask tools that answer in milliseconds; one that hangs (a driver that does not
# come back, as nvidia-smi after a failed resume) counts as one that is not there.
TOOL_TIMEOUT_S = 60

# Variables that change what the compiler makes, and with it the key of the wheel.
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


@dataclass(frozen=True)
class Ran:
    """How a command ended; `code` is 127 when it could not be started."""

    code: int
    out: str


def run_command(argv: Sequence[str]) -> Ran:
    """Run a command to its end, both its outputs joined; never raises for what it did."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TOOL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Ran(127, str(error))
    return Ran(done.returncode, done.stdout)


def read_text(path: str) -> str:
    """The file's text, or nothing where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Host:
    """The outside world, as far as detection looks at it."""

    system: str
    arch: str
    env: Mapping[str, str]
    run: Callable[[Sequence[str]], Ran]
    which: Callable[[str], str | None]
    read: Callable[[str], str]

    @classmethod
    def here(cls) -> Host:
        """The machine this runs on."""
        uname = os.uname()
        return cls(uname.sysname, uname.machine, os.environ, run_command, shutil.which, read_text)


# --- what is there


@dataclass(frozen=True)
class Cpu:
    model: str
    flags: frozenset[str]


def cpu(host: Host) -> Cpu:
    """The processor's name and instruction sets, as the system tells them."""
    if host.system == "Darwin":
        return Cpu(host.run(["sysctl", "-n", "machdep.cpu.brand_string"]).out.strip(), frozenset())
    first = host.read("/proc/cpuinfo").split("\n\n", 1)[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    # Arm names no model, only numbers.
    model = fields.get("model name") or " ".join(
        fields[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in fields
    )
    return Cpu(model, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def compiler(host: Host) -> Compiler | None:
    """The C++ compiler cmake will find, if it really makes a program.

    Asking for its version is not enough: macOS has a `c++` that only offers to install one, and
    clang on Linux comes without the C++ library.
    """
    named = host.env.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        command = tuple(shlex.split(name))
        if not command or not host.which(command[0]):
            continue
        version = host.run([*command, "--version"])
        hello = '#include <cstdio>\nint main() { return std::puts("") < 0; }\n'
        if version.code == 0 and _try_program(host, command, hello) == "works":
            return Compiler(command, version.out.partition("\n")[0].strip())
    return None


def _try_program(host: Host, compiler: Sequence[str], source: str, *flags: str) -> Trial:
    """Compile this C++ program with -O2 and run it."""
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        program = Path(folder, "probe")
        Path(folder, "probe.cpp").write_text(source)
        if host.run([*compiler, "-O2", *flags, "-o", str(program), f"{program}.cpp"]).code != 0:
            return "not compiled"
        return "works" if host.run([str(program)]).code == 0 else "fails"


# Older GCCs take _tile_loadconfig to read 8 of its 64 bytes, so at -O2 they drop or delay the stores
# of the rest, and the tiles get whatever shape lay in memory: SIGSEGV at the first decode (llama.cpp
# #20824). A version number would not tell, distributions carry fixes back; a try does. The shape is
# set in a function of its own, where nothing but the intrinsic could need it; on a compiler that
# is wrong those stores are gone from the program.
AMX_PROBE = """
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
struct Tiles {
    unsigned char palette, row, reserved[14];
    unsigned short bytes[16];
    unsigned char rows[16];
};
static void load() {
    Tiles tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; i++) { tiles.bytes[i] = 64; tiles.rows[i] = 16; }
    _tile_loadconfig(&tiles);
}
static void store(Tiles *tiles) { _tile_storeconfig(tiles); }
int main() {
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */)) return 2;
    void (*volatile not_inlined_load)() = load;
    void (*volatile not_inlined_store)(Tiles *) = store;
    Tiles tiles;
    memset(&tiles, 0, sizeof tiles);
    not_inlined_load();
    not_inlined_store(&tiles);
    for (int i = 0; i < 8; i++) if (tiles.bytes[i] != 64 || tiles.rows[i] != 16) return 1;
    return 0;
}
"""
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


def try_amx(host: Host, compiler: Compiler) -> Trial:
    """Whether this compiler's code for AMX tiles does what it says on this CPU."""
    return _try_program(host, compiler.command, AMX_PROBE, "-mamx-tile")


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
    asked = host.run(
        ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    )
    if asked.code == 0:
        rows = [[cell.strip() for cell in line.split(",")] for line in asked.out.splitlines()]
        return [
            Gpu(name, capability if re.fullmatch(r"\d+\.\d+", capability) else "", driver)
            for name, capability, driver in (row for row in rows if len(row) == 3)
        ]
    # A driver before 510 does not know compute_cap.
    listed = host.run(["nvidia-smi", "-L"])
    names = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed.out, re.MULTILINE)
    return [Gpu(name, "", "") for name in names] if listed.code == 0 else []


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


# --- what to build

AGAIN = "then run `scripts/setup --again`."


@dataclass(frozen=True)
class Plan:
    """How to build llama-cpp-python here, and why so: one sentence per decision."""

    backend: Backend
    cmake_args: str
    reasons: tuple[str, ...]


def plan_build(host: Host, compiler: Compiler, user_args: str | None = None) -> Plan:
    """Choose the build for this machine; the user's own CMAKE_ARGS win over every choice."""
    if user_args is not None:
        return Plan("user", user_args, (f"CMAKE_ARGS is used as it is: {user_args or '(empty)'}",))
    backend, gpu_flags, gpu_reason = _choose_backend(host)
    cpu_flags, cpu_reasons = _choose_cpu_flags(host, compiler)
    return Plan(
        backend, shlex.join([*COMMON_FLAGS, *gpu_flags, *cpu_flags]), (gpu_reason, *cpu_reasons)
    )


def _choose_backend(host: Host) -> tuple[Backend, list[str], str]:
    if host.system == "Darwin":
        if host.arch == "arm64":
            return "metal", ["-DGGML_METAL=ON"], "Metal: this is a Mac with an Apple GPU."
        # llama.cpp's own releases for Intel Macs are built without Metal too.
        return (
            "cpu",
            ["-DGGML_METAL=OFF"],
            "CPU: llama.cpp's Metal code is for Apple's GPUs, this is an Intel Mac.",
        )

    toolkit, gpus = cuda_toolkit(host), nvidia_gpus(host)
    if not gpus:
        found = f"a CUDA {toolkit.version} compiler, but " if toolkit else ""
        return "cpu", [], f"CPU: there is {found}no working NVIDIA GPU (nvidia-smi lists none)."
    if not toolkit:
        cure = install_hint(host, "cuda")
        return (
            "cpu",
            [],
            f"CPU: there is an {gpus[0].name}, but no CUDA compiler (nvcc). {cure}, {AGAIN}",
        )

    runnable = driver_cuda(host)
    if runnable and int(toolkit.version.split(".")[0]) > int(runnable.split(".")[0]):
        return (
            "cpu",
            [],
            (
                f"CPU: nvcc is CUDA {toolkit.version}, but the GPU's driver runs CUDA {runnable} "
                f"at most. Update the driver or install a CUDA {runnable} toolkit, {AGAIN}"
            ),
        )
    architectures = cuda_architectures(host, toolkit, gpus)
    if architectures is None:
        return (
            "cpu",
            [],
            (
                f"CPU: CUDA {toolkit.version} no longer builds for {gpus[0].name} "
                f"(compute {gpus[0].capability}). Install an older CUDA toolkit, {AGAIN}"
            ),
        )
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    if not toolkit.on_path:
        flags.append(f"-DCMAKE_CUDA_COMPILER={toolkit.nvcc}")
    return (
        "cuda",
        flags,
        f"CUDA {toolkit.version} for {gpus[0].name} (architecture {architectures}).",
    )


def _choose_cpu_flags(host: Host, compiler: Compiler) -> tuple[list[str], list[str]]:
    if "amx_tile" not in cpu(host).flags:
        return [], []
    trial = try_amx(host, compiler)
    if trial == "not compiled":
        return [], [f"AMX: off, {compiler.version} does not know it."]
    if trial == "works":
        return [], [f"AMX: on, {compiler.version} compiles it correctly (tried)."]
    # The user's own CFLAGS would be lost under CMAKE_C_FLAGS, so they are joined to it.
    flags = [
        f"-DCMAKE_{language}_FLAGS={' '.join(filter(None, (host.env.get(variable), NO_AMX)))}"
        for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS"))
    ]
    return flags, [
        f"AMX: off, what {compiler.version} makes of it fails (tried; llama.cpp #20824). "
        f"Install a newer compiler, {AGAIN}"
    ]


def wheel_key(host: Host, plan: Plan, compiler: Compiler, version: str) -> str:
    """A folder name for a wheel: of its own for each version, flags, compiler and CPU.

    llama.cpp is built with -march=native: on another CPU it may die of an illegal instruction.
    """
    here = cpu(host)
    toolkit = cuda_toolkit(host) if plan.backend in ("cuda", "user") else None
    told = [
        version,
        plan.cmake_args,
        compiler.version,
        toolkit.version if toolkit else "",
        host.system,
        host.arch,
        here.model,
        " ".join(sorted(here.flags)),
        *(f"{name}={host.env.get(name, '')}" for name in BUILD_VARIABLES),
    ]
    return f"{version}-{plan.backend}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}"


# --- what to install

PACKAGES: Mapping[str, Mapping[Need, str]] = {
    "apt-get": {
        "compiler": "sudo apt-get install build-essential",
        "venv": f"sudo apt-get install python3.{sys.version_info[1]}-venv",
        "cuda": "sudo apt-get install nvidia-cuda-toolkit",
    },
    "dnf": {"compiler": "sudo dnf install gcc-c++", "venv": "sudo dnf install python3-libs"},
    "pacman": {
        "compiler": "sudo pacman -S base-devel",
        "venv": "sudo pacman -S python",
        "cuda": "sudo pacman -S cuda",
    },
    "zypper": {"compiler": "sudo zypper install gcc-c++", "venv": "sudo zypper install python3"},
    "apk": {"compiler": "sudo apk add build-base linux-headers", "venv": "sudo apk add python3"},
}
ANYWHERE: Mapping[Need, str] = {
    "compiler": "Install a C++ compiler (g++ or clang++)",
    "venv": "Install Python's venv and ensurepip modules",
    "cuda": "Install NVIDIA's CUDA toolkit",
}


def install_hint(host: Host, need: Need) -> str:
    """What to do on this system to get what is missing, without the full stop."""
    if host.system == "Darwin":
        mac: Mapping[Need, str] = {
            "compiler": "xcode-select --install",
            "venv": "brew install python",
        }
        return f"Run `{mac[need]}`" if need in mac else ANYWHERE[need]
    for manager, packages in PACKAGES.items():
        if host.which(manager):
            return f"Run `{packages[need]}`" if need in packages else ANYWHERE[need]
    return ANYWHERE[need]


def memory_bytes() -> int:
    """The machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def build_jobs(cores: int, memory_bytes: int, backend: Backend) -> int:
    """How many compilers at once: one a core, but no more than memory carries."""
    # A gibibyte holds g++ on llama.cpp's largest files; nvcc's templates take about twice that.
    each = (2 if backend == "cuda" else 1) * 1024**3
    return max(1, min(cores, memory_bytes // each)) if memory_bytes else cores
