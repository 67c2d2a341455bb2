"""Detect the system, processor and compiler of this machine.

Everything is queried through a `Host`, so a test can simulate any machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

TrialResult = Literal["not compiled", "fails", "works"]
Requirement = Literal["compiler", "venv", "cuda", "cublas", "vulkan", "newer vulkan"]

# The tools that `doctor` and `setup` run respond in milliseconds. One that hangs (such as nvidia-smi
# after a failed resume) is treated as missing.
TOOL_TIMEOUT_S = 60


@dataclass(frozen=True)
class CommandResult:
    """The result of a command; `code` is 127 if it could not be started."""

    code: int
    out: str


def run_command(argv: Sequence[str]) -> CommandResult:
    """Run a command to its end and return its joined outputs. Never raise for a failure of the command."""
    null, pipe, joined = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    run = partial(subprocess.run, text=True, errors="replace", timeout=TOOL_TIMEOUT_S)
    try:
        done = run(argv, stdin=null, stdout=pipe, stderr=joined)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CommandResult(127, str(error))
    return CommandResult(done.returncode, done.stdout)


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
    run: Callable[[Sequence[str]], CommandResult]
    which: Callable[[str], str | None]
    read: Callable[[str], str]

    @classmethod
    def current(cls) -> Host:
        """Return the machine that this process runs on."""
        uname = os.uname()
        return cls(uname.sysname, uname.machine, os.environ, run_command, shutil.which, read_text)


@dataclass(frozen=True)
class Cpu:
    model: str
    flags: frozenset[str]


def detect_cpu(host: Host) -> Cpu:
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


def find_compiler(host: Host) -> Compiler | None:
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


def try_program(host: Host, compiler: Sequence[str], source: str, *flags: str) -> TrialResult:
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


def try_amx(host: Host, compiler: Compiler) -> TrialResult:
    """Return whether this compiler's code for AMX tiles works correctly on this CPU."""
    return try_program(host, compiler.command, AMX_PROBE, "-mamx-tile")


INSTALL_COMMANDS: Mapping[str, Mapping[Requirement, str]] = {
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
    "macOS": {"compiler": "xcode-select --install", "venv": "brew install python"},
}
GENERAL_HINTS: Mapping[Requirement, str] = {
    "compiler": "Install a C++ compiler (g++ or clang++)",
    "venv": "Install Python's venv and ensurepip modules",
    "cuda": "Install NVIDIA's CUDA toolkit",
    "cublas": "Install the development files of cuBLAS, which belong to the CUDA toolkit",
    "vulkan": "Install Vulkan's headers and loader, glslc and the SPIR-V headers",
    "newer vulkan": "Install newer Vulkan headers than this system's, as in the Vulkan SDK",
}


def install_hint(host: Host, need: Requirement) -> str:
    """Return how to install what is missing on this system, without the final full stop."""
    is_mac = host.system == "Darwin"
    names = (name for name in INSTALL_COMMANDS if name != "macOS" and host.which(name))
    commands = INSTALL_COMMANDS.get("macOS" if is_mac else next(names, ""), {})
    return f"Run `{commands[need]}`" if need in commands else GENERAL_HINTS[need]


_CGROUP_ROOT = PurePosixPath("/sys/fs/cgroup")
# Names of the limit, of the used memory, and of the part of it that is inactive page cache.
_CGROUP_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2_NAMES = ("memory.max", "memory.current", "inactive_file")
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a number above this one


