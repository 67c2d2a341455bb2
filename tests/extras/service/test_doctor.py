"""`doctor` on machines that are not this one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localspec
from localspec import machine
from localspec.errors import NoAnswer, NoDaemon
from localspec.extras.service import doctor
from localspec.extras.service.doctor import CheckedMachine, Finding
from localspec.paths import Paths
from tests.support.daemons import Home

CXX = "c++ (Debian 12.2.0) 12.2.0"


def a_host(**changes: Any) -> machine.Host:
    """A machine with a compiler that works and nothing else."""
    told: dict[str, machine.CommandResult] = {"c++ --version": machine.CommandResult(0, f"{CXX}\n")}
    told |= changes.pop("told", {})

    def run(argv: Any) -> machine.CommandResult:
        line = " ".join(argv)
        if line in told:
            return told[line]
        if "amx-tile" in line or "nvcc -E" in line:
            return machine.CommandResult(0, "")
        if argv[0].endswith("/probe"):
            return told.get("probe", machine.CommandResult(0, ""))
        return machine.CommandResult(0, "") if "-O2" in argv else machine.CommandResult(127, "")

    tools = changes.pop("tools", {"c++": "/usr/bin/c++", "apt-get": "/usr/bin/apt-get"})
    cpuinfo = changes.pop("cpuinfo", "model name\t: A CPU\nflags\t\t: avx2\n")
    made = machine.Host("Linux", "x86_64", {}, run, tools.get, lambda path: cpuinfo)
    return replace(made, **changes)


@pytest.fixture
def here(tmp_path: Path) -> CheckedMachine:
    """A machine where all is well."""
    folders = [tmp_path / name for name in ("run", "config", "data", "state", "cache")]
    for folder in folders:
        folder.mkdir(mode=0o700)

    def nobody() -> dict[str, Any]:
        raise NoDaemon("No daemon is running; start one with: localspec start")

    return CheckedMachine(a_host(), Paths(*folders), "cpu", "", lambda folder: 1 << 40, nobody)


SAFE_MODE = {
    "version": localspec.__version__,
    "pid": 1,
    "counts": {"requests": 0},
    "pair": {"name": "builtin", "state": "ready"},
    "safe_mode": True,
}


def found(here: CheckedMachine, about: str) -> Finding:
    """The worst finding about something."""
    order = {"ok": 0, "note": 1, "bad": 2}
    return max((f for f in doctor.findings(here) if f.about == about), key=lambda f: order[f.state])


def test_where_all_is_well_nothing_has_a_cure(here: CheckedMachine) -> None:
    assert [each for each in doctor.findings(here) if each.state != "ok" or each.cure] == []


def test_without_a_compiler_it_names_the_command_that_installs_one(here: CheckedMachine) -> None:
    bare = replace(here, host=a_host(tools={"apt-get": "/usr/bin/apt-get"}))
    assert found(bare, "compiler").state == "note"  # what is installed works on
    assert "sudo apt-get install build-essential" in found(bare, "compiler").cure
    assert found(replace(bare, built=None), "compiler").state == "bad"
    assert found(replace(bare, built=None), "engine").cure == "scripts/setup --again"


def test_the_amx_trap_has_its_own_finding(here: CheckedMachine) -> None:
    flags = "model name\t: Xeon\nflags\t\t: amx_tile amx_int8\n"
    told = {"probe": machine.CommandResult(0, "")}
    good = replace(here, host=a_host(cpuinfo=flags, told=told))
    assert found(good, "AMX").state == "ok"

    def run(argv: Any) -> machine.CommandResult:
        if argv[0].endswith("/probe"):
            return machine.CommandResult(
                len(seen := run.__dict__.setdefault("calls", [])), str(seen.append(1))
            )
        return (
            machine.CommandResult(0, f"{CXX}\n")
            if "--version" in argv
            else machine.CommandResult(0, "")
        )

    # The first program (hello) works, the second (the AMX probe) fails.
    trapped = replace(here, host=replace(a_host(cpuinfo=flags), run=run))
    amx = found(trapped, "AMX")
    assert amx.state == "note"
    assert "llama.cpp #20824" in amx.what
    assert amx.cure.startswith("Install a newer compiler")


GPU = {
    "nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader": machine.CommandResult(
        0, "NVIDIA H200, 9.0, 570.1\n"
    ),
    "nvcc --version": machine.CommandResult(0, "Cuda compilation tools, release 12.8, V12.8.1\n"),
    "nvcc --list-gpu-arch": machine.CommandResult(0, "compute_80\ncompute_90\n"),
    "nvidia-smi -q": machine.CommandResult(0, "CUDA Version : 12.8\n"),
}
TOOLS = {"c++": "c++", "nvidia-smi": "nvidia-smi", "nvcc": "nvcc", "apt-get": "apt-get"}


def test_a_gpu_that_is_not_used_is_said_with_the_cure(here: CheckedMachine) -> None:
    gpu = replace(here, host=a_host(told=GPU, tools=TOOLS))
    assert found(gpu, "GPU") == Finding(
        "GPU",
        "note",
        "CUDA 12.8 for NVIDIA H200 (architecture 90-real). But llama.cpp is built for cpu.",
        "scripts/setup --again",
    )
    assert found(replace(gpu, built="cuda"), "GPU").state == "ok"


def test_what_pip_installed_is_built_anew_by_pip(
    here: CheckedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no scripts/setup beside it, and pip has to be told the flags for this machine."""
    monkeypatch.setattr(machine, "CHECKOUT", False)
    monkeypatch.setattr("localspec.machine.build.CHECKOUT", False)
    gpu = replace(here, host=a_host(told=GPU, tools=TOOLS))
    cure = found(gpu, "GPU").cure
    assert cure.startswith("CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_RPC=ON -DGGML_CUDA=ON")
    assert f"{sys.executable} -m pip install --force-reinstall" in cure
    assert "--no-binary llama-cpp-python llama-cpp-python==" in cure
    tools = {name: tool for name, tool in TOOLS.items() if name != "nvcc"}
    lacking = found(replace(here, host=a_host(told=GPU, tools=tools)), "GPU")
    assert lacking.cure.endswith("nvidia-cuda-toolkit`, then run `localspec doctor`.")
    for each in (gpu, replace(gpu, built=None), replace(here, status=lambda: SAFE_MODE)):
        assert not [each for each in doctor.findings(each) if "scripts/setup" in each.cure]
    safe = found(replace(here, status=lambda: SAFE_MODE), "engine")
    assert safe.cure.startswith("CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_RPC=ON")


