"""Detect the system, processor and compiler of this machine.

Everything is queried through a `Host`, so a test can simulate any machine.
"""

from __future__ import annotations

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

Trial = Literal["not compiled", "fails", "works"]
Need = Literal["compiler", "venv", "cuda", "cublas", "vulkan", "newer vulkan"]

# The tools that `doctor` and `setup` run respond in milliseconds. One that hangs (such as nvidia-smi
# after a failed resume) is treated as missing.
TOOL_TIMEOUT_S = 60


@dataclass(frozen=True)
class Ran:
    """The result of a command; `code` is 127 if it could not be started."""

    code: int
    out: str


def run_command(argv: Sequence[str]) -> Ran:
    """Run a command to its end and return its joined outputs. Never raise for a failure of the command."""
    try:
        process = subprocess.run(
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
    return Ran(process.returncode, process.stdout)


def read_text(path: str) -> str:
    """Return the file's text, or "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Host:
    """The outside world as far as detection uses it."""

    system: str
    arch: str
    env: Mapping[str, str]
    run: Callable[[Sequence[str]], Ran]
    which: Callable[[str], str | None]
    read: Callable[[str], str]

    @classmethod
    def here(cls) -> Host:
        """Return the machine that this process runs on."""
        uname = os.uname()
        return cls(uname.sysname, uname.machine, os.environ, run_command, shutil.which, read_text)


@dataclass(frozen=True)
class Cpu:
    model: str
    flags: frozenset[str]


def cpu(host: Host) -> Cpu:
    """Return the processor's name and instruction sets, as the system reports them."""
    if host.system == "Darwin":
        return Cpu(host.run(["sysctl", "-n", "machdep.cpu.brand_string"]).out.strip(), frozenset())
    first = host.read("/proc/cpuinfo").split("\n\n", 1)[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    # Arm processors report numbers instead of a model name.
    model = fields.get("model name") or " ".join(
        fields[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in fields
    )
    return Cpu(model, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def compiler(host: Host) -> Compiler | None:
    """Return the C++ compiler that cmake will find, if it can build a program.

    A version number is not enough: macOS has a `c++` that only offers to install one, and clang on
    Linux may lack the C++ library.
    """
    configured = host.env.get("CXX")
    for name in [configured] if configured else ["c++", "g++", "clang++"]:
        command = tuple(shlex.split(name))
        if not command or not host.which(command[0]):
            continue
        version = host.run([*command, "--version"])
        hello = '#include <cstdio>\nint main() { return std::puts("") < 0; }\n'
        if version.code == 0 and try_program(host, command, hello) == "works":
            return Compiler(command, version.out.partition("\n")[0].strip())
    return None


def try_program(host: Host, compiler: Sequence[str], source: str, *flags: str) -> Trial:
    """Compile a C++ program with -O2 and run it."""
    with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
        program = Path(folder, "probe")
        Path(folder, "probe.cpp").write_text(source)
        if host.run([*compiler, "-O2", *flags, "-o", str(program), f"{program}.cpp"]).code != 0:
            return "not compiled"
        return "works" if host.run([str(program)]).code == 0 else "fails"


# Older GCCs assume that _tile_loadconfig reads 8 of its 64 bytes. At -O2 they drop or delay the stores
# of the other bytes, and the tiles get whatever shape was in memory: SIGSEGV at the first decode
# (llama.cpp #20824). The version number proves nothing, because distributions backport fixes, so
# this program is compiled and run. It sets the shape in a separate function, where only the intrinsic
# uses it; a faulty compiler removes those stores.
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
    """Return whether this compiler's code for AMX tiles works correctly on this CPU."""
    return try_program(host, compiler.command, AMX_PROBE, "-mamx-tile")


PACKAGES: Mapping[str, Mapping[Need, str]] = {
    "apt-get": {
        "compiler": "sudo apt-get install build-essential",
        "venv": f"sudo apt-get install python3.{sys.version_info[1]}-venv",
        "cuda": "sudo apt-get install nvidia-cuda-toolkit",
        "vulkan": "sudo apt-get install libvulkan-dev glslc spirv-headers",
    },
    "dnf": {
        "compiler": "sudo dnf install gcc-c++",
        "venv": "sudo dnf install python3-libs",
        "vulkan": "sudo dnf install vulkan-loader-devel glslc spirv-headers-devel",
    },
    "pacman": {
        "compiler": "sudo pacman -S base-devel",
        "venv": "sudo pacman -S python",
        "cuda": "sudo pacman -S cuda",
        "vulkan": "sudo pacman -S vulkan-headers shaderc spirv-headers",
    },
    "zypper": {"compiler": "sudo zypper install gcc-c++", "venv": "sudo zypper install python3"},
    "apk": {"compiler": "sudo apk add build-base linux-headers", "venv": "sudo apk add python3"},
}
ANYWHERE: Mapping[Need, str] = {
    "compiler": "Install a C++ compiler (g++ or clang++)",
    "venv": "Install Python's venv and ensurepip modules",
    "cuda": "Install NVIDIA's CUDA toolkit",
    "cublas": "Install the development files of cuBLAS, which belong to the CUDA toolkit",
    "vulkan": "Install Vulkan's headers and loader, glslc and the SPIR-V headers",
    "newer vulkan": "Install newer Vulkan headers than this system's, as in the Vulkan SDK",
}


def install_hint(host: Host, need: Need) -> str:
    """Return how to install what is missing on this system, without the final full stop."""
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
