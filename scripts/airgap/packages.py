"""The Python packages of a bundle: wheels for another machine, and llama-cpp-python's source."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from airgap.archive import trim_sdist, unpack_wheel
from airgap.machines import Machine

ENGINE = "llama-cpp-python"
# What build backends ask for while they build: llama.cpp's where the system has none, and ours for an
# editable install.
BUILD_TOOLS = ("cmake", "ninja", "editables~=0.3")
# Of llama-cpp-python's source the build reads the rest; licences stay with what they belong to.
NOT_BUILT = (".git", ".github", "docker", "docs", "examples", "scripts", "tests")
NOT_BUILT_OF_LLAMA = (
    *(".git", ".github", ".devops", ".gemini", ".pi"),
    *("app", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "media", "models"),
    *("pocs", "requirements", "scripts", "skills", "tests", "tools"),
)
DROPPED = (*NOT_BUILT, *(f"vendor/llama.cpp/{name}" for name in NOT_BUILT_OF_LLAMA))


class BundleError(Exception):
    """What is wrong and what to do, in sentences."""


def needed_to_build(path: str) -> bool:
    """Whether a build of the Python package reads this file of its source."""
    return not any(path == name or path.startswith(f"{name}/") for name in DROPPED)


def collect(root: Path, folder: Path, machine: Machine) -> list[str]:
    """Fill `folder` with every package that scripts/setup will ask pip for, and name the wheels.

    Raises:
        BundleError: pip found no wheel for that machine, or cannot reach its index.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    requirements: list[str] = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
    ]
    (engine,) = (text for text in requirements if text.startswith(f"{ENGINE}=="))
    sdist = _source(engine, folder)
    packages = [text for text in requirements if text != engine]
    packages += [*BUILD_TOOLS, *_asked_by_source(sdist)]
    _download(packages, folder, machine)
    _complete(packages, folder, machine)
    trimmed = sdist.with_suffix(".trimmed")
    trim_sdist(sdist, trimmed, needed_to_build)
    trimmed.replace(sdist)
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        unpack_wheel(wheel)
    return [wheel.name for wheel in wheels]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    done = subprocess.run(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        message = "\n".join(lines or done.stdout.splitlines()[-5:])
        raise BundleError(
            f"pip cannot get the packages:\n{message}\nCheck the network and its settings."
        )


def _source(requirement: str, folder: Path) -> Path:
    _pip("--no-deps", f"--no-binary={ENGINE}", "--no-cache-dir", f"--dest={folder}", requirement)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def _asked_by_source(sdist: Path) -> Iterator[str]:
    """Yield what llama-cpp-python needs to be built, and to run, by its own files."""
    with tarfile.open(sdist) as tar:
        top = tar.next()
        assert top is not None
        folder = top.name.partition("/")[0]
        project = tar.extractfile(f"{folder}/pyproject.toml")
        info = tar.extractfile(f"{folder}/PKG-INFO")
        assert project is not None
        assert info is not None
        yield from tomllib.loads(project.read().decode())["build-system"]["requires"]
        needs = BytesParser().parsebytes(info.read()).get_all("Requires-Dist", [])
        yield from (need for need in needs if "extra ==" not in need)


def _download(requirements: Sequence[str], folder: Path, machine: Machine) -> None:
    _pip(*machine.pip_options, f"--dest={folder}", f"--find-links={folder}", *requirements)


def _complete(requirements: Sequence[str], folder: Path, machine: Machine) -> None:
    """Fetch what is missing still: pip judges markers by the Python that runs it, not by the target."""
    while missing := _missing(requirements, _requirements(folder), machine.markers):
        _download(sorted(missing), folder, machine)


def _requirements(folder: Path) -> dict[str, list[Requirement]]:
    """Canonical name of each wheel → what it requires."""
    requirements = {}
    for wheel in folder.glob("*.whl"):
        name = parse_wheel_filename(wheel.name)[0]
        with zipfile.ZipFile(wheel) as content:
            (entry,) = (text for text in content.namelist() if text.endswith(".dist-info/METADATA"))
            metadata = BytesParser().parsebytes(content.read(entry))
        requirements[str(name)] = [
            Requirement(text) for text in metadata.get_all("Requires-Dist", [])
        ]
    return requirements


def _missing(
    requirements: Sequence[str],
    have: Mapping[str, Sequence[Requirement]],
    markers: Mapping[str, str],
) -> set[str]:
    """Return requirements that hold on the target machine and that no wheel here meets by its name."""
    missing: set[str] = set()
    visited: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**markers, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in have:
            missing.add(f"{requirement.name}{requirement.specifier}")
            continue
        for part in ("", *requirement.extras):
            if (name, part) not in visited:
                visited.add((name, part))
                waiting += [(need, part) for need in have[name]]
    return missing
