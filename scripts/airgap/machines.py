"""The machine a bundle is for: which wheels pip may take for it, and how it names itself."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# pip takes the first of the tags given that a wheel has, so the oldest glibc comes first: that wheel
# runs on more machines. Below 2.17 nobody builds any more; 2.39 is of 2024.
GLIBC_MINORS = range(17, 40)
OLDEST_PYTHON = (3, 11)
_GLIBC = re.compile(r"manylinux_2_(\d+)_")


@dataclass(frozen=True)
class System:
    """One of the systems localspec runs on."""

    name: str
    sys_platform: str
    platform_system: str
    machine: str
    tags: tuple[str, ...]


def _linux(name: str, machine: str) -> System:
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS]
    return System(name, "linux", "Linux", machine, (*tags, f"manylinux2014_{machine}"))


def _mac(name: str, machine: str) -> System:
    # pip adds the tags of every older macOS by itself.
    return System(name, "darwin", "Darwin", machine, (f"macosx_14_0_{machine}",))


SYSTEMS = {
    system.name: system
    for system in (
        _linux("linux-x86_64", "x86_64"),
        _linux("linux-aarch64", "aarch64"),
        _mac("macos-arm64", "arm64"),
        _mac("macos-x86_64", "x86_64"),
    )
}


@dataclass(frozen=True)
class Machine:
    """A system and a CPython version."""

    system: System
    python: tuple[int, int]

    @property
    def name(self) -> str:
        """As in the archive's name: `linux-x86_64-python3.12`."""
        return f"{self.system.name}-python{self.python_name}"

    @property
    def python_name(self) -> str:
        return f"{self.python[0]}.{self.python[1]}"

    @property
    def pip_options(self) -> list[str]:
        """Options of `pip download` that make it choose for this machine."""
        options = ["--only-binary=:all:", "--implementation=cp"]
        options.append(f"--python-version={self.python_name}")
        abis = (f"cp{self.python[0]}{self.python[1]}", "abi3", "none")
        options += [f"--abi={abi}" for abi in abis]
        return options + [f"--platform={tag}" for tag in self.system.tags]

    @property
    def markers(self) -> dict[str, str]:
        """The environment in which a requirement's marker is judged (PEP 508)."""
        system = self.system
        return {
            "extra": "",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python_name}.0",
            "os_name": "posix",
            "platform_machine": system.machine,
            "platform_python_implementation": "CPython",
            "platform_system": system.platform_system,
            "python_full_version": f"{self.python_name}.0",
            "python_version": self.python_name,
            "sys_platform": system.sys_platform,
        }


def this_machine() -> Machine:
    """Return the machine this runs on; an unknown system counts as Linux on its processor."""
    uname = os.uname()
    for system in SYSTEMS.values():
        if (system.platform_system, system.machine) == (uname.sysname, uname.machine):
            return Machine(system, sys.version_info[:2])
    raise ValueError(f"{platform.platform()} is no system a bundle can be made for")


def parse_python(text: str) -> tuple[int, int]:
    """ "3.12" as (3, 12). Raises ValueError."""
    match = re.fullmatch(r"(\d)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST_PYTHON:
        raise ValueError(f"a Python version from 3.11 on, as in 3.12, not {text}")
    return version


def oldest_glibc(wheels: Sequence[str]) -> str:
    """Return the oldest glibc on which all these wheels work, by their names; "" where none needs one."""
    minors = [min(map(int, versions)) for name in wheels if (versions := _GLIBC.findall(name))]
    return f"2.{max(minors)}" if minors else ""


def facts(machine: Machine, wheels: Sequence[str]) -> Mapping[str, str]:
    """Return what the install script compares with the machine it finds itself on."""
    return {
        "system": machine.system.platform_system,
        "machine": machine.system.machine,
        "python": machine.python_name,
        "glibc": oldest_glibc(wheels),
    }
