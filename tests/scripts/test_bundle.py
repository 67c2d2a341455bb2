"""scripts/bundle: what is in the archive, and that it sets localspec up with the network taken away.

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


# --- packages without an index


def wheel_of(name: str, folder: Path) -> Path:
    """An installed distribution as a wheel again; its files are stored, not packed."""
    found = importlib.metadata.distribution(name)
    told = found.read_text("WHEEL") or ""
    tag = next(line for line in told.splitlines() if line.startswith("Tag: ")).removeprefix("Tag: ")
    info = f"{found.metadata['Name'].replace('-', '_').replace('.', '_')}-{found.version}.dist-info"
    wheel = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    record = io.StringIO()
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in found.files or []:
            own = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
            if file.parts[0] == ".." or file.name in own or file.suffix == ".pyc":
                continue
            inside = str(file)
            if file.parts[0].endswith(".dist-info"):
                inside = "/".join((info, *file.parts[1:]))
            content = Path(str(found.locate_file(file))).read_bytes()
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


def source_of_llama(folder: Path) -> None:
    """An sdist with something of everything that is dropped and kept."""
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


def needed(name: str, seen: set[str]) -> Iterator[str]:
    """A distribution and what it requires here, itself included."""
    if name.lower() in seen:
        return
    seen.add(name.lower())
    yield name
    for text in importlib.metadata.requires(name) or []:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            yield from needed(asked.name, seen)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    seen = {"llama-cpp-python"}
    mine = [name for name in needed("localspec", seen) if name != "localspec"]
    for name in (
        *mine,
        *needed("hatchling", seen),
        *needed("editables", seen),
        *needed("diskcache", seen),
    ):
        wheel_of(name, folder)
    for name, version in (("cmake", "4.0"), ("ninja", "1.13"), ("scikit_build_core", "1.0")):
        empty_wheel(name, version, folder)
    source_of_llama(folder)
    return folder


def without_network(index: Path) -> dict[str, str]:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    return {**os.environ, **offline}


@pytest.fixture(scope="module")
def bundle(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, made by the script itself."""
    output = tmp_path_factory.mktemp("bundle") / "b.tar"
    done = subprocess.run(
        [ROOT / "scripts/bundle", "--fast", "--output", output],
        env=without_network(index),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "install" in done.stderr.splitlines()[-1]
    return output


@pytest.fixture
def unpacked(bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"  # with a space, as people have them
    folder.mkdir()
    with tarfile.open(bundle) as tar:
        tar.extractall(folder, filter="tar")
    return folder / NAME


# --- what is in it


def test_the_source_is_trimmed_and_keeps_its_licences(tmp_path: Path) -> None:
    source_of_llama(tmp_path)
    sdist = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    for name in ("one", "two"):
        archive.trim_sdist(sdist, tmp_path / name, packages.needed_to_build)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with tarfile.open(tmp_path / "one") as tar:
        kept = {name.partition("/")[2] for name in tar.getnames()}
    assert kept == {
        *("PKG-INFO", "pyproject.toml", "backend.py", "LICENSE.md"),
        *("vendor/llama.cpp/LICENSE", "vendor/llama.cpp/licenses/LICENSE-jsonhpp"),
        *("vendor/llama.cpp/ggml/src/ggml.c", "vendor/llama.cpp/src/models/llama.cpp"),
    }


def test_a_tar_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b").write_text("b")
    (folder / "a").write_text("a")
    made = []
    for times in ((1, 1), (9, 9)):
        os.utime(folder / "a", times)
        file = io.BytesIO()
        archive.pack(folder, file, 1_700_000_000, "name")
        made.append(file.getvalue())
    assert made[0] == made[1]
    assert archive.checksums(folder).splitlines()[1].endswith("  sub/b")


def test_wheels_that_only_the_other_machine_needs_are_fetched_too(tmp_path: Path) -> None:
    """pip judges markers by the Python it runs on; the bundle's target has another."""
    empty_wheel("a", "1", tmp_path, 'b>=2; python_version < "3.11.5" or sys_platform == "darwin"')
    have = packages._requirements(tmp_path)
    mac = machines.Machine(machines.SYSTEMS["macos-arm64"], (3, 13))
    linux = machines.Machine(machines.SYSTEMS["linux-x86_64"], (3, 13))
    assert packages._missing(["a"], have, mac.markers) == {"b>=2"}
    assert packages._missing(["a"], have, linux.markers) == set()


def test_the_glibc_needed_is_the_newest_that_any_wheel_asks_for() -> None:
    wheels = ["a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"]
    assert machines.oldest_glibc(wheels) == "2.17"
    wheels.append("b-1-cp39-abi3-manylinux_2_31_x86_64.whl")
    assert machines.oldest_glibc(wheels) == "2.31"
    assert machines.oldest_glibc(["c-1-py3-none-any.whl"]) == ""


@pytest.mark.parametrize("words", [["--python", "3.9"], ["--python", "new"], ["--platform", "dos"]])
def test_a_machine_nobody_can_have_is_a_usage_error(words: list[str]) -> None:
    done = subprocess.run([ROOT / "scripts/bundle", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert words[1] in done.stderr


def test_a_pair_that_is_not_here_is_a_sentence(index: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/bundle", "--pair", "nosuch", "--output", tmp_path / "b"],
        env={**without_network(index), "LOCALSPEC_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "The pair 'nosuch' is not pulled yet" in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- on the other machine


def put_wheel_in_cache(cache: Path) -> None:
    """As if llama.cpp had been built there before."""
    host = machine.Host.current()
    compiler = machine.find_compiler(host)
    assert compiler
    version = setup_venv.llama_version(ROOT / "pyproject.toml")
    plan = machine.plan_build(host, compiler)
    folder = cache / "localspec/wheels" / machine.wheel_key(host, plan, compiler, version)
    folder.mkdir(parents=True)
    wheel_of("llama-cpp-python", folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_installs_and_answers_with_the_network_taken_away(
    unpacked: Path, bundle: Path, tmp_path: Path
) -> None:
    beside = bundle.with_name(f"{bundle.name}.sha256").read_text().split()
    assert beside == [archive.sha256_of(bundle), bundle.name]
    unshare = shutil.which("unshare")
    alone = [unshare or "unshare", "--net", "--map-current-user"]
    if not unshare or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us take the network away")
    put_wheel_in_cache(tmp_path / "cache")
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {"PATH": os.environ["PATH"], "LOCALSPEC_HOME": str(tmp_path / "l")}
    env |= {"PIP_NO_COMPILE": "1"}  # most of what is installed is never imported here
    done = subprocess.run(
        [*alone, sys._base_executable, unpacked / "install"],  # type: ignore[attr-defined]
        env=env,
        capture_output=True,
        text=True,
    )
    localspec = unpacked / ".venv/bin/localspec"
    assert done.returncode == 0, done.stderr
    subprocess.run([localspec, "stop"], env=env, capture_output=True)
    assert "copytree" in done.stdout.split("daemon")[-1]
    assert "localspec setup: ready." in done.stderr
    assert f"ready. The program is {localspec}" in done.stderr
    # Its own packages, and not the ones of this checkout.
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
    done = install(unpacked)
    assert done.returncode == 1
    assert "models.toml is not what was packed" in done.stderr
    assert "LICENSE cannot be read (No such file or directory)" in done.stderr
    assert "unpack it anew" in done.stderr
    assert not (unpacked / ".venv").exists()


def test_without_a_compiler_it_says_so(unpacked: Path) -> None:
    done = install(unpacked)
    assert done.returncode == 1
    assert "there is no working C++ compiler" in done.stderr


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"machine": "riscv64"}, "this bundle is for Linux on riscv64, and this machine is"),
        ({"python": "3.99"}, "this bundle is for Python 3.99, and here is Python 3."),
        ({"glibc": "2.99"}, "need glibc 2.99, and this system has 2."),
    ],
)
def test_another_machine_is_refused_with_the_reason(
    unpacked: Path, facts: dict[str, str], said: str
) -> None:
    import json

    told = json.loads((unpacked / "bundle.json").read_text())
    (unpacked / "bundle.json").write_text(json.dumps({**told, **facts}))
    done = install(unpacked)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_an_old_python_can_read_the_installer_to_its_message() -> None:
    import ast

    ast.parse((ROOT / "scripts/airgap/install").read_text(), feature_version=(3, 7))