def test_a_gpu_without_its_compiler(here: CheckedMachine) -> None:
    tools = {name: tool for name, tool in TOOLS.items() if name != "nvcc"}
    gpu = found(replace(here, host=a_host(told=GPU, tools=tools)), "GPU")
    assert gpu.state == "note"
    assert "no CUDA compiler (nvcc)" in gpu.what
    assert "nvidia-cuda-toolkit" in gpu.cure


def test_folders_open_to_others_and_not_writable(
    here: CheckedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o755, 0o710, 0o701):
        here.paths.runtime.chmod(mode)
        socket = found(here, "socket")
        assert (socket.state, socket.cure) == ("bad", f"chmod 700 {here.paths.runtime}")
    for name in ("config", "data", "state"):
        folder: Path = getattr(here.paths, name)
        folder.mkdir(parents=True, exist_ok=True)
        # As the system answers whoever is not root.
        monkeypatch.setattr(os, "access", lambda path, _, folder=folder: Path(path) != folder)
        closed = found(here, "folders")
        assert (closed.state, closed.what) == ("bad", f"{folder} cannot be written.")
        assert closed.cure.startswith(f"chmod u+rwx {folder}, or export LOCALSPEC_HOME=")


def test_a_folder_that_cannot_be_written_is_named_once(
    here: CheckedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"  # the others would be made in it
    home.mkdir()
    folders = {name: home / name for name in ("config", "data", "state")}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home)
    bad = [each for each in doctor.findings(replace(here, paths=here.paths._replace(**folders)))
           if each.about == "folders"]  # fmt: skip
    assert [each.what for each in bad] == [f"{home} cannot be written."]


