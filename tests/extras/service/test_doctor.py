"""Test `localspec doctor` on simulated machines."""

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
from localspec.paths import Paths, default_paths
from tests.support.daemons import Home

CXX = "c++ (Debian 12.2.0) 12.2.0"


def make_host(**changes: Any) -> machine.Host:
    """Return a host with a working compiler and nothing else."""
    outputs: dict[str, machine.CommandResult] = {
        "c++ --version": machine.CommandResult(0, f"{CXX}\n")
    }
    outputs |= changes.pop("outputs", {})

    def run(argv: Any) -> machine.CommandResult:
        line = " ".join(argv)
        if line in outputs:
            return outputs[line]
        if "amx-tile" in line or "nvcc -E" in line:
            return machine.CommandResult(0, "")
        if argv[0].endswith("/probe"):
            return outputs.get("probe", machine.CommandResult(0, ""))
        return machine.CommandResult(0, "") if "-O2" in argv else machine.CommandResult(127, "")

    tools = changes.pop("tools", {"c++": "/usr/bin/c++", "apt-get": "/usr/bin/apt-get"})
    cpuinfo = changes.pop("cpuinfo", "model name\t: A CPU\nflags\t\t: avx2\n")
    host = machine.Host("Linux", "x86_64", {}, run, tools.get, lambda path: cpuinfo)
    return replace(host, **changes)


@pytest.fixture
def healthy(tmp_path: Path) -> CheckedMachine:
    """Return a machine without any problem."""
    folders = [tmp_path / name for name in ("run", "config", "data", "state", "cache")]
    for folder in folders:
        folder.mkdir(mode=0o700)

    def nobody() -> dict[str, Any]:
        raise NoDaemon("No daemon is running; start one with: localspec start")

    return CheckedMachine(make_host(), Paths(*folders), "cpu", "", lambda folder: 1 << 40, nobody)


SAFE_MODE: dict[str, Any] = {
    "version": localspec.__version__,
    "pid": 1,
    "counts": {"requests": 0},
    "pair": {"name": "builtin", "state": "ready"},
    "safe_mode": True,
}


def worst_finding(healthy: CheckedMachine, subject: str) -> Finding:
    """Return the worst finding about a subject."""
    order = {"ok": 0, "note": 1, "bad": 2}
    return max(
        (f for f in doctor.findings(healthy) if f.about == subject), key=lambda f: order[f.state]
    )


def test_a_healthy_machine_has_no_cures(healthy: CheckedMachine) -> None:
    assert [
        finding for finding in doctor.findings(healthy) if finding.state != "ok" or finding.cure
    ] == []


def test_without_a_compiler_it_names_the_command_that_installs_one(healthy: CheckedMachine) -> None:
    bare = replace(healthy, host=make_host(tools={"apt-get": "/usr/bin/apt-get"}))
    assert worst_finding(bare, "compiler").state == "note"  # The existing build still works.
    assert "sudo apt-get install build-essential" in worst_finding(bare, "compiler").cure
    assert worst_finding(replace(bare, built=None), "compiler").state == "bad"
    assert worst_finding(replace(bare, built=None), "engine").cure == "scripts/setup --again"


def test_the_amx_trap_has_its_own_finding(healthy: CheckedMachine) -> None:
    flags = "model name\t: Xeon\nflags\t\t: amx_tile amx_int8\n"
    outputs = {"probe": machine.CommandResult(0, "")}
    good = replace(healthy, host=make_host(cpuinfo=flags, outputs=outputs))
    assert worst_finding(good, "AMX").state == "ok"

    def run(argv: Any) -> machine.CommandResult:
        if argv[0].endswith("/probe"):
            return machine.CommandResult(
                len(calls := run.__dict__.setdefault("calls", [])), str(calls.append(1))
            )
        return (
            machine.CommandResult(0, f"{CXX}\n")
            if "--version" in argv
            else machine.CommandResult(0, "")
        )

    # The first program (hello) works, the second (the AMX probe) fails.
    trapped = replace(healthy, host=replace(make_host(cpuinfo=flags), run=run))
    amx = worst_finding(trapped, "AMX")
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


