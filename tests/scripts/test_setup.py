"""Tests of scripts/setup and its callers: real runs in a copy of the checkout, with a PATH of its own."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import setup_venv
from localspec import machine
from localspec.machine import BuildPlan, Compiler, Host, read_text, run_command
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
# The Python that a .venv would be made from; this test runs on the .venv's own.
PYTHON = getattr(sys, "_base_executable", sys.executable)


class Checkout:
    """A copy of the files that setup reads, with a PATH that has only the tools of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "path"
        self.bin.mkdir()
        for name in ("pyproject.toml", "localspec/__init__.py"):
            self.copy(name)
        shutil.copytree(ROOT / "localspec/machine", root / "localspec/machine")
        for name in ("setup", "setup_venv.py", "graph_per_width.py", "ask", "test"):
            self.copy(f"scripts/{name}")
        self.tool("python3", PYTHON)
        for name in ("dirname", "readlink"):
            self.tool(name)

    def copy(self, name: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, self.root / name)

    def tool(self, name: str, real: str | None = None) -> None:
        """Put a command of this machine, or a stand-in for one, on the PATH."""
        (self.bin / name).symlink_to(real or shutil.which(name) or "/nonexistent")

    def run(
        self, *argv: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / argv[0]), *argv[1:]],
            cwd=cwd,
            env={"PATH": str(self.bin), "HOME": str(self.root / "home"), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def finish_venv(self, **differences: str) -> None:
        """Make a .venv that passes for one made by setup, except for these entries of its stamp."""
        entry = load_entry(self.root / "scripts/setup")
        binaries = self.root / ".venv/bin"
        binaries.mkdir(parents=True)
        (binaries / "python").symlink_to(PYTHON)
        facts = {**entry.fingerprint(), "extras": "", "flags": "cpu", "cmake_args": "-DX=1"}
        setup_venv.write_stamp(self.root / ".venv/localspec.stamp", {**facts, **differences})


def load_entry(path: Path) -> ModuleType:
    """Return scripts/setup as a module; it has no suffix to import it by."""
    loader = importlib.machinery.SourceFileLoader("localspec_setup_entry", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


# Detecting whether there is anything to do.


def test_a_finished_venv_is_left_alone(checkout: Checkout) -> None:
    checkout.finish_venv()
    run = checkout.run("scripts/setup")
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr == "localspec setup: nothing to do, .venv is up to date.\n"
    assert checkout.run("scripts/setup", "--quiet").stderr == ""


@pytest.mark.parametrize(
    "stamp",
    [
        pytest.param({"root": "'/home/somebody/localspec'"}, id="another folder"),
        pytest.param({"python": "3.11.0"}, id="another Python"),
        pytest.param({"cpu": "x86_64 00000000"}, id="another CPU"),
        pytest.param({"pyproject": "00000000"}, id="other dependencies"),
        pytest.param({"build": "00000000"}, id="other flags"),
    ],
)
def test_a_venv_with_another_stamp_is_out_of_date(
    checkout: Checkout, stamp: dict[str, str]
) -> None:
    checkout.finish_venv(**stamp)
    # Without a compiler, setup ends where its work would begin.
    assert "no working C++ compiler" in checkout.run("scripts/setup").stderr


@pytest.mark.parametrize("name", ["elsewhere", "with blank", "new\nline", "ü=é", "\udcff bytes"])
@pytest.mark.parametrize("transfer", [shutil.copytree, shutil.move])
def test_a_moved_or_copied_checkout_runs_nothing_of_the_old_one(
    tmp_path: Path, name: str, transfer: Callable[..., object]
) -> None:
    old, new = tmp_path / "original", tmp_path / name
    old.mkdir()
    checkout = Checkout(old)
    checkout.finish_venv()
    program = old / ".venv/bin/localspec"
    program.write_text(f"#!/bin/sh\necho the code of {old}\n")
    program.chmod(0o755)
    assert checkout.run("scripts/ask").stdout == f"the code of {old}\n"
    transfer(old, new, symlinks=True) if transfer is shutil.copytree else transfer(old, new)
    checkout.root, checkout.bin = new, new / "path"
    for command in ("scripts/setup", "scripts/ask"):
        run = checkout.run(command)
        # Without a compiler, setup ends where it would begin to rebuild everything.
        assert (run.returncode, run.stdout) == (1, "")
        assert "no working C++ compiler" in run.stderr
    shutil.rmtree(new / ".venv")
    checkout.finish_venv()
    assert "nothing to do" in checkout.run("scripts/setup").stderr


@pytest.mark.parametrize(
    ("stamp", "anew"),
    [
        ({}, False),
        ({"root": "'/elsewhere'"}, True),
        ({"python": "3.1"}, True),
        ({"cpu": "x"}, False),
    ],
)
def test_a_venv_of_another_folder_or_python_is_recreated(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, stamp: dict[str, str], anew: bool
) -> None:
    checkout.finish_venv(**stamp)
    entry = load_entry(checkout.root / "scripts/setup")
    created: list[Path] = []
    installed: list[Path] = []
    monkeypatch.setattr(setup_venv, "make_venv", lambda host, venv: created.append(venv))
    monkeypatch.setattr(setup_venv, "find_compiler", lambda host: Compiler(("c++",), "c++ 99"))
    monkeypatch.setattr(setup_venv, "cache_folder", lambda host: checkout.root / "cache")
    monkeypatch.setattr(setup_venv, "build_wheel", lambda *_: Path("llama.whl"))
    monkeypatch.setattr(setup_venv, "remove_other_build", lambda venv: None)
    monkeypatch.setattr(setup_venv, "install", lambda venv, *_: installed.append(venv))
    setup_venv.refresh(
        setup_venv.Request(
            str(checkout.root), frozenset(), None, False,
            entry.fingerprint, entry.read_stamp, entry.up_to_date,
        )
    )  # fmt: skip
    venv = checkout.root / ".venv"
    assert (created, installed) == ([venv] if anew else [], [venv])
    assert entry.up_to_date(entry.read_stamp(), set(), None)


@pytest.mark.parametrize("cuda", [True, False])
def test_a_graph_per_width_is_built_for_cuda_alone_until_all_is_chosen_afresh(
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: bool,
) -> None:
    checkout.finish_venv()
    entry, built = load_entry(checkout.root / "scripts/setup"), list[tuple[str, bool]]()

    def build(*arguments: object) -> Path:
        built.append((str(arguments[-2]), arguments[-1] is True))
        return Path("llama.whl")

    plan = BuildPlan("cuda", "-DGGML_CUDA=ON", ()) if cuda else BuildPlan("cpu", "", ())
    monkeypatch.setattr(machine, "plan_build", lambda *_: plan)
    monkeypatch.setattr(setup_venv, "find_compiler", lambda host: Compiler(("c++",), "c++ 99"))
    monkeypatch.setattr(setup_venv, "build_wheel", build)
    for name in ("make_venv", "remove_other_build", "install"):
        monkeypatch.setattr(setup_venv, name, lambda *_: None)
    facts = entry.fingerprint, entry.read_stamp, entry.up_to_date
    for again, asked in ((True, True), (False, False), (True, False)):
        root = str(checkout.root)
        setup_venv.refresh(setup_venv.Request(root, frozenset(), None, again, *facts, asked))
    assert [graphs for _, graphs in built] == [cuda, cuda, False]
    folders = [folder for folder, _ in built]
    assert folders[0] == folders[1]
    assert (folders[0] == folders[2]) != cuda
    assert ("--graph-per-width is for CUDA only" in capsys.readouterr().err) != cuda


def test_a_venv_without_a_stamp_is_not_complete(checkout: Checkout) -> None:
    checkout.finish_venv()
    (checkout.root / ".venv/localspec.stamp").unlink()
    assert checkout.run("scripts/setup", "--quiet").returncode == 1


def test_extras_are_kept_and_a_missing_one_is_installed(checkout: Checkout) -> None:
    checkout.finish_venv(extras="test")
    assert checkout.run("scripts/setup").returncode == 0
    assert checkout.run("scripts/setup", "test").returncode == 0
    assert "no working C++ compiler" in checkout.run("scripts/setup", "train").stderr


def test_build_flags_hold_until_others_are_set(checkout: Checkout) -> None:
    checkout.finish_venv(flags="user")
    assert checkout.run("scripts/setup").returncode == 0
    assert checkout.run("scripts/setup", CMAKE_ARGS="-DX=1").returncode == 0
    assert checkout.run("scripts/setup", CMAKE_ARGS="-DX=2").returncode == 1


def test_the_check_imports_nothing_slow(checkout: Checkout) -> None:
    """`scripts/ask` makes this check before each question."""
    checkout.finish_venv()
    python, setup = checkout.root / ".venv/bin/python", checkout.root / "scripts/setup"
    run = subprocess.run(
        [python, "-IS", "-X", "importtime", setup, "--quiet"],
        env={name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "zlib" in imported
    assert not imported & {"setup_venv", "subprocess", "shutil", "pathlib", "json", "re", "tomllib"}


def test_every_extra_of_the_project_can_be_set_up(checkout: Checkout) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run = checkout.run("scripts/setup", "--help")
    [listed] = re.findall(r"^  EXTRA +(.+): what else", run.stdout, re.MULTILINE)
    assert listed.split(", ") == sorted(project["optional-dependencies"])
    checkout.finish_venv()
    for extra in project["optional-dependencies"]:  # known, and only a compiler is missing
        assert "no working C++ compiler" in checkout.run("scripts/setup", extra).stderr, extra


# What a new user may lack.


def test_a_missing_compiler_is_named(checkout: Checkout) -> None:
    checkout.tool("apt-get", "/bin/true")
    run = checkout.run("scripts/setup")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "localspec setup: there is no working C++ compiler, "
        "and llama.cpp is built on the machine it runs on. "
        "Run `sudo apt-get install build-essential`, then run this again.\n"
    )
    assert not (checkout.root / ".venv").exists()


def test_a_broken_cxx_is_named(checkout: Checkout) -> None:
    run = checkout.run("scripts/setup", CXX="no-such-compiler")
    assert run.stderr == (
        "localspec setup: CXX is `no-such-compiler`, and that makes no C++ program. "
        "Correct or unset CXX.\n"
    )


def test_a_python_without_venv_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Debian the module is a package of its own."""
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    host = Host("Linux", "x86_64", {}, run_command, {"apt-get": "/apt-get"}.get, read_text)
    package = f"python3.{sys.version_info.minor}-venv"
    with pytest.raises(setup_venv.SetupError, match=f"Run `sudo apt-get install {package}`"):
        setup_venv.make_venv(host, tmp_path / ".venv")


def test_ask_prints_no_answer_if_setup_failed(checkout: Checkout) -> None:
    run = checkout.run("scripts/ask", "hello")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no working C++ compiler" in run.stderr


def test_an_unknown_option_or_extra_is_a_usage_error(checkout: Checkout) -> None:
    for word in ("--agian", "tests"):
        run = checkout.run("scripts/setup", word)
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr.startswith("usage: scripts/setup")


def test_an_old_python_can_parse_the_script() -> None:
    import ast

    ast.parse((ROOT / "scripts/setup").read_text(), feature_version=(3, 7))


@pytest.mark.slow
def test_a_setup_that_fails_leaves_no_venv_that_looks_complete(checkout: Checkout) -> None:
    for name in ("c++", "as", "ld"):
        checkout.tool(name)
    run = checkout.run("scripts/setup", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert run.returncode == 1
    assert "building llama.cpp, once for this machine failed.\n" in run.stderr
    assert "No matching distribution found" in run.stderr
    log = run.stderr.rsplit("The whole output: ", 1)[1].strip()
    assert "llama-cpp-python" in Path(log).read_text()
    assert not (checkout.root / ".venv/localspec.stamp").exists()
    assert not list(Path(log).parent.glob("*.whl"))


# The script ask.


def test_ask_passes_its_arguments_on_from_any_folder(checkout: Checkout, tmp_path: Path) -> None:
    checkout.finish_venv()
    program = checkout.root / ".venv/bin/localspec"
    program.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\nexit 7\n')
    program.chmod(0o755)
    (tmp_path / "linked-ask").symlink_to(checkout.root / "scripts/ask")
    elsewhere = tmp_path / "some where"
    elsewhere.mkdir()
    run = checkout.run("linked-ask", "-u", "two  words", "*", cwd=elsewhere)
    assert run.stdout == "<ask>\n<-u>\n<two  words>\n<*>\n"
    assert (run.returncode, run.stderr) == (7, "")


# Running long commands.


@pytest.mark.parametrize(
    ("output", "step"),
    [
        ("[1/140] c++ a\n  [26/140] c++ b\nwarning: [x]\n", "26/140"),
        ("[ 12%] Building CXX object\n", "12%"),
        ("Collecting click [1/2]\n", None),
    ],
)
def test_progress_is_read_from_the_output_of_the_build(output: str, step: str | None) -> None:
    assert setup_venv.last_step(output) == step


@pytest.mark.parametrize(
    ("output", "cure"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "Memory ran out."),
        ("OSError: [Errno 28] No space left on device", "The disk is full."),
        ("Failed to establish a new connection: [Errno 101]", "The package index cannot be"),
        ("nvcc fatal : Unsupported gpu architecture", "The CUDA compiler does not work here."),
        ("x.cpp:1: error: no", "The lines above, or the log, tell the cause."),
    ],
)
def test_a_failure_shows_its_line_its_cure_and_the_log(
    tmp_path: Path, output: str, cure: str
) -> None:
    log = tmp_path / "build.log"
    log.write_text(f"much\nado\n{output}\nabout\n× Building wheel did not run successfully.\n")
    explanation = setup_venv.explain("building", log)
    assert f"building failed.\n    {output}\n{cure}" in explanation
    assert "ado" not in explanation
    assert explanation.endswith(f"The whole output: {log}")


WHILE_IT_STARTS = """\
class Stopped(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        began = pathlib.Path({!r})
        while not (began.exists() and began.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Stopped
"""


@pytest.mark.parametrize("moment", ["", WHILE_IT_STARTS], ids=["at work", "starting"])
def test_a_stop_reaches_the_child_processes(tmp_path: Path, moment: str) -> None:
    """A child of the command is gone after setup was stopped."""
    began = tmp_path / "began"
    program = (
        "import os, pathlib, signal, subprocess, sys, time, setup_venv\n"
        "from pathlib import Path\n"
        f"{moment.format(str(began))}"
        "signal.signal(signal.SIGTERM, setup_venv._interrupt)\n"
        f"setup_venv.run_logged('x', ['sh', '-c', 'sleep 3600 & echo $! > {began}; wait'], "
        f"Path({str(tmp_path / 'log')!r}), {{'PATH': '/usr/bin:/bin'}})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE
    while not (began.exists() and began.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=PATIENCE)
    child = int(began.read_text())
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process still runs; a zombie does not."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return status.stdout.strip()[:1] not in ("", "Z")


def test_a_second_setup_waits_for_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\nsys.stdin.read(1)",
            str(lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout
        assert holder.stdin
        holder.stdout.readline()
        threading.Timer(0.3, holder.stdin.close).start()
        with setup_venv.locked(lock, "the other one"):
            assert holder.stdin.closed
    assert capsys.readouterr().err == "localspec setup: waiting for the other one to end.\n"