def test_a_socket_path_that_is_too_long(here: CheckedMachine, tmp_path: Path) -> None:
    far = replace(here, paths=here.paths._replace(runtime=tmp_path / ("x" * 100)))
    assert found(far, "socket").state == "bad"
    assert "LOCALSPEC_HOME" in found(far, "socket").cure


def test_a_configuration_that_cannot_be_read(here: CheckedMachine) -> None:
    here.paths.config_file.write_text("parallel = 0\n")
    config = found(here, "config")
    assert (config.state, config.cure) == ("bad", "localspec config unset parallel")
    assert "'parallel' must be between 1 and 64" in config.what


def test_little_disk_and_no_network(here: CheckedMachine) -> None:
    low = replace(here, free=lambda folder: 1 << 30, host=a_host(env={"HF_HUB_OFFLINE": "1"}))
    assert (found(low, "disk").state, "localspec gc" in found(low, "disk").cure) == ("note", True)
    assert found(low, "network").cure == "unset HF_HUB_OFFLINE"


@pytest.mark.parametrize(
    ("changes", "about", "said"),
    [
        ({"version": "0.0"}, "daemon", "The daemon is localspec 0.0"),
        ({"pair": {"name": "x", "state": "set_aside"}}, "pair", "The pair x is set aside"),
        ({"safe_mode": True}, "engine", "safe mode"),
        ({"problems": ["models.toml: line 3."]}, "files", "models.toml: line 3."),
    ],
)
def test_what_a_running_daemon_tells(
    here: CheckedMachine, changes: dict[str, Any], about: str, said: str
) -> None:
    status: dict[str, Any] = {
        "version": localspec.__version__,
        "pid": 1,
        "counts": {"requests": 0},
        "pair": {"name": "builtin", "state": "ready"},
        "safe_mode": False,
        "problems": [],
    }
    assert found(replace(here, status=lambda: status), "daemon").state == "ok"
    told: Callable[[], dict[str, Any]] = lambda: {**status, **changes}  # noqa: E731
    finding = found(replace(here, status=told), about)
    assert finding.state != "ok"
    assert said in finding.what
    assert finding.cure


def test_a_daemon_that_says_nothing_is_not_taken_for_none(here: CheckedMachine) -> None:
    def silent() -> dict[str, Any]:
        raise NoAnswer("It says nothing.")

    assert found(replace(here, status=silent), "daemon").state == "ok"
    here.paths.socket.touch()
    assert found(replace(here, status=silent), "daemon").what == "It says nothing."
    assert found(here, "daemon").state == "ok"


def test_the_command_for_people_and_for_programs(home: Home) -> None:
    shown = home.run("doctor")
    assert shown.returncode == 0, shown.stdout
    assert "compiler" in shown.stdout
    told = json.loads(home.run("doctor", "--json").stdout)
    assert {"about", "state", "what", "cure"} == set(told[0])
    (home.root / "config").mkdir()
    (home.root / "config" / "config.toml").write_text("parallel = 0\n")
    assert home.run("doctor").returncode == 1


FREE = "nvidia-smi --query-gpu=name,memory.free,memory.total --format=csv,noheader,nounits"


def gpu_machine(
    here: CheckedMachine, built: str = "cuda", arch: str = "90-real", **told: str
) -> CheckedMachine:
    """A machine with an H200, CUDA 12.8 and this build; `told` replaces what a command says."""
    answers = {**GPU, **{line: machine.CommandResult(0, text) for line, text in told.items()}}
    return replace(here, host=a_host(told=answers, tools=TOOLS), built=built, architectures=arch)


