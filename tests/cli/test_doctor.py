"""`doctor` on machines that are not this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localspec
from localspec import machine
from localspec.cli import doctor
from localspec.cli.doctor import Finding, Machine
from localspec.errors import NoDaemon
from localspec.paths import Paths
from tests.support.daemons import Home

CXX = "c++ (Debian 12.2.0) 12.2.0"


def a_host(**changes: Any) -> machine.Host:
    """A machine with a compiler that works and nothing else."""
    told: dict[str, machine.Ran] = {"c++ --version": machine.Ran(0, f"{CXX}\n")}
    told |= changes.pop("told", {})

    def run(argv: Any) -> machine.Ran:
        line = " ".join(argv)
        if line in told:
            return told[line]
        if "amx-tile" in line:
            return machine.Ran(0, "")
        if argv[0].endswith("/probe"):
            return told.get("probe", machine.Ran(0, ""))
        return machine.Ran(0, "") if "-O2" in argv else machine.Ran(127, "")

    tools = changes.pop("tools", {"c++": "/usr/bin/c++", "apt-get": "/usr/bin/apt-get"})
    cpuinfo = changes.pop("cpuinfo", "model name\t: A CPU\nflags\t\t: avx2\n")
    made = machine.Host("Linux", "x86_64", {}, run, tools.get, lambda path: cpuinfo)
    return replace(made, **changes)


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    """A machine where all is well."""
    folders = [tmp_path / name for name in ("run", "config", "data", "state", "cache")]
    for folder in folders:
        folder.mkdir(mode=0o700)

    def nobody() -> dict[str, Any]:
        raise NoDaemon("No daemon is running; start one with: localspec start")

    return Machine(a_host(), Paths(*folders), "cpu", lambda folder: 1 << 40, nobody)


def found(here: Machine, about: str) -> Finding:
    """The worst finding about something."""
    order = {"ok": 0, "note": 1, "bad": 2}
    return max((f for f in doctor.findings(here) if f.about == about), key=lambda f: order[f.state])


def test_where_all_is_well_nothing_has_a_cure(here: Machine) -> None:
    assert [each for each in doctor.findings(here) if each.state != "ok" or each.cure] == []


def test_without_a_compiler_it_names_the_command_that_installs_one(here: Machine) -> None:
    bare = replace(here, host=a_host(tools={"apt-get": "/usr/bin/apt-get"}))
    assert found(bare, "compiler").state == "note"  # what is installed works on
    assert "sudo apt-get install build-essential" in found(bare, "compiler").cure
    assert found(replace(bare, built=None), "compiler").state == "bad"
    assert found(replace(bare, built=None), "engine").cure == "scripts/setup --again"


def test_the_amx_trap_has_its_own_finding(here: Machine) -> None:
    flags = "model name\t: Xeon\nflags\t\t: amx_tile amx_int8\n"
    told = {"probe": machine.Ran(0, "")}
    good = replace(here, host=a_host(cpuinfo=flags, told=told))
    assert found(good, "AMX").state == "ok"

    def run(argv: Any) -> machine.Ran:
        if argv[0].endswith("/probe"):
            return machine.Ran(
                len(seen := run.__dict__.setdefault("calls", [])), str(seen.append(1))
            )
        return machine.Ran(0, f"{CXX}\n") if "--version" in argv else machine.Ran(0, "")

    # The first program (hello) works, the second (the AMX probe) fails.
    trapped = replace(here, host=replace(a_host(cpuinfo=flags), run=run))
    amx = found(trapped, "AMX")
    assert amx.state == "note"
    assert "llama.cpp #20824" in amx.what
    assert amx.cure.startswith("Install a newer compiler")


GPU = {
    "nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader": machine.Ran(
        0, "NVIDIA H200, 9.0, 570.1\n"
    ),
    "nvcc --version": machine.Ran(0, "Cuda compilation tools, release 12.8, V12.8.1\n"),
    "nvcc --list-gpu-arch": machine.Ran(0, "compute_80\ncompute_90\n"),
    "nvidia-smi -q": machine.Ran(0, "CUDA Version : 12.8\n"),
}
TOOLS = {"c++": "c++", "nvidia-smi": "nvidia-smi", "nvcc": "nvcc", "apt-get": "apt-get"}


def test_a_gpu_that_is_not_used_is_said_with_the_cure(here: Machine) -> None:
    gpu = replace(here, host=a_host(told=GPU, tools=TOOLS))
    assert found(gpu, "GPU") == Finding(
        "GPU",
        "note",
        "CUDA 12.8 for NVIDIA H200 (architecture 90-real). But llama.cpp is built for cpu.",
        "scripts/setup --again",
    )
    assert found(replace(gpu, built="cuda"), "GPU").state == "ok"


def test_a_gpu_without_its_compiler(here: Machine) -> None:
    tools = {name: tool for name, tool in TOOLS.items() if name != "nvcc"}
    gpu = found(replace(here, host=a_host(told=GPU, tools=tools)), "GPU")
    assert gpu.state == "note"
    assert "no CUDA compiler (nvcc)" in gpu.what
    assert "nvidia-cuda-toolkit" in gpu.cure


def test_folders_open_to_others_and_not_writable(here: Machine) -> None:
    here.paths.runtime.chmod(0o755)
    socket = found(here, "socket")
    assert (socket.state, socket.cure) == ("bad", f"chmod 700 {here.paths.runtime}")


def test_a_socket_path_that_is_too_long(here: Machine, tmp_path: Path) -> None:
    far = replace(here, paths=here.paths._replace(runtime=tmp_path / ("x" * 100)))
    assert found(far, "socket").state == "bad"
    assert "LOCALSPEC_HOME" in found(far, "socket").cure


def test_a_configuration_that_cannot_be_read(here: Machine) -> None:
    here.paths.config_file.write_text("parallel = 0\n")
    config = found(here, "config")
    assert (config.state, config.cure) == ("bad", "localspec config edit")
    assert "'parallel' must be between 1 and 64" in config.what


def test_little_disk_and_no_network(here: Machine) -> None:
    low = replace(here, free=lambda folder: 1 << 30, host=a_host(env={"HF_HUB_OFFLINE": "1"}))
    assert (found(low, "disk").state, "localspec gc" in found(low, "disk").cure) == ("note", True)
    assert found(low, "network").cure == "unset HF_HUB_OFFLINE"


@pytest.mark.parametrize(
    ("changes", "about", "said"),
    [
        ({"version": "0.0"}, "daemon", "It is localspec 0.0"),
        ({"pair": {"name": "x", "state": "set_aside"}}, "pair", "The pair x is set aside"),
        ({"safe_mode": True}, "engine", "safe mode"),
        ({"problems": ["models.toml: line 3."]}, "files", "models.toml: line 3."),
    ],
)
def test_what_a_running_daemon_tells(
    here: Machine, changes: dict[str, Any], about: str, said: str
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


def test_the_command_for_people_and_for_programs(home: Home) -> None:
    shown = home.run("doctor")
    assert shown.returncode == 0, shown.stdout
    assert "compiler" in shown.stdout
    told = json.loads(home.run("doctor", "--json").stdout)
    assert {"about", "state", "what", "cure"} == set(told[0])
    (home.root / "config").mkdir()
    (home.root / "config" / "config.toml").write_text("parallel = 0\n")
    assert home.run("doctor").returncode == 1
