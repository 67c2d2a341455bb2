"""What is free, told by systems that are not this one."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.daemon.worker.memory import free_memory
from localspec.machine import Host, Ran

GIB = 1 << 30


def host(files: dict[str, str], gpu: dict[str, str] | None = None, system: str = "Linux") -> Host:
    """`gpu`: what nvidia-smi answers to each query."""

    def run(argv: Sequence[str]) -> Ran:
        assert gpu is not None
        return Ran(0, gpu[argv[1]]) if argv[1] in gpu else Ran(9, "no such query")

    return Host(
        system=system,
        arch="x86_64",
        env={},
        run=run,
        which=lambda name: f"/usr/bin/{name}" if gpu is not None else None,
        read=lambda path: files.get(path, ""),
    )


MEMINFO = {"/proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"}


def test_without_a_gpu() -> None:
    assert free_memory(host(MEMINFO)) == (16 * GIB, 0)


def test_gpus_are_added_up() -> None:
    found = free_memory(host(MEMINFO, {"--query-gpu=memory.free": "8192\n16384\n"}))
    assert found.vram == 24 * GIB


def test_what_our_worker_holds_counts_as_free() -> None:
    files = {**MEMINFO, "/proc/42/status": "VmRSS: 9999999 kB\nRssAnon:  1048576 kB\n"}
    gpu = {
        "--query-gpu=memory.free": "1024\n",
        "--query-compute-apps=pid,used_memory": "41, 2048\n42, 4096\n43, [N/A]\n",
    }
    assert free_memory(host(files, gpu), worker=42) == (17 * GIB, 5 * GIB)


def test_a_driver_that_does_not_answer_is_no_gpu() -> None:
    assert free_memory(host(MEMINFO, {})).vram == 0
    assert free_memory(host(MEMINFO, {"--query-gpu=memory.free": "[N/A]\n"})).vram == 0


def test_a_mac_shares_its_memory() -> None:
    found = free_memory(host({}, system="Darwin"))
    assert found.ram > 0
    assert found.vram == 0