def memory_bytes() -> int:
    """Return the machine's memory in bytes, or 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def available_bytes(host: Host) -> int:
    """Return the bytes of main memory that a program can still use on Linux, page cache included.

    In a container or a service with a memory limit, this is at most what the limit leaves.
    """
    match = re.search(r"^MemAvailable:\s*(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    free = int(match[1]) << 10 if match else memory_bytes()
    return max(min([free, *_available_in_cgroups(host)]), 0)


def _available_in_cgroups(host: Host) -> Iterator[int]:
    """Yield what the limit of each of our cgroups leaves, in bytes (cgroups(7), both versions)."""
    for line in host.read("/proc/self/cgroup").splitlines():
        _number, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        root, names = _CGROUP_ROOT, _CGROUP_V2_NAMES
        if "memory" in controllers.split(","):
            root, names = _CGROUP_ROOT / "memory", _CGROUP_V1_NAMES
        elif controllers:
            continue
        cgroup = root / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):
            limit = host.read(str(folder / names[0])).strip()
            used = host.read(str(folder / names[1])).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED_BYTES:
                stat = host.read(str(folder / "memory.stat"))
                cached = re.search(rf"^{names[2]} (\d+)$", stat, re.MULTILINE)
                yield int(limit) - int(used) + (int(cached[1]) if cached else 0)


def is_on_battery(host: Host, supplies: Path = Path("/sys/class/power_supply")) -> bool:
    """Return whether the machine runs on its battery; False where the system does not report it.

    supplies: the folder of Linux with a folder for each battery and mains adapter. The batteries of devices,
    as of a mouse, do not count.
    """
    if host.system == "Darwin":
        return "'Battery Power'" in host.run(["pmset", "-g", "batt"]).out
    discharges = False
    for supply in sorted(supplies.glob("*")):
        kind, scope = (host.read(str(supply / name)).strip() for name in ("type", "scope"))
        if kind in ("Mains", "USB") and host.read(str(supply / "online")).strip() == "1":
            return False
        if kind == "Battery" and scope != "Device":
            discharges |= host.read(str(supply / "status")).strip() == "Discharging"
    return discharges


# Measure the energy that the machine uses: processors by RAPL, NVIDIA GPUs by NVML.
#
# RAPL's counters are files that only root may read on most systems.


class EnergyMeter:
    """A meter of the energy used since its creation.

    Call `joules` at least once an hour, because the counters wrap around.
    """

    def __init__(self, rapl: Path = Path("/sys/class/powercap")) -> None:
        self._counters = [*_rapl_counters(rapl), *_nvml_counters()]
        self._last = [read() for read, _ in self._counters]
        self._total = 0.0

    def joules(self) -> float | None:
        """Return the joules used so far, or None if nothing is counted, or no longer."""
        if not self._counters:
            return None
        try:
            readings = [read() for read, _ in self._counters]
        except (OSError, ValueError):
            self._counters = []
            return None
        for last, now, (_, maximum) in zip(self._last, readings, self._counters, strict=True):
            self._total += now - last if now >= last else now + maximum - last
        self._last = readings
        return self._total


# A function that reads the joules counted so far, and the joules at which the counter wraps around.
EnergyCounter = tuple[Callable[[], float], float]


def _rapl_counters(folder: Path) -> list[EnergyCounter]:
    """Return one counter for each processor. Zones inside one (cores, memory) are parts of it."""

    def read_joules(file: Path) -> float:
        return int(file.read_text()) / 1e6

    counters: list[EnergyCounter] = []
    for zone in sorted(zone for zone in folder.glob("*rapl:*") if zone.name.count(":") == 1):
        read = partial(read_joules, zone / "energy_uj")
        try:
            read()
            counters.append((read, read_joules(zone / "max_energy_range_uj")))
        except (OSError, ValueError):
            continue
    return counters


def _nvml_counters() -> list[EnergyCounter]:
    """Return one counter for each GPU whose driver counts energy."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
    except (OSError, AttributeError):
        return []
    counters: list[EnergyCounter] = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue

        def read(device: ctypes.c_void_p = device) -> float:
            millijoules = ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                raise ValueError("this GPU counts no energy")
            return millijoules.value / 1e3

        with contextlib.suppress(ValueError, AttributeError):
            read()
            counters.append((read, 0.0))
    return counters


# Measure whether the machine is quiet. Other work on the same cores makes every timing meaningless.
#
# This reads /proc. Without it (macOS), only the load average is known.

MAX_NOISE_CORES = 0.1  # cores that other processes may keep busy before a measurement is doubtful
_PROC = Path("/proc")


def _read_process(stat: Path) -> tuple[str, int]:
    """Return the name and the CPU time of one process, in clock ticks."""
    head, _, tail = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], int(fields[11]) + int(fields[12])


def _processes(pids: Iterable[int] | None = None) -> dict[int, tuple[str, int]]:
    """Return the name and the CPU time of these processes, or of all."""
    if pids is None:
        pids = (int(folder.name) for folder in _PROC.glob("[0-9]*"))
    processes: dict[int, tuple[str, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            processes[pid] = _read_process(_PROC / str(pid) / "stat")
    return processes


def _read_busy_ticks() -> int | None:
    """Return the clock ticks spent on any work, including time stolen by other virtual machines."""
    try:
        total = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(v) for v in total.split()[1:9])
    return user + nice + system + irq + soft + steal


class OtherProcesses:
    """The cores that other processes have kept busy since this was created."""

    def __init__(self, ours: Iterable[int] | None = None) -> None:
        """ours: as of `cores`, where `busiest` is not asked. Reading all processes takes milliseconds."""
        self._start = time.monotonic()
        pids = None if ours is None else {os.getpid(), *ours}
        self._busy, self._processes = _read_busy_ticks(), _processes(pids)

    @property
    def _elapsed_ticks(self) -> float:
        return max((time.monotonic() - self._start) * os.sysconf("SC_CLK_TCK"), 1.0)

    def cores(self, ours: Iterable[int]) -> float | None:
        """Return how many cores other processes keep busy. `ours` are ids of our processes except this."""
        busy = _read_busy_ticks()
        if self._busy is None or busy is None:
            return None
        our_ticks = sum(
            ticks - self._processes.get(pid, ("", 0))[1]
            for pid, (_, ticks) in _processes({os.getpid(), *ours}).items()
        )
        return max(busy - self._busy - our_ticks, 0) / self._elapsed_ticks

    def busiest(self, count: int = 3) -> list[tuple[str, float]]:
        """Return the names of the busiest other processes, and the cores that they use."""
        usage = [
            (name, (ticks - self._processes.get(pid, (name, 0))[1]) / self._elapsed_ticks)
            for pid, (name, ticks) in _processes().items()
            if pid != os.getpid()
        ]
        busy = [(name, cores) for name, cores in usage if cores > MAX_NOISE_CORES / 2]
        return sorted(busy, key=lambda item: -item[1])[:count]