def test_a_gpu_in_use_is_told_with_driver_toolkit_and_memory(here: CheckedMachine) -> None:
    gpu = gpu_machine(here, **{FREE: "NVIDIA H200, 100000, 143771\n"})
    said = [(each.about, each.state, each.what) for each in doctor.findings(gpu)]
    assert ("CUDA", "ok", "Driver 570.1 runs CUDA up to 12.8; nvcc is CUDA 12.8.") in said
    assert ("GPU", "ok", "NVIDIA H200: 97.7 of 140.4 GiB free.") in said
    assert found(gpu, "GPU").state == "ok"


def test_a_build_without_the_gpus_architecture_is_named_with_its_cure(here: CheckedMachine) -> None:
    assert found(gpu_machine(here, arch="89-real"), "GPU") == Finding(
        "GPU",
        "bad",
        "llama.cpp is built for architecture 89-real, but NVIDIA H200 is 90, so it cannot run there.",
        "scripts/setup --again",
    )
    assert found(gpu_machine(here, arch="80-virtual"), "GPU").state == "ok"


def test_a_driver_too_old_for_the_toolkit(here: CheckedMachine) -> None:
    old = gpu_machine(here, "cpu", **{"nvidia-smi -q": "CUDA Version : 11.4\n"})
    gpu = found(old, "GPU")
    assert (gpu.state, gpu.what) == (
        "note",
        "CPU: nvcc is CUDA 12.8, but the GPU's driver supports at most CUDA 11.4.",
    )
    assert gpu.cure.startswith("Update the driver or install a CUDA 11.4 toolkit")


def test_a_driver_that_does_not_answer(here: CheckedMachine) -> None:
    told = {"nvidia-smi -L": machine.CommandResult(9, "NVIDIA-SMI has failed.\n")}
    gpu = found(replace(here, host=a_host(told=told, tools=TOOLS)), "GPU")
    assert "nvidia-smi says `NVIDIA-SMI has failed.`" in gpu.what
    assert gpu.cure.startswith("Restart the machine or reinstall NVIDIA's driver")


