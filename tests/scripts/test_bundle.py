"""Tests of scripts/bundle: the contents of the archive, and an installation without a network.

The packages come from the ones installed in .venv, written back as wheels: nothing is downloaded and
llama.cpp is not built. Its source and the build tools are stand-ins, which an install that finds the
wheel of this machine in the cache never opens.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import localspec
import setup_venv
from airgap import archive, machines, packages
from localspec import machine

ROOT = Path(__file__).parents[2]
NAME = f"localspec-{localspec.__version__}-{machines.this_machine().name}"
BACKEND = """
import os, zipfile
def _info(folder):
    info = os.path.join(folder, "llama_cpp_python-0.3.36.dist-info")
    os.makedirs(info)
    with open(os.path.join(info, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: 0.3.36\\n")
    return "llama_cpp_python-0.3.36.dist-info"
def prepare_metadata_for_build_wheel(folder, settings=None):
    return _info(folder)
def build_wheel(folder, settings=None, metadata=None):
    raise SystemExit("this is not the source of llama.cpp")
"""


# Packages without an index.


def rebuild_wheel(name: str, folder: Path) -> Path:
    """Write an installed distribution as a wheel again; its files are stored, not compressed."""
    distribution = importlib.metadata.distribution(name)
    wheel_metadata = distribution.read_text("WHEEL") or ""
    tag_line = next(line for line in wheel_metadata.splitlines() if line.startswith("Tag: "))
    tag = tag_line.removeprefix("Tag: ")
    stem = distribution.metadata["Name"].replace("-", "_").replace(".", "_")
    info = f"{stem}-{distribution.version}.dist-info"
    wheel = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    record = io.StringIO()
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in distribution.files or []:
            own = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
            if file.parts[0] == ".." or file.name in own or file.suffix == ".pyc":
                continue
            inside = str(file)
            if file.parts[0].endswith(".dist-info"):
                inside = "/".join((info, *file.parts[1:]))
            content = Path(str(distribution.locate_file(file))).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            csv.writer(record).writerow([inside, f"sha256={digest.decode()}", len(content)])
            packed.writestr(inside, content)
        packed.writestr(f"{info}/RECORD", f"{record.getvalue()}{info}/RECORD,,\n")
    return wheel


def empty_wheel(name: str, version: str, folder: Path, requires: str = "") -> None:
    stem = f"{name}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        need = f"Requires-Dist: {requires}\n" if requires else ""
        wheel.writestr(
            f"{stem}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{need}",
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def write_llama_sdist(folder: Path) -> None:
    """Write an sdist with an example of everything that is dropped and of everything that stays."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\n"
        "Requires-Dist: diskcache>=5.6.1\n",
        "pyproject.toml": '[build-system]\nrequires = ["scikit-build-core>=0.9"]\n'
        'build-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
        "LICENSE.md": "MIT",
        ".git/objects/pack": "x" * 1000,
        "docs/index.md": "x",
        "vendor/llama.cpp/LICENSE": "MIT",
        "vendor/llama.cpp/licenses/LICENSE-jsonhpp": "MIT",
        "vendor/llama.cpp/ggml/src/ggml.c": "int x;",
        "vendor/llama.cpp/src/models/llama.cpp": "int y;",
        "vendor/llama.cpp/models/ggml-vocab.gguf": "x" * 1000,
        "vendor/llama.cpp/tools/ui/index.html": "<html>",
        "vendor/llama.cpp/media/logo.png": "x",
    }
    with tarfile.open(folder / "llama_cpp_python-0.3.36.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}")
            entry.size = len(content.encode())
            tar.addfile(entry, io.BytesIO(content.encode()))


def list_requirements(name: str, visited: set[str]) -> Iterator[str]:
    """Yield a distribution and what it requires, itself included."""
    if name.lower() in visited:
        return
    visited.add(name.lower())
    yield name
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from list_requirements(requirement.name, visited)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    visited = {"llama-cpp-python"}
    names = [name for name in list_requirements("localspec", visited) if name != "localspec"]
    for name in (
        *names,
        *list_requirements("hatchling", visited),
        *list_requirements("editables", visited),
        *list_requirements("diskcache", visited),
    ):
        rebuild_wheel(name, folder)
    for name, version in (("cmake", "4.0"), ("ninja", "1.13"), ("scikit_build_core", "1.0")):
        empty_wheel(name, version, folder)
    write_llama_sdist(folder)
    return folder


def without_network(index: Path) -> dict[str, str]:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    return {**os.environ, **offline}


@pytest.fixture(scope="module")
def bundle(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script, and return the archive."""
    output = tmp_path_factory.mktemp("bundle") / "b.tar"
    run = subprocess.run(
        [ROOT / "scripts/bundle", "--fast", "--output", output],
        env=without_network(index),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "install" in run.stderr.splitlines()[-1]
    return output


@pytest.fixture
def unpacked(bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"  # with a space, as users have them
    folder.mkdir()
    with tarfile.open(bundle) as tar:
        tar.extractall(folder, filter="tar")
    return folder / NAME


# The contents of a bundle.


def test_the_source_is_trimmed_and_keeps_its_licences(tmp_path: Path) -> None:
    write_llama_sdist(tmp_path)
    sdist = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    for name in ("one", "two"):
        archive.trim_sdist(sdist, tmp_path / name, packages.needed_to_build)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names == {
        *("PKG-INFO", "pyproject.toml", "backend.py", "LICENSE.md"),
        *("vendor/llama.cpp/LICENSE", "vendor/llama.cpp/licenses/LICENSE-jsonhpp"),
        *("vendor/llama.cpp/ggml/src/ggml.c", "vendor/llama.cpp/src/models/llama.cpp"),
    }


def test_a_tar_is_reproducible(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b").write_text("b")
    (folder / "a").write_text("a")
    archives = []
    for times in ((1, 1), (9, 9)):
        os.utime(folder / "a", times)
        file = io.BytesIO()
        archive.pack(folder, file, 1_700_000_000, "name")
        archives.append(file.getvalue())
    assert archives[0] == archives[1]
    assert archive.checksums(folder).splitlines()[1].endswith("  sub/b")


def test_wheels_for_the_target_machine_only_are_fetched_too(tmp_path: Path) -> None:
    """pip judges markers by the Python it runs on; the bundle's target has another."""
    empty_wheel("a", "1", tmp_path, 'b>=2; python_version < "3.11.5" or sys_platform == "darwin"')
    have = packages._requirements(tmp_path)
    mac = machines.Machine(machines.SYSTEMS["macos-arm64"], (3, 13))
    linux = machines.Machine(machines.SYSTEMS["linux-x86_64"], (3, 13))
    assert packages._missing(["a"], have, mac.markers) == {"b>=2"}
    assert packages._missing(["a"], have, linux.markers) == set()


def test_the_needed_glibc_is_the_newest_of_all_wheels() -> None:
    wheels = ["a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"]
    assert machines.oldest_glibc(wheels) == "2.17"
    wheels.append("b-1-cp39-abi3-manylinux_2_31_x86_64.whl")
    assert machines.oldest_glibc(wheels) == "2.31"
    assert machines.oldest_glibc(["c-1-py3-none-any.whl"]) == ""


@pytest.mark.parametrize("words", [["--python", "3.9"], ["--python", "new"], ["--platform", "dos"]])
def test_an_unsupported_machine_is_a_usage_error(words: list[str]) -> None:
    run = subprocess.run([ROOT / "scripts/bundle", *words], capture_output=True, text=True)
    assert run.returncode == 2
    assert words[1] in run.stderr


def test_a_missing_pair_is_named(index: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [ROOT / "scripts/bundle", "--pair", "nosuch", "--output", tmp_path / "b"],
        env={**without_network(index), "LOCALSPEC_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "The pair 'nosuch' is not pulled yet" in run.stderr
    assert list(tmp_path.iterdir()) == []


# Installing on the other machine.


def put_wheel_in_cache(cache: Path) -> None:
    """Put a wheel of llama.cpp into the cache, as after an earlier build."""
    host = machine.Host.current()
    compiler = machine.find_compiler(host)
    assert compiler
    version = setup_venv.llama_version(ROOT / "pyproject.toml")
    plan = machine.plan_build(host, compiler)
    folder = cache / "localspec/wheels" / machine.wheel_key(host, plan, compiler, version)
    folder.mkdir(parents=True)
    rebuild_wheel("llama-cpp-python", folder)


@pytest.mark.slow
def test_a_bundle_installs_and_answers_without_a_network(
    unpacked: Path, bundle: Path, tmp_path: Path
) -> None:
    checksum = bundle.with_name(f"{bundle.name}.sha256").read_text().split()
    assert checksum == [archive.sha256_of(bundle), bundle.name]
    unshare = shutil.which("unshare")
    without_net = [unshare or "unshare", "--net", "--map-current-user"]
    if not unshare or subprocess.run([*without_net, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us take the network away")
    put_wheel_in_cache(tmp_path / "cache")
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"PATH": os.environ["PATH"], "LOCALSPEC_HOME": str(tmp_path / "l")}
    env |= {"PIP_NO_COMPILE": "1"}  # most installed modules are never imported here
    run = subprocess.run(
        [*without_net, sys._base_executable, unpacked / "install"],  # type: ignore[attr-defined]
        env=env,
        capture_output=True,
        text=True,
    )
    localspec = unpacked / ".venv/bin/localspec"
    assert run.returncode == 0, run.stderr
    subprocess.run([localspec, "stop"], env=env, capture_output=True)
    assert "copytree" in run.stdout.split("daemon")[-1]
    assert "localspec setup: ready." in run.stderr
    assert f"ready. The program is {localspec}" in run.stderr
    # It uses its own packages, not those of this checkout.
    where = "import localspec, llama_cpp; print(localspec.__file__, llama_cpp.__file__)"
    python = unpacked / ".venv/bin/python"
    places = subprocess.run(
        [python, "-c", where], cwd=tmp_path, env=env, capture_output=True, text=True
    ).stdout
    assert places.count(str(unpacked)) == 2


def install(unpacked: Path, *words: str) -> subprocess.CompletedProcess[str]:
    python = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run(
        [python, unpacked / "install", *words],
        env={"PATH": "/nonexistent", "HOME": str(unpacked)},
        capture_output=True,
        text=True,
    )


def test_a_damaged_or_missing_file_is_named(unpacked: Path) -> None:
    with (unpacked / "models.toml").open("a") as file:
        file.write("#")
    (unpacked / "LICENSE").unlink()
    run = install(unpacked)
    assert run.returncode == 1
    assert "models.toml is not what was packed" in run.stderr
    assert "LICENSE cannot be read (No such file or directory)" in run.stderr
    assert "unpack it anew" in run.stderr
    assert not (unpacked / ".venv").exists()


def test_a_missing_compiler_is_named(unpacked: Path) -> None:
    run = install(unpacked)
    assert run.returncode == 1
    assert "there is no working C++ compiler" in run.stderr


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"machine": "riscv64"}, "this bundle is for Linux on riscv64, and this machine is"),
        ({"python": "3.99"}, "this bundle is for Python 3.99, and here is Python 3."),
        ({"glibc": "2.99"}, "need glibc 2.99, and this system has 2."),
    ],
)
def test_another_machine_is_refused_with_the_reason(
    unpacked: Path, facts: dict[str, str], message: str
) -> None:
    import json

    bundle_facts = json.loads((unpacked / "bundle.json").read_text())
    (unpacked / "bundle.json").write_text(json.dumps({**bundle_facts, **facts}))
    run = install(unpacked)
    assert (run.returncode, run.stdout) == (1, "")
    assert message in run.stderr


def test_an_old_python_can_parse_the_installer() -> None:
    import ast

    ast.parse((ROOT / "scripts/airgap/install").read_text(), feature_version=(3, 7))