def test_an_unused_gpu_is_reported_with_its_cure(healthy: CheckedMachine) -> None:
    gpu = replace(healthy, host=make_host(outputs=GPU, tools=TOOLS))
    assert worst_finding(gpu, "GPU") == Finding(
        "GPU",
        "note",
        "CUDA 12.8 for NVIDIA H200 (architecture 90-real). But llama.cpp is built for cpu.",
        "scripts/setup --again",
    )
    assert worst_finding(replace(gpu, built="cuda"), "GPU").state == "ok"


def test_a_pip_installation_is_rebuilt_by_pip(
    healthy: CheckedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip installation has no scripts/setup, and pip needs the build flags for this machine."""
    monkeypatch.setattr(machine, "CHECKOUT", False)
    monkeypatch.setattr("localspec.machine.build.CHECKOUT", False)
    gpu = replace(healthy, host=make_host(outputs=GPU, tools=TOOLS))
    cure = worst_finding(gpu, "GPU").cure
    assert cure.startswith(
        "CMAKE_ARGS='-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF -DGGML_RPC=ON -DGGML_CUDA=ON"
    )
    assert f"{sys.executable} -m pip install --force-reinstall" in cure
    assert "--no-binary llama-cpp-python llama-cpp-python==" in cure
    tools = {name: tool for name, tool in TOOLS.items() if name != "nvcc"}
    lacking = worst_finding(replace(healthy, host=make_host(outputs=GPU, tools=tools)), "GPU")
    assert lacking.cure.endswith("nvidia-cuda-toolkit`, then run `localspec doctor`.")
    for machine_ in (gpu, replace(gpu, built=None), replace(healthy, status=lambda: SAFE_MODE)):
        assert not [
            finding for finding in doctor.findings(machine_) if "scripts/setup" in finding.cure
        ]
    safe = worst_finding(replace(healthy, status=lambda: SAFE_MODE), "engine")
    assert safe.cure.startswith("CMAKE_ARGS='-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF -DGGML_RPC=ON")


def test_a_gpu_without_its_compiler(healthy: CheckedMachine) -> None:
    tools = {name: tool for name, tool in TOOLS.items() if name != "nvcc"}
    gpu = worst_finding(replace(healthy, host=make_host(outputs=GPU, tools=tools)), "GPU")
    assert gpu.state == "note"
    assert "no CUDA compiler (nvcc)" in gpu.what
    assert "nvidia-cuda-toolkit" in gpu.cure


def test_folders_open_to_others_and_not_writable(
    healthy: CheckedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o755, 0o710, 0o701):
        healthy.paths.runtime.chmod(mode)
        socket = worst_finding(healthy, "socket")
        assert (socket.state, socket.cure) == ("bad", f"chmod 700 {healthy.paths.runtime}")
    for name in ("config", "data", "state"):
        folder: Path = getattr(healthy.paths, name)
        folder.mkdir(parents=True, exist_ok=True)
        # The system answers so to any user but root.
        monkeypatch.setattr(os, "access", lambda path, _, folder=folder: Path(path) != folder)
        closed = worst_finding(healthy, "folders")
        assert (closed.state, closed.what) == ("bad", f"{folder} cannot be written.")
        assert closed.cure.startswith(f"chmod u+rwx {folder}, or export LOCALSPEC_HOME=")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has a runtime folder of its user's choice"
)
def test_a_runtime_folder_that_is_passed_over_is_named(
    healthy: CheckedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.delenv("LOCALSPEC_HOME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
    for mode, state in ((0o755, "note"), (0o700, "ok")):
        given.chmod(mode)
        socket = worst_finding(replace(healthy, paths=default_paths()), "socket")
        assert (socket.state, "XDG_RUNTIME_DIR" in socket.what) == (state, state == "note")


def test_a_folder_that_cannot_be_written_is_named_once(
    healthy: CheckedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"  # The other folders would be created in it.
    home.mkdir()
    folders = {name: home / name for name in ("config", "data", "state")}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home)
    bad = [finding for finding in doctor.findings(replace(healthy, paths=healthy.paths._replace(**folders)))
           if finding.about == "folders"]  # fmt: skip
    assert [finding.what for finding in bad] == [f"{home} cannot be written."]


def test_a_socket_path_that_is_too_long(healthy: CheckedMachine, tmp_path: Path) -> None:
    far = replace(healthy, paths=healthy.paths._replace(runtime=tmp_path / ("x" * 100)))
    assert worst_finding(far, "socket").state == "bad"
    assert "LOCALSPEC_HOME" in worst_finding(far, "socket").cure


def test_a_configuration_that_cannot_be_read(healthy: CheckedMachine) -> None:
    healthy.paths.config_file.write_text("parallel = 0\n")
    config = worst_finding(healthy, "config")
    assert (config.state, config.cure) == ("bad", "localspec config unset parallel")
    assert "'parallel' must be between 1 and 64" in config.what


def test_little_disk_and_no_network(healthy: CheckedMachine) -> None:
    low = replace(healthy, free=lambda folder: 1 << 30, host=make_host(env={"HF_HUB_OFFLINE": "1"}))
    assert (
        worst_finding(low, "disk").state,
        "localspec gc" in worst_finding(low, "disk").cure,
    ) == ("note", True)
    assert worst_finding(low, "network").cure == "unset HF_HUB_OFFLINE"


@pytest.mark.parametrize(
    ("changes", "about", "message"),
    [
        ({"version": "0.0"}, "daemon", "The daemon is localspec 0.0"),
        ({"pair": {"name": "x", "state": "set_aside"}}, "pair", "The pair x is set aside"),
        ({"safe_mode": True}, "engine", "safe mode"),
        ({"problems": ["models.toml: line 3."]}, "files", "models.toml: line 3."),
    ],
)
def test_problems_of_a_running_daemon_are_findings(
    healthy: CheckedMachine, changes: dict[str, Any], about: str, message: str
) -> None:
    status: dict[str, Any] = {
        "version": localspec.__version__,
        "pid": 1,
        "counts": {"requests": 0},
        "pair": {"name": "builtin", "state": "ready"},
        "safe_mode": False,
        "problems": [],
    }
    assert worst_finding(replace(healthy, status=lambda: status), "daemon").state == "ok"
    outputs: Callable[[], dict[str, Any]] = lambda: {**status, **changes}  # noqa: E731
    finding = worst_finding(replace(healthy, status=outputs), about)
    assert finding.state != "ok"
    assert message in finding.what
    assert finding.cure


def test_a_silent_daemon_is_not_taken_for_a_stopped_one(healthy: CheckedMachine) -> None:
    def silent() -> dict[str, Any]:
        raise NoAnswer("It says nothing.")

    assert worst_finding(replace(healthy, status=silent), "daemon").state == "ok"
    healthy.paths.socket.touch()
    assert worst_finding(replace(healthy, status=silent), "daemon").what == "It says nothing."
    assert worst_finding(healthy, "daemon").state == "ok"


def test_the_command_prints_text_and_json(home: Home) -> None:
    output = home.must_run("doctor")
    assert "compiler" in output
    outputs = json.loads(home.run("doctor", "--json").stdout)
    assert {"about", "state", "what", "cure"} == set(outputs[0])
    (home.root / "config").mkdir()
    (home.root / "config" / "config.toml").write_text("parallel = 0\n")
    assert home.run("doctor").returncode == 1


FREE = "nvidia-smi --query-gpu=name,memory.free,memory.total --format=csv,noheader,nounits"


def gpu_machine(
    healthy: CheckedMachine, built: str = "cuda", arch: str = "90-real", **outputs: str
) -> CheckedMachine:
    """Return a machine with an H200, CUDA 12.8 and this build; `outputs` overrides command outputs."""
    answers = {**GPU, **{line: machine.CommandResult(0, text) for line, text in outputs.items()}}
    return replace(
        healthy, host=make_host(outputs=answers, tools=TOOLS), built=built, architectures=arch
    )


def test_a_gpu_in_use_is_shown_with_driver_toolkit_and_memory(healthy: CheckedMachine) -> None:
    gpu = gpu_machine(healthy, **{FREE: "NVIDIA H200, 100000, 143771\n"})
    findings = [(finding.about, finding.state, finding.what) for finding in doctor.findings(gpu)]
    assert ("CUDA", "ok", "Driver 570.1 runs CUDA up to 12.8; nvcc is CUDA 12.8.") in findings
    assert ("GPU", "ok", "NVIDIA H200: 97.7 of 140.4 GiB free.") in findings
    assert worst_finding(gpu, "GPU").state == "ok"


def test_a_build_without_the_gpus_architecture_is_named_with_its_cure(
    healthy: CheckedMachine,
) -> None:
    assert worst_finding(gpu_machine(healthy, arch="89-real"), "GPU") == Finding(
        "GPU",
        "bad",
        "llama.cpp is built for architecture 89-real, but NVIDIA H200 is 90, so it cannot run there.",
        "scripts/setup --again",
    )
    assert worst_finding(gpu_machine(healthy, arch="80-virtual"), "GPU").state == "ok"


@pytest.mark.parametrize(
    ("layers", "experts", "free", "told"),
    [
        (
            -1,
            12,
            5000,
            "NVIDIA H200 has 4.9 GiB free, while experts of builtin lie in main memory.",
        ),
        (20, 0, 5000, "NVIDIA H200 has 4.9 GiB free, while layers of builtin lie in main memory."),
        (-1, 12, 1500, ""),
        (-1, 0, 5000, ""),
    ],
)
def test_a_gpu_that_could_hold_more_of_the_loaded_pair(
    healthy: CheckedMachine, layers: int, experts: int, free: int, told: str
) -> None:
    plan = {"gpu_layers": layers, "cpu_moe_layers": experts}
    status = SAFE_MODE | {"safe_mode": False, "pair": SAFE_MODE["pair"] | {"plan": plan}}
    gpu = gpu_machine(healthy, **{FREE: f"NVIDIA H200, {free}, 143771\n"})
    notes = [
        finding
        for finding in doctor.findings(replace(gpu, status=lambda: status))
        if "main memory" in finding.what
    ]
    assert [finding.what for finding in notes] == [told] * bool(told)
    for finding in notes:
        assert finding.cure == "localspec unload builtin && localspec load builtin"


def test_a_driver_too_old_for_the_toolkit(healthy: CheckedMachine) -> None:
    old = gpu_machine(healthy, "cpu", **{"nvidia-smi -q": "CUDA Version : 11.4\n"})
    gpu = worst_finding(old, "GPU")
    assert (gpu.state, gpu.what) == (
        "note",
        "CPU: nvcc is CUDA 12.8, but the GPU's driver supports at most CUDA 11.4.",
    )
    assert gpu.cure.startswith("Update the driver or install a CUDA 11.4 toolkit")


def test_a_driver_that_does_not_answer(healthy: CheckedMachine) -> None:
    outputs = {"nvidia-smi -L": machine.CommandResult(9, "NVIDIA-SMI has failed.\n")}
    gpu = worst_finding(replace(healthy, host=make_host(outputs=outputs, tools=TOOLS)), "GPU")
    assert "nvidia-smi says `NVIDIA-SMI has failed.`" in gpu.what
    assert gpu.cure.startswith("Restart the machine or reinstall NVIDIA's driver")


def test_a_gpu_that_is_full_hidden_or_switched_off(healthy: CheckedMachine) -> None:
    full = gpu_machine(healthy, **{FREE: "NVIDIA H200, 300, 143771\n"})
    assert "0.3 of 140.4 GiB free. A pair will run on the CPU." in worst_finding(full, "GPU").what
    gpu = gpu_machine(healthy)
    hidden = replace(gpu, host=replace(gpu.host, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert worst_finding(hidden, "GPU").cure.startswith("unset CUDA_VISIBLE_DEVICES")
    healthy.paths.config_file.write_text("gpu_layers = 0\n")
    assert worst_finding(gpu, "GPU").cure == "localspec config set gpu_layers -1"


VULKAN = {
    "vulkaninfo --summary": machine.CommandResult(
        0,
        "GPU0:\n\tdeviceType         = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU\n"
        "\tdeviceName         = AMD Radeon RX 7900\nGPU1:\n\tdeviceType = PHYSICAL_DEVICE_TYPE_CPU\n"
        "\tdeviceName = llvmpipe\n",
    )
}
VULKAN_TOOLS = {"c++": "c++", "vulkaninfo": "vulkaninfo", "glslc": "glslc", "apt-get": "apt-get"}


def test_vulkan_where_there_is_a_gpu_and_no_cuda(healthy: CheckedMachine) -> None:
    radeon = replace(healthy, host=make_host(outputs=VULKAN, tools=VULKAN_TOOLS))
    assert worst_finding(radeon, "GPU").what == (
        "Vulkan for AMD Radeon RX 7900. But llama.cpp is built for cpu."
    )
    assert worst_finding(replace(radeon, built="vulkan"), "GPU").state == "ok"
    tools = {name: tool for name, tool in VULKAN_TOOLS.items() if name != "glslc"}
    lacking = worst_finding(replace(healthy, host=make_host(outputs=VULKAN, tools=tools)), "GPU")
    assert lacking.what == "CPU: there is an AMD Radeon RX 7900, but a Vulkan build needs glslc."
    assert "sudo apt-get install libvulkan-dev glslc spirv-headers" in lacking.cure


def test_outdated_vulkan_headers_are_not_taken_for_missing_ones(healthy: CheckedMachine) -> None:
    """Debian 12 has such headers: a build would fail after minutes, and its package does not help."""
    host = make_host(outputs=VULKAN, tools=VULKAN_TOOLS)

    def old(argv: Any) -> machine.CommandResult:
        source = Path(argv[-1])
        lacks = source.suffix == ".cpp" and "VK_EXT_layer_settings" in source.read_text()
        return machine.CommandResult(1, "") if lacks else host.run(argv)

    gpu = worst_finding(replace(healthy, host=replace(host, run=old)), "GPU")
    assert gpu.what.startswith(
        "CPU: there is an AMD Radeon RX 7900, but a Vulkan build needs newer"
    )
    assert gpu.cure.startswith("Install newer Vulkan headers")
    assert "apt-get" not in gpu.cure


def test_vulkan_stands_in_for_cuda_without_its_compiler(healthy: CheckedMachine) -> None:
    tools = {**VULKAN_TOOLS, "nvidia-smi": "nvidia-smi"}
    host = make_host(outputs={**GPU, **VULKAN}, tools=tools)
    gpu = worst_finding(replace(healthy, host=host, built="vulkan"), "GPU")
    assert "because CUDA cannot be built here; it would be faster" in gpu.what
    assert "nvidia-cuda-toolkit" in gpu.cure


def test_the_architectures_of_a_build_are_read_from_its_stamp(tmp_path: Path) -> None:
    assert doctor.built_architectures(tmp_path) == ""
    stamp = "wheel=x\ncmake_args=-DGGML_CUDA=ON '-DCMAKE_CUDA_ARCHITECTURES=89-real;120-virtual'\n"
    (tmp_path / "localspec.stamp").write_text(stamp)
    assert doctor.built_architectures(tmp_path) == "89-real;120-virtual"


def test_doctor_asks_the_tools_on_the_path(home: Home, tmp_path: Path) -> None:
    """Real scripts on the PATH report a GPU and a CUDA compiler without cuBLAS."""
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
    findings = json.loads(home.run("doctor", "--json").stdout)
    gpu = next(finding for finding in findings if finding["about"] == "GPU")
    assert gpu["state"] == "note"
    assert gpu["what"] == "CPU: CUDA 13.0 is installed without cuBLAS."
    assert gpu["cure"].startswith("Install the development files of cuBLAS")


@pytest.mark.parametrize("free", [0, 4096, (1 << 20) - 1])
@pytest.mark.parametrize("folder_name", ["config", "state"])
def test_a_full_disk_is_bad_where_history_and_configuration_lie(
    healthy: CheckedMachine, free: int, folder_name: str
) -> None:
    for folder_path in (healthy.paths.config, healthy.paths.state):
        folder_path.mkdir(parents=True, exist_ok=True)
    full_folder = getattr(healthy.paths, folder_name)
    checked_machine = replace(
        healthy, free=lambda folder: free if folder == full_folder else 1 << 40
    )
    finding = worst_finding(checked_machine, "disk")
    assert finding.state == "bad"
    assert "is full" in finding.what
    assert "not saved in the history" in finding.what
    assert doctor.run(checked_machine, as_json=True) == 1
    assert worst_finding(replace(healthy, free=lambda folder: 1 << 30), "disk").state == "note"


def test_a_full_disk_of_several_folders_is_reported_once(healthy: CheckedMachine) -> None:
    for folder in (healthy.paths.config, healthy.paths.state):
        folder.mkdir(parents=True, exist_ok=True)
    full = replace(healthy, free=lambda folder: 0)
    assert sum(finding.about == "disk" for finding in doctor.findings(full)) == 1