def test_a_gpu_that_is_full_hidden_or_switched_off(here: CheckedMachine) -> None:
    full = gpu_machine(here, **{FREE: "NVIDIA H200, 300, 143771\n"})
    assert "0.3 of 140.4 GiB free. A pair will run on the CPU." in found(full, "GPU").what
    gpu = gpu_machine(here)
    hidden = replace(gpu, host=replace(gpu.host, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert found(hidden, "GPU").cure.startswith("unset CUDA_VISIBLE_DEVICES")
    here.paths.config_file.write_text("gpu_layers = 0\n")
    assert found(gpu, "GPU").cure == "localspec config set gpu_layers -1"


VULKAN = {
    "vulkaninfo --summary": machine.CommandResult(
        0,
        "GPU0:\n\tdeviceType         = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU\n"
        "\tdeviceName         = AMD Radeon RX 7900\nGPU1:\n\tdeviceType = PHYSICAL_DEVICE_TYPE_CPU\n"
        "\tdeviceName = llvmpipe\n",
    )
}
VULKAN_TOOLS = {"c++": "c++", "vulkaninfo": "vulkaninfo", "glslc": "glslc", "apt-get": "apt-get"}


def test_vulkan_where_there_is_a_gpu_and_no_cuda(here: CheckedMachine) -> None:
    radeon = replace(here, host=a_host(told=VULKAN, tools=VULKAN_TOOLS))
    assert found(radeon, "GPU").what == (
        "Vulkan for AMD Radeon RX 7900. But llama.cpp is built for cpu."
    )
    assert found(replace(radeon, built="vulkan"), "GPU").state == "ok"
    tools = {name: tool for name, tool in VULKAN_TOOLS.items() if name != "glslc"}
    lacking = found(replace(here, host=a_host(told=VULKAN, tools=tools)), "GPU")
    assert lacking.what == "CPU: there is an AMD Radeon RX 7900, but a Vulkan build needs glslc."
    assert "sudo apt-get install libvulkan-dev glslc spirv-headers" in lacking.cure


def test_vulkan_headers_that_are_too_old_are_told_from_none(here: CheckedMachine) -> None:
    """Debian 12's are: its build ends after minutes, and what to install is not its package."""
    host = a_host(told=VULKAN, tools=VULKAN_TOOLS)

    def old(argv: Any) -> machine.CommandResult:
        source = Path(argv[-1])
        lacks = source.suffix == ".cpp" and "VK_EXT_layer_settings" in source.read_text()
        return machine.CommandResult(1, "") if lacks else host.run(argv)

    gpu = found(replace(here, host=replace(host, run=old)), "GPU")
    assert gpu.what.startswith(
        "CPU: there is an AMD Radeon RX 7900, but a Vulkan build needs newer"
    )
    assert gpu.cure.startswith("Install newer Vulkan headers")
    assert "apt-get" not in gpu.cure


def test_vulkan_stands_in_for_cuda_without_its_compiler(here: CheckedMachine) -> None:
    tools = {**VULKAN_TOOLS, "nvidia-smi": "nvidia-smi"}
    host = a_host(told={**GPU, **VULKAN}, tools=tools)
    gpu = found(replace(here, host=host, built="vulkan"), "GPU")
    assert "because CUDA cannot be built here; it would be faster" in gpu.what
    assert "nvidia-cuda-toolkit" in gpu.cure


def test_the_architectures_of_a_build_are_read_from_its_stamp(tmp_path: Path) -> None:
    assert doctor.built_architectures(tmp_path) == ""
    stamp = "wheel=x\ncmake_args=-DGGML_CUDA=ON '-DCMAKE_CUDA_ARCHITECTURES=89-real;120-virtual'\n"
    (tmp_path / "localspec.stamp").write_text(stamp)
    assert doctor.built_architectures(tmp_path) == "89-real;120-virtual"


def test_doctor_asks_the_tools_on_the_path(home: Home, tmp_path: Path) -> None:
    """A GPU, and a CUDA compiler without cuBLAS, by programs that really run."""
    tools = {
        "nvidia-smi": 'case "$1" in --query-gpu=name,c*) echo "NVIDIA L4, 8.9, 580.1";; esac',
        "nvcc": 'case "$1" in --version) echo "release 13.0, V13";; *) exit 1;; esac',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    home.environment["PATH"] = f"{folder}:{home.environment.get('PATH', os.environ['PATH'])}"
    found = json.loads(home.run("doctor", "--json").stdout)
    gpu = next(each for each in found if each["about"] == "GPU")
    assert gpu["state"] == "note"
    assert gpu["what"] == "CPU: CUDA 13.0 is installed without cuBLAS."
    assert gpu["cure"].startswith("Install the development files of cuBLAS")


@pytest.mark.parametrize("free", [0, 4096, (1 << 20) - 1])
@pytest.mark.parametrize("which", ["config", "state"])
def test_a_full_disk_is_bad_where_history_and_configuration_lie(
    here: CheckedMachine, free: int, which: str
) -> None:
    for each in (here.paths.config, here.paths.state):
        each.mkdir(parents=True, exist_ok=True)
    full = getattr(here.paths, which)
    room = replace(here, free=lambda folder: free if folder == full else 1 << 40)
    finding = found(room, "disk")
    assert finding.state == "bad"
    assert "is full" in finding.what
    assert "not saved in the history" in finding.what
    assert doctor.run(room, as_json=True) == 1
    assert found(replace(here, free=lambda folder: 1 << 30), "disk").state == "note"
